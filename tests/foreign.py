"""Folders in other people's layouts, made of a tiny drafter of ours: what their exporters would have written."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from hf_dspark import DSparkDrafter

from .test_configuration_dspark import config

FLAT = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings")  # fmt: skip


def drafter(**fields) -> DSparkDrafter:
    """A small random drafter, every norm and scalar of it other than 1."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = DSparkDrafter(config(num_hidden_layers=2, initializer_range=0.2, **fields)).eval()
        for name, tensor in model.state_dict().items():
            if "norm" in name or "layer_scalar" in name:
                tensor.uniform_(0.5, 1.5)
    return model


def write(folder: Path, fields: dict, tensors: dict[str, torch.Tensor]) -> Path:
    """A folder with this config.json and these tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def qwen3_part(model: DSparkDrafter, **fields) -> dict:
    """The fields of draft layers, as every Qwen3-based layout has them."""
    values = model.config.to_dict()
    return {name: values[name] for name in FLAT} | {
        "model_type": "qwen3",
        "layer_types": model.config.layer_types,
        "rope_theta": 5000.0,
        "num_target_layers": 4,
        **fields,
    }


def copies(model: DSparkDrafter) -> dict[str, torch.Tensor]:
    """Stand-ins for the frozen copies that some layouts hold."""
    shape = (model.config.vocab_size, model.config.hidden_size)
    return {"embed_tokens.weight": torch.ones(shape), "lm_head.weight": torch.ones(shape)}


def deepspec(folder: Path, model: DSparkDrafter, **fields) -> Path:
    """DeepSpec, Qwen3."""
    head = {"markov_rank": model.config.markov_rank, "enable_confidence_head": model.config.enable_confidence_head}
    if model.config.markov_rank:
        head["markov_head_type"] = model.config.markov_head_type
        head["confidence_head_with_markov"] = model.config.confidence_head_with_markov
    own = {"architectures": ["Qwen3DSparkModel"], "block_size": 4, "mask_token_id": 63, "target_layer_ids": [0, 1]}
    return write(folder, qwen3_part(model, **own, **head, **fields), model.state_dict() | copies(model))


def gemma4(folder: Path, model: DSparkDrafter, **fields) -> Path:
    """DeepSpec, Gemma4; sliding layers would have other sizes than the draft's."""
    shared = model.config.attention_k_eq_v
    own = {
        "architectures": ["Gemma4DSparkModel"],
        "model_type": "gemma4_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 4,
        "global_head_dim": model.config.head_dim,
        "attention_k_eq_v": shared,
        "num_global_key_value_heads": model.config.num_key_value_heads if shared else None,
        "num_key_value_heads": 1 if shared else model.config.num_key_value_heads,
        "final_logit_softcapping": model.config.final_logit_softcapping,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": False,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "rope_type": "default",
            "rope_theta": None,
        },
        "block_size": 4,
        "mask_token_id": 63,
        "target_layer_ids": [0, 1],
        "markov_rank": 4,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    base = {name: value for name, value in qwen3_part(model).items() if name != "rope_theta"}
    return write(folder, base | own | fields, model.state_dict() | copies(model))


def specforge(folder: Path, model: DSparkDrafter, *, prefix: str = "", **fields) -> Path:
    """SpecForge; old ones have a prefix on the heads' tensors."""
    dflash = {
        "attention_mode": "gqa",
        "projector_type": "dspark",
        "mask_token_id": 63,
        "target_layer_ids": [0, 1],
        "markov_rank": 4,
        "markov_head_type": model.config.markov_head_type,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    own = {"architectures": ["DSparkDraftModel"], "block_size": 4, "dflash_config": dflash, "draft_vocab_size": 64}
    tensors = {prefix * ("_head" in name) + name: tensor for name, tensor in model.state_dict().items()}
    return write(folder, qwen3_part(model, **own) | fields, tensors)


def model_optimizer(folder: Path, model: DSparkDrafter, dflash: dict | None = None, **fields) -> Path:
    """Model-Optimizer: heads without prefix."""
    inside = {
        "mask_token_id": 63,
        "target_layer_ids": [0, 1],
        "projector_type": "dspark",
        "shift_label": True,
        "markov_rank": 4,
        "markov_head_type": model.config.markov_head_type,
        "use_confidence_head": True,
    }
    own = {"architectures": ["DFlashDraftModel"], "block_size": 4, "dflash_config": inside | (dflash or {})}
    names = {name: name.replace("markov_head.", "").replace("head.proj", "proj") for name in model.state_dict()}
    return write(folder, qwen3_part(model, **own) | fields, {names[name]: t for name, t in model.state_dict().items()})


def zlab(folder: Path, model: DSparkDrafter, *, fused: bool = False, **fields) -> Path:
    """DFlash; Laguna's has its projections in one tensor."""
    own = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": 4,
        "dflash_config": {"mask_token_id": 63, "target_layer_ids": [0, 1]},
    }
    tensors = dict(model.state_dict())
    for layer in range(2) if fused else ():
        parts = [tensors.pop(f"layers.{layer}.self_attn.{name}_proj.weight") for name in "qkv"]
        tensors[f"layers.{layer}.self_attn.qkv_proj.weight"] = torch.cat(parts)
    return write(folder, qwen3_part(model, **own) | fields, tensors)


def speculators(folder: Path, model: DSparkDrafter, *, kind: str = "dspark", layers: dict | None = None, **fields):
    """speculators; the ids are one more."""
    own = {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": kind,
        "aux_hidden_state_layer_ids": [1, 2],
        "block_size": 4,
        "draft_vocab_size": model.config.draft_vocab_size or 64,
        "mask_token_id": 63,
        "sample_from_anchor": model.config.sample_from_anchor,
        "markov_rank": model.config.markov_rank,
        "markov_head_type": model.config.markov_head_type,
        "enable_confidence_head": model.config.enable_confidence_head,
        "confidence_head_with_markov": model.config.confidence_head_with_markov,
        "speculators_config": {"verifier": {"name_or_path": "org/target", "architectures": []}},
        "transformer_layer_config": qwen3_part(model) | (layers or {}),
    }
    return write(folder, own | fields, dict(model.state_dict()))
