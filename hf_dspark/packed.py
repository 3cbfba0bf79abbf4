"""Runs a decoder-only Hugging Face model on one flattened sequence, whatever the lengths of its requests.

The tokens of all requests go through the model as a single row `[1, N]`, so every linear layer costs exactly N tokens,
however ragged the requests are (a padded batch would cost R * max). Only attention has to know who is who: the cache
writes the new keys and values into the slab of their request, and attention pads the queries per request and masks.

How attention is reached: every current model asks `AttentionInterface.get_interface` for its attention function. It is
wrapped once, and answers `packed_attention` only within `packed_scope`, only in the thread that runs it. Neither the
model nor its config is changed, and plain `generate` on the same model in another thread never notices. A model seen
going around the interface raises, rather than giving wrong text.

This module knows nothing about drafting, verification or generation. It is inference only.

Shape legend: R active rows (requests), N packed tokens, Q longest query of a row, T slots attention looks at, H
key/value heads, Hq query heads, G = Hq / H, Dh and Dv head sizes.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers.modeling_utils import AttentionInterface

from .gate import has_sliding_window, supports_packed
from .layout import BlockWindow, PackedLayout
from .narrow_linear import narrow_linears
from .slab import PackedForward, SlabCache

__all__ = [
    "NotPackable",
    "PackedLayout",
    "SlabCache",
    "install_packed_attention",
    "packed_attention",
    "packed_forward",
    "packed_scope",
    "packs",
    "supports_packed",
    "uninstall_packed_attention",
]

_ORIGINAL = "_hf_dspark_original"  # where our wrapper keeps what it wraps
_FORWARD: ContextVar[PackedForward | None] = ContextVar("hf_dspark_packed_forward", default=None)


@contextmanager
def packed_scope(cache: SlabCache, layout: PackedLayout) -> Iterator[PackedForward]:
    """
    Within it, in this thread, updates of `cache` and transformers' attention interface follow `layout`.

    For models of our own; [`packed_forward`] also feeds a model and checks that it plays along.

    Yields:
        `PackedForward`: the record of what the model did.
    """
    install_packed_attention()
    forward = PackedForward(layout)
    token = _FORWARD.set(forward)
    cache.forward = forward
    try:
        # Slabs are written in place and must not grow a graph.
        with narrow_linears(layout.rows.numel()), torch.no_grad():
            yield forward
    finally:
        cache.forward = None
        _FORWARD.reset(token)


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    block_window: BlockWindow | None = None,
    layout: PackedLayout | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """
    Attention of packed queries over slabs, with the signature of transformers' attention functions.

    Args:
        query (`torch.Tensor` of shape `[1, Hq, N, Dh]`): Packed queries.
        key (`torch.Tensor` of shape `[R, H, T, Dh]`): Keys, as [`SlabCache.update`] returned them.
        value (`torch.Tensor` of shape `[R, H, T, Dv]`): Values.
        attention_mask: Only checked to be a placeholder; who sees whom follows from the layout.
        dropout: Ignored; there is no training here.
        scaling (`float`, *optional*): Factor on the scores; defaults to `Dh ** -0.5`.
        sliding_window (`int`, *optional*): A query sees its own slot and the `sliding_window - 1` before it.
        softcap (`float`, *optional*): Soft cap on the scores.
        s_aux (`torch.Tensor` of shape `[Hq]`, *optional*): Attention sinks, one extra score per head.
        block_window ([`BlockWindow`], *optional*): The window of a draft layer, in place of `sliding_window`.
        layout ([`PackedLayout`], *optional*): Defaults to the layout of the running forward.

    Returns:
        `tuple[torch.Tensor, None]`: output `[1, N, Hq, Dv]`, and no weights.

    Raises:
        NotImplementedError: If the model adds a position bias.
        RuntimeError: If there is neither a `layout` nor a running forward.
    """
    if position_bias is not None:
        raise NotImplementedError("Attention with a position bias cannot be packed; run the model without packing.")
    if layout is None:
        forward = _FORWARD.get()
        if forward is None:
            raise RuntimeError("Packed attention can only run within `packed_scope` or with a `layout`.")
        layout = forward.note_attention(key, attention_mask, sliding_window)
    layout = layout.to(query.device)
    groups = query.shape[1] // key.shape[1]
    window = sliding_window if block_window is None else block_window
    first, mask = layout.mask(window, groups=groups, dtype=query.dtype)
    if first:
        key, value = key[:, :, first:], value[:, :, first:]
    folded = layout.fold(query, key.shape[1])
    if softcap is None and s_aux is None:
        output = nn.functional.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    else:
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        output = _explicit_attention(folded, key, value, mask, scaling, softcap, s_aux)
    return layout.unfold(output, groups), None


def _explicit_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
    s_aux: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with a soft cap or sinks, which torch's fused kernels lack; softmax in float32."""
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    if s_aux is not None:
        num_rows, num_heads, folded, _ = scores.shape
        groups = s_aux.numel() // num_heads
        sinks = s_aux.to(scores.dtype).view(1, num_heads, groups, 1, 1)
        sinks = sinks.expand(num_rows, -1, -1, folded // groups, 1).flatten(2, 3)
        scores = torch.cat([scores, sinks], dim=-1)
    probs = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(probs[..., : key.shape[2]], value)


def install_packed_attention() -> None:
    """Makes transformers' attention interface answer [`packed_attention`] inside [`packed_forward`]. Idempotent."""
    original = AttentionInterface.get_interface
    if hasattr(original, _ORIGINAL):
        return

    @functools.wraps(original)
    def get_interface(self: AttentionInterface, *args: Any, **kwargs: Any) -> Any:
        # Not while compiling: a `ContextVar` cannot be traced, and a traced choice would outlive the forward.
        if not torch.compiler.is_compiling() and _FORWARD.get() is not None:
            return packed_attention
        return original(self, *args, **kwargs)

    setattr(get_interface, _ORIGINAL, original)
    AttentionInterface.get_interface = get_interface


def uninstall_packed_attention() -> None:
    """Undoes [`install_packed_attention`]."""
    original = getattr(AttentionInterface.get_interface, _ORIGINAL, None)
    if original is not None:
        AttentionInterface.get_interface = original


class NotPackable(RuntimeError):
    """A model that [`supports_packed`] accepts goes around the attention interface after all."""


_TRIALS: "WeakKeyDictionary[nn.Module, str]" = WeakKeyDictionary()


def packs(model: Any, model_kwargs: dict[str, Any], device: torch.device, *, max_length: int) -> tuple[bool, str]:
    """
    [`supports_packed`], and a trial: once for each model, one token is run packed, so that a model which goes around
    the attention interface is found out before a generation starts.

    Args:
        model, model_kwargs, max_length: See [`supports_packed`].
        device (`torch.device`): Where the model takes its input ids.
    """
    supported, reason = supports_packed(model, model_kwargs, max_length=max_length)
    if supported and model not in _TRIALS:
        token, cache = torch.zeros((1, 1), dtype=torch.long, device=device), SlabCache(1)
        try:
            packed_forward(model, token, token, cache=cache, layout=cache.layout([1]))
            _TRIALS[model] = ""
        except NotPackable as error:
            _TRIALS[model] = str(error).split(", so its requests")[0]
    reason = reason or _TRIALS[model]
    return not reason, reason


def packed_forward(
    model: nn.Module,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    *,
    cache: SlabCache,
    layout: PackedLayout,
    output_hidden_states: bool | Sequence[int] = False,
    **kwargs: Any,
) -> Any:
    """
    Runs the packed tokens of all active rows through a model.

    Args:
        model (`PreTrainedModel`): A decoder-only model that [`supports_packed`] accepts.
        input_ids (`torch.LongTensor` of shape `[1, N]`): Tokens, row after row, as laid out.
        position_ids (`torch.LongTensor` of shape `[1, N]`): Their positions for the model's position embedding.
        cache ([`SlabCache`]): Is written at the layout's slots; its `lengths` stay as they are.
        layout ([`PackedLayout`]): From `cache.layout(...)`, for this forward only.
        output_hidden_states (`bool` or `Sequence[int]`, *optional*): Indices of the hidden states to return, or all.
        kwargs: Passed on to the model.

    Returns:
        The model's output.

    Raises:
        ValueError: If the number of tokens is not the layout's.
        NotPackable: If the model turns out not to use the attention interface.
    """
    if input_ids.shape != (1, layout.rows.numel()):
        raise ValueError(
            f"`input_ids` must have shape [1, {layout.rows.numel()}], one entry per token of the layout, got "
            f"{list(input_ids.shape)}."
        )
    with packed_scope(cache, layout) as forward:
        outputs = model(
            input_ids=input_ids,
            # A mask of four dimensions is taken as prepared by transformers; so none is built. Attention ignores it.
            attention_mask=torch.ones((1, 1, 1, 1), dtype=torch.bool, device=input_ids.device),
            position_ids=position_ids,
            cache=cache,
            use_cache=True,
            return_dict=True,
            output_hidden_states=output_hidden_states,
            **kwargs,
        )
    if forward.num_updates == 0 or forward.unread or forward.bypassed:
        raise NotPackable(
            f"`{type(model).__name__}` does not read its cache through transformers' attention interface alone (each "
            "cache update must be followed by one attention over what it returned, with no mask of its own), so its "
            "requests cannot be packed. Its attention may be compiled, replaced or of an unknown kind."
        )
    if not forward.windowed and has_sliding_window(model.config):
        raise NotPackable(
            f"`{type(model).__name__}` has a sliding window but does not pass it to its attention function, so its "
            "requests cannot be packed."
        )
    return outputs
