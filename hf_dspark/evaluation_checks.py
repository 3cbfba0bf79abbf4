"""What [`evaluate`] and [`prepare_data`] are given, checked before a model runs.

Contract: a check raises `TypeError` or `ValueError` that says what was given and what to give, or does nothing.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .modeling_drafter import Drafter
from .prompt_sets import PromptSet


def check_prompt_sets(prompt_sets: Any) -> None:
    """`TypeError` for anything but a list or tuple of [`PromptSet`]s."""
    hint = "give a list of prompt sets: [load_prompts('prompts.jsonl')]"
    if not isinstance(prompt_sets, list | tuple):
        raise TypeError(f"prompt_sets={_short(prompt_sets)} is a {type(prompt_sets).__name__}; {hint}")
    for each in prompt_sets:
        if not isinstance(each, PromptSet):
            raise TypeError(f"prompt_sets has {_short(each)}, a {type(each).__name__}; {hint}")


def check_numbers(name: str, values: Any) -> None:
    """`TypeError` for anything but a list or tuple of numbers."""
    if not isinstance(values, list | tuple) or any(
        isinstance(value, bool) or not isinstance(value, int | float) for value in values
    ):
        example = f"({values},)" if isinstance(values, int | float) else "(0.0, 1.0)"
        raise TypeError(f"{name}={_short(values)} must be numbers in a list or tuple, such as {example}")


def check_evaluation(
    target: PreTrainedModel,
    drafters: Mapping[str, Drafter],
    tokenizer: PreTrainedTokenizerBase,
    prompt_sets: Sequence[PromptSet],
    temperatures: Sequence[float],
    thresholds: Sequence[float],
    max_new_tokens: int,
    batch_size: int,
) -> None:
    """
    Refuses arguments of [`evaluate`] that would fail later, or make no sense.

    Raises:
        TypeError: An argument is of another kind.
        ValueError: There is nothing to evaluate, or a number is out of range.
    """
    if not isinstance(target, torch.nn.Module) or not callable(getattr(target, "generate", None)):
        raise TypeError(f"target must be a transformers model that generates, got {type(target).__name__}")
    for name, drafter in drafters.items():
        if not getattr(drafter, "is_dspark_drafter", False):
            raise TypeError(f"drafter {name!r} must be a drafter of hf_dspark, loaded, got {type(drafter).__name__}")
    if tokenizer is None or isinstance(tokenizer, str):
        raise TypeError("tokenizer must be the target's, loaded: AutoTokenizer.from_pretrained(...)")
    check_prompt_sets(prompt_sets)
    check_numbers("temperatures", temperatures)
    check_numbers("thresholds", thresholds)
    if not drafters or not prompt_sets or not temperatures:
        raise ValueError("nothing to evaluate: give a drafter, a prompt set and a temperature at least")
    if empty := [prompts.name for prompts in prompt_sets if not len(prompts)]:
        raise ValueError(f"the prompt set {empty[0]!r} is empty; each needs a conversation at least")
    names = [prompts.name for prompts in prompt_sets]
    if len(set(names)) < len(names) or len(set(temperatures)) < len(temperatures):
        raise ValueError(
            f"prompt sets {names} and temperatures {list(temperatures)} must each be there once: figures go by their "
            "names"
        )
    if bad := [t for t in temperatures if not 0 <= t < math.inf]:
        raise ValueError(f"temperatures={list(temperatures)}: {bad[0]} must be 0 (greedy) or a positive number")
    if bad := [t for t in thresholds if not 0 <= t <= 1]:
        raise ValueError(f"thresholds={list(thresholds)}: {bad[0]} is no probability")
    if max_new_tokens < 2 or batch_size < 1:
        raise ValueError(
            f"max_new_tokens={max_new_tokens} must be at least 2 (the first token comes from the prefill, without a "
            f"round) and batch_size={batch_size} at least 1"
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
