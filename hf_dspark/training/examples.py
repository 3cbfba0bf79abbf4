"""Training examples: token ids and which of them are to be learnt, and in which order they are met.

Contract: pure functions of (examples, seed, step); what a step sees does not depend on what happened before it, so a
resumed run goes on as if it had never stopped.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence

import torch


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingExample:
    """One sequence: `input_ids` of prompt and answer, `loss_mask` 1 on the answer's tokens."""

    input_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]

    def anchors(self) -> list[int]:
        """Positions that a block may start at: they and their successor are both supervised."""
        return [i for i in range(len(self.loss_mask) - 1) if self.loss_mask[i] and self.loss_mask[i + 1]]


def usable(examples: Sequence[TrainingExample], max_length: int) -> list[TrainingExample]:
    """Examples cut to `max_length` that still hold an anchor."""
    cut = [TrainingExample(e.input_ids[:max_length], e.loss_mask[:max_length]) for e in examples]
    return [example for example in cut if example.anchors()]


def frequent_token_ids(examples: Sequence[TrainingExample], size: int, always: Sequence[int] = ()) -> list[int]:
    """The `size` most frequent supervised token ids (`always` among them), sorted: a reduced draft vocabulary."""
    counts = Counter(
        token for example in examples for token, keep in zip(example.input_ids, example.loss_mask, strict=True) if keep
    )
    kept = list(dict.fromkeys([*always, *(token for token, _ in counts.most_common())]))[:size]
    return sorted(kept)


def shuffled(count: int, *, seed: int) -> list[int]:
    """`range(count)` in an order determined by `seed`."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
