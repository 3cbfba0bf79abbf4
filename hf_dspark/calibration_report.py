"""What a calibration found, position by position: figures that can be printed, stored, drawn and sent to SGLang.

Contract: pure; numbers in, frozen dataclasses and plain dictionaries out. Every figure is about the prefix survival
`a_k = c_1 ... c_k`, before the temperatures and offsets and after them. Knows nothing about models or decoding.

Source: https://huggingface.co/papers/2607.05147, section 3.2.1. Shape legend: N rounds, K draft positions.
"""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .json_files import read_object, without_nan, write_object
from .temperature_scaling import (
    NUM_BINS,
    area_under_curve,
    bin_totals,
    brier_score,
    checked_rounds,
    conditional_acceptance,
    ece_noise_floor,
    expected_calibration_error,
    prefix_survival,
)

if TYPE_CHECKING:
    from .temperature_scaling import Numbers


@dataclasses.dataclass(frozen=True, slots=True)
class ReliabilityBin:
    """
    Rounds whose predicted survival fell into the same bin.

    Attributes:
        num_rounds (`int`): How many; empty bins are left out.
        predicted (`float`): Mean predicted survival.
        observed (`float`): Share that survived.
    """

    num_rounds: int
    predicted: float
    observed: float


@dataclasses.dataclass(frozen=True, slots=True)
class PositionQuality:
    """
    How good the predicted survival up to one position is.

    Attributes:
        ece (`float`): Expected calibration error.
        noise_floor (`float`): ECE that perfect predictions would have over so many rounds.
        auc (`float`): Chance that a surviving round was predicted higher than another; `nan` if all or none survived.
        brier (`float`): Mean squared error.
        bins (`tuple[ReliabilityBin, ...]`): The reliability diagram, in ascending order.
    """

    ece: float
    noise_floor: float
    auc: float
    brier: float
    bins: tuple[ReliabilityBin, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class CalibrationReport:
    """
    Temperatures and offsets of one mode, and what they are worth on a set of rounds.

    Attributes:
        mode (`str`): `"greedy"` or `"sampling"`.
        dataset (`str`): Name of the prompts.
        num_rounds (`int`): Rounds measured, N; all verified the whole block.
        temperatures (`tuple[float, ...]` of length K): Divisors of the confidence logits.
        offsets (`tuple[float, ...]` of length K): What is added after dividing.
        conditional_acceptance (`tuple[float, ...]` of length K):
            Share of the rounds that accepted all earlier drafts in which each was accepted; `nan` over no round.
        before, after (`tuple[PositionQuality, ...]` of length K): Without and with both.
    """

    mode: str
    dataset: str
    num_rounds: int
    temperatures: tuple[float, ...]
    offsets: tuple[float, ...]
    conditional_acceptance: tuple[float, ...]
    before: tuple[PositionQuality, ...]
    after: tuple[PositionQuality, ...]

    @classmethod
    def of_rounds(
        cls,
        logits: "Numbers",
        num_accepted: "Numbers",
        *,
        temperatures: Sequence[float],
        offsets: Sequence[float] | None = None,
        mode: str,
        dataset: str,
        num_bins: int = NUM_BINS,
    ) -> "CalibrationReport":
        """
        Measures temperatures and offsets on rounds.

        Args:
            logits (`torch.Tensor` or array of shape `[N, K]`): Confidence logits, before any temperature.
            num_accepted (`torch.Tensor` or array of shape `[N]`): Accepted drafts of each round.
            temperatures (`Sequence[float]` of length K), offsets (`Sequence[float]` of length K, *optional*):
                What to measure; no offset is 0.
            mode, dataset (`str`): As the attributes.
            num_bins (`int`, *optional*, defaults to 10): Bins of the ECE.

        Raises:
            ValueError: Shapes or values do not fit; the message says which.
        """
        values, survived = checked_rounds(logits, num_accepted)
        offsets = [0.0] * values.shape[1] if offsets is None else offsets
        raw, scaled = prefix_survival(values), prefix_survival(values, temperatures, offsets)
        positions = range(values.shape[1])
        return cls(
            mode=mode,
            dataset=dataset,
            num_rounds=len(values),
            temperatures=tuple(float(t) for t in temperatures),
            offsets=tuple(float(b) for b in offsets),
            conditional_acceptance=conditional_acceptance(num_accepted, values.shape[1]),
            before=tuple(_quality(raw[:, k], survived[:, k], num_bins) for k in positions),
            after=tuple(_quality(scaled[:, k], survived[:, k], num_bins) for k in positions),
        )

    @property
    def ece_before(self) -> tuple[float, ...]:
        """ECE at each position without temperatures and offsets."""
        return tuple(quality.ece for quality in self.before)

    @property
    def ece_after(self) -> tuple[float, ...]:
        """ECE at each position with them."""
        return tuple(quality.ece for quality in self.after)

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-able values, `nan` as `None`."""
        return without_nan(dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "CalibrationReport":
        """
        The report that `to_dict` was called on.

        Raises:
            ValueError: Fields are missing, unknown or of the wrong kind.
        """
        try:
            temperatures = tuple(values["temperatures"])
            return cls(
                **{
                    **values,
                    "temperatures": temperatures,
                    "offsets": tuple(values.get("offsets", [0.0] * len(temperatures))),  # older reports have none
                    "conditional_acceptance": tuple(map(_number, values["conditional_acceptance"])),
                    "before": tuple(map(_read_quality, values["before"])),
                    "after": tuple(map(_read_quality, values["after"])),
                }
            )
        except (KeyError, TypeError, AttributeError) as error:
            fields = [field.name for field in dataclasses.fields(cls)]
            raise ValueError(f"not a calibration report ({error!r}); its fields are {fields}") from None

    def to_sglang(self, path: str | os.PathLike | None = None) -> dict[str, Any]:
        """
        The temperatures as SGLang reads them, which has no offsets; its two errors are means over the positions.

        Args:
            path (`str` or `os.PathLike`, *optional*): A JSON file to write them to as well.
        """
        table = {
            "temperatures": list(self.temperatures),
            "dataset": self.dataset,
            "num_samples": self.num_rounds,
            "ece_before": float(np.mean(self.ece_before)),
            "ece_after": float(np.mean(self.ece_after)),
        }
        if path is not None:
            write_object(path, table)
        return table

    def __str__(self) -> str:
        rows = [
            f"{self.mode}, {self.dataset}: {self.num_rounds} rounds; ECE {np.mean(self.ece_before):.2%} before, "
            f"{np.mean(self.ece_after):.2%} after (mean over positions)",
            "",
            "| draft | temperature | offset | accepted | ECE before | ECE after | noise floor | AUC before "
            "| AUC after | Brier before | Brier after |",
            "|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        scalings = zip(self.temperatures, self.offsets, strict=True)
        columns = zip(scalings, self.conditional_acceptance, self.before, self.after, strict=True)
        for k, ((temperature, offset), accepted, before, after) in enumerate(columns, start=1):
            rows.append(
                f"| {k} | {temperature:.2f} | {offset:+.2f} | {_figure(accepted)} | {before.ece:.2%} "
                f"| {after.ece:.2%} | {after.noise_floor:.2%} | {_figure(before.auc)} | {_figure(after.auc)} "
                f"| {before.brier:.4f} | {after.brier:.4f} |"
            )
        return "\n".join(rows)


def _figure(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3f}"


def temperatures_from_sglang(source: str | os.PathLike | Mapping[str, Any]) -> tuple[float, ...]:
    """
    Temperatures out of an SGLang table, a JSON file or its content.

    Raises:
        ValueError: There is no list of positive temperatures in it, or the file is no JSON object.
    """
    if isinstance(source, Mapping):
        table, name = source, "the table"
    else:
        name = os.fspath(source)
        try:
            table = read_object(source)
        except ValueError as error:
            raise ValueError(f"{name} is no SGLang table: {error}") from None
    temperatures = table.get("temperatures")
    if not isinstance(temperatures, list) or not temperatures or not all(map(_is_positive, temperatures)):
        raise ValueError(f"{name} needs 'temperatures', a list of positive numbers, one a draft; got {temperatures!r}")
    return tuple(float(t) for t in temperatures)


def _quality(predicted: np.ndarray, survived: np.ndarray, num_bins: int) -> PositionQuality:
    counts, predicted_sum, survived_sum = bin_totals(predicted, survived, num_bins)
    bins = [
        ReliabilityBin(int(count), float(total / count), float(hits / count))
        for count, total, hits in zip(counts, predicted_sum, survived_sum, strict=True)
        if count
    ]
    return PositionQuality(
        ece=expected_calibration_error(predicted, survived, num_bins),
        noise_floor=ece_noise_floor(predicted, num_bins),
        auc=area_under_curve(predicted, survived),
        brier=brier_score(predicted, survived),
        bins=tuple(bins),
    )


def _read_quality(values: Mapping[str, Any]) -> PositionQuality:
    bins = tuple(ReliabilityBin(**each) for each in values["bins"])
    return PositionQuality(**{**values, "auc": _number(values["auc"]), "bins": bins})


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
