"""Pieces that the readers of foreign configs share: values told in several places, draft layers, RoPE.

Contract: plain mappings in, plain `DSparkConfig` keywords out; `ValueError` where a config contradicts itself or asks
for what is not built.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from huggingface_hub.errors import StrictDataclassError

LAYER_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "attention_bias",
    "attention_dropout",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)
OWN_FIELDS = (
    "confidence_temperatures",
    "confidence_offsets",
    "confidence_calibration",
    "draft_top_k",
    "target_name_or_path",
    "target_fingerprint",
    "num_target_layers",
    "embedding_scale",
    "sliding_window_origin",
    "sliding_block_causal",
)
"""Fields of ours that our writers add to foreign configs, whose own readers ignore them."""


@contextlib.contextmanager
def wrong_types_refused() -> Iterator[None]:
    """Turns what values of the wrong type lead to into a `ValueError` about the config."""
    try:
        yield
    except (TypeError, AttributeError, KeyError, StrictDataclassError) as error:
        told = f"{error} is missing" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise ValueError(f"the config.json has a value of the wrong type, or lacks one: {told}") from error


def agreed(what: str, places: Mapping[str, Any]) -> Any:
    """
    The one value that all places of a config which name it agree on, or `None`.

    Args:
        what (`str`): Its name, for the message.
        places (`Mapping[str, Any]`): Value by place; `None` where it is not named.

    Raises:
        ValueError: Two places name different values.
    """
    named = {place: value for place, value in places.items() if value is not None}
    values = list(named.values())
    if any(value != values[0] for value in values[1:]):
        told = ", ".join(f"{place} says {value!r}" for place, value in named.items())
        raise ValueError(f"this drafter's config contradicts itself about its {what}: {told}")
    return values[0] if values else None


def required(what: str, value: Any) -> Any:
    """`value`, refused if it is missing."""
    if value is None:
        raise ValueError(f"this drafter's config lacks its {what}, which cannot be guessed")
    return value


def qwen3_fields(config: Mapping[str, Any], *, nested_rope: str | None = None) -> dict[str, Any]:
    """
    Keywords for Qwen3 draft layers.

    Args:
        config (`Mapping`): A Qwen3-style config.
        nested_rope (`str`, *optional*): Kind of layer whose RoPE all layers take, where RoPE is given for each kind.
    """
    model_type = config.get("model_type")
    if model_type not in (None, "qwen3", "dspark"):
        raise ValueError(f"draft layers of model_type {model_type!r} are not built here; Qwen3's and Gemma4's are")
    if config.get("quantization_config"):
        raise ValueError("this drafter is quantised (quantization_config); only unquantised drafters are read")
    return layer_fields(config) | rope_fields(config, nested_rope)


def layer_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes, layer kinds and dtype, by the names that Qwen3 has for them."""
    fields = {name: config[name] for name in LAYER_FIELDS if config.get(name) is not None}
    if (dtype := config.get("dtype") or config.get("torch_dtype")) is not None:
        fields["dtype"] = dtype
    num_layers = required("num_hidden_layers", config.get("num_hidden_layers"))
    kinds = config.get("layer_types") or ["full_attention"] * num_layers
    fields["layer_types"] = list(kinds)
    if "sliding_attention" in kinds:
        fields["sliding_window"] = required("sliding_window", config.get("sliding_window"))
    return fields


def rope_fields(config: Mapping[str, Any], nested: str | None = None) -> dict[str, Any]:
    """`rope_parameters` out of the new or the old spelling; `nested` is the entry taken where it is nested."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    entries = {kind: entry for kind, entry in parameters.items() if isinstance(entry, Mapping)}
    if entries:
        kinds = (
            [nested]
            if nested is not None and nested in entries
            else sorted(set(config.get("layer_types") or entries) & set(entries))
        )
        parameters = agreed("RoPE (one for all draft layers is built)", {kind: entries[kind] for kind in kinds})
        theta = parameters.get("rope_theta")
    else:
        theta = agreed(
            "rope_theta", {"rope_parameters": parameters.get("rope_theta"), "config": config.get("rope_theta")}
        )
    parameters = {key: value for key, value in parameters.items() if key != "type"} | {
        "rope_type": parameters.get("rope_type") or parameters.get("type") or "default"
    }
    if theta is not None:
        parameters["rope_theta"] = theta
    return {"rope_parameters": parameters}


def head_fields(config: Mapping[str, Any], *, confidence: str = "enable_confidence_head") -> dict[str, Any]:
    """Markov and confidence head; a config that does not mention one has none."""
    rank, enabled = config.get("markov_rank") or 0, bool(config.get(confidence, False))
    fields: dict[str, Any] = {"markov_rank": rank, "enable_confidence_head": enabled}
    fields["confidence_head_with_markov"] = enabled and bool(config.get("confidence_head_with_markov", rank > 0))
    if rank:
        fields["markov_head_type"] = config.get("markov_head_type") or "vanilla"
    return fields


def own_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ours that a folder written by `convert` carries along."""
    return {name: config[name] for name in OWN_FIELDS if config.get(name) is not None}


def default_layer_ids(num_target_layers: int, num_draft_layers: int) -> Sequence[int]:
    """The layers that DFlash taps when its config names none."""
    if num_draft_layers == 1:
        return [num_target_layers // 2]
    step = (num_target_layers - 4) / (num_draft_layers - 1)
    return [round(1 + index * step) for index in range(num_draft_layers)]
