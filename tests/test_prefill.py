"""Prefill: batches that are mostly padding are read row by row, with the same result as at once."""

import pytest
import torch
from transformers import DynamicCache

from hf_dspark import FixedLength, prefill
from hf_dspark.prefill import is_mostly_padding
from tests.drafters import generate, left_padded, tiny_drafter
from tests.tiny import FAMILIES, PAD_ID, tiny_target

RAGGED, EVEN = [1, 3, 9, 17], [15, 16, 16, 17]


@pytest.fixture
def read_by_row(monkeypatch):
    """How many rows were read on their own."""
    read, original = [], prefill.prefill_by_rows

    def counted(view, input_ids, model_kwargs):
        read.extend(range(len(input_ids)))
        return original(view, input_ids, model_kwargs)

    monkeypatch.setattr(prefill, "prefill_by_rows", counted)
    return read


def outcome(target, lengths, **kwargs):
    drafter = tiny_drafter(target).with_options(scheduler=FixedLength())
    return generate(target, left_padded(lengths), drafter, max_new_tokens=12, return_dict_in_generate=True, **kwargs)


@pytest.mark.parametrize("chunk", [4, 512])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_rows_read_one_by_one_give_what_the_whole_batch_gives(family, chunk, read_by_row, monkeypatch):
    target = tiny_target(family)
    monkeypatch.setattr(prefill, "CHUNK", chunk)
    by_row = outcome(target, RAGGED)
    assert len(read_by_row) == len(RAGGED)
    monkeypatch.setattr(prefill, "MOST_PADDING", 1.0)
    at_once = outcome(target, RAGGED)
    assert len(read_by_row) == len(RAGGED)
    assert by_row.sequences.equal(at_once.sequences)
    assert [(r.row, r.draft_ids, r.committed_ids) for r in by_row.rounds] == [
        (r.row, r.draft_ids, r.committed_ids) for r in at_once.rounds
    ]


def test_the_cache_that_is_given_back_goes_on_alike(read_by_row):
    target = tiny_target("qwen3")
    inputs = left_padded(RAGGED)
    first = outcome(target, RAGGED)
    assert read_by_row
    mask = torch.cat([inputs["attention_mask"], torch.ones(len(RAGGED), 12, dtype=torch.long)], dim=1)
    more = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": PAD_ID}
    on_kept = target.generate(first.sequences, cache=first.cache, **more)
    assert on_kept.equal(target.generate(first.sequences, **more))


def test_scores_of_the_first_token_are_those_of_the_batch(read_by_row, monkeypatch):
    target = tiny_target("llama")
    by_row = outcome(target, RAGGED, output_scores=True, output_logits=True)
    assert read_by_row
    monkeypatch.setattr(prefill, "MOST_PADDING", 1.0)
    at_once = outcome(target, RAGGED, output_scores=True, output_logits=True)
    for own, other in zip(by_row.scores + by_row.logits, at_once.scores + at_once.logits, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("lengths", "kwargs"),
    [(EVEN, {}), ([17], {}), (RAGGED, {"output_hidden_states": True}), (RAGGED, {"cache": "own"})],
    ids=["hardly any padding", "one row", "hidden states wanted", "a cache of the caller, empty"],
)
def test_who_is_read_by_row(lengths, kwargs, read_by_row):
    if "cache" in kwargs:
        kwargs = {"cache": DynamicCache(config=tiny_target("qwen3").config)}
    outcome(tiny_target("qwen3"), lengths, **kwargs)
    assert bool(read_by_row) is ("cache" in kwargs)


def test_what_counts_as_padding():
    ids = torch.zeros(2, 8, dtype=torch.long)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, :4] = 0  # a quarter
    cache = DynamicCache()
    assert not is_mostly_padding(ids, {"cache": cache, "attention_mask": mask})
    on_meta = {"cache": cache, "attention_mask": mask.to("meta")}
    assert not is_mostly_padding(ids.to("meta"), on_meta)
    mask[1, 4] = 0
    assert is_mostly_padding(ids, {"cache": cache, "attention_mask": mask})
    assert not is_mostly_padding(ids, {"cache": cache, "attention_mask": None})
    assert not is_mostly_padding(ids, {"cache": cache, "attention_mask": mask, "inputs_embeds": torch.zeros(2, 8, 4)})


@pytest.mark.parametrize(
    "mask",
    [[[1] * 12, [0] * 12], [[0] * 12, [1] * 12], [[1] * 12, [1] * 3 + [0] * 9]],
    ids=["a last row without tokens", "a first row without tokens", "padded on the right"],
)
def test_rows_that_do_not_end_with_a_token_are_read_as_plain_generate_reads_them(mask, read_by_row):
    target = tiny_target("llama")
    ids = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": torch.tensor(mask)}
    drafter = tiny_drafter(target).with_options(scheduler=FixedLength())
    first = generate(target, inputs, drafter, max_new_tokens=1).sequences
    assert not read_by_row
    assert first.equal(target.generate(**inputs, do_sample=False, max_new_tokens=1, pad_token_id=PAD_ID))
