"""Training data: prompts answered by the target itself, written line by line, taken up again where it stopped.

Contract: `prepare_data` answers conversations in batches and appends a line for each answer to a JSONL file (a
`growing_file`). A run that was stopped is taken up after its last complete batch. Batches and their seeds follow from
the parameters alone, so the result is that of a run that was never stopped; with other parameters a file is not taken
up.

That holds to the bit for greedy text in float32 and for text that is sampled without a drafter or with a fixed
schedule (with a drafter on a CPU up to rounding, see `narrow_linear.py`). A drafter whose scheduler watches the clock
leaves sampled text's distribution as it is, not its every token.

A line: `messages` (the conversation up to the answer), `prompt` (the text of its only message, else null),
`prompt_ids` (as the target was given them), `completion_ids` (with the end token if there was one), `temperature`,
`top_p`, `top_k`, `seed` (of the batch; null for greedy text), `source` and `index` (set and row), `turn`, `sample`,
`thinking`. The prompt's tokens are the ones not to be learned from.
"""

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .chats import Answer, answer_turns, prompt_ids
from .comparison import new_ids
from .evaluation_checks import check_numbers, check_prompt_sets
from .growing_file import GrowingFile
from .modeling_drafter import Drafter
from .prompt_sets import Conversation, PromptSet, chunks, first_turns
from .recording import left_padded, sampling
from .target import target_fingerprint

WINDOW_BATCHES = 32  # prompts are sorted by length among so many batches: little padding, and still all kinds early


@dataclasses.dataclass(frozen=True, slots=True)
class Sampling:
    """
    How answers are drawn.

    Attributes:
        temperatures (`tuple[float, ...]`): Every conversation is answered at each; 0 is greedy.
        top_p (`float`, *optional*): Nucleus; none if `None`.
        top_k (`int`, *optional*): Most likely tokens; all if `None`.
        max_new_tokens (`int`): Length of each answer.
        samples_per_prompt (`int`): Answers at each temperature above 0; greedy ones are all the same.
        seed (`int`): Where the seeds of the batches come from.

    Raises:
        ValueError: A value is out of range.
        TypeError: The temperatures are no list or tuple of numbers.
    """

    temperatures: tuple[float, ...] = (1.0,)
    top_p: float | None = None
    top_k: int | None = None
    max_new_tokens: int = 512
    samples_per_prompt: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        check_numbers("temperatures", self.temperatures)
        if not self.temperatures or any(not 0 <= t < float("inf") for t in self.temperatures):
            raise ValueError(f"temperatures={self.temperatures} must be numbers from 0 (greedy), one at least")
        if len(set(self.temperatures)) < len(self.temperatures):
            raise ValueError(f"temperatures={self.temperatures} names one twice; use samples_per_prompt")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1, or None")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be at least 1, or None")
        if self.max_new_tokens < 1 or self.samples_per_prompt < 1:
            raise ValueError(
                f"max_new_tokens={self.max_new_tokens} and samples_per_prompt={self.samples_per_prompt} must be at "
                "least 1"
            )

    def options(self, temperature: float) -> dict[str, Any]:
        """Arguments of `generate`. Top-k and top-p of the model's own generation config play no part."""
        chosen = sampling(temperature) | {"max_new_tokens": self.max_new_tokens}
        return chosen | ({"top_k": self.top_k or 0, "top_p": self.top_p or 1.0} if temperature > 0 else {})


@dataclasses.dataclass(frozen=True, slots=True)
class _Job:
    """A conversation that is to be answered once."""

    source: str
    index: int
    conversation: Conversation
    temperature: float
    sample: int


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """
    What came of it.

    Attributes:
        path (`Path`): The JSONL file.
        num_answers, num_tokens (`int`): Lines and completion tokens in it, earlier runs included.
        num_skipped (`int`): Conversations whose first prompt leaves no room for an answer.
    """

    path: Path
    num_answers: int
    num_tokens: int
    num_skipped: int


