"""Policies that weigh confidence against what the machine charges: CausalGreedy, LaggedBudget, Lookahead.

Section 3.2 and 5.2 of the DSpark paper (https://huggingface.co/papers/2607.05147). All of them admit drafts of all
rows in descending prefix survival `a_{r,k} = c_{r,1} ... c_{r,k}` and differ in when they stop. That order is a
sequential process: the next draft in it is always the first not yet admitted of some row, and its survival is known
before it is drawn, from drafts that were admitted already. So the survivals up to the point where the walk stands are
fair to use, those beyond it are not, and nothing admitted may be taken back. What each policy knows when it decides:

| policy | about this round | about the past |
|---|---|---|
| `CausalGreedy` | survivals up to the draft in question | nothing |
| `LaggedBudget` | fills a budget with the current survivals | survivals two rounds ago, all of them: the budget |
| `Lookahead` | survivals up to the draft in question | mean confidence per position: what lies beyond |

They know no models, tokens or randomness; cost comes as seconds per number of admitted drafts.

Shape legend: R active rows, K drafted positions, N = R * K.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .outlook import Outlook
from .round_cost import RoundCost
from .scheduling import CallSetting, RoundOutcome, Scheduler, ScheduleRequest


@dataclass(frozen=True, slots=True, eq=False)
class Ranking:
    """
    The drafts of a round in the order in which they are admitted: prefix survival descending, then row, then position.

    Attributes:
        survival (`np.ndarray` of shape `[R, K]`): Prefix survival, times the weight of the row; 0 where it may not go.
        limits (`np.ndarray` of shape `[R]`): Most drafts of every row.
        rows (`np.ndarray` of shape `[n]`): Entry of the request that each admissible draft belongs to, in order.
        sorted_survival (`np.ndarray` of shape `[n]`): Their survivals.
    """

    survival: np.ndarray
    limits: np.ndarray
    rows: np.ndarray
    sorted_survival: np.ndarray

    @classmethod
    def of(cls, confidence: np.ndarray, max_lengths: Sequence[int], weights: np.ndarray | float = 1.0) -> "Ranking":
        """
        From conditional confidences `[R, K]`; one that is not a number counts as 0, as all after it then do. `weights`
        `[R]`, known before the round, say what a token of each row is worth.
        """
        limits = np.asarray(max_lengths)
        survival = np.nan_to_num(confidence.astype(np.float64)).clip(0, 1).cumprod(axis=1)
        survival = survival * np.reshape(weights, (-1, 1))
        num_drafts = survival.shape[1]
        survival = np.where(np.arange(num_drafts) < limits[:, None], survival, 0.0)
        order = np.argsort(-survival, axis=None, kind="stable")
        sorted_survival = survival.ravel()[order]
        count = int(np.searchsorted(-sorted_survival, 0.0))  # a draft that cannot survive is worth nothing
        return cls(survival, limits, order[:count] // max(num_drafts, 1), sorted_survival[:count])

    def lengths(self, count: int) -> list[int]:
        """Verify lengths when the first `count` drafts are admitted."""
        return np.bincount(self.rows[:count], minlength=len(self.limits)).tolist()

    def throughput(self, seconds: np.ndarray) -> np.ndarray:
        """Expected tokens per second for every number of admitted drafts: Theta, `[n + 1]`."""
        tokens = len(self.limits) + np.concatenate([[0.0], self.sorted_survival.cumsum()])
        return tokens / seconds[: len(tokens)]


def lower_envelope(seconds: np.ndarray) -> np.ndarray:
    """The largest convex function that is nowhere above `seconds [N + 1]`."""
    heights = seconds.tolist()
    corners: list[int] = []
    for point, height in enumerate(heights):
        while len(corners) > 1:
            left, middle = corners[-2], corners[-1]
            if (heights[middle] - heights[left]) * (point - left) < (height - heights[left]) * (middle - left):
                break
            corners.pop()
        corners.append(point)
    return np.interp(np.arange(len(heights)), corners, seconds[corners])


class CostedPolicy(Scheduler):
    """A policy that decides with costs, which belong to a call: [`~Scheduler.for_call`] gives what does the work."""

    @property
    def uses_cost(self) -> bool:
        return True

    def verify_lengths(self, request: ScheduleRequest) -> list[int]:
        raise RuntimeError(f"{self} schedules within a call; ask what `for_call(CallSetting(...))` returns.")


@dataclass(frozen=True)
class CausalGreedy(CostedPolicy):
    """
    Algorithm 1 of the paper: admits the next best draft while expected tokens per second grow, and stops at the first
    drop.

    On a jagged cost curve the first drop may hide a better length behind it (one token 66 ms, two 110, eight 120: the
    walk never starts). `envelope=True` walks on the lower convex envelope of the cost instead, on which the first drop
    is the global optimum. The envelope depends on the machine alone, so the walk stays causal; it may verify where the
    true cost says that nothing pays.

    Args:
        envelope (`bool`, *optional*, defaults to `False`): Walk on the convex envelope of the cost.
    """

    envelope: bool = False

    @property
    def requires_confidence(self) -> bool:
        return True

    def for_call(self, setting: CallSetting) -> Scheduler:
        return _CausalGreedyCall(self, setting)


@dataclass(frozen=True)
class LaggedBudget(CostedPolicy):
    """
    How the paper schedules ahead of time (section 5.2): the number of drafts is the unconstrained optimum for the
    confidences of an earlier round, the drafts that get it are the current best.

    The whole table of the earlier round may be searched, as all of its drafts were drawn and judged long ago. The
    budget is stale by `lag` rounds: after a change of text it verifies too much or too little for that long. In the
    first rounds it is found by the walk of [`CausalGreedy`].

    Args:
        lag (`int`, *optional*, defaults to 2): Rounds between the search and the use of a budget, at least 1.
    """

    lag: int = 2

    def __post_init__(self) -> None:
        if not isinstance(self.lag, int) or isinstance(self.lag, bool):
            raise TypeError(f"`lag` must be an integer, but is {self.lag!r}.")
        if self.lag < 1:
            raise ValueError(
                f"`lag` must be 1 round or more (0 would look at the drafts it decides about): {self.lag}."
            )

    @property
    def requires_confidence(self) -> bool:
        return True

    def for_call(self, setting: CallSetting) -> Scheduler:
        return _LaggedBudgetCall(self, setting)


@dataclass(frozen=True)
class Lookahead(CostedPolicy):
    """
    Algorithm 1's walk that looks ahead before it stops: neither stale nor trapped before a cliff.

    Where the next draft does not pay by itself, the survivals beyond it are forecast: the known survival of each row's
    next draft times the mean confidences per position of earlier rounds. If some number of further drafts is expected
    to pay, as many are admitted (and stay so, whatever their survivals turn out to be), and the walk goes on from
    there. With forecasts that come true it finds the global optimum of any cost curve.

    Differs from Algorithm 1 in what "pays" means, too: time is charged at `rate`, the tokens per second that decoding
    makes in the long run, and not at the best rate of this very round. A round of poor drafts is then cut short even
    where verifying them would be the best that this round can do, since what it saves is better spent on the next.

    Works without a confidence head as well: survivals are then what earlier rounds accepted at each position.
    """

    def for_call(self, setting: CallSetting) -> "LookaheadCall":
        return LookaheadCall(self, setting)


class _CostedCall(Scheduler):
    """A policy at work in one `generate` call."""

    def __init__(self, policy: Scheduler, setting: CallSetting):
        if setting.cost is None:
            raise ValueError(
                f"{policy} needs to know what rounds cost here. Pass a profile, "
                "`drafter.with_options(sps_profile=...)`: it is not measured, since HF_DSPARK_NO_PROFILE is set or "
                "the target's requests cannot be packed. FixedLength and ConfidenceThreshold do without."
            )
        self.policy, self.setting = policy, setting
        self.cost: RoundCost = setting.cost

    def __repr__(self) -> str:
        return repr(self.policy)

    @property
    def requires_confidence(self) -> bool:
        return self.policy.requires_confidence

    def seconds(self, request: ScheduleRequest) -> np.ndarray:
        return self.cost.seconds(len(request.rows), self.setting.num_drafts, request.context)

    def ranking(self, request: ScheduleRequest) -> Ranking:
        if request.confidence is None:
            raise ValueError(f"{self} needs a drafter with a confidence head, but this one has none; use FixedLength.")
        return Ranking.of(request.confidence.numpy(), request.max_lengths)


class _CausalGreedyCall(_CostedCall):
    policy: CausalGreedy

    def verify_lengths(self, request: ScheduleRequest) -> list[int]:
        ranking, seconds = self.ranking(request), self.seconds(request)
        if self.policy.envelope:
            seconds = lower_envelope(seconds)
        return ranking.lengths(first_drop(ranking.throughput(seconds)))


class _LaggedBudgetCall(_CostedCall):
    policy: LaggedBudget

    def __init__(self, policy: LaggedBudget, setting: CallSetting):
        super().__init__(policy, setting)
        self._earlier: deque[ScheduleRequest] = deque(maxlen=policy.lag)

    def verify_lengths(self, request: ScheduleRequest) -> list[int]:
        ranking, seconds = self.ranking(request), self.seconds(request)
        earlier = self._earlier[0] if len(self._earlier) == self.policy.lag else None
        rows = set(request.rows)
        still = [] if earlier is None else [entry for entry, row in enumerate(earlier.rows) if row in rows]
        self._earlier.append(request)
        if earlier is None or len(still) < len(request.rows):
            return ranking.lengths(first_drop(ranking.throughput(seconds)))
        confidence = earlier.confidence.numpy()[still]  # type: ignore[union-attr]  # it was ranked then
        before = Ranking.of(confidence, [earlier.max_lengths[entry] for entry in still])
        return ranking.lengths(int(before.throughput(seconds).argmax()))


class LookaheadCall(_CostedCall):
    """[`Lookahead`] at work in one `generate` call; `rate` may be set by whoever knows the long run better."""

    def __init__(self, policy: Scheduler, setting: CallSetting):
        super().__init__(policy, setting)
        self.outlook = Outlook(setting.num_drafts, setting.acceptance)
        self.rate: float | None = None  # tokens per second over plain decoding's; None: what the outlook promises

    def verify_lengths(self, request: ScheduleRequest) -> list[int]:
        num_rows, seconds = len(request.rows), self.seconds(request)
        forecast = self.outlook.survival[: max(request.max_lengths)]
        if request.confidence is None:
            confidence = np.tile(self.outlook.acceptance[: len(forecast)], (num_rows, 1))
        else:
            confidence = self.outlook.corrected(request.confidence.numpy())[:, : len(forecast)]
        ranking = Ranking.of(confidence, request.max_lengths, self.weights(request))
        return ranking.lengths(look_ahead(ranking, forecast, seconds, self.long_run_rate(num_rows, request.context)))

    def weights(self, request: ScheduleRequest) -> np.ndarray | float:
        """What a token of each row is worth, `[R]`; from finished rounds alone."""
        return 1.0

    def long_run_rate(self, num_rows: int, context: float) -> float:
        """Tokens per second to charge time at: what drafting is expected to give, plain decoding at the least."""
        plain = num_rows / self.cost.plain_seconds(num_rows, context)
        if self.rate is not None:
            return plain * max(1.0, self.rate)
        seconds = self.cost.seconds(num_rows, self.setting.num_drafts, context)
        return max(plain, float(self.outlook.throughput(num_rows, seconds).max()))

    def observe(self, outcome: RoundOutcome) -> None:
        self.outlook.observe(outcome)


def first_drop(values: np.ndarray) -> int:
    """Index of the last value before the first that is not above the one before it."""
    drops = np.flatnonzero(values[1:] <= values[:-1])
    return int(drops[0]) if len(drops) else len(values) - 1


def look_ahead(ranking: Ranking, forecast: np.ndarray, seconds: np.ndarray, rate: float) -> int:
    """
    How many drafts of `ranking` to admit.

    Args:
        ranking ([`Ranking`]): Read only as far as the walk has come.
        forecast (`np.ndarray` of shape `[K]`): Prefix survival to expect of any row.
        seconds (`np.ndarray` of shape `[N + 1]`): Seconds of the round by admitted drafts.
        rate (`float`): Tokens that a second is worth.
    """
    charges = rate * np.diff(seconds)  # of each further draft
    forecast = np.maximum(forecast, 1e-12)  # only ratios matter
    admitted, available = 0, len(ranking.rows)
    positions = np.arange(len(forecast))
    while admitted < available:
        gains = ranking.sorted_survival[admitted:] - charges[admitted:available]
        admitted += int(np.argmax(gains <= 0)) if (gains <= 0).any() else len(gains)
        if admitted == available:
            break
        lengths = np.bincount(ranking.rows[:admitted], minlength=len(ranking.limits))
        open_rows = np.flatnonzero(lengths < ranking.limits)
        start, limit = lengths[open_rows], ranking.limits[open_rows]
        frontier = ranking.survival[open_rows, start]
        beyond = frontier[:, None] * (forecast / forecast[start][:, None])
        expected = beyond[(positions >= start[:, None]) & (positions < limit[:, None])]
        balance = np.sort(expected)[::-1].cumsum() - charges[admitted : admitted + len(expected)].cumsum()
        best = int(balance.argmax())
        if not balance[best] > 0:
            break
        admitted = min(admitted + best + 1, available)
    return admitted
