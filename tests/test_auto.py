"""The default policy: drafts while it pays, decodes plainly while it does not, and finds out when that changes."""

import logging as std_logging
import math

import numpy as np
import pytest
import torch
from transformers.utils import logging

from hf_dspark.auto import Auto, AutoCall
from hf_dspark.policies import Lookahead
from hf_dspark.round_cost import RoundCost
from hf_dspark.scheduling import CallSetting, FixedLength, RoundOutcome, ScheduleRequest
from tests.drafters import anti_oracle, generate, left_padded, oracle, tiny_drafter
from tests.reference import TableProfile
from tests.tiny import tiny_target

# Plain decoding takes 66 ms; a round that verifies at least one draft about twice that.
DEAR = TableProfile([66, 110, 112, 114, 116, 118, 119, 120, *[200] * 8], draft_seconds=10)
HOSTILE, FINE = (0.05, 0), (0.9, 6)  # confidence of every draft, and how many stand


def auto_call(profile=DEAR, num_drafts=7, **setting):
    return Auto().for_call(CallSetting(num_drafts, RoundCost(profile, refine=False), **setting))


class Journey:
    """A call of one or several rows on texts that accept as they are told; what each round did and cost."""

    def __init__(self, call, num_rows=1, with_confidence=True):
        self.call, self.num_rows, self.with_confidence = call, num_rows, with_confidence
        self.drafted, self.lengths, self.tokens, self.seconds = [], [], 0.0, 0.0

    def rounds(self, count, text):
        """Another `count` rounds; returns how many of them drafted."""
        confidence, right = text
        before = len(self.drafted)
        for _ in range(count):
            wanted, lengths, asked = self.call.wants_drafts(self.num_rows, 0.0), [0] * self.num_rows, None
            if wanted:
                num_drafts, rows = self.call.setting.num_drafts, range(self.num_rows)
                table = torch.full((self.num_rows, num_drafts), confidence) if self.with_confidence else None
                asked = ScheduleRequest(table, [num_drafts] * self.num_rows, rows, len(self.drafted))
                lengths = self.call.verify_lengths(asked)
            accepted = [min(length, right) for length in lengths]
            self.call.observe(RoundOutcome(asked, self.num_rows, lengths, accepted, 1.0))
            self.drafted.append(wanted)
            self.lengths.append(lengths)
            self.tokens += self.num_rows + sum(accepted)
            self.seconds += self.call.cost.predict(self.num_rows, sum(lengths), 0.0, drafted=wanted)
        return sum(self.drafted[before:])

    @property
    def pauses(self):
        """Lengths of the runs of rounds without drafts that have ended."""
        runs, length = [], 0
        for drafted in self.drafted:
            if drafted and length:
                runs.append(length)
            length = 0 if drafted else length + 1
        return runs

    def speed(self, plain_seconds):
        """Tokens per second over plain decoding's."""
        return self.tokens / self.seconds * plain_seconds / self.num_rows


def test_where_everything_is_accepted_every_round_drafts_and_verifies_all():
    journey = Journey(auto_call())
    assert journey.rounds(100, (0.95, 7)) == 100
    assert journey.lengths[-1] == [7]
    assert journey.call.gain > 2


def test_where_nothing_is_accepted_it_stops_drafting_and_the_pauses_double_up_to_the_longest():
    journey = Journey(auto_call())
    journey.rounds(400, HOSTILE)
    pauses, longest = journey.pauses, AutoCall.LONGEST_PAUSE
    assert pauses[0] == AutoCall.FIRST_PAUSE
    expected = [min(AutoCall.FIRST_PAUSE * 2**n, longest) for n in range(len(pauses))]
    assert pauses == expected
    assert pauses[-2:] == [longest] * 2
    assert journey.call.gain < 1


@pytest.mark.parametrize("text", [HOSTILE, (0.8, 0)], ids=["and says so", "and promises much"])
@pytest.mark.parametrize("num_rows", [1, 2])
def test_what_probing_costs_in_the_long_run_is_a_few_percent_of_plain_decoding(text, num_rows):
    journey = Journey(auto_call(), num_rows)
    journey.rounds(200, text)
    journey.tokens = journey.seconds = 0.0
    drafted = journey.rounds(2000, text)
    assert 20 < drafted < 200
    assert 0.95 < journey.speed(journey.call.cost.plain_seconds(num_rows, 0.0)) < 1


