"""Speculative sampling is lossless: exact laws, golden values, and controls that must fail."""

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hf_dspark import verification
from hf_dspark.scheduling import ConfidenceThreshold, FixedLength, Scheduler
from hf_dspark.verification import RandomSource, residual_probs, verify_greedy, verify_sampling
from tests.reference import (
    BestInHindsight,
    FirstDrop,
    FixedTarget,
    TopSurvivals,
    ToyDrafter,
    ToyTarget,
    completed_law,
    independent_law,
    law_of,
    slow_verify_greedy,
    slow_verify_sampling,
    total_variation,
    toy_round,
)

GOLDEN = load_file(Path(__file__).parent / "data" / "deepspec_loss" / "expected.safetensors")
EXACT = 1e-6
POLICIES = [FixedLength(), FixedLength(1), FixedLength(0), ConfidenceThreshold(0.3), ConfidenceThreshold(0.6)]


def distance_after_one_round(target, drafter, scheduler, prefixes=((0,),), **kwargs):
    """Total variation between the law of a round's tokens, continued by the target, and the target's own law."""
    num_tokens = drafter.block_size + 1
    committed = law_of(lambda source: toy_round(target, drafter, scheduler, prefixes, source, **kwargs))
    assert sum(committed.values()) == pytest.approx(1)
    assert max(len(rows[0]) for rows in committed) > 1 or scheduler == FixedLength(0)
    return total_variation(
        completed_law(committed, target, prefixes, num_tokens), independent_law(target, prefixes, num_tokens)
    )


# ------------------------------------------------------------------------------------------------- exact laws


@pytest.mark.parametrize("scheduler", POLICIES, ids=str)
@pytest.mark.parametrize(("vocab_size", "block_size"), [(2, 2), (2, 3), (3, 2), (4, 2)])
def test_a_round_leaves_the_law_of_the_tokens_to_the_target(scheduler, vocab_size, block_size):
    target, drafter = ToyTarget(vocab_size, seed=3), ToyDrafter(vocab_size, block_size, seed=4)
    assert distance_after_one_round(target, drafter, scheduler, [(1, 0)]) < EXACT


@pytest.mark.parametrize(
    "scheduler", [FixedLength(), ConfidenceThreshold(0.5), TopSurvivals(2)], ids=lambda s: repr(s)
)
def test_rows_of_a_batch_stay_independent(scheduler):
    target, drafter = ToyTarget(2, seed=11), ToyDrafter(2, 2, seed=2)
    assert distance_after_one_round(target, drafter, scheduler, [(0,), (1, 1)]) < EXACT


@pytest.mark.parametrize("scheduler", [FixedLength(), ConfidenceThreshold(0.5)], ids=str)
def test_several_rounds_have_the_targets_joint_law(scheduler):
    target, drafter, prefix, num_tokens = ToyTarget(2, seed=1), ToyDrafter(2, 2, seed=4), (1, 0), 3
    numbers_of_rounds = set()

    def decode(source):
        tokens, num_rounds = (), 0
        while len(tokens) < num_tokens:
            tokens += toy_round(target, drafter, scheduler, [(*prefix, *tokens)], source)[0]
            num_rounds += 1
        numbers_of_rounds.add(num_rounds)
        return tokens[:num_tokens]

    assert total_variation(law_of(decode), target.law(prefix, num_tokens)) < EXACT
    assert numbers_of_rounds == {1, 2, 3}


@pytest.mark.parametrize(
    ("vocab_size", "draft_vocab_size", "token_ids"), [(4, 2, None), (4, 2, (3, 1)), (4, 4, (2, 0, 3, 1))]
)
def test_a_restricted_or_permuted_draft_vocabulary_is_lossless(vocab_size, draft_vocab_size, token_ids):
    drafter = ToyDrafter(draft_vocab_size, 2, seed=4, token_ids=token_ids)
    assert distance_after_one_round(ToyTarget(vocab_size, seed=6), drafter, FixedLength()) < EXACT


def test_a_draft_vocabulary_padded_past_the_targets_is_lossless():
    def without_padding(logits):
        return logits.index_fill(-1, torch.tensor([3, 4]), float("-inf"))

    drafter = ToyDrafter(5, 2, seed=4, warp=without_padding)
    assert distance_after_one_round(ToyTarget(3, seed=6), drafter, FixedLength()) < EXACT


