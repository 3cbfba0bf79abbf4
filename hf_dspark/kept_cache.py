"""Caches that outlive a call: multi-turn use of `generate(cache=...)` with a drafter.

Contract: after a call the target's keys and values go back into the user's cache, and the drafter's context stays attached
to it, so that the next turn drafts as well as a fresh run would. What is remembered is trusted only as far as columns,
token ids and drafter agree; anything else merely lowers acceptance, never changes text.

Shape legend: R rows, W columns of the dense cache (prompt, padding and generated tokens).
"""

import dataclasses

import torch
from transformers.cache_utils import Cache

from .modeling_dspark import DSparkDrafter
from .packed import SlabCache


@dataclasses.dataclass(slots=True)
class KeptContext:
    """A drafter's context cache, and what it was made from: for each row, columns and token ids of its slots."""

    cache: SlabCache
    columns: list[torch.Tensor]
    token_ids: list[torch.Tensor]
    drafter: int

    def shared_length(self, row: int, columns: torch.Tensor, token_ids: torch.Tensor | None) -> int:
        """How many leading slots of `row` still stand for these columns and token ids."""
        length = min(self.cache.lengths[row], len(columns))
        same = self.columns[row][:length] == columns[:length]
        if token_ids is not None:
            same = same & (self.token_ids[row][:length] == token_ids[:length])
        return int(same.long().cumprod(0).sum())


def remember_context(
    cache: Cache, drafter: DSparkDrafter, draft_cache: SlabCache, columns: list[torch.Tensor], sequences: torch.Tensor
) -> None:
    """Attaches the drafter's context to `cache`. `sequences [R, W]` are the ids by column, or fewer (unknown prompt)."""
    known = [column[column < sequences.shape[1]] for column in columns]
    token_ids = [sequences[row].cpu()[column] for row, column in enumerate(known)]
    cache._dspark_context = KeptContext(draft_cache, known, token_ids, id(drafter.fc.weight))


def recall_context(
    cache: Cache, drafter: DSparkDrafter, columns: list[torch.Tensor], input_ids: torch.Tensor | None
) -> SlabCache | None:
    """
    The drafter's context of an earlier turn, cut to what still holds.

    Args:
        columns (`list[torch.LongTensor]`): Cached columns of every row.
        input_ids (`torch.LongTensor` of shape `[R, W]`, *optional*): Ids by column, if the caller knows them.

    Returns:
        [`SlabCache`] or `None` if there is nothing to go on with.
    """
    kept: KeptContext | None = getattr(cache, "_dspark_context", None)
    if kept is None or kept.drafter != id(drafter.fc.weight) or kept.cache.num_rows != len(columns):
        return None
    ids = [None if input_ids is None else input_ids[row].cpu()[column] for row, column in enumerate(columns)]
    kept.cache.lengths = [
        kept.shared_length(row, column, row_ids) for row, (column, row_ids) in enumerate(zip(columns, ids, strict=True))
    ]
    return kept.cache
