"""The cache of a packed forward: one slab of keys and values per request, addressed by slot.

A slot is the place of a token within its own request, padding dropped. `SlabCache.lengths` counts the committed slots
of every row; a forward writes behind them. Rolling back is not advancing the length: slots from there on are
overwritten later, and no query ever sees one that is newer than itself. Stock caches are taken over after a dense
prefill, and written back so that plain generation can go on with them. This module knows nothing about models, drafts
or attention.

Shape legend: R rows (requests), N packed tokens, T slots attention looks at, S columns of a dense cache, H key/value
heads, Dh and Dv key and value head sizes (they differ where latents are cached).
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

from .layout import PackedLayout


class SlabLayer:
    """Keys `[R, H, capacity, Dh]` and values `[R, H, capacity, Dv]` of one layer, empty until first written."""

    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self) -> None:
        self.slabs: tuple[torch.Tensor, ...] = ()

    def reserve(self, like: tuple[torch.Tensor, torch.Tensor], num_rows: int, num_slots: int) -> None:
        """Makes room for `num_slots` slots in a power-of-two capacity, so growing copies each slot about once."""
        if self.slabs and self.slabs[0].shape[2] >= num_slots:
            return
        capacity = max(16, 1 << (num_slots - 1).bit_length())
        # Zeros, not empty memory: hidden slots still enter attention with weight 0, and 0 * nan is nan. No tensors of
        # inference mode: a slab kept for a later call may be written outside of it.
        with torch.inference_mode(False):
            grown = tuple(states.new_zeros(num_rows, states.shape[1], capacity, states.shape[3]) for states in like)
        for new, old in zip(grown, self.slabs, strict=False):  # there is nothing to copy at first
            new[:, :, : old.shape[2]] = old
        self.slabs = grown


class PackedForward:
    """
    The forward in progress, and whether the model reads back what it writes: every update must be followed by one
    attention over exactly what the update returned, and all that decides who sees whom must reach our attention.
    """

    __slots__ = ("layout", "num_updates", "unread", "bypassed", "windowed")

    def __init__(self, layout: PackedLayout) -> None:
        self.layout = layout
        self.num_updates = 0
        self.unread = self.bypassed = self.windowed = False

    def note_update(self) -> PackedLayout:
        """Called by each cache update."""
        self.bypassed |= self.unread
        self.num_updates += 1
        self.unread = True
        return self.layout

    def note_attention(self, key: torch.Tensor, mask: torch.Tensor | None, window: int | None) -> PackedLayout:
        """Called by each attention. A `mask` larger than the placeholder is one the model made itself."""
        layout = self.layout
        self.bypassed |= key.shape[0] != len(layout.starts) or key.shape[2] != layout.num_slots
        self.bypassed |= mask is not None and mask.numel() != 1
        self.windowed |= window is not None
        self.unread = False
        return layout


class SlabCache(Cache):
    """
    A cache that holds every request in a slab of its own.

    Nothing is allocated before the first write, and capacity follows the actual length by doubling. Rows that finish
    are swapped behind the active ones with [`~SlabCache.swap_rows`]; a forward always addresses the rows in front.

    Args:
        num_rows (`int`): Number of requests.

    Attributes:
        lengths (`list[int]`): Committed slots of every row. The caller advances them after a forward by what it keeps.

    Raises:
        ValueError: If `num_rows` is not positive.
    """

    def __init__(self, num_rows: int) -> None:
        if num_rows < 1:
            raise ValueError(f"`num_rows` must be at least 1, got {num_rows}.")
        super().__init__(layers=[])
        self.num_rows = num_rows
        self.lengths: list[int] = [0] * num_rows
        self.forward: PackedForward | None = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The longest committed length."""
        return max(self.lengths)

    def layout(self, query_lengths: Sequence[int], *, bidirectional: bool = False) -> PackedLayout:
        """
        Plans the next forward: row r's `query_lengths[r]` tokens go to the slots from `lengths[r]` on.

        Args:
            query_lengths (`Sequence[int]`):
                Tokens of rows 0, 1, ... in packed order. Fewer entries than rows leave the last rows alone.
            bidirectional (`bool`, *optional*, defaults to `False`):
                Whether the new tokens of a row all see each other (a draft block) or only backwards.

        Raises:
            ValueError: If there are more entries than rows, a negative one, or no token at all.
        """
        if not 1 <= len(query_lengths) <= self.num_rows or min(query_lengths) < 0 or max(query_lengths) == 0:
            raise ValueError(
                f"`query_lengths` must give between 1 and {self.num_rows} rows a number of tokens each, at least one "
                f"of them positive, got {list(query_lengths)}."
            )
        return PackedLayout.build(self.lengths[: len(query_lengths)], query_lengths, bidirectional)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        layout: PackedLayout | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Writes the keys and values of the packed tokens and returns all that the active rows hold.

        Args:
            key_states (`torch.Tensor` of shape `[1, H, N, Dh]`): Keys of the packed tokens.
            value_states (`torch.Tensor` of shape `[1, H, N, Dv]`): Values of the packed tokens.
            layer_idx (`int`): Layer.
            layout ([`PackedLayout`], *optional*): Where they go; defaults to the layout of the running forward.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: views `[R, H, T, Dh]` and `[R, H, T, Dv]` on the active rows.

        Raises:
            RuntimeError: If there is neither a `layout` nor a running forward.
        """
        if layout is None:
            if self.forward is None:
                raise RuntimeError("A SlabCache can only be updated within `packed_scope` or with a `layout`.")
            layout = self.forward.note_update()
        while len(self.layers) <= layer_idx:
            self.layers.append(SlabLayer())
        layer = self.layers[layer_idx]
        layer.reserve((key_states, value_states), self.num_rows, layout.num_slots)
        keys, values = layer.slabs
        return _write(keys, key_states, layout), _write(values, value_states, layout)

    def swap_rows(self, first: int, second: int) -> None:
        """Exchanges the content of two rows, and their lengths."""
        if first == second:
            return
        used = max(self.lengths[first], self.lengths[second])
        for layer in self.layers:
            for slab in layer.slabs:
                slab[[first, second], :, :used] = slab[[second, first], :, :used]
        self.lengths[first], self.lengths[second] = self.lengths[second], self.lengths[first]

    def take_row(self, row: int, other: "SlabCache", other_row: int = 0) -> None:
        """Puts the committed content of a row of another cache of the same model in place of what `row` held."""
        length = other.lengths[other_row]
        while len(self.layers) < len(other.layers):
            self.layers.append(SlabLayer())
        for layer, source in zip(self.layers, other.layers, strict=False):
            if source.slabs:
                layer.reserve(source.slabs, self.num_rows, length + 1)  # the next forward writes at least one more
                for slab, states in zip(layer.slabs, source.slabs, strict=True):
                    slab[row, :, :length] = states[other_row, :, :length]
        self.lengths[row] = length

    def import_dense(self, cache: Cache, attention_mask: torch.Tensor | None = None) -> None:
        """
        Takes over the content of a stock cache, row by row, dropping masked columns. The stock cache is only read.

        Args:
            cache ([`~transformers.Cache`]): Dynamic cache with full or sliding window layers, after a dense forward.
            attention_mask (`torch.Tensor` of shape `[R, S]`, *optional*): 1 for the columns to keep. `None` keeps all.

        Raises:
            TypeError: If a layer of the cache is of another kind.
            ValueError: If shapes do not fit, or a sliding window layer has masked columns between kept ones in its
                window (it counts columns, not tokens, which no slab can reproduce).
        """
        num_columns = cache.get_seq_length()
        if attention_mask is None:
            attention_mask = torch.ones(self.num_rows, num_columns)
        if attention_mask.shape != (self.num_rows, num_columns):
            raise ValueError(
                f"`attention_mask` must have shape [{self.num_rows}, {num_columns}] (rows of the slab, columns of the "
                f"cache), got {list(attention_mask.shape)}."
            )
        kept = attention_mask.bool().cpu()
        rows, columns = kept.nonzero(as_tuple=True)
        slots = (kept.cumsum(1) - 1)[rows, columns]
        self.lengths = kept.sum(1).tolist()
        self.layers = [SlabLayer() for _ in cache.layers]
        for layer, dense in zip(self.layers, cache.layers, strict=True):
            if not holds_states(dense):
                continue
            if isinstance(dense, DynamicSlidingWindowLayer):
                _check_window(kept, dense.sliding_window)
            # A sliding layer has forgotten its first columns; nobody sees those slots any more.
            forgotten = num_columns - dense.keys.shape[2]
            there = columns >= forgotten
            index = torch.stack([rows[there], slots[there], columns[there] - forgotten]).to(dense.keys.device)
            # One slot more than committed: the next forward writes at least that.
            layer.reserve((dense.keys, dense.values), self.num_rows, max(self.lengths) + 1)
            for slab, states in zip(layer.slabs, (dense.keys, dense.values), strict=True):
                slab.transpose(1, 2)[index[0], index[1]] = states.transpose(1, 2)[index[0], index[2]]

    def export_dense(self, cache: Cache, columns: Sequence[torch.Tensor]) -> None:
        """
        Writes the committed keys and values into a stock cache, in place, as if it had run all along.

        Args:
            cache ([`~transformers.Cache`]): Dynamic cache of the same model; what it holds is replaced.
            columns (`Sequence[torch.LongTensor]`):
                For every row r, the column of each of its `lengths[r]` slots. Columns no slot goes to become zero.

        Raises:
            TypeError: If a layer of the cache is neither a full nor a sliding window layer.
            ValueError: If `columns` does not name one column per committed slot.
        """
        if [len(row) for row in columns] != self.lengths:
            raise ValueError(
                f"`columns` must name one column for each of the committed slots {self.lengths}, got "
                f"{[len(row) for row in columns]}."
            )
        to_columns = torch.cat([row.cpu() for row in columns])
        num_columns = int(to_columns.max()) + 1
        rows = torch.repeat_interleave(torch.arange(self.num_rows), torch.tensor(self.lengths))
        slots = torch.cat([torch.arange(length) for length in self.lengths])
        index = torch.stack([rows, slots, to_columns])
        while len(cache.layers) < len(self.layers) and cache.layer_class_to_replicate is not None:
            cache.layers.append(cache.layer_class_to_replicate())
        # Layers that share another layer's keys may lack a slab at the end.
        for layer, dense in zip(self.layers, cache.layers, strict=False):
            if not layer.slabs:
                continue
            holds_states(dense)
            states = []
            for slab in layer.slabs:
                row, slot, column = index.to(slab.device)
                full = slab.new_zeros(self.num_rows, slab.shape[1], num_columns, slab.shape[3])
                full.transpose(1, 2)[row, column] = slab.transpose(1, 2)[row, slot]
                states.append(full)
            # The layer's own update does its bookkeeping and forgets what is outside its window.
            dense.reset()
            dense.update(*states)


def holds_states(layer: Any) -> bool:
    """Whether a layer of a stock cache has keys and values; `TypeError` if it is of a kind that cannot be packed."""
    if type(layer) is DummyLayer:
        return False
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
        raise TypeError(
            f"Only full and sliding window layers of a dynamic cache can be packed, got a `{type(layer).__name__}`; "
            "use a `DynamicCache`."
        )
    return layer.get_seq_length() > 0


def _check_window(kept: torch.Tensor, window: int) -> None:
    recent = kept[:, max(kept.shape[1] - window + 1, 0) :]
    if (~recent & recent.cummax(1).values).any():
        raise ValueError(
            f"`attention_mask` hides columns between kept ones within a sliding window of {window}; the window counts "
            "columns, so these tokens cannot be packed. Start from a fresh cache instead."
        )


def _write(slab: torch.Tensor, states: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    """Writes `[1, H, N, Dh]` into a slab and returns the view `[R, H, T, Dh]` of the active rows."""
    num_rows = len(layout.starts)
    active = slab if slab.shape[0] == num_rows else slab.narrow(0, 0, num_rows)
    if num_rows == 1:
        active.narrow(2, layout.starts[0], layout.query_lengths[0]).copy_(states)
    else:
        placed = layout.to(slab.device)
        active.transpose(1, 2).index_put_((placed.rows, placed.slots), states[0].transpose(0, 1))
    return active.narrow(2, 0, layout.num_slots)