def test_greedy_drafts_under_sampling_are_lossless():
    def one_hot(logits):
        return torch.full_like(logits, float("-inf")).scatter(-1, logits.argmax(-1, keepdim=True), 0.0)

    drafter = ToyDrafter(3, 2, seed=8, warp=one_hot)
    assert distance_after_one_round(ToyTarget(3, seed=6), drafter, FixedLength()) < EXACT


def warp(logits):
    for warper in (TemperatureLogitsWarper(0.7), TopKLogitsWarper(5), TopPLogitsWarper(0.9)):
        logits = warper(None, logits)
    return logits


def test_warped_drafts_and_target_give_the_warped_targets_law():
    target, drafter = ToyTarget(16, seed=4, warp=warp), ToyDrafter(16, 2, seed=0, warp=warp)
    assert distance_after_one_round(target, drafter, FixedLength(), [(0, 3)]) < EXACT


def test_a_drafter_equal_to_the_target_is_always_accepted():
    target = ToyTarget(3, seed=2)

    class Same(ToyDrafter):
        def probs(self, prefix, position, previous_id):
            return target.probs([*prefix, *self.drafted(prefix, position, previous_id)])

        def drafted(self, prefix, position, previous_id):
            return [] if position == 0 else [previous_id]

    committed = law_of(lambda source: toy_round(target, Same(3, 2), FixedLength(), [(0,)], source))
    assert {len(rows[0]) for rows in committed} == {3}


# ---------------------------------------------------------------------------------- controls: these must fail


class AppendixADrafter(ToyDrafter):
    """Draws either token with probability 1/2; confident about the second draft iff the first one is token 0."""

    def __init__(self):
        super().__init__(vocab_size=2, block_size=2)

    def probs(self, prefix, position, previous_id):
        return torch.tensor([0.5, 0.5])

    def confidence(self, prefix, position, previous_id):
        return 0.8 if position == 0 else 0.95 if previous_id == 0 else 0.05


# One verified draft costs as much as a whole second step, the next is nearly free.
STAIRCASE_SECONDS = [1.0, 2.0, 2.1]


def first_token_law(scheduler):
    committed = law_of(
        lambda source: toy_round(FixedTarget([0.7, 0.3]), AppendixADrafter(), scheduler, [(0,)], source)[0][0]
    )
    return [committed[0], committed[1]]


def test_a_retrospective_schedule_changes_the_law_as_in_appendix_a():
    assert first_token_law(BestInHindsight(STAIRCASE_SECONDS)) == pytest.approx([0.85, 0.15], abs=EXACT)


@pytest.mark.parametrize(
    "scheduler",
    [FirstDrop(STAIRCASE_SECONDS), ConfidenceThreshold(0.5), FixedLength()],
    ids=["drop", "below", "fixed"],
)
def test_a_causal_schedule_keeps_the_law_of_appendix_a(scheduler):
    assert first_token_law(scheduler) == pytest.approx([0.7, 0.3], abs=EXACT)


def test_dropping_a_drafted_token_for_what_it_is_changes_the_law():
    """A drafted end-of-sequence must be verified like any token and cut afterwards."""

    class DropToken0(Scheduler):
        def verify_lengths(self, request):
            # The drafter's second confidence betrays the first draft.
            return [0 if row[1] > 0.5 else 2 for row in request.confidence]

    assert first_token_law(DropToken0())[0] == pytest.approx(0.5 * 0.7 + 0.5 * 0.4, abs=EXACT)


@pytest.mark.parametrize("claim", ["unwarped", "without the Markov bias"])
def test_claiming_other_draft_probs_than_drawn_from_changes_the_law(claim):
    target, drafter = ToyTarget(16, seed=4, warp=warp), ToyDrafter(16, 2, seed=0, warp=warp)

    def claimed_probs(prefix, position, previous_id):
        if claim == "unwarped":
            return drafter.logits(prefix, position, previous_id).softmax(-1)
        return drafter.probs(prefix, position, previous_id=0)

    distance = distance_after_one_round(target, drafter, FixedLength(), [(0, 3)], claimed_probs=claimed_probs)
    assert distance > 1e-2


def test_correcting_a_rejection_with_the_targets_own_distribution_changes_the_law(monkeypatch):
    target, drafter = ToyTarget(3, seed=3), ToyDrafter(3, 2, seed=5)
    monkeypatch.setattr(verification, "residual_probs", lambda target_probs, draft_probs: target_probs)
    assert distance_after_one_round(target, drafter, FixedLength()) > 1e-2


