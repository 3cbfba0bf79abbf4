"""Tiny random targets, one per family: seeded, float32, in evaluation mode, kept for the session.

Their weights are drawn wide enough that greedy text is not one token repeated. They have no end-of-sequence token
unless a test asks for one (`eos_token_id=` of the target or of `generate`).
"""

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 64
PAD_ID, BOS_ID = 0, 1

_COMMON = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=512,
    pad_token_id=PAD_ID,
    bos_token_id=BOS_ID,
    eos_token_id=None,
    initializer_range=0.2,
    tie_word_embeddings=False,
)
_MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
_LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]

# Model type and what differs from `_COMMON`.
_OWN: dict[str, tuple[str, dict]] = {
    "qwen3": ("qwen3", {}),
    "llama": ("llama", {}),
    "mistral": ("mistral", dict(sliding_window=8)),
    "gemma2": ("gemma2", dict(sliding_window=8, layer_types=_LAYER_TYPES, query_pre_attn_scalar=8)),
    "gemma3": ("gemma3_text", dict(sliding_window=8, layer_types=_LAYER_TYPES, query_pre_attn_scalar=8)),
    "phi3": ("phi3", dict(sliding_window=None)),
    "gpt_neox": ("gpt_neox", {}),
    "qwen3_moe": ("qwen3_moe", _MOE),
    "deepseek_v3": (
        "deepseek_v3",
        dict(
            num_key_value_heads=4,
            head_dim=4,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=6,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            first_k_dense_replace=1,
        ),
    ),
    "gpt2": ("gpt2", dict(max_position_embeddings=64)),
    "gpt_oss": (
        "gpt_oss",
        dict(sliding_window=8, layer_types=_LAYER_TYPES, num_local_experts=4, num_experts_per_tok=2),
    ),
    "gemma4": (  # two layers read the keys and values of two others; head sizes differ between kinds of layers
        "gemma4_text",
        dict(
            num_hidden_layers=4,
            layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            num_kv_shared_layers=2,
            sliding_window=8,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=64,
        ),
    ),
    "qwen3_5": (
        "qwen3_5_text",
        dict(
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
        ),
    ),
    "bloom": ("bloom", {}),
}

FAMILIES = [family for family in _OWN if family not in ("qwen3_5", "bloom")]
"""The families that run packed; `qwen3_5` has a recurrent state and `bloom` attends in its own way (ALiBi)."""

_TARGETS: dict[tuple[str, str], PreTrainedModel] = {}


def tiny_target(family: str, **overrides) -> PreTrainedModel:
    """The tiny target of a family, with config values replaced by `overrides`. Shared: do not change it."""
    key = (family, repr(sorted(overrides.items())))
    if key not in _TARGETS:
        model_type, own = _OWN[family]
        config = CONFIG_MAPPING[model_type](**{**_COMMON, **own, **overrides})
        with torch.random.fork_rng():
            torch.manual_seed(0)
            _TARGETS[key] = AutoModelForCausalLM.from_config(config).eval()
    return _TARGETS[key]
