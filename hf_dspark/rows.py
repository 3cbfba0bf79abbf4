"""A row of a decoding batch, on the host.

Contract: plain values and what belongs to one text alone. Which slot of a cache the row has, and what happens to it,
is up to the loop that decodes it. Shape legend: S prompt width.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .choosing import Choice
from .rounds import DecodingRound
from .stopping import StopChecker


class Row:
    """
    One row of the batch, on the host: what it generated, and all that is its own.

    Args:
        index (`int`): What the row goes by: batch row, or number of a request.
        anchor_position (`int`): Position id of its newest token, the anchor; at first that of the prompt's last.
        prompt (`torch.LongTensor` of shape `[S]`): The ids before its new ones, as plain `generate` holds them.
        choice ([`Choice`]), stops ([`StopChecker`]): How its tokens are chosen, and when it ends.
        allows_nan (`bool`): Whether its processors take care of nan in the target's logits.
        streamer, on_round (*optional*): Who is told about its tokens, and its rounds.
    """

    __slots__ = (
        "index", "anchor_position", "prompt", "choice", "stops", "allows_nan", "streamer", "on_round", "new_ids",
        "error",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        anchor_position: int,
        *,
        prompt: torch.LongTensor,
        choice: Choice,
        stops: StopChecker,
        allows_nan: bool | None = False,
        streamer: Any = None,
        on_round: Callable[[DecodingRound], Any] | None = None,
    ):
        self.index, self.anchor_position, self.prompt, self.choice = index, anchor_position, prompt, choice
        self.stops, self.allows_nan, self.streamer, self.on_round = stops, allows_nan, streamer, on_round
        self.new_ids: list[int] = []
        self.error: BaseException | None = None  # what ended it, if something did

    @property
    def anchor_id(self) -> int:
        return self.new_ids[-1]

    def room(self, most: int) -> int:
        """Drafts it can still use, at most `most`: one less than its remaining tokens, as a round adds one itself."""
        if self.stops.max_length is None:
            return most
        return min(most, max(self.stops.max_length - len(self.prompt) - len(self.new_ids) - 1, 0))

    def ids(self, supposed: Sequence[int] = ()) -> torch.LongTensor:
        """Its ids as plain `generate` holds them: left-padded prompt, generated tokens; then supposed ones."""
        return torch.cat([self.prompt, self.prompt.new_tensor([*self.new_ids, *supposed])])

    def supposed_ids(self, supposed: Sequence[int]) -> torch.LongTensor | None:
        """The same, or `None` after a supposed token that ends the row: plain `generate` never asks what follows."""
        return self.ids(supposed) if self.stops.eos_ids.isdisjoint(supposed) else None
