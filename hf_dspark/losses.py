"""The three training losses (section 3.3), weighted along the block, over a full or a reduced draft vocabulary.

Contract: pure torch; tensors in, `BlockLosses` out. Knows nothing about models or optimisers.

    L = ce_weight * CE(data token) + tv_weight * sum|p_d - p_t| + confidence_weight * BCE(c_k, 1 - sum|p_d - p_t| / 2)

with position weights w_k = exp(-(k-1)/decay) and every term divided by the sum of weights.
Source: https://huggingface.co/papers/2607.05147, section 3.3. Shape legend: `...` blocks, K draft positions, Vd draft
vocabulary.
"""

import dataclasses

import torch
from torch.nn import functional


@dataclasses.dataclass(frozen=True, slots=True)
class LossWeights:
    """The paper's weights and decay (released configs: decay 4 for K = 7)."""

    ce_weight: float = 0.1
    tv_weight: float = 0.9
    confidence_weight: float = 1.0
    decay: float | None = 4.0


@dataclasses.dataclass(frozen=True, slots=True)
class BlockLosses:
    """`total` is what to differentiate; `acceptance [..., K]` is each draft's chance to survive, 1 - TV(p_d, p_t)."""

    total: torch.Tensor
    cross_entropy: torch.Tensor
    total_variation: torch.Tensor
    confidence: torch.Tensor
    acceptance: torch.Tensor


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
    position = position_weights(supervised, weights.decay)
    total_weight = position.sum() if denominator is None else denominator

    def average(term: torch.Tensor) -> torch.Tensor:
        return (term * position).sum() / (total_weight + 1e-6)

    log_probs = functional.log_softmax(draft_logits.float(), dim=-1)
    target_probs = target_probs.float()
    drafted = label_ids >= 0
    cross_entropy = -log_probs.gather(-1, label_ids.clamp_min(0)[..., None]).squeeze(-1) * drafted
    missing = (1 - target_probs.sum(-1)).clamp_min(0)
    variation = (draft_logits.float().softmax(-1) - target_probs).abs().sum(-1) + missing
    acceptance = (1 - variation.detach() / 2).clamp(0, 1)
    confidence = draft_logits.new_zeros((), dtype=torch.float32)
    if confidence_logits is not None:
        confidence = average(
            functional.binary_cross_entropy_with_logits(confidence_logits.float(), acceptance, reduction="none")
        )
    cross_entropy, variation = average(cross_entropy), average(variation)
    total = weights.ce_weight * cross_entropy + weights.tv_weight * variation + weights.confidence_weight * confidence
    return BlockLosses(total, cross_entropy, variation, confidence, acceptance)
