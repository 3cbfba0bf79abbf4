"""Where the tokens of one packed forward belong: rows, slots, query padding and attention masks.

A packed forward runs the tokens of all requests as one sequence `[1, N]`. A *slot* is the place of a token within its
own request, padding dropped. Everything that attention needs to tell the requests apart is worked out here, once per
forward, and shared by all layers. This module knows nothing about models and caches.

Shape legend: R active rows, N packed tokens, Q longest query of a row, T slots attention looks at, Hq query heads,
G query heads per key/value head, Dh and Dv head sizes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class BlockWindow:
    """
    The sliding window of a draft layer, which looks at a block and at the context before it.

    Args:
        size (`int`): The window, in tokens.
        causal (`bool`): Whether a slot of the block sees only those before it and itself, or the whole block.
        from_anchor (`bool`):
            `True`: every slot of the block sees the `size` context tokens before the anchor. `False`: the window
            moves with the slot, which itself counts as one of its `size` tokens.
    """

    size: int
    causal: bool
    from_anchor: bool

    def hides(self, query_slots: torch.Tensor, key_slots: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """
        Which keys a query must not see, of those that full attention over context and block shows it.

        Args:
            query_slots, key_slots, anchors (`torch.LongTensor`): Places within a request (slots or positions) of the
                queries, of the keys, and of each query's anchor; broadcast against each other.
        """
        hidden = key_slots < (anchors - self.size if self.from_anchor else query_slots - self.size + 1)
        return hidden | (key_slots > query_slots) if self.causal else hidden


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayout:
    """
    The plan of one packed forward; see [`~hf_dspark.packed.SlabCache.layout`].

    Args:
        starts (`tuple[int, ...]`): First slot written in each active row: its committed length.
        query_lengths (`tuple[int, ...]`): Tokens of each active row, in the order they are packed. May hold zeros.
        bidirectional (`bool`): Whether the new tokens of a row see each other both ways, as in a draft block.
        num_slots (`int`): T, one more than the highest slot written.
        rows (`torch.LongTensor` of shape `[N]`): Row of every token.
        slots (`torch.LongTensor` of shape `[N]`): Slot of every token.
        padding (`torch.LongTensor` of shape `[R * Q]`, *optional*):
            Token taken for each padded query. `None` when all rows have Q tokens: padding is then a reshape.
        unpadding (`torch.LongTensor` of shape `[N]`, *optional*): Index of every token in `padding`.
    """

    starts: tuple[int, ...]
    query_lengths: tuple[int, ...]
    bidirectional: bool
    num_slots: int
    rows: torch.Tensor
    slots: torch.Tensor
    padding: torch.Tensor | None
    unpadding: torch.Tensor | None
    _copies: dict[torch.device, "PackedLayout"] = field(default_factory=dict, init=False, repr=False)
    _masks: dict[tuple, tuple[int, torch.Tensor | None]] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def build(cls, starts: Sequence[int], query_lengths: Sequence[int], bidirectional: bool) -> "PackedLayout":
        """Lays out `query_lengths[r]` tokens from slot `starts[r]` on, for every row r, on the CPU."""
        longest = max(query_lengths)
        rows: list[int] = []
        slots: list[int] = []
        padding: list[int] = []
        unpadding: list[int] = []
        for row, (start, length) in enumerate(zip(starts, query_lengths, strict=True)):
            first = len(rows)
            rows += [row] * length
            slots += range(start, start + length)
            # A padded query repeats a real token, so that no softmax runs over an empty row.
            last = max(first + length - 1, 0)
            padding += [min(first + i, last) for i in range(longest)]
            unpadding += range(row * longest, row * longest + length)
        ragged = len(rows) != len(starts) * longest
        return cls(
            starts=tuple(starts),
            query_lengths=tuple(query_lengths),
            bidirectional=bidirectional,
            num_slots=max(slots) + 1,
            rows=torch.tensor(rows),
            slots=torch.tensor(slots),
            padding=torch.tensor(padding) if ragged else None,
            unpadding=torch.tensor(unpadding) if ragged else None,
        )

    def to(self, device: torch.device) -> "PackedLayout":
        """This layout with its tensors on `device`; copied once per device (a model may be spread over several)."""
        if self.rows.device == device:
            return self
        if device not in self._copies:
            tensors = (self.rows, self.slots, self.padding, self.unpadding)
            moved = [None if tensor is None else tensor.to(device, non_blocking=True) for tensor in tensors]
            self._copies[device] = PackedLayout(
                self.starts, self.query_lengths, self.bidirectional, self.num_slots, *moved
            )
        return self._copies[device]

    def fold(self, query: torch.Tensor, num_heads: int) -> torch.Tensor:
        """
        Packed queries `[1, Hq, N, Dh]`, padded per row and with the G query heads that share one of `num_heads`
        key/value heads side by side: `[R, H, G * Q, Dh]`. So attention reads every key once and copies none.
        """
        head_size = query.shape[3]
        if len(self.starts) == 1:
            return query.reshape(1, num_heads, -1, head_size)
        tokens = query.squeeze(0).transpose(0, 1)
        if self.padding is not None:
            tokens = tokens.index_select(0, self.padding)
        num_rows, groups = len(self.starts), query.shape[1] // num_heads
        split = tokens.reshape(num_rows, -1, num_heads, groups, head_size).permute(0, 2, 3, 1, 4)
        return split.reshape(num_rows, num_heads, -1, head_size)

    def unfold(self, output: torch.Tensor, groups: int) -> torch.Tensor:
        """Attention output `[R, H, G * Q, Dv]` -> `[1, N, Hq, Dv]`, padding dropped."""
        num_rows, num_heads, folded, head_size = output.shape
        split = output.reshape(num_rows, num_heads * groups, folded // groups, head_size).transpose(1, 2)
        if num_rows == 1:
            return split
        tokens = split.reshape(-1, num_heads * groups, head_size)
        if self.unpadding is not None:
            tokens = tokens.index_select(0, self.unpadding)
        return tokens.unsqueeze(0)

    def mask(
        self, window: int | BlockWindow | None, *, groups: int, dtype: torch.dtype
    ) -> tuple[int, torch.Tensor | None]:
        """
        The additive mask of one kind of layer; built once per forward.

        Args:
            window (`int` or [`BlockWindow`], *optional*): Sliding window in slots: a query sees its own and
                `window - 1` before it; or that of a layer that looks at draft blocks.
            groups (`int`): G; the mask repeats for each query head that shares a key/value head.
            dtype (`torch.dtype`): Floating type of the mask.

        Returns:
            `tuple[int, torch.Tensor | None]`: the first slot that any query sees, and the mask over the slots from
            there on, `[R, 1, G * Q, T - first]` (`None`: everything is visible).
        """
        key = (window, groups, dtype)
        if key not in self._masks:
            self._masks[key] = self._build_mask(window, groups, dtype)
        return self._masks[key]

    def _build_mask(
        self, window: int | BlockWindow | None, groups: int, dtype: torch.dtype
    ) -> tuple[int, torch.Tensor | None]:
        spans = [span for span in zip(self.starts, self.query_lengths, strict=True) if span[1]]
        of_block = window if isinstance(window, BlockWindow) else None
        causal = not self.bidirectional or (of_block is not None and of_block.causal)
        size = window.size if isinstance(window, BlockWindow) else window
        first, sees_all = 0, True
        if size is not None:
            reach = size if of_block is not None and of_block.from_anchor else size - 1  # back from the first query
            last = 0 if of_block is not None and of_block.from_anchor else max(length for _, length in spans) - 1
            first = max(0, min(start for start, _ in spans) - reach)
            sees_all = max(start for start, _ in spans) + last - reach <= first
        # A causal first query must itself be the newest token to see all; in a draft block any query sees the last.
        sees_newest = all(start + (1 if causal else length) == self.num_slots for start, length in spans)
        if sees_newest and sees_all:
            return first, None
        query_slots = self.slots if self.padding is None else self.slots[self.padding]
        query_slots = query_slots.view(len(self.starts), -1)
        newest = query_slots
        if not causal:
            ends = [start + length for start, length in zip(self.starts, self.query_lengths, strict=True)]
            newest = torch.tensor(ends, device=query_slots.device)[:, None].expand_as(query_slots) - 1
        key_slots = torch.arange(first, self.num_slots, device=query_slots.device)
        hidden = key_slots > newest[..., None]
        if of_block is not None:
            anchors = torch.tensor(self.starts, device=query_slots.device)[:, None, None]
            hidden |= of_block.hides(query_slots[..., None], key_slots, anchors)
        elif size is not None:
            hidden |= key_slots <= query_slots[..., None] - size
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
        return first, mask.repeat(1, groups, 1).unsqueeze(1)