def test_drafting_comes_back_within_the_longest_pause_when_the_text_gets_easy():
    journey = Journey(auto_call())
    journey.rounds(300, HOSTILE)
    journey.rounds(AutoCall.LONGEST_PAUSE + 1, FINE)
    assert journey.drafted[-AutoCall.LONGEST_PAUSE - 1 :].count(True) >= 1
    assert journey.rounds(100, FINE) == 100
    assert journey.call.gain > 2


def test_one_good_probe_outweighs_the_bad_rounds_before_the_pause():
    slope = TableProfile([1 + 0.1 * n for n in range(8)], draft_seconds=0.5)
    journey = Journey(auto_call(slope))
    journey.rounds(300, HOSTILE)
    fair = (0.6, 2)  # 2.3 tokens promised in 1.9 rounds: less than the earlier rounds lost
    while not journey.rounds(1, fair):
        pass
    assert journey.rounds(5, fair) == 5


def test_after_good_times_the_first_pause_is_short_again():
    journey = Journey(auto_call())
    journey.rounds(300, HOSTILE)
    journey.rounds(100, FINE)
    before = len(journey.drafted)
    journey.rounds(60, HOSTILE)
    journey.drafted = journey.drafted[before:]
    assert journey.pauses[0] == AutoCall.FIRST_PAUSE


def test_without_a_confidence_head_drafting_stops_and_comes_back_as_well():
    journey = Journey(auto_call(), with_confidence=False)
    assert journey.rounds(30, (None, 7)) == 30
    journey.rounds(400, (None, 0))
    assert journey.rounds(200, (None, 0)) < 20
    journey.rounds(400, (None, 7))
    assert journey.rounds(100, (None, 7)) > 50


def test_a_round_that_had_no_room_for_drafts_ends_no_pause_and_begins_none():
    call = auto_call()
    for _ in range(5):
        assert call.wants_drafts(1, 0.0)
        call.observe(RoundOutcome(None, 1, [0], [0], 1.0))
    assert call.gain == 1


def test_the_gain_of_two_rounds_by_hand():
    call = auto_call(num_drafts=2, acceptance=(0.9, 0.9))
    prior, memory = AutoCall.PRIOR_ROUNDS, AutoCall.MEMORY
    assert call.gain == 1
    asked = ScheduleRequest(torch.tensor([[0.5, 0.5]]), [2], [0], 0)
    call.observe(RoundOutcome(asked, 1, [2], [1], 1.0))
    # 1 + 0.5 + 0.25 tokens in the time of a round of 3 tokens, 112 + 10, in plain rounds of 66
    tokens, time = memory * prior + 1.75, memory * prior + 122 / 66
    assert call.gain == pytest.approx(tokens / time)
    trust = call.outlook.trust
    asked = ScheduleRequest(torch.tensor([[0.8, 0.1]]), [2], [0], 1)
    call.observe(RoundOutcome(asked, 1, [1], [0], 1.0))
    tokens, time = memory * tokens + 1 + 0.8 * trust, memory * time + 120 / 66
    assert call.gain == pytest.approx(tokens / time)


def test_time_is_charged_at_what_decoding_gains_but_never_below_plain():
    call, plain = auto_call(), 1 / 66
    journey = Journey(call)
    journey.rounds(100, FINE)
    call.verify_lengths(ScheduleRequest(torch.full((1, 7), 0.9), [7], [0], 0))
    assert call.long_run_rate(1, 0.0) == pytest.approx(plain * call.gain)
    journey.rounds(100, HOSTILE)
    assert call.gain < 1
    call.verify_lengths(ScheduleRequest(torch.full((1, 7), 0.9), [7], [0], 0))
    assert call.long_run_rate(1, 0.0) == pytest.approx(plain)


def test_on_a_flat_cost_nothing_is_ever_paused():
    journey = Journey(auto_call(TableProfile([1.0])), num_rows=3)
    assert journey.rounds(200, HOSTILE) == 200
    assert journey.lengths[-1] == [7, 7, 7]


def test_calls_begin_anew():
    policy = Auto()
    first = policy.for_call(CallSetting(7, RoundCost(DEAR, refine=False)))
    Journey(first).rounds(100, HOSTILE)
    second = policy.for_call(CallSetting(7, RoundCost(DEAR, refine=False)))
    assert (first.gain < 1, second.gain, second.wants_drafts(1, 0.0)) == (True, 1, True)
    assert isinstance(second, type(Lookahead().for_call(CallSetting(7, RoundCost(DEAR)))))


