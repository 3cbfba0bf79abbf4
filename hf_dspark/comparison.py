"""The same prompts, plain and with a drafter: what each run took, and whether the text is the same.

Contract: runs `target.generate` under a clock and counts what came out. A run's seconds are the whole call, prefill
included; its tokens are counted per row up to and with the end token, so finished rows add nothing. Knows nothing
about terminals or about how a drafter works.

Shapes: R rows, S prompt length.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationMixin

from .rounds import DecodingRound, DecodingStats


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """
    One timed `generate` call.

    Attributes:
        new_ids (`list[list[int]]` of length R): New ids of each row, without the padding after its end token.
        seconds (`float`): Duration of the whole call.
        stats (`DecodingStats` or `None`): What the drafter did; `None` for a plain run.
    """

    new_ids: list[list[int]]
    seconds: float
    stats: DecodingStats | None

    @property
    def num_tokens(self) -> int:
        """New tokens of all rows."""
        return sum(len(row) for row in self.new_ids)

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows per second of the whole call."""
        return self.num_tokens / self.seconds


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """A plain run and one with a drafter, on the same prompts."""

    label: str
    plain: Run
    drafted: Run

    @property
    def identical(self) -> bool:
        """Whether both runs gave the same ids; to be expected of greedy decoding only."""
        return self.plain.new_ids == self.drafted.new_ids

    @property
    def speedup(self) -> float:
        """Tokens per second with the drafter over those without."""
        return self.drafted.tokens_per_second / self.plain.tokens_per_second


def timed_generate(
    target: GenerationMixin, inputs: Mapping[str, torch.Tensor], *, seed: int = 0, **generate_kwargs: Any
) -> Run:
    """
    Runs and times `target.generate`.

    Args:
        target (`GenerationMixin`): The target model.
        inputs (`Mapping[str, torch.Tensor]`): `input_ids` `[R, S]`, left padded, and `attention_mask` `[R, S]`.
        seed (`int`, *optional*, defaults to 0): Seed of torch's global generator, set before the clock starts.
        generate_kwargs: For `generate`; a drafter goes in as `assistant_model`.
    """
    rounds: list[DecodingRound] = []
    drafter = generate_kwargs.get("assistant_model")
    if drafter is not None:
        told = drafter.options.on_round

        def on_round(decoding_round: DecodingRound) -> None:
            rounds.append(decoding_round)
            if told is not None:
                told(decoding_round)

        generate_kwargs["assistant_model"] = drafter.with_options(on_round=on_round)
    torch.manual_seed(seed)
    start_seconds = time.perf_counter()
    sequences = target.generate(**inputs, **generate_kwargs)  # ids alone: nobody pays for a cache to keep
    if sequences.is_cuda:
        torch.cuda.synchronize(sequences.device)
    seconds = time.perf_counter() - start_seconds
    stats = None if drafter is None else DecodingStats(rounds)
    return Run(new_ids(target, sequences, inputs["input_ids"].shape[1]), seconds, stats)


def warm_up(
    target: GenerationMixin, inputs: Mapping[str, torch.Tensor], drafter: Any, *, max_new_tokens: int = 8
) -> None:
    """A few tokens of both kinds, so that no run pays for first touches of weights and kernels."""
    for assistant in (None, drafter):
        target.generate(**inputs, assistant_model=assistant, do_sample=False, max_new_tokens=max_new_tokens)


def new_ids(target: GenerationMixin, sequences: torch.Tensor, width: int) -> list[list[int]]:
    """What `generate` wrote after prompts of `width` tokens, each row up to and with its end token."""
    end = target.generation_config.eos_token_id
    end_ids = set(end) if isinstance(end, list) else {end}
    return [
        next((row[: i + 1] for i, token_id in enumerate(row) if token_id in end_ids), row)
        for row in sequences[:, width:].tolist()
    ]
