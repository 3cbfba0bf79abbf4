"""Teacher-forced draft blocks of one sequence: the training forward, its losses, and its greedy acceptance.

Contract: given a drafter's view, the teacher's features and anchors, everything here is a function of them. Block i
sees the context before its anchor and itself, exactly as in decoding.

Source: https://huggingface.co/papers/2607.05147, section 3.3. Shape legend: T tokens of a sequence, A anchors, Q slots
of a block, K drafts of a block, Vd draft vocabulary.
"""

import dataclasses

import torch

from ..losses import BlockLosses, LossWeights, block_losses, contiguous_supervision
from ..target import TargetView
from .examples import TrainingExample
from .teacher import TeacherFeatures, draft_ids_of


def block_mask(anchors: torch.LongTensor, length: int, block_size: int) -> torch.Tensor:
    """
    Additive mask `[1, 1, A*Q, T + A*Q]`: block i sees the context before its anchor, and itself.
    """
    num_slots = len(anchors) * block_size
    owner = torch.arange(len(anchors), device=anchors.device).repeat_interleave(block_size)
    context = torch.arange(length, device=anchors.device)[None] < anchors[owner][:, None]
    visible = torch.cat([context, owner[:, None] == owner[None]], dim=1)
    mask = torch.zeros(num_slots, length + num_slots, device=anchors.device)
    return mask.masked_fill_(~visible, torch.finfo(mask.dtype).min)[None, None]


def draft_blocks(
    view: TargetView, features: TeacherFeatures, input_ids: torch.LongTensor, anchors: torch.LongTensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """
    Teacher-forced draft logits `[A, K, Vd]` and confidence logits `[A, K]` of the blocks at `anchors [A]` of one
    sequence `input_ids [T]`.
    """
    config, num_anchors, length = view.drafter.config, len(anchors), len(input_ids)
    slots = anchors.new_full((num_anchors, config.block_size), config.mask_token_id)
    slots[:, 0] = input_ids[anchors]
    positions = anchors[:, None] + torch.arange(config.block_size, device=anchors.device)
    home = view.drafter.fc.weight
    hidden = view.drafter(
        view.noise_embeds(slots.flatten())[None],
        features.context.to(home.dtype)[None],
        position_ids=positions.flatten()[None],
        context_position_ids=torch.arange(length, device=anchors.device)[None],
        attention_mask=block_mask(anchors, length, config.block_size).to(home.dtype),
    )
    hidden = hidden.view(num_anchors, config.block_size, -1)[:, -config.num_drafts :]
    previous = anchors[:, None] + torch.arange(config.num_drafts, device=anchors.device)
    return view.drafter.teacher_forced(hidden, view.base_logits(hidden), input_ids[previous.clamp_max(length - 1)])


@dataclasses.dataclass(frozen=True, slots=True)
class BlockOutcome:
    """Losses of one sequence's blocks, and whether each draft's argmax was the target's, `matches [A, K]`."""

    losses: BlockLosses
    matches: torch.BoolTensor
    supervised: torch.BoolTensor


def sequence_outcome(
    view: TargetView,
    features: TeacherFeatures,
    example: TrainingExample,
    anchors: torch.LongTensor,
    *,
    weights: LossWeights,
    denominator: torch.Tensor | None = None,
) -> BlockOutcome:
    """Drafts the blocks at `anchors [A]` of one example and compares them with the teacher."""
    input_ids = torch.tensor(example.input_ids, device=anchors.device)
    loss_mask = torch.tensor([example.loss_mask], device=anchors.device)
    num_drafts = view.drafter.config.num_drafts
    supervised = contiguous_supervision(loss_mask, anchors[None], num_drafts)[0]
    draft_logits, confidence_logits = draft_blocks(view, features, input_ids, anchors)
    labels = (anchors[:, None] + torch.arange(1, num_drafts + 1, device=anchors.device)).clamp_max(len(input_ids) - 1)
    losses = block_losses(
        draft_logits,
        features.log_probs[labels - 1].float().exp(),
        label_ids=draft_ids_of(view.drafter, input_ids[labels]),
        supervised=supervised,
        confidence_logits=confidence_logits,
        weights=weights,
        denominator=denominator,
    )
    return BlockOutcome(losses, draft_logits.argmax(-1) == features.top_ids[labels - 1], supervised)


class AcceptanceMeter:
    """Running greedy acceptance of teacher-forced blocks, per position and as an accepted length."""

    def __init__(self, num_drafts: int):
        self.reached, self.accepted = torch.zeros(num_drafts), torch.zeros(num_drafts)
        self.blocks = 0

    def add(self, outcome: BlockOutcome) -> None:
        """Counts blocks whose every label is supervised (others would be cut by the end of the text)."""
        whole = outcome.supervised.all(dim=-1)
        survived = outcome.matches[whole].long().cumprod(-1).float().cpu()
        self.accepted += survived.sum(0)
        self.reached += torch.cat([torch.ones(len(survived), 1), survived[:, :-1]], dim=1).sum(0)
        self.blocks += len(survived)

    @property
    def conditional(self) -> list[float]:
        """Chance that draft k matches, given that all before it in its block did; `[K]`."""
        return (self.accepted / self.reached.clamp_min(1)).tolist()

    @property
    def accepted_length(self) -> float:
        """Mean tokens a round, the bonus token included (the paper's tau)."""
        return 1 + (self.accepted.sum() / max(self.blocks, 1)).item()
