"""Every policy leaves the law of sampled text to the target: enumerations, controls that must fail, and causality.

An enumeration runs the policy itself, with a fresh `for_call` in every branch, so that what it learns is learned in
that branch. Costs are tables on which its choices differ between branches; that they do is part of each theorem.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dspark import round_cost
from hf_dspark.auto import Auto, AutoCall
from hf_dspark.policies import CausalGreedy, LaggedBudget, Lookahead
from hf_dspark.round_cost import RoundCost
from hf_dspark.scheduling import CallSetting, ConfidenceThreshold, FixedLength, RoundOutcome, ScheduleRequest
from tests.reference import (
    BestBatchInHindsight,
    BudgetOfThisRound,
    FixedTarget,
    LookaheadTakingBack,
    Recorded,
    TableProfile,
    ToyDrafter,
    ToyTarget,
    independent_law,
    law_of,
    remembering,
    total_variation,
    toy_decode,
    toy_round,
)
from tests.test_decoding import distance_to_target, enumeration_pair, law_of_decoding
from tests.test_verification import AppendixADrafter

EXACT = 1e-6
ADAPTIVE = {
    "threshold": ConfidenceThreshold(0.4),
    "greedy": CausalGreedy(),
    "envelope": CausalGreedy(envelope=True),
    "lag 1": LaggedBudget(1),
    "lag 2": LaggedBudget(2),
    "lookahead": Lookahead(),
    "auto": Auto(),
}
POLICIES = {"fixed": FixedLength(), **ADAPTIVE}
LOOKING_AHEAD = {
    "in hindsight": BestBatchInHindsight(),
    "budget of this round": BudgetOfThisRound(),
    "taking back": LookaheadTakingBack(),
}
# The first verified draft of a row is dear, the second nearly free.
CLIFF = TableProfile([1, 1.5, 1.55])
# Two rows: the second draft of the batch is dear, and then the third is cheap.
STAIRS = TableProfile([0.9, 1, 1.3, 1.6, 1.62, 1.9], draft_seconds=0.02)


def distance(policy, profile, target, drafter, prefixes, num_tokens):
    """Total variation between the law of decoding with `policy` and the target's, of all rows jointly."""
    setting = CallSetting(drafter.block_size, RoundCost(profile))
    law = law_of(lambda source: toy_decode(target, drafter, policy.for_call(setting), prefixes, num_tokens, source))
    assert sum(law.values()) == pytest.approx(1)
    return total_variation(law, independent_law(target, prefixes, num_tokens))


class OnlyTheFirstDraftIsDrawn(ToyDrafter):
    """The drafts after it are the most probable ones: fewer branches, and just as much to look ahead to."""

    def probs(self, prefix, position, previous_id):
        probs = super().probs(prefix, position, previous_id)
        return probs if position == 0 else torch.nn.functional.one_hot(probs.argmax(), len(probs)).float()


def one_row():
    return remembering(ToyTarget(2, seed=3)), remembering(ToyDrafter(2, 2, seed=9)), [(1, 0)], 4


def two_rows():
    return remembering(ToyTarget(2, seed=3)), remembering(OnlyTheFirstDraftIsDrawn(2, 2, seed=5)), [(0,), (1, 1)], 3


# ------------------------------------------------------------------------------------------------- exact laws


@pytest.mark.parametrize("name", POLICIES)
def test_several_rounds_of_a_row_have_the_targets_law(name):
    policy = Recorded(POLICIES[name])
    assert distance(policy, CLIFF, *one_row()) < EXACT
    assert (policy.most_choices() > 1) == (name in ADAPTIVE)


@pytest.mark.parametrize("name", POLICIES)
def test_several_rounds_of_two_rows_have_the_joint_law_of_two_targets(name):
    policy = Recorded(POLICIES[name])
    assert distance(policy, STAIRS, *two_rows()) < EXACT
    assert (policy.most_choices() > 1) == (name in ADAPTIVE)


def test_to_stop_drafting_in_some_branches_and_to_start_again_leaves_the_law_as_it_is(monkeypatch):
    monkeypatch.setattr(AutoCall, "FIRST_PAUSE", 1)
    policy = Recorded(Auto())
    assert distance(policy, CLIFF, *one_row()) < EXACT
    assert policy.both_drafted_and_not()


@pytest.mark.parametrize("name", LOOKING_AHEAD)
@pytest.mark.parametrize(("setup", "profile"), [(one_row, CLIFF), (two_rows, STAIRS)], ids=["one row", "two rows"])
def test_a_policy_that_looks_at_what_it_decides_about_changes_the_law(name, setup, profile):
    """The control: on the same toys and tables."""
    assert distance(LOOKING_AHEAD[name], profile, *setup()) > 1e-3


