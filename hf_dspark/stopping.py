"""Stopping criteria, token by token: where plain `generate` would have stopped inside a block of new tokens.

A round commits several tokens at once, but criteria are written for one new token at a time. `StopChecker` asks them
after each token, before anybody else sees the tokens. It knows criteria only; padding, caches and streams are not its
business.

End-of-sequence and maximum length, nearly always the only criteria, are decided on host integers. All others
(`StopStringCriteria`, `MaxTimeCriteria`, a user's own) are called after each token on the ids so far, with
`scores=None` as in plain `generate` without `output_scores`. A user's own may be bound to the batch (a limit for each
row, say): it is shown a batch in which every row holds these ids, and the own row's verdict counts. Criteria that
count their calls stop elsewhere than in plain `generate`, since they are called for each row.
"""

from collections.abc import Callable, Sequence

import torch
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StopStringCriteria,
)

_ROW_WISE = (MaxTimeCriteria, StopStringCriteria)


class StopChecker:
    """
    The stopping criteria of one `generate` call, applied to blocks of tokens.

    Args:
        criteria (`StoppingCriteriaList`): As `generate` prepared them.
        batch_size (`int`, *optional*, defaults to 1): Batch rows R of the call.
    """

    def __init__(self, criteria: Sequence[StoppingCriteria], batch_size: int = 1):
        self._batch_size = batch_size
        # Exact types: a subclass may have its own idea of when to stop.
        max_lengths = [criterion.max_length for criterion in criteria if type(criterion) is MaxLengthCriteria]
        self._max_length = min(max_lengths, default=None)
        self._eos_ids = frozenset(
            token_id
            for criterion in criteria
            if type(criterion) is EosTokenCriteria
            for token_id in criterion.eos_token_id.tolist()
        )
        self._others = [
            criterion for criterion in criteria if type(criterion) not in (EosTokenCriteria, MaxLengthCriteria)
        ]

    @property
    def max_length(self) -> int | None:
        """Largest number of tokens of a row, prompt and left padding included; `None` if unlimited."""
        return self._max_length

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a row: nothing after one of them will be kept, whatever it is."""
        return self._eos_ids

    def kept(
        self, new_ids: Sequence[int], *, width: int, prefix: Callable[[], torch.LongTensor], row: int = 0
    ) -> tuple[int, bool]:
        """
        Cuts new tokens of one row after the first that meets a criterion.

        Args:
            new_ids (`Sequence[int]`): Tokens to commit, in order.
            width (`int`): Number of ids before them, left padding included.
            prefix (`Callable[[], torch.LongTensor]`):
                Gives these ids `[width]`, as plain `generate` holds them (left-padded prompt and generated tokens).
                Not called unless a criterion looks at ids.
            row (`int`, *optional*, defaults to 0): Batch row.

        Returns:
            `tuple[int, bool]`: how many of `new_ids` remain, the stopping token included, and whether the row is done.
        """
        row_ids = self._row_ids(prefix, new_ids) if self._others else None
        for count, token_id in enumerate(new_ids, start=1):
            at_max_length = self._max_length is not None and width + count >= self._max_length
            if at_max_length or token_id in self._eos_ids:
                return count, True
            if row_ids is not None and self._stops(row_ids[:, : width + count], row):
                return count, True
        return len(new_ids), False

    def _stops(self, ids: torch.LongTensor, row: int) -> bool:
        """Whether any of the other criteria stops a row at ids `[1, width]`."""
        for criterion in self._others:
            num_rows = 1 if type(criterion) in _ROW_WISE else self._batch_size
            verdict = torch.as_tensor(criterion(ids.expand(num_rows, -1), None))
            if bool(verdict[row] if num_rows > 1 and verdict.numel() == num_rows else verdict.all()):
                return True
        return False

    @staticmethod
    def _row_ids(prefix: Callable[[], torch.LongTensor], new_ids: Sequence[int]) -> torch.LongTensor:
        """Ids `[1, width + len(new_ids)]`."""
        ids = prefix()
        return torch.cat([ids, ids.new_tensor(list(new_ids))])[None]
