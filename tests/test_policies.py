"""Policies that weigh drafts against costs: optimal where they promise it, and sensible everywhere else."""

import copy
import itertools
import math
import pickle
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dspark import round_cost
from hf_dspark.auto import Auto
from hf_dspark.outlook import Outlook
from hf_dspark.policies import CausalGreedy, LaggedBudget, Lookahead, Ranking, lower_envelope
from hf_dspark.round_cost import RoundCost
from hf_dspark.scheduling import CallSetting, FixedLength, RoundOutcome, ScheduleRequest
from tests.drafters import assert_drafted, generate, k_oracle, left_padded, tiny_drafter
from tests.reference import TableProfile, most_tokens, slow_lower_envelope
from tests.tiny import tiny_target

COSTED = [CausalGreedy(), CausalGreedy(envelope=True), LaggedBudget(1), LaggedBudget(2), Lookahead(), Auto()]
each_policy = pytest.mark.parametrize("policy", COSTED, ids=str)
SEEDS = range(1000)
# One token 66 ms, two 150, eight 160, then another step: the first draft of a row never pays by itself, seven do.
CLIFF = TableProfile([66, 150, 152, 154, 156, 158, 159, 160, *[230] * 8, *[300] * 50])


def call_of(policy, profile, num_drafts, acceptance=None):
    return policy.for_call(CallSetting(num_drafts, RoundCost(profile), acceptance))


def request(confidence, max_lengths=None, rows=None, step=0):
    table = torch.as_tensor(np.asarray(confidence), dtype=torch.float32)
    limits = [table.shape[1]] * len(table) if max_lengths is None else list(max_lengths)
    return ScheduleRequest(table, limits, range(len(table)) if rows is None else rows, step)


def finish(call, asked, lengths, accepted=None, first_stands=None):
    accepted = lengths if accepted is None else accepted
    call.observe(RoundOutcome(asked, len(lengths), lengths, accepted, 1.0, first_stands))


class Case:
    """A random round: confidences, limits, and a staircase of costs for 1..R * (K + 1) tokens."""

    def __init__(self, seed, num_rows=None, num_drafts=None):
        draw = np.random.default_rng(seed)
        self.num_rows = num_rows or int(draw.integers(1, 9))
        self.num_drafts = num_drafts or int(draw.integers(1, 8))
        shape = (self.num_rows, self.num_drafts)
        self.confidence = draw.random(shape).astype(np.float32) ** draw.choice([0.2, 0.5, 1.0])
        short = draw.integers(0, self.num_drafts + 1, self.num_rows)
        self.limits = np.where(draw.random(self.num_rows) < 0.7, self.num_drafts, short).tolist()
        rises = draw.exponential(size=self.num_rows * (self.num_drafts + 1)) * draw.choice([0.02, 0.1, 0.4])
        self.steps = 1 + (rises * (draw.random(len(rises)) < draw.choice([0.15, 0.5, 1.0]))).cumsum()
        self.profile = TableProfile(self.steps)
        self.seconds = self.steps[self.num_rows - 1 :]  # by admitted drafts

    @property
    def ranking(self):
        return Ranking.of(self.confidence, self.limits)

    @property
    def survival(self):
        return self.confidence.astype(np.float64).cumprod(axis=1)

    def tokens(self, lengths):
        """Expected tokens of a round with these verify lengths."""
        return sum(1 + own[:length].sum() for own, length in zip(self.survival, lengths, strict=True))

    @property
    def most_tokens(self):
        return np.array(most_tokens(self.survival.tolist(), self.limits))


# --------------------------------------------------------------------------------------- the order of admission


def test_sharing_drafts_between_rows_one_by_one_finds_the_best_of_all_length_vectors():
    """The reference for larger batches, against every vector there is."""
    for seed in range(60):
        case = Case(seed, num_rows=1 + seed % 3, num_drafts=1 + seed % 4)
        best = [-math.inf] * (sum(case.limits) + 1)
        for lengths in itertools.product(*(range(limit + 1) for limit in case.limits)):
            best[sum(lengths)] = max(best[sum(lengths)], case.tokens(lengths))
        assert case.most_tokens == pytest.approx(best)


