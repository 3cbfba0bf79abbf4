"""Which of a published folder's tensors is which of a drafter's, checked against the drafter itself.

Contract: every tensor of the drafter comes from one of the folder, with the shape that its config implies; what is
left over must be known to be the target's or derived. Anything else is a contradiction between config and tensors, and
is refused by name. Nothing is loaded.

Shape legend: D hidden, H / Hkv query / key-value heads, Dh head size.
"""

import re
from collections.abc import Callable, Mapping

import torch
from transformers.initialization import no_init_weights

from ..configuration_dspark import DSparkConfig
from ..modeling_autoregressive import AutoregressiveDrafter
from ..modeling_drafter import Drafter
from ..modeling_dspark import DSparkDrafter
from .detect import AUTOREGRESSIVE_MODEL_TYPE
from .safetensors_files import TensorRef

_NOT_OURS = re.compile(r"^(embed_tokens|lm_head|verifier_lm_head|verifier_norm)\.|rotary_emb\.|^(d2t|t2d)$")
_FUSED = re.compile(r"^(layers\.\d+\.self_attn)\.qkv_proj\.(weight|bias)$")


def drafter_class(model_type: str | None) -> type[Drafter]:
    """The class of drafters with a config of this type; other projects' are all read as parallel ones."""
    return AutoregressiveDrafter if model_type == AUTOREGRESSIVE_MODEL_TYPE else DSparkDrafter


def expected_shapes(config: DSparkConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of a drafter's tensors by name; takes no memory."""
    with torch.device("meta"), no_init_weights():
        drafter = drafter_class(config.model_type)(config)
    return {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}


def plan_tensors(
    config: DSparkConfig, tensors: Mapping[str, TensorRef], rename: Callable[[str], str] = str
) -> tuple[dict[str, TensorRef], dict[str, TensorRef]]:
    """
    Finds a drafter's tensors among those of a folder.

    Args:
        config ([`DSparkConfig`]): The drafter's.
        tensors (`Mapping[str, TensorRef]`): The folder's.
        rename (`Callable`): Our name of each of them.

    Returns:
        `tuple[dict, dict]`: the drafter's tensors by our names, and what it does not read by the folder's (copies of
        the target's embeddings and head).

    Raises:
        ValueError: Config and tensors contradict each other.
    """
    expected = expected_shapes(config)
    planned: dict[str, TensorRef] = {}
    ignored: dict[str, TensorRef] = {}
    unknown: list[str] = []
    for name, ref in tensors.items():
        ours = rename(name)
        if fused := _FUSED.match(ours):
            planned |= _split(fused, ref, config)
        elif ours in expected:
            planned[ours] = ref
        elif _NOT_OURS.search(ours):
            ignored[name] = ref
        else:
            unknown.append(name)
    problems = [f"no part of the drafter reads {name} {list(tensors[name].shape)}" for name in unknown]
    problems += [f"{name} {list(shape)} is missing" for name, shape in expected.items() if name not in planned]
    problems += [
        f"{name} has shape {list(ref.shape)}, the config implies {list(expected[name])}"
        for name, ref in planned.items()
        if name in expected and ref.shape != expected[name]
    ]
    if problems:
        more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise ValueError(f"config and tensors contradict each other: {'; '.join(problems[:4])}{more}")
    return planned, ignored


def _split(fused: re.Match, ref: TensorRef, config: DSparkConfig) -> dict[str, TensorRef]:
    """`qkv_proj [(H + 2 * Hkv) * Dh, D]` -> the three projections."""
    sizes = [heads * config.head_dim for heads in _heads(config)]
    if ref.shape[0] != sum(sizes):
        raise ValueError(
            f"config and tensors contradict each other: {fused[0]} has {ref.shape[0]} rows, the config's heads take "
            f"{' + '.join(map(str, sizes))}"
        )
    starts = (0, sizes[0], sizes[0] + sizes[1])
    parts = zip(("q_proj", "k_proj", "v_proj"), starts, sizes, strict=True)
    return {f"{fused[1]}.{part}.{fused[2]}": ref.rows(start, size) for part, start, size in parts}


def _heads(config: DSparkConfig) -> tuple[int, int, int]:
    shared = config.num_key_value_heads or config.num_attention_heads
    return config.num_attention_heads, shared, shared
