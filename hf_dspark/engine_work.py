"""What an engine does in a step: ended requests leave, prompts are read, a round is played.

Contract: an [`EngineWork`] has the queue, the prompt that is being read and the running batch; one thread at a time
works on it. A request that goes wrong ends alone; if a round as a whole goes wrong, all that were in it do, and the
next ones get fresh caches. Who steps, and what a request is, is decided elsewhere (`engine.py`, `requests.py`).

Source: https://huggingface.co/papers/2607.05147, section 3.2.
"""

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Callable
from types import FrameType, TracebackType

import torch
from transformers.utils import logging

from .admission import Admission
from .call_schedule import CallSchedule
from .engine_loop import EngineLoop
from .engine_thread import Bell
from .request_settings import RequestSettings
from .requests import Request
from .target import TargetView

logger = logging.get_logger(__name__)

IDLE_CHUNKS = 8  # while no row is kept waiting, so many chunks of prompts are read in a step


@dataclasses.dataclass(frozen=True, slots=True)
class EngineStep:
    """
    What a step of an engine did.

    Attributes:
        step (`int`): Number of the step; the `step` of its [`DecodingRound`]s.
        num_running (`int`): Rows that were in the round; 0 if prompts were all there was to read.
        num_waiting (`int`): Requests that wait, after the step.
        batch_tokens (`int`): Tokens of the round's verification, B.
        num_drafts_verified (`int`): Drafts among them.
        seconds (`float`): What the round took, callbacks left out; 0 without one.
        predicted_seconds (`float`, *optional*): What the schedule took it to last; `None` where costs are not known.
        prefill_tokens (`int`): Tokens of prompts that were read before the round.
        prefill_seconds (`float`): What that took.
    """

    step: int
    num_running: int
    num_waiting: int
    batch_tokens: int
    num_drafts_verified: int
    seconds: float
    predicted_seconds: float | None
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0