def test_the_first_n_of_the_ranking_are_the_best_n_drafts_of_a_batch():
    for seed in SEEDS[:150]:
        case = Case(seed)
        for count in range(len(case.ranking.rows) + 1):
            lengths = case.ranking.lengths(count)
            assert sum(lengths) == count
            assert all(length <= limit for length, limit in zip(lengths, case.limits, strict=True))
            assert case.tokens(lengths) == pytest.approx(case.most_tokens[count])


def test_ties_are_admitted_by_row_and_then_by_position():
    ranking = Ranking.of(np.array([[0.5, 1.0, 0.5], [0.9, 0.5, 1.0], [0.5, 0.5, 1.0]]), [3, 3, 3])
    order = [ranking.lengths(count) for count in range(len(ranking.rows) + 1)]
    admitted = [next(r for r in range(3) if b[r] > a[r]) for a, b in itertools.pairwise(order)]
    # survivals: 0.5 0.5 0.25 | 0.9 0.45 0.45 | 0.5 0.25 0.25
    assert admitted == [1, 0, 0, 2, 1, 1, 0, 2, 2]


def test_drafts_that_cannot_survive_are_not_ranked():
    table = np.array([[0.5, 0.0, 0.9], [math.nan, 0.9, 0.9], [0.9, 0.9, math.nan]])
    ranking = Ranking.of(table, [3, 3, 1])
    assert ranking.lengths(len(ranking.rows)) == [1, 0, 1]


def test_the_best_throughput_of_the_ranking_is_that_of_all_length_vectors():
    for seed in SEEDS:
        case = Case(seed)
        throughput = case.ranking.throughput(case.seconds)
        count = int(throughput.argmax())
        best = (case.most_tokens / case.seconds[: len(case.most_tokens)]).max()
        assert throughput[count] == pytest.approx(best, rel=1e-12)
        assert case.tokens(case.ranking.lengths(count)) / case.seconds[count] == pytest.approx(best, rel=1e-12)


# -------------------------------------------------------------------------------------------------- CausalGreedy


def throughput_of(case, lengths, seconds):
    return case.tokens(lengths) / seconds[sum(lengths)]


def test_the_walk_on_the_envelope_is_the_optimum_for_the_envelopes_cost():
    for seed in SEEDS:
        case = Case(seed)
        lengths = call_of(CausalGreedy(envelope=True), case.profile, case.num_drafts).verify_lengths(
            request(case.confidence, case.limits)
        )
        envelope = np.array(slow_lower_envelope(case.seconds.tolist()))
        best = (case.most_tokens / envelope[: len(case.most_tokens)]).max()
        assert throughput_of(case, lengths, envelope) == pytest.approx(best, rel=1e-9)


def test_the_plain_walk_is_the_optimum_where_costs_are_convex_and_the_first_drop_everywhere():
    trapped = 0
    for seed in SEEDS:
        case = Case(seed)
        walk = call_of(CausalGreedy(), case.profile, case.num_drafts)
        lengths = walk.verify_lengths(request(case.confidence, case.limits))
        values = case.most_tokens / case.seconds[: len(case.most_tokens)]
        count = 0
        while count + 1 < len(values) and values[count + 1] > values[count]:
            count += 1
        assert sum(lengths) == count
        trapped += values[count] < 0.99 * values.max()
        convex = slow_lower_envelope(case.steps.tolist())
        lengths = call_of(CausalGreedy(), TableProfile(convex), case.num_drafts).verify_lengths(
            request(case.confidence, case.limits)
        )
        seconds = np.array(convex)[case.num_rows - 1 :]
        best = (case.most_tokens / seconds[: len(case.most_tokens)]).max()
        assert throughput_of(case, lengths, seconds) == pytest.approx(best, rel=1e-9)
    assert trapped > 50


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=12))
def test_the_lower_envelope_is_the_largest_convex_function_below(seconds):
    envelope = lower_envelope(np.array(seconds))
    assert envelope == pytest.approx(slow_lower_envelope(seconds))
    assert (envelope <= np.array(seconds) + 1e-12).all()
    assert (np.diff(envelope, 2) >= -1e-9).all()