@torch.no_grad()
def prepare_data(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt_sets: Sequence[PromptSet],
    output: str | os.PathLike,
    *,
    drafter: Drafter | None = None,
    how: Sampling | None = None,
    batch_size: int = 16,
    thinking: bool | None = None,
    system: str | None = None,
    progress: bool = True,
) -> Prepared:
    r"""
    Has conversations answered by the target and writes the answers, or goes on where an earlier run stopped.

    ```python
    >>> sets = [load_prompts("gsm8k.jsonl", hold_out=5)]
    >>> prepare_data(target, tokenizer, sets, "answers.jsonl", drafter=drafter, how=Sampling(temperatures=(0.0, 1.0)))
    ```

    Args:
        target ([`~transformers.PreTrainedModel`]): The target, in evaluation mode.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Its tokenizer.
        prompt_sets (`Sequence[PromptSet]`): What to answer; every turn of it, one after the other.
        output (`str` or `os.PathLike`): The JSONL file; `<output>.meta.json` is written beside it.
        drafter ([`Drafter`], *optional*): Makes it faster. The text stays the target's.
        how ([`Sampling`], *optional*): How answers are drawn; at temperature 1 by default.
        batch_size (`int`, *optional*, defaults to 16): Prompts answered at once.
        thinking (`bool`, *optional*): Given to the chat template as `enable_thinking`, and recorded.
        system (`str`, *optional*): A system message for conversations that have none.
        progress (`bool`, *optional*, defaults to `True`): Whether to show a bar, with tokens per second.

    Raises:
        ValueError: Nothing to answer; or the file at `output` is another's, was made with other parameters, or is
            shorter than its record says.
        TypeError: `prompt_sets` are no [`PromptSet`]s, or `how` is no [`Sampling`].
        OSError: The file cannot be written.
    """
    check_prompt_sets(prompt_sets)
    how = Sampling() if how is None else how
    if not isinstance(how, Sampling):
        raise TypeError(f"how must be a Sampling, such as Sampling(temperatures=(0.0,)), got {type(how).__name__}")
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1")
    limit = _positions(target)
    batches, num_skipped = _batches(tokenizer, prompt_sets, how, batch_size, thinking, system, limit)
    parameters = {
        "target_fingerprint": target_fingerprint(target),
        "dtype": str(target.dtype).removeprefix("torch."),
        "generation_config": _own_generation(target),
        **dataclasses.asdict(how),
        "temperatures": list(how.temperatures),
        "batch_size": batch_size,
        "thinking": thinking,
        "system": system,
        "drafted": drafter is not None,
        "prompts": [[prompts.name, len(prompts), _digest(prompts)] for prompts in prompt_sets],
    }
    tokens_now, began_seconds = 0, time.perf_counter()
    with GrowingFile(output, parameters) as file:
        bar = tqdm(total=len(batches), initial=file.batches, unit="batch", desc="answers", disable=not progress)
        for number in range(file.batches, len(batches)):
            batch, temperature = batches[number], batches[number][0].temperature
            seed = batch_seed(how.seed, number) if temperature > 0 else None
            answers = _answer(target, tokenizer, batch, drafter, how.options(temperature), seed, thinking, limit)
            num_tokens = sum(len(answer.new_ids) for answer in answers)
            lines = [_line(batch[answer.conversation], answer, how, seed, thinking) for answer in answers]
            file.append(lines, answers=len(lines), tokens=num_tokens)
            tokens_now += num_tokens
            bar.set_postfix_str(f"{tokens_now / (time.perf_counter() - began_seconds):.0f} tokens/s", refresh=False)
            bar.update()
        bar.close()
        return Prepared(file.path, file.totals["answers"], file.totals["tokens"], num_skipped)


def batch_seed(seed: int, number: int) -> int:
    """The seed of a batch, from that of the run and the batch's number."""
    return int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:4], "big")


