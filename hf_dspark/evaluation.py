"""What a drafter is worth: acceptance on sets of prompts, position by position, and what follows from it.

Contract: `evaluate` decodes prompts that the drafter was not trained on, once for each set, temperature and drafter,
with whole blocks verified, and sums up what was recorded; nothing is changed. Conversations of several turns are run
turn by turn, with the target's own answers in between. Prompts that are random tokens are refused. Figures are those
of `evaluation_figures`; tables and pictures are made in `evaluation_report`.

Source: https://huggingface.co/papers/2607.05147, section 4. Shape legend: K draft positions.
"""

import dataclasses
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from .chance import refuse_random_prompts
from .chats import answer_turns, prompt_ids
from .comparison import timed_generate, warm_up
from .evaluation_checks import check_evaluation
from .evaluation_figures import SetFigures, SpeedFigures
from .json_files import read_object, without_nan, write_object
from .modeling_drafter import Drafter
from .prompt_sets import PromptSet, chunks, first_turns, user_turns
from .recorded_answers import RecordedAnswer
from .recording import WholeBlocks, left_padded, sampling
from .target import target_fingerprint

THRESHOLDS = (0.0, 0.2, 0.4, 0.6, 0.8)  # Fig. 5
SPEED_REPEATS = 3

logger = logging.get_logger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Evaluation:
    """
    Figures of one or more drafters of a target.

    Attributes:
        settings (`Mapping[str, Any]`): What was run and where, as JSON values.
        results (`tuple[SetFigures, ...]`): One for each set, temperature and drafter.
    """

    settings: Mapping[str, Any]
    results: tuple[SetFigures, ...]

    def save(self, path: str | os.PathLike) -> None:
        """Writes everything as JSON; the file is complete whenever it is there."""
        write_object(
            path, {"settings": without_nan(self.settings), "results": [result.to_dict() for result in self.results]}
        )

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Evaluation":
        """
        Reads what `save` wrote.

        Raises:
            ValueError: The file holds no evaluation.
        """
        data = read_object(path)
        if not isinstance(data.get("settings"), dict) or not isinstance(data.get("results"), list):
            raise ValueError(f"{os.fspath(path)} is no evaluation: it needs 'settings' and 'results'")
        return cls(data["settings"], tuple(map(SetFigures.from_dict, data["results"])))


@torch.no_grad()
def evaluate(
    target: PreTrainedModel,
    drafter: Drafter | Mapping[str, Drafter],
    prompt_sets: Sequence[PromptSet],
    *,
    tokenizer: PreTrainedTokenizerBase,
    temperatures: Sequence[float] = (0.0, 1.0),
    max_new_tokens: int = 256,
    batch_size: int = 8,
    thresholds: Sequence[float] = THRESHOLDS,
    thinking: bool | None = None,
    seed: int = 0,
    speed_prompts: int = 0,
    allow_random: bool = False,
    on_result: Callable[[Evaluation], None] | None = None,
    **generation_options: Any,
) -> Evaluation:
    r"""
    Measures drafters.

    ```python
    >>> sets = [load_prompts("gsm8k.jsonl", every=5), load_prompts("mt-bench.jsonl", every=5)]
    >>> found = evaluate(target, {"mine": drafter, "theirs": other}, sets, tokenizer=tokenizer)
    >>> print(markdown_report(found))
    ```

    Args:
        target ([`~transformers.PreTrainedModel`]): The target.
        drafter ([`Drafter`] or a mapping of names to them): What is measured.
        prompt_sets (`Sequence[PromptSet]`): Prompts; see [`load_prompts`].
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): The target's.
        temperatures (`Sequence[float]`, *optional*, defaults to `(0.0, 1.0)`): 0 is greedy. Sampled text has neither
            top-k nor top-p unless `generation_options` say so.
        max_new_tokens (`int`, *optional*, defaults to 256): Length of each answer. A prompt that leaves no room for it
            in the target's `max_position_embeddings` ends its conversation, which is counted.
        batch_size (`int`, *optional*, defaults to 8): Prompts decoded at once. Acceptance does not depend on it.
        thresholds (`Sequence[float]`, *optional*): Confidence thresholds to replay.
        thinking (`bool`, *optional*): Given to the chat template as `enable_thinking`.
        seed (`int`, *optional*, defaults to 0): For sampling.
        speed_prompts (`int`, *optional*, defaults to 0): First turns of so many prompts of each set are decoded
            plainly and with the drafter's own scheduler, too, under a clock.
        allow_random (`bool`, *optional*, defaults to `False`): Take prompts of random tokens.
        on_result (`Callable[[Evaluation], None]`, *optional*): Told after each set, temperature and drafter what there
            is so far, so that it can be kept.
        generation_options: Further arguments of `generate`.

    Returns:
        [`Evaluation`]: In the order of sets, then temperatures, then drafters.

    Raises:
        ValueError: There is nothing to decode, an option is out of range, or prompts are random tokens.
        TypeError: An argument is of another kind.
    """
    drafters = drafter if isinstance(drafter, Mapping) else {"drafter": drafter}
    check_evaluation(target, drafters, tokenizer, prompt_sets, temperatures, thresholds, max_new_tokens, batch_size)
    if not allow_random:
        for prompts in prompt_sets:
            refuse_random_prompts(target, tokenizer, prompts)
    settings: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "batch_size": batch_size,
        "thinking": thinking,
        "seed": seed,
        "generation_options": {name: value for name, value in generation_options.items() if _is_plain(value)},
        **describe_pair(target, drafters),
    }
    results: list[SetFigures] = []
    for prompts in prompt_sets:
        for temperature in temperatures:
            for name, each in drafters.items():
                run = _Run(target, each, tokenizer, temperature, max_new_tokens, batch_size, thinking, seed)
                figures = run.measure(name, prompts, thresholds, speed_prompts, generation_options)
                results.append(figures)
                if on_result is not None:
                    on_result(Evaluation(settings, tuple(results)))
    return Evaluation(settings, tuple(results))