def test_only_the_plain_walk_is_trapped_before_a_cliff():
    confident = request([[0.95] * 7])
    chosen = {policy: call_of(policy, CLIFF, 7, (0.9,) * 7).verify_lengths(confident) for policy in COSTED}
    assert chosen[CausalGreedy()] == [0]
    assert chosen[CausalGreedy(envelope=True)] == [7]
    assert chosen[Lookahead()] == [7]
    assert chosen[Auto()] == [7]


def test_the_lagged_budget_is_out_of_the_trap_when_its_lag_is_over():
    call = call_of(LaggedBudget(2), CLIFF, 7)
    assert [call.verify_lengths(request([[0.95] * 7], step=step)) for step in range(4)] == [[0], [0], [7], [7]]


# ----------------------------------------------------------------------------------------------------- Lookahead


def test_looking_ahead_reaches_the_optimum_of_any_table_when_forecasts_come_true():
    stopped_early = 0
    for seed in SEEDS:
        case = Case(seed)
        acceptance = tuple(case.confidence[0].astype(np.float64).tolist())
        case.confidence[:] = case.confidence[0]
        call = call_of(Lookahead(), case.profile, case.num_drafts, acceptance)
        asked = request(case.confidence, case.limits)
        lengths, rate = call.verify_lengths(asked), call.long_run_rate(case.num_rows, 0.0)
        worth = case.most_tokens - rate * case.seconds[: len(case.most_tokens)]
        assert case.tokens(lengths) - rate * case.seconds[sum(lengths)] == pytest.approx(worth.max(), abs=1e-6)
        stopped_early += 0 < sum(lengths) < sum(case.limits)
    assert stopped_early > 200


def test_with_forecasts_that_come_true_and_full_room_looking_ahead_has_the_best_throughput():
    for seed in SEEDS[:300]:
        case = Case(seed)
        case.limits = [case.num_drafts] * case.num_rows
        acceptance = tuple(case.confidence[0].astype(np.float64).tolist())
        case.confidence[:] = case.confidence[0]
        call = call_of(Lookahead(), case.profile, case.num_drafts, acceptance)
        lengths = call.verify_lengths(request(case.confidence))
        best = (case.most_tokens / case.seconds).max()
        assert throughput_of(case, lengths, case.seconds) == pytest.approx(best, rel=1e-5)


def test_what_the_walk_has_admitted_stays_admitted_when_the_forecast_fails():
    call = call_of(Lookahead(), CLIFF, 7, (0.9,) * 7)
    assert call.verify_lengths(request([[0.95, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01]])) == [7]


def test_forecasts_follow_the_text():
    """Rounds of poor confidences end the jumps over the cliff; good ones bring them back."""
    call, good, bad = call_of(Lookahead(), CLIFF, 7), [0.9] * 7, [0.9, *[0.05] * 6]
    chosen = []
    for step, row in enumerate([bad] * 60 + [good] * 60):
        asked = request([row], step=step)
        chosen.append(call.verify_lengths(asked)[0])
        finish(call, asked, [chosen[-1]], [min(chosen[-1], 7 if row is good else 1)])
    assert chosen[0] > 0 == chosen[59]
    assert chosen[119] == 7


def test_confidences_that_promise_too_much_are_taken_for_what_they_were_worth():
    outlook, asked = Outlook(3, (0.9,) * 3), request([[0.9, 0.9, 0.9]])
    for _ in range(200):
        outlook.observe(RoundOutcome(asked, 1, [3], [0], 1.0))
    assert outlook.promised(asked, [3]).sum() < 0.1
    for _ in range(200):
        outlook.observe(RoundOutcome(asked, 1, [3], [2], 1.0))
    assert outlook.promised(asked, [3]).sum() == pytest.approx(2, abs=0.1)


