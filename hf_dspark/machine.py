"""What step times depend on, as plain values: the models' shapes, the device, threads, kernels and versions.

Contract: two descriptions are equal exactly if times measured under one hold under the other. Weights, names and
calibration do not enter; nothing is run.
"""

import functools
import hashlib
import json
import platform
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from .modeling_dspark import DSparkDrafter
from .narrow_linear import ways
from .target import target_fingerprint

# Fields of a drafter's config that decide what it computes, with weights of whatever values.
_DRAFTER_FIELDS = (
    "model_type",
    "backbone",
    "attention_k_eq_v",
    "layer_types",
    "sliding_window",
    "block_size",
    "sample_from_anchor",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "target_hidden_size",
    "target_layer_ids",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "draft_vocab_size",
    "draft_top_k",
)


def describe(target: PreTrainedModel, drafter: DSparkDrafter | None) -> dict[str, Any]:
    """Everything that the times of a pair depend on; JSON values."""
    import hf_dspark  # its version is set while it is being imported

    return {
        "target": type(target).__name__,
        "target_fingerprint": target_fingerprint(target),
        **_model("target", target),
        "quantization": _quantization(target),
        "attention": target.config._attn_implementation,
        "drafter_fingerprint": None if drafter is None else drafter_fingerprint(drafter),
        **({} if drafter is None else _model("drafter", drafter)),
        "block_size": None if drafter is None else drafter.config.num_drafts,
        "threads": torch.get_num_threads(),
        "narrow_products": [way.__name__.strip("_") for way in ways(target.dtype)],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_dspark": hf_dspark.__version__,
    }


def drafter_fingerprint(drafter: DSparkDrafter) -> str:
    """Hash of what a drafter computes, 16 hex digits; training and calibration do not change it."""
    fields = {name: getattr(drafter.config, name) for name in _DRAFTER_FIELDS}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


def device_name(device: torch.device) -> str:
    """The name of a processor or an accelerator, as its driver tells it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _processor_name() if device.type in ("cpu", "meta") else f"{device.type} on {_processor_name()}"


def _model(role: str, model: PreTrainedModel) -> dict[str, Any]:
    devices = getattr(model, "hf_device_map", None) or {"": model.device}
    names = {str(place): device_name(torch.device(_place(place))) for place in devices.values()}
    return {
        f"{role}_parameters": sum(parameter.numel() for parameter in model.parameters()),
        f"{role}_dtype": str(model.dtype).removeprefix("torch."),
        f"{role}_devices": names,
    }


def _place(place: Any) -> Any:
    """A value of a device map as torch names devices; what is offloaded to disk is computed elsewhere."""
    if isinstance(place, int):
        return f"cuda:{place}"
    return "cpu" if place == "disk" else place


def _quantization(model: PreTrainedModel) -> str | None:
    settings = getattr(model.config, "quantization_config", None)
    if settings is None:
        return None
    settings = settings if isinstance(settings, dict) else settings.to_dict()
    return str(settings.get("quant_method"))


@functools.cache
def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
