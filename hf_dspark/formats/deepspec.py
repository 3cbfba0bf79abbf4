"""DeepSpec's flat layout, NeMo Automodel's too: Qwen3 and Gemma4 drafts, from the anchor (layout A).

Facts: the config is the draft layers' with DSpark's fields beside them. Folders hold frozen copies of the target's
embeddings and LM head, which are not read. Without `sample_from_anchor` the anchor slot predicts.
"""

from collections.abc import Mapping
from typing import Any

from .detect import DEEPSPEC_BACKBONES
from .fields import head_fields, layer_fields, own_fields, qwen3_fields, required, rope_fields


def read(config: Mapping[str, Any]) -> dict[str, Any]:
    """`DSparkConfig` keywords of a DeepSpec config; `ValueError` for what is not built."""
    architecture = next(name for name in config["architectures"] if name in DEEPSPEC_BACKBONES)
    if DEEPSPEC_BACKBONES[architecture] == "gemma4":
        fields = gemma4_fields(config)
    else:
        fields = qwen3_fields(config)
    fields |= {
        "block_size": required("block_size", config.get("block_size")),
        "sample_from_anchor": bool(config.get("sample_from_anchor", True)),
        "mask_token_id": required("mask_token_id", config.get("mask_token_id")),
        "target_layer_ids": list(required("target_layer_ids", config.get("target_layer_ids"))),
        "target_hidden_size": config.get("target_hidden_size"),
        "draft_vocab_size": config.get("draft_vocab_size"),
    }
    fields |= head_fields(config) | own_fields(config)
    if "sliding_attention" in fields["layer_types"] and "sliding_block_causal" not in fields:
        raise ValueError(
            "this drafter has sliding layers, but its flat layout does not say what they see of a block; add "
            "sliding_window_origin ('anchor' or 'slot') and sliding_block_causal (true or false) to its config.json"
        )
    return fields


def gemma4_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords for Gemma4 draft layers, all of which attend fully and so have the sizes of global layers."""
    fields = layer_fields(config)
    unbuilt = {
        "enable_moe_block": config.get("enable_moe_block"),
        "hidden_size_per_layer_input": config.get("hidden_size_per_layer_input"),
        "quantization_config": config.get("quantization_config"),
    }
    if named := [name for name, value in unbuilt.items() if value]:
        raise ValueError(f"Gemma4 draft layers with {named[0]}={unbuilt[named[0]]!r} are not built here")
    if set(fields["layer_types"]) != {"full_attention"}:
        raise ValueError(f"Gemma4 draft layers must all be 'full_attention', got {fields['layer_types']}")
    own_values: Mapping[str, Any] = next(iter((config.get("per_layer_config") or {}).values()), {})  # newer spelling
    shared = bool(config.get("attention_k_eq_v", False))
    fields |= {
        "backbone": "gemma4",
        "head_dim": config.get("global_head_dim") or own_values.get("head_dim") or 512,
        "hidden_act": config.get("hidden_activation", "gelu_pytorch_tanh"),
        "attention_k_eq_v": shared,
        "final_logit_softcapping": config.get("final_logit_softcapping"),
    }
    if shared:
        heads = config.get("num_global_key_value_heads") or own_values.get("num_key_value_heads")
        fields["num_key_value_heads"] = heads or fields["num_key_value_heads"]
    return fields | rope_fields(config, "full_attention")
