"""Prompts to decode: JSONL files, the paper's nine evaluation sets by name, or another dataset of the Hub.

Contract: a source becomes a [`PromptSet`] of conversations without answers: a conversation is the system message, if
there is one, and the user's messages in order; what an assistant said in the source is left out, since the target
answers by itself. Rows keep the number they have in the source (from 0), so that rows can be held out by number. Knows
nothing about models or tokenizers; the network is reached for Hub datasets only, through the `datasets` package.

The nine sets are those of https://huggingface.co/papers/2607.05147, Table 1. Their ids, splits and fields were written
down without a network at hand and have not been tried against the Hub: if one has moved, the error names the fields
that are there, and a JSONL file with `turns` does the same job.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Message = dict[str, str]
"""`{"role": ..., "content": ...}`, as chat templates take it."""

Conversation = list[Message]

ROW_FIELDS = 'a list "turns" of texts, a text "prompt", or a list "messages" of {"role": ..., "content": ...}'


@dataclasses.dataclass(frozen=True, slots=True)
class PromptSet:
    """
    Conversations that await their answers.

    Attributes:
        name (`str`): Name of the source: a set's name, or a file's without its suffix.
        conversations (`tuple[list[dict[str, str]], ...]`): System message, if any, and user messages.
        indices (`tuple[int, ...]`): Number of each conversation's row in the source, from 0.
    """

    name: str
    conversations: tuple[Conversation, ...]
    indices: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.conversations)


@dataclasses.dataclass(frozen=True, slots=True)
class HubSource:
    """
    Where a set lives on the Hub, and what its prompts are made of.

    Attributes:
        path (`str`): First argument of `datasets.load_dataset`.
        split (`str`): The split.
        fields (`tuple[str, ...]`): Fields of a row that make the prompt; empty ones are left out, others joined by a
            blank line. A field that holds a list of texts makes a turn of each.
        config (`str`, *optional*): Second argument of `datasets.load_dataset`.
        data_files (`str`, *optional*): Files to read, where the repository is no plain dataset.
        template (`str`, *optional*, defaults to `"{}"`): What is asked of the model, around the prompt.
    """

    path: str
    split: str
    fields: tuple[str, ...]
    config: str | None = None
    data_files: str | None = None
    template: str = "{}"


STEP_BY_STEP = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
PASSES_TESTS = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```"
PYTHON_PROGRAM = "Write a correct Python program that solves the following problem.\n\n{}"
_HUB = "hf://datasets"

HUB_SETS: dict[str, HubSource] = {
    "gsm8k": HubSource("openai/gsm8k", "test", ("question",), config="main", template=STEP_BY_STEP),
    "math500": HubSource("HuggingFaceH4/MATH-500", "test", ("problem",), template=STEP_BY_STEP),
    "aime25": HubSource("math-ai/aime25", "test", ("problem",), template=STEP_BY_STEP),
    "mbpp": HubSource("google-research-datasets/mbpp", "test", ("prompt",), config="sanitized"),
    "humaneval": HubSource("openai/openai_humaneval", "test", ("prompt",), template=PASSES_TESTS),
    "livecodebench": HubSource(  # as files: the repository holds a loading script, which datasets 4 does not run
        "json",
        "train",
        ("question_content", "starter_code"),
        data_files=f"{_HUB}/livecodebench/code_generation_lite/test.jsonl",
        template=PYTHON_PROGRAM,
    ),
    "mt-bench": HubSource("HuggingFaceH4/mt_bench_prompts", "train", ("prompt",)),
    "alpaca": HubSource("tatsu-lab/alpaca", "train", ("instruction", "input")),
    "arena-hard": HubSource(
        "json",
        "train",
        ("prompt",),
        data_files=f"{_HUB}/lmarena-ai/arena-hard-auto/data/arena-hard-v2.0/question.jsonl",
    ),
}
"""The paper's sets by name."""