# ------------------------------------------------------------------------------------------ the accept test


def test_uniform_zero_never_accepts_a_token_the_target_cannot_produce(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda shape, **kwargs: torch.zeros(shape, dtype=kwargs["dtype"]))
    accepted = RandomSource().accept(torch.tensor([0.0, 0.0, 1e-30]), torch.tensor([0.5, 0.0, 0.5]))
    assert accepted.tolist() == [False, False, True]


def test_acceptance_is_the_ratio_of_probabilities_capped_at_one(monkeypatch):
    grid = torch.arange(1000) / 1000
    monkeypatch.setattr(torch, "rand", lambda shape, **kwargs: grid.to(kwargs["dtype"]))
    for target_prob, draft_prob in itertools.product([0.0, 0.1, 0.35, 1.0], [0.1, 0.35, 0.7, 1.0]):
        accepted = RandomSource().accept(torch.full((1000,), target_prob), torch.full((1000,), draft_prob))
        assert accepted.float().mean().item() == pytest.approx(min(1, target_prob / draft_prob), abs=2e-3)


def test_equal_probabilities_are_accepted_whatever_the_uniform():
    largest = 1 - torch.finfo(torch.float32).eps / 2
    probs = torch.rand(100_000, generator=torch.Generator().manual_seed(0))
    assert (largest * probs < probs).logical_or(probs == 0).all()


@pytest.mark.parametrize("claim_raw", [False, True], ids=["warped", "raw"])
def test_chi_square_of_real_draws(claim_raw):
    """The real source of randomness, 40 000 rows at once: the first token follows the target's law."""
    num_rows, vocab_size = 40_000, 16
    generator = torch.Generator().manual_seed(32)
    source = RandomSource(generator)
    target_logits, draft_logits = 2 * torch.randn(2, vocab_size, generator=generator)
    target_probs, draft_probs = warp(target_logits[None]).softmax(-1), warp(draft_logits[None]).softmax(-1)
    draft_ids = source.categorical(draft_probs.expand(num_rows, -1))
    claimed = draft_logits[None].softmax(-1) if claim_raw else draft_probs
    verdict = verify_sampling(
        draft_ids[:, None],
        target_probs.expand(2 * num_rows, -1),
        draft_probs=claimed[None].expand(num_rows, -1, -1),
        verify_lengths=[1] * num_rows,
        random_source=source,
    )
    tokens = torch.where(verdict.num_accepted > 0, draft_ids, verdict.next_ids)
    expected = target_probs[0] * num_rows
    possible = expected > 0
    counts = tokens.bincount(minlength=vocab_size)
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum().item()
    critical = 18.47  # 99.9 % quantile with 4 degrees of freedom (top-k leaves 5 tokens at most)
    assert 0 < verdict.num_accepted.float().mean() < 1
    assert (counts[~possible].sum() > 0 or statistic > critical) if claim_raw else statistic < critical


def test_a_seeded_generator_repeats_its_decisions_and_the_global_one_is_the_default():
    probs = torch.rand(64, 8)

    def decisions(source):
        return source.categorical(probs).tolist(), source.accept(probs, probs.flip(1)).tolist()

    seeded = [decisions(RandomSource(torch.Generator().manual_seed(seed))) for seed in (1, 1, 2)]
    assert seeded[0] == seeded[1] != seeded[2]
    assert decisions(RandomSource(torch.manual_seed(1))) == seeded[0]
    torch.manual_seed(1)
    assert decisions(RandomSource()) == seeded[0]


# -------------------------------------------------------------------------------- against the slow reference


class ScriptedSource(RandomSource):
    """Given uniforms; the token after the drafts is the most probable one, and its distribution is kept."""

    def __init__(self, uniforms):
        super().__init__()
        self._uniforms = uniforms
        self.next_probs = None

    def accept(self, target_prob, draft_prob):
        return self._uniforms * draft_prob < target_prob

    def categorical(self, probs):
        self.next_probs = probs
        return probs.argmax(-1)


def random_probs(*shape, generator):
    """Distributions with many exact zeros, as top-k leaves them."""
    probs = torch.rand(*shape, generator=generator, dtype=torch.float64)
    probs = probs * (torch.rand(*shape, generator=generator) < 0.6)
    probs[..., 0] += 0.1
    return probs / probs.sum(-1, keepdim=True)


