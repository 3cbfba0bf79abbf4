"""The memory report counts what decoding allocates, on any device, and what lending saves."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_dspark.decoding import Decoder
from hf_dspark.memory_report import TOKENS, weight_bytes
from tests.drafters import AUTOREGRESSIVE, generate, left_padded, tiny_drafter
from tests.tiny import FAMILIES, tiny_target


def slab_bytes(cache):
    return sum(slab.numel() * slab.element_size() for layer in cache.layers for slab in layer.slabs)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [*((family, {}) for family in FAMILIES), ("qwen3", AUTOREGRESSIVE), ("gemma4", {"backbone": "gemma4"})],
    ids=[*FAMILIES, "autoregressive", "gemma4 drafter"],
)
def test_caches_of_the_report_are_those_that_decoding_allocates(family, overrides, monkeypatch):
    target, caches, original = tiny_target(family), [], Decoder.run

    def watched(self):
        output = original(self)
        caches.append((self.cache, self.session.cache))
        return output

    monkeypatch.setattr(Decoder, "run", watched)
    drafter = tiny_drafter(target, **overrides)
    generate(target, left_padded([20, 20]), drafter, max_new_tokens=10)
    report, ((target_cache, drafter_cache),) = drafter.memory_report(target), caches
    capacity = target_cache.layers[0].slabs[0].shape[2]
    assert slab_bytes(target_cache) * TOKENS == report.target_cache_bytes_per_1k_tokens * 2 * capacity
    drafter_capacity = drafter_cache.layers[0].slabs[0].shape[2]
    assert slab_bytes(drafter_cache) * TOKENS == report.drafter_cache_bytes_per_1k_tokens * 2 * drafter_capacity


def test_weights_are_counted_in_their_dtype_and_tied_ones_once():
    tied = tiny_target("llama", tie_word_embeddings=True)
    untied = tiny_target("llama")
    assert weight_bytes(untied) - weight_bytes(tied) == 64 * 32 * 4
    drafter = tiny_drafter(untied)
    assert weight_bytes(drafter) == sum(t.numel() * 4 for t in drafter.state_dict().values()) + weight_bytes(
        drafter.rotary_emb
    )


def test_sharing_saves_a_table_and_a_head_in_the_drafters_dtype():
    target, table = tiny_target("llama"), 64 * 32 * 4
    report = tiny_drafter(target).memory_report(target)
    assert (report.shared_embedding_bytes, report.shared_head_bytes, report.saved_bytes) == (table, table, 2 * table)
    assert tiny_drafter(target).bfloat16().memory_report(target).saved_bytes == table
    assert tiny_drafter(target, draft_vocab_size=16).memory_report(target).shared_head_bytes == 0
    tied = tiny_target("llama", tie_word_embeddings=True)
    assert tiny_drafter(tied).memory_report(tied).saved_bytes == table


def test_models_without_weights_in_memory_are_counted_in_full():
    config = LlamaConfig(num_hidden_layers=2, vocab_size=128256, max_position_embeddings=2**20)
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        drafter = tiny_drafter(target, target_layer_ids=[0], num_target_layers=2)
    report = drafter.memory_report(target)
    assert report.target_weight_bytes > 2 * sum(p.numel() for p in target.parameters())
    assert report.target_cache_bytes_per_1k_tokens == 2 * 2 * 32 * 128 * 2 * TOKENS
    assert report.saved_bytes == 2 * 128256 * 4096 * 2


def test_a_report_does_not_touch_the_target_or_the_random_generator():
    target = tiny_target("qwen3")
    before, state = target.config.to_dict(), torch.get_rng_state()
    tiny_drafter(target).memory_report(target)
    assert target.config.to_dict() == before and torch.equal(torch.get_rng_state(), state)


def test_the_report_prints_as_a_table():
    target = tiny_target("qwen3")
    report = tiny_drafter(target).memory_report(target)
    lines = str(report).splitlines()
    assert [line.split("  ")[0] for line in lines[1:]] == [
        "weights",
        "cache, 1k tokens of a row",
        "saved by sharing embeddings",
        "saved by sharing the LM head",
    ]
    assert len({len(line) for line in lines}) == 1


def test_a_drafter_of_another_target_is_refused():
    with pytest.raises(ValueError, match="target_hidden_size"):
        tiny_drafter(tiny_target("qwen3")).memory_report(tiny_target("qwen3", hidden_size=64))
