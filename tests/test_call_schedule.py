"""Between a policy and whoever decodes: limits, checks, costs, and what is passed on."""

import math

import pytest
import torch

from hf_dspark import Auto, CausalGreedy, ConfidenceThreshold, FixedLength, LaggedBudget, Lookahead, Scheduler
from hf_dspark.call_schedule import CallSchedule, chosen_scheduler, measured_cost
from hf_dspark.drafting import Drafts
from hf_dspark.round_cost import RoundCost, shared_cost
from tests.drafters import generate, left_padded, tiny_drafter
from tests.reference import TableProfile
from tests.tiny import tiny_target

FLAT = TableProfile([1.0])


class Scripted(Scheduler):
    """Answers as it is told and keeps everything it hears."""

    def __init__(self, answer=None, wants=True):
        self.answer, self.wants = answer, wants
        self.settings, self.requests, self.outcomes = [], [], []

    def for_call(self, setting):
        self.settings.append(setting)
        return self

    def wants_drafts(self, num_rows, context):
        self.asked = (num_rows, context)
        return self.wants

    def verify_lengths(self, request):
        self.requests.append(request)
        return list(request.max_lengths) if self.answer is None else self.answer

    def observe(self, outcome):
        self.outcomes.append(outcome)


def schedule(scheduler, cost=None, *, do_sample=False, **options):
    overrides = options.pop("drafter", {})
    view = tiny_drafter(tiny_target("llama"), **overrides).with_options(scheduler=scheduler, **options)
    return CallSchedule(view, cost, do_sample=do_sample)


def drafts(num_rows=2, num_drafts=5, usable=None, confidence=0.9):
    table = None if confidence is None else torch.full((num_rows, num_drafts), confidence)
    usable = [num_drafts] * num_rows if usable is None else usable
    return Drafts(torch.zeros(num_rows, num_drafts, dtype=torch.long), None, None, table, torch.tensor(usable))


def lengths_of(plan, given, room, step=0):
    return plan.verify_lengths(given, room, rows=range(len(room)), step=step, context=10.0)


def test_limits_are_what_was_drafted_and_what_the_row_can_still_use():
    scheduler = Scripted()
    assert lengths_of(schedule(scheduler), drafts(3), [9, 2, 0]) == [5, 2, 0]
    (request,) = scheduler.requests
    assert list(request.max_lengths) == [5, 2, 0]
    assert (list(request.rows), request.step, request.context) == ([0, 1, 2], 0, 10.0)


def test_where_nothing_can_be_drafted_the_confidence_is_zero_and_no_length_goes_beyond():
    scheduler = Scripted()
    assert lengths_of(schedule(scheduler), drafts(usable=[2, 5]), [9, 9]) == [2, 5]
    (request,) = scheduler.requests
    assert (request.confidence > 0).sum(1).tolist() == [2, 5]
    assert list(request.max_lengths) == [5, 5]  # the limit shows when the walk gets there, not before
    without_head = Scripted()
    assert lengths_of(schedule(without_head), drafts(usable=[0, 3], confidence=None), [9, 9]) == [0, 3]


@pytest.mark.parametrize("policy", [CausalGreedy(), CausalGreedy(True), Lookahead(), Auto()], ids=str)
def test_every_policy_ends_where_nothing_can_be_drafted(policy):
    plan = schedule(policy, RoundCost(FLAT))
    for step, usable in enumerate([[2, 5], [0, 1], [5, 5], [3, 0]]):
        assert plan.wants_drafts(2, 10.0)
        lengths = lengths_of(plan, drafts(usable=usable), [9, 9], step)
        assert lengths == usable
        plan.observe(lengths, lengths, 1.0, 10.0)


def test_confidences_of_any_precision_arrive_as_float32():
    scheduler = Scripted()
    lengths_of(schedule(scheduler), drafts(confidence=torch.tensor(0.5, dtype=torch.bfloat16).item()), [9, 9])
    given = drafts()
    lengths_of(schedule(scheduler), Drafts(given.ids, None, None, given.confidence.bfloat16(), given.usable), [9, 9])
    assert {request.confidence.dtype for request in scheduler.requests} == {torch.float32}


