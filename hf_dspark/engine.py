"""`DSparkEngine`: many requests at once, each with settings of its own, on the decoding loop of `generate`.

Contract: requests wait in a queue; between rounds, prompts are read a chunk at a time and join the batch where there
is a free slot; all rows of the batch draft, are scheduled and verified together. `submit`, `cancel` and waiting work
from any thread; whoever calls `step` does the work, one at a time: the engine's own thread after `start`, or the
caller.

Source: https://huggingface.co/papers/2607.05147, section 3.2. Shape legend: S prompt width.
"""

import contextlib
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from transformers import PreTrainedModel

from .call_schedule import CallSchedule, measured_cost
from .engine_loop import BareTarget
from .engine_thread import Bell, serve
from .engine_work import EngineStep, EngineWork
from .modeling_dspark import DSparkDrafter
from .packed import packs
from .request_settings import prepare_request
from .requests import EngineFull, Request
from .round_cost import RoundCost
from .rounds import DecodingRound
from .scheduling import Scheduler
from .step_timing import home_device
from .streaming import check_streamer
from .target import TargetView

__all__ = ["DSparkEngine", "EngineStep"]


class DSparkEngine:
    """
    Continuous batching with a DSpark drafter.

    Args:
        target ([`~transformers.PreTrainedModel`]): The model whose text is wanted; must pass `supports_packed`.
        drafter ([`DSparkDrafter`], *optional*): The drafter view; its options count as in `generate`. `None`: the same
            loop without drafts, that is, plain continuous batching.
        max_batch_size (`int`, *optional*, defaults to 8): The most requests that are decoded at a time.
        max_waiting (`int`, *optional*, defaults to 64): The most requests that wait for a place.
        scheduler ([`Scheduler`] or `"auto"`, *optional*): Decides how much is drafted and verified, from confidence,
            load and the measured cost of this machine; by default as the drafter's options say.
        prefill_chunk (`int`, *optional*, defaults to 256): Tokens of a prompt that are read between two rounds.

    Attributes:
        on_step (`Callable[[EngineStep], None]`, *optional*): Told about every step. An error in it is logged.

    Raises:
        ValueError, TypeError: The pair, the scheduler or a number does not fit, or the target cannot be packed.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: DSparkDrafter | None,
        *,
        max_batch_size: int = 8,
        max_waiting: int = 64,
        scheduler: Scheduler | str | None = None,
        prefill_chunk: int = 256,
    ):
        numbers = {"max_batch_size": max_batch_size, "max_waiting": max_waiting, "prefill_chunk": prefill_chunk}
        for name, value in numbers.items():
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} must be an integer, got {value!r}")
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if drafter is None and scheduler is not None:
            raise ValueError("a scheduler decides about drafts: give a drafter, or leave the scheduler out")
        if drafter is not None and scheduler is not None:
            drafter = drafter.with_options(scheduler=scheduler)
        self.max_batch_size, self.max_waiting, self.prefill_chunk = max_batch_size, max_waiting, prefill_chunk
        self.target, self.drafter, self.device = target, drafter, home_device(target)
        self.on_step: Callable[[EngineStep], None] | None = None
        packable, reason = packs(target, {}, self.device, max_length=0)
        if not packable:
            raise ValueError(f"an engine packs its requests, which is not possible for {reason}; call model.generate")
        view = BareTarget(target) if drafter is None else TargetView(target, drafter)
        cost = None if drafter is None else measured_cost(target, drafter, max_batch_size)
        self._plan = CallSchedule(drafter, cost, do_sample=False, drains=False)
        self._bell = Bell()
        self._work = EngineWork(
            view, self._plan, self.device, self._bell, num_slots=max_batch_size, prefill_chunk=prefill_chunk
        )
        self._ids, self._preparing = itertools.count(), 0
        self._stepping, self._stepper = threading.Lock(), 0
        weakref.finalize(self, self._bell.stop)  # also when the interpreter exits

    # --------------------------------------------------------------------------------------------------- requests

    def submit(
        self,
        input_ids: Any,
        *,
        on_round: Callable[[DecodingRound], Any] | None = None,
        generator: torch.Generator | None = None,
        **generate_kwargs: Any,
    ) -> Request:
        """
        Queues a prompt; returns at once.

        Args:
            input_ids (`torch.LongTensor` of shape `[S]` or `[1, S]`, or a mapping with it and `attention_mask`): The
                prompt.
            on_round (`Callable[[DecodingRound], Any]`, *optional*): Called with each of its rounds, by whoever steps.
            generator (`torch.Generator`, *optional*): Makes sampling repeatable: the text depends on the target, the
                prompt and one number drawn from `generator` now, on no other request, schedule or drafter (in
                float32). Without it draws come from torch's global generator, and more drafts are accepted.
            generate_kwargs: Those of `generate`: max_new_tokens, do_sample, temperature, logits_processor,
                stopping_criteria, stop_strings with tokenizer, streamer, generation_config, ...

        Raises:
            EngineFull: `max_waiting` requests wait already.
            ValueError, TypeError: What cannot be served; the message says what to do instead.
            RuntimeError: The engine is closed.
        """
        if on_round is not None and not callable(on_round):
            raise TypeError(f"on_round must be callable with a DecodingRound, got {on_round!r}")
        with self._bell.condition:
            self._check_open()
            num_waiting = self.num_waiting + self._preparing
            if num_waiting >= self.max_waiting:
                raise EngineFull(
                    f"{num_waiting} requests wait already, and max_waiting={self.max_waiting}. Try again when some "
                    "have been served, cancel some, or make the engine with a larger max_waiting"
                    + ("" if self._bell.thread else " (nobody serves it: start() it, or call run())")
                )
            self._preparing += 1
        settings, shared = None, None if self.drafter is None else self.drafter.options.generator
        try:
            settings = prepare_request(
                self.target,
                input_ids,
                generate_kwargs,
                device=self.device,
                generator=generator,
                shared_generator=shared,
            )
        finally:
            with self._bell.condition:
                self._preparing -= 1
                self._bell.condition.notify_all()  # there may be room
                if settings is not None:
                    self._check_open()
                    request = Request(
                        next(self._ids),
                        settings.prompt,
                        streamer=settings.streamer,
                        on_round=self._told(on_round),
                        withdraw=self._withdraw,
                    )
                    self._work.waiting.append((request, settings))
                    self._bell.ring()
        return request

    def generate_batch(self, input_ids: Sequence[Any], **generate_kwargs: Any) -> list[torch.LongTensor]:
        """
        Serves prompts, any number of them, and returns their sequences in order.

        Args:
            input_ids (`Sequence`): Prompts as `submit` takes them.
            generate_kwargs: Those of `submit`, for all of them.

        Returns:
            `list[torch.LongTensor]`: for each prompt `[1, S + new tokens]`.

        Raises:
            BaseException: What the first of them failed with; the others are cancelled.
            TypeError: A mapping was given, which is one prompt, or a padded batch of them.
        """
        if isinstance(input_ids, Mapping):
            raise TypeError(
                f"generate_batch takes a list of prompts, got a mapping with {sorted(input_ids)}. For one prompt give "
                "[mapping]; for a padded batch a mapping for each row: "
                '[{"input_ids": ids, "attention_mask": mask} for ids, mask in zip(input_ids, attention_mask)]'
            )
        check_streamer(generate_kwargs.get("streamer"), len(input_ids))
        requests: list[Request] = []
        try:
            for ids in input_ids:
                requests.append(self._submit_when_there_is_room(ids, **generate_kwargs))
            if self._bell.thread is None:
                self.run()
            return [request.result() for request in requests]
        except BaseException:
            for request in requests:
                request.cancel()
            raise

    @property
    def num_running(self) -> int:
        """Requests that have a place: those being decoded, and one whose prompt is being read."""
        return self._work.num_admitted

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place."""
        return len(self._work.waiting)

    @property
    def scheduler(self) -> Scheduler:
        """The schedule at work, with what it has learned so far; not to be told anything."""
        return self._plan.scheduler

    @property
    def cost(self) -> RoundCost | None:
        """What rounds take on this machine, as refined by the engine's; `None` if the scheduler needs no cost."""
        return self._plan.cost

    # ------------------------------------------------------------------------------------------------------- work

    @torch.no_grad()
    def step(self) -> bool:
        """
        One turn: ended requests leave, prompts are read, a round is played.

        Returns:
            `bool`: Whether there is anything left to do.

        Raises:
            RuntimeError: Called from within a step, by a callback.
        """
        if self._stepper == threading.get_ident():
            raise RuntimeError("step() was called by a callback of the engine, that is, from within a step")
        with self._stepping:
            self._stepper = threading.get_ident()
            try:
                return self._work.turn(self.on_step)
            finally:
                self._stepper = 0

    def run(self) -> None:
        """Steps until nothing is left to do."""
        while self.step():
            pass

    def start(self) -> None:
        """Starts a thread that steps whenever there is something to do."""
        with self._bell.condition:
            self._check_open()
            if self._bell.thread is None:
                arguments = (weakref.ref(self), self._bell)
                self._bell.thread = threading.Thread(target=serve, args=arguments, name="hf_dspark", daemon=True)
                self._bell.thread.start()

    def close(self) -> None:
        """Cancels what is left, stops the thread and gives the caches back. Nothing can be submitted afterwards."""
        with self._bell.condition:
            self._bell.closed = True
            left = [request for request, _ in self._work.waiting]
        for request in left + self._work.admitted:
            request.cancel()
        deadline = time.monotonic() + Bell.PATIENCE_SECONDS
        self._bell.stop()
        left_seconds = max(0.0, deadline - time.monotonic())
        if self._stepper != threading.get_ident() and self._stepping.acquire(timeout=left_seconds):
            try:
                self._work.tidy()
            finally:
                self._stepping.release()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------------- inside

    def _check_open(self) -> None:
        if self._bell.closed:
            raise RuntimeError("the engine is closed; make a new one")

    def _give_up(self, error: BaseException) -> None:
        """What the engine's thread does when a step has raised `error`."""
        with self._stepping:
            self._stepper = threading.get_ident()
            try:
                self._work.fail(error)
            finally:
                self._stepper = 0

    def _submit_when_there_is_room(self, input_ids: Any, **kwargs: Any) -> Request:
        while True:
            self._wait_for_room()
            with contextlib.suppress(EngineFull):  # somebody else was quicker
                return self.submit(input_ids, **kwargs)

    def _wait_for_room(self) -> None:
        """Until a request may wait: by the engine's thread, or by stepping."""

        def has_room() -> bool:
            return self.num_waiting + self._preparing < self.max_waiting or self._bell.closed

        while not has_room():
            if self._bell.thread is None and self.step():
                continue
            with self._bell.condition:  # also for somebody's submission, which nobody else may serve
                self._bell.condition.wait_for(
                    lambda: has_room() or (self._bell.thread is None and self.num_waiting > 0)
                )

    def _withdraw(self, request: Request) -> None:
        """Takes a cancelled request out of the queue."""
        with self._bell.condition:
            self._work.waiting = deque(pair for pair in self._work.waiting if pair[0] is not request)
            self._bell.ring()

    def _told(self, on_round: Callable[[DecodingRound], Any] | None) -> Callable[[DecodingRound], Any] | None:
        """The callback of a request, and that of the drafter's options."""
        options = None if self.drafter is None else self.drafter.options.on_round
        if options is None or on_round is None:
            return on_round or options

        def both(decoding_round: DecodingRound) -> None:
            options(decoding_round)
            on_round(decoding_round)

        return both
