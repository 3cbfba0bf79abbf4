"""How many drafts of each row the target verifies: the scheduler's seam, and the policies that need no cost model.

Section 3.2 of the DSpark paper (https://huggingface.co/papers/2607.05147). A policy turns the drafter's confidences
(Eq. 7) into verify lengths `l_r`. It knows nothing about models, tokens or randomness.

**The non-anticipation law.** Whether position k of a row is verified may depend on everything known before draft k of
that row is drawn, and on other rows; never on draft k itself or on later drafts of the same row. A policy that keeps
the law leaves the output distribution exactly the target's; one that breaks it does not (Appendix A of the paper: a
target of 0.70/0.30 comes out as 0.85/0.15). What is known when:

- `confidence[r, k]` (k from 0) is computed from the hidden state of the block and the token *before* position k. It is
  known before draft k is drawn and says something about drafts 0..k-1.
- So deciding about position k may use `confidence[r, :k + 1]`, all earlier rounds, and the size of the round.
- Though the whole table is there at once, looking at `confidence[r, k + 1:]` to decide about position k is looking at
  draft k. An argmax over lengths of an objective computed from the table does that. Stopping at the first confidence
  below a bound does not, nor does admitting positions in descending prefix survival up to a number fixed beforehand.

Policies that weigh the drafts against what the machine charges for them are in `policies.py` and `auto.py`.

Shapes: R active rows, K drafted positions.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .round_cost import RoundCost


@dataclass(frozen=True, slots=True, eq=False)
class CallSetting:
    """
    What a policy is told about the `generate` call it is to serve.

    Attributes:
        num_drafts (`int`): K, the most that a row drafts in a round.
        cost ([`RoundCost`], *optional*): What a round takes on this machine, kept up to date while decoding.
        acceptance (`tuple[float, ...]` of length K, *optional*):
            Conditional acceptance at each position that calibration found; what to expect before anything was seen.
        drains (`bool`): Whether the batch only shrinks, as in `generate`, so that the call ends with its slowest row.
    """

    num_drafts: int
    cost: "RoundCost | None" = None
    acceptance: tuple[float, ...] | None = None
    drains: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class ScheduleRequest:
    """
    What a policy is told about the round it schedules.

    Attributes:
        confidence (`torch.FloatTensor` of shape `[R, K]` on the CPU, or `None`):
            Probability that each draft is accepted given that those before it are; `None` without a confidence head.
        max_lengths (`Sequence[int]` of length R):
            Upper limit per row: what was drafted and what the row may still generate.
        rows (`Sequence[int]` of length R): Batch row of each entry, stable over rounds; finished rows are absent.
        step (`int`): Number of the round within this `generate` call, from 0.
        context (`float`): Mean number of tokens that a row holds in the target's cache.
    """

    confidence: torch.Tensor | None
    max_lengths: Sequence[int]
    rows: Sequence[int]
    step: int
    context: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class RoundOutcome:
    """
    What became of a round, for policies that learn from the past.

    Attributes:
        request ([`ScheduleRequest`], *optional*): The round as it was scheduled; `None` if nothing was drafted.
        num_rows (`int`): R.
        verify_lengths (`Sequence[int]` of length R): Drafts verified.
        num_accepted (`Sequence[int]` of length R): How many of them stood.
        first_stands (`Sequence[float]` of length R, *optional*): Chance that the first draft of each row stands,
            verified or not; known from the scores after the anchor.
        seconds (`float`): Duration of the round: drafting, verification and everything around them.
    """

    request: ScheduleRequest | None
    num_rows: int
    verify_lengths: Sequence[int]
    num_accepted: Sequence[int]
    seconds: float
    first_stands: Sequence[float] | None = None


class Scheduler(ABC):
    """
    Base class of verify-length policies. Subclasses keep the non-anticipation law in the docstring of this module;
    `tests/reference.py` holds the enumeration that proves it for a policy.

    One instance may serve several threads at once: what a policy learns during a `generate` call lives in the object
    that [`~Scheduler.for_call`] returns. A policy that learns nothing serves every call itself.
    """

    @property
    def requires_confidence(self) -> bool:
        """Whether the policy needs a drafter with a confidence head."""
        return False

    @property
    def uses_cost(self) -> bool:
        """Whether the policy weighs drafts against measured round times; only then a profile is taken."""
        return False

    def for_call(self, setting: CallSetting) -> "Scheduler":
        """The scheduler of one `generate` call; this one unless the policy has a state."""
        return self

    def draft_length(self, block_size: int) -> int:
        """How many positions of a block of `block_size` drafts the policy can ever use; no more need be drafted."""
        return block_size

    def wants_drafts(self, num_rows: int, context: float) -> bool:
        """Whether to draft at all in the coming round of `num_rows` rows, from the past alone."""
        return True

    @abstractmethod
    def verify_lengths(self, request: ScheduleRequest) -> list[int]:
        """
        Chooses the number of drafts to verify in every row.

        Returns:
            `list[int]` of length R, each in `0..request.max_lengths[r]`.
        """

    def observe(self, outcome: RoundOutcome) -> None:
        """Told about every finished round of the call, in order."""
        del outcome  # a policy that learns nothing


@dataclass(frozen=True, slots=True)
class FixedLength(Scheduler):
    """
    Verifies the same number of drafts in every row and round.

    Args:
        length (`int`, *optional*):
            Drafts to verify, 0 or more; a shorter block is verified whole. Defaults to the whole block.

    Raises:
        ValueError: if `length` is negative.
        TypeError: if `length` is not an integer.
    """

    length: int | None = None

    def __post_init__(self) -> None:
        if self.length is None:
            return
        if not isinstance(self.length, int) or isinstance(self.length, bool):
            raise TypeError(f"`length` must be an integer or None (the whole block), but is {self.length!r}.")
        if self.length < 0:
            raise ValueError(f"`length` must be 0 or more, but is {self.length}. Use None for the whole block.")

    def draft_length(self, block_size: int) -> int:
        return block_size if self.length is None else min(self.length, block_size)

    def verify_lengths(self, request: ScheduleRequest) -> list[int]:
        return [self.draft_length(max_length) for max_length in request.max_lengths]


@dataclass(frozen=True, slots=True)
class ConfidenceThreshold(Scheduler):
    """
    Verifies each row up to, and without, the first draft whose confidence is below a threshold.

    Causal, as the confidence of a draft is known before it is drawn, and no confidence after it is looked at.

    Args:
        threshold (`float`):
            Lowest confidence that is still verified, at most 1. With 0 or less the whole block is verified and no
            confidence head is needed.

    Raises:
        ValueError: if `threshold` is above 1 or not a number, or, when scheduling, if there are no confidences.
        TypeError: if `threshold` is not a real number.
    """

    threshold: float

    def __post_init__(self) -> None:
        if not isinstance(self.threshold, (int, float)) or isinstance(self.threshold, bool):
            raise TypeError(f"`threshold` must be a number, but is {self.threshold!r}.")
        if math.isnan(self.threshold) or self.threshold > 1:
            raise ValueError(
                f"`threshold` is a probability, at most 1 (0 or less turns it off), but is {self.threshold}."
            )

    @property
    def requires_confidence(self) -> bool:
        return self.threshold > 0

    def verify_lengths(self, request: ScheduleRequest) -> list[int]:
        if not self.requires_confidence:
            return list(request.max_lengths)
        if request.confidence is None:
            raise ValueError(
                f"{self} needs a drafter with a confidence head, but this drafter gives no confidences. "
                "Use FixedLength instead."
            )
        confident = request.confidence >= self.threshold
        lengths = confident.long().cumprod(dim=1).sum(dim=1).tolist()
        return [min(length, max_length) for length, max_length in zip(lengths, request.max_lengths, strict=True)]
