"""What happened while decoding: one record per row and round, and the figures the paper reports about them.

Plain Python values only, so that records can be pickled, sent to another process and kept after the tensors are gone.
The first token of every row comes from the prefill and belongs to no round.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DecodingRound:
    """
    One row's part in one draft-verify step.

    Attributes:
        row (`int`): Batch row.
        step (`int`): Number of the draft-verify step within its `generate` call, from 0; shared by the rows it served.
        anchor_id (`int`): The newest token before the round, x_0.
        draft_ids (`tuple[int, ...]`): Everything that was drafted, verified or not.
        confidence (`tuple[float, ...]`): The drafter's confidence per draft; empty without a confidence head.
        verify_length (`int`): How many of the drafts the target verified, l_r.
        num_accepted (`int`): How many of those stood, before any stop cut them.
        next_id (`int`): The correction or bonus token after the accepted drafts.
        committed_ids (`tuple[int, ...]`): What was kept: accepted drafts and `next_id`, cut after the first stop.
        batch_tokens (`int`): Tokens in the target forward of the step, all rows together, B.
        draft_seconds (`float`): Seconds the whole step spent drafting, the same in all of its rows.
        verify_seconds (`float`): Seconds the whole step spent verifying, the same in all of its rows.
    """

    row: int
    step: int
    anchor_id: int
    draft_ids: tuple[int, ...]
    confidence: tuple[float, ...]
    verify_length: int
    num_accepted: int
    next_id: int
    committed_ids: tuple[int, ...]
    batch_tokens: int
    draft_seconds: float
    verify_seconds: float


@dataclass(frozen=True, slots=True)
class DecodingStats:
    """
    Figures over a set of rounds, of one `generate` call or of several.

    Every mean and rate is `nan` where it would be over nothing. Rates at a position are over the rounds that verified
    it; with a policy that looks at confidences these are the rounds it was confident about.

    Args:
        rounds (`Sequence[DecodingRound]`): The rounds.
    """

    rounds: Sequence[DecodingRound]

    @property
    def num_rounds(self) -> int:
        """Number of rounds, each row counted by itself."""
        return len(self.rounds)

    @property
    def accepted_length(self) -> float:
        """Mean number of tokens kept per round, the correction or bonus token included: the paper's tau."""
        return _ratio(self._num_committed, len(self.rounds))

    @property
    def mean_verify_length(self) -> float:
        """Mean number of drafts verified per round."""
        return _ratio(self._num_verified, len(self.rounds))

    @property
    def verify_rate(self) -> float:
        """Share of the verified drafts that were accepted."""
        return _ratio(sum(r.num_accepted for r in self.rounds), self._num_verified)

    @property
    def tokens_per_second(self) -> float:
        """Tokens kept per second of drafting and verifying; neither the prefill's token nor its time is in it."""
        # All rows of a step carry the step's times, so a set counts them once (also over several generate calls).
        steps = {(r.step, r.draft_seconds, r.verify_seconds) for r in self.rounds}
        return _ratio(self._num_committed, math.fsum(draft + verify for _, draft, verify in steps))

    def acceptance_rate_at(self, position: int) -> float:
        """
        Share of the rounds that verified `position` in which it and every draft before it were accepted.

        Args:
            position (`int`): Draft position, from 1.

        Raises:
            ValueError: if `position` is below 1.
        """
        _check_position(position)
        verified = [r for r in self.rounds if r.verify_length >= position]
        return _ratio(sum(r.num_accepted >= position for r in verified), len(verified))

    def conditional_acceptance_at(self, position: int) -> float:
        """
        Share of the rounds that verified `position` and accepted every draft before it in which it was accepted too.

        Args:
            position (`int`): Draft position, from 1.

        Raises:
            ValueError: if `position` is below 1.
        """
        _check_position(position)
        reached = [r for r in self.rounds if r.verify_length >= position and r.num_accepted >= position - 1]
        return _ratio(sum(r.num_accepted >= position for r in reached), len(reached))

    def __str__(self) -> str:
        if not self.rounds:
            return "no rounds"
        return (
            f"{self.num_rounds} rounds, accepted length {self.accepted_length:.2f}, "
            f"{self.mean_verify_length:.2f} drafts verified per round, {self.verify_rate:.1%} of them accepted, "
            f"{self.tokens_per_second:.1f} tokens/s"
        )

    @property
    def _num_committed(self) -> int:
        return sum(len(r.committed_ids) for r in self.rounds)

    @property
    def _num_verified(self) -> int:
        return sum(r.verify_length for r in self.rounds)


def _check_position(position: int) -> None:
    if position < 1:
        raise ValueError(f"Draft positions count from 1, but {position} was given.")


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan
