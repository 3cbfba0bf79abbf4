"""A prompt on its way into the batch: read in chunks, on a cache of its own, between rounds of the others.

Contract: an [`Admission`] runs the prompt of one request through the target by packed forwards of so many tokens at a
time, and keeps the tapped states for the drafter. When it is through, it hands over cache, context and the logits of
the first new token. Nothing of it touches the running batch.

Source: https://huggingface.co/papers/2607.05147, Eq. 2. Shape legend: C tokens of the prompt, M tapped layers, Dt
target hidden, V vocabulary.
"""

import torch

from .decoding import Row
from .packed import SlabCache
from .prefill import Context, read_tokens
from .request_settings import RequestSettings
from .requests import Request
from .target import TargetView


class Admission:
    """
    Args:
        view ([`TargetView`]): The target, and whose context is kept.
        request ([`Request`]): Who is told.
        settings ([`RequestSettings`]): Prompt and how to go on after it.
        keep_context (`bool`): Whether there will be drafts.

    Attributes:
        cache ([`SlabCache`]): Keys and values of what was read, one row.
        context (`list[Context]`): The drafter's, of every chunk.
        logits (`torch.Tensor` of shape `[1, V]`, *optional*): Of the first new token, float32, once all is read.
    """

    def __init__(self, view: TargetView, request: Request, settings: RequestSettings, *, keep_context: bool):
        self.view, self.request, self.settings, self.keep_context = view, request, settings, keep_context
        self.cache = SlabCache(1)
        self.context: list[Context] = []
        self.logits: torch.Tensor | None = None

    @property
    def num_left(self) -> int:
        """Tokens of the prompt still to be read."""
        return len(self.settings.token_ids) - self.cache.lengths[0]

    def read(self, num_tokens: int) -> None:
        """Runs the next `num_tokens` tokens of the prompt."""
        first = self.cache.lengths[0]
        part = slice(first, first + num_tokens)
        logits, context = read_tokens(
            self.view,
            self.cache,
            self.settings.token_ids[part],
            self.settings.positions[part],
            keep_context=self.keep_context,
        )
        self.context += context
        if self.num_left == 0:
            self.logits = logits.to(self.device)

    @property
    def device(self) -> torch.device:
        return self.settings.prompt.device

    def row(self) -> Row:
        """The row that goes on where the prompt ends."""
        settings, request = self.settings, self.request
        return Row(
            request.id,
            settings.positions[-1],
            prompt=settings.prompt,
            choice=settings.choice,
            stops=settings.stops,
            allows_nan=settings.allows_nan,
            streamer=settings.streamer,
            on_round=request.add_round,
        )
