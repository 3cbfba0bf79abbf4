"""Proposers: where the hidden states of a round's drafts come from, for all active rows at once.

Contract: a proposer feeds a drafter its context and gives, position by position, the hidden states that drafts are
drawn from. It knows neither processors nor randomness; those, and what becomes of the drafts, are `drafting.py`'s. One
that works in parallel knows all positions beforehand, an autoregressive one needs the draft before each.

Source: https://huggingface.co/papers/2607.05147, section 3.1. Shape legend: R active rows, K draft positions, Q slots
of a block, N packed context tokens, D hidden, M tapped layers, Dt target hidden, Vd draft vocabulary.
"""

import itertools
from collections.abc import Sequence
from typing import Protocol

import torch

from .narrow_linear import narrow_linears
from .packed import PackedLayout, SlabCache, packed_scope
from .target import TargetView


class Proposer(Protocol):
    """What a drafting session asks for."""

    cache: SlabCache

    def read(
        self, features: torch.Tensor, positions: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int]
    ) -> None:
        """
        Takes verified tokens into the context, `counts[r]` of each of the first rows.

        Args:
            features (`torch.Tensor` of shape `[N, M*Dt]`): Their tapped states.
            positions (`torch.LongTensor` of shape `[N]`): Their position ids.
            token_ids (`Sequence[int]` of length N): The tokens.
        """

    def begin(self, anchor_ids: Sequence[int], anchor_positions: Sequence[int], num_drafts: int) -> None:
        """Starts a round of `num_drafts` drafts after the anchors of the first rows."""

    def step(self, position: int, previous_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states `[R, D]` and base logits `[R, Vd]` of a position, `previous_ids [R]` being right before it."""


class ParallelProposer:
    """One bidirectional pass over every row's [context ; anchor, mask, ..., mask] (Eq. 3): DSpark, DFlash."""

    def __init__(self, view: TargetView, num_rows: int, cache: SlabCache | None):
        self.view = view
        self.cache = SlabCache(num_rows) if cache is None else cache

    def read(
        self, features: torch.Tensor, positions: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int]
    ) -> None:
        with packed_scope(self.cache, self.cache.layout(counts)):
            self.view.drafter.write_context(features[None], positions[None], self.cache)

    def begin(self, anchor_ids: Sequence[int], anchor_positions: Sequence[int], num_drafts: int) -> None:
        config, device = self.view.drafter.config, self.view.drafter.fc.weight.device
        num_rows, num_slots = len(anchor_ids), config.block_size
        slots = torch.full((num_rows, num_slots), config.mask_token_id, device=device)
        slots[:, 0] = torch.tensor(anchor_ids, device=device)
        positions = torch.tensor(anchor_positions, device=device)[:, None] + torch.arange(num_slots, device=device)
        layout = self.cache.layout([num_slots] * num_rows, bidirectional=True)
        with packed_scope(self.cache, layout):
            hidden = self.view.drafter(
                self.view.noise_embeds(slots.view(1, -1)), position_ids=positions.view(1, -1), cache=self.cache
            )
        # Layout B drops the anchor's slot; in layout A it predicts too.
        first = num_slots - config.num_drafts
        self._hidden = hidden.view(num_rows, num_slots, -1)[:, first : first + num_drafts]
        with narrow_linears(num_rows * num_drafts):
            self._base_logits = self.view.base_logits(self._hidden)

    def step(self, position: int, previous_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._hidden[:, position], self._base_logits[:, position]


class EntryCache(SlabCache):
    """
    The context of an autoregressive drafter: keys and values of its entries, a token and the state before it each.

    Attributes:
        newest (`torch.Tensor` of shape `[num_rows, D]`): The state of the token of each row's last entry, which the
            next entry needs; zeros before a first token.
    """

    # `newest` is never written in place: a cache kept from a call in inference mode may be used outside of it.

    def __init__(self, num_rows: int, newest: torch.Tensor):
        super().__init__(num_rows)
        self.newest = newest

    def swap_rows(self, first: int, second: int) -> None:
        super().swap_rows(first, second)
        order = list(range(self.num_rows))
        order[first], order[second] = second, first
        self.newest = self.newest[order]

    def forget(self, row: int) -> None:
        """Empties a row."""
        self.lengths[row] = 0
        self.newest = self.newest.index_fill(0, torch.tensor([row], device=self.newest.device), 0.0)


class AutoregressiveProposer:
    """
    One pass a position: the newest token and the state of the one before it (EAGLE-3, MTP).

    Only entries with the target's states last; those of a round are written behind them and overwritten in the next.
    """

    def __init__(self, view: TargetView, num_rows: int, cache: EntryCache | None):
        self.view = view
        if cache is None:
            drafter = view.drafter
            width, device = drafter.config.hidden_size, drafter.fc.weight.device
            cache = EntryCache(num_rows, torch.zeros(num_rows, width, dtype=drafter.dtype, device=device))
        self.cache = cache

    def read(
        self, features: torch.Tensor, positions: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int]
    ) -> None:
        drafter, device = self.view.drafter, features.device
        rows = torch.tensor([row for row, count in enumerate(counts) if count], device=device)
        ends = torch.tensor([e for e, n in zip(itertools.accumulate(counts), counts, strict=True) if n], device=device)
        starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        with packed_scope(self.cache, self.cache.layout(counts)):
            states = drafter.fuse(features)
            before = states.roll(1, 0).index_copy(0, starts, self.cache.newest[rows])
            self.cache.newest = self.cache.newest.index_copy(0, rows, states[ends - 1])
            embeds = self.view.noise_embeds(torch.tensor([token_ids], device=device))
            drafter.write_context(embeds, before[None], positions[None], self.cache)

    def begin(self, anchor_ids: Sequence[int], anchor_positions: Sequence[int], num_drafts: int) -> None:
        device = self.view.drafter.fc.weight.device
        self._positions = torch.tensor([anchor_positions], device=device)
        self._states = self.cache.newest[None, : len(anchor_ids)]

    def step(self, position: int, previous_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        drafter, num_rows = self.view.drafter, len(previous_ids)
        starts = [length + position for length in self.cache.lengths[:num_rows]]
        layout = PackedLayout.build(starts, [1] * num_rows, bidirectional=False)
        with packed_scope(self.cache, layout):
            embeds = self.view.noise_embeds(previous_ids[None])
            self._states = drafter(embeds, self._states, self._positions + position, cache=self.cache)
            hidden = drafter.norm(self._states[0])
            return hidden, self.view.base_logits(hidden)
