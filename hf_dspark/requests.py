"""A request of an engine, as those see it who submitted it: from any thread, while it is being served.

Contract: plain values, and waiting for them. A request ends once, as finished, cancelled or failed; whatever comes
later is ignored, so that whoever cancels need not wait for a round in progress. Knows nothing about models or caches.

Shape legend: S prompt width.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .rounds import DecodingRound
from .streaming import failures_reach_the_reader

WAITING, PREFILLING, RUNNING = "waiting", "prefilling", "running"
FINISHED, CANCELLED, FAILED = "finished", "cancelled", "failed"


class EngineFull(RuntimeError):
    """As many requests wait as may; the message says how many, and what to do."""


class RequestCancelled(RuntimeError):
    """
    The request was cancelled before it was finished.

    Attributes:
        sequences (`torch.LongTensor` of shape `[1, S + new tokens]`): What there was of it.
    """

    def __init__(self, message: str, sequences: torch.LongTensor):
        super().__init__(message)
        self.sequences = sequences


class Request:
    """
    What [`DSparkEngine.submit`] returns. Iterating gives every [`DecodingRound`] of the request as it happens, from
    the first on, and ends with the request; if it failed, with its error.

    Attributes:
        id (`int`): 0, 1, 2, ... in order of submission; the `row` of its rounds.
        state (`str`): "waiting", "prefilling", "running", then "finished", "cancelled" or "failed".
        prompt_ids (`list[int]`): The prompt.
        first_id (`int`, *optional*): The first new token. It comes from the prompt's prefill and belongs to no round.
        error (`BaseException`, *optional*): What it failed with.
        submitted_at, started_at, first_token_at, finished_at (`float`, *optional*): Seconds on `time.perf_counter`'s
            clock: submission, first of the prompt's tokens read, first new token, end.
    """

    def __init__(
        self,
        request_id: int,
        prompt_ids: torch.LongTensor,
        *,
        streamer: Any,
        on_round: Callable[[DecodingRound], Any] | None,
        withdraw: Callable[["Request"], None],
    ):
        self.id, self.state = request_id, WAITING
        self.prompt_ids: list[int] = prompt_ids.tolist()
        self.first_id: int | None = None
        self.error: BaseException | None = None
        self.submitted_at = time.perf_counter()
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.finished_at: float | None = None
        self._device, self._streamer, self._on_round, self._withdraw = prompt_ids.device, streamer, on_round, withdraw
        self._new_ids: list[int] = []
        self._rounds: list[DecodingRound] = []
        self._changed = threading.Condition()

    def __repr__(self) -> str:
        return f"Request(id={self.id}, state={self.state!r}, new tokens={len(self._new_ids)})"

    @property
    def new_ids(self) -> list[int]:
        """The new tokens so far."""
        with self._changed:
            return list(self._new_ids)

    @property
    def rounds(self) -> list[DecodingRound]:
        """The rounds so far."""
        with self._changed:
            return list(self._rounds)

    @property
    def done(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self.state in (FINISHED, CANCELLED, FAILED)

    def __iter__(self) -> Iterator[DecodingRound]:
        for number in range(1 << 62):
            with self._changed:
                self._changed.wait_for(lambda number=number: self.done or len(self._rounds) > number)  # type: ignore[misc]
                if len(self._rounds) <= number:
                    break
                decoding_round = self._rounds[number]
            yield decoding_round
        if self.error is not None:
            raise self.error

    def result(self, timeout: float | None = None) -> torch.LongTensor:
        """
        Waits for the end; somebody has to step the engine.

        Args:
            timeout (`float`, *optional*): Seconds to wait at most.

        Returns:
            `torch.LongTensor` of shape `[1, S + new tokens]`, as `generate` returns it.

        Raises:
            RequestCancelled: It was cancelled.
            TimeoutError: It has not ended yet.
            BaseException: What the request failed with.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.done, timeout):
                raise TimeoutError(
                    f"request {self.id} is still {self.state} after {timeout} s ({len(self._new_ids)} new tokens); "
                    "wait longer, or see that somebody steps the engine: start() it, or call run()"
                )
        if self.error is not None:
            raise self.error
        sequences = torch.tensor([self.prompt_ids + self._new_ids], device=self._device)
        if self.state == CANCELLED:
            raise RequestCancelled(f"request {self.id} was cancelled after {len(self._new_ids)} new tokens", sequences)
        return sequences

    def cancel(self) -> bool:
        """
        Ends the request now; its place in the batch is free from the next round on. An error of its streamer's end is
        nobody's concern any more.

        Returns:
            `bool`: Whether it was still alive.
        """
        alive = self.end(CANCELLED)
        if alive:
            self._withdraw(self)
            if self.started_at is None:  # the engine never meets it, or else it will
                with contextlib.suppress(Exception):
                    self.close_stream()
        return alive

    # ------------------------------------------------------------------------------------------- for the engine

    def begin(self) -> bool:
        """Notes that the prompt is being read; `False` if the request has ended meanwhile."""
        with self._changed:
            if self.done:
                return False
            self.state, self.started_at = PREFILLING, time.perf_counter()
            return True

    def add_first(self, token_ids: list[int]) -> None:
        """Takes the prefill's token, if it was kept."""
        with self._changed:
            if not self.done:
                self.state, self.first_token_at = RUNNING, time.perf_counter()
                self._new_ids += token_ids
                self.first_id = self._new_ids[0]
                self._changed.notify_all()

    def add_round(self, decoding_round: DecodingRound) -> None:
        """Takes a finished round, and shows it to the callback."""
        with self._changed:
            if self.done:
                return
            self._new_ids += decoding_round.committed_ids
            self._rounds.append(decoding_round)
            self._changed.notify_all()
        if self._on_round is not None:
            self._on_round(decoding_round)

    def end(self, state: str, error: BaseException | None = None) -> bool:
        """Ends the request, unless it has ended already; whether it was still alive."""
        with self._changed:
            if self.done:
                return False
            self.error, self.finished_at = error, time.perf_counter()
            self.state = state
            self._changed.notify_all()
            return True

    def finish(self, error: BaseException | None = None) -> None:
        """Ends the request as finished, or failed, and its stream with it; passes on only what is no `Exception`."""
        if error is None:
            try:
                self.close_stream()
            except BaseException as raised:
                error = raised
                if not isinstance(raised, Exception):
                    self.end(FAILED, raised)
                    raise
        self.end(FINISHED if error is None else FAILED, error)
        with contextlib.suppress(Exception):  # of a request that was cancelled before
            self.close_stream()

    def close_stream(self) -> None:
        """Lets the reader of the request's streamer come to an end, with its error if it failed."""
        streamer, self._streamer, self._on_round = self._streamer, None, None
        if streamer is None:
            return
        if self.error is None:
            streamer.end()
            return
        with contextlib.suppress(BaseException), failures_reach_the_reader(streamer):
            raise self.error
