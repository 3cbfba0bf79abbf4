"""Teacher-forced draft blocks of one row: the training forward, its losses, and its greedy acceptance.

Contract: given a drafter's view, the teacher's features and a row with anchors, everything here is a function of them.
Block i sees the context of its own document before its anchor, and itself, exactly as in decoding. A drafter class
that drafts in another way offers `draft_training_hidden(view, features, input_ids, anchors)`, for one document; what
follows the hidden states is the same for all.

Source: https://huggingface.co/papers/2607.05147, section 3.3. Shape legend: T tokens of a row, A anchors, Q slots of a
block, K drafts of a block, Vd draft vocabulary.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

from ..losses import BlockLosses, LossWeights, chunked_block_losses
from ..modeling_dspark import DSparkDrafter
from ..target import TargetView
from .collation import PackedRow, pack_row
from .examples import TrainingExample
from .teacher import TeacherFeatures, draft_ids_of

LOGITS_BYTES = 64 * 2**20
"""Size of one float32 tensor of logits in the loss; about ten of them exist at a time."""
FLEX_BLOCK = 128


class BlockVisibility:
    """
    What slot q may see of [context ; slots], as a dense mask or for flex attention.

    Args:
        document_ids (`torch.LongTensor` of shape `[T]`): Document of each context token.
        anchors (`torch.LongTensor` of shape `[A]`): Where the blocks start.
        block_size (`int`): Q.
    """

    def __init__(self, document_ids: torch.Tensor, anchors: torch.Tensor, block_size: int):
        self.documents, self.anchors, self.block_size = document_ids, anchors, block_size

    def __call__(
        self, batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        """Whether slot `query` sees entry `key`, in the form flex attention asks (`mask_mod`)."""
        length = len(self.documents)
        anchor = self.anchors[query // self.block_size]
        token = key.clamp_max(length - 1)
        context = (key < length) & (token < anchor) & (self.documents[token] == self.documents[anchor])
        return context | ((key >= length) & ((key - length) // self.block_size == query // self.block_size))

    @property
    def shape(self) -> tuple[int, int]:
        """Slots, and entries that they look at."""
        num_slots = len(self.anchors) * self.block_size
        return num_slots, len(self.documents) + num_slots

    def dense(self) -> torch.Tensor:
        """Boolean mask `[1, 1, A*Q, T + A*Q]`."""
        zero = self.anchors.new_zeros(())
        rows, columns = (torch.arange(size, device=self.anchors.device) for size in self.shape)
        return self(zero, zero, rows[:, None], columns[None])[None, None]

    def mask(self, implementation: str, dtype: torch.dtype) -> Any:
        """The mask as the attention function `implementation` takes it."""
        if implementation == "flex_attention":
            from torch.nn.attention.flex_attention import create_block_mask

            return create_block_mask(self, None, None, *self.shape, device=str(self.anchors.device))
        visible = self.dense()
        if implementation == "sdpa":
            return visible
        additive = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
        return additive.masked_fill_(~visible, torch.finfo(dtype).min)


@contextlib.contextmanager
def training_attention(drafter: DSparkDrafter, device: torch.device) -> Iterator[None]:
    """Flex attention on CUDA (blocks see little of each other: most of the mask is empty), as it was elsewhere."""
    config, before = drafter.config, drafter.config._attn_implementation
    own_masks = hasattr(drafter, "draft_training_hidden") or config.use_sliding_window
    if device.type == "cuda" and before in ("sdpa", None) and not own_masks:
        config._attn_implementation_internal = "flex_attention"
    try:
        yield
    finally:
        config._attn_implementation_internal = before


def draft_hidden(view: TargetView, features: TeacherFeatures, row: PackedRow) -> torch.Tensor:
    """Hidden states of the drafting slots at all anchors of a row, `[A, K, D]`."""
    if (own := getattr(view.drafter, "draft_training_hidden", None)) is not None:
        return _hidden_by_document(own, view, features, row)
    config = view.drafter.config
    context, implementation = features.context.to(view.drafter.fc.weight.dtype), config._attn_implementation or "sdpa"
    anchors, documents, positions = row.anchors, row.document_ids, row.position_ids
    if implementation == "flex_attention":  # few different shapes: each one is compiled
        anchors = torch.cat([anchors, anchors[-1:].expand(-len(anchors) % 64)])
        pad = -len(context) % FLEX_BLOCK  # no anchor comes after it, so nobody sees it
        context = functional.pad(context, (0, 0, 0, pad))
        documents, positions = (functional.pad(ids, (0, pad)) for ids in (documents, positions))
    slots = anchors.new_full((len(anchors), config.block_size), config.mask_token_id)
    slots[:, 0] = row.input_ids[anchors]
    slot_positions = positions[anchors][:, None] + torch.arange(config.block_size, device=anchors.device)
    hidden = view.drafter(
        view.noise_embeds(slots.flatten())[None],
        context[None],
        position_ids=slot_positions.flatten()[None],
        context_position_ids=positions[None],
        attention_mask=BlockVisibility(documents, anchors, config.block_size).mask(implementation, context.dtype),
    )
    hidden = hidden.view(len(anchors), config.block_size, -1)
    return hidden[: len(row.anchors), -config.num_drafts :]


def draft_blocks(
    view: TargetView, features: TeacherFeatures, input_ids: torch.Tensor, anchors: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """
    Teacher-forced draft logits `[A, K, Vd]` and confidence logits `[A, K]` of the blocks at `anchors [A]` of one
    document `input_ids [T]`, all at once.
    """
    ids = tuple(input_ids.tolist())
    row = pack_row([(0, TrainingExample(ids, (1,) * len(ids)))]).to(input_ids.device)
    row = dataclasses.replace(row, anchors=anchors)
    hidden = draft_hidden(view, features, row)
    return view.drafter.teacher_forced(hidden, view.base_logits(hidden), previous_ids(row, hidden.shape[1]))


def _hidden_by_document(
    hidden_of: Callable[..., torch.Tensor], view: TargetView, features: TeacherFeatures, row: PackedRow
) -> torch.Tensor:
    """`hidden_of` at the anchors of each document of a row, `[A, K, D]`."""
    pieces, start = [], 0
    for document in row.documents():
        end = start + len(document.input_ids)
        if len(document.anchors):
            part = features if end - start == len(row.input_ids) else features.part(start, end)
            pieces.append(hidden_of(view, part, document.input_ids, document.anchors))
        start = end
    return torch.cat(pieces)


def previous_ids(row: PackedRow, num_drafts: int) -> torch.Tensor:
    """The true token before each draft, `[A, K]`."""
    positions = row.anchors[:, None] + torch.arange(num_drafts, device=row.anchors.device)
    return row.input_ids[positions.clamp_max(len(row.input_ids) - 1)]


@dataclasses.dataclass(frozen=True, slots=True)
class BlockOutcome:
    """Losses of a row's blocks; whether each draft's argmax was the target's, `matches [A, K]`; which count."""

    losses: BlockLosses
    matches: torch.Tensor
    supervised: torch.Tensor


