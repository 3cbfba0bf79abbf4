"""Rows of JSONL files as training examples: token ids, and which of them the target itself wrote.

Contract: a row holds the target's answer either as `completion_ids`, after `prompt_ids`, `messages` or a `prompt` (the
last two rendered with the tokenizer's chat template), or as text, in `messages` that end with the assistant's. Only
what an assistant wrote is learnt. Knows nothing about models.
"""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..chats import prompt_ids
from ..prompt_sets import read_jsonl
from .examples import TrainingExample

ROW_FORMS = (
    '"completion_ids" with "prompt_ids", "messages" or "prompt"; or "messages" that end with one of the assistant'
)
GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\b")


@dataclasses.dataclass(frozen=True, slots=True)
class ExampleSplit:
    """
    Examples to learn from, and others to measure on.

    Attributes:
        thinking (`set[bool | None]`): How the answers were written, as far as the rows say.
    """

    train: list[TrainingExample]
    evaluation: list[TrainingExample]
    thinking: set[bool | None]


def load_examples(
    paths: Sequence[str | os.PathLike],
    tokenizer: PreTrainedTokenizerBase,
    *,
    hold_out: int | None = None,
    limit: int | None = None,
) -> ExampleSplit:
    """
    Reads JSONL files.

    Args:
        paths (`Sequence[str]`): The files.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): The target's.
        hold_out (`int`, *optional*): Rows whose number in the source (`index`, or the line, from 0) this divides are
            for evaluation.
        limit (`int`, *optional*): Rows at most, of each file.

    Raises:
        ValueError: A row holds no answer; the message names the file and the line.
        OSError: A file cannot be read.
    """
    split = ExampleSplit([], [], set())
    for path in paths:
        for number, row in enumerate(read_jsonl(path)[:limit]):
            try:
                example = example_of(row, tokenizer)
            except ValueError as error:
                raise ValueError(f"{os.fspath(path)}, line {number + 1}: {error}") from None
            split.thinking.add(row.get("thinking"))
            index = row.get("index", number)
            held_out = hold_out is not None and isinstance(index, int) and index % hold_out == 0
            (split.evaluation if held_out else split.train).append(example)
    return split


def example_of(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> TrainingExample:
    """
    The example in a row.

    Raises:
        ValueError: There is none; the message says what a row should hold.
    """
    if "completion_ids" in row:
        answer = _ids(row, "completion_ids")
        prompt = _prompt(row, tokenizer)
        return TrainingExample(prompt + answer, (0,) * len(prompt) + (1,) * len(answer))
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages or messages[-1].get("role") != "assistant":
        raise ValueError(f"expected {ROW_FORMS}; got the fields {sorted(row)}")
    return chat_example(messages, tokenizer, thinking=row.get("thinking"))


def chat_example(
    messages: Sequence[Mapping[str, str]], tokenizer: PreTrainedTokenizerBase, *, thinking: bool | None = None
) -> TrainingExample:
    """
    A chat with its answers as text. What the assistant wrote is marked by the template, if it can (`{% generation
    %}`), else found as the difference between the chat with and without each answer.

    Raises:
        ValueError: No chat template, or one that renders the chat differently once its answer is there.
    """
    if tokenizer.chat_template is None:
        raise ValueError('this tokenizer has no chat template; give "prompt_ids" and "completion_ids"')
    options = {} if thinking is None else {"enable_thinking": thinking}
    if GENERATION_BLOCK.search(str(tokenizer.chat_template)):
        rendered = tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True, **options
        )
        return TrainingExample(tuple(rendered["input_ids"]), tuple(rendered["assistant_masks"]))
    input_ids: list[int] = []
    loss_mask: list[int] = []
    for text, written in _pieces(messages, tokenizer, options):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        input_ids += ids
        loss_mask += [int(written)] * len(ids)
    return TrainingExample(tuple(input_ids), tuple(loss_mask))


def _pieces(
    messages: Sequence[Mapping[str, str]], tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]
) -> list[tuple[str, bool]]:
    """The rendered chat in pieces, each with whether the assistant wrote it."""

    def render(count: int, **more: Any) -> str:
        return tokenizer.apply_chat_template(messages[:count], tokenize=False, **options, **more)

    whole, pieces, end = render(len(messages)), [], 0
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        asked, answered = render(number, add_generation_prompt=True), render(number + 1)
        if not (answered.startswith(asked) and whole.startswith(answered.rstrip())):
            if number + 1 < len(messages):
                continue  # templates may shorten earlier answers (their thoughts); those are context only
            raise ValueError(
                "the chat template renders this chat differently once its answer is there, so the answer cannot be "
                'told apart; give "prompt_ids" and "completion_ids"'
            )
        pieces += [(whole[end : len(asked)], False), (answered[len(asked) :].rstrip(), True)]
        end = len(asked) + len(pieces[-1][0])
    return [*pieces, (whole[end:], False)]


def _prompt(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    if row.get("prompt_ids") is not None:
        return _ids(row, "prompt_ids")
    messages = row.get("messages")
    if messages is None and isinstance(row.get("prompt"), str):
        messages = [{"role": "user", "content": row["prompt"]}]
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"expected {ROW_FORMS}; got the fields {sorted(row)}")
    return tuple(prompt_ids(tokenizer, messages, thinking=row.get("thinking")))


def _ids(row: Mapping[str, Any], name: str) -> tuple[int, ...]:
    ids = row[name]
    if not isinstance(ids, list) or not all(isinstance(token, int) and token >= 0 for token in ids):
        raise ValueError(f"{name} must be a list of token ids, got {str(ids)[:60]!r}")
    return tuple(ids)
