"""Recorded answers, and what can be read off their rounds: replays of thresholds, acceptance by length, repetitions.

Contract: pure. Rounds that verified whole blocks, as far as their rows had room, come in; numbers come out. Two
countings of the same thing are kept apart by name: `accepted_length` is tokens kept a round with the target's own
(the paper's tau, footnote 3), `accepted_drafts` without it. Knows nothing about models.

**Replay.** A threshold on confidences only ever cuts a block short: it looks at confidences that are known anyway, and
neither the drafts before the cut nor what the target makes of them depend on it. So the round that a threshold would
have had *from the same text* follows exactly from the recorded one. Where later rounds of the answer would have begun
does not: they are replayed where the recording has them.

Source: https://huggingface.co/papers/2607.05147, figure 5. Shape legend: K draft positions.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np

from .rounds import DecodingRound
from .temperature_scaling import confidence_logits

CONTEXT_EDGES = (1024, 4096, 8192)  # tokens
REPEATED_LENGTH = 4  # tokens of a repetition


@dataclasses.dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """
    An answer and how it came about.

    Attributes:
        prompt_length (`int`): Tokens of its prompt.
        new_ids (`tuple[int, ...]`): What was written.
        rounds (`tuple[DecodingRound, ...]`): Its rounds, in order, with the drafter's raw confidences.
    """

    prompt_length: int
    new_ids: tuple[int, ...]
    rounds: tuple[DecodingRound, ...]

    @property
    def context_lengths(self) -> list[int]:
        """Tokens of the text up to and with the anchor, for each round."""
        kept = np.cumsum([0, *(len(r.committed_ids) for r in self.rounds[:-1])])
        return (self.prompt_length + 1 + kept).tolist()  # the first new token comes from the prefill


@dataclasses.dataclass(frozen=True, slots=True)
class ThresholdFigures:
    """
    What stopping before the first draft whose confidence is below a threshold would have done (Fig. 5).

    Attributes:
        threshold (`float`): The threshold; 0 verifies whole blocks.
        verify_length (`float`): Mean drafts verified a round.
        verify_rate (`float`): Share of the verified drafts that stood; `nan` if none was verified.
        accepted_length (`float`): Mean tokens kept a round, with the target's own.
        accepted_drafts (`float`): Mean drafts kept a round.
    """

    threshold: float
    verify_length: float
    verify_rate: float
    accepted_length: float
    accepted_drafts: float


@dataclasses.dataclass(frozen=True, slots=True)
class ContextFigures:
    """
    Acceptance where the text was about so long.

    Attributes:
        at_least (`int`): Fewest tokens up to the anchor.
        below (`int`, *optional*): Fewer than this; no limit if `None`.
        num_rounds (`int`): Rounds there.
        accepted_length, accepted_drafts (`float`): With and without the target's own token; `nan` over no round.
    """

    at_least: int
    below: int | None
    num_rounds: int
    accepted_length: float
    accepted_drafts: float


def replay(
    rounds: Sequence[DecodingRound],
    threshold: float,
    temperatures: Sequence[float] | None = None,
    offsets: Sequence[float] | None = None,
) -> ThresholdFigures:
    """
    What [`ConfidenceThreshold`] would have made of recorded rounds; exact for each, see the module.

    Args:
        rounds (`Sequence[DecodingRound]`): Rounds with raw confidences.
        threshold (`float`): The threshold.
        temperatures (`Sequence[float]` of length K, *optional*): Divisors of the confidence logits.
        offsets (`Sequence[float]` of length K, *optional*): What is added to them after that.
    """
    lengths = [_cut(r, threshold, temperatures, offsets) for r in rounds]
    kept = [drafts_kept(r, length) for r, length in zip(rounds, lengths, strict=True)]
    accepted = sum(min(r.num_accepted, length) for r, length in zip(rounds, lengths, strict=True))
    committed = [
        min(len(r.committed_ids), min(r.num_accepted, length) + 1) for r, length in zip(rounds, lengths, strict=True)
    ]
    return ThresholdFigures(
        threshold=float(threshold),
        verify_length=mean(lengths),
        verify_rate=accepted / sum(lengths) if sum(lengths) else math.nan,
        accepted_length=mean(committed),
        accepted_drafts=mean(kept),
    )


def context_figures(answers: Sequence[RecordedAnswer]) -> tuple[ContextFigures, ...]:
    """Acceptance by length of the text: below 1k tokens, 1k to 4k, 4k to 8k and beyond."""
    placed = [pair for answer in answers for pair in zip(answer.context_lengths, answer.rounds, strict=True)]
    figures = []
    for at_least, below in zip((0, *CONTEXT_EDGES), (*CONTEXT_EDGES, None), strict=True):
        here = [r for length, r in placed if length >= at_least and (below is None or length < below)]
        kept, drafts = mean(len(r.committed_ids) for r in here), mean(drafts_kept(r, r.verify_length) for r in here)
        figures.append(ContextFigures(at_least, below, len(here), kept, drafts))
    return tuple(figures)


def repetition_share(texts: Iterable[Sequence[int]], length: int = REPEATED_LENGTH) -> float:
    """
    Share of the tokens that lie in a run of `length` tokens which the same text held before.

    A model that has fallen into a loop comes near 1; ordinary answers stay far below. `nan` over no token.
    """
    repeated = total = 0
    for text in texts:
        seen: set[tuple[int, ...]] = set()
        marked: set[int] = set()
        for first in range(len(text) - length + 1):
            run = tuple(text[first : first + length])
            if run in seen:
                marked.update(range(first, first + length))
            seen.add(run)
        repeated, total = repeated + len(marked), total + len(text)
    return repeated / total if total else math.nan


def _cut(
    round_: DecodingRound, threshold: float, temperatures: Sequence[float] | None, offsets: Sequence[float] | None
) -> int:
    """Drafts of a round before the first whose confidence is below the threshold."""
    confidence: Sequence[float] = round_.confidence
    temperatures, offsets = temperatures or [1.0] * len(confidence), offsets or [0.0] * len(confidence)
    if any(t != 1 for t in temperatures) or any(offsets):
        logits = confidence_logits(confidence) / np.asarray(temperatures[: len(confidence)])
        logits = logits + np.asarray(offsets[: len(confidence)])
        confidence = (1 / (1 + np.exp(-logits))).tolist()
    confident = next((k for k, c in enumerate(confidence) if c < threshold), len(confidence))
    return min(confident, round_.verify_length)


def drafts_kept(round_: DecodingRound, length: int) -> int:
    """Drafts among what a round keeps if it verifies `length`; a stop may have cut some."""
    return min(round_.num_accepted, length, len(round_.committed_ids))


def mean(values: Iterable[float]) -> float:
    """Their mean; `nan` over nothing."""
    found = list(values)
    return sum(found) / len(found) if found else math.nan
