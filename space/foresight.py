"""What a schedule would check at other loads: asked about the newest drafts, as if so many answers had made them.

Contract: asks the engine's own scheduler, with what it has learned and with the engine's costs; decides nothing and
leaves nothing behind in it. A forecast, and called so: answers that really come along bring other drafts.

Shape legend: R answers at once, K drafts a block.
"""

import copy
import time
from collections.abc import Sequence
from typing import Any

import torch

from hf_dspark.auto import AutoCall
from hf_dspark.policies import LookaheadCall
from hf_dspark.scheduling import Scheduler, ScheduleRequest

MOST_ROUNDS = 12  # that are asked about at each load
PAUSE_SECONDS = 1.0  # between two forecasts for one engine


class Foresight:
    """The forecast of one engine, made anew once a second at most, however many visitors look at it."""

    def __init__(self) -> None:
        self._lengths: list[float] = []
        self._due = 0.0

    def lengths(self, scheduler: Scheduler, newest: Sequence[Sequence[float]], **setting: Any) -> list[float]:
        """What [`lengths_by_load`] says, or said a moment ago."""
        if time.monotonic() >= self._due:
            self._lengths = lengths_by_load(scheduler, newest, **setting)
            self._due = time.monotonic() + PAUSE_SECONDS
        return self._lengths


def lengths_by_load(
    scheduler: Scheduler, newest: Sequence[Sequence[float]], *, context: float, most_rows: int
) -> list[float]:
    """
    Drafts that would be checked per answer and step.

    Args:
        scheduler ([`~hf_dspark.scheduling.Scheduler`]): The one at work.
        newest (`Sequence[Sequence[float]]`): Confidences `[K]` of the newest blocks of drafts.
        context (`float`): Tokens of an answer, prompt included.
        most_rows (`int`): The most answers at once.

    Returns:
        `list[float]`: for 1, 2, ... `most_rows` answers at once; empty if nothing is known yet.
    """
    longest = max(map(len, newest), default=0)
    blocks = [tuple(block) for block in newest if len(block) == longest]
    if not longest:
        return []
    if isinstance(scheduler, LookaheadCall):
        scheduler = copy.copy(scheduler)
    return [_mean_length(scheduler, blocks, num_rows, context) for num_rows in range(1, most_rows + 1)]


def _mean_length(scheduler: Scheduler, blocks: Sequence[Sequence[float]], num_rows: int, context: float) -> float:
    num_rounds = min(MOST_ROUNDS, max(len(blocks) // num_rows, 1))
    verified, tokens, seconds = 0, 0.0, 0.0
    for number in range(num_rounds):
        rows = [blocks[-1 - (number * num_rows + row) % len(blocks)] for row in range(num_rows)]
        limits = [len(rows[0])] * num_rows
        request = ScheduleRequest(torch.tensor(rows), limits, rows=range(num_rows), step=0, context=context)
        if not isinstance(scheduler, LookaheadCall):
            verified += sum(scheduler.verify_lengths(request))
            continue
        scheduler.rate = None  # what drafts bring in the long run is another matter at another load
        lengths = LookaheadCall.verify_lengths(scheduler, request)
        verified += sum(lengths)
        tokens += num_rows + float(scheduler.outlook.promised(request, lengths).sum())
        seconds += scheduler.cost.predict(num_rows, sum(lengths), context, drafted=True)
    if (
        isinstance(scheduler, AutoCall)
        and tokens * scheduler.cost.plain_seconds(num_rows, context) < num_rows * seconds
    ):
        return 0.0  # it would decode plainly
    return verified / (num_rounds * num_rows)
