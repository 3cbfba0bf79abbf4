"""Dense recordings: what the drafter proposes, and how much of it stands, at every token of a greedy answer.

Contract: decoding that drafts a whole block in every round but verifies none of it commits one token a round, the
target's own. Comparing each block with the text that follows it says how many of its drafts would have stood. Greedy
text does not depend on verify lengths, so any policy can be replayed on a recording exactly: from token p it commits
`1 + min(l, acceptable[p])` tokens and goes on from there. Files are `.npz`, written whole or not at all.

Shape legend: n anchors of one answer (its tokens but the last), K drafts of a block, N anchors of all answers.
"""

import io
import json
import os
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hf_dspark.scheduling import Scheduler, ScheduleRequest


class DraftOnly(Scheduler):
    """Drafts whole blocks and verifies none of them."""

    def verify_lengths(self, request: ScheduleRequest) -> list[int]:
        return [0] * len(request.max_lengths)


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """
    One recorded answer.

    Attributes:
        name (`str`): The set its prompt is from.
        context (`int`): Tokens of the prompt.
        confidence (`np.ndarray` of shape `[n, K]`): Confidences of the drafts; 0 where there was no draft.
        acceptable (`np.ndarray` of shape `[n]`): How many of the drafts would stand.
        max_lengths (`np.ndarray` of shape `[n]`): How many drafts the answer had room for.
    """

    name: str
    context: int
    confidence: np.ndarray
    acceptable: np.ndarray
    max_lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.acceptable)


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """
    Answers, and what they were recorded from.

    Attributes:
        answers (`tuple[Answer, ...]`): In the order in which they are to be served.
        description (`dict`): Models, settings, counts.
    """

    answers: tuple[Answer, ...]
    description: dict

    @property
    def num_drafts(self) -> int:
        """K."""
        return self.answers[0].confidence.shape[1]

    def save(self, path: str | os.PathLike) -> None:
        """Writes the recording to `path`, replacing it whole."""
        buffer = io.BytesIO()
        np.savez_compressed(
            buffer,
            description=np.array(json.dumps(self.description)),
            names=np.array([answer.name for answer in self.answers]),
            contexts=np.array([answer.context for answer in self.answers]),
            lengths=np.array([len(answer) for answer in self.answers]),
            confidence=np.concatenate([answer.confidence for answer in self.answers]).astype(np.float32),
            acceptable=np.concatenate([answer.acceptable for answer in self.answers]).astype(np.int16),
            max_lengths=np.concatenate([answer.max_lengths for answer in self.answers]).astype(np.int16),
        )
        write_whole(path, buffer.getvalue())

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Recording":
        """
        Reads what [`save`] wrote.

        Raises:
            ValueError: `path` is not a recording.
        """
        try:
            with np.load(path, allow_pickle=False) as arrays:
                ends = np.cumsum(arrays["lengths"])[:-1]
                parts = [np.split(arrays[key], ends) for key in ("confidence", "acceptable", "max_lengths")]
                answers = tuple(
                    Answer(str(name), int(context), *part)
                    for name, context, *part in zip(arrays["names"], arrays["contexts"], *parts, strict=True)
                )
                return cls(answers, json.loads(str(arrays["description"])))
        except (KeyError, ValueError, zipfile.BadZipFile, EOFError) as error:
            raise ValueError(f"{path} is not a recording of `scheduler_simulation.py record`: {error}") from error


def write_whole(path: str | os.PathLike, content: bytes) -> None:
    """Writes a file, or leaves what was there."""
    path = Path(path)
    work = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        work.write_bytes(content)
        os.replace(work, path)
    finally:
        work.unlink(missing_ok=True)


def count_acceptable(draft_ids: Sequence[Sequence[int]], text: Sequence[int], num_drafts: int) -> np.ndarray:
    """
    How many leading drafts agree with the text after their anchor.

    Args:
        draft_ids (`Sequence` of n sequences): The drafts of each anchor, K or fewer.
        text (`Sequence[int]` of length n + 1): The generated tokens; token p is the anchor of `draft_ids[p]`.
        num_drafts (`int`): K.

    Returns:
        `np.ndarray` of shape `[n]`.
    """
    drafts = np.full((len(draft_ids), num_drafts), -1)
    for anchor, ids in enumerate(draft_ids):
        drafts[anchor, : len(ids)] = ids
    padded = np.concatenate([np.asarray(text)[1:], np.full(num_drafts, -2)])  # -1 and -2 agree with nothing
    following = np.lib.stride_tricks.sliding_window_view(padded, num_drafts)[: len(drafts)]
    return np.cumprod(drafts == following, axis=1).sum(axis=1)


def record(target, drafter, batches: Iterator[tuple[str, dict]], max_new_tokens: int) -> list[Answer]:
    """
    Decodes left-padded batches greedily, a whole block drafted and none verified at every token.

    Args:
        target, drafter: A pair of models.
        batches (`Iterable` of `(name, inputs)`): Name of the set, and what `generate` takes.
        max_new_tokens (`int`): Most tokens of an answer.
    """
    view, answers = drafter.with_options(scheduler=DraftOnly()), []
    for name, inputs in batches:
        output = target.generate(
            **inputs,
            assistant_model=view,
            do_sample=False,
            max_new_tokens=max_new_tokens,
            return_dict_in_generate=True,
        )
        for row, mask in enumerate(inputs["attention_mask"]):
            rounds = [r for r in output.rounds if r.row == row]
            if rounds:  # else the first token ended the answer
                answers.append(_answer(name, int(mask.sum()), rounds, drafter.config.num_drafts))
    return answers


def _answer(name: str, context: int, rounds: list, num_drafts: int) -> Answer:
    text = [rounds[0].anchor_id] + [token for r in rounds for token in r.committed_ids]
    assert len(text) == len(rounds) + 1, "every round of a dense recording commits one token"
    confidence = np.zeros((len(rounds), num_drafts), dtype=np.float32)
    for anchor, r in enumerate(rounds):
        confidence[anchor, : len(r.confidence)] = r.confidence
    return Answer(
        name=name,
        context=context,
        confidence=confidence,
        acceptable=count_acceptable([r.draft_ids for r in rounds], text, num_drafts),
        max_lengths=np.array([len(r.draft_ids) for r in rounds]),
    )
