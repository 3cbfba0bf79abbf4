"""Which models, and which inputs, can run packed.

Looks at classes, configs and keyword arguments only; nothing is run. What cannot be seen from there (a model that goes
around the attention interface after all) is caught by `packed_forward` itself.
"""

from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from .slab import holds_states

_PACKABLE_INPUTS = {
    "attention_mask",
    "cache",
    "cache_position",
    "inputs_embeds",
    "logits_to_keep",
    "position_ids",
}


def supports_packed(model: Any, model_kwargs: dict[str, Any], *, max_length: int | None = None) -> tuple[bool, str]:
    """
    Whether a model can run packed, and if not, why.

    Args:
        model (`PreTrainedModel`): The target.
        model_kwargs (`dict`): Keyword arguments that generation passes on to the model.
        max_length (`int`, *optional*):
            Longest sequence in tokens, where known. Rotary embeddings that change with the length are exact up to the
            length they change at.

    Returns:
        `tuple[bool, str]`: the verdict, and what is not supported (empty if all is).
    """
    reason = (
        _unsupported_model(model)
        or _unsupported_cache(DynamicCache(config=model.config))
        or _unsupported_cache(model_kwargs.get("cache"))
        or _unsupported_inputs(model_kwargs)
        or _unsupported_mask(model.config, model_kwargs.get("attention_mask"))
        or _unsupported_rope(model.config.get_text_config(decoder=True), max_length)
    )
    return not reason, reason


def _unsupported_model(model: Any) -> str:
    if model.config.is_encoder_decoder:
        return "encoder-decoder models"
    if model._is_stateful:
        return "models with a recurrent state"
    if not model._supports_attention_backend:
        return f"the attention of `{type(model).__name__}` (it goes around transformers' attention interface)"
    if model._compiled_call_impl is not None or hasattr(model.forward, "_torchdynamo_orig_callable"):
        return "a compiled forward"
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "attention_chunk_size", None) is not None:
        return "chunked attention"
    if getattr(config, "alibi", False):
        return "ALiBi position biases"
    # PEFT lends a prompt-learning model its own input preparation, which feeds virtual tokens.
    owner = getattr(model.prepare_inputs_for_generation, "__self__", None)
    if getattr(getattr(owner, "active_peft_config", None), "is_prompt_learning", False):
        return "prompt-learning PEFT adapters"
    return ""


def _unsupported_cache(cache: Any) -> str:
    if cache is None:
        return ""
    if not isinstance(cache, DynamicCache) or cache.offloading:
        return f"a `{type(cache).__name__}`{' with offloading' if getattr(cache, 'offloading', False) else ''}"
    for layer in cache.layers:
        try:
            holds_states(layer)
        except TypeError:
            return f"a cache with `{type(layer).__name__}` layers"
    return ""


def _unsupported_inputs(model_kwargs: dict[str, Any]) -> str:
    for name, value in model_kwargs.items():
        if isinstance(value, torch.Tensor) and name not in _PACKABLE_INPUTS:
            return f"the model input `{name}`"
    for name in ("attention_mask", "position_ids"):
        value = model_kwargs.get(name)
        if value is not None and value.ndim != 2:
            return f"{name} with {value.ndim} dimensions"
    return ""


def _unsupported_mask(config: Any, mask: torch.Tensor | None) -> str:
    # A sliding window counts columns, masked ones too; a slab has no place for those between tokens.
    if mask is not None and has_sliding_window(config) and not mask.bool().equal(mask.bool().cummax(1).values.bool()):
        return "attention masks with holes under a sliding window"
    return ""


def _unsupported_rope(config: Any, max_length: int | None) -> str:
    parameters = getattr(config, "rope_parameters", None) or {}
    # One set of parameters, or one for each layer type.
    for rope in [parameters, *(value for value in parameters.values() if isinstance(value, dict))]:
        rope_type = rope.get("rope_type", "default")
        if rope_type == "longrope":
            limit = rope["original_max_position_embeddings"]
        elif "dynamic" in rope_type:
            limit = config.max_position_embeddings
        else:
            continue
        if max_length is None or max_length > limit:
            return f"`{rope_type}` rotary embeddings, which change with the length, on more than {limit} tokens"
    return ""


def has_sliding_window(config: Any) -> bool:
    """Whether a config promises layers with a sliding window."""
    text_config = config.get_text_config(decoder=True)
    layer_types = getattr(text_config, "layer_types", None)
    if layer_types is None:
        return getattr(text_config, "sliding_window", None) is not None
    return "sliding_attention" in layer_types