rounds = st.integers(0, 4).flatmap(
    lambda num_drafts: st.tuples(
        st.just(num_drafts),
        st.lists(st.integers(0, num_drafts), min_size=1, max_size=5),
        st.integers(2, 7),
        st.integers(0, 2**31),
    )
)


@settings(max_examples=100, deadline=None)
@given(rounds)
def test_sampling_verdicts_equal_the_reference_on_ragged_rows(drawn):
    num_drafts, lengths, vocab_size, seed = drawn
    generator = torch.Generator().manual_seed(seed)
    draft_ids = torch.randint(vocab_size, (len(lengths), num_drafts), generator=generator)
    target_probs = random_probs(len(lengths) + sum(lengths), vocab_size, generator=generator)
    draft_probs = random_probs(len(lengths), num_drafts, vocab_size, generator=generator)
    uniforms = torch.rand(len(lengths), num_drafts, generator=generator, dtype=torch.float64)
    source = ScriptedSource(uniforms)
    verdict = verify_sampling(
        draft_ids, target_probs, draft_probs=draft_probs, verify_lengths=lengths, random_source=source
    )
    for row, own_targets in enumerate(target_probs.split([1 + length for length in lengths])):
        num_accepted, next_probs = slow_verify_sampling(
            draft_ids[row].tolist(),
            own_targets.tolist(),
            draft_probs[row].tolist(),
            lengths[row],
            uniforms[row].tolist(),
        )
        assert verdict.num_accepted[row] == num_accepted
        torch.testing.assert_close(source.next_probs[row], torch.tensor(next_probs, dtype=torch.float64))
        assert verdict.next_ids[row] == source.next_probs[row].argmax()


@settings(max_examples=100, deadline=None)
@given(rounds)
def test_greedy_verdicts_equal_the_reference_on_ragged_rows(drawn):
    num_drafts, lengths, _, seed = drawn
    generator = torch.Generator().manual_seed(seed)
    draft_ids = torch.randint(2, (len(lengths), num_drafts), generator=generator)
    target_ids = torch.randint(2, (len(lengths) + sum(lengths),), generator=generator)
    verdict = verify_greedy(draft_ids, target_ids, verify_lengths=lengths)
    for row, own_targets in enumerate(target_ids.split([1 + length for length in lengths])):
        expected = slow_verify_greedy(draft_ids[row].tolist(), own_targets.tolist(), lengths[row])
        assert (verdict.num_accepted[row], verdict.next_ids[row]) == expected


@settings(max_examples=50, deadline=None)
@given(rounds)
def test_greedy_is_sampling_with_one_hot_distributions(drawn):
    num_drafts, lengths, vocab_size, seed = drawn
    generator = torch.Generator().manual_seed(seed)
    draft_ids = torch.randint(vocab_size, (len(lengths), num_drafts), generator=generator)
    target_ids = torch.randint(vocab_size, (len(lengths) + sum(lengths),), generator=generator)
    greedy = verify_greedy(draft_ids, target_ids, verify_lengths=lengths)
    sampled = verify_sampling(
        draft_ids,
        torch.nn.functional.one_hot(target_ids, vocab_size).float(),
        draft_probs=torch.nn.functional.one_hot(draft_ids, vocab_size).float(),
        verify_lengths=lengths,
        random_source=RandomSource(generator),
    )
    assert torch.equal(greedy.num_accepted, sampled.num_accepted)
    assert torch.equal(greedy.next_ids, sampled.next_ids)


def test_what_was_not_verified_may_hold_anything():
    source = RandomSource(torch.Generator().manual_seed(0))
    verdict = verify_sampling(
        torch.tensor([[1, -1, 99]]),
        torch.tensor([[0.0, 1.0], [1.0, 0.0]]),
        draft_probs=torch.tensor([[[0.5, 0.5], [float("nan")] * 2, [float("nan")] * 2]]),
        verify_lengths=[1],
        random_source=source,
    )
    assert (verdict.num_accepted.tolist(), verdict.next_ids.tolist()) == ([1], [0])


# ------------------------------------------------------------------------------------- DeepSpec's own values


class RejectAt(RandomSource):
    """Accepts the drafts before `position` and rejects it; keeps what it was asked."""

    def __init__(self, position):
        super().__init__()
        self._position = position

    def accept(self, target_prob, draft_prob):
        self.accept_prob = (target_prob / draft_prob).clamp(max=1)
        return (torch.arange(target_prob.shape[1]) < self._position)[None]

    def categorical(self, probs):
        self.next_probs = probs
        return probs.argmax(-1)


