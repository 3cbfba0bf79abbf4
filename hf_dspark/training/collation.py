"""Packing: several documents in one row, each with positions of its own, and the anchors drawn in it.

Contract: a `PackedRow` is plain tensors on the CPU until `to` moves it. Anchors depend on (seed, step, example) alone:
a resumed run draws what an uninterrupted one would have drawn, and so does a run on more processes. Knows nothing
about models.

Source: https://huggingface.co/papers/2607.05147, section 3.3. Shape legend: T tokens of a row, A anchors, K drafts.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from ..losses import contiguous_supervision
from .examples import TrainingExample

IndexedExample = tuple[int, TrainingExample]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PackedRow:
    """
    Documents one after another.

    Attributes:
        examples (`tuple[TrainingExample, ...]`): The documents, in order.
        example_ids (`tuple[int, ...]`): Their numbers in the dataset.
        input_ids, document_ids, position_ids (`torch.LongTensor` of shape `[T]`): Tokens; number of the document in
            this row; position in the document.
        loss_mask (`torch.LongTensor` of shape `[T]`): 1 on tokens to learn.
        anchors (`torch.LongTensor` of shape `[A]`): Positions in the row where draft blocks start, ascending.
    """

    examples: tuple[TrainingExample, ...]
    example_ids: tuple[int, ...]
    input_ids: torch.Tensor
    document_ids: torch.Tensor
    position_ids: torch.Tensor
    loss_mask: torch.Tensor
    anchors: torch.Tensor

    @property
    def lengths(self) -> list[int]:
        """Tokens of each document."""
        return [len(example.input_ids) for example in self.examples]

    def to(self, device: torch.device) -> "PackedRow":
        """This row with its tensors on `device`."""
        names = ("input_ids", "document_ids", "position_ids", "loss_mask", "anchors")
        return dataclasses.replace(self, **{name: getattr(self, name).to(device) for name in names})

    def with_anchors(self, anchors: Sequence[Sequence[int]]) -> "PackedRow":
        """This row with blocks at `anchors[d]` of each document d (positions in the document)."""
        placed, start = [], 0
        for own, length in zip(anchors, self.lengths, strict=True):
            placed += [start + anchor for anchor in own]
            start += length
        return dataclasses.replace(self, anchors=torch.tensor(placed, dtype=torch.long))

    def with_drawn_anchors(self, num_anchors: int, *, seed: int, step: int) -> "PackedRow":
        """This row with up to `num_anchors` blocks a document, drawn without replacement for this `step`."""
        return self.with_anchors(
            [
                draw_anchors(example, num_anchors, seed=seed, step=step, example_id=number)
                for example, number in zip(self.examples, self.example_ids, strict=True)
            ]
        )

    def supervised(self, num_drafts: int) -> torch.Tensor:
        """Which of the K = `num_drafts` labels of every anchor count, `[A, K]`: contiguous, in its own document."""
        labels = self.loss_mask * (self.position_ids > 0)  # a document's first token follows no anchor
        return contiguous_supervision(labels[None], self.anchors[None], num_drafts)[0]

    def documents(self) -> "list[PackedRow]":
        """Each document as a row of its own, with its anchors."""
        owners, rows, start = self.document_ids[self.anchors], [], 0
        for number, length in enumerate(self.lengths):
            row = pack_row([(self.example_ids[number], self.examples[number])]).to(self.input_ids.device)
            rows.append(dataclasses.replace(row, anchors=self.anchors[owners == number] - start))
            start += length
        return rows


def draw_anchors(example: TrainingExample, num_anchors: int, *, seed: int, step: int, example_id: int) -> list[int]:
    """Up to `num_anchors` of the example's anchors, ascending, determined by (`seed`, `step`, `example_id`)."""
    candidates = example.anchors()
    if len(candidates) <= num_anchors:
        return candidates
    digest = hashlib.blake2b(f"{seed},{step},{example_id}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    chosen = torch.randperm(len(candidates), generator=generator)[:num_anchors]
    return [candidates[i] for i in sorted(chosen.tolist())]


def pack_row(documents: Sequence[IndexedExample]) -> PackedRow:
    """One row of these documents, without anchors."""
    numbers, examples = zip(*documents, strict=True)
    lengths = torch.tensor([len(example.input_ids) for example in examples])
    return PackedRow(
        examples=examples,
        example_ids=numbers,
        input_ids=torch.tensor([token for example in examples for token in example.input_ids]),
        document_ids=torch.arange(len(lengths)).repeat_interleave(lengths),
        position_ids=torch.cat([torch.arange(length) for length in lengths.tolist()]),
        loss_mask=torch.tensor([keep for example in examples for keep in example.loss_mask]),
        anchors=torch.empty(0, dtype=torch.long),
    )


class PackingCollator:
    """
    Collates numbered examples into `{"rows": [PackedRow, ...]}`, each row of at most `max_length` tokens.

    Args:
        max_length (`int`): Tokens of a row. A document is put into the first row that has room for it.
        packing (`bool`, *optional*, defaults to `True`): `False` gives every document a row of its own.
    """

    def __init__(self, max_length: int, packing: bool = True):
        self.max_length, self.packing = max_length, packing

    def __call__(self, documents: Sequence[IndexedExample]) -> dict[str, Any]:
        rows: list[list[IndexedExample]] = []
        room: list[int] = []
        for document in documents:
            length = len(document[1].input_ids)
            fitting = [number for number, left in enumerate(room) if left >= length] if self.packing else []
            if not fitting:
                rows.append([])
                room.append(self.max_length)
                fitting = [len(rows) - 1]
            rows[fitting[0]].append(document)
            room[fitting[0]] -= length
        return {"rows": [pack_row(row) for row in rows]}
