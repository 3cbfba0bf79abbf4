"""Sampling in the engine: exactly the target's law, and with its own generator a text that nothing else changes."""

import collections
import dataclasses
import itertools

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper

from hf_dspark import ConfidenceThreshold, DSparkEngine, FixedLength, Scheduler, judging, request_settings
from hf_dspark.choosing import PlaceNoise, place_tokens
from hf_dspark.processors import RowProcessors
from tests.drafters import AUTOREGRESSIVE, assert_drafted, tiny_drafter
from tests.engines import equal, prompts
from tests.reference import BranchSource, law_of, total_variation
from tests.test_decoding import enumeration_pair, p_value, target_law
from tests.tiny import tiny_target

SAMPLED = {"do_sample": True, "max_new_tokens": 11, "temperature": 1.3}


def seeded(seed):
    return torch.Generator().manual_seed(seed)


# -------------------------------------------------------------------------------------------- a generator of one's own


class OfTheLoad(Scheduler):
    """Verify lengths, and whether to draft, that depend on how many rows there are and on the number of the round."""

    def wants_drafts(self, num_rows, context):
        return num_rows % 3 != 2

    def verify_lengths(self, request):
        return [
            min(limit, (request.step + len(request.rows) + row) % 6) for row, limit in enumerate(request.max_lengths)
        ]


def slow_text(target, prompt, seed, num_new_tokens, processors=()):
    """Sampling one token at a time: argmax p / E with the noise E of the place."""
    noise, ids = PlaceNoise(seed, torch.device("cpu")), prompt.tolist()
    for place in range(num_new_tokens):
        with torch.no_grad():
            scores = target(torch.tensor([ids])).logits[:, -1].float()
        for processor in processors:
            scores = processor(torch.tensor([ids]), scores)
        ids.append(int((scores.softmax(-1) / noise.at(place, 0, scores.shape[-1])).argmax()))
    return torch.tensor([ids])


def test_a_text_with_its_own_generator_is_a_function_of_target_prompt_and_seed():
    target, batch = tiny_target("llama"), prompts((4, 9, 1, 17, 6, 2))
    seeds = [int(torch.randint(1 << 62, (), generator=seeded(7 + n))) for n in range(len(batch))]
    warpers = [TemperatureLogitsWarper(1.3), TopKLogitsWarper(50)]
    expected = [slow_text(target, p, s, 11, warpers) for p, s in zip(batch, seeds, strict=True)]
    setups = {
        "alone, no drafter": (None, None, 1),
        "no drafter": (None, None, 6),
        "whole blocks": ({}, FixedLength(), 4),
        "threshold": ({}, ConfidenceThreshold(0.5), 3),
        "of the load": ({}, OfTheLoad(), 5),
        "reduced vocabulary": ({"draft_vocab_size": 20}, OfTheLoad(), 6),
        "another drafter": (AUTOREGRESSIVE | {"seed": 4}, FixedLength(), 6),
    }
    for name, (head, scheduler, size) in setups.items():
        drafter = None if head is None else tiny_drafter(target, **head)
        serving = DSparkEngine(target, drafter, scheduler=scheduler, max_batch_size=size, prefill_chunk=5)
        requests = []
        for number, prompt in enumerate(batch):
            requests.append(serving.submit(prompt, generator=seeded(7 + number), **SAMPLED))
            serving.submit(prompt, do_sample=number % 2 == 0, max_new_tokens=3 + number)
            if name == "threshold":
                serving.step()
        serving.run()
        assert equal([r.result() for r in requests], expected), name
        rounds = [r for request in requests for r in request.rounds]
        if scheduler == FixedLength():
            assert_drafted(rounds)
            assert 0 < sum(r.num_accepted for r in rounds) < sum(r.verify_length for r in rounds)


def test_processors_that_look_at_ids_work_with_it_too():
    target, (prompt,) = tiny_target("llama"), prompts((6,))
    options = SAMPLED | {"repetition_penalty": 1.8, "top_k": 20}
    results = []
    for drafter in (None, tiny_drafter(target, draft_vocab_size=20), tiny_drafter(target)):
        serving = DSparkEngine(target, drafter, scheduler=None if drafter is None else FixedLength())
        results.append(serving.generate_batch([prompt], generator=seeded(3), **options))
    assert equal(results[0], results[1]) and equal(results[0], results[2])


def test_seeds_make_the_difference_and_one_generator_serves_many_requests():
    target, (prompt,) = tiny_target("llama"), prompts((6,))
    serving = DSparkEngine(target, tiny_drafter(target), scheduler=FixedLength())
    state = torch.get_rng_state()
    first, again = (serving.generate_batch([prompt] * 4, generator=seeded(1), **SAMPLED) for _ in range(2))
    assert equal(first, again)
    assert len({tuple(text[0].tolist()) for text in first}) == 4
    assert torch.equal(torch.get_rng_state(), state), "torch's own generator is left alone"


def chi_square_p_value(counts, expected):
    cells = [(counts.get(key, 0) - mean) ** 2 / mean for key, mean in expected.items()]
    return p_value(sum(cells), len(cells) - 1)


def test_tokens_at_places_have_the_law_they_are_drawn_from_jointly_over_places():
    probs = torch.tensor([[0.5, 0.0, 0.3, 0.2], [0.1, 0.6, 0.3, 0.0]])
    counts, num_texts = collections.Counter(), 20000
    for seed in range(num_texts):
        ids, possible = place_tokens(probs, PlaceNoise(seed, torch.device("cpu")), 3)
        assert possible.all()
        counts[tuple(ids.tolist())] += 1
    expected = {
        (a, b): num_texts * float(probs[0, a] * probs[1, b])
        for a, b in itertools.product(range(4), repeat=2)
        if probs[0, a] * probs[1, b] > 0
    }
    assert set(counts) <= set(expected), "what has no probability is never drawn"
    assert chi_square_p_value(counts, expected) > 1e-3
    skewed = {key: mean * (1.1 if key[0] == 0 else 0.9) for key, mean in expected.items()}
    assert chi_square_p_value(counts, skewed) < 1e-6, "the test can fail"