def read_jsonl(path: str | os.PathLike) -> list[dict[str, Any]]:
    """
    The objects in a JSONL file, one a line. Lines end at "\\n" only: JSON texts may hold other line separators.

    Raises:
        ValueError: A line holds no JSON object, or there is no line; the message names the file and the line.
        OSError: The file cannot be read.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text ({error})") from None
    text = text.removesuffix("\n")
    if not text.strip():
        raise ValueError(f"{path} is empty; it should hold one JSON object a line")
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: expected a JSON object, got {line[:80]!r}")
        rows.append(row)
    return rows


def conversation_of(row: Mapping[str, Any]) -> Conversation:
    """
    The conversation in a row with `turns`, `prompt` or `messages`, assistant messages left out.

    Raises:
        ValueError: There is none; the message says what a row should hold.
    """
    if "messages" in row:
        return _asked(row["messages"])
    turns = row["turns"] if "turns" in row else [row["prompt"]] if "prompt" in row else None
    if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns or not all(map(_is_text, turns)):
        raise ValueError(f"expected {ROW_FIELDS}, got {_shown(row)}")
    return [{"role": "user", "content": turn} for turn in turns]


def load_prompts(
    name_or_path: str | os.PathLike,
    *,
    every: int = 1,
    offset: int = 0,
    hold_out: int | None = None,
    limit: int | None = None,
    turns: int | None = None,
    max_characters: int | None = None,
    config: str | None = None,
    split: str | None = None,
) -> PromptSet:
    """
    Reads prompts.

    ```python
    >>> held_out = load_prompts("gsm8k.jsonl", every=5)  # rows 0, 5, 10 ...
    >>> for_training = load_prompts("gsm8k.jsonl", hold_out=5)  # all others
    ```

    Args:
        name_or_path (`str` or `os.PathLike`): A JSONL file whose rows hold `turns`, `prompt` or `messages`; a name in
            `HUB_SETS`; or the id of a Hub dataset ("owner/name") with such columns.
        every, offset (`int`, *optional*): Take rows `offset`, `offset + every`, ...; all by default.
        hold_out (`int`, *optional*): Leave out the rows whose number this divides.
        limit (`int`, *optional*): Conversations at most.
        turns (`int`, *optional*): Messages of the user at most, in each; all by default.
        max_characters (`int`, *optional*): Leave out rows whose messages are longer together.
        config, split (`str`, *optional*): Of a Hub dataset; its split defaults to "train", a named set has its own.

    Returns:
        [`PromptSet`]: At least one conversation.

    Raises:
        ValueError: The name is unknown, a row holds no prompt, or no row is left.
        OSError: The file cannot be read.
        ImportError: A Hub dataset, without the `datasets` package.
        ConnectionError: The Hub cannot be reached.
    """
    for option, value, least in (("every", every, 1), ("offset", offset, 0), ("limit", limit, 1), ("turns", turns, 1)):
        if value is not None and value < least:
            raise ValueError(f"{option}={value} must be at least {least}")
    if hold_out is not None and hold_out < 2:
        raise ValueError(f"hold_out={hold_out} must be at least 2: 1 divides the number of every row")
    name, rows, read = _source(name_or_path, config, split)
    conversations: list[Conversation] = []
    indices: list[int] = []
    for index in range(offset, len(rows), every):
        if limit is not None and len(indices) == limit:
            break
        if hold_out is not None and index % hold_out == 0:
            continue
        try:
            conversation = first_turns(read(rows[index]), turns)
        except ValueError as error:
            raise ValueError(f"{os.fspath(name_or_path)}, line {index + 1}: {error}") from None
        if max_characters is None or sum(len(message["content"]) for message in conversation) <= max_characters:
            conversations.append(conversation)
            indices.append(index)
    if not indices:
        raise ValueError(
            f"no prompts were given: of the {len(rows)} rows of {os.fspath(name_or_path)}, every={every}, "
            f"offset={offset}, hold_out={hold_out} and max_characters={max_characters} leave none"
        )
    return PromptSet(name, tuple(conversations), tuple(indices))


def first_turns(conversation: Conversation, count: int | None = 1) -> Conversation:
    """`conversation` up to and with the user's `count`-th message, or the last if there are fewer."""
    return conversation[: user_turns(conversation)[:count][-1] + 1]


def user_turns(conversation: Conversation) -> list[int]:
    """Where the user's messages are in `conversation`; after each of them the target answers."""
    return [place for place, message in enumerate(conversation) if message["role"] == "user"]


def _source(
    name_or_path: str | os.PathLike, config: str | None, split: str | None
) -> tuple[str, Any, Callable[[Mapping[str, Any]], Conversation]]:
    """Name of the set, its rows, and what makes a conversation of a row."""
    text = os.fspath(name_or_path)
    if text in HUB_SETS:
        source = HUB_SETS[text]
        return text, _hub_rows(source, text), lambda row: _from_fields(row, source)
    path = Path(text)
    if path.is_file() or path.suffix in (".jsonl", ".json"):
        return path.stem, read_jsonl(path), conversation_of
    if text.count("/") == 1 and all(text.split("/")) and not text.startswith((".", "~")):
        return text, _hub_rows(HubSource(text, split or "train", (), config), text), conversation_of
    raise ValueError(f"{text!r} is no file, and no set that is known by name: {', '.join(HUB_SETS)}")


def _hub_rows(source: HubSource, name: str) -> Any:
    """The rows of a Hub dataset, by number."""
    instead = f"or give a JSONL file whose rows hold {ROW_FIELDS}"
    try:
        import datasets
    except ImportError as error:
        raise ImportError(f"{name} comes from the Hub: pip install 'hf-dspark[data]', {instead}") from error
    arguments: dict[str, Any] = {"split": source.split}
    if source.config is not None:
        arguments["name"] = source.config
    if source.data_files is not None:
        arguments["data_files"] = source.data_files
    try:
        return datasets.load_dataset(source.path, **arguments)
    except (ConnectionError, OSError) as error:
        raise ConnectionError(
            f"{name} could not be loaded from the Hub ({source.data_files or source.path}): {error}. Are you online? "
            f"Load it once where you are, {instead}"
        ) from error
    except (ValueError, RuntimeError) as error:  # no such config or split, a script
        raise ValueError(
            f"{name}: the Hub's {source.data_files or source.path} does not load ({error}); {instead}"
        ) from error


def _from_fields(row: Mapping[str, Any], source: HubSource) -> Conversation:
    """The conversation of a named set's row."""
    if missing := [field for field in source.fields if field not in row]:
        raise ValueError(f"the set has no field {missing[0]!r}; there are {sorted(row)}. Give a JSONL file instead")
    values = [row[field] for field in source.fields]
    if len(values) == 1 and isinstance(values[0], list):
        return conversation_of({"turns": values[0]})
    text = "\n\n".join(value for value in values if isinstance(value, str) and value.strip())
    return conversation_of({"prompt": source.template.format(text) if text else ""})


def _asked(messages: Any) -> Conversation:
    """System and user messages, in order."""
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise ValueError(f"expected {ROW_FIELDS}, got messages {_shown(messages)}")
    asked = [dict(role=m["role"], content=m["content"]) for m in messages if m["role"] in ("system", "user")]
    if not any(message["role"] == "user" for message in asked):
        raise ValueError(f"expected a message of the user at least, got messages {_shown(messages)}")
    return asked


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _shown(value: Any) -> str:
    return repr(value)[:80]


def chunks(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """`items` in order, `size` at a time."""
    return (items[first : first + size] for first in range(0, len(items), size))
