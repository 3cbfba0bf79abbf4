"""The parity check finds rounding where there is only rounding, and a wrong forward where there is one."""

import copy

import pytest
import torch

from hf_dspark import parity
from hf_dspark.parity import ParityReport, PathParity, check_parity
from tests.tiny import PAD_ID, VOCAB_SIZE, tiny_target


def ragged_prompts():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, VOCAB_SIZE, (3, 9), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :8] = mask[1, :4] = 0
    return ids.masked_fill(mask == 0, PAD_ID), mask


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma2", "deepseek_v3"])
def test_in_float32_packed_scoring_chooses_the_same_tokens(family):
    ids, mask = ragged_prompts()
    report = check_parity(tiny_target(family), ids, attention_mask=mask, max_new_tokens=24)
    assert report.identical
    assert report.num_tokens == 3 * 23
    assert report.dtype == "float32"
    for path in (report.step_by_step, report.in_blocks):
        assert path.first_flip is None and path.flip_margin is None
        assert path.max_logit_difference < 1e-4


def test_without_a_mask_nothing_is_padding():
    ids, _ = ragged_prompts()
    assert check_parity(tiny_target("qwen3"), ids, max_new_tokens=5).identical


def test_in_bfloat16_a_flip_is_a_near_tie():
    target = copy.deepcopy(tiny_target("qwen3")).bfloat16()
    ids, mask = ragged_prompts()
    report = check_parity(target, ids, attention_mask=mask, max_new_tokens=64)
    assert report.dtype == "bfloat16"
    for path in (report.step_by_step, report.in_blocks):
        assert path.max_logit_difference < 0.2
        assert path.first_flip is None or path.flip_margin <= 2 * path.max_logit_difference


def test_a_forward_at_wrong_positions_is_found(monkeypatch):
    real_forward, first_wrong = parity.packed_forward, 4

    def shifted(model, input_ids, position_ids, *, cache, layout):
        late = (position_ids >= ids.shape[1] + first_wrong).long()
        return real_forward(model, input_ids, position_ids + 3 * late, cache=cache, layout=layout)

    monkeypatch.setattr(parity, "packed_forward", shifted)
    ids = torch.randint(2, VOCAB_SIZE, (1, 5), generator=torch.Generator().manual_seed(1))
    target = tiny_target("qwen3")
    report = check_parity(target, ids, max_new_tokens=24)
    assert not report.identical
    row, token = report.in_blocks.first_flip
    assert row == 0
    assert token > first_wrong  # the logits of a token come from the forward of the one before
    assert report.in_blocks.max_logit_difference > 0.1
    plain = target.generate(ids, max_new_tokens=24, do_sample=False, return_dict_in_generate=True, output_logits=True)
    best, second = plain.logits[token][0].topk(2).values.tolist()
    assert report.in_blocks.flip_margin == pytest.approx(best - second)


def test_an_end_of_sequence_does_not_end_the_check():
    ids, mask = ragged_prompts()
    target = tiny_target("qwen3")
    second_token = int(target.generate(ids, attention_mask=mask, max_new_tokens=2, do_sample=False)[0, -1])
    stopping = tiny_target("qwen3", eos_token_id=second_token)
    before = stopping.generation_config.to_dict()
    assert check_parity(stopping, ids, attention_mask=mask, max_new_tokens=12).num_tokens == 3 * 11
    assert stopping.generation_config.to_dict() == before


@pytest.mark.parametrize("family", ["qwen3_5", "bloom"])
def test_a_target_that_cannot_run_packed_is_refused_with_the_reason(family):
    ids, _ = ragged_prompts()
    with pytest.raises(NotImplementedError, match="cannot run packed: "):
        check_parity(tiny_target(family), ids)


def test_a_single_new_token_leaves_nothing_to_compare():
    with pytest.raises(ValueError, match="2 or more"):
        check_parity(tiny_target("qwen3"), torch.ones(1, 3, dtype=torch.long), max_new_tokens=1)


def test_the_report_says_what_a_reader_needs():
    same = PathParity(max_logit_difference=1.2e-6, first_flip=None, flip_margin=None)
    flipped = PathParity(max_logit_difference=0.0312, first_flip=(1, 17), flip_margin=0.0078)
    assert str(ParityReport(63, "float32", same, same)).startswith("identical on 63 tokens in float32")
    text = str(ParityReport(63, "bfloat16", same, flipped))
    assert text.startswith("not identical")
    assert "token 17 of row 1" in text and "0.0078 apart" in text and "0.0312" in text
