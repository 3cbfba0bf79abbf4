"""Calibrating a drafter on text that it drafts: decode, fit temperatures, keep them in its config (section 3.2.1).

Contract: prompts are decoded with the drafter's raw confidences and every draft of a block verified, which is what the
labels need; the fit is `temperature_scaling`. Only the drafter's config changes, and only after every mode has been
fitted: decoding runs on a view with a config of its own. Sampling and greedy decoding accept differently, so each has
its own temperatures. The text of a drafter does not depend on its calibration.

Source: https://huggingface.co/papers/2607.05147, section 3.2.1. Shape legend: R batch rows, S prompt width, N rounds,
K draft positions.
"""

import copy
import dataclasses
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from .calibration_report import CalibrationReport, temperatures_from_sglang
from .configuration_dspark import CALIBRATED_MODES
from .json_files import read_object, write_object
from .modeling_drafter import Drafter
from .recording import WholeBlocks, left_padded
from .rounds import DecodingRound
from .temperature_scaling import confidence_logits, fit_scaling

Prompts = Sequence[Sequence[int]] | Iterable[Mapping[str, torch.Tensor]]
"""Token ids of each prompt; or batches as `generate` takes them, left-padded `input_ids` and `attention_mask`."""

MAX_NEW_TOKENS = 128
MIN_ROUNDS = 200  # with fewer, the fit would follow single rounds; some thousands are better


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ConfidenceRounds:
    """
    What calibration learns from: rounds that verified the whole block.

    Attributes:
        logits (`torch.DoubleTensor` of shape `[N, K]`): Confidence logits, before any temperature.
        num_accepted (`torch.LongTensor` of shape `[N]`): How many drafts of each were accepted.
    """

    logits: torch.Tensor
    num_accepted: torch.Tensor


def calibrate(
    target: PreTrainedModel,
    drafter: Drafter,
    prompts: Prompts,
    *,
    modes: Sequence[str] = CALIBRATED_MODES,
    dataset: str = "unnamed",
    temperature: float = 1.0,
    max_new_tokens: int = MAX_NEW_TOKENS,
    batch_size: int = 8,
    seed: int = 0,
    **generation_options: Any,
) -> dict[str, CalibrationReport]:
    r"""
    Fits the drafter's `confidence_temperatures`, and `confidence_offsets` where they are needed, and writes them, with
    where they come from, into `drafter.config`.

    ```python
    >>> prompts = [tokenizer(text).input_ids for text in texts]  # none the drafter was trained on
    >>> reports = hf_dspark.calibrate(target, drafter, prompts, dataset="gsm8k")
    >>> print(reports["greedy"])
    >>> drafter.save_pretrained("my-drafter")
    ```

    Args:
        target ([`~transformers.PreTrainedModel`]): The target.
        drafter ([`Drafter`]): The drafter; a confidence head is needed. Earlier temperatures are not used.
        prompts (`Sequence[Sequence[int]]`, or an iterable of batches with `input_ids` and `attention_mask`):
            Prompts as token ids; some hundred of them, of the kind that will be decoded.
        modes (`Sequence[str]`, *optional*): `"greedy"`, `"sampling"`, or both (the default). The config keeps what it
            has for the other one.
        dataset (`str`, *optional*): Name of the prompts, for the record.
        temperature (`float`, *optional*, defaults to 1.0): Temperature of the sampled text.
        max_new_tokens (`int`, *optional*, defaults to 128): Length of each text.
        batch_size (`int`, *optional*, defaults to 8): Prompts decoded at once; batches are taken as they are.
        seed (`int`, *optional*, defaults to 0): For sampling; the global random state is left alone.
        generation_options: Further arguments of `generate`, such as `top_p`.

    Returns:
        `dict[str, CalibrationReport]`: For each mode, figures on the very rounds that were fitted; for others see
        [`evaluate_calibration`].

    Raises:
        ValueError: There is no confidence head, there are no prompts, too few rounds came of them, a mode is
            unknown, or the temperature is not above 0.
        TypeError: Prompts are no token ids.
    """
    rounds = {
        mode: collect_rounds(
            target,
            drafter,
            prompts,
            mode=mode,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            seed=seed,
            **generation_options,
        )
        for mode, prompts in _for_each_mode(drafter, prompts, modes, max_new_tokens)
    }
    reports = {}
    for mode, found in rounds.items():
        temperatures, offsets = fit_scaling(found.logits, found.num_accepted)
        reports[mode] = CalibrationReport.of_rounds(
            found.logits, found.num_accepted, temperatures=temperatures, offsets=offsets, mode=mode, dataset=dataset
        )
    for report in reports.values():
        store_calibration(drafter, report, temperature=temperature)
    return reports