@pytest.mark.parametrize("answer", [[1], [1, 2, 3], [6, 0], [0, -1], [], [3, 3]])
def test_answers_that_are_not_possible_are_errors_that_say_what_is_allowed(answer):
    with pytest.raises(ValueError, match=r"Scripted.* returned verify lengths \[.*\]; allowed are 0 up to \[5, 2\]"):
        lengths_of(schedule(Scripted(answer)), drafts(), [9, 2])


def test_the_outcome_of_a_round_reaches_policy_and_cost():
    scheduler, cost = Scripted(), RoundCost(FLAT)
    plan = schedule(scheduler, cost)
    assert plan.wants_drafts(2, 7.0)
    assert scheduler.asked == (2, 7.0)
    lengths = lengths_of(plan, drafts(), [9, 1])
    plan.observe(lengths, [3, 0], 1.3, 7.0)
    (outcome,) = scheduler.outcomes
    assert outcome.request is scheduler.requests[0]
    assert (outcome.num_rows, outcome.verify_lengths, outcome.num_accepted) == (2, [5, 1], [3, 0])
    assert outcome.seconds == 1.3
    assert cost.predict(2, 6, 7.0, drafted=True) > cost.predict(2, 0, 7.0, drafted=True) > 1


def test_a_round_without_drafts_is_reported_as_one():
    scheduler, cost = Scripted(wants=False), RoundCost(FLAT)
    plan = schedule(scheduler, cost)
    nothing = Drafts.none(2, 64, torch.device("cpu"), False)
    for round_ in range(2):
        assert not plan.wants_drafts(2, 7.0)
        assert lengths_of(plan, nothing, [9, 9]) == [0, 0]
        plan.observe([0, 0], [0, 0], 2.0, 7.0)
        assert scheduler.outcomes[round_].request is None
    assert cost.plain_seconds(2, 7.0) > 1.0  # what the profile said
    assert scheduler.requests == []


def test_a_drafted_round_is_forgotten_before_the_next():
    scheduler = Scripted()
    plan = schedule(scheduler)
    plan.wants_drafts(2, 7.0)
    plan.observe(lengths_of(plan, drafts(), [9, 9]), [0, 0], 1.0, 7.0)
    scheduler.wants = False
    plan.wants_drafts(2, 7.0)
    plan.observe([0, 0], [0, 0], 1.0, 7.0)
    assert [outcome.request is None for outcome in scheduler.outcomes] == [False, True]


def test_an_unusual_round_teaches_the_policy_but_not_the_cost():
    scheduler, cost = Scripted(), RoundCost(FLAT)
    plan = schedule(scheduler, cost)
    plan.wants_drafts(2, 7.0)
    plan.observe(lengths_of(plan, drafts(), [9, 9]), [1, 1], math.nan, 7.0)
    assert cost.predict(2, 10, 7.0, drafted=True) == 1.0
    assert scheduler.outcomes[0].num_accepted == [1, 1]


def calibration(greedy, sampling):
    """Calibration data with the given conditional acceptances."""
    return {
        mode: {
            "dataset": "none",
            "num_rounds": 9,
            "temperature": float(mode == "sampling"),
            "conditional_acceptance": acceptance,
            "ece_before": [0.1] * 5,
            "ece_after": [0.1] * 5,
        }
        for mode, acceptance in (("greedy", greedy), ("sampling", sampling))
    }


