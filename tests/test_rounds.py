"""Records and figures of decoding, against values worked out by hand."""

import json
import math
import pickle
from dataclasses import asdict

import pytest

from hf_dspark.rounds import DecodingRound, DecodingStats


def decoding_round(row, step, verify_length, num_accepted, *, kept=None, draft_seconds=0.25, verify_seconds=0.75):
    drafts = (11, 12, 13, 14)
    committed = (*drafts[:num_accepted], 99)
    return DecodingRound(
        row=row,
        step=step,
        anchor_id=10,
        draft_ids=drafts,
        confidence=(),
        verify_length=verify_length,
        num_accepted=num_accepted,
        next_id=99,
        committed_ids=committed if kept is None else committed[:kept],
        batch_tokens=8,
        draft_seconds=draft_seconds,
        verify_seconds=verify_seconds,
    )


ROUNDS = [
    decoding_round(0, 0, verify_length=4, num_accepted=4),
    decoding_round(1, 0, verify_length=2, num_accepted=1),
    decoding_round(0, 1, verify_length=3, num_accepted=0, draft_seconds=0.5),
    decoding_round(1, 1, verify_length=0, num_accepted=0, draft_seconds=0.5),
    decoding_round(1, 2, verify_length=4, num_accepted=3, kept=2),
]


def test_figures_of_a_ragged_run():
    stats = DecodingStats(ROUNDS)
    assert stats.num_rounds == 5
    assert stats.accepted_length == pytest.approx((5 + 2 + 1 + 1 + 2) / 5)
    assert stats.mean_verify_length == pytest.approx(13 / 5)
    assert stats.verify_rate == pytest.approx(8 / 13)


def test_acceptance_per_position_counts_rounds_that_verified_it():
    stats = DecodingStats(ROUNDS)
    assert [stats.acceptance_rate_at(k) for k in (1, 2, 3, 4)] == pytest.approx([3 / 4, 2 / 4, 2 / 3, 1 / 2])


def test_conditional_acceptance_counts_rounds_that_reached_the_position():
    stats = DecodingStats(ROUNDS)
    assert [stats.conditional_acceptance_at(k) for k in (1, 2, 3, 4)] == pytest.approx([3 / 4, 2 / 3, 2 / 2, 1 / 2])


def test_the_seconds_of_a_step_are_counted_once():
    assert DecodingStats(ROUNDS).tokens_per_second == pytest.approx(11 / (1.0 + 1.25 + 1.0))


def test_rounds_of_several_runs_can_be_pooled():
    again = [decoding_round(0, 0, verify_length=4, num_accepted=4, verify_seconds=0.5)]
    assert DecodingStats(ROUNDS + again).tokens_per_second == pytest.approx(16 / (3.25 + 0.75))


def test_without_rounds_every_figure_is_nan():
    stats = DecodingStats([])
    assert stats.num_rounds == 0
    assert str(stats) == "no rounds"
    figures = [stats.accepted_length, stats.mean_verify_length, stats.verify_rate, stats.tokens_per_second]
    assert all(math.isnan(figure) for figure in (*figures, stats.acceptance_rate_at(1)))
    assert math.isnan(DecodingStats(ROUNDS).conditional_acceptance_at(5))


def test_the_summary_is_one_line():
    assert str(DecodingStats(ROUNDS)) == (
        "5 rounds, accepted length 2.20, 2.60 drafts verified per round, 61.5% of them accepted, 3.4 tokens/s"
    )
    assert "\n" not in str(DecodingStats(ROUNDS[3:4]))


def test_positions_count_from_one():
    for rate in (DecodingStats(ROUNDS).acceptance_rate_at, DecodingStats(ROUNDS).conditional_acceptance_at):
        with pytest.raises(ValueError, match="count from 1"):
            rate(0)


def test_rounds_survive_pickle_and_json():
    assert pickle.loads(pickle.dumps(ROUNDS)) == ROUNDS
    assert json.loads(json.dumps(asdict(ROUNDS[0])))["committed_ids"] == [11, 12, 13, 14, 99]
    assert DecodingStats(pickle.loads(pickle.dumps(ROUNDS))) == DecodingStats(ROUNDS)
