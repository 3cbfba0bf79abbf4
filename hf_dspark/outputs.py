"""What `generate` returns with `return_dict_in_generate=True`: plain generate's fields, plus the rounds.

Contract: `GenerationRecord` gathers scores, logits and hidden states row by row, in whatever rhythm rows commit
tokens, and lays them out as plain `generate` does: one tuple entry for each generated index. Rows that had already
stopped at an index hold zeros there.

Shape legend: R rows, S prompt width, V vocabulary, D hidden.
"""

import dataclasses
from collections.abc import Sequence

import torch
from transformers import GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput

from .rounds import DecodingRound, DecodingStats


@dataclasses.dataclass
class DSparkGenerateOutput(GenerateDecoderOnlyOutput):
    """
    Output of `generate` with a DSpark drafter.

    Args:
        rounds (`list[DecodingRound]`): Every row's part in every round, in the order they happened.
        stats ([`DecodingStats`]): Accepted length, verify rate and the rest over `rounds`.
        The other fields are those of [`~transformers.generation.GenerateDecoderOnlyOutput`].
    """

    rounds: list[DecodingRound] | None = None
    stats: DecodingStats | None = None


class GenerationRecord:
    """Per-token tensors that the caller of `generate` asked for, and nothing when it asked for none."""

    def __init__(self, config: GenerationConfig, num_rows: int):
        wanted = config.return_dict_in_generate
        self.scores: list[list[torch.Tensor]] | None = self._rows(wanted and config.output_scores, num_rows)
        self.logits: list[list[torch.Tensor]] | None = self._rows(wanted and config.output_logits, num_rows)
        self.hidden_states: list[list[tuple]] | None = self._rows(wanted and config.output_hidden_states, num_rows)
        self.prompt_hidden_states: tuple[torch.Tensor, ...] | None = None

    @staticmethod
    def _rows(wanted: bool | None, num_rows: int) -> list[list] | None:
        return [[] for _ in range(num_rows)] if wanted else None

    @property
    def wants_hidden_states(self) -> bool:
        return self.hidden_states is not None

    def add_prefill(self, scores: torch.Tensor, logits: torch.Tensor, hidden_states: Sequence[torch.Tensor]) -> None:
        """First token of every row: `scores [R, V]`, `logits [R, V]`, `hidden_states` of `[R, S, D]`."""
        for row in range(len(scores)):
            self._add(row, slice(row, row + 1), scores, logits)
        if self.hidden_states is not None:
            self.prompt_hidden_states = tuple(hidden_states)

    def add(
        self,
        row: int,
        entries: slice,
        scores: torch.Tensor,
        logits: torch.Tensor,
        hidden_states: Sequence[torch.Tensor],
    ) -> None:
        """Gives `row` its `entries` of a round's `scores [N, V]`, `logits [N, V]` and `hidden_states [1, N, D]`."""
        self._add(row, entries, scores, logits)
        if self.hidden_states is not None:
            own = [states[0, entries].clone() for states in hidden_states]
            self.hidden_states[row].extend(zip(*own, strict=True))

    def _add(self, row: int, entries: slice, scores: torch.Tensor, logits: torch.Tensor) -> None:
        # Copies: a view would keep the whole round alive.
        if self.scores is not None:
            self.scores[row].extend(scores[entries].clone())
        if self.logits is not None:
            self.logits[row].extend(logits[entries].clone())

    def stacked_scores(self) -> tuple[torch.Tensor, ...] | None:
        """One `[R, V]` for each generated index."""
        return None if self.scores is None else stack_rows(self.scores)

    def stacked_logits(self) -> tuple[torch.Tensor, ...] | None:
        """One `[R, V]` for each generated index."""
        return None if self.logits is None else stack_rows(self.logits)

    def stacked_hidden_states(self) -> tuple[tuple[torch.Tensor, ...], ...] | None:
        """The prompt's layers `[R, S, D]`, then for each later index its input token's layers `[R, 1, D]`."""
        if self.hidden_states is None or self.prompt_hidden_states is None:
            return None
        layers = [
            stack_rows([[token[layer][None] for token in row] for row in self.hidden_states])
            for layer in range(len(self.prompt_hidden_states))
        ]
        return (self.prompt_hidden_states, *zip(*layers, strict=True))


def stack_rows(rows: Sequence[Sequence[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    """Ragged rows of equal tensors -> one `[R, ...]` for each index, zeros where a row has ended."""
    longest = max(rows, key=len)
    return tuple(
        torch.stack([row[index] if index < len(row) else torch.zeros_like(longest[index]) for row in rows])
        for index in range(len(longest))
    )
