"""What happened on one engine, all visitors together: the figures that the charts show.

Contract: the engine's thread tells it about steps and rounds, visitors' threads read snapshots of plain numbers.
Bounded: a window of recent steps, and sums. Knows nothing about engines, models or drawing.
"""

import threading
from collections import deque
from dataclasses import dataclass

from hf_dspark.engine import EngineStep
from hf_dspark.rounds import DecodingRound

NUM_BINS = 5
RECENT_STEPS = 256
NEWEST_BLOCKS = 48


@dataclass(frozen=True, slots=True)
class Bin:
    """Drafts whose confidence lay in one fifth: their number, mean confidence, and the share that was accepted."""

    count: int
    predicted: float
    realised: float


@dataclass(frozen=True, slots=True)
class Load:
    """
    Steps that served `num_running` answers at once: how many there were, and drafts verified per answer and step in
    the newest [`RECENT_STEPS`] of them, so that prompts of long ago count no more.
    """

    num_running: int
    num_steps: int
    verify_length: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """
    The figures at one moment.

    Attributes:
        bins (`tuple[Bin | None, ...]` of length 5): By confidence; `None` where there was none.
        loads (`tuple[Load, ...]`): By number of answers at once, ascending; only those that occurred.
        recent (`tuple[tuple[int, float], ...]`): `(batch tokens, seconds)` of recent steps, oldest first.
        num_running (`int`): Answers that the newest step served.
        newest (`tuple[tuple[float, ...], ...]`): Confidences of the newest blocks of drafts, oldest first.
    """

    bins: tuple[Bin | None, ...]
    loads: tuple[Load, ...]
    recent: tuple[tuple[int, float], ...]
    num_running: int
    newest: tuple[tuple[float, ...], ...] = ()


class Ledger:
    """Sums up the steps and rounds of an engine. Give `add_step` and `add_round` to it as callbacks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT_STEPS)
        self._loads: dict[int, tuple[int, deque[int]]] = {}  # answers at once -> steps, drafts verified in recent ones
        self._newest: deque[tuple[float, ...]] = deque(maxlen=NEWEST_BLOCKS)
        self._bins = [[0, 0.0, 0] for _ in range(NUM_BINS)]  # drafts, their confidences summed, accepted
        self._num_running = 0

    def add_step(self, step: EngineStep) -> None:
        """Takes one step of the engine; those that served nobody (a prompt was read) do not count."""
        if not step.num_running or not step.batch_tokens:
            return
        with self._lock:
            self._num_running = step.num_running
            self._recent.append((step.batch_tokens, step.seconds))
            count, verified = self._loads.get(step.num_running, (0, deque(maxlen=RECENT_STEPS)))
            verified.append(step.num_drafts_verified)
            self._loads[step.num_running] = count + 1, verified

    def add_round(self, decoding_round: DecodingRound) -> None:
        """
        Takes one answer's round. A confidence is the chance that a draft stands given that those before it do, so
        the drafts up to and with the first rejected one are counted, and no draft that was not verified.
        """
        reached = min(decoding_round.num_accepted + 1, decoding_round.verify_length)
        with self._lock:
            if decoding_round.confidence:
                self._newest.append(decoding_round.confidence)
            for position, confidence in enumerate(decoding_round.confidence[:reached]):
                entry = self._bins[min(int(confidence * NUM_BINS), NUM_BINS - 1)]
                entry[0] += 1
                entry[1] += confidence
                entry[2] += position < decoding_round.num_accepted

    def snapshot(self) -> Snapshot:
        """The figures now."""
        with self._lock:
            bins = tuple(
                Bin(int(count), total / count, accepted / count) if count else None
                for count, total, accepted in self._bins
            )
            loads = tuple(
                Load(running, count, sum(verified) / len(verified) / running)
                for running, (count, verified) in sorted(self._loads.items())
            )
            return Snapshot(bins, loads, tuple(self._recent), self._num_running, tuple(self._newest))
