"""Accepting and rejecting drafted tokens: the step that keeps speculative decoding lossless.

Given drafts, the distributions they were drawn from and the target's distributions at the same positions, decide how
many drafts of every request stand and which token follows them. Section 2 and Eq. 1 of the DSpark paper
(https://huggingface.co/papers/2607.05147); the accept/residual rule is that of speculative sampling
(https://huggingface.co/papers/2211.17192).

This module knows tensors only: no model, no cache, no vocabulary, no schedule, no stopping. Whoever calls it promises
that `draft_probs[r, k]` is *exactly* the distribution `draft_ids[r, k]` was drawn from (Markov bias, logits processors
and any restriction of the vocabulary included) and that `verify_lengths[r]` was decided without looking at the drafts
it decides about (see `scheduling.py`). All randomness of decoding goes through `RandomSource`.

Packed layout: the target scores the anchor and the first `l_r` drafts of row r, hence row r owns the `1 + l_r` entries
that start at `sum(1 + l_s for s < r)`; its entry k is the target's opinion about draft k (counted from 0), its last
entry the one about the bonus token.

Shapes: R requests, L drafted positions (L <= K, may be 0), V target vocabulary, Vd draft vocabulary, N packed tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F


class RandomSource:
    """
    Every random decision of a decoding run: drawing drafts, accepting them, drawing the token after them.

    Tests replace it by an enumerator that walks through every branch of the same code with its probability.

    Args:
        generator (`torch.Generator`, *optional*):
            Source of randomness on the device of the probabilities. Defaults to torch's global generator, which is
            what `generate` uses, so that `torch.manual_seed` works as usual.
    """

    def __init__(self, generator: torch.Generator | None = None):
        self.generator = generator

    def categorical(self, probs: torch.Tensor) -> torch.Tensor:
        """Draws one id per row of `probs` `[N, V]`; returns `torch.LongTensor` `[N]`."""
        return torch.multinomial(probs, num_samples=1, generator=self.generator).squeeze(1)

    def accept(self, target_prob: torch.Tensor, draft_prob: torch.Tensor) -> torch.Tensor:
        """Accepts each entry with probability `min(1, target_prob / draft_prob)`; returns a `torch.BoolTensor`."""
        uniform = torch.rand(
            target_prob.shape, generator=self.generator, device=target_prob.device, dtype=target_prob.dtype
        )
        # Strict, and as a product: `uniform` may be 0, which must not accept a token the target never produces, and
        # nothing is divided by a vanishing draft probability.
        return uniform * draft_prob < target_prob


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """
    What verification says about one round.

    Attributes:
        num_accepted (`torch.LongTensor` of shape `[R]`):
            How many leading drafts of each row stand, at most its verify length.
        next_ids (`torch.LongTensor` of shape `[R]`):
            The token after them: the correction of the first rejected draft, or the bonus if none was rejected.
        first_stands (`torch.FloatTensor` of shape `[R]`, *optional*):
            Chance that the first draft of each row stands, verified or not: the scores after the anchor, which every
            round has, judge it for nothing. `None` without drafts. It decides nothing; it is there to learn from.
    """

    num_accepted: torch.Tensor
    next_ids: torch.Tensor
    first_stands: torch.Tensor | None = None


def residual_probs(target_probs: torch.Tensor, draft_probs: torch.Tensor) -> torch.Tensor:
    """
    Distribution of the token that replaces a rejected draft: `(p_t - p_d)+`, normalised.

    Args:
        target_probs (`torch.FloatTensor` of shape `[R, V]`): p_t.
        draft_probs (`torch.FloatTensor` of shape `[R, V]`): p_d; an all-zero row gives p_t itself.

    Returns:
        `torch.FloatTensor` of shape `[R, V]`.
    """
    residual = (target_probs - draft_probs).clamp_(min=0)
    mass = residual.sum(dim=-1, keepdim=True)
    # Equal distributions are never rejected in exact arithmetic; where rounding did it, any draw is as good as p_t's.
    residual = torch.where(mass > 0, residual, target_probs)
    return residual / residual.sum(dim=-1, keepdim=True)


def verify_greedy(draft_ids: torch.Tensor, target_ids: torch.Tensor, *, verify_lengths: Sequence[int]) -> Verdict:
    """
    Greedy verification: a draft stands iff it and all drafts before it are the target's argmax.

    Args:
        draft_ids (`torch.LongTensor` of shape `[R, L]`): Drafted token ids; those past the verify length are ignored.
        target_ids (`torch.LongTensor` of shape `[N]`): The target's argmax at every packed entry.
        verify_lengths (`Sequence[int]` of length R): Drafts verified per row, each in `0..L`.

    Returns:
        [`Verdict`]

    Raises:
        ValueError: if the shapes and `verify_lengths` do not fit each other.
    """
    layout = _PackedEntries(draft_ids, target_ids, verify_lengths)
    stands = (draft_ids == target_ids[layout.of_drafts]) & layout.verified
    num_accepted = _count_leading(stands)
    first_stands = (draft_ids[:, 0] == target_ids[layout.first]).float() if draft_ids.shape[1] else None
    return Verdict(num_accepted, target_ids[layout.first + num_accepted], first_stands)


def verify_sampling(
    draft_ids: torch.Tensor,
    target_probs: torch.Tensor,
    *,
    draft_probs: torch.Tensor,
    verify_lengths: Sequence[int],
    random_source: RandomSource,
    draft_token_ids: torch.Tensor | None = None,
) -> Verdict:
    """
    Speculative sampling: accept draft k with probability `min(1, p_t / p_d)`, left to right; the first rejected draft
    is replaced by a draw from the residual, and when all stand a bonus token is drawn from the target.

    Only one row of probabilities per request is expanded to the vocabulary.

    Args:
        draft_ids (`torch.LongTensor` of shape `[R, L]`):
            Drafted *target* token ids; those past the verify length are ignored.
        target_probs (`torch.FloatTensor` of shape `[N, V]`): The target's processed probabilities, packed.
        draft_probs (`torch.FloatTensor` of shape `[R, L, Vd]`): What each draft was drawn from.
        verify_lengths (`Sequence[int]` of length R): Drafts verified per row, each in `0..L`.
        random_source ([`RandomSource`]): Where the uniform numbers and the draws come from.
        draft_token_ids (`torch.LongTensor` of shape `[Vd]`, *optional*):
            Target token id of every column of `draft_probs`, without repetition. By default column v is token v, and
            Vd may be smaller or larger than V (paddings of one vocabulary); columns past V must never be drafted.

    Returns:
        [`Verdict`]

    Raises:
        ValueError: if the shapes and `verify_lengths` do not fit each other.
        TypeError: if the probabilities are of half precision.
    """
    _check_probs(draft_ids, target_probs, draft_probs)
    layout = _PackedEntries(draft_ids, target_probs, verify_lengths)
    num_rows, num_drafts = draft_ids.shape
    vocab_size = target_probs.shape[-1]
    if num_drafts == 0:  # a round of plain decoding, at its price
        return Verdict(layout.lengths, random_source.categorical(target_probs))

    verified_ids = draft_ids.masked_fill(~layout.verified, 0)  # the others may be anything, even out of range
    draft_columns = verified_ids if draft_token_ids is None else _columns_of(verified_ids, draft_token_ids, vocab_size)
    draft_prob = draft_probs.gather(2, draft_columns[..., None]).squeeze(2)
    # What was not verified has no say: probability 0 is never accepted.
    target_prob = target_probs[layout.of_drafts, verified_ids].masked_fill(~layout.verified, 0.0)
    num_accepted = _count_leading(random_source.accept(target_prob, draft_prob))

    # The bonus is the residual against a draft that proposed nothing: p_t - 0.
    row_index = torch.arange(num_rows, device=draft_ids.device)
    all_stand = num_accepted == layout.lengths
    rejected_probs = draft_probs[row_index, num_accepted.clamp(max=num_drafts - 1)]
    rejected_probs = rejected_probs.masked_fill(all_stand[:, None], 0.0)
    next_probs = residual_probs(
        target_probs[layout.first + num_accepted], _over_target_vocab(rejected_probs, draft_token_ids, vocab_size)
    )
    first_stands = _first_stands(draft_ids[:, 0], target_probs[layout.first], draft_probs[:, 0], draft_token_ids)
    return Verdict(num_accepted, random_source.categorical(next_probs), first_stands)


def _first_stands(
    first_ids: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    draft_token_ids: torch.Tensor | None,
) -> torch.Tensor:
    """Acceptance probability of the first drafts `[R]`, of which some may not be tokens of the target: 0 for those."""
    vocab_size = target_probs.shape[-1]
    possible = (first_ids >= 0) & (first_ids < vocab_size)
    token_ids = first_ids.masked_fill(~possible, 0)[:, None]
    columns = token_ids if draft_token_ids is None else _columns_of(token_ids, draft_token_ids, vocab_size)
    ratio = target_probs.gather(1, token_ids) / draft_probs.gather(1, columns)
    return ratio.squeeze(1).nan_to_num(0.0).clamp(max=1).masked_fill(~possible, 0.0)


class _PackedEntries:
    """
    Where the rows of a round lie in the packed axis of the target's output.

    Attributes:
        lengths (`[R]`): verify lengths as a tensor; first (`[R]`): first entry of each row.
        verified (`[R, L]`): whether a drafted position was scored by the target.
        of_drafts (`[R, L]`): the entry that judges each draft; some valid entry where `verified` is False.
    """

    def __init__(self, draft_ids: torch.Tensor, packed: torch.Tensor, verify_lengths: Sequence[int]):
        num_rows, num_drafts = draft_ids.shape
        if len(verify_lengths) != num_rows or not all(0 <= length <= num_drafts for length in verify_lengths):
            raise ValueError(
                f"`verify_lengths` must hold one length in 0..{num_drafts} for each of the {num_rows} rows of "
                f"`draft_ids`, but is {list(verify_lengths)}."
            )
        num_entries = num_rows + sum(verify_lengths)
        if packed.shape[0] != num_entries:
            raise ValueError(
                f"The target must have scored the anchor and every verified draft, {num_entries} entries for the "
                f"verify lengths {list(verify_lengths)}, but its output has {packed.shape[0]}."
            )
        self.lengths = torch.tensor(list(verify_lengths), dtype=torch.long, device=draft_ids.device)
        self.first = (self.lengths + 1).cumsum(0) - (self.lengths + 1)
        position = torch.arange(num_drafts, device=draft_ids.device)
        self.verified = position < self.lengths[:, None]
        self.of_drafts = self.first[:, None] + torch.minimum(position, self.lengths[:, None])


def _count_leading(stands: torch.Tensor) -> torch.Tensor:
    """Number of leading True entries of each row of `[R, L]`."""
    return stands.long().cumprod(dim=1).sum(dim=1)


def _check_probs(draft_ids: torch.Tensor, target_probs: torch.Tensor, draft_probs: torch.Tensor) -> None:
    if draft_probs.shape[:2] != draft_ids.shape:
        raise ValueError(
            f"`draft_probs` must hold one distribution per draft, shape [{draft_ids.shape[0]}, {draft_ids.shape[1]}, "
            f"Vd], but has shape {list(draft_probs.shape)}."
        )
    if target_probs.dtype not in (torch.float32, torch.float64) or draft_probs.dtype != target_probs.dtype:
        raise TypeError(
            "`target_probs` and `draft_probs` must both be float32 (half precision would change the distributions), "
            f"but are {target_probs.dtype} and {draft_probs.dtype}. Cast the logits before the softmax."
        )


def _columns_of(draft_ids: torch.Tensor, draft_token_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Columns of the draft vocabulary that stand for `draft_ids` `[R, L]`."""
    columns = torch.zeros(vocab_size, dtype=torch.long, device=draft_ids.device)
    columns[draft_token_ids] = torch.arange(draft_token_ids.numel(), device=draft_ids.device)
    return columns[draft_ids]


def _over_target_vocab(probs: torch.Tensor, draft_token_ids: torch.Tensor | None, vocab_size: int) -> torch.Tensor:
    """Spreads `[R, Vd]` over the target vocabulary: `[R, V]`, zero where the draft vocabulary has no column."""
    if draft_token_ids is not None:
        return probs.new_zeros(probs.shape[0], vocab_size).index_copy_(1, draft_token_ids, probs)
    return F.pad(probs, (0, vocab_size - probs.shape[1]))  # a negative padding cuts