# --------------------------------------------------------------------------------------------- the real decoder


@pytest.fixture
def costs_that_do_not_learn(monkeypatch):
    """Predictions follow the clock; an enumeration needs every branch to run the same way twice."""
    monkeypatch.setattr(round_cost, "SPEED_SHARE", 0.0)
    monkeypatch.setattr(round_cost, "KIND_SHARE", 0.0)
    monkeypatch.setattr(round_cost, "SIZE_SHARE", 0.0)


@pytest.mark.parametrize("name", ADAPTIVE)
def test_text_of_the_real_decoder_has_the_targets_law(name, costs_that_do_not_learn):
    target, drafter = enumeration_pair(2)
    policy, num_tokens = Recorded(ADAPTIVE[name]), 5 if name == "lag 2" else 4  # the third round has the first budget
    profile = TableProfile([1, 1.3, 1.5] if name == "envelope" else [1, 1.4, 1.7])
    view = drafter.with_options(scheduler=policy, sps_profile=profile)
    law, _ = law_of_decoding(target, view, [[1, 0]], [1], num_new_tokens=num_tokens)
    assert distance_to_target(law, target, [[1, 0]], num_tokens) < EXACT
    assert policy.most_choices() > 1 or policy.both_drafted_and_not()


# One verified draft costs as much as a whole second round: here it is tempting to see first how it turned out.
TEMPTING = TableProfile([1, 2, 2.1])


@pytest.mark.parametrize("name", [*POLICIES, *LOOKING_AHEAD])
def test_a_round_of_the_real_decoder_keeps_the_law_unless_the_policy_looks_ahead(name, costs_that_do_not_learn):
    target, drafter = enumeration_pair(2)
    policies = POLICIES | LOOKING_AHEAD
    view = drafter.with_options(scheduler=policies[name], sps_profile=TEMPTING)
    law, _ = law_of_decoding(target, view, [[1, 0]], [1], num_new_tokens=4, num_rounds=1)
    distance = distance_to_target(law, target, [[1, 0]], 4)
    assert distance > 1e-3 if name in LOOKING_AHEAD else distance < EXACT


@pytest.mark.parametrize("name", ["lookahead", "auto"])
def test_two_rows_of_the_real_decoder_have_the_joint_law_of_two_targets(name, costs_that_do_not_learn):
    target, drafter = enumeration_pair(2)
    policy, prompts = Recorded(ADAPTIVE[name]), [[1, 0], [0, 1]]
    view = drafter.with_options(scheduler=policy, sps_profile=STAIRS)
    law, _ = law_of_decoding(target, view, prompts, [1, 0], num_new_tokens=4, num_rounds=1)
    assert distance_to_target(law, target, prompts, 4) < EXACT
    assert policy.most_choices() > 1


# --------------------------------------------------------------------------------------------------- Appendix A


def first_token_law(policy):
    setting = CallSetting(2, RoundCost(TEMPTING), acceptance=(0.8, 0.9))

    def first_token(source):
        return toy_round(FixedTarget([0.7, 0.3]), AppendixADrafter(), policy.for_call(setting), [(0,)], source)[0][0]

    law = law_of(first_token)
    return [law[0], law[1]]


@pytest.mark.parametrize("name", LOOKING_AHEAD)
def test_appendix_a_looking_ahead_gives_85_to_15(name):
    assert first_token_law(LOOKING_AHEAD[name]) == pytest.approx([0.85, 0.15], abs=EXACT)


@pytest.mark.parametrize("name", POLICIES)
def test_appendix_a_a_causal_policy_gives_70_to_30(name):
    assert first_token_law(POLICIES[name]) == pytest.approx([0.7, 0.3], abs=EXACT)


# ---------------------------------------------------------------------------------------------------- causality


