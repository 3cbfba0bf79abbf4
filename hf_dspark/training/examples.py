"""Training examples: token ids and which of them are to be learnt.

Contract: pure functions and values; knows nothing about tokenizers, models or files.
"""

import dataclasses
import functools
import hashlib
from collections import Counter
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class TrainingExample:
    """One sequence: `input_ids` of prompt and answer, `loss_mask` 1 on the answer's tokens."""

    input_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.input_ids) != len(self.loss_mask):
            raise ValueError(f"{len(self.input_ids)} input_ids, but {len(self.loss_mask)} entries of loss_mask")

    @functools.cached_property
    def key(self) -> str:
        """Hash of the token ids, 32 hex digits: where the target's features of this text are found again."""
        text = ",".join(map(str, self.input_ids))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def anchors(self) -> list[int]:
        """Positions that a block may start at: they and their successor are both supervised."""
        return [i for i in range(len(self.loss_mask) - 1) if self.loss_mask[i] and self.loss_mask[i + 1]]


def usable(examples: Sequence[TrainingExample], max_length: int) -> list[TrainingExample]:
    """Examples cut to `max_length` tokens that still hold an anchor."""
    cut = [
        e if len(e.input_ids) <= max_length else TrainingExample(e.input_ids[:max_length], e.loss_mask[:max_length])
        for e in examples
    ]
    return [example for example in cut if example.anchors()]


def frequent_token_ids(examples: Sequence[TrainingExample], size: int, always: Sequence[int] = ()) -> list[int]:
    """The `size` most frequent supervised token ids (`always` among them), sorted: a reduced draft vocabulary."""
    counts = Counter(
        token for example in examples for token, keep in zip(example.input_ids, example.loss_mask, strict=True) if keep
    )
    kept = list(dict.fromkeys([*always, *(token for token, _ in counts.most_common())]))[:size]
    return sorted(kept)
