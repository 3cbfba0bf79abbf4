"""What a round takes on this machine right now: a measured profile, corrected by the rounds that decoding runs.

Contract: pure arithmetic on numbers. A profile says what a round of so many tokens took when it was measured; machines
throttle, share their cores and change their minds, so every finished round pulls the prediction towards what was seen:
part of a surprise is taken as the speed of the machine, the rest as belonging to rounds of that size. One `RoundCost`
serves all calls on a pair of models, from any thread.

Source: https://huggingface.co/papers/2607.05147, section 3.2. Shape legend: R active rows, K drafts a block, B tokens
of a verification.
"""

import functools
import math
import threading
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

if TYPE_CHECKING:
    from torch import nn

    from .sps_profile import SPSProfile

# Share of a surprise that enters the prediction at once: single rounds are noisy, slow phases last for many rounds.
SPEED_SHARE = 0.1
KIND_SHARE = 0.1
SIZE_SHARE = 0.1
PLAIN_WEIGHT = 2  # plain rounds are few while drafting pays, so each of them counts for more
# While all rounds draft, nothing is learned about plain ones; after so many a plain one is due, sooner at first and
# where drafting gains little.
PLAIN_EVERY, FIRST_PLAIN = 64, 8
# A round that took more than twice (or less than half) the prediction was interrupted; it counts as that much.
LARGEST_SURPRISE = math.log(2)
MOST_TABLES = 512  # kept at a time; a table is R * K + 1 numbers
MOST_SIZES = 4096  # single numbers that are kept
CONTEXT_STEP = 64  # contexts are taken in steps of so many tokens

# Rounds of similar size share what is learned about them: 1, 2, 3, 4, 5-6, 7-8, 9-12, 13-16, 17-24, ... tokens.
_SIZE_ENDS = np.array([1, *(end for power in range(1, 24) for end in (2**power, 3 * 2 ** (power - 1)))])