def test_trust_comes_back_after_a_text_that_broke_every_promise():
    """No policy may lose for good what it could win: confident drafts that fail, then moderate ones that stand."""
    for policy in (Lookahead(), Auto()):
        call = call_of(policy, CLIFF, 7)
        for step, (confidence, right) in enumerate([(0.8, 0)] * 300 + [(0.7, 4)] * 600):
            lengths, asked = [0], None
            if call.wants_drafts(1, 0.0):
                asked = request([[confidence] * 7], step=step)
                lengths = call.verify_lengths(asked)
            first_stands = None if asked is None else [float(right > 0)]  # judged for nothing, verified or not
            finish(call, asked, lengths, [min(lengths[0], right)], first_stands)
        assert lengths[0] > 0, policy


def test_first_drafts_that_are_not_verified_still_teach():
    outlook, asked = Outlook(2, (0.5, 0.5)), request([[0.8, 0.8]])
    for _ in range(100):
        outlook.observe(RoundOutcome(asked, 1, [0], [0], 1.0, [0.2]))
    assert outlook.trust == pytest.approx(0.25, abs=0.02)
    unsure = Outlook(2, (0.5, 0.5))
    for _ in range(100):
        unsure.observe(RoundOutcome(ScheduleRequest(None, [2], [0], 0), 1, [0], [0], 1.0, [0.9]))
    assert unsure.acceptance[0] == pytest.approx(0.9, abs=0.03)


def test_without_confidences_earlier_acceptance_decides_and_can_be_won_back():
    call = call_of(Lookahead(), CLIFF, 7)
    chosen = []
    for step, right in enumerate([7] * 50 + [0] * 200 + [7] * 600):
        asked = ScheduleRequest(None, [7], [0], step)
        chosen.append(call.verify_lengths(asked)[0])
        finish(call, asked, [chosen[-1]], [min(chosen[-1], right)])
    assert chosen[49] == 7
    assert chosen[249] == 0
    assert 7 in chosen[250:]


def test_forecasts_stay_finite_for_positions_that_are_not_reached_for_long():
    outlook, num_rows = Outlook(7), 64
    asked = ScheduleRequest(None, [7] * num_rows, range(num_rows), 0)
    for _ in range(1000):
        outlook.observe(RoundOutcome(asked, num_rows, [2] * num_rows, [1] * num_rows, 1.0))
    assert np.isfinite(outlook.survival).all()


# --------------------------------------------------------------------------------------------------- LaggedBudget


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_the_budget_is_the_optimum_of_the_round_lag_rounds_ago_spent_on_the_best_of_now(lag):
    for seed in range(100):
        tables = [Case(1000 * seed + step, num_rows=3, num_drafts=4) for step in range(5)]
        profile, call = tables[0].profile, call_of(LaggedBudget(lag), tables[0].profile, 4)
        seconds = tables[0].seconds
        for step, case in enumerate(tables):
            lengths = call.verify_lengths(request(case.confidence, case.limits, step=step))
            if step < lag:
                walk = call_of(CausalGreedy(), profile, 4)
                assert lengths == walk.verify_lengths(request(case.confidence, case.limits))
                continue
            before = tables[step - lag]
            values = before.most_tokens / seconds[: len(before.most_tokens)]
            budget = min(int(values.argmax()), sum(case.limits))
            assert sum(lengths) == budget
            assert case.tokens(lengths) == pytest.approx(case.most_tokens[budget])


