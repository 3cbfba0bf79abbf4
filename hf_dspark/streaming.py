"""Streams that end, also when generation fails.

Contract: a failed generation never leaves the reader of a streamer waiting: an iterator streamer raises in the reading
thread what was raised in the generating one, any other streamer is ended.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import AsyncTextIteratorStreamer, TextIteratorStreamer
from transformers.generation.streamers import BaseStreamer


class _Failure:
    """
    Stands in the queue of an iterator streamer in place of text. The iterator compares each item with its stop
    signal; this item answers the comparison with the error.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, error: BaseException):
        self.error = error

    def __eq__(self, other: Any) -> bool:
        raise RuntimeError(f"generation failed while streaming: {self.error}") from self.error


def check_streamer(streamer: BaseStreamer | None, batch_size: int) -> None:
    """Raises `ValueError` for a batch, whose rows one text stream cannot tell apart."""
    if streamer is not None and batch_size > 1:
        raise ValueError(
            f"a streamer shows one row, but this batch has {batch_size}. Stream a batch row by row with "
            "drafter.with_options(on_round=callback): the callback gets a DecodingRound with `row` and `committed_ids`"
        )


@contextmanager
def failures_reach_the_reader(streamer: BaseStreamer) -> Iterator[None]:
    """Within it, an error is also handed to whoever reads `streamer`."""
    try:
        yield
    except BaseException as error:
        if isinstance(streamer, (TextIteratorStreamer, AsyncTextIteratorStreamer)):
            streamer.on_finalized_text(_Failure(error))
        else:
            streamer.end()
        raise
