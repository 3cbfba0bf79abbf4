"""Recipes: one YAML file that says which pair is trained on what, and how.

Contract: `read_recipe` turns a file and overrides into three dataclasses, and refuses what is misspelt, of the wrong
type or contradictory before anything is loaded. Knows nothing about how training is done.
"""

import dataclasses
import difflib
import importlib.util
import os
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..configuration_autoregressive import AutoregressiveConfig
from ..configuration_dspark import DSparkConfig
from .arguments import DSparkTrainingArguments

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "fc")
DEMO = "demo"
CONFIGS = {"dspark": DSparkConfig, "autoregressive": AutoregressiveConfig}


@dataclass
class PairArguments:
    r"""
    The pair.

    Args:
        target (`str`): Folder or Hub name of the target; "demo" is the embedded one.
        target_dtype (`str`, *optional*, defaults to `"auto"`): Its dtype; "auto" is the checkpoint's.
        target_quantization (`str`, *optional*): "4bit" or "8bit" (bitsandbytes).
        drafter (`str`, *optional*): Folder or Hub name of a drafter to go on with. `None` starts a new one.
        drafter_kind (`str`, *optional*, defaults to `"dspark"`): What a new drafter is: "dspark" (DFlash is one with
            `markov_rank: 0`) or "autoregressive", the baseline in the manner of EAGLE-3.
        drafter_config (`dict`, *optional*): Fields of the config of a new drafter; others follow the target.
        mask_token (`str`, *optional*): A token that text does not use, in place of `mask_token_id` in the config.
        draft_vocab_size (`int`, *optional*): Draft the most frequent tokens of the answers only, so many.
        lora_rank (`int`, *optional*, defaults to 0): Above 0, adapters of this rank are trained and merged at the end.
        lora_alpha (`int`, *optional*): Their scale; twice the rank if `None`.
        lora_targets, lora_modules_to_save (`list[str]`, *optional*): Linear layers with adapters; modules trained
            whole.
    """

    target: str = DEMO
    target_dtype: str = "auto"
    target_quantization: str | None = None
    drafter: str | None = None
    drafter_kind: str = "dspark"
    drafter_config: dict = field(default_factory=dict)
    mask_token: str | None = None
    draft_vocab_size: int | None = None
    lora_rank: int = 0
    lora_alpha: int | None = None
    lora_targets: list = field(default_factory=lambda: list(LORA_TARGETS))
    lora_modules_to_save: list = field(default_factory=lambda: ["confidence_head"])

    def __post_init__(self) -> None:
        if self.target_quantization not in (None, "4bit", "8bit"):
            raise ValueError(f'target_quantization={self.target_quantization!r} must be "4bit", "8bit" or nothing')
        if self.target_dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ValueError(f"target_dtype={self.target_dtype!r} must be auto, float32, bfloat16 or float16")
        if self.drafter and (self.drafter_config or self.draft_vocab_size or self.mask_token):
            raise ValueError(
                "drafter names one that exists, so drafter_config, draft_vocab_size and mask_token have no effect: "
                "leave them out, or leave out drafter to start a new one"
            )
        if self.drafter_kind not in CONFIGS:
            raise ValueError(f"drafter_kind={self.drafter_kind!r} is not one of {', '.join(CONFIGS)}")
        known = {spec.name for spec in dataclasses.fields(CONFIGS[self.drafter_kind])}
        for name in self.drafter_config:
            if not isinstance(name, str) or name not in known:
                raise ValueError(f"drafter_config: {unknown(name, known)}")
        masked = not self.drafter and self.drafter_kind == "dspark"
        if masked and (self.mask_token is None) == ("mask_token_id" not in self.drafter_config):
            raise ValueError("a new drafter needs either mask_token or mask_token_id in drafter_config")
        if self.draft_vocab_size is not None and self.draft_vocab_size < 1:
            raise ValueError(f"draft_vocab_size={self.draft_vocab_size} must be at least 1")
        self._check_adapters()

    def _check_adapters(self) -> None:
        if self.lora_rank < 0:
            raise ValueError(f"lora_rank={self.lora_rank} must be 0 (no adapters) or more")
        if self.lora_rank and not self.drafter:
            raise ValueError("lora_rank adapts a drafter that exists: name it with drafter")
        if self.lora_alpha is not None and self.lora_alpha < 1:
            raise ValueError(f"lora_alpha={self.lora_alpha} must be at least 1: adapters would have no effect")
        for name in ("lora_targets", "lora_modules_to_save"):
            check_texts(name, getattr(self, name))
        if self.lora_rank and not self.lora_targets:
            raise ValueError("lora_targets is empty: name the linear layers that get adapters")


