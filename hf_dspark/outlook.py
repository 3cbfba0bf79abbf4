"""What drafts to come are worth, judged by those of finished rounds: the forecasts of a schedule that looks ahead.

Contract: pure arithmetic on what policies are told about rounds. Everything in here is about the past, so a policy may
use all of it.

Source: https://huggingface.co/papers/2607.05147, section 3.2. Shape legend: R active rows, K drafts a block.
"""

from collections.abc import Sequence

import numpy as np

from .scheduling import RoundOutcome, ScheduleRequest

DEFAULT_ACCEPTANCE = 0.6  # conditional acceptance to expect of a drafter that nothing is known about yet


class Outlook:
    """
    Running means for each position of a block, newer rounds counting more.

    Args:
        num_drafts (`int`): K.
        acceptance (`Sequence[float]` of length K, *optional*): What to expect before anything was seen.

    Attributes:
        acceptance (`np.ndarray` of shape `[K]`): Expected conditional acceptance at each position.
        survival (`np.ndarray` of shape `[K]`): Its running product.
    """

    MEMORY = 0.97  # what one round (of one row) leaves of the weight of those before it
    PRIOR_DRAFTS = 4.0  # how many drafts the expectation from before the call counts as
    TRUSTED_DRAFTS = 2.0  # accepted drafts that confidences are taken on trust for

    def __init__(self, num_drafts: int, acceptance: Sequence[float] | None = None):
        if acceptance is None:
            acceptance = [DEFAULT_ACCEPTANCE] * num_drafts
        # Survival-weighted: what matters is how a position fares where it is reached.
        self._reached = np.full(num_drafts, self.PRIOR_DRAFTS)
        self._prior = self.PRIOR_DRAFTS * np.asarray(acceptance[:num_drafts], dtype=np.float64)
        self._passed = self._prior.copy()
        self._promised = self._kept = self.TRUSTED_DRAFTS
        self._update()

    def corrected(self, confidence: np.ndarray) -> np.ndarray:
        """Confidences `[R, K]` with the first scaled so that prefix survivals promise what past ones kept."""
        scaled = confidence.astype(np.float64)
        if scaled.shape[1]:
            scaled[:, 0] = (scaled[:, 0] * self.trust).clip(0, 1)
        return scaled

    def throughput(self, num_rows: int, seconds: np.ndarray) -> np.ndarray:
        """Expected tokens per second of `num_rows` rows as expected, for every total verify length `[R * K + 1]`."""
        gained = np.repeat(self.survival, num_rows).cumsum()
        tokens = num_rows + np.concatenate([[0.0], gained])
        return tokens / seconds[: len(tokens)]

    def promised(self, request: ScheduleRequest, verify_lengths: Sequence[int]) -> np.ndarray:
        """How many of the verified drafts of each row are expected to stand, `[R]`."""
        lengths = np.asarray(verify_lengths)
        if request.confidence is None:
            survival = np.tile(self.survival, (len(lengths), 1))
        else:
            survival = self.corrected(request.confidence.numpy()).clip(0, 1).cumprod(axis=1)
        verified = np.arange(survival.shape[1]) < lengths[:, None]
        return np.where(verified, np.nan_to_num(survival), 0.0).sum(axis=1)

    def observe(self, outcome: RoundOutcome) -> None:
        """Learns from a finished round."""
        if outcome.request is None:
            return
        lengths, accepted = np.asarray(outcome.verify_lengths), np.asarray(outcome.num_accepted, dtype=np.float64)
        if outcome.first_stands is not None:  # judged in any case: as good as one verified draft
            accepted = np.where(lengths == 0, outcome.first_stands, accepted)
            lengths = np.maximum(lengths, 1)
        memory = self.MEMORY**outcome.num_rows
        if outcome.request.confidence is None:
            positions = np.arange(len(self._reached))
            tried = (positions < lengths[:, None]) & (positions <= accepted[:, None])
            self._note(tried.sum(axis=0), np.clip(accepted[:, None] - positions, 0, 1).sum(axis=0), memory)
        else:
            survival = np.nan_to_num(outcome.request.confidence.numpy().astype(np.float64)).cumprod(axis=1)
            verified = np.arange(survival.shape[1]) < lengths[:, None]
            self._remember_promises(float(survival[verified].sum()), float(accepted.sum()), memory)
            before = np.concatenate([np.ones((len(survival), 1)), survival[:, :-1]], axis=1)
            self._note(before.sum(axis=0), survival.sum(axis=0), memory)
        self._update()

    def _note(self, reached: np.ndarray, passed: np.ndarray, memory: float) -> None:
        """Adds a round's counts; positions that it did not reach drift back to what was expected of them at first."""
        missing = len(self._reached) - len(reached)
        reached, passed = np.pad(reached, (0, missing)), np.pad(passed, (0, missing))
        drift = np.where(reached > 0, 0.0, 1 - self.MEMORY)
        kept = np.where(reached > 0, memory, self.MEMORY)
        self._reached = kept * self._reached + reached + drift * self.PRIOR_DRAFTS
        self._passed = kept * self._passed + passed + drift * self._prior

    def _remember_promises(self, promised: float, kept: float, memory: float) -> None:
        """Adds what a round's verified drafts promised and kept; old rounds fade, down to what is taken on trust."""
        self._promised, self._kept = self._promised + promised, self._kept + kept
        weight = min(1.0, max(memory, self.TRUSTED_DRAFTS / self._promised))
        self._promised, self._kept = weight * self._promised, weight * self._kept

    def _update(self) -> None:
        self.trust = min(self._kept / self._promised, 1.25)
        self.acceptance = self._passed / self._reached
        self.acceptance[:1] = (self.acceptance[:1] * self.trust).clip(0, 1)
        self.survival = self.acceptance.cumprod()
