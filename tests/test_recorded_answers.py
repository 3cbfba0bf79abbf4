"""Recorded rounds: replays agree with the scheduler they stand for, lengths and repetitions with counting by hand."""

import copy
import dataclasses
import math

import pytest
import torch

from hf_dspark import ConfidenceThreshold, DecodingRound, DecodingStats
from hf_dspark.recorded_answers import RecordedAnswer, context_figures, repetition_share, replay
from hf_dspark.recording import WholeBlocks
from tests.drafters import BigramPair, generate, left_padded, scripted, tiny_drafter
from tests.tiny import tiny_target


def a_round(num_accepted, confidence, *, verified=None, committed=None):
    verified = len(confidence) if verified is None else verified
    kept = num_accepted + 1 if committed is None else committed
    drafts = tuple(range(len(confidence)))
    return DecodingRound(0, 0, 5, drafts, confidence, verified, num_accepted, 9, (7,) * kept, 8, 0.1, 0.1)


def test_a_threshold_cuts_at_the_first_confidence_below_it():
    rounds = [a_round(2, (0.9, 0.3, 0.8)), a_round(3, (0.9, 0.9, 0.9)), a_round(0, (0.1, 0.9, 0.9))]
    figures = replay(rounds, 0.5)
    assert figures.verify_length == pytest.approx((1 + 3 + 0) / 3)
    assert figures.accepted_drafts == pytest.approx((1 + 3 + 0) / 3)
    assert figures.accepted_length == pytest.approx(figures.accepted_drafts + 1)
    assert figures.verify_rate == 1.0
    assert math.isnan(replay(rounds, 0.95).verify_rate) and replay(rounds, 0.95).accepted_length == 1


def test_a_stop_cuts_what_is_kept_and_not_what_is_accepted():
    figures = replay([a_round(3, (0.9, 0.9, 0.9, 0.2), committed=2)], 0.5)
    assert (figures.accepted_length, figures.accepted_drafts, figures.verify_rate) == (2, 2, 1.0)


def test_temperatures_move_a_confidence_over_the_threshold():
    rounds = [a_round(1, (0.6, 0.6))]
    assert replay(rounds, 0.7).verify_length == 0
    assert replay(rounds, 0.7, [0.1, 1.0]).verify_length == 1
    assert replay(rounds, 0.6).verify_length == replay(rounds, 0.6, [1.0, 1.0]).verify_length == 2


@pytest.fixture(scope="module")
def pair():
    """A drafter that is right about two drafts of five, with confidences of all sizes."""
    target = BigramPair(copy.deepcopy(tiny_target("qwen3"))).target
    next_ids = target(torch.arange(64)[:, None]).logits[:, 0].argmax(-1).tolist()

    def script(row, prefix, num_drafts):
        token, drafts = prefix[-1], []
        for depth in range(num_drafts):
            token = next_ids[token]
            drafts.append(token if depth < 2 else (token + 1) % 64)
        return drafts

    return target, scripted(tiny_drafter(target), script)


INPUTS = left_padded((3, 9, 5, 12, 7, 4, 8, 6))


def first_rounds(rounds):
    return {r.row: r for r in reversed(rounds)}


def test_the_whole_block_is_what_no_threshold_leaves(pair):
    rounds = WholeBlocks(*pair, temperature=0, max_new_tokens=20).decode(INPUTS).rounds
    figures, stats = replay(rounds, 0.0), DecodingStats(rounds)
    assert figures.accepted_length == stats.accepted_length
    assert figures.verify_length == stats.mean_verify_length
    assert figures.verify_rate == stats.verify_rate