def test_noise_is_bound_to_its_place_and_kept_no_longer_than_a_round():
    noise, again = (PlaceNoise(5, torch.device("cpu")) for _ in range(2))
    forwards = [noise.at(place, 0, 9) for place in range(6)]
    backwards = [again.at(0, place, 9) for place in reversed(range(6))][::-1]
    assert all(torch.equal(f, b) for f, b in zip(forwards, backwards, strict=True))
    assert len({tuple(f.tolist()) for f in forwards}) == 6
    assert list(noise._kept) == [5]


def test_a_text_that_nothing_can_follow_is_an_error():
    target, (prompt,) = tiny_target("llama"), prompts((6,))

    def forbid(ids, scores):
        return torch.full_like(scores, float("-inf")) if ids.shape[1] > 8 else scores

    for generator in (seeded(1), None):
        serving = DSparkEngine(target, tiny_drafter(target), scheduler=FixedLength())
        request = serving.submit(prompt, logits_processor=[forbid], generator=generator, **SAMPLED)
        serving.run()
        assert request.state == "failed" and 1 <= len(request.new_ids) <= 3


# ------------------------------------------------------------------------------------------------ the law, enumerated


class Shared(BranchSource):
    """Hands every request the same enumerating source; first tokens are given, since nothing is speculated there."""

    def __init__(self, source, first_ids):
        self._source, self._first_ids = source, list(first_ids)

    def categorical(self, probs):
        if self._first_ids:
            return torch.tensor([self._first_ids.pop(0)])
        return self._source.categorical(probs)

    def accept(self, target_prob, draft_prob):
        return self._source.accept(target_prob, draft_prob)


PROMPTS, FIRST_IDS = [[1, 0], [0, 1, 1]], [1, 0]
SETTINGS = [{"temperature": 0.7}, {"temperature": 1.6}]


def whole(prompt):
    """A prompt of which every token counts, the padding token too."""
    return {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt), dtype=torch.long)}


def law_through_the_engine(monkeypatch, scheduler, num_new_tokens=3):
    """Joint law of the new tokens of two requests of different settings, in one batch with a greedy one."""
    target, drafter = enumeration_pair(2)
    lengths = set()

    def run(source):
        shared = Shared(source, FIRST_IDS)
        monkeypatch.setattr(request_settings, "RandomSource", lambda generator: shared)
        serving = DSparkEngine(target, drafter, scheduler=scheduler)
        options = {"do_sample": True, "top_k": 0, "max_new_tokens": num_new_tokens}
        requests = [
            serving.submit(whole(prompt), **options | own) for prompt, own in zip(PROMPTS, SETTINGS, strict=True)
        ]
        serving.submit(whole([1, 1]), do_sample=False, max_new_tokens=num_new_tokens)
        serving.run()
        lengths.update(r.verify_length for request in requests for r in request.rounds)
        return tuple(tuple(request.new_ids) for request in requests)

    law = law_of(run)
    assert sum(law.values()) == pytest.approx(1)
    return law, lengths


def law_of_the_target(num_new_tokens=3):
    target, _ = enumeration_pair(2)
    own = [
        target_law(target, prompt, [first], num_new_tokens, [TemperatureLogitsWarper(setting["temperature"])]).items()
        for prompt, first, setting in zip(PROMPTS, FIRST_IDS, SETTINGS, strict=True)
    ]
    return {(a, b): p * q for (a, p), (b, q) in itertools.product(*own)}


@pytest.mark.parametrize("scheduler", [FixedLength(), ConfidenceThreshold(0.45)], ids=["fixed", "threshold"])
def test_two_requests_of_different_settings_have_the_joint_law_of_two_targets(monkeypatch, scheduler):
    law, lengths = law_through_the_engine(monkeypatch, scheduler)
    assert len(law) == 16 and lengths == {0, 1}
    assert total_variation(law, law_of_the_target()) < 1e-6


def test_a_row_judged_by_other_scores_changes_the_law(monkeypatch):
    """The control: the enumeration can fail."""
    sampled = judging._sampled

    def mixed_up(choice, drafts, part, scores, lengths):
        return sampled(choice, drafts, part, scores.flip(-1), lengths)

    monkeypatch.setattr(judging, "_sampled", mixed_up)
    law, _ = law_through_the_engine(monkeypatch, FixedLength())
    assert total_variation(law, law_of_the_target()) > 1e-3


def test_drafts_said_to_come_from_a_neighbours_probabilities_change_the_law(monkeypatch):
    """The control for the other side: q must be what each row's drafts were drawn from."""
    sampled = judging._sampled

    def mixed_up(choice, drafts, part, scores, lengths):
        probs = drafts.probs.roll(1, 0) if len(drafts.probs) > 1 else drafts.probs
        return sampled(choice, dataclasses.replace(drafts, probs=probs), part, scores, lengths)

    monkeypatch.setattr(judging, "_sampled", mixed_up)
    law, _ = law_through_the_engine(monkeypatch, FixedLength())
    assert total_variation(law, law_of_the_target()) > 1e-3


def test_processors_of_a_single_row_serve_it_by_any_number():
    processors = RowProcessors([lambda ids, scores: scores + ids.shape[1]], 1)
    scores = processors.apply(torch.zeros(2, 3), rows=[7, 123], prefix=lambda n: torch.arange(n + 1))
    assert scores[:, 0].tolist() == [1, 2]