class RoundCost:
    """
    Predicted seconds of a round.

    Args:
        profile ([`SPSProfile`]): Measured step times.
        refine (`bool`, *optional*, defaults to `True`): Whether `observe` corrects the profile.
    """

    def __init__(self, profile: "SPSProfile", *, refine: bool = True):
        self.profile, self.refine = profile, refine
        self._lock = threading.Lock()
        self._speed = 0.0  # log of measured over profiled seconds, all rounds
        self._by_kind = np.zeros(2)  # on top of it, of plain rounds and of those that draft
        self._by_size = np.zeros((2, len(_SIZE_ENDS)))  # on top of both: [drafted, size of the verification]
        self._since_plain = np.zeros(len(_SIZE_ENDS))  # drafted rounds, by size of the batch
        self._plain_seen = np.zeros(len(_SIZE_ENDS), dtype=bool)
        self._tables: dict[tuple[int, int, int], tuple[np.ndarray, np.ndarray]] = {}

        @functools.lru_cache(maxsize=MOST_SIZES)
        def profiled_round(num_rows: int, verified: int, step: int, drafted: bool) -> float:
            tokens, context = num_rows + verified, step * CONTEXT_STEP
            return float(profile.round_seconds(tokens, context=context, num_requests=num_rows, drafted=drafted))

        self._profiled_round = profiled_round

    def seconds(self, num_rows: int, num_drafts: int, context: float) -> np.ndarray:
        """
        Seconds of a round that drafts, for every total verify length.

        Args:
            num_rows (`int`): R.
            num_drafts (`int`): K.
            context (`float`): Mean number of cached tokens of a row.

        Returns:
            `np.ndarray` of shape `[R * K + 1]`: entry n verifies n drafts in all, that is, `B = R + n` tokens.
        """
        table, sizes = self._profiled(num_rows, num_drafts, context)
        with self._lock:
            return table * np.exp(self._speed + self._by_kind[1] + self._by_size[1, sizes])

    def plain_seconds(self, num_rows: int, context: float) -> float:
        """Seconds of a round that drafts nothing: one token for each of `num_rows` rows."""
        step = _step(context)
        drafts = self._profiled_round(num_rows, 0, step, True) - self._profiled_round(num_rows, 0, step, False)
        with self._lock:
            plain = self._learned(num_rows, 0, context, drafted=False)
            with_drafts = self._learned(num_rows, 0, context, drafted=True)
            drafts *= math.exp(self._speed)
        # Whatever was measured: a round that verifies no draft is a plain one, and the drafting on top of it.
        return min(plain, max(with_drafts - drafts, with_drafts / 2))

    def plain_is_due(self, num_rows: int, gain: float = 2.0) -> bool:
        """
        Whether a plain round of `num_rows` rows should be run soon, to know what it takes.

        Args:
            num_rows (`int`): R.
            gain (`float`, *optional*): Tokens per second of drafting over plain decoding. The nearer to 1, the more
                hangs on what a plain round takes, and the less is lost by one: they fall due more often.
        """
        size = _size(num_rows)
        every = min(max(PLAIN_EVERY * (gain - 1), FIRST_PLAIN), PLAIN_EVERY)
        with self._lock:
            return bool(self.refine and self._since_plain[size] >= (every if self._plain_seen[size] else FIRST_PLAIN))

    def predict(self, num_rows: int, verified: int, context: float, *, drafted: bool) -> float:
        """Seconds of one round: `verified` drafts in all rows together."""
        if not drafted:
            return self.plain_seconds(num_rows, context)
        with self._lock:
            return self._learned(num_rows, verified, context, drafted=True)

    def observe(self, num_rows: int, verified: int, context: float, seconds: float, *, drafted: bool) -> None:
        """
        Learns from a finished round.

        Args:
            num_rows (`int`): R.
            verified (`int`): Drafts verified in all rows together.
            context (`float`): Mean number of cached tokens of a row.
            seconds (`float`): What the round took.
            drafted (`bool`): Whether it drafted.
        """
        if not self.refine or not seconds > 0:
            return
        kind, size = int(drafted), _size(num_rows + verified)
        weight = 1 if drafted else PLAIN_WEIGHT
        with self._lock:  # from the prediction on: two threads must not both correct what one of them has put right
            # Each kind learns its own durations. What is known of plain rounds from the other kind is left out here:
            # no correction could satisfy both where drafting takes no time, and the speed would be torn between them.
            surprise = math.log(seconds / self._learned(num_rows, verified, context, drafted=drafted))
            surprise = min(max(surprise, -LARGEST_SURPRISE), LARGEST_SURPRISE)
            self._speed += SPEED_SHARE * surprise
            self._by_kind[kind] += KIND_SHARE * surprise
            self._by_size[kind, size] += SIZE_SHARE * weight * surprise
            self._since_plain[_size(num_rows)] = self._since_plain[_size(num_rows)] + 1 if drafted else 0
            self._plain_seen[_size(num_rows)] |= not drafted

    def _learned(self, num_rows: int, verified: int, context: float, *, drafted: bool) -> float:
        """The profile's seconds, corrected by rounds of this kind and size."""
        seconds = self._profiled_round(num_rows, verified, _step(context), drafted)
        kind, size = int(drafted), _size(num_rows + verified)
        return seconds * math.exp(self._speed + self._by_kind[kind] + self._by_size[kind, size])

    def _profiled(self, num_rows: int, num_drafts: int, context: float) -> tuple[np.ndarray, np.ndarray]:
        """The profile's table, and the size class of each entry."""
        step = _step(context)
        key = (num_rows, num_drafts, step)
        found = self._tables.get(key)
        if found is None:
            batch_tokens: np.ndarray = num_rows + np.arange(num_rows * num_drafts + 1)
            table = self.profile.round_seconds(
                batch_tokens, context=step * CONTEXT_STEP, num_requests=num_rows, drafted=True
            )
            found = (np.asarray(table), np.searchsorted(_SIZE_ENDS, batch_tokens))
            if len(self._tables) >= MOST_TABLES:
                self._tables.clear()
            self._tables[key] = found
        return found


def shared_cost(target: "nn.Module", profile: "SPSProfile", *, do_sample: bool = False) -> RoundCost:
    """
    The one `RoundCost` of a target and a profile, so that a call begins with what earlier calls learned. Sampling has
    its own: draws and residuals take time that greedy rounds do not need, and that profiles do not know.
    """
    with _LOCK:
        costs = _COSTS.setdefault(target, {})
        key = (id(profile), do_sample)
        if key not in costs:  # the cost holds the profile, so its id stays its own
            costs[key] = RoundCost(profile)
        return costs[key]


def _step(context: float) -> int:
    return round(context / CONTEXT_STEP)


def _size(batch_tokens: int) -> int:
    return int(np.searchsorted(_SIZE_ENDS, batch_tokens))


_LOCK = threading.Lock()
_COSTS: "WeakKeyDictionary[nn.Module, dict[tuple[int, bool], RoundCost]]" = WeakKeyDictionary()