class EngineWork:
    """
    Args:
        view ([`TargetView`]): Target and drafter.
        plan ([`CallSchedule`]): The engine's schedule.
        device (`torch.device`): Where ids live.
        bell ([`Bell`]): Guards the queue, and says whether the engine is closed.
        num_slots (`int`): The most rows at a time.
        prefill_chunk (`int`): Tokens of a prompt that are read between two rounds.

    Attributes:
        waiting (`deque`): Requests that wait, with what they decode by.
    """

    def __init__(
        self,
        view: TargetView,
        plan: CallSchedule,
        device: torch.device,
        bell: Bell,
        *,
        num_slots: int,
        prefill_chunk: int,
    ):
        self.view, self.plan, self.device, self.bell = view, plan, device, bell
        self.num_slots, self.prefill_chunk = num_slots, prefill_chunk
        self.waiting: deque[tuple[Request, RequestSettings]] = deque()
        self._admission: Admission | None = None
        self._loop: EngineLoop | None = None
        self._step = 0

    @property
    def admitted(self) -> list[Request]:
        """Requests that have a place: those being decoded, and one whose prompt is being read."""
        loop, admission = self._loop, self._admission
        return ([] if loop is None else loop.requests) + ([] if admission is None else [admission.request])

    @property
    def num_admitted(self) -> int:
        """How many they are."""
        loop = self._loop
        return (0 if loop is None else loop.num_active) + (self._admission is not None)

    def turn(self, on_step: Callable[[EngineStep], None] | None) -> bool:
        """One step; whether there is anything left to do."""
        if not self.bell.closed:
            try:
                self._drop_ended()
                began = time.perf_counter()
                num_tokens = self._read_prompts()
                self._play_round(num_tokens, time.perf_counter() - began, on_step)
            finally:
                if self._loop is not None:
                    release_frames(self._loop.tracebacks)
        return self.tidy()

    def tidy(self) -> bool:
        """Drops what nobody needs any more; whether there is anything left to do."""
        if self.bell.closed:
            for request in self.admitted:  # also those that were on their way when the engine was closed
                request.cancel()
            self._drop_ended()
        if self.num_admitted == 0 and not self.waiting:
            self._loop = None  # an idle engine holds no cache
            return False
        return not self.bell.closed

    def fail(self, error: BaseException) -> None:
        """
        A step has failed, and nobody knows where it left things: ends whoever has a place, with the error. If nobody
        has one, and the error is not a callback's interruption, the next that waits, so that the queue gets shorter.
        """
        requests, self._admission, self._loop = self.admitted, None, None
        with self.bell.condition:
            if not requests and self.waiting and isinstance(error, Exception):
                requests.append(self.waiting.popleft()[0])
                self.bell.condition.notify_all()
        if isinstance(error, Exception):  # others, those have seen who are concerned
            release_frames([error.__traceback__])
        for request in requests:
            with contextlib.suppress(BaseException):  # of its streamer
                request.finish(error)

    def _drop_ended(self) -> None:
        if self._admission is not None and self._admission.request.done:
            request, self._admission = self._admission.request, None
            request.finish()
        if self._loop is not None:
            self._loop.drop_ended()

    def _read_prompts(self) -> int:
        """Reads a chunk of a prompt, or several if no row waits for it; returns how many tokens that were."""
        if self._loop is None:
            self._loop = EngineLoop(self.view, self.plan, self.device, self.num_slots)
        loop, num_tokens = self._loop, 0
        running = loop.num_active > 0
        budget = self.prefill_chunk * (1 if running else IDLE_CHUNKS)
        while num_tokens < budget and (admission := self._next_admission(loop)) is not None:
            count = min(admission.num_left, budget - num_tokens)
            num_tokens += count
            try:
                admission.read(count)
                if admission.num_left == 0:
                    self._admission = None
                    loop.admit(admission)
            except BaseException as error:
                self._admission = None
                loop.tracebacks.append(error.__traceback__)  # before anybody sees the error
                admission.request.finish(error)
                if not isinstance(error, Exception):
                    raise
            if running:
                break
        return num_tokens

    def _next_admission(self, loop: EngineLoop) -> Admission | None:
        """The prompt to read on: the one begun, or the next that waits if there is a place for it."""
        while self._admission is None and loop.num_active < self.num_slots:
            with self.bell.condition:
                if not self.waiting:
                    break
                request, settings = self.waiting.popleft()
                self.bell.condition.notify_all()  # there is room
            if request.begin():
                keep_context = self.plan.draft_length > 0
                self._admission = Admission(self.view, request, settings, keep_context=keep_context)
        return self._admission

    def _play_round(
        self, prefill_tokens: int, prefill_seconds: float, on_step: Callable[[EngineStep], None] | None
    ) -> None:
        loop = self._loop
        if loop is None or (loop.num_active == 0 and prefill_tokens == 0):
            return
        num_running, began, waited = loop.num_active, time.perf_counter(), loop.waited_seconds
        if num_running > 0:
            loop.step = self._step
            try:
                loop.round()
            except BaseException as error:
                self._give_up(loop, error)
                if not isinstance(error, Exception):
                    del loop  # it would live as long as the error
                    raise
                return
        verified = sum(loop.lengths) if num_running else 0
        done = EngineStep(
            step=self._step,
            num_running=num_running,
            num_waiting=len(self.waiting),
            batch_tokens=num_running + verified,
            num_drafts_verified=verified,
            seconds=time.perf_counter() - began - (loop.waited_seconds - waited) if num_running else 0.0,
            predicted_seconds=self.plan.predicted_seconds if num_running else None,
            prefill_tokens=prefill_tokens,
            prefill_seconds=prefill_seconds,
        )
        self._step += 1
        if on_step is not None:
            try:
                on_step(done)
            except Exception as error:
                logger.warning(f"An error in on_step was ignored: {error!r}")

    def _give_up(self, loop: EngineLoop, error: BaseException) -> None:
        """A round has failed: nobody knows what the caches hold."""
        self._loop, self._step = None, self._step + 1
        requests = loop.requests
        release_frames([error.__traceback__, *loop.tracebacks])
        for request in requests:
            request.finish(error)
        logger.warning(f"A round failed, and with it the {len(requests)} requests that were in it: {error!r}")


def release_frames(tracebacks: list[TracebackType | None]) -> None:
    """
    Drops the variables of the calls that errors came through, and of their callers, as far as they have ended: they
    hold the tensors of a whole round for as long as somebody keeps the error. Its traceback stays readable.

    Args:
        tracebacks (`list[TracebackType | None]`): As they were before anybody else could raise the errors again, and
            so put calls of their own, a suspended generator's perhaps, in front. Emptied.
    """
    for traceback in tracebacks:
        step = traceback
        while step is not None:
            frame: FrameType | None = step.tb_frame
            while frame is not None:
                try:
                    frame.clear()
                except RuntimeError:  # still at work, and so are its callers
                    break
                frame = frame.f_back
            step = step.tb_next
    tracebacks.clear()
