"""What a published drafter is, from its config and the headers of its files: what `inspect` prints.

Contract: nothing is loaded, and of a repository on the Hub only headers are fetched. Ids are canonical (0-based
layers, their outputs).
"""

import dataclasses
import os
from typing import Any

from ..configuration_autoregressive import AutoregressiveConfig
from ..configuration_dspark import DSparkConfig
from .loading import ForeignDrafter
from .safetensors_files import TensorRef, total_bytes

MEBIBYTE = 2**20


@dataclasses.dataclass(frozen=True, slots=True)
class DrafterDescription:
    """
    Attributes:
        source (`str`): Folder or Hub id.
        layout (`str`): Name of its layout.
        reason (`str`): What says so.
        config ([`DSparkConfig`]): What it is, in our terms.
        num_tensors (`int`), num_bytes (`int`): The drafter's own tensors.
        dtypes (`tuple[str, ...]`): Their dtypes, by the names of safetensors.
        num_parameters (`int`): Their elements.
        ignored (`dict[str, int]`): Bytes of each tensor that is not read: copies of the target's modules.
        notes (`tuple[str, ...]`): What its user should know.
    """

    source: str
    layout: str
    reason: str
    config: DSparkConfig
    num_tensors: int
    num_bytes: int
    dtypes: tuple[str, ...]
    num_parameters: int
    ignored: dict[str, int]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        config = self.config
        lines = {
            "layout": f"{self.layout} ({self.reason})",
            "kind": kind(config),
            "block": block(config),
            "target": config.target_name_or_path or "not named",
            "target layers": f"{config.target_layer_ids} (0-based, their outputs)"
            + (f" of {config.num_target_layers}" if config.num_target_layers else ""),
            "draft layers": layers(config),
            "heads": heads(config),
            "vocabulary": vocabulary(config),
            "tensors": f"{self.num_tensors}, {self.num_parameters / 1e6:,.1f} M parameters, "
            f"{self.num_bytes / MEBIBYTE:,.1f} MiB in {', '.join(self.dtypes)}",
            "in memory": ", ".join(
                f"{self.num_parameters * size / MEBIBYTE:,.1f} MiB as {name}"
                for name, size in (("float32", 4), ("bfloat16", 2))
            ),
        }
        if self.ignored:
            names = ", ".join(f"{name} ({size / MEBIBYTE:,.1f} MiB)" for name, size in self.ignored.items())
            lines["not read"] = f"{names}: the target's own are used"
        text = [self.source] + [f"  {name:<14}{value}" for name, value in lines.items()]
        return "\n".join(text + [f"  note          {note}" for note in self.notes])


def describe_drafter(source: str | os.PathLike, **hub: Any) -> DrafterDescription:
    """
    Reads what a folder or a Hub repository holds.

    Args:
        source (`str` or `os.PathLike`): Folder or Hub id.
        hub: `revision`, `subfolder`, `token`, `cache_dir`, `local_files_only`.

    Raises:
        ValueError: The layout is not read here, or contradicts itself; the message says what was found.
        OSError: There is no such folder.
    """
    drafter = ForeignDrafter.open(source, headers_only=True, **hub)
    return DrafterDescription(
        source=str(source),
        layout=drafter.reading.detected.name,
        reason=drafter.reading.detected.reason,
        config=drafter.config,
        num_tensors=len(drafter.tensors),
        num_bytes=total_bytes(drafter.tensors.values()),
        dtypes=tuple(sorted({ref.dtype for ref in drafter.tensors.values()})),
        num_parameters=sum(_num_elements(ref) for ref in drafter.tensors.values()),
        ignored={name: ref.num_bytes for name, ref in drafter.ignored.items()},
        notes=tuple(drafter.reading.notes),
    )


def kind(config: DSparkConfig) -> str:
    """DSpark or DFlash, and its slot layout; or an autoregressive drafter."""
    if isinstance(config, AutoregressiveConfig):
        return f"autoregressive ({'MTP-1' if config.num_drafts == 1 else 'EAGLE-3-style'})"
    slots = "A, the anchor predicts" if config.sample_from_anchor else "B, the anchor does not predict"
    return f"{'DSpark' if config.markov_rank else 'DFlash'}, slot layout {slots}"


def block(config: DSparkConfig) -> str:
    """Slots and drafts."""
    if isinstance(config, AutoregressiveConfig):
        return f"{config.num_drafts} draft{'s'[: config.num_drafts > 1]} a round, a pass each"
    return f"{config.block_size} slots, {config.num_drafts} drafts a round, mask token {config.mask_token_id}"


def layers(config: DSparkConfig) -> str:
    """Backbone and attention."""
    kinds = list(config.layer_types or ())
    sliding = kinds.count("sliding_attention")
    text = (
        f"{config.num_hidden_layers} {config.backbone}, hidden {config.hidden_size}, "
        f"{config.num_attention_heads} heads on {config.num_key_value_heads} of {config.head_dim}"
    )
    if config.attention_k_eq_v:
        text += ", keys are values"
    if sliding:
        inside = "causal" if config.sliding_block_causal else "bidirectional"
        text += f"; {sliding} sliding: {config.sliding_window} tokens from the {config.sliding_window_origin}, "
        text += f"{inside} in the block"
    return text


def heads(config: DSparkConfig) -> str:
    """Markov and confidence head, soft cap."""
    markov = f"{config.markov_head_type} Markov of rank {config.markov_rank}" if config.markov_rank else "no Markov"
    fed = "with" if config.confidence_head_with_markov else "without"
    confidence = f"confidence {fed} Markov embedding" if config.enable_confidence_head else "no confidence"
    cap = f", logits soft-capped at {config.final_logit_softcapping}" if config.final_logit_softcapping else ""
    if config.confidence_temperatures:
        confidence += f", calibrated for {' and '.join(config.confidence_temperatures)}"
    return f"{markov}, {confidence}{cap}"


def vocabulary(config: DSparkConfig) -> str:
    """Full or reduced."""
    if config.draft_vocab_size is None:
        return f"{config.vocab_size} (the target's, with its LM head)"
    return f"{config.draft_vocab_size} of {config.vocab_size}, with an LM head of its own"


def _num_elements(ref: TensorRef) -> int:
    count = 1
    for size in ref.shape:
        count *= size
    return count
