"""The default policy: look ahead while drafting pays, decode plainly while it does not.

Contract: a policy like those in `policies.py`, made of [`Lookahead`] and of a decision before each round: whether to
draft at all. That decision depends on finished rounds alone. The paper leaves it to future work ("difficulty-aware
early exit").

Source: https://huggingface.co/papers/2607.05147, section 3.2. Shape legend: R active rows, K drafted positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers.utils import logging

from .policies import CostedPolicy, LookaheadCall
from .scheduling import CallSetting, FixedLength, RoundOutcome, Scheduler, ScheduleRequest

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class Auto(CostedPolicy):
    """
    [`~policies.Lookahead`], with drafting switched off for as long as plain decoding is faster.

    Every drafted round is rated by the tokens that its admitted drafts promise and the seconds it takes, against plain
    decoding. When recent rounds fall behind, nothing is drafted for some rounds; then one round drafts again to see.
    While that does not pay, the pauses double, up to [`AutoCall.LONGEST_PAUSE`] rounds, so that what drafting costs
    where it cannot win stays small. Features of the text of those rounds wait and are read by the next draft.

    In a batch that only shrinks, rows of uneven pace make a round worth less, and drafts of rows that are ahead count
    for less than those of rows behind.

    Without a measured cost (HF_DSPARK_NO_PROFILE is set and no profile given) it verifies whole blocks, and says so
    once.
    """

    def for_call(self, setting: CallSetting) -> Scheduler:
        if setting.cost is None:
            logger.warning_once(
                "Scheduling is off, whole blocks are verified: what rounds cost here is not known, since "
                "HF_DSPARK_NO_PROFILE is set or the target's requests cannot be packed. Pass a profile, "
                "`with_options(sps_profile=...)`, or choose another `scheduler`, such as FixedLength(3)."
            )
            return FixedLength()
        return AutoCall(self, setting)


class AutoCall(LookaheadCall):
    """[`Auto`] at work in one `generate` call."""

    MEMORY = 0.9  # what one round leaves of the weight of those before it
    PRIOR_ROUNDS = 2.0  # how many rounds the benefit of the doubt counts as
    LEAD = 16.0  # tokens ahead of the last row after which a row counts for much less
    MOST_GROUPS = 8  # rows of similar pace are taken together
    FIRST_PAUSE, LONGEST_PAUSE = 8, 32  # rounds without drafts

    def __init__(self, policy: Scheduler, setting: CallSetting):
        super().__init__(policy, setting)
        self._tokens = self._time = self.PRIOR_ROUNDS  # in rounds of plain decoding
        self._pause, self._rounds_left = self.FIRST_PAUSE, 0
        self._probing = self._told = False
        self.paces = Paces()
        self._drafted_tokens: dict[int, int] = {}  # what each row got out of drafts; rounds give all rows one more

    @property
    def gain(self) -> float:
        """Tokens per second of recent drafted rounds over those of plain decoding."""
        return self._tokens / self._time

    def weights(self, request: ScheduleRequest) -> np.ndarray | float:
        """
        A batch that only shrinks ends with its slowest row: a token of a row that is ahead of the others saves only
        the row's own share of a round, at the end.
        """
        num_rows = len(request.rows)
        if not self.setting.drains or num_rows == 1:
            return 1.0
        half, plain = num_rows // 2, self.cost.plain_seconds(num_rows, request.context)
        saved = plain - self.cost.plain_seconds(half, request.context)
        own_share = min(max(saved / (num_rows - half) * num_rows / plain, 0.0), 1.0)
        drafted = np.array([self._drafted_tokens.get(row, 0) for row in request.rows])
        return own_share + (1 - own_share) * np.exp((drafted.min() - drafted) / self.LEAD)

    def wants_drafts(self, num_rows: int, context: float) -> bool:
        return self._rounds_left == 0 and not self.cost.plain_is_due(num_rows, self.gain)

    def verify_lengths(self, request: ScheduleRequest) -> list[int]:
        self.rate = self.gain
        return super().verify_lengths(request)

    def observe(self, outcome: RoundOutcome) -> None:
        request = outcome.request
        if request is None:
            if self._rounds_left:
                self._rounds_left -= 1
                self._probing = self._rounds_left == 0
            return
        self._drafted_tokens = {
            row: self._drafted_tokens.get(row, 0) + accepted
            for row, accepted in zip(request.rows, outcome.num_accepted, strict=True)
        }
        tokens, time = self._rated(request, outcome)
        if self._probing and tokens > time:  # the rounds before the pause are no longer news
            self._tokens = self._time = self.PRIOR_ROUNDS
        self._tokens = self.MEMORY * self._tokens + tokens
        self._time = self.MEMORY * self._time + time
        super().observe(outcome)
        if self.gain >= 1:
            self._pause = self.FIRST_PAUSE
        else:
            if not self._told:
                logger.info("Drafting does not pay at present; decoding plainly and trying again from time to time.")
                self._told = True
            self._rounds_left = self._pause
            self._pause = min(2 * self._pause, self.LONGEST_PAUSE)
        self._probing = False

    def _rated(self, request: ScheduleRequest, outcome: RoundOutcome) -> tuple[float, float]:
        """Expected tokens of a row in a round and the predicted duration, both in rounds of plain decoding."""
        num_rows, context = outcome.num_rows, request.context
        tokens = 1 + self.outlook.promised(request, outcome.verify_lengths)
        plain = self.cost.plain_seconds(num_rows, context)
        seconds = self.cost.predict(num_rows, sum(outcome.verify_lengths), context, drafted=True)
        progress = float(tokens.mean())
        if self.setting.drains and num_rows > 1:
            self.paces.add(request.rows, tokens)
            progress *= self._unevenness(sum(outcome.verify_lengths) / num_rows, context)
        return progress, seconds / plain

    def _unevenness(self, verify_length: float, context: float) -> float:
        """
        What becomes of the mean progress when rows have the same way to go at different paces: the call ends with the
        slowest, but its rounds get cheaper as others leave. 1 if all are equally fast.
        """
        paces = np.sort(self.paces.drawn())[::-1]
        left, finished, seconds = len(paces), 0.0, 0.0
        for group in np.array_split(paces, min(len(paces), self.MOST_GROUPS)):
            end = 1 / float(group.mean())
            seconds += (end - finished) * self.cost.predict(left, round(verify_length * left), context, drafted=True)
            left, finished = left - len(group), end
        together = self.cost.predict(len(paces), round(verify_length * len(paces)), context, drafted=True)
        return together / seconds


class Paces:
    """
    How unevenly the rows of a batch advance. What each row makes of its rounds scatters, so the slowest of many looks
    slower than it is: paces are drawn towards their mean as far as chance alone explains their differences.
    """

    def __init__(self) -> None:
        self._by_row: dict[int, np.ndarray] = {}  # number, sum and sum of squares of a row's tokens per round

    def add(self, rows: Sequence[int], tokens: np.ndarray) -> None:
        """Takes note of a round in which `rows` made `tokens [R]` each; others are forgotten."""
        entries = np.stack([np.ones_like(tokens), tokens, tokens**2], axis=1)
        self._by_row = {row: self._by_row.get(row, 0.0) + entry for row, entry in zip(rows, entries, strict=True)}

    def drawn(self) -> np.ndarray:
        """The pace of each row over the mean pace, `[R]`."""
        number, total, squares = np.stack(list(self._by_row.values())).T
        paces, mean = total / number, total.sum() / number.sum()
        within = max((squares - total**2 / number).sum() / max((number - 1).sum(), 1), 0.0) / number
        between = max(float(((paces - mean) ** 2 - within).mean()), 0.0)
        return 1 + (paces / mean - 1) * between / np.maximum(between + within, 1e-9)