def row_outcome(
    view: TargetView,
    features: TeacherFeatures,
    row: PackedRow,
    *,
    weights: LossWeights,
    denominator: torch.Tensor | None = None,
    logits_bytes: int = LOGITS_BYTES,
) -> BlockOutcome:
    """
    Drafts the blocks of a row and compares them with the teacher, a few blocks' logits at a time.

    Args:
        denominator (`torch.Tensor`, *optional*): Sum of position weights that the terms are divided by; the row's own
            if `None`.
        logits_bytes (`int`): Limit of one float32 tensor of logits.
    """
    drafter, num_drafts = view.drafter, view.drafter.config.num_drafts
    offsets = torch.arange(1, num_drafts + 1, device=row.anchors.device)
    labels = (row.anchors[:, None] + offsets).clamp_max(len(row.input_ids) - 1)
    supervised = row.supervised(num_drafts)
    losses = _chunked_losses(
        view,
        features,
        row,
        labels,
        logits_bytes,
        label_ids=draft_ids_of(drafter, row.input_ids[labels]),
        supervised=supervised,
        weights=weights,
        denominator=denominator,
    )
    draftable = features.draftable(labels - 1)
    return BlockOutcome(losses, losses.matches if draftable is None else losses.matches & draftable, supervised)


def _chunked_losses(
    view: TargetView,
    features: TeacherFeatures,
    row: PackedRow,
    labels: torch.Tensor,
    logits_bytes: int,
    **options: Any,
) -> BlockLosses:
    drafter, num_drafts = view.drafter, view.drafter.config.num_drafts
    hidden = draft_hidden(view, features, row)
    head, embeds = drafter.markov_head, None
    if head is not None:
        embeds = head.embed(previous_ids(row, num_drafts))
    latent = hidden.new_empty(len(hidden), 0) if head is None else head.scan(embeds, hidden)
    confidence = None if drafter.confidence_head is None else drafter.confidence_head(hidden, embeds)
    states = features.last_hidden[labels - 1]
    norms = None if features.log_norm is None else features.log_norm[labels - 1]

    def logits_of(hidden: torch.Tensor, latent: torch.Tensor, states: torch.Tensor, *norm: torch.Tensor) -> Any:
        logits = view.base_logits(hidden)
        if head is not None:
            logits = logits + head.bias(latent)
        with torch.no_grad():
            target_probs = features.log_probs_of(states, norm[0] if norm else None).exp_()
        return logits, target_probs

    width = drafter.config.draft_vocab_size or drafter.config.vocab_size
    return chunked_block_losses(
        logits_of,
        [hidden, latent, states] if norms is None else [hidden, latent, states, norms],
        confidence_logits=confidence,
        blocks_per_chunk=max(logits_bytes // (4 * width * num_drafts), 1),
        **options,
    )


class AcceptanceMeter:
    """Running greedy acceptance of teacher-forced blocks, per position and as an accepted length."""

    def __init__(self, num_drafts: int):
        self.counts = torch.zeros(2, num_drafts)  # reached, accepted

    def add(self, outcome: BlockOutcome) -> None:
        """Counts blocks whose every label is supervised (others would be cut by the end of the text)."""
        whole = outcome.supervised.all(dim=-1)
        survived = outcome.matches[whole].long().cumprod(-1).float()
        reached = torch.cat([torch.ones_like(survived[:, :1]), survived[:, :-1]], dim=1)
        self.counts = self.counts.to(survived.device) + torch.stack([reached.sum(0), survived.sum(0)])

    @property
    def blocks(self) -> int:
        """Blocks counted."""
        return int(self.counts[0, 0])

    @property
    def conditional(self) -> list[float]:
        """Chance that draft k matches, given that all before it in its block did; `[K]`."""
        return (self.counts[1] / self.counts[0].clamp_min(1)).tolist()

    @property
    def accepted_length(self) -> float:
        """Mean tokens a round, the bonus token included (the paper's tau)."""
        return 1 + (self.counts[1].sum() / self.counts[0, 0].clamp_min(1)).item()