def evaluate_calibration(
    target: PreTrainedModel,
    drafter: Drafter,
    prompts: Prompts,
    *,
    modes: Sequence[str] | None = None,
    dataset: str = "unnamed",
    **options: Any,
) -> dict[str, CalibrationReport]:
    """
    Measures the temperatures and offsets in the drafter's config on other prompts; changes nothing.

    Args:
        target, drafter, prompts, dataset: As for [`calibrate`].
        modes (`Sequence[str]`, *optional*): Defaults to those that the config has temperatures for.
        options: `temperature`, `max_new_tokens`, `batch_size`, `seed` and arguments of `generate`, as for
            [`calibrate`].

    Raises:
        ValueError: As for [`calibrate`], and if the drafter has no temperatures for a mode.
    """
    temperatures = drafter.config.confidence_temperatures or {}
    modes = tuple(temperatures) if modes is None else modes
    if not modes or (missing := [mode for mode in modes if mode not in temperatures]):
        raise ValueError(
            f"the drafter has no confidence_temperatures for {missing if modes else 'any mode'}: run calibrate first"
        )
    reports = {}
    for mode, given in _for_each_mode(drafter, prompts, modes, options.get("max_new_tokens", MAX_NEW_TOKENS)):
        found = collect_rounds(target, drafter, given, mode=mode, **options)
        fitted, offsets = drafter.config.confidence_scaling(mode)
        reports[mode] = CalibrationReport.of_rounds(
            found.logits, found.num_accepted, temperatures=fitted, offsets=offsets, mode=mode, dataset=dataset
        )
    return reports


def collect_rounds(
    target: PreTrainedModel,
    drafter: Drafter,
    prompts: Prompts,
    *,
    mode: str,
    temperature: float = 1.0,
    max_new_tokens: int = MAX_NEW_TOKENS,
    batch_size: int = 8,
    seed: int = 0,
    **generation_options: Any,
) -> ConfidenceRounds:
    """Decodes `prompts` in one `mode`, every block verified whole; arguments as for [`calibrate`]."""
    if mode == "sampling" and not temperature > 0:
        raise ValueError(f"temperature={temperature} must be above 0; greedy decoding is a mode of its own")
    num_drafts = drafter.config.num_drafts
    rounds: list[DecodingRound] = []
    blocks = WholeBlocks(
        target,
        drafter,
        temperature=temperature if mode == "sampling" else 0,
        max_new_tokens=max_new_tokens,
        seed=seed,
        **generation_options,
    )
    for inputs in _batches(target, prompts, batch_size):
        rounds.extend(blocks.decode(inputs).rounds)
    # A row's last rounds may have room for less than a block: nobody knows what would have become of the rest.
    whole = [r for r in rounds if r.verify_length == num_drafts]
    if len(whole) < MIN_ROUNDS:
        raise ValueError(
            f"calibration needs {MIN_ROUNDS} rounds that verify the whole block of {num_drafts} drafts, but decoding "
            f"the prompts ({mode}) gave {len(whole)} of them; give more prompts (some hundred), or a larger "
            f"max_new_tokens (--max-new-tokens) than {max_new_tokens}"
        )
    return ConfidenceRounds(
        torch.from_numpy(confidence_logits([r.confidence for r in whole])),
        torch.tensor([r.num_accepted for r in whole]),
    )


def store_calibration(drafter: Drafter, report: CalibrationReport, *, temperature: float = 1.0) -> None:
    """
    Writes a report's temperatures and offsets, and where they come from, into `drafter.config`, for its mode.

    Args:
        drafter ([`Drafter`]): The drafter, or a view of it.
        report ([`CalibrationReport`]): What was found on the rounds that were fitted.
        temperature (`float`, *optional*, defaults to 1.0): Temperature of the sampled text; greedy is recorded as 0.

    Raises:
        ValueError: The report is about another number of drafts.
    """
    origin = {
        "dataset": report.dataset,
        "num_rounds": report.num_rounds,
        "temperature": float(temperature) if report.mode == "sampling" else 0.0,
        # Where no round got to, the position before has 0 already: schedulers that multiply are told the same.
        "conditional_acceptance": [0.0 if math.isnan(a) else round(a, 4) for a in report.conditional_acceptance],
        "ece_before": [round(error, 5) for error in report.ece_before],
        "ece_after": [round(error, 5) for error in report.ece_after],
    }
    _store(drafter, report.mode, report.temperatures, report.offsets, origin)


def load_sglang(drafter: Drafter, source: str | os.PathLike | Mapping[str, Any], *, mode: str) -> None:
    """
    Takes the temperatures of one mode from an SGLang table; offsets and what the config said about their origin go.

    Args:
        drafter ([`Drafter`]): The drafter, or a view of it.
        source (`str`, `os.PathLike` or a mapping): The JSON file, or its content.
        mode (`str`): `"greedy"` or `"sampling"`; the table does not say which it is for.

    Raises:
        ValueError: The table holds no such temperatures, or not one for each draft.
    """
    _store(drafter, mode, temperatures_from_sglang(source), (), None)


