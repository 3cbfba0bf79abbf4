"""Decoding with every draft of a block verified, and what became of each: what calibration and evaluation learn from.

Contract: [`WholeBlocks`] decodes batches as they come and hands back the new ids and the rounds of each row. Whatever
scheduler or calibration the drafter has plays no part: its confidences are raw, its blocks are verified whole, as far
as a row has room for them. The drafter and its config stay as they are, and so does the global random state of a
drafter that takes a generator. Knows nothing about text or about what the rounds are for.

Shapes: R batch rows, S prompt width.
"""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import GenerationMixin

from .comparison import new_ids
from .modeling_drafter import Drafter
from .rounds import DecodingRound
from .scheduling import FixedLength


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RecordedBatch:
    """
    What decoding a batch gave.

    Attributes:
        new_ids (`list[list[int]]` of length R): New ids of each row, up to and with its end token.
        rounds (`list[DecodingRound]`): Every row's part in every round, in the order they happened.
    """

    new_ids: list[list[int]]
    rounds: list[DecodingRound]

    def rounds_of(self, row: int) -> list[DecodingRound]:
        """The rounds of one row, in order."""
        return [r for r in self.rounds if r.row == row]


class WholeBlocks:
    """
    A pair that decodes with whole blocks.

    Args:
        target ([`~transformers.PreTrainedModel`]): The target.
        drafter ([`Drafter`]): The drafter.
        temperature (`float`): 0 decodes greedily.
        max_new_tokens (`int`): Length of each answer, in tokens.
        seed (`int`, *optional*, defaults to 0): For sampling; one stream of random numbers serves all batches.
        generation_options: Further arguments of `generate`, such as `top_p`.
    """

    def __init__(
        self,
        target: GenerationMixin,
        drafter: Drafter,
        *,
        temperature: float,
        max_new_tokens: int,
        seed: int = 0,
        **generation_options: Any,
    ):
        self._target = target
        self._rounds: list[DecodingRound] = []
        self._view = raw_view(drafter).with_options(
            scheduler=FixedLength(),
            max_draft_tokens=None,
            on_round=lambda round_: self._rounds.append(round_),
            generator=torch.Generator(target.device).manual_seed(seed),
        )
        self._options = {**sampling(temperature), "max_new_tokens": max_new_tokens, **generation_options}

    def decode(self, inputs: Mapping[str, torch.Tensor]) -> RecordedBatch:
        """Decodes left-padded `input_ids` and `attention_mask`, `[R, S]`."""
        self._rounds = []
        ids = self._target.generate(**inputs, assistant_model=self._view, **self._options)
        return RecordedBatch(new_ids(self._target, ids, inputs["input_ids"].shape[1]), self._rounds)


def raw_view(drafter: Drafter) -> Drafter:
    """A view of `drafter` with confidences as the head gives them; the drafter and its config stay as they are."""
    view = drafter.with_options()
    view.config = copy.deepcopy(drafter.config)
    view.config.confidence_temperatures = view.config.confidence_offsets = None
    return view


def sampling(temperature: float) -> dict[str, Any]:
    """What `generate` is given to decode at a temperature; 0 is greedy."""
    return {"do_sample": True, "temperature": float(temperature)} if temperature > 0 else {"do_sample": False}


def left_padded(rows: Sequence[Sequence[int]], pad_id: int | None, device: Any = None) -> dict[str, torch.Tensor]:
    """Rows of ids as `generate` takes them: `input_ids` and `attention_mask`, `[R, S]`."""
    width = max(map(len, rows))
    ids = [[0 if pad_id is None else pad_id] * (width - len(row)) + [int(token) for token in row] for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(ids, device=device), "attention_mask": torch.tensor(mask, device=device)}
