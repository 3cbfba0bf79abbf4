"""Caches that outlive a call: multi-turn use of `generate(cache=...)` with a drafter.

Contract: after a call the target's keys and values go back into the user's cache, and the drafter's context stays
attached to it, so that the next turn drafts as well as a fresh run would. What is remembered is trusted only as far as
columns, token ids and drafter agree; anything else merely lowers acceptance, never changes text.

Shape legend: R rows, W columns of the dense cache (prompt, padding and generated tokens), C context tokens of a row.
"""

import dataclasses
from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache

from .modeling_dspark import DSparkDrafter
from .packed import SlabCache
from .proposers import EntryCache

_ATTRIBUTE = "_dspark_context"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DenseColumns:
    """
    Where tokens stand in a dense cache: those of the prompt in `prompt` (one `torch.LongTensor` a row), those
    generated since in the columns from `width` on.
    """

    prompt: list[torch.Tensor]
    width: int

    def of_slots(self, lengths: Sequence[int]) -> list[torch.Tensor]:
        """The columns of each row's first `lengths[r]` tokens, at least its whole prompt."""
        return [
            torch.cat([prompt, torch.arange(self.width, self.width + length - len(prompt))])
            for prompt, length in zip(self.prompt, lengths, strict=True)
        ]


@dataclasses.dataclass(slots=True)
class KeptContext:
    """
    A drafter's context cache, and what it was made from.

    Attributes:
        cache ([`SlabCache`]): The context.
        columns (`list[torch.LongTensor]` of `[C]`): For each row, the column of every slot in the dense cache.
        token_ids (`list[torch.LongTensor]` of `[C]`): For each row, the token of every slot.
        drafter (`tuple[float, ...]`): Fingerprint of the drafter's weights.
    """

    cache: SlabCache
    columns: list[torch.Tensor]
    token_ids: list[torch.Tensor]
    drafter: tuple[float, ...]

    def cut(self, row: int, columns: torch.Tensor, token_ids: torch.Tensor | None) -> None:
        """Shortens a row to the leading slots that still stand for these columns, and these tokens where known."""
        length = min(len(self.columns[row]), len(columns))
        same = self.columns[row][:length] == columns[:length]
        if token_ids is not None:
            same = same & (self.token_ids[row][:length] == token_ids[:length])
        length = int(same.long().cumprod(0).sum())
        if length < len(self.columns[row]) and isinstance(self.cache, EntryCache):
            # What comes next needs the state of the token before it, and only the last one's is here.
            self.cache.forget(row)
            length = 0
        self.cache.lengths[row] = length
        self.columns[row], self.token_ids[row] = self.columns[row][:length], self.token_ids[row][:length]


def remember_context(
    cache: Cache,
    drafter: DSparkDrafter,
    context: SlabCache,
    columns: Sequence[torch.Tensor],
    sequences: torch.LongTensor,
    earlier: KeptContext | None,
) -> None:
    """
    Attaches the drafter's context to `cache`, if it covers all that the cache holds.

    Args:
        cache ([`~transformers.Cache`]): The user's cache.
        context ([`SlabCache`]): The drafter's context.
        columns (`Sequence[torch.LongTensor]`): For each row, the columns of `cache` that hold a token.
        sequences (`torch.LongTensor` of shape `[R, W]`): Ids by column; if the caller passed only the newest, those.
        earlier ([`KeptContext`], *optional*): What this run went on from; knows the ids before `sequences`.
    """
    first = cache.get_seq_length() + 1 - sequences.shape[1]  # the newest token is in no column yet
    if context.lengths != [len(row) for row in columns] or (first > 0 and earlier is None):
        return
    token_ids = []
    for row, own_columns in enumerate(columns):
        known = sequences[row].cpu()[own_columns[own_columns >= first] - first]
        before = len(own_columns) - len(known)
        token_ids.append(known if earlier is None else torch.cat([earlier.token_ids[row][:before], known]))
    setattr(cache, _ATTRIBUTE, KeptContext(context, list(columns), token_ids, fingerprint(drafter)))


def recall_context(
    cache: Cache, drafter: DSparkDrafter, columns: Sequence[torch.Tensor], input_ids: torch.LongTensor | None
) -> KeptContext | None:
    """
    Takes the drafter's context of an earlier turn off `cache`, cut to what still holds.

    Args:
        columns (`Sequence[torch.LongTensor]`): For each row, the cached columns that hold a token.
        input_ids (`torch.LongTensor` of shape `[R, W]`, *optional*): Ids by column, if the caller knows them.

    Returns:
        [`KeptContext`] or `None` if there is nothing to go on with.
    """
    # Taken, not borrowed: a run that fails half-way must not leave a context that is no longer what it says.
    kept: KeptContext | None = cache.__dict__.pop(_ATTRIBUTE, None)
    if kept is None or kept.drafter != fingerprint(drafter) or kept.cache.num_rows != len(columns):
        return None
    for row, own_columns in enumerate(columns):
        kept.cut(row, own_columns, None if input_ids is None else input_ids[row].cpu()[own_columns])
    return kept


def fingerprint(drafter: DSparkDrafter) -> tuple[float, ...]:
    """The first number of every parameter: tells drafters apart, however often one is loaded, viewed or copied."""
    return tuple(torch.stack([parameter.detach().flatten()[0].float() for parameter in drafter.parameters()]).tolist())
