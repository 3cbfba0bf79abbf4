"""The speculators layout, DSpark and DFlash: both slot layouts, reduced vocabularies, sliding layers.

Facts: layer ids count entries of `hidden_states`, one more than the layer whose output they are. A config without
`sample_from_anchor` is layout B. Sliding layers see the `sliding_window` tokens before the anchor, from every slot,
and are causal inside the block unless `sliding_window_non_causal`. Where RoPE is given for each kind of layer, all
layers take the sliding one. Embeddings are plain rows of the target's table; embeddings and LM head, where stored, are
the target's, but for the head of a reduced vocabulary.
"""

from collections.abc import Mapping
from typing import Any

from .fields import head_fields, own_fields, qwen3_fields, required

DEFAULTS = {"draft_vocab_size": 32000, "markov_rank": 256, "enable_confidence_head": True}
"""Of the fields that its config class writes out and a file may still lack."""


def read(config: Mapping[str, Any]) -> dict[str, Any]:
    """`DSparkConfig` keywords of a speculators config; `ValueError` for contradictions."""
    layers = required("transformer_layer_config", config.get("transformer_layer_config"))
    fields = qwen3_fields(layers, nested_rope="sliding_attention")
    if (dtype := config.get("dtype") or config.get("torch_dtype")) is not None:
        fields["dtype"] = dtype
    taps = required("aux_hidden_state_layer_ids", config.get("aux_hidden_state_layer_ids"))
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    fields |= {
        "block_size": required("block_size", config.get("block_size")),
        "sample_from_anchor": bool(config.get("sample_from_anchor", False)),
        "mask_token_id": required("mask_token_id", config.get("mask_token_id")),
        "target_layer_ids": [index - 1 for index in taps],
        "target_hidden_size": config.get("target_hidden_size"),
        "draft_vocab_size": config.get("draft_vocab_size", DEFAULTS["draft_vocab_size"]),
        "target_name_or_path": verifier.get("name_or_path"),
        "sliding_window_origin": "anchor",
        "sliding_block_causal": not config.get("sliding_window_non_causal", False),
        "embedding_scale": 1.0,
    }
    if config["speculators_model_type"] == "dflash":
        fields |= {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}
    else:
        fields |= head_fields(DEFAULTS | dict(config))
    ours = config.get("hf_dspark") or {}
    fields |= own_fields(ours)
    if "embedding_scale" in ours:  # `None` means something here
        fields["embedding_scale"] = ours["embedding_scale"]
    _check_proposals(config, fields)
    return fields


def notes(config: Mapping[str, Any]) -> list[str]:
    """What a reader of the description should know."""
    if "sample_from_anchor" in config:
        return []
    return ["sample_from_anchor is missing, which in this layout means false (layout B)"]


def _check_proposals(config: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """Refuses a config that says it proposes more tokens than its blocks have."""
    if "sample_from_anchor" not in config:  # folders from before the key exists count as they like
        return
    drafts = fields["block_size"] if fields["sample_from_anchor"] else fields["block_size"] - 1
    for method in (config.get("speculators_config") or {}).get("proposal_methods") or []:
        if (tokens := method.get("speculative_tokens") or 0) > drafts:
            raise ValueError(
                f"this drafter's config contradicts itself: block_size={fields['block_size']} with sample_from_anchor="
                f"{fields['sample_from_anchor']} drafts {drafts} tokens, but speculative_tokens is {tokens}"
            )
