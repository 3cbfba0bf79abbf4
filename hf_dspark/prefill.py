"""Prefill: the target over the prompts, and what the rounds need from it.

Contract: as a rule the first token comes out of the very forward that plain `generate` runs, so it is the same to the
bit; the prompts' keys and values then move to the packed cache. A batch of prompts of very different lengths is mostly
padding; its rows are read one by one instead, packed, which computes the same without the padding. Either way the
tapped hidden states become the drafter's context.

Source: https://huggingface.co/papers/2607.05147, Eq. 2. Shape legend: R rows, S prompt columns, W columns of the cache
after the prefill (S and earlier turns), C real tokens of a row, M tapped layers, Dt target hidden, V vocabulary.
"""

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import logging

from .kept_cache import DenseColumns, KeptContext, recall_context
from .packed import SlabCache, packed_forward
from .target import TargetView

logger = logging.get_logger(__name__)

MOST_PADDING = 0.25  # of a batch that is still run as a whole
CHUNK = 512  # tokens of a row that are read at once; bounds what its attention mask takes


Context = tuple[torch.Tensor, torch.Tensor, list[int]]
"""Tapped states `[C, M*Dt]`, position ids `[C]` and C tokens, as [`DraftSession.add_context`] takes them."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Prefill:
    """
    Attributes:
        cache ([`SlabCache`]): The target's keys and values, padding dropped.
        earlier ([`KeptContext`], *optional*): The drafter's context of an earlier turn.
        columns ([`DenseColumns`]): Where the prompt stands in the dense cache.
        last_positions (`list[int]`): Position id of every row's last prompt token.
        context (`list[list[Context]]`): The drafter's, for each row, in one or more parts.
        logits (`torch.Tensor` of shape `[R, V]`): Of the first new token, float32.
        hidden_states (`tuple`): As the target returned them; empty where rows were read one by one.
    """

    cache: SlabCache
    earlier: KeptContext | None
    columns: DenseColumns
    last_positions: list[int]
    context: list[list[Context]]
    logits: torch.Tensor
    hidden_states: tuple[torch.Tensor | None, ...]


def prefill(
    view: TargetView,
    input_ids: torch.LongTensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    *,
    all_hidden_states: bool,
) -> Prefill:
    """
    Runs the prompt (or, on a kept cache, its new part) through the target.

    Args:
        view ([`TargetView`]): Target and drafter.
        input_ids (`torch.LongTensor` of shape `[R, S]`): The prompt.
        generation_config, model_kwargs: As `generate` prepared them.
        all_hidden_states (`bool`): Capture every layer, because the caller asked for them, not only the tapped ones.
    """
    cached = model_kwargs["cache"].get_seq_length()
    if generation_config.prefill_chunk_size is not None:
        logger.warning_once("`prefill_chunk_size` is ignored with a DSpark drafter: the prompt is prefilled at once.")
        generation_config = copy.copy(generation_config)
        generation_config.prefill_chunk_size = None
    if not all_hidden_states and is_mostly_padding(input_ids, model_kwargs):
        return prefill_by_rows(view, input_ids, model_kwargs)
    indices = True if all_hidden_states else view.hidden_state_indices
    outputs = view.target._prefill(input_ids, generation_config, model_kwargs | {"output_hidden_states": indices})
    width = outputs.cache.get_seq_length()
    mask, positions = real_tokens(input_ids, model_kwargs, width)
    earlier, context = earlier_context(view, input_ids, model_kwargs, mask, positions, cached)
    # Embeddings given as a prompt have no ids. They are 0 here, which costs nothing but acceptance.
    ids = torch.nn.functional.pad(input_ids, (width - input_ids.shape[1], 0))[:, cached:]
    fresh = by_row(view.context_features(outputs.hidden_states), positions[:, cached:], ids, mask[:, cached:])
    cache = SlabCache(len(mask))
    cache.import_dense(outputs.cache, mask)
    return Prefill(
        cache=cache,
        earlier=earlier,
        columns=DenseColumns(real_columns(mask), width),
        last_positions=positions[:, -1].tolist(),
        context=[[*old, new] for old, new in zip(context, fresh, strict=True)],
        logits=outputs.logits[:, -1].to(copy=True, device=input_ids.device, dtype=torch.float32),
        hidden_states=outputs.hidden_states,
    )


def is_mostly_padding(input_ids: torch.LongTensor, model_kwargs: dict[str, Any]) -> bool:
    """
    Whether a fresh batch `[R, S]` of token ids has so much padding that its rows are better read one by one. On
    devices other than CPUs one large forward is quicker than many small ones in any case.
    """
    mask = model_kwargs.get("attention_mask")
    fresh = model_kwargs["cache"].get_seq_length() == 0 and model_kwargs.get("inputs_embeds") is None
    if not fresh or input_ids.device.type != "cpu" or mask is None or mask.shape != input_ids.shape:
        return False
    if not mask[:, -1].all():  # a row without tokens, or padded on the right: as plain `generate` has it
        return False
    return int(mask.bool().sum()) < (1 - MOST_PADDING) * mask.numel()


def prefill_by_rows(view: TargetView, input_ids: torch.LongTensor, model_kwargs: dict[str, Any]) -> Prefill:
    """[`prefill`] of a fresh batch `[R, S]` without its padding."""
    mask, positions = real_tokens(input_ids, model_kwargs, input_ids.shape[1])
    cache, context, logits = SlabCache(len(mask)), [], []
    for row, columns in enumerate(real_columns(mask)):
        columns = columns.to(input_ids.device)
        ids, places = input_ids[row, columns].tolist(), positions[row, columns].tolist()
        own, parts = SlabCache(1), []
        for first in range(0, len(ids), CHUNK):
            chunk = slice(first, first + CHUNK)
            last_logits, part = read_tokens(view, own, ids[chunk], places[chunk])
            parts += part
        cache.take_row(row, own)
        context.append(parts)
        logits.append(last_logits.to(input_ids.device))
    return Prefill(
        cache=cache,
        earlier=None,
        columns=DenseColumns(real_columns(mask), input_ids.shape[1]),
        last_positions=positions[:, -1].tolist(),
        context=context,
        logits=torch.cat(logits),
        hidden_states=(),
    )


def read_tokens(
    view: TargetView, cache: SlabCache, token_ids: list[int], positions: Sequence[int], *, keep_context: bool = True
) -> tuple[torch.Tensor, list[Context]]:
    """
    Runs the next tokens of one prompt through the target.

    Args:
        view ([`TargetView`]): Target and drafter.
        cache ([`SlabCache`] of one row): Holds what came before; takes what is read.
        token_ids (`list[int]` of length C), positions (`Sequence[int]` of length C): The tokens.
        keep_context (`bool`, *optional*, defaults to `True`): Whether a drafter will want to know.

    Returns:
        `tuple`: float32 logits `[1, V]` after the last token, and the drafter's [`Context`], or none.
    """
    target = view.target
    outputs = packed_forward(
        target,
        view.to_target(torch.tensor([token_ids])),
        view.to_target(torch.tensor([positions])),
        cache=cache,
        layout=cache.layout([len(token_ids)]),
        output_hidden_states=view.hidden_state_indices if keep_context else False,
        **({"logits_to_keep": 1} if target._supports_logits_to_keep() else {}),
    )
    cache.lengths[0] += len(token_ids)
    logits = outputs.logits[0, -1:].to(copy=True, dtype=torch.float32)
    if not keep_context:
        return logits, []
    features = view.context_features(outputs.hidden_states)[0]
    return logits, [(features, torch.tensor(positions, device=features.device), token_ids)]


def real_tokens(
    input_ids: torch.LongTensor, model_kwargs: dict[str, Any], width: int
) -> tuple[torch.Tensor, torch.LongTensor]:
    """Which of the cache's columns hold a token, bool `[R, W]`, and every column's position id, `[R, W]`."""
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones(len(input_ids), width, dtype=torch.bool) if mask is None else mask.bool()
    mask = mask.to(input_ids.device)
    counted = (mask.long().cumsum(-1) - 1).clamp_min(0)
    given = model_kwargs.get("position_ids")
    if given is None:
        return mask, counted
    # With a kept cache the caller may give positions of the new part only.
    return mask, torch.cat([counted[:, : width - given.shape[1]], given.to(mask.device).expand(len(mask), -1)], dim=1)


def real_columns(mask: torch.Tensor) -> list[torch.Tensor]:
    """Columns of `mask [R, W]` that hold a token, row by row."""
    return [row.nonzero().squeeze(1) for row in mask.cpu()]


def by_row(features: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> list[tuple]:
    """`features [R, W, M*Dt]`, `positions [R, W]` and `ids [R, W]` -> for each row those of its real tokens."""
    home = features.device
    return [
        (row[kept.to(home)], where[kept].to(home), what[kept].tolist())
        for row, where, what, kept in zip(features, positions, ids, mask, strict=True)
    ]


def earlier_context(
    view: TargetView,
    input_ids: torch.LongTensor,
    model_kwargs: dict[str, Any],
    mask: torch.Tensor,
    positions: torch.Tensor,
    cached: int,
) -> tuple[KeptContext | None, list[list]]:
    """
    The drafter's context for the `cached` columns of a kept cache: remembered, or read off the target once more.

    Only the drafter's acceptance depends on it. Without ids of the cached part there is nothing to read: the drafter
    then starts from the new part.
    """
    if cached == 0:
        return None, [[] for _ in mask]
    known = input_ids.shape[1] == mask.shape[1]
    columns = real_columns(mask[:, :cached])
    kept = recall_context(model_kwargs["cache"], view.drafter, columns, input_ids if known else None)
    missing = mask[:, :cached].clone()
    for row, own_columns in enumerate([] if kept is None else kept.columns):
        missing[row, own_columns.to(mask.device)] = False
    if not known or not missing.any():
        return kept, [[] for _ in mask]
    hidden_states = view.target(
        view.to_target(input_ids[:, :cached]),
        attention_mask=view.to_target(mask[:, :cached].long()),
        position_ids=view.to_target(positions[:, :cached]),
        output_hidden_states=view.hidden_state_indices,
        use_cache=False,
    ).hidden_states
    features = view.context_features(hidden_states)
    return kept, [[row] for row in by_row(features, positions[:, :cached], input_ids[:, :cached], missing)]