@dataclass
class DataArguments:
    r"""
    The data: JSONL files with answers of the target, as `prepare-data` writes them (see `hf_dspark.training.data`).

    Args:
        train_files (`list[str]`): Files to learn from.
        eval_files (`list[str]`, *optional*): Files to measure on.
        hold_out (`int`, *optional*): Measure on the rows of `train_files` whose number this divides.
        max_examples (`int`, *optional*): Rows at most, of each file.
    """

    train_files: list = field(default_factory=list)
    eval_files: list = field(default_factory=list)
    hold_out: int | None = None
    max_examples: int | None = None

    def __post_init__(self) -> None:
        for name in ("train_files", "eval_files"):
            if isinstance(files := getattr(self, name), str):
                setattr(self, name, [files])
            check_texts(name, getattr(self, name))
        if not self.train_files:
            raise ValueError("train_files is missing: JSONL files with answers of the target")
        if self.hold_out is not None and self.hold_out < 2:
            raise ValueError(f"hold_out={self.hold_out} must be at least 2: 1 divides the number of every row")
        if self.max_examples is not None and self.max_examples < 1:
            raise ValueError(f"max_examples={self.max_examples} must be at least 1, or nothing for all rows")

    def check_files(self) -> None:
        """Raises `ValueError` for the first file that is not there."""
        for path in (*self.train_files, *self.eval_files):
            if not Path(path).is_file():
                raise ValueError(f"{path}: there is no such file")


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """What is trained, on what, and how."""

    pair: PairArguments
    data: DataArguments
    training: DSparkTrainingArguments


PARTS = (PairArguments, DataArguments, DSparkTrainingArguments)


def read_recipe(path: str | os.PathLike, overrides: Sequence[str] = (), **fixed: Any) -> Recipe:
    """
    Reads a YAML file of `key: value` lines, keys of all three dataclasses side by side.

    Args:
        path (`str` or `os.PathLike`): The file.
        overrides (`Sequence[str]`): `"key=value"`, values in YAML; `drafter_config.block_size=4` reaches inside.
        fixed (`Any`): Values that override both.

    Raises:
        ValueError: An unknown key, a value of the wrong type, or values that contradict each other.
        OSError: The file cannot be read.
        ImportError: PyYAML is missing.
    """
    require("yaml", "train", "pyyaml")
    import yaml

    try:
        values = _yaml(Path(path).read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError(f"{os.fspath(path)}: expected lines of `key: value`, got {type(values).__name__}")
        for override in overrides:
            key, equals, text = override.partition("=")
            if not equals:
                raise ValueError(f"{override!r} is no key=value")
            _set(values, key, _yaml(text))
    except yaml.YAMLError as error:
        raise ValueError(f"{os.fspath(path)} or an override is no YAML: {error}") from None
    return recipe_of(values | fixed)


def recipe_of(values: Mapping[str, Any]) -> Recipe:
    """The recipe with these values; `ValueError` names the one that is wrong."""
    hints = {part: typing.get_type_hints(part) for part in PARTS}
    names = {part: {spec.name for spec in dataclasses.fields(part) if spec.init} for part in PARTS}
    for key in values:
        if not isinstance(key, str) or not any(key in known for known in names.values()):
            raise ValueError(unknown(key, set().union(*names.values())))
    if values.get("output_dir") is None:
        raise ValueError("output_dir is missing: name the folder of the drafter and its checkpoints, or give --output")

    def built(part: Any) -> Any:
        return part(
            **{key: typed(key, value, hints[part][key]) for key, value in values.items() if key in names[part]}
        )

    pair, data, training = map(built, PARTS)
    if pair.target_quantization:
        require("bitsandbytes", "quant")
    if pair.lora_rank:
        require("peft", "train")
    return Recipe(pair, data, training)


def typed(key: str, value: Any, hint: Any) -> Any:
    """`value` if it is what `hint` asks for; YAML 1.1 reads 6e-4 as a text, and a strategy called no as false."""
    if value is False and key.endswith("_strategy"):
        return "no"
    allowed = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    kinds = tuple(typing.get_origin(kind) or kind for kind in allowed)
    plain = tuple(kind for kind in kinds if kind in (bool, int, float, str, list, dict, type(None)))
    if len(plain) < len(kinds) or (isinstance(value, plain) and (bool in plain or not isinstance(value, bool))):
        return value  # something of transformers' own (an enum), or right
    if key in ("train_files", "eval_files") and isinstance(value, str):
        return value
    try:
        if float in plain and not isinstance(value, bool):
            return float(value)
    except (TypeError, ValueError):
        pass
    expected = " or ".join("nothing" if kind is type(None) else kind.__name__ for kind in plain)
    raise ValueError(f"{key}: expected {expected}, got {value!r}")


def unknown(name: object, known: set[str]) -> str:
    """The words for a key that does not exist."""
    close = difflib.get_close_matches(str(name), known, n=1)
    return f"unknown key {name!r}" + (f"; did you mean {close[0]!r}?" if close else "")


def check_texts(key: str, values: Sequence[Any]) -> None:
    """Raises `ValueError` for the first of `values` that is no text."""
    for value in values:
        if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
            raise ValueError(f"{key}: expected a list of texts, got {value!r} in it")


def require(module: str, extra: str, package: str | None = None) -> None:
    """Raises `ImportError` with what to install unless `module` is there."""
    if importlib.util.find_spec(module) is None:
        raise ImportError(f"this needs the package {package or module}: pip install 'hf-dspark[{extra}]'")


def _yaml(text: str) -> Any:
    """What YAML `text` says; `ValueError` for a key that is there twice, of which YAML takes the last."""
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
            for number, key in enumerate(keys):
                if key in keys[:number]:
                    raise ValueError(f"the key {key!r} is there twice; leave one of them out")
            return node

    return yaml.load(text, Loader)  # it is a safe one


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for name in path:
        values = values.setdefault(name, {})
        if not isinstance(values, dict):
            raise ValueError(f"{key}: {name} holds no keys")
    values[last] = value
