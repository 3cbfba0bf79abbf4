"""What the Space expects at other loads is what the engine's scheduler would do there, and asking changes nothing."""

import numpy as np
import pytest

from foresight import Foresight, lengths_by_load
from hf_dspark import CallSetting, CausalGreedy, ConfidenceThreshold, FixedLength
from hf_dspark.auto import Auto
from hf_dspark.round_cost import RoundCost
from tests.reference import TableProfile

K = 4
STEEP = RoundCost(TableProfile([0.01 + 0.004 * tokens for tokens in range(1, 99)]), refine=False)
FLAT = RoundCost(TableProfile([0.05 + 0.0001 * tokens for tokens in range(1, 99)]), refine=False)
NEWEST = [(0.9, 0.8, 0.6, 0.4), (0.7, 0.5, 0.5, 0.3), (0.95, 0.9, 0.9, 0.8), (0.3, 0.3, 0.3, 0.3)]


def at_loads(scheduler, newest=NEWEST, most_rows=8):
    return lengths_by_load(scheduler, newest, context=10.0, most_rows=most_rows)


def call(cost):
    return Auto().for_call(CallSetting(K, cost, (0.7,) * K, drains=False))


def test_where_tokens_cost_time_a_busier_engine_checks_fewer_drafts():
    lengths = at_loads(call(STEEP))
    assert len(lengths) == 8 and lengths[0] > lengths[-1] >= 0
    assert all(earlier >= later - 0.3 for earlier, later in zip(lengths, lengths[1:], strict=False))
    assert min(at_loads(call(FLAT))) > max(lengths[1:]), "and where they are free, most of them"


def test_where_no_draft_pays_plain_decoding_is_expected():
    assert at_loads(call(STEEP), [(0.02,) * K] * 4) == [0.0] * 8


def test_schedules_that_know_no_load_expect_the_same_everywhere():
    assert at_loads(FixedLength(3)) == [3.0] * 8
    lengths = at_loads(ConfidenceThreshold(0.5), most_rows=2)
    assert lengths == [(3 + 3 + 4 + 0) / 4] * 2, "of all four blocks, at either load"
    greedy = at_loads(CausalGreedy().for_call(CallSetting(K, STEEP, None, drains=False)))
    assert greedy[0] > greedy[-1]


def test_blocks_cut_short_by_the_end_of_a_text_do_not_count():
    assert at_loads(FixedLength(), [*NEWEST, (0.9,)]) == at_loads(FixedLength()) == [4.0] * 8
    assert at_loads(FixedLength(), []) == at_loads(FixedLength(), [()]) == []


def test_a_forecast_is_made_once_a_second_for_all_who_look(monkeypatch):
    clock, setting = [100.0], {"context": 10.0, "most_rows": 2}
    monkeypatch.setattr("foresight.time.monotonic", lambda: clock[0])
    foresight = Foresight()
    assert foresight.lengths(FixedLength(3), NEWEST, **setting) == [3.0] * 2
    assert foresight.lengths(FixedLength(1), NEWEST, **setting) == [3.0] * 2
    clock[0] += 1.0
    assert foresight.lengths(FixedLength(1), NEWEST, **setting) == [1.0] * 2


def test_asking_leaves_the_schedule_as_it_is():
    scheduler = call(STEEP)
    scheduler.rate = 1.5
    before = {name: np.copy(value) for name, value in vars(scheduler.outlook).items()}
    first = at_loads(scheduler)
    assert scheduler.rate == 1.5 and at_loads(scheduler) == first
    for name, value in vars(scheduler.outlook).items():
        assert np.array_equal(value, before[name]), name
    assert scheduler.gain == pytest.approx(1)
