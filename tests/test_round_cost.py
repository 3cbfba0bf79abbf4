"""Predicted round times: the profile at first, then what the machine does."""

import gc
import math
import threading
import weakref

import numpy as np
import pytest
from torch import nn

from hf_dspark import round_cost
from hf_dspark.round_cost import (
    FIRST_PLAIN,
    KIND_SHARE,
    LARGEST_SURPRISE,
    PLAIN_EVERY,
    SIZE_SHARE,
    SPEED_SHARE,
    RoundCost,
    shared_cost,
)
from hf_dspark.sps_profile import DraftPoint, LoopPoint, SPSProfile, VerifyPoint
from tests.reference import TableProfile

STAIRS = TableProfile([0.066, 0.11, 0.115, 0.118, 0.12, 0.12, 0.121, 0.122, 0.2, 0.21], draft_seconds=0.01)
MEASURED = SPSProfile(
    block_size=7,
    verify_points=tuple(
        VerifyPoint(tokens, rows, context, (seconds * (1 + context / 4096),))
        for context in (128, 1024)
        for tokens, rows, seconds in [(1, 1, 0.066), (2, 1, 0.11), (8, 1, 0.12), (16, 2, 0.13), (32, 4, 0.17)]
    ),
    draft_points=(DraftPoint(1, 128, (0.01, 0.012, 0.011)), DraftPoint(4, 128, (0.02,))),
    loop_points=(LoopPoint(1, (0.002,)), LoopPoint(4, (0.004,))),
)


@pytest.mark.parametrize("profile", [STAIRS, MEASURED], ids=["table", "measured"])
@pytest.mark.parametrize("num_rows", [1, 4])
def test_before_anything_was_seen_predictions_are_the_profiles(profile, num_rows):
    cost, context = RoundCost(profile), 640.0
    table = cost.seconds(num_rows, 7, context)
    assert table.shape == (num_rows * 7 + 1,)
    for verified, seconds in enumerate(table):
        expected = profile.round_seconds(num_rows + verified, context=context, num_requests=num_rows, drafted=True)
        assert seconds == pytest.approx(expected)
        assert cost.predict(num_rows, verified, context, drafted=True) == pytest.approx(expected)
    plain = profile.round_seconds(num_rows, context=context, num_requests=num_rows, drafted=False)
    assert cost.plain_seconds(num_rows, context) == cost.predict(num_rows, 0, context, drafted=False)
    assert cost.plain_seconds(num_rows, context) == pytest.approx(plain)
    assert plain < table[0]


def test_longer_context_costs_more_and_every_number_of_rows_has_its_table():
    cost = RoundCost(MEASURED)
    assert cost.seconds(2, 7, 900.0)[3] > cost.seconds(2, 7, 200.0)[3] != cost.seconds(3, 7, 200.0)[3]
    np.testing.assert_array_equal(cost.seconds(2, 7, 200.0), cost.seconds(2, 7, 200.0))


@pytest.mark.parametrize("slowdown", [1.5, 1 / 1.5])
def test_a_machine_that_is_slower_at_all_sizes_is_followed_within_15_percent_after_30_rounds(slowdown):
    cost, draw = RoundCost(STAIRS), np.random.default_rng(0)
    for _ in range(30):
        verified, drafted = int(draw.integers(0, 8)), bool(draw.random() < 0.8)
        truth = slowdown * STAIRS.round_seconds(1 + verified * drafted, drafted=drafted)
        noisy = truth * math.exp(0.1 * draw.standard_normal())
        cost.observe(1, verified * drafted, 0.0, noisy, drafted=drafted)
    truth = slowdown * np.array([STAIRS.round_seconds(1 + n) for n in range(8)])
    assert (abs(np.log(cost.seconds(1, 7, 0.0) / truth)) < math.log(1.15)).all()
    plain = slowdown * STAIRS.round_seconds(1, drafted=False)
    assert cost.plain_seconds(1, 0.0) == pytest.approx(plain, rel=0.15)


def test_predictions_get_better_with_every_round_of_a_size():
    cost, errors = RoundCost(STAIRS), []
    for _ in range(40):
        errors.append(abs(math.log(0.3 / cost.predict(1, 4, 0.0, drafted=True))))
        cost.observe(1, 4, 0.0, 0.3, drafted=True)
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.5
    assert errors[-1] < 0.01


