"""What a visitor asks for, the limits that keep it share-safe, and who is being served.

Contract: plain values; an order that is not served here is refused with a `ValueError` that says what is. A visit can
be stopped from any thread, and is stopped when it ends for whatever reason.
"""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from hf_dspark import Request
from pairs import EMBEDDED, Key
from schedules import DEFAULT

MOST_NEW_TOKENS, MOST_PROMPT_TOKENS, MOST_PROMPT_CHARACTERS = 256, 512, 4000
MOST_TEMPERATURE = 2.0


@dataclass(frozen=True, slots=True)
class Order:
    """
    What a visitor asks for.

    Attributes:
        prompt (`str`): The visitor's message.
        key (`tuple[str, str]`): Which pair of models.
        scheduler (`str`): A word of [`~schedules.choices`].
        temperature (`float`): 0 decodes greedily.
        max_new_tokens (`int`): Where the answer ends at the latest.
        seed (`int`): For sampling.
        compare (`bool`): Whether plain decoding answers, too.
    """

    prompt: str
    key: Key = EMBEDDED
    scheduler: str = DEFAULT
    temperature: float = 0.0
    max_new_tokens: int = 128
    seed: int = 0
    compare: bool = False

    def check(self, *, most_new_tokens: int = MOST_NEW_TOKENS) -> None:
        """Raises `ValueError` for what is not served here, saying what is."""
        if not self.prompt.strip():
            raise ValueError("Write a prompt first, or choose an example.")
        if len(self.prompt) > MOST_PROMPT_CHARACTERS:
            raise ValueError(
                f"The prompt has {len(self.prompt)} characters; up to {MOST_PROMPT_CHARACTERS} are taken. Shorten it."
            )
        if not 1 <= self.max_new_tokens <= most_new_tokens:
            raise ValueError(f"An answer may have 1 to {most_new_tokens} tokens, not {self.max_new_tokens}.")
        if not 0 <= self.temperature <= MOST_TEMPERATURE:
            raise ValueError(f"The temperature may be 0 (greedy) to {MOST_TEMPERATURE:g}, not {self.temperature}.")


@dataclass(slots=True, eq=False)
class Visit:
    """A run that can be stopped from elsewhere."""

    stopped: threading.Event = field(default_factory=threading.Event)
    request: Request | None = None

    def stop(self) -> None:
        """Ends the run within a round."""
        self.stopped.set()
        if self.request is not None:
            self.request.cancel()


@dataclass(slots=True, eq=False)
class Visits:
    """Who is here: the runs of each session."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    by_session: dict[str, set[Visit]] = field(default_factory=dict)

    @contextlib.contextmanager
    def one(self, session: str) -> Iterator[Visit]:
        """A visit of a session, known while it lasts; stopped when it ends."""
        visit = Visit()
        with self.lock:
            self.by_session.setdefault(session, set()).add(visit)
        try:
            yield visit
        finally:
            visit.stop()
            with self.lock:
                self.by_session[session].discard(visit)
                if not self.by_session[session]:
                    del self.by_session[session]

    def stop(self, session: str) -> None:
        """Stops whatever a session is running."""
        with self.lock:
            visits = list(self.by_session.get(session, ()))
        for visit in visits:
            visit.stop()