def save_calibration(drafter: Drafter, folder: str | os.PathLike) -> None:
    """
    Writes the calibration of `drafter` into `config.json` of a drafter folder and leaves all else there as it is.

    Raises:
        ValueError: `folder` holds no drafter of that many drafts a block.
    """
    path = Path(folder) / "config.json"
    try:
        stored = read_object(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} is no drafter folder: its config.json cannot be read ({error})") from None
    there, here = type(drafter.config).from_pretrained(folder).num_drafts, drafter.config.num_drafts
    if there != here:
        raise ValueError(f"{folder} holds a drafter of {there} drafts a block, but the calibrated one makes {here}")
    for name in ("confidence_temperatures", "confidence_offsets", "confidence_calibration"):
        stored[name] = getattr(drafter.config, name)
    write_object(path, dict(sorted(stored.items())), indent=2)  # as transformers writes it


def _store(
    drafter: Drafter,
    mode: str,
    temperatures: Sequence[float],
    offsets: Sequence[float],
    origin: Mapping[str, Any] | None,
) -> None:
    fitted = {
        "confidence_temperatures": [round(float(t), 4) for t in temperatures],
        "confidence_offsets": [round(float(b), 4) for b in offsets] if any(offsets) else None,
        "confidence_calibration": None if origin is None else dict(origin),
    }
    config = copy.deepcopy(drafter.config)
    for name, value in fitted.items():
        kept = {key: known for key, known in (getattr(config, name) or {}).items() if key != mode}
        if value is not None:
            kept[mode] = value
        setattr(config, name, kept or None)
    config.check_consistency()  # before anything of the caller's changes
    for name in fitted:
        setattr(drafter.config, name, getattr(config, name))


def check_enough_prompts(num_prompts: int, drafter: Drafter, max_new_tokens: int) -> None:
    """
    Refuses prompts that cannot come to the rounds that are needed, however few of their drafts are accepted.

    A round commits a token at least and verifies a whole block only where there is room for one, so a prompt has at
    most `max_new_tokens - K` such rounds.

    Raises:
        ValueError: There are too few prompts, or there is no room for a block; the message says what would do.
    """
    num_drafts = drafter.config.num_drafts
    each = max_new_tokens - num_drafts
    if each < 1:
        raise ValueError(
            f"calibration needs {MIN_ROUNDS} rounds that verify the whole block of {num_drafts} drafts, for which "
            f"max_new_tokens={max_new_tokens} leaves no room; raise max_new_tokens (--max-new-tokens)"
        )
    if num_prompts * each < MIN_ROUNDS:
        given = "1 prompt" if num_prompts == 1 else f"{num_prompts} prompts"
        raise ValueError(
            f"calibration needs {MIN_ROUNDS} rounds that verify the whole block of {num_drafts} drafts, but {given} "
            f"of at most {max_new_tokens} new tokens have {num_prompts * each} at most: give "
            f"{math.ceil(MIN_ROUNDS / each)} prompts at the very least (some hundred are better), or raise "
            "max_new_tokens (--max-new-tokens)"
        )


def _for_each_mode(
    drafter: Drafter, prompts: Prompts, modes: Sequence[str], max_new_tokens: int
) -> list[tuple[str, list]]:
    """Checks what `calibrate` was given, before the first forward; prompts are walked through once for each mode."""
    if drafter.confidence_head is None:
        raise ValueError(
            "this drafter has no confidence head (enable_confidence_head=False), so there is nothing to calibrate"
        )
    if isinstance(modes, str) or not modes or set(modes) - set(CALIBRATED_MODES):
        raise ValueError(f"modes={modes!r}; allowed are one or both of {list(CALIBRATED_MODES)}, as a list")
    kept: list[Any] = list(prompts)
    if not kept:
        raise ValueError("no prompts were given; calibration needs some hundred of them")
    if isinstance(prompts, str | Mapping) or any(isinstance(prompt, str) for prompt in kept):
        raise TypeError("prompts must be a list of token ids or of batches; encode text with the target's tokenizer")
    if not all(len(prompt) for prompt in kept):
        raise ValueError(f"prompt {[len(prompt) for prompt in kept].index(0)} is empty; each needs a token at least")
    num_prompts = sum(len(prompt["input_ids"]) if isinstance(prompt, Mapping) else 1 for prompt in kept)
    check_enough_prompts(num_prompts, drafter, max_new_tokens)
    return [(mode, kept) for mode in dict.fromkeys(modes)]


def _batches(target: PreTrainedModel, prompts: Prompts, size: int) -> Iterator[dict[str, torch.Tensor]]:
    """What `generate` takes: batches as they came, or prompts of about the same length, padded on the left."""
    loose = [prompt for prompt in prompts if not isinstance(prompt, Mapping)]
    for batch in prompts:
        if isinstance(batch, Mapping):
            yield {name: batch[name].to(target.device) for name in ("input_ids", "attention_mask") if name in batch}
    pad = target.generation_config.pad_token_id
    loose.sort(key=len)
    for first in range(0, len(loose), size):
        yield left_padded(loose[first : first + size], pad, target.device)
