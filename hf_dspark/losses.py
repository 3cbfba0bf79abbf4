"""The three training losses (section 3.3), weighted along the block, over a full or a reduced draft vocabulary.

Contract: pure torch; tensors in, `BlockLosses` out. `block_losses` takes the logits of all blocks;
`chunked_block_losses` takes a function that makes them and calls it for a few blocks at a time, forwards and again
backwards, so that `[A*K, Vd]` never exists. Knows nothing about models or optimisers.

    L = ce_weight * CE(data token) + tv_weight * sum|p_d - p_t| + confidence_weight * BCE(c_k, 1 - sum|p_d - p_t| / 2)

with position weights w_k = exp(-(k-1)/decay) and every term divided by the sum of weights.
Source: https://huggingface.co/papers/2607.05147, section 3.3. Shape legend: `...` blocks (A of them when chunked), K
draft positions, Vd draft vocabulary.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

LogitsOf = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""Inputs of some blocks -> their draft logits and the target's probabilities, `[a, K, Vd]` each."""


@dataclasses.dataclass(frozen=True, slots=True)
class LossWeights:
    """The paper's weights and decay (released configs: decay 4 for K = 7)."""

    ce_weight: float = 0.1
    tv_weight: float = 0.9
    confidence_weight: float = 1.0
    decay: float | None = 4.0


@dataclasses.dataclass(frozen=True, slots=True)
class BlockLosses:
    """
    `total` is what to differentiate; `acceptance [..., K]` is each draft's chance to survive, 1 - TV(p_d, p_t), and
    `matches [..., K]` whether its argmax is the target's.
    """

    total: torch.Tensor
    cross_entropy: torch.Tensor
    total_variation: torch.Tensor
    confidence: torch.Tensor
    acceptance: torch.Tensor
    matches: torch.Tensor


def position_weights(supervised: torch.Tensor, decay: float | None) -> torch.Tensor:
    """`supervised [..., K]` (0/1) -> w_k = exp(-(k-1)/decay) where supervised, float32 `[..., K]`; `None`: all 1."""
    if decay is None:
        return supervised.float()
    steps = torch.arange(supervised.shape[-1], device=supervised.device, dtype=torch.float32)
    return supervised.float() * torch.exp(-steps / decay)


def contiguous_supervision(loss_mask: torch.Tensor, anchors: torch.LongTensor, block: int) -> torch.Tensor:
    """
    Which labels count: those after each anchor, up to the first one outside the loss mask.

    Args:
        loss_mask (`torch.Tensor` of shape `(B, S)`): 1 on the tokens to learn.
        anchors (`torch.LongTensor` of shape `(B, A)`): anchor positions.
        block (`int`): K; label k of an anchor at P is token P + k.

    Returns:
        `torch.BoolTensor` of shape `(B, A, K)`.
    """
    length = loss_mask.shape[-1]
    labels = anchors[..., None] + torch.arange(1, block + 1, device=anchors.device)
    rows = torch.arange(loss_mask.shape[0], device=anchors.device)[:, None, None]
    supervised = loss_mask.bool()[rows, labels.clamp_max(length - 1)] & (labels < length)
    return supervised.long().cumprod(dim=-1).bool()


def block_losses(
    draft_logits: torch.Tensor,
    target_probs: torch.Tensor,
    *,
    label_ids: torch.LongTensor,
    supervised: torch.Tensor,
    confidence_logits: torch.Tensor | None = None,
    weights: LossWeights = LossWeights(),
    denominator: torch.Tensor | None = None,
) -> BlockLosses:
    """
    Args:
        draft_logits (`torch.Tensor` of shape `(..., K, Vd)`): Markov-corrected logits.
        target_probs (`torch.Tensor` of shape `(..., K, Vd)`): the target's distribution on the draft vocabulary; a
            reduced one does not sum to 1, and what is missing counts as variation (the draft has no mass there).
        label_ids (`torch.LongTensor` of shape `(..., K)`): data tokens as draft ids, negative where the token cannot
            be drafted (no cross-entropy there).
        supervised (`torch.Tensor` of shape `(..., K)`): 1 where the position counts.
        confidence_logits (`torch.Tensor` of shape `(..., K)`, *optional*): of the confidence head.
        weights ([`LossWeights`]): term weights and decay.
        denominator (`torch.Tensor`, *optional*): globally reduced sum of position weights; the local one if `None`.
    """
    cross_entropy, variation, matches = position_terms(draft_logits, target_probs, label_ids)
    return _combined(cross_entropy, variation, matches, supervised, confidence_logits, weights, denominator)


