"""An untrained drafter that fits a target.

Contract: shapes follow the target's config unless told otherwise; no weight of the target is copied but the rows of
its head that a reduced draft vocabulary keeps.
"""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedModel

from ..configuration_dspark import DSparkConfig
from ..modeling_dspark import DSparkDrafter
from ..target import target_fingerprint

Config = TypeVar("Config", bound=DSparkConfig)


def default_target_layers(num_layers: int, count: int = 5) -> list[int]:
    """`count` layers from the second to the third last, as in the released drafters (36 -> 1, 9, 17, 25, 33)."""
    last = max(num_layers - 3, 0)
    first = min(1, last)
    return sorted({round(first + i * (last - first) / max(count - 1, 1)) for i in range(count)})


def new_drafter(
    target: PreTrainedModel,
    mask_token_id: int,
    *,
    draft_token_ids: Sequence[int] | None = None,
    **config: object,
) -> DSparkDrafter:
    """
    An untrained float32 drafter for `target`: its shape follows the target's unless `config` (fields of
    [`DSparkConfig`]) says otherwise.

    Args:
        target ([`~transformers.PreTrainedModel`]): the model to draft for.
        mask_token_id (`int`): a token of the target that text does not use.
        draft_token_ids (`Sequence[int]`, *optional*): a reduced draft vocabulary, as target ids. The drafter's head
            then starts from the target's rows and stays frozen.

    Raises:
        ValueError: Fields that do not exist, are of the wrong type or contradict each other; or ids in
            `draft_token_ids` that are no tokens of the target, or are there twice.
    """
    text = target.config.get_text_config()
    layer = (getattr(text, "per_layer_config", None) or [text])[0]  # shapes may differ between layers (Gemma 4)
    head_dim = getattr(layer, "head_dim", None) or text.hidden_size // layer.num_attention_heads
    fields: dict[str, object] = {
        "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_attention_heads": layer.num_attention_heads,
        "num_key_value_heads": layer.num_key_value_heads,
        "head_dim": head_dim,
        "rms_norm_eps": getattr(text, "rms_norm_eps", 1e-6),
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": text.max_position_embeddings,
        "bos_token_id": text.bos_token_id,
        "eos_token_id": text.eos_token_id,
        "pad_token_id": text.pad_token_id,
        "num_target_layers": text.num_hidden_layers,
        "target_layer_ids": default_target_layers(text.num_hidden_layers),
        "target_name_or_path": text.name_or_path or target.name_or_path,
        "target_fingerprint": target_fingerprint(target),
        "mask_token_id": mask_token_id,
        "draft_vocab_size": None if draft_token_ids is None else len(draft_token_ids),
    }
    if draft_token_ids is not None:
        check_draft_token_ids(draft_token_ids, text.vocab_size)
    drafter = DSparkDrafter(fitting_config(DSparkConfig, fields, config))
    if drafter.has_own_vocabulary and draft_token_ids is not None:
        token_ids = torch.tensor(sorted(draft_token_ids))
        drafter.d2t.copy_(token_ids - torch.arange(len(token_ids)))
        drafter.t2d.zero_()[token_ids] = True
        drafter.lm_head.weight.data.copy_(target.get_output_embeddings().weight.data[token_ids])
        drafter.lm_head.requires_grad_(False)
    return drafter


def fitting_config(kind: type[Config], defaults: Mapping[str, object], chosen: Mapping[str, object]) -> Config:
    """
    The config of `kind` with these fields.

    Raises:
        ValueError: A field in `chosen` does not exist, is of the wrong type, or contradicts another one.
    """
    known = {spec.name for spec in dataclasses.fields(kind)}
    for name in chosen:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"{kind.__name__} has no field {name!r}{hint}")
    fields = {**defaults, **chosen}
    for name in ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim"):
        if isinstance(value := fields.get(name), int) and value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    try:
        return kind(**fields)
    except StrictDataclassError as error:
        raise ValueError(" ".join(str(error).split())) from None


def check_draft_token_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises `ValueError` unless `token_ids` are different tokens of a vocabulary of `vocab_size`."""
    if not len(token_ids):
        raise ValueError("draft_token_ids is empty: name the tokens to draft, or None for all of them")
    ids = list(map(int, token_ids))
    if min(ids) < 0 or max(ids) >= vocab_size:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise ValueError(f"draft_token_ids holds {wrong}; the target's tokens are 0 to {vocab_size - 1}")
    if len(set(ids)) < len(ids):
        twice = next(token for token in ids if ids.count(token) > 1)
        raise ValueError(f"draft_token_ids holds {twice} more than once; every token may be there once")