def describe_pair(target: PreTrainedModel, drafters: Mapping[str, Drafter]) -> dict[str, Any]:
    """What figures depend on besides options, as JSON values."""
    return {
        "target": target.name_or_path or type(target).__name__,
        "target_fingerprint": target_fingerprint(target),
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": target.device.type,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "drafters": {
            name: {"type": type(each).__name__, "drafts": each.config.num_drafts, "path": each.name_or_path}
            for name, each in drafters.items()
        },
    }


@dataclasses.dataclass(frozen=True, slots=True)
class _Run:
    """One drafter at one temperature."""

    target: PreTrainedModel
    drafter: Drafter
    tokenizer: PreTrainedTokenizerBase
    temperature: float
    max_new_tokens: int
    batch_size: int
    thinking: bool | None
    seed: int

    def measure(
        self,
        name: str,
        prompts: PromptSet,
        thresholds: Sequence[float],
        speed_prompts: int,
        generation_options: Mapping[str, Any],
    ) -> SetFigures:
        """The figures of a set."""
        options = {**({"top_k": 0, "top_p": 1.0} if self.temperature > 0 else {}), **generation_options}
        answers, num_skipped = self._record(prompts, options)
        self._warn_of_length(name, answers)
        mode = "sampling" if self.temperature > 0 else "greedy"
        return SetFigures.of_answers(
            answers,
            drafter=name,
            dataset=prompts.name,
            temperature=self.temperature,
            num_prompts=len(prompts),
            num_skipped=num_skipped,
            num_drafts=self.drafter.config.num_drafts,
            thresholds=thresholds,
            confidence_temperatures=(self.drafter.config.confidence_temperatures or {}).get(mode),
            confidence_offsets=(self.drafter.config.confidence_offsets or {}).get(mode),
            speed=self._speed(prompts, speed_prompts, options) if speed_prompts else None,
        )

    def _record(self, prompts: PromptSet, options: Mapping[str, Any]) -> tuple[list[RecordedAnswer], int]:
        """Every answer of every turn, and how many conversations ended early."""
        blocks = WholeBlocks(
            self.target,
            self.drafter,
            temperature=self.temperature,
            max_new_tokens=self.max_new_tokens,
            seed=self.seed,
            **options,
        )
        recorded: list[RecordedAnswer] = []
        # No bar where nobody looks: a log would get a line for each of its states.
        bar = logging.tqdm(total=_num_turns(prompts), desc=prompts.name, unit="answer", leave=False, disable=None)
        limit = max_prompt_tokens(self.target, self.max_new_tokens)

        def respond(asked: list[list[int]]) -> list[list[int]]:
            found: dict[int, RecordedAnswer] = {}
            by_length = sorted(range(len(asked)), key=lambda number: len(asked[number]))
            for chosen in chunks(by_length, self.batch_size):
                batch = blocks.decode(self._inputs([asked[number] for number in chosen]))
                for row, number in enumerate(chosen):
                    ids, rounds = tuple(batch.new_ids[row]), tuple(batch.rounds_of(row))
                    found[number] = RecordedAnswer(len(asked[number]), ids, rounds)
                bar.update(len(chosen))
            recorded.extend(found.values())
            return [list(found[number].new_ids) for number in range(len(asked))]

        answers = answer_turns(
            self.tokenizer,
            prompts.conversations,
            respond,
            thinking=self.thinking,
            max_prompt_tokens=limit,
        )
        bar.close()
        if not recorded:
            raise ValueError(
                f"{prompts.name}: every prompt is longer than the {limit} tokens that "
                f"max_new_tokens={self.max_new_tokens} leaves of the target's positions; lower it"
            )
        return recorded, _num_cut(prompts, answers)

    def _inputs(self, rows: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
        return left_padded(rows, self.target.generation_config.pad_token_id, self.target.device)

    def _warn_of_length(self, name: str, answers: Sequence[RecordedAnswer]) -> None:
        """Once, if text went past what the drafter has seen in training."""
        config = self.drafter.config
        field = "training_length" if getattr(config, "training_length", None) else "max_position_embeddings"
        limit, longest = getattr(config, field), max(max(each.context_lengths, default=0) for each in answers)
        if longest > limit:
            logger.warning_once(
                f"{name}: texts of up to {longest} tokens were decoded, past the drafter's {field} of {limit}; see "
                "acceptance by length of the text"
            )

    def _speed(self, prompts: PromptSet, num_prompts: int, options: Mapping[str, Any]) -> SpeedFigures | None:
        """Plain and drafted decoding of first turns in turn, each batch several times."""
        rows = [
            prompt_ids(self.tokenizer, first_turns(conversation), thinking=self.thinking)
            for conversation in prompts.conversations
        ]
        limit = max_prompt_tokens(self.target, self.max_new_tokens)
        rows = sorted((row for row in rows[:num_prompts] if limit is None or len(row) <= limit), key=len)
        generation = {**sampling(self.temperature), "max_new_tokens": self.max_new_tokens, **options}
        if not rows:
            return None
        plain, drafted, identical = [], [], True
        for number, chosen in enumerate(chunks(rows, self.batch_size)):
            inputs = self._inputs(chosen)
            if number == 0:
                warm_up(self.target, inputs, self.drafter)
            for repeat in range(SPEED_REPEATS):
                runs = {}
                for assistant in (None, self.drafter)[:: -1 if repeat % 2 else 1]:
                    runs[assistant is None] = timed_generate(
                        self.target, inputs, seed=self.seed, assistant_model=assistant, **generation
                    )
                plain.append(runs[True].tokens_per_second)
                drafted.append(runs[False].tokens_per_second)
                identical &= runs[True].new_ids == runs[False].new_ids
        return SpeedFigures(
            plain_tokens_per_second=statistics.median(plain),
            tokens_per_second=statistics.median(drafted),
            ratio=statistics.median(d / p for d, p in zip(drafted, plain, strict=True)),
            num_prompts=len(rows),
            batch_size=self.batch_size,
            repeats=SPEED_REPEATS,
            identical=identical,
        )


def max_prompt_tokens(target: PreTrainedModel, max_new_tokens: int) -> int | None:
    """The longest prompt that leaves room for an answer; `None` if the target says nothing about its length."""
    positions = getattr(target.config.get_text_config(), "max_position_embeddings", None)
    return None if positions is None else positions - max_new_tokens


def _num_turns(prompts: PromptSet) -> int:
    return sum(len(user_turns(conversation)) for conversation in prompts.conversations)


def _num_cut(prompts: PromptSet, answers: Sequence[Any]) -> int:
    """Conversations with fewer answers than questions."""
    given = [0] * len(prompts)
    for answer in answers:
        given[answer.conversation] += 1
    asked = [len(user_turns(conversation)) for conversation in prompts.conversations]
    return sum(few < many for few, many in zip(given, asked, strict=True))


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)
