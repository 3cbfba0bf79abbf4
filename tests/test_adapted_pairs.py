"""Targets that are subclassed, adapted, quantised or offloaded, and quantised drafters: the text is plain's."""

import logging
import warnings

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    pipeline,
)

from hf_dspark import DSparkDrafter
from tests.drafters import assert_drafted, left_padded, oracle, tiny_drafter
from tests.tiny import PAD_ID, tiny_target

WIDE = dict(hidden_size=64, head_dim=16, intermediate_size=64)
"""A tiny target, and a drafter's layers, of sizes that 4-bit kernels take: multiples of 64, or of 32 for outputs."""

QUANTIZATIONS = {
    # Without outlier columns: which columns those are depends on all tokens of a forward, so with them even plain
    # generate writes other text in a batch than row by row.
    "8 bit": dict(load_in_8bit=True, llm_int8_threshold=0.0),
    "4 bit": dict(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("target")
    tiny_target("llama", **WIDE).save_pretrained(path)
    return path


@pytest.fixture(params=QUANTIZATIONS)
def quantization(request):
    pytest.importorskip("bitsandbytes", reason="the extra `quant` (bitsandbytes) is not installed")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it tells of every cast to float16
    return BitsAndBytesConfig(**QUANTIZATIONS[request.param])


def assert_plain_text(target, drafter, *, lengths=(3, 9), max_new_tokens=12):
    """Greedy text with the drafter, drafting as it does and always right, is plain generate's of the same target."""
    inputs = left_padded(list(lengths))
    options = {"max_new_tokens": max_new_tokens, "do_sample": False}
    plain = target.generate(**inputs, **options)
    for view in (drafter, oracle(drafter, plain)):
        output = target.generate(**inputs, assistant_model=view, return_dict_in_generate=True, **options)
        assert torch.equal(output.sequences, plain)
        assert_drafted(output.rounds)
    assert output.stats.verify_rate > 0.9  # the last view was always right, and reached the packed engine as such
    return plain


class Subclass(LlamaForCausalLM):
    """A target with a `generate` of its own."""

    def generate(self, *args, **kwargs):
        return super().generate(*args, **kwargs)


def test_a_subclassed_target_decodes_as_plain(folder):
    assert_plain_text(Subclass.from_pretrained(folder), tiny_drafter(tiny_target("llama", **WIDE)))


@pytest.mark.parametrize("modules", [["q_proj", "v_proj"], ["q_proj", "embed_tokens", "lm_head"]], ids=" ".join)
def test_a_lora_target_decodes_as_plain_through_the_wrapper_and_through_its_base(folder, modules):
    peft = pytest.importorskip("peft")
    base = LlamaForCausalLM.from_pretrained(folder)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=modules, init_lora_weights=False)
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers for a deprecated property
        torch.manual_seed(0)
        adapted = peft.get_peft_model(base, config).eval()
    drafter = tiny_drafter(tiny_target("llama", **WIDE))
    through_wrapper = assert_plain_text(adapted, drafter)
    assert torch.equal(assert_plain_text(adapted.get_base_model(), drafter), through_wrapper)
    unadapted = tiny_target("llama", **WIDE).generate(**left_padded([3, 9]), max_new_tokens=12, do_sample=False)
    assert not torch.equal(through_wrapper, unadapted)


def test_a_quantised_target_decodes_as_plain(folder, quantization):
    target = AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization, dtype=torch.float32)
    drafter = tiny_drafter(tiny_target("llama", **WIDE))
    assert_plain_text(target, drafter)
    whole, quantised = drafter.memory_report(tiny_target("llama", **WIDE)), drafter.memory_report(target)
    assert quantised.target_weight_bytes < whole.target_weight_bytes
    assert quantised.saved_bytes == whole.saved_bytes
    assert quantised.target_cache_bytes_per_1k_tokens == whole.target_cache_bytes_per_1k_tokens


@pytest.mark.parametrize("head", ["vanilla", "gated"])
def test_a_quantised_drafter_drafts_for_its_target(tmp_path, quantization, head):
    target = tiny_target("llama", **WIDE)
    overrides = {"draft_top_k": 9} if head == "vanilla" else {}
    whole = tiny_drafter(target, head_dim=16, intermediate_size=64, markov_rank=64, markov_head_type=head, **overrides)
    whole.save_pretrained(tmp_path)
    drafter = DSparkDrafter.from_pretrained(tmp_path, quantization_config=quantization, dtype=torch.float32).eval()
    assert not drafter.fc.weight.is_floating_point()
    assert drafter.confidence_head.proj.weight.is_floating_point()
    assert_plain_text(target, drafter)
    smaller, larger = drafter.memory_report(target), whole.memory_report(target)
    assert smaller.drafter_weight_bytes < larger.drafter_weight_bytes


@pytest.mark.parametrize("places", ["some layers and the head", "everything"])
def test_a_target_offloaded_to_disk_decodes_as_plain(folder, tmp_path, places):
    in_memory = ["model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb"]
    split = dict.fromkeys(in_memory, "cpu") | dict.fromkeys(["model.layers.1", "model.layers.2", "lm_head"], "disk")
    target = AutoModelForCausalLM.from_pretrained(
        folder,
        device_map={"": "disk"} if places == "everything" else split,
        offload_folder=tmp_path,
        dtype=torch.float32,
    )
    assert target.lm_head.weight.device.type == "meta"
    drafter = tiny_drafter(tiny_target("llama", **WIDE))
    text = assert_plain_text(target, drafter)
    expected = tiny_target("llama", **WIDE).generate(**left_padded([3, 9]), max_new_tokens=12, do_sample=False)
    assert torch.equal(text, expected)
    assert drafter.memory_report(target) == drafter.memory_report(tiny_target("llama", **WIDE))


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {f"w{i}": i for i in range(tiny_target("llama").config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=f"w{PAD_ID}", padding_side="left")


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_text_generation_pipeline_takes_a_drafter(tokenizer, batch_size):
    target, rounds = tiny_target("llama"), []
    prompts = ["w5 w6 w7", "w9", "w11 w12 w13 w14 w15", "w8 w8"]
    options = {"max_new_tokens": 12, "do_sample": False, "batch_size": batch_size}
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)(prompts, **options)
    drafter = tiny_drafter(target).with_options(on_round=rounds.append)
    drafting = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=drafter)
    assert drafting(prompts, **options) == plain
    assert drafting(prompts[0], **options) == plain[0]
    assert_drafted(rounds)
    assert {r.row for r in rounds} == set(range(batch_size))