def chunked_block_losses(
    logits_of: LogitsOf,
    inputs: Sequence[torch.Tensor],
    *,
    label_ids: torch.LongTensor,
    supervised: torch.Tensor,
    confidence_logits: torch.Tensor | None = None,
    weights: LossWeights = LossWeights(),
    denominator: torch.Tensor | None = None,
    blocks_per_chunk: int,
) -> BlockLosses:
    """
    [`block_losses`] of A blocks, `blocks_per_chunk` at a time.

    Args:
        logits_of (`Callable`): `logits_of(*slices)` -> draft logits and target probabilities `[a, K, Vd]` of a slice
            of every tensor in `inputs`. It is called again in the backward pass, and must do the same then.
        inputs (`Sequence[torch.Tensor]`): Tensors whose first dimension is A; gradients flow into them, and into the
            parameters that `logits_of` uses.
        blocks_per_chunk (`int`): Blocks whose logits exist at a time.
        label_ids, supervised, confidence_logits, weights, denominator: As for [`block_losses`].
    """

    def terms(labels: torch.LongTensor, *slices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return position_terms(*logits_of(*slices), labels)

    pieces = [
        checkpoint(terms, *pieces_of_inputs, use_reentrant=False, preserve_rng_state=False)
        for pieces_of_inputs in zip(*(tensor.split(blocks_per_chunk) for tensor in (label_ids, *inputs)), strict=True)
    ]
    cross_entropy, variation, matches = (torch.cat(terms) for terms in zip(*pieces, strict=True))
    return _combined(cross_entropy, variation, matches, supervised, confidence_logits, weights, denominator)


def position_terms(
    draft_logits: torch.Tensor, target_probs: torch.Tensor, label_ids: torch.LongTensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Terms before weighting: cross-entropy, sum|p_d - p_t| and whether the argmaxes agree, `[..., K]` each."""
    log_probs = functional.log_softmax(draft_logits.float(), dim=-1)
    target_probs = target_probs.float()
    cross_entropy = -log_probs.gather(-1, label_ids.clamp_min(0)[..., None]).squeeze(-1) * (label_ids >= 0)
    missing = (1 - target_probs.sum(-1)).clamp_min(0)
    variation = (draft_logits.float().softmax(-1) - target_probs).abs().sum(-1) + missing
    return cross_entropy, variation, log_probs.detach().argmax(-1) == target_probs.argmax(-1)


def _combined(
    cross_entropy: torch.Tensor,
    variation: torch.Tensor,
    matches: torch.Tensor,
    supervised: torch.Tensor,
    confidence_logits: torch.Tensor | None,
    weights: LossWeights,
    denominator: torch.Tensor | None,
) -> BlockLosses:
    """Weighs the terms `[..., K]` and adds them up."""
    position = position_weights(supervised, weights.decay)
    total_weight = position.sum() if denominator is None else denominator

    def average(term: torch.Tensor) -> torch.Tensor:
        return (term * position).sum() / (total_weight + 1e-6)

    acceptance = (1 - variation.detach() / 2).clamp(0, 1)
    confidence = cross_entropy.new_zeros(())
    if confidence_logits is not None:
        confidence = average(
            functional.binary_cross_entropy_with_logits(confidence_logits.float(), acceptance, reduction="none")
        )
    cross_entropy, variation = average(cross_entropy), average(variation)
    total = weights.ce_weight * cross_entropy + weights.tv_weight * variation + weights.confidence_weight * confidence
    return BlockLosses(total, cross_entropy, variation, confidence, acceptance, matches)