def test_rows_that_left_are_taken_out_of_the_budget_and_new_ones_start_with_a_walk():
    flat, call = TableProfile([1.0]), call_of(LaggedBudget(1), TableProfile([1.0]), 3)
    assert call.verify_lengths(request([[0.9] * 3] * 3)) == [3, 3, 3]
    assert call.verify_lengths(request([[0.9] * 3], rows=[1], step=1)) == [3]
    assert call.verify_lengths(request([[0.9] * 3] * 2, rows=[1, 7], step=2)) == [3, 3]
    assert call_of(LaggedBudget(1), flat, 3).verify_lengths(request([[0.9] * 3], rows=[5])) == [3]


# --------------------------------------------------------------------------------------------------- all of them


@each_policy
def test_permuted_rows_have_permuted_lengths(policy):
    for seed in range(100):
        case, draw = Case(seed), np.random.default_rng(seed)
        order = draw.permutation(case.num_rows)
        straight = call_of(policy, case.profile, case.num_drafts)
        permuted = call_of(policy, case.profile, case.num_drafts)
        for step in range(3):
            table = draw.random(case.confidence.shape)
            first = straight.verify_lengths(request(table, case.limits, step=step))
            limits = [case.limits[row] for row in order]
            second = permuted.verify_lengths(request(table[order], limits, rows=order.tolist(), step=step))
            assert second == [first[row] for row in order]
            finish(straight, request(table, case.limits), first)
            finish(permuted, request(table[order], limits, rows=order.tolist()), second)


@each_policy
def test_a_flat_cost_verifies_everything_but_what_cannot_survive(policy):
    flat = TableProfile([1.0])
    for table, limits, expected in (
        ([[1.0] * 4] * 3, [4, 2, 0], [4, 2, 0]),
        ([[0.01] * 4] * 2, [4, 4], [4, 4]),
        ([[0.5, 0.0, 0.9, 0.9], [0.0] * 4], [4, 4], [1, 0]),
        ([[0.5, math.nan, 0.9, 0.9], [math.nan] * 4], [4, 4], [1, 0]),
        ([[0.7]], [1], [1]),
    ):
        num_drafts = len(table[0])
        assert call_of(policy, flat, num_drafts).verify_lengths(request(table, limits)) == expected


@each_policy
def test_a_rising_cost_trims_and_trims_the_unsure_rows_first(policy):
    rising = TableProfile(1 + 0.25 * np.arange(20))
    call = call_of(policy, rising, 4)
    sure, unsure = call.verify_lengths(request([[0.9] * 4, [0.4] * 4]))
    assert unsure < sure
    steep = TableProfile(1 + 2.0 * np.arange(20))
    assert sum(call_of(policy, steep, 4).verify_lengths(request([[0.9] * 4, [0.4] * 4]))) < 2
    assert call_of(policy, rising, 4).verify_lengths(request([[0.0] * 4, [0.0] * 4])) == [0, 0]


@each_policy
def test_lengths_stay_within_their_limits_whatever_happened_before(policy):
    for seed in range(100):
        draw = np.random.default_rng(seed)
        call = call_of(policy, Case(seed, num_rows=8, num_drafts=7).profile, 7)
        rows = list(range(8))
        for step in range(6):
            table = np.where(draw.random((len(rows), 7)) < 0.05, math.nan, draw.random((len(rows), 7)))
            limits = draw.integers(0, 8, len(rows)).tolist()
            drafted = max(1, *limits)  # as decoding drafts them: no more than the row with most room can use
            asked = request(table[:, :drafted], limits, rows=list(rows), step=step)
            lengths = call.verify_lengths(asked)
            assert all(isinstance(n, int) and 0 <= n <= limit for n, limit in zip(lengths, limits, strict=True))
            finish(call, asked, lengths, [int(draw.integers(0, n + 1)) for n in lengths])
            rows = rows[1:] if step % 2 else rows[::-1]


@pytest.mark.parametrize("policy", [policy for policy in COSTED if policy.requires_confidence], ids=str)
def test_without_confidences_the_error_names_fixed_length(policy):
    call = call_of(policy, CLIFF, 3)
    assert call.requires_confidence
    with pytest.raises(ValueError, match="confidence head.*FixedLength"):
        call.verify_lengths(ScheduleRequest(None, [3], [0], 0))


