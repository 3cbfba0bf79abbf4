"""What recorded answers say about a drafter: the figures of an evaluation, in frozen dataclasses that JSON can hold.

Contract: pure. Answers whose rounds verified whole blocks come in, figures come out; both countings of accepted length
are among them, see `recorded_answers`. Knows nothing about models.

Source: https://huggingface.co/papers/2607.05147, figures 2, 5, 6. Shape legend: K draft positions.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .calibration_report import CalibrationReport
from .json_files import without_nan
from .recorded_answers import (
    ContextFigures,
    RecordedAnswer,
    ThresholdFigures,
    context_figures,
    drafts_kept,
    mean,
    repetition_share,
    replay,
)
from .rounds import DecodingRound, DecodingStats
from .temperature_scaling import confidence_logits


@dataclasses.dataclass(frozen=True, slots=True)
class SpeedFigures:
    """
    Plain `generate` and the drafter with its own scheduler, timed side by side on the same batches.

    Attributes:
        plain_tokens_per_second, tokens_per_second (`float`): Medians over the timed batches, prefill included.
        ratio (`float`): Median of the batches' ratios.
        num_prompts, batch_size, repeats (`int`): How many prompts, how many at once, how often each batch.
        identical (`bool`): Whether all texts were the same; to be expected of greedy decoding only.
    """

    plain_tokens_per_second: float
    tokens_per_second: float
    ratio: float
    num_prompts: int
    batch_size: int
    repeats: int
    identical: bool


@dataclasses.dataclass(frozen=True, slots=True)
class SetFigures:
    """
    A drafter on a set of prompts at a temperature.

    Attributes:
        drafter, dataset (`str`): Their names.
        temperature (`float`): 0 is greedy.
        num_prompts (`int`): Conversations.
        num_skipped (`int`): Of them, conversations that ended before a prompt that was too long for the target.
        num_answers, num_tokens, num_rounds (`int`): What was decoded.
        accepted_length (`float`): Mean tokens kept a round, with the target's own: the paper's tau.
        accepted_length_error (`float`): Its standard error, answers taken as independent; `nan` for one answer.
        accepted_drafts (`float`): Mean drafts kept a round.
        verify_length (`float`): Mean drafts verified a round: nearly K.
        verify_rate (`float`): Share of the verified drafts that stood.
        acceptance (`tuple[float, ...]` of length K): Share of the rounds in which each draft and all before it stood.
        conditional_acceptance (`tuple[float, ...]` of length K): Share of those whose earlier drafts stood (Fig. 2).
        num_reached (`tuple[int, ...]` of length K): How many those were.
        thresholds (`tuple[ThresholdFigures, ...]`): Replays (Fig. 5); empty without a confidence head.
        contexts (`tuple[ContextFigures, ...]`): By length of the text.
        repetition_share (`float`): See [`repetition_share`]. Text that repeats itself is easy to draft.
        reliability (`CalibrationReport`, *optional*): Predicted and observed survival (Fig. 6) of whole blocks, with
            the temperatures in the drafter's config.
        speed (`SpeedFigures`, *optional*): If it was measured.
    """

    drafter: str
    dataset: str
    temperature: float
    num_prompts: int
    num_skipped: int
    num_answers: int
    num_tokens: int
    num_rounds: int
    accepted_length: float
    accepted_length_error: float
    accepted_drafts: float
    verify_length: float
    verify_rate: float
    acceptance: tuple[float, ...]
    conditional_acceptance: tuple[float, ...]
    num_reached: tuple[int, ...]
    thresholds: tuple[ThresholdFigures, ...]
    contexts: tuple[ContextFigures, ...]
    repetition_share: float
    reliability: CalibrationReport | None = None
    speed: SpeedFigures | None = None

    @classmethod
    def of_answers(
        cls,
        answers: Sequence[RecordedAnswer],
        *,
        drafter: str,
        dataset: str,
        temperature: float,
        num_prompts: int,
        num_skipped: int,
        num_drafts: int,
        thresholds: Sequence[float],
        confidence_temperatures: Sequence[float] | None,
        confidence_offsets: Sequence[float] | None = None,
        speed: SpeedFigures | None = None,
    ) -> "SetFigures":
        """
        Sums up recorded answers.

        Args:
            answers (`Sequence[RecordedAnswer]`): At least one.
            num_drafts (`int`): K.
            thresholds (`Sequence[float]`): What to replay.
            confidence_temperatures, confidence_offsets (`Sequence[float]`, *optional*):
                The drafter's, for this kind of decoding.
            The others are the attributes.
        """
        rounds = [r for answer in answers for r in answer.rounds]
        scaling = (confidence_temperatures, confidence_offsets)
        has_confidence = bool(rounds) and all(len(r.confidence) == len(r.draft_ids) for r in rounds)
        stats, positions = DecodingStats(rounds), range(1, num_drafts + 1)
        return cls(
            drafter=drafter,
            dataset=dataset,
            temperature=float(temperature),
            num_prompts=num_prompts,
            num_skipped=num_skipped,
            num_answers=len(answers),
            num_tokens=sum(len(answer.new_ids) for answer in answers),
            num_rounds=len(rounds),
            accepted_length=stats.accepted_length,
            accepted_length_error=_error_over_answers(answers),
            accepted_drafts=mean(drafts_kept(r, r.verify_length) for r in rounds),
            verify_length=stats.mean_verify_length,
            verify_rate=stats.verify_rate,
            acceptance=tuple(stats.acceptance_rate_at(k) for k in positions),
            conditional_acceptance=tuple(stats.conditional_acceptance_at(k) for k in positions),
            num_reached=tuple(
                sum(r.verify_length >= k and r.num_accepted >= k - 1 for r in rounds) for k in positions
            ),
            thresholds=tuple(replay(rounds, t, *scaling) for t in thresholds) if has_confidence else (),
            contexts=context_figures(answers),
            repetition_share=repetition_share([answer.new_ids for answer in answers]),
            reliability=_reliability(rounds, num_drafts, *scaling, temperature, dataset) if has_confidence else None,
            speed=speed,
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-able values, `nan` as `None`."""
        return without_nan(dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SetFigures":
        """
        The figures that `to_dict` was called on.

        Raises:
            ValueError: Fields are missing, unknown or of the wrong kind.
        """
        try:
            nested = {
                "thresholds": tuple(ThresholdFigures(**_numbers(each)) for each in values["thresholds"]),
                "contexts": tuple(
                    ContextFigures(**_numbers(each) | {"below": each["below"]}) for each in values["contexts"]
                ),
                "reliability": values["reliability"] and CalibrationReport.from_dict(values["reliability"]),
                "speed": values["speed"] and SpeedFigures(**values["speed"]),
            }
            lists = {
                name: tuple(math.nan if each is None else each for each in values[name])
                for name in ("acceptance", "conditional_acceptance", "num_reached")
            }
            return cls(**_numbers(values) | lists | nested)
        except (KeyError, TypeError, AttributeError) as error:
            fields = [field.name for field in dataclasses.fields(cls)]
            raise ValueError(f"not the figures of a set ({error!r}); their fields are {fields}") from None


def _error_over_answers(answers: Sequence[RecordedAnswer]) -> float:
    """Standard error of the accepted length, a ratio of two sums over answers (delta method)."""
    tokens = np.array([sum(len(r.committed_ids) for r in answer.rounds) for answer in answers], dtype=float)
    rounds = np.array([len(answer.rounds) for answer in answers], dtype=float)
    if len(answers) < 2 or not rounds.sum():
        return math.nan
    spread = np.square(tokens - tokens.sum() / rounds.sum() * rounds).sum()
    return float(math.sqrt(spread * len(answers) / (len(answers) - 1)) / rounds.sum())


def _reliability(
    rounds: Sequence[DecodingRound],
    num_drafts: int,
    temperatures: Sequence[float] | None,
    offsets: Sequence[float] | None,
    temperature: float,
    dataset: str,
) -> CalibrationReport | None:
    whole = [r for r in rounds if r.verify_length == num_drafts]
    if not whole:
        return None
    return CalibrationReport.of_rounds(
        confidence_logits([r.confidence for r in whole]),
        [r.num_accepted for r in whole],
        temperatures=[1.0] * num_drafts if temperatures is None else temperatures,
        offsets=offsets,
        mode="sampling" if temperature > 0 else "greedy",
        dataset=dataset,
    )


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values that JSON has no word for are back."""
    return {key: math.nan if value is None else value for key, value in values.items()}