def test_a_policy_is_told_the_block_the_cost_and_the_calibrated_acceptance_of_the_mode():
    greedy, sampling, cost = [0.9, 0.8, 0.7, 0.6, 0.5], [0.5] * 5, RoundCost(FLAT)
    for do_sample, expected in ((False, greedy), (True, sampling)):
        scheduler = Scripted()
        drafter = {"confidence_calibration": calibration(greedy, sampling)}
        schedule(scheduler, cost, do_sample=do_sample, drafter=drafter)
        (setting,) = scheduler.settings
        assert (setting.num_drafts, setting.cost, setting.acceptance) == (5, cost, tuple(expected))
    scheduler = Scripted()
    assert schedule(scheduler, max_draft_tokens=3).draft_length == 3
    assert (scheduler.settings[0].num_drafts, scheduler.settings[0].acceptance) == (3, None)
    assert schedule(FixedLength(2)).draft_length == 2


@pytest.mark.parametrize("policy", [CausalGreedy(), LaggedBudget(), ConfidenceThreshold(0.5)], ids=str)
def test_without_a_confidence_head_policies_that_need_one_name_the_way_out(policy):
    target = tiny_target("llama")
    view = tiny_drafter(target, enable_confidence_head=False).with_options(scheduler=policy, sps_profile=FLAT)
    with pytest.raises(ValueError, match="confidence head.*FixedLength"):
        generate(target, left_padded([5]), view, max_new_tokens=4)


@pytest.mark.parametrize("policy", [Lookahead(), Auto()], ids=str)
def test_without_a_confidence_head_others_go_by_what_was_accepted(policy):
    target, inputs = tiny_target("llama"), left_padded([5, 3])
    view = tiny_drafter(target, enable_confidence_head=False).with_options(scheduler=policy, sps_profile=FLAT)
    plain = generate(target, inputs, max_new_tokens=20).sequences
    output = generate(target, inputs, view, max_new_tokens=20)
    assert torch.equal(output.sequences, plain)
    assert max(r.verify_length for r in output.rounds) > 0


@pytest.mark.parametrize("policy", [CausalGreedy(), LaggedBudget(), Lookahead()], ids=str)
def test_without_a_cost_policies_that_need_one_name_both_ways_out(policy, monkeypatch):
    monkeypatch.setenv("HF_DSPARK_NO_PROFILE", "1")
    target = tiny_target("llama")
    view = tiny_drafter(target).with_options(scheduler=policy)
    with pytest.raises(ValueError, match="(?s)sps_profile.*HF_DSPARK_NO_PROFILE"):
        generate(target, left_padded([5]), view, max_new_tokens=4)


def test_the_policy_is_auto_unless_another_is_named():
    drafter = tiny_drafter(tiny_target("llama"))
    assert chosen_scheduler(drafter) == chosen_scheduler(drafter.with_options(scheduler="auto")) == Auto()
    assert chosen_scheduler(drafter.with_options(scheduler=FixedLength(2))) == FixedLength(2)


@pytest.mark.parametrize("name", ["Auto", "fixed", ""])
def test_other_names_are_errors(name):
    with pytest.raises(ValueError, match='the only name is "auto"'):
        tiny_drafter(tiny_target("llama")).with_options(scheduler=name)


@pytest.mark.parametrize("options", [{"scheduler": 3}, {"sps_profile": {"seconds": [1.0]}}, {"sps_profile": "p.json"}])
def test_what_is_no_policy_and_no_profile_is_refused(options):
    with pytest.raises(TypeError, match="must be"):
        tiny_drafter(tiny_target("llama")).with_options(**options)


def test_costs_are_taken_only_for_policies_that_use_them_and_are_shared_between_calls(monkeypatch):
    monkeypatch.setenv("HF_DSPARK_NO_PROFILE", "1")
    target = tiny_target("llama")
    view = tiny_drafter(target).with_options(sps_profile=FLAT)
    cost = measured_cost(target, view.with_options(scheduler=Lookahead()), 1)
    assert cost is measured_cost(target, view, 4) is shared_cost(target, FLAT)
    assert measured_cost(target, view.with_options(scheduler=FixedLength()), 1) is None
    assert measured_cost(target, tiny_drafter(target).with_options(scheduler=Lookahead()), 1) is None