@pytest.mark.parametrize("temperatures", [None, [0.5, 2.0, 1.0, 0.3, 1.5]])
def test_a_replayed_first_round_is_the_one_that_the_scheduler_runs(pair, temperatures):
    target, drafter = pair
    recorded = first_rounds(WholeBlocks(target, drafter, temperature=0, max_new_tokens=20).decode(INPUTS).rounds)
    thresholds = sorted(c for r in recorded.values() for c in r.confidence)[3::7]
    lengths = set()
    for threshold in thresholds:
        view = drafter.with_options(scheduler=ConfidenceThreshold(threshold))
        if temperatures is not None:
            view.config = copy.deepcopy(view.config)
            view.config.confidence_temperatures = {"greedy": temperatures}
        ran = first_rounds(generate(target, INPUTS, view, max_new_tokens=20).rounds)
        for row, real in ran.items():
            if min(abs(c - threshold) for c in real.confidence) < 1e-5:
                continue  # rounding in the last place decides there
            replayed = replay([recorded[row]], threshold, temperatures)
            assert replayed.verify_length == real.verify_length
            assert replayed.accepted_length == len(real.committed_ids)
            lengths.add(real.verify_length)
    assert len(lengths) > 2, "thresholds that cut at several places were compared"


def test_rounds_are_placed_by_the_length_of_the_text_before_them():
    rounds = tuple(a_round(accepted, (0.5, 0.5)) for accepted in (2, 0, 1))
    assert RecordedAnswer(1020, (7,) * 7, rounds).context_lengths == [1021, 1024, 1025]
    figures = context_figures([RecordedAnswer(1020, (7,) * 7, rounds), RecordedAnswer(8191, (7,), rounds[:1])])
    assert [(f.at_least, f.below, f.num_rounds) for f in figures] == [
        (0, 1024, 1),
        (1024, 4096, 2),
        (4096, 8192, 0),
        (8192, None, 1),
    ]
    assert (figures[1].accepted_length, figures[1].accepted_drafts) == (1.5, 0.5)
    assert math.isnan(figures[2].accepted_length)


def test_lengths_are_those_of_the_text_that_was_written(pair):
    batch = WholeBlocks(*pair, temperature=0, max_new_tokens=16).decode(INPUTS)
    for row, prompt_length in enumerate((3, 9, 5, 12, 7, 4, 8, 6)):
        answer = RecordedAnswer(prompt_length, tuple(batch.new_ids[row]), tuple(batch.rounds_of(row)))
        for length, round_ in zip(answer.context_lengths, answer.rounds, strict=True):
            assert answer.new_ids[length - prompt_length - 1] == round_.anchor_id


@pytest.mark.parametrize(
    "texts, share",
    [
        ([[1, 2, 3, 4, 5, 6, 7, 8]], 0),
        ([[1, 2, 3, 4, 1, 2, 3, 4]], 4 / 8),
        ([[1, 2, 3, 4, 9, 1, 2, 3, 4, 5]], 4 / 10),
        ([[5] * 10], 9 / 10),
        ([[1, 2, 3, 4], [1, 2, 3, 4]], 0),
        ([[1, 2, 3]], 0),
    ],
)
def test_repeated_tokens_are_those_in_a_run_of_four_seen_before_in_the_same_text(texts, share):
    assert repetition_share(texts) == pytest.approx(share)


def test_no_token_repeats_nothing():
    assert math.isnan(repetition_share([[]]))


def test_a_recording_leaves_drafter_and_random_state_alone(pair):
    target, drafter = pair
    drafter.config.confidence_temperatures = {"greedy": [2.0] * 5}
    options, before = dataclasses.replace(drafter.options), torch.get_rng_state()
    try:
        rounds = WholeBlocks(target, drafter, temperature=1.0, max_new_tokens=8, seed=3).decode(INPUTS)
        again = WholeBlocks(target, drafter, temperature=1.0, max_new_tokens=8, seed=3).decode(INPUTS)
        assert rounds.new_ids == again.new_ids
        assert torch.equal(torch.get_rng_state(), before)
        assert drafter.options == options and drafter.config.confidence_temperatures == {"greedy": [2.0] * 5}
    finally:
        drafter.config.confidence_temperatures = None
