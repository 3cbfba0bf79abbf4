"""Conversations as token ids, and the target's own answers in between: what evaluation and data preparation share.

Contract: `prompt_ids` renders what the model is given at a turn; `answer_turns` walks through conversations turn by
turn, all of them side by side, and asks a function for the answers. How answers are made, and in what batches, is the
business of that function. A tokenizer without a chat template gets the texts joined by blank lines. Knows nothing
about models.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from .prompt_sets import Conversation, user_turns

logger = logging.get_logger(__name__)

Respond = Callable[[list[list[int]]], list[list[int]]]
"""Prompts as token ids -> the new ids of each, without padding."""


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """
    One answer of the target.

    Attributes:
        conversation (`int`): Number of the conversation among those given.
        turn (`int`): Which of its answers this is, from 0.
        messages (`list[dict[str, str]]`): The conversation up to the answer.
        prompt_ids (`list[int]`): What the target was given.
        new_ids (`list[int]`): What it wrote, with the end token if it came to one.
    """

    conversation: int
    turn: int
    messages: Conversation
    prompt_ids: list[int]
    new_ids: list[int]


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase, messages: Conversation, *, thinking: bool | None = None
) -> list[int]:
    """
    Token ids of a conversation that awaits its answer.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): The target's.
        messages (`list[dict[str, str]]`): The conversation so far.
        thinking (`bool`, *optional*): Given to the chat template as `enable_thinking`; the template's own choice if
            `None`. A template that does not know it draws a warning.
    """
    if tokenizer.chat_template is None:
        return tokenizer("\n\n".join(message["content"] for message in messages))["input_ids"]
    options: dict[str, Any] = {"add_generation_prompt": True, "return_dict": True}
    if thinking is not None:
        if "enable_thinking" not in str(tokenizer.chat_template):
            logger.warning_once(
                "This tokenizer's chat template has no thinking to turn on or off: `thinking` is ignored."
            )
        options["enable_thinking"] = thinking
    return tokenizer.apply_chat_template(messages, **options)["input_ids"]


def answer_turns(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Conversation],
    respond: Respond,
    *,
    thinking: bool | None = None,
    max_prompt_tokens: int | None = None,
) -> list[Answer]:
    """
    Has all conversations answered: first turns first, then second turns with the answers in between, and so on.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): The target's.
        conversations (`Sequence[list[dict[str, str]]]`): System and user messages, as `load_prompts` gives them.
        respond (`Callable`): Answers a list of prompts.
        thinking (`bool`, *optional*): As for [`prompt_ids`].
        max_prompt_tokens (`int`, *optional*): A conversation ends before a prompt that is longer.

    Returns:
        `list[Answer]`: By conversation, then by turn.
    """
    histories: list[Conversation] = [[] for _ in conversations]
    places = [user_turns(conversation) for conversation in conversations]
    going, answers, turn = list(range(len(conversations))), [], 0
    while going := [number for number in going if turn < len(places[number])]:
        prompts: dict[int, list[int]] = {}
        for number in going:
            first = places[number][turn - 1] + 1 if turn else 0
            histories[number] = histories[number] + conversations[number][first : places[number][turn] + 1]
            ids = prompt_ids(tokenizer, histories[number], thinking=thinking)
            if max_prompt_tokens is None or len(ids) <= max_prompt_tokens:
                prompts[number] = ids
        going = list(prompts)
        for number, new_ids in zip(going, respond(list(prompts.values())) if going else [], strict=True):
            answers.append(Answer(number, turn, histories[number], prompts[number], new_ids))
            text = tokenizer.decode(new_ids, skip_special_tokens=True)
            histories[number] = [*histories[number], {"role": "assistant", "content": text}]
        turn += 1
    return sorted(answers, key=lambda answer: (answer.conversation, answer.turn))
