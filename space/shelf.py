"""Pairs of models and the engines that serve them, shared by all visitors.

Contract: one [`~hf_dspark.DSparkEngine`] for each pair and scheduler, started when first asked for and warmed up, so
that nobody's run is measured together with what happens once. A service in use is never closed, nor is a pair dropped
whose service is being made; of the others, the ones used last are kept. After a fork (ZeroGPU decodes in a process of
its own) engines are made anew there, since threads do not come along.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from foresight import Foresight
from hf_dspark import DSparkEngine
from hf_dspark.chats import prompt_ids
from ledger import Ledger
from pairs import EMBEDDED, Key, Pair, PairError, load_pair
from schedules import scheduler_of

PLAIN = "plain"  # the engine without a drafter
MOST_SERVICES, MOST_PAIRS = 6, 2
ANSWERS_AT_ONCE, MOST_WAITING = 8, 16

Say = Callable[[str], None]


@dataclass(slots=True, eq=False)
class Service:
    """An engine at work, what happened on it and is expected of it, and how many visits use it."""

    pair: Pair
    engine: DSparkEngine
    ledger: Ledger
    foresight: Foresight = field(default_factory=Foresight)
    users: int = 0
    used_at: float = 0.0


class Shelf:
    """
    Keeps pairs and services.

    Args:
        load (`Callable`, *optional*): Loads a pair; [`~pairs.load_pair`] by default.
        answers_at_once (`int`, *optional*): Rows of each engine.
        most_waiting (`int`, *optional*): Requests that may wait for each engine.
    """

    def __init__(
        self,
        load: Callable[[Key, Say], Pair] = load_pair,
        *,
        answers_at_once: int = ANSWERS_AT_ONCE,
        most_waiting: int = MOST_WAITING,
    ):
        self._load = load
        self.answers_at_once, self.most_waiting = answers_at_once, most_waiting
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()  # of the dictionaries
        self._making = threading.Lock()  # one thing is loaded or warmed up at a time
        self._services: dict[tuple[Key, str], Service] = {}
        self._pairs: dict[Key, Pair] = getattr(self, "_pairs", {})
        self._starting: list[Key] = []  # for each visitor who waits for a service

    def ready(self, key: Key, word: str) -> bool:
        """Whether a service is there already."""
        return self._process == os.getpid() and (key, word) in self._services

    def pair(self, key: Key, say: Say = lambda words: None) -> Pair:
        """
        The pair of a key, loaded now if it is not there.

        Raises:
            PairError: It cannot be loaded; what was there before is still there.
        """
        self._own()
        pair = self._known_pair(key)
        if pair is None:
            with self._making:
                pair = self._known_pair(key)
                if pair is None:
                    pair = self._load(key, say)
                    with self._lock:
                        self._pairs[key] = pair
                        self._drop_pairs(besides=key)
        return pair

    @contextlib.contextmanager
    def using(self, key: Key, word: str, say: Say = lambda words: None) -> Iterator[Service]:
        """
        A service while it is used.

        Args:
            key (`tuple[str, str]`): Of the pair.
            word (`str`): Of the scheduler, or [`PLAIN`].
            say (`Callable[[str], None]`, *optional*): Told what is being done.

        Raises:
            PairError: The pair cannot be loaded or served.
            ValueError: There is no such scheduler.
        """
        self._own()
        with self._lock:
            self._starting.append(key)
        try:
            service = self._obtain(key, word, say)
        finally:
            with self._lock:
                self._starting.remove(key)
        try:
            yield service
        finally:
            with self._lock:
                service.users -= 1
                service.used_at = time.monotonic()

    def num_running(self) -> int:
        """Answers being written by all engines together."""
        with self._lock:
            return sum(service.engine.num_running for service in self._services.values())

    def close(self) -> None:
        """Closes every engine; what they were doing is cancelled."""
        with self._lock:
            services, self._services = list(self._services.values()), {}
        for service in services:
            service.engine.close()

    def _obtain(self, key: Key, word: str, say: Say) -> Service:
        """The service, made now if it is not there, with one user more."""
        pair = self.pair(key, say)
        service = self._known(key, word)
        if service is None:  # those whose service is there do not wait for others' models
            with self._making:
                service = self._known(key, word)
                if service is None:
                    service = self._start(pair, word, say)
                    with self._lock:
                        service.users += 1
                        self._services[key, word] = service
                        self._close_unused(MOST_SERVICES)
        return service

    def _known_pair(self, key: Key) -> Pair | None:
        with self._lock:
            return self._pairs.get(key)

    def _known(self, key: Key, word: str) -> Service | None:
        """The service if it is there, with one user more."""
        with self._lock:
            service = self._services.get((key, word))
            if service is not None:
                service.users += 1
            return service

    def _own(self) -> None:
        if self._process != os.getpid():
            self._begin()

    def _start(self, pair: Pair, word: str, say: Say) -> Service:
        say("getting an engine ready; the first time, how long steps take here is measured (about 25 seconds) …")
        drafter = None if word == PLAIN else pair.drafter
        scheduler = None
        if drafter is not None:
            scheduler = scheduler_of(word, pair.num_drafts, confidence=pair.has_confidence)
        limits = {"max_batch_size": self.answers_at_once, "max_waiting": self.most_waiting}
        try:
            engine = DSparkEngine(pair.target, drafter, scheduler=scheduler, **limits)
        except (ValueError, NotImplementedError) as error:
            raise PairError(f"This pair cannot be served: {error}") from error
        engine.start()
        try:
            warm = prompt_ids(pair.tokenizer, [{"role": "user", "content": "Hello"}])
            engine.submit(torch.tensor([warm]), max_new_tokens=4, do_sample=False).result()
        except BaseException:
            engine.close()
            raise
        ledger = Ledger()
        engine.on_step = ledger.add_step
        return Service(pair, engine, ledger)

    def _close_unused(self, most: int) -> None:
        unused = sorted((service.used_at, place) for place, service in self._services.items() if not service.users)
        for _, place in unused[: max(len(self._services) - most, 0)]:
            self._services.pop(place).engine.close()

    def _drop_pairs(self, *, besides: Key) -> None:
        busy = {key for (key, _), service in self._services.items() if service.users}
        spare = [key for key in self._pairs if key not in busy | {besides, EMBEDDED, *self._starting}]
        for key in spare[: max(len(self._pairs) - MOST_PAIRS, 0)]:
            for place in [place for place in self._services if place[0] == key]:
                self._services.pop(place).engine.close()
            del self._pairs[key]


class Taking:
    """
    A service being taken, in a thread of its own: loading may take a minute, in which a visitor is told about it. Use
    it in a `with` statement; the service is in use until that ends, and given back whenever it comes later.

    Args:
        shelf ([`Shelf`]): Where from.
        key, word: As for [`Shelf.using`].
    """

    def __init__(self, shelf: Shelf, key: Key, word: str):
        self._said: list[str] = []
        self._arrived, self._released = threading.Event(), threading.Event()
        self._service: Service | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._take, args=(shelf, key, word), daemon=True)

    def __enter__(self) -> "Taking":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._released.set()

    def words(self, pause_seconds: float) -> Iterator[str]:
        """What is being done, again and again until the service is there or cannot be had."""
        while not self._arrived.wait(pause_seconds):
            yield self._said[-1] if self._said else "another visitor is having an engine made ready …"

    def service(self) -> Service:
        """The service, or the error in its place."""
        self._arrived.wait()
        if self._service is None:
            raise self._error or RuntimeError("the engine was closed")
        return self._service

    def _take(self, shelf: Shelf, key: Key, word: str) -> None:
        try:
            with shelf.using(key, word, self._said.append) as service:
                self._service = service
                self._arrived.set()
                self._released.wait()
        except Exception as error:
            self._error = error
        finally:
            self._arrived.set()
