"""The thread that serves an engine: it sleeps until the bell rings, and goes when the engine does.

Contract: the thread holds the engine only while it works, so that an engine nobody uses any more is collected, which
ends its thread; so does the end of the interpreter. Stopping waits for the step in progress, but not for ever. A step
that fails costs those who had a place, never the thread: the others are served.
"""

import threading
from typing import TYPE_CHECKING
from weakref import ReferenceType

from transformers.utils import logging

if TYPE_CHECKING:
    from .engine import DSparkEngine

logger = logging.get_logger(__name__)


class Bell:
    """
    What an engine and its thread share.

    Attributes:
        condition (`threading.Condition`): Guards the engine's queue; notified when something changes in it.
        closed (`bool`): Nothing is served any more.
        thread (`threading.Thread`, *optional*): The one that serves.
    """

    PATIENCE_SECONDS = 10.0  # for a step in progress, which may be in the hands of somebody's callback

    def __init__(self) -> None:
        self.condition = threading.Condition(threading.RLock())
        self.closed = False
        self.thread: threading.Thread | None = None
        self._rung = False

    def ring(self) -> None:
        """Says that there is something to do."""
        with self.condition:
            self._rung = True
            self.condition.notify_all()

    def wait(self) -> bool:
        """Waits for the bell; `False` once it is closed."""
        with self.condition:
            self.condition.wait_for(lambda: self._rung or self.closed)
            self._rung = False
            return not self.closed

    def stop(self) -> None:
        """Ends the thread, if there is one and it is not the one that asks."""
        with self.condition:
            self.closed = True
            self.condition.notify_all()
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(self.PATIENCE_SECONDS)
            if self.thread.is_alive():
                logger.warning(
                    f"A step of the engine has not ended after {self.PATIENCE_SECONDS:g} s; it is left to itself. Is "
                    "one of its callbacks waiting for something?"
                )


def serve(engine_ref: "ReferenceType[DSparkEngine]", bell: Bell) -> None:
    """What the thread runs."""
    while bell.wait():
        engine = engine_ref()
        if engine is None:
            return
        try:
            while engine.step():
                pass
        except BaseException as error:
            logger.warning(f"A step of the engine failed, and with it the requests that had a place: {error!r}")
            engine._give_up(error)
            bell.ring()
        del engine
