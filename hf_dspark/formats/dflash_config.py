"""The layouts that keep a draft's fields in `dflash_config`: SpecForge, Model-Optimizer, DFlash as z-lab publishes it.

Facts: SpecForge and a Model-Optimizer DSpark draft with `shift_label` predict from the anchor (layout A), DFlash does
not (layout B). None stores embeddings or an LM head. Sliding layers move with the slot, which counts as a token of its
window: SpecForge's are causal inside the block, Model-Optimizer says (`causal`), z-lab's are not. Model-Optimizer says
`full_attention` of every layer, sliding ones too. Its heads' tensors have no prefix, SpecForge's once had another.
"""

import re
from collections.abc import Mapping
from typing import Any

from .fields import agreed, default_layer_ids, head_fields, qwen3_fields, required

_MODEL_OPTIMIZER_NAMES = (
    (re.compile(r"^(markov_w[12]|gate_proj|joint_proj)\."), r"markov_head.\1."),
    (re.compile(r"^confidence_proj\."), "confidence_head.proj."),
)


def read_specforge(config: Mapping[str, Any]) -> dict[str, Any]:
    """`DSparkConfig` keywords of a SpecForge DSpark draft."""
    dflash = config["dflash_config"]
    fields = _common(config) | head_fields(dflash)
    # Its draft is trained on plain rows of the target's table, whatever the target's own module does with them.
    return fields | {"sample_from_anchor": True, "sliding_block_causal": True, "embedding_scale": 1.0}


def read_model_optimizer(config: Mapping[str, Any]) -> dict[str, Any]:
    """`DSparkConfig` keywords of a Model-Optimizer DSpark draft."""
    dflash = config["dflash_config"]
    fields = _common(config) | head_fields(dflash, confidence="use_confidence_head")
    fields["sample_from_anchor"] = bool(dflash.get("shift_label", True))
    fields["sliding_block_causal"] = bool(dflash.get("causal", False))
    if dflash.get("use_swa"):
        window = agreed(
            "sliding window",
            {"dflash_config.swa_window_size": dflash.get("swa_window_size"), "config": config.get("sliding_window")},
        )
        kinds = ["sliding_attention"] * len(fields["layer_types"])
        fields |= {"layer_types": kinds, "sliding_window": required("sliding window", window)}
    return fields


def read_zlab(config: Mapping[str, Any]) -> dict[str, Any]:
    """`DSparkConfig` keywords of a DFlash draft."""
    off = {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}
    return _common(config) | off | {"sample_from_anchor": False, "sliding_block_causal": False}


def _common(config: Mapping[str, Any]) -> dict[str, Any]:
    dflash, fields = config["dflash_config"], qwen3_fields(config)

    def told(name: str) -> Any:
        return agreed(name, {"config": config.get(name), "dflash_config": dflash.get(name)})

    taps = told("target_layer_ids")
    if taps is None and (num_target_layers := told("num_target_layers")) is not None:
        taps = default_layer_ids(num_target_layers, fields["num_hidden_layers"])
    return fields | {
        "block_size": required("block_size", told("block_size")),
        "mask_token_id": required("mask_token_id", told("mask_token_id")),
        "target_layer_ids": list(required("target_layer_ids", taps)),
        "num_target_layers": told("num_target_layers"),
        "target_hidden_size": config.get("target_hidden_size"),
        "draft_vocab_size": config.get("draft_vocab_size"),
        "sliding_window_origin": "slot",
    }


def notes(config: Mapping[str, Any]) -> list[str]:
    """What a reader of the description of a Model-Optimizer or z-lab draft should know."""
    if config["dflash_config"].get("use_swa") or "sliding_attention" in (config.get("layer_types") or ()):
        return ["what sliding layers see is inferred in this layout (the window moves with the slot)"]
    return []


def rename_specforge(name: str) -> str:
    """Our name of a SpecForge tensor."""
    return name.removeprefix("logit_head.")


def rename_model_optimizer(name: str) -> str:
    """Our name of a Model-Optimizer tensor."""
    for pattern, replacement in _MODEL_OPTIMIZER_NAMES:
        name = pattern.sub(replacement, name)
    return name