@pytest.mark.parametrize("seconds", [1e4, 1e-9, math.inf])
def test_one_outlier_moves_no_prediction_by_more_than_its_share(seconds):
    cost = RoundCost(STAIRS)
    before = cost.seconds(1, 7, 0.0)
    cost.observe(1, 3, 0.0, seconds, drafted=True)
    moved = np.log(cost.seconds(1, 7, 0.0) / before)
    sign = 1 if seconds > 1 else -1
    others = SPEED_SHARE + KIND_SHARE
    own = others + SIZE_SHARE
    assert moved[3] == pytest.approx(sign * own * LARGEST_SURPRISE)
    assert moved[[0, 7]] == pytest.approx([sign * others * LARGEST_SURPRISE] * 2)
    assert own * LARGEST_SURPRISE < math.log(1.3)


def test_sizes_learn_separately_and_so_do_rounds_without_drafts():
    cost = RoundCost(STAIRS)
    before, plain = cost.seconds(1, 7, 0.0), cost.plain_seconds(1, 0.0)
    for _ in range(60):
        for verified, factor in ((0, 1.0), (3, 1.6), (7, 1.0)):
            cost.observe(1, verified, 0.0, factor * before[verified], drafted=True)
        cost.observe(1, 0, 0.0, 0.8 * plain, drafted=False)
    ratio = cost.seconds(1, 7, 0.0) / before
    assert ratio[[0, 3, 7]] == pytest.approx([1, 1.6, 1], rel=0.05)
    assert cost.plain_seconds(1, 0.0) / plain == pytest.approx(0.8, rel=0.05)


def test_what_was_learned_holds_for_every_number_of_rows_and_context():
    cost = RoundCost(MEASURED)
    before = cost.seconds(4, 7, 700.0)[4]
    for _ in range(30):
        cost.observe(1, 7, 128.0, 2 * cost.profile.round_seconds(8, context=128, num_requests=1), drafted=True)
    assert cost.seconds(4, 7, 700.0)[4] > 1.6 * before  # 8 tokens too, of four rows


@pytest.mark.parametrize("seconds", [math.nan, 0.0, -1.0])
def test_rounds_without_a_duration_teach_nothing(seconds):
    cost = RoundCost(STAIRS)
    before = cost.seconds(1, 7, 0.0)
    cost.observe(1, 3, 0.0, seconds, drafted=True)
    np.testing.assert_array_equal(cost.seconds(1, 7, 0.0), before)


def test_a_cost_that_is_not_refined_never_changes():
    cost = RoundCost(STAIRS, refine=False)
    before = cost.seconds(1, 7, 0.0)
    for verified in range(8):
        cost.observe(1, verified, 0.0, 5.0, drafted=True)
    np.testing.assert_array_equal(cost.seconds(1, 7, 0.0), before)


def test_a_table_that_was_handed_out_is_the_callers_own():
    cost = RoundCost(STAIRS)
    cost.seconds(1, 7, 0.0)[:] = 0
    assert (cost.seconds(1, 7, 0.0) > 0).all()


def test_no_more_tables_are_kept_than_allowed(monkeypatch):
    monkeypatch.setattr(round_cost, "MOST_TABLES", 4)
    cost = RoundCost(STAIRS)
    first = cost.seconds(1, 3, 0.0)
    for num_rows in range(1, 20):
        cost.seconds(num_rows, 3, 0.0)
        assert len(cost._tables) <= 4
    np.testing.assert_array_equal(cost.seconds(1, 3, 0.0), first)


def test_eight_threads_may_learn_and_ask_at_once(monkeypatch):
    monkeypatch.setattr(round_cost, "MOST_TABLES", 4)
    cost, failures, start = RoundCost(STAIRS), [], threading.Barrier(8)

    def work(number):
        start.wait()
        try:
            for turn in range(300):
                num_rows = 1 + (number + turn) % 9
                cost.observe(num_rows, turn % 4, 0.0, 0.2, drafted=turn % 2 == 0)
                assert np.isfinite(cost.seconds(num_rows, 3, 0.0)).all()
                assert len(cost.seconds(num_rows, 3, 0.0)) == 3 * num_rows + 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    # All rounds took 0.2 s; those of 10 tokens and more are charged alike, so they all are known well.
    assert cost.predict(9, 2, 0.0, drafted=True) == pytest.approx(0.2, rel=0.2)


def test_a_target_and_a_profile_share_one_cost_and_others_have_their_own():
    target, other, profile = nn.Linear(1, 1), nn.Linear(1, 1), TableProfile([1.0])
    cost = shared_cost(target, profile)
    assert shared_cost(target, profile) is cost
    assert shared_cost(other, profile) is not cost
    assert shared_cost(target, TableProfile([1.0])) is not cost
    assert cost.profile is profile
    assert cost.refine


def test_costs_do_not_keep_their_target():
    target = nn.Linear(1, 1)
    cost, gone = weakref.ref(shared_cost(target, TableProfile([1.0]))), weakref.ref(target)
    del target
    gc.collect()
    assert gone() is None
    assert cost() is None