class Occasion:
    """A round after some earlier ones, on a random table of costs; the same for every confidence table it gets."""

    def __init__(self, seed: int):
        draw = self.draw = np.random.default_rng(seed)
        self.num_rows, self.num_drafts = int(draw.integers(1, 9)), int(draw.integers(1, 8))
        increments = draw.exponential(size=self.num_rows * (self.num_drafts + 1)) ** 2
        increments *= draw.random(len(increments)) < draw.choice([0.2, 0.6, 1.0])  # stairs, or a jagged slope
        scale = draw.choice([0.01, 0.05, 0.2])
        profile = TableProfile(1 + scale * increments.cumsum(), draft_seconds=draw.choice([0, 0.2]))
        self.setting = CallSetting(self.num_drafts, RoundCost(profile))
        self.history = [(self.table(), self.limits(), draw.random()) for _ in range(draw.integers(0, 5))]
        self.confidence, self.max_lengths = self.table(), self.limits()

    def table(self) -> np.ndarray:
        """Confidences `[R, K]`: mostly middling, or mostly high, with some that are certain."""
        uniform = self.draw.random((self.num_rows, self.num_drafts)) ** self.draw.choice([0.2, 1.0])
        return np.where(self.draw.random(uniform.shape) < 0.1, self.draw.integers(0, 2, uniform.shape), uniform)

    def limits(self) -> list[int]:
        return np.where(self.draw.random(self.num_rows) < 0.7, self.num_drafts, self._shorter()).tolist()

    def _shorter(self):
        return self.draw.integers(0, self.num_drafts + 1, self.num_rows)

    def lengths(self, policy, confidence: np.ndarray) -> list[int]:
        """What the policy answers if the round has this confidence table."""
        call, rows = policy.for_call(self.setting), range(self.num_rows)
        for step, (table, limits, luck) in enumerate(self.history):
            request = ScheduleRequest(torch.tensor(table, dtype=torch.float32), limits, rows, step)
            lengths = call.verify_lengths(request)
            accepted = [int(luck * (length + 1)) for length in lengths]
            call.observe(RoundOutcome(request, self.num_rows, lengths, accepted, 1.0))
        table = torch.tensor(confidence, dtype=torch.float32)
        return call.verify_lengths(ScheduleRequest(table, self.max_lengths, rows, len(self.history)))


def changed_beyond(occasion: Occasion, lengths) -> np.ndarray:
    """Other confidences at all positions that were not known when the walk ended: those of other drafts."""
    known = np.arange(occasion.num_drafts) <= np.asarray(lengths)[:, None]
    return np.where(known, occasion.confidence, occasion.table())


def looks_beyond_its_stop(policy, seed: int) -> bool:
    """Whether the lengths depend on confidences that are computed from drafts which these lengths leave out."""
    occasion = Occasion(seed)
    lengths = occasion.lengths(policy, occasion.confidence)
    return any(occasion.lengths(policy, changed_beyond(occasion, lengths)) != lengths for _ in range(3))


def looks_at_its_own_draft(policy, seed: int) -> bool:
    """Whether a position is verified for what its draft, or a later one of the row, made of later confidences."""
    occasion = Occasion(seed)
    lengths = occasion.lengths(policy, occasion.confidence)
    row = int(occasion.draw.integers(occasion.num_rows))
    for position in range(occasion.num_drafts):
        other = occasion.confidence.copy()
        other[row, position + 1 :] = occasion.table()[row, position + 1 :]
        if (lengths[row] > position) != (occasion.lengths(policy, other)[row] > position):
            return True
    return False


@pytest.mark.parametrize("name", POLICIES)
def test_where_the_walk_stops_depends_on_what_it_has_seen_only(name):
    """
    The lengths are a stopping point of the filtration of the walk: the event {lengths = l} is decided by the drafts
    before position l_r of every row r. So given that event all other drafts are as good as not yet drawn.
    """

    @settings(max_examples=60, deadline=None)
    @given(st.integers(0, 2**31))
    def holds(seed):
        assert not looks_beyond_its_stop(POLICIES[name], seed)

    holds()


@pytest.mark.parametrize("name", POLICIES)
def test_whether_a_position_is_verified_does_not_depend_on_its_draft(name):
    @settings(max_examples=60, deadline=None)
    @given(st.integers(0, 2**31))
    def holds(seed):
        assert not looks_at_its_own_draft(POLICIES[name], seed)

    holds()


@pytest.mark.parametrize("name", ["budget of this round", "taking back"])
@pytest.mark.parametrize("property_", [looks_beyond_its_stop, looks_at_its_own_draft])
def test_these_properties_find_policies_that_look_ahead(name, property_):
    assert any(property_(LOOKING_AHEAD[name], seed) for seed in range(400))


@pytest.mark.parametrize("name", ADAPTIVE)
def test_the_occasions_of_these_properties_leave_something_to_decide(name):
    """Most occasions end before the limits and after the start."""
    verified = room = ended = 0
    for seed in range(60):
        occasion = Occasion(seed)
        lengths = occasion.lengths(ADAPTIVE[name], occasion.confidence)
        verified, room = verified + sum(lengths), room + sum(occasion.max_lengths)
        ended += 0 < sum(lengths) < sum(occasion.max_lengths)
    assert 0.1 < verified / room < 0.95
    assert ended > 15