def _batches(
    tokenizer: PreTrainedTokenizerBase,
    prompt_sets: Sequence[PromptSet],
    how: Sampling,
    batch_size: int,
    thinking: bool | None,
    system: str | None,
    limit: int | None,
) -> tuple[list[list[_Job]], int]:
    """All batches, in order, and how many conversations are left out since their first prompt is too long."""
    conversations: list[tuple[str, int, Conversation, int]] = []
    num_skipped = 0
    for prompts in prompt_sets:
        for index, conversation in zip(prompts.indices, prompts.conversations, strict=True):
            if system is not None and conversation[0]["role"] != "system":
                conversation = [{"role": "system", "content": system}, *conversation]
            length = len(prompt_ids(tokenizer, first_turns(conversation), thinking=thinking))
            if limit is not None and length + how.max_new_tokens > limit:
                num_skipped += 1
            else:
                conversations.append((prompts.name, index, conversation, length))
    if not conversations:
        raise ValueError(
            f"nothing to answer: {num_skipped} conversations were given whose first prompt, with "
            f"max_new_tokens={how.max_new_tokens}, is longer than the target's {limit} positions"
            if num_skipped
            else "nothing to answer: give a prompt set with a conversation at least"
        )
    batches: list[list[_Job]] = []
    for temperature in how.temperatures:
        for sample in range(how.samples_per_prompt if temperature > 0 else 1):
            for window in chunks(conversations, WINDOW_BATCHES * batch_size):
                ordered = sorted(window, key=lambda entry: entry[3])
                jobs = [_Job(name, index, asked, temperature, sample) for name, index, asked, _ in ordered]
                batches.extend(list(batch) for batch in chunks(jobs, batch_size))
    return batches, num_skipped


def _answer(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batch: Sequence[_Job],
    drafter: Drafter | None,
    options: Mapping[str, Any],
    seed: int | None,
    thinking: bool | None,
    limit: int | None,
) -> list[Answer]:
    """Every turn of a batch; the global random state is left as it was."""

    def respond(asked: list[list[int]]) -> list[list[int]]:
        inputs = left_padded(asked, target.generation_config.pad_token_id, target.device)
        sequences = target.generate(**inputs, assistant_model=drafter, **options)
        return new_ids(target, sequences, inputs["input_ids"].shape[1])

    longest = None if limit is None else limit - options["max_new_tokens"]
    conversations = [job.conversation for job in batch]
    with torch.random.fork_rng():
        if seed is not None:
            torch.manual_seed(seed)
        return answer_turns(tokenizer, conversations, respond, thinking=thinking, max_prompt_tokens=longest)


def _line(job: _Job, answer: Answer, how: Sampling, seed: int | None, thinking: bool | None) -> dict[str, Any]:
    only = answer.messages[0]["content"] if len(answer.messages) == 1 else None
    sampled = job.temperature > 0
    return {
        "source": job.source,
        "index": job.index,
        "turn": answer.turn,
        "sample": job.sample,
        "temperature": job.temperature,
        "top_p": how.top_p if sampled else None,
        "top_k": how.top_k if sampled else None,
        "seed": seed,
        "thinking": thinking,
        "prompt": only,
        "messages": answer.messages,
        "prompt_ids": answer.prompt_ids,
        "completion_ids": answer.new_ids,
    }


def _digest(prompts: PromptSet) -> str:
    return hashlib.sha256(json.dumps([prompts.indices, prompts.conversations]).encode()).hexdigest()[:16]


def _positions(target: PreTrainedModel) -> int | None:
    return getattr(target.config.get_text_config(), "max_position_embeddings", None)


def _own_generation(target: PreTrainedModel) -> dict[str, Any]:
    """What the target's own generation config adds to the sampling, such as a repetition penalty."""
    known = target.generation_config.to_diff_dict()
    ours = ("do_sample", "temperature", "top_p", "top_k", "max_length", "max_new_tokens")
    never_text = ("transformers_version", "use_cache", "pad_token_id", "bos_token_id")
    return {
        name: json.loads(json.dumps(value, default=str))
        for name, value in known.items()
        if name not in (*ours, *never_text) and not name.startswith(("_", "output_", "return_"))
    }
