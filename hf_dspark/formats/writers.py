"""Configs for other software, out of a `DSparkConfig`; the inverse of the readers.

Contract: `LAYOUTS[name](config)` gives the config.json of a layout whose tensors have the very names of ours, or
refuses with the reason. Reading it back gives the same drafter. Fields of ours that the layout has no word for go
along, where its own readers pass over them.
"""

from collections.abc import Callable
from typing import Any

from ..configuration_dspark import DSparkConfig
from .fields import LAYER_FIELDS, OWN_FIELDS

_DTYPE = "dtype"


def native(config: DSparkConfig) -> dict[str, Any]:
    """hf_dspark's own config.json."""
    return {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}


def deepspec(config: DSparkConfig) -> dict[str, Any]:
    """
    DeepSpec's flat config, which vLLM (`method: dspark`), SGLang (`DSPARK`) and llama.cpp's converter read.

    `ValueError` for a soft cap on Qwen3 layers, which it cannot say.
    """
    fields = _layers(config) | {
        "architectures": ["Gemma4DSparkModel" if config.backbone == "gemma4" else "Qwen3DSparkModel"],
        "model_type": "gemma4_text" if config.backbone == "gemma4" else "qwen3",
        "tie_word_embeddings": False,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": config.target_layer_ids,
        "num_target_layers": config.num_target_layers,
        **_heads(config),
        **_own(config),
    }
    if not config.sample_from_anchor:  # without the key it means layout A
        fields["sample_from_anchor"] = False
    if config.target_hidden_size != config.hidden_size:
        fields["target_hidden_size"] = config.target_hidden_size
    if config.draft_vocab_size is not None:
        fields["draft_vocab_size"] = config.draft_vocab_size
    if config.draft_top_k is not None:
        fields["dspark_draft_topk"] = config.draft_top_k
    if config.backbone == "gemma4":
        return fields | _gemma4(config)
    if config.final_logit_softcapping is not None:
        raise ValueError(
            "the DeepSpec layout has no soft cap (final_logit_softcapping) for Qwen3 draft layers; convert to native"
        )
    if config.sliding_window is not None:
        fields |= {
            "sliding_window": config.sliding_window,
            "use_sliding_window": True,
            "sliding_window_origin": config.sliding_window_origin,
            "sliding_block_causal": config.sliding_block_causal,
        }
    return fields


def speculators(config: DSparkConfig) -> dict[str, Any]:
    """
    The speculators library's config, which vLLM reads as well.

    `ValueError` for what it has no word for: Gemma4 layers, a soft cap, windows that move with the slot.
    """
    unsaid = {
        "Gemma4 draft layers": config.backbone != "qwen3",
        "a soft cap (final_logit_softcapping)": config.final_logit_softcapping is not None,
        "sliding windows that move with the slot (sliding_window_origin='slot')": config.sliding_window is not None
        and config.sliding_window_origin == "slot",
        "tapped states of another width (target_hidden_size)": config.target_hidden_size != config.hidden_size,
    }
    if reasons := [what for what, there in unsaid.items() if there]:
        raise ValueError(f"the speculators layout has no word for {reasons[0]}; convert to deepspec or native")
    is_dflash = not (config.markov_rank or config.enable_confidence_head or config.sample_from_anchor)
    kind = "dflash" if is_dflash else "dspark"
    layers = _layers(config)
    layers |= {"model_type": "qwen3", "tie_word_embeddings": False, "rope_parameters": config.rope_parameters}
    if config.sliding_window is not None:
        layers |= {"sliding_window": config.sliding_window, "use_sliding_window": True}
    fields = {
        "architectures": ["DFlashDraftModel" if is_dflash else "DSparkDraftModel"],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": _proposals(config, kind),
        "transformer_layer_config": layers,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "block_size": config.block_size,
        "target_hidden_size": None,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.target_layer_ids or ()],
        "mask_token_id": config.mask_token_id,
        "sliding_window_non_causal": not config.sliding_block_causal,
        "sample_from_anchor": config.sample_from_anchor,
        "tie_word_embeddings": False,
        _DTYPE: layers.pop(_DTYPE, None),
        "hf_dspark": _own(config) | {"embedding_scale": config.embedding_scale},
    }
    return fields if is_dflash else fields | _heads(config)


LAYOUTS: dict[str, Callable[[DSparkConfig], dict[str, Any]]] = {
    "native": native,
    "deepspec": deepspec,
    "speculators": speculators,
}


def _layers(config: DSparkConfig) -> dict[str, Any]:
    """Sizes of the draft layers, by Qwen3's names."""
    values = config.to_dict()
    kept = (*LAYER_FIELDS, "layer_types", "rope_parameters", _DTYPE)
    return {name: values[name] for name in kept if values.get(name) is not None}


def _heads(config: DSparkConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "markov_rank": config.markov_rank,
        "enable_confidence_head": config.enable_confidence_head,
    }
    if config.markov_rank:
        fields["markov_head_type"] = config.markov_head_type
    # Its readers default to true, which a drafter without a Markov head cannot be.
    fields["confidence_head_with_markov"] = bool(config.confidence_head_with_markov)
    return fields


def _own(config: DSparkConfig) -> dict[str, Any]:
    values = config.to_dict()
    named = [name for name in OWN_FIELDS if not name.startswith("sliding_") and name != "num_target_layers"]
    own = {name: values[name] for name in named if values.get(name) is not None}
    if config.num_target_layers is not None:
        own["num_target_layers"] = config.num_target_layers
    return own


def _gemma4(config: DSparkConfig) -> dict[str, Any]:
    """What Gemma4's config calls otherwise, and fields that its class wants. No draft layer is a sliding one."""
    return {
        "hidden_activation": config.hidden_act,
        "global_head_dim": config.head_dim,
        "attention_k_eq_v": config.attention_k_eq_v,
        "num_global_key_value_heads": config.num_key_value_heads if config.attention_k_eq_v else None,
        "final_logit_softcapping": config.final_logit_softcapping,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": config.vocab_size,
        "enable_moe_block": False,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "rope_parameters": {
            "full_attention": config.rope_parameters,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    }


def _proposals(config: DSparkConfig, kind: str) -> dict[str, Any]:
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": config.num_drafts,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "algorithm": kind,
        "default_proposal_method": "greedy",
        "proposal_methods": [method],
        "verifier": {"name_or_path": config.target_name_or_path, "architectures": []},
    }