class Records(std_logging.Handler):
    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


@pytest.fixture
def warnings_given():
    """Messages of `hf_dspark.auto`, as if none had been given before."""
    logger, handler = logging.get_logger("hf_dspark.auto"), Records()
    type(logger).warning_once.cache_clear()
    logging.warning_once.cache_clear()
    logger.addHandler(handler)
    yield handler.messages
    logger.removeHandler(handler)


def test_without_a_cost_whole_blocks_are_verified_and_that_is_said_once(warnings_given):
    calls = [Auto().for_call(CallSetting(7)) for _ in range(3)]
    assert calls == [FixedLength()] * 3
    (message,) = warnings_given
    assert "Scheduling is off" in message
    assert all(way_out in message for way_out in ("HF_DSPARK_NO_PROFILE", "sps_profile", "FixedLength"))


def test_generate_without_a_profile_verifies_whole_blocks(monkeypatch):
    monkeypatch.setenv("HF_DSPARK_NO_PROFILE", "1")
    target, inputs = tiny_target("llama"), left_padded([5, 2])
    plain = generate(target, inputs, max_new_tokens=20).sequences
    view = oracle(tiny_drafter(target).with_options(scheduler="auto"), plain)
    output = generate(target, inputs, view, max_new_tokens=20)
    assert torch.equal(output.sequences, plain)
    assert [r.verify_length for r in output.rounds] == [len(r.draft_ids) for r in output.rounds]


def test_a_real_run_on_hostile_text_drafts_rarely_and_reads_later_what_it_skipped():
    target, inputs = tiny_target("llama"), left_padded([5, 2])
    drafter = tiny_drafter(target)
    drafter.confidence_head.proj.weight.data.zero_()
    drafter.confidence_head.proj.bias.data.fill_(math.log(0.05 / 0.95))
    plain = generate(target, inputs, max_new_tokens=60).sequences
    steep = TableProfile([1e-3 * (1 + n) for n in range(20)], draft_seconds=1e-3)
    view = anti_oracle(drafter.with_options(scheduler="auto", sps_profile=steep), plain)
    output = generate(target, inputs, view, max_new_tokens=60)
    assert torch.equal(output.sequences, plain)
    drafted = [bool(r.draft_ids) for r in output.rounds if r.row == 0]
    assert 1 <= sum(drafted) < len(drafted) / 4
    assert drafted[0]
    assert any(drafted[1:])


def test_a_profile_that_makes_plain_rounds_too_dear_is_found_out():
    """While all rounds draft, no plain round would ever be timed; so now and then there is one."""
    call = Auto().for_call(CallSetting(2, RoundCost(TableProfile([4.0, 4.0, 4.0]))))
    drafted = []
    for step in range(600):
        asked, lengths, wants = None, [0], call.wants_drafts(1, 0.0)
        if wants:
            asked = ScheduleRequest(torch.tensor([[0.9, 0.1]]), [2], [0], step)
            lengths = call.verify_lengths(asked)
        accepted = [min(lengths[0], 1)]
        seconds = 2.4 if wants else 1.0
        call.cost.observe(1, lengths[0], 0.0, seconds, drafted=wants)
        call.observe(RoundOutcome(asked, 1, lengths, accepted, seconds, [1.0] if wants else None))
        drafted.append(wants)
    assert all(drafted[:5])
    assert sum(drafted[300:]) < 60


def test_rows_behind_are_served_first_in_a_batch_that_ends_with_its_slowest():
    stairs = TableProfile([1.0, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5])
    for drains, more_for_the_last in ((True, True), (False, False)):
        call = Auto().for_call(CallSetting(2, RoundCost(stairs, refine=False), drains=drains))
        for step in range(8):
            asked = ScheduleRequest(torch.tensor([[0.9, 0.9], [0.9, 0.9]]), [2, 2], [0, 1], step)
            call.observe(RoundOutcome(asked, 2, [2, 2], [2, 0], 1.0, [1.0, 1.0]))
        weights = np.broadcast_to(call.weights(asked), 2)
        assert (weights[1] > weights[0]) == more_for_the_last
        assert weights.max() == 1 and weights.min() > 0
        lengths = call.verify_lengths(asked)
        assert (lengths[1] > lengths[0]) == more_for_the_last, lengths