def test_which_policies_need_confidences():
    assert [policy.requires_confidence for policy in COSTED] == [True, True, True, True, False, False]
    assert all(policy.uses_cost for policy in COSTED)
    assert not FixedLength().uses_cost


@pytest.mark.parametrize("policy", COSTED[:-1], ids=str)
def test_without_a_cost_the_error_names_the_profile_and_the_environment(policy):
    with pytest.raises(ValueError, match="(?s)sps_profile.*HF_DSPARK_NO_PROFILE"):
        policy.for_call(CallSetting(7))


@each_policy
def test_a_policy_schedules_within_a_call_only(policy):
    with pytest.raises(RuntimeError, match="for_call"):
        policy.verify_lengths(request([[0.5]]))


@pytest.mark.parametrize(("lag", "error"), [(0, ValueError), (-1, ValueError), (1.0, TypeError), (True, TypeError)])
def test_a_lag_that_is_no_number_of_rounds_is_refused(lag, error):
    with pytest.raises(error, match="lag"):
        LaggedBudget(lag)


@each_policy
def test_policies_are_values(policy):
    for copied in (pickle.loads(pickle.dumps(policy)), copy.deepcopy(policy), eval(repr(policy))):
        assert copied == policy
        assert hash(copied) == hash(policy)
    assert repr(call_of(policy, CLIFF, 3)) == repr(policy)
    assert sum(policy == other for other in COSTED) == 1


@each_policy
def test_calls_of_one_policy_know_nothing_of_each_other(policy):
    """Eight threads run one policy on texts of their own, and come out as alone."""
    texts = [np.random.default_rng(number).random((30, 2, 7)) ** (0.1 + number / 8) for number in range(8)]

    def decode(text):
        call, chosen = call_of(policy, CLIFF, 7), []
        for step, table in enumerate(text):
            asked = request(table, step=step)
            chosen.append(call.verify_lengths(asked))
            finish(call, asked, chosen[-1], [length // 2 for length in chosen[-1]])
        return chosen

    alone, together = [decode(text) for text in texts], [None] * len(texts)
    start = threading.Barrier(len(texts))

    def work(number):
        start.wait()
        together[number] = decode(texts[number])

    threads = [threading.Thread(target=work, args=[number]) for number in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone
    assert len({repr(chosen) for chosen in alone}) > 1


# ---------------------------------------------------------------------------------------------------- end to end


@pytest.mark.parametrize("clock", ["still", "running"])
@pytest.mark.parametrize("batch", [1, 4])
@each_policy
def test_greedy_text_is_plain_generates_whatever_the_policy_chooses(policy, batch, clock, monkeypatch):
    target, inputs = tiny_target("llama"), left_padded([5, 9, 2, 7][:batch])
    drafter = tiny_drafter(target)
    drafter.confidence_head.proj.weight.data.mul_(4)
    drafter.confidence_head.proj.bias.data.add_(1.5)
    plain = generate(target, inputs, max_new_tokens=32).sequences
    profile = TableProfile(1 + np.array([0.2, 0.1])[np.arange(40) % 2].cumsum() / batch)
    if clock == "still":
        for share in ("SPEED_SHARE", "KIND_SHARE", "SIZE_SHARE"):
            monkeypatch.setattr(round_cost, share, 0.0)
    else:
        profile = TableProfile([0.003, 0.004, 0.004, 0.005, 0.005])  # seconds, as these models take
    drafter = drafter.with_options(scheduler=policy, sps_profile=profile)
    view = k_oracle(drafter, plain, right=lambda row: 4 - row)
    output = generate(target, inputs, view, max_new_tokens=32)
    assert torch.equal(output.sequences, plain)
    if clock == "still":
        assert_drafted([r for r in output.rounds if r.draft_ids])  # `Auto` has rounds without
        assert len({r.verify_length for r in output.rounds if r.draft_ids}) > 2