@pytest.mark.parametrize("temperature", ["0.0", "0.7", "1.0"])
def test_acceptance_residual_and_bonus_equal_deepspecs(temperature):
    def probs(logits):
        if temperature == "0.0":
            return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
        return (logits / float(temperature)).softmax(-1)

    golden = {name: GOLDEN[f"reject.t{temperature}.{name}"] for name in ("accept_prob", "residual", "bonus")}
    num_drafts = GOLDEN["reject.draft_tokens"].shape[1]
    for position in range(num_drafts + 1):
        source = RejectAt(position)
        verdict = verify_sampling(
            GOLDEN["reject.draft_tokens"],
            probs(GOLDEN["reject.target_logits"][0]),
            draft_probs=probs(GOLDEN["reject.draft_logits"]),
            verify_lengths=[num_drafts],
            random_source=source,
        )
        assert verdict.num_accepted.tolist() == [position]
        expected = golden["bonus"][0] if position == num_drafts else golden["residual"][0, position]
        torch.testing.assert_close(source.next_probs[0], expected, atol=1e-6, rtol=1e-5)
        if temperature != "0.0":  # 0 / 0 where neither of two one-hot distributions holds the token
            torch.testing.assert_close(source.accept_prob, golden["accept_prob"], atol=1e-6, rtol=1e-5)


def test_residual_without_mass_is_the_target():
    target_probs = torch.tensor([[0.2, 0.8], [0.5, 0.5]])
    draft_probs = torch.tensor([[0.2, 0.8], [1.0, 0.0]])
    residual = residual_probs(target_probs, draft_probs)
    torch.testing.assert_close(residual, torch.tensor([[0.2, 0.8], [0.0, 1.0]]))


# ------------------------------------------------------------------------------------------------ user errors


@pytest.mark.parametrize("verify_lengths", [[3], [-1], [1, 1], []])
def test_verify_lengths_that_do_not_fit_are_named(verify_lengths):
    with pytest.raises(ValueError, match=r"one length in 0\.\.2 for each of the 1 rows"):
        verify_greedy(torch.tensor([[0, 1]]), torch.tensor([0, 1, 0]), verify_lengths=verify_lengths)


def test_a_target_output_of_the_wrong_size_is_named():
    with pytest.raises(ValueError, match="2 entries for the verify lengths"):
        verify_greedy(torch.tensor([[0, 1]]), torch.tensor([0, 1, 0]), verify_lengths=[1])


def test_half_precision_and_misshapen_probabilities_are_refused():
    call = {"verify_lengths": [1], "random_source": RandomSource()}
    target_probs, draft_probs = torch.full((2, 2), 0.5), torch.full((1, 1, 2), 0.5)
    with pytest.raises(TypeError, match="float32"):
        verify_sampling(torch.tensor([[0]]), target_probs.half(), draft_probs=draft_probs.half(), **call)
    with pytest.raises(TypeError, match="float32"):
        verify_sampling(torch.tensor([[0]]), target_probs, draft_probs=draft_probs.bfloat16(), **call)
    with pytest.raises(ValueError, match="one distribution per draft"):
        verify_sampling(torch.tensor([[0]]), target_probs, draft_probs=draft_probs[:, :0], **call)


def test_the_first_draft_is_judged_whether_it_is_verified_or_not():
    """Exactly its acceptance probability: what accepting it at random comes to on average."""
    target, drafter = ToyTarget(4, seed=3), ToyDrafter(4, 2, seed=5)
    target_probs, draft_probs = target.probs([0])[None], drafter.probs([0], 0, 0)[None, None].expand(1, 2, -1)
    for token in range(4):
        drafts = torch.tensor([[token, 0]])
        expected = min(1.0, (target_probs[0, token] / draft_probs[0, 0, token]).item())
        for length in (0, 1):
            verdict = verify_sampling(
                drafts,
                target_probs.expand(1 + length, -1),
                draft_probs=draft_probs,
                verify_lengths=[length],
                random_source=RandomSource(torch.Generator().manual_seed(0)),
            )
            assert verdict.first_stands.tolist() == pytest.approx([expected])
        verdict = verify_greedy(drafts, torch.tensor([2]), verify_lengths=[0])
        assert verdict.first_stands.tolist() == [float(token == 2)]