def test_plain_rounds_fall_due_while_everything_drafts():
    cost = RoundCost(STAIRS)

    def rounds_until_due():
        for count in range(1000):
            if cost.plain_is_due(1):
                return count
            cost.observe(1, 3, 0.0, 1.0, drafted=True)

    assert rounds_until_due() == FIRST_PLAIN
    cost.observe(1, 0, 0.0, 1.0, drafted=False)
    assert rounds_until_due() == PLAIN_EVERY
    fixed = RoundCost(STAIRS, refine=False)
    for _ in range(2 * PLAIN_EVERY):
        fixed.observe(1, 3, 0.0, 1.0, drafted=True)
    assert not fixed.plain_is_due(1)


def test_where_drafting_gains_little_plain_rounds_fall_due_more_often():
    cost = RoundCost(STAIRS)
    cost.observe(1, 0, 0.0, 1.0, drafted=False)
    due = {}
    for count in range(PLAIN_EVERY + 1):
        for gain in (0.9, 1.0, 1.5, 2.0, 9.0):
            if cost.plain_is_due(1, gain):
                due.setdefault(gain, count)
        cost.observe(1, 3, 0.0, 1.0, drafted=True)
    assert due == {0.9: FIRST_PLAIN, 1.0: FIRST_PLAIN, 1.5: PLAIN_EVERY // 2, 2.0: PLAIN_EVERY, 9.0: PLAIN_EVERY}


def test_a_round_that_drafts_for_nothing_takes_longer_than_a_plain_one():
    cost = RoundCost(STAIRS)
    for _ in range(20):  # a slow phase, in which only plain rounds are seen
        cost.observe(1, 0, 0.0, 0.2, drafted=False)
    for _ in range(20):
        cost.observe(1, 0, 0.0, 0.076, drafted=True)
    assert cost.predict(1, 0, 0.0, drafted=True) > 1.08 * cost.plain_seconds(1, 0.0)


def test_drafting_is_never_thought_to_save_time():
    cost = RoundCost(TableProfile([1.0, 1.0]))
    for _ in range(100):
        cost.observe(1, 0, 0.0, 0.2, drafted=True)
    assert cost.plain_seconds(1, 0.0) <= cost.predict(1, 0, 0.0, drafted=True)


def test_rounds_that_contradict_each_other_are_learned_all_the_same():
    cost = RoundCost(STAIRS)  # drafting takes 10 ms, it says, but here all rounds take as long
    for _ in range(300):
        cost.observe(1, 0, 0.0, 0.2, drafted=False)
        for verified in (0, 2, 5):
            cost.observe(1, verified, 0.0, 0.2, drafted=True)
    for verified in (0, 2, 5):
        assert cost.predict(1, verified, 0.0, drafted=True) == pytest.approx(0.2, rel=0.03)
    assert 0.15 < cost.plain_seconds(1, 0.0) < 0.2
    for _ in range(30):  # and nothing has piled up: what really happens is learned as soon as ever
        cost.observe(1, 0, 0.0, 0.066, drafted=False)
        for verified in (0, 2, 5):
            cost.observe(1, verified, 0.0, STAIRS.round_seconds(1 + verified), drafted=True)
    assert cost.plain_seconds(1, 0.0) == pytest.approx(0.066, rel=0.05)
    for verified in (0, 2, 5):
        assert cost.predict(1, verified, 0.0, drafted=True) == pytest.approx(
            STAIRS.round_seconds(1 + verified), rel=0.05
        )


def test_what_all_rounds_with_drafts_cost_more_is_learned_within_a_few_of_them():
    cost = RoundCost(STAIRS)
    before, plain = cost.seconds(1, 7, 0.0), cost.plain_seconds(1, 0.0)
    for verified in (3, 6, 3, 6, 3, 6):
        cost.observe(1, verified, 0.0, 1.3 * before[verified], drafted=True)
        cost.observe(1, 0, 0.0, plain, drafted=False)
    assert cost.seconds(1, 7, 0.0)[7] / before[7] > 1.1  # a size that was not seen
    assert cost.plain_seconds(1, 0.0) / plain == pytest.approx(1, rel=0.05)


def test_sampling_learns_apart_from_greedy_decoding():
    target, profile = nn.Linear(1, 1), TableProfile([1.0, 1.0])
    greedy, sampling = shared_cost(target, profile), shared_cost(target, profile, do_sample=True)
    assert greedy is not sampling
    assert sampling is shared_cost(target, profile, do_sample=True)
    sampling.observe(1, 1, 0.0, 2.0, drafted=True)
    assert greedy.predict(1, 1, 0.0, drafted=True) == 1.0 < sampling.predict(1, 1, 0.0, drafted=True)
