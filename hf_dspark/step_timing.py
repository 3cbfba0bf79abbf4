"""Single steps of decoding, made up to be timed: a target forward, a block of drafts, the loop around them.

Contract: each class sets up one kind of step on real models and runs it in any shape; `seconds` times one run, from an
idle device to results on the host. Caches are filled with constants instead of prompts, since the time of a step does
not depend on what is in them. Nothing is left on the models, and no random number is taken from the user's generators.
What to measure, and how often, is decided in `profiling.py`.

Source: https://huggingface.co/papers/2607.05147, section 3.2. Shape legend: B tokens of a verification, R rows, K
drafts a block, M tapped layers, Dt target hidden.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
)

from .decoding import Decoder
from .drafting import Drafts, DraftSession
from .modeling_dspark import DSparkDrafter
from .packed import SlabCache, packed_forward
from .processors import RowProcessors
from .scheduling import FixedLength
from .target import TargetView
from .verification import RandomSource

# What is put into caches. Not zeros: untouched memory of zeros is one page that the processor has at hand.
FILLING = 0.01
CONTEXT_PER_ROUND = 2  # tokens a row that a round commits and the next one gives to the drafter, about


def home_device(model: PreTrainedModel) -> torch.device:
    """Where a model takes its ids; an offloaded one, on "meta", takes them on the CPU."""
    return torch.device("cpu") if model.device.type == "meta" else model.device


def synchronize(device: torch.device) -> None:
    """Waits until a device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def now(device: torch.device) -> float:
    """Seconds on the clock once a device has done what it was given."""
    synchronize(device)
    return time.perf_counter()


def seconds_of(run: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one `run`, from an idle device to an idle device."""
    began = now(device)
    run()
    return now(device) - began


def num_slots(context: int, queries: int) -> int:
    """Slots that a `SlabCache` reserves for a row of `context` tokens that takes in `queries` more."""
    return max(16, 1 << (context + queries - 1).bit_length())


class VerifyStep:
    """
    The target's packed forward over rows that hold `context` tokens, with what a verification reads off it.

    Args:
        target ([`~transformers.PreTrainedModel`]): The target.
        drafter ([`DSparkDrafter`], *optional*): Whose tapped hidden states are captured.
        context (`int`): Cached tokens of every row.
        max_rows (`int`), max_queries (`int`): The most rows, and tokens of a row, that will be asked for.
        generator (`torch.Generator`): For token ids, on the CPU.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: DSparkDrafter | None,
        *,
        context: int,
        max_rows: int,
        max_queries: int,
        generator: torch.Generator,
    ):
        self.target, self.context, self.device = target, context, home_device(target)
        self.hidden_states = False if drafter is None else TargetView(target, drafter).hidden_state_indices
        vocab_size = target.get_input_embeddings().num_embeddings
        self._ids = torch.randint(vocab_size, (1, max_rows * max_queries), generator=generator).to(self.device)
        self.cache = SlabCache(max_rows)
        self.cache.lengths = [context + max_queries - 1] * max_rows
        self._forward([1] * max_rows)  # reserves the slots
        for layer in self.cache.layers:
            for slab in layer.slabs:
                slab.fill_(FILLING)
        self.cache.lengths = [context] * max_rows

    @property
    def bytes_per_token(self) -> float:
        """Bytes of the cache per slot."""
        slabs = [slab for layer in self.cache.layers for slab in layer.slabs]
        return sum(slab.nbytes / (slab.shape[0] * slab.shape[2]) for slab in slabs)

    def seconds(self, batch_tokens: int, num_requests: int) -> float:
        """Seconds of one verification of `batch_tokens` tokens, spread evenly over `num_requests` rows."""
        least, more = divmod(batch_tokens, num_requests)
        queries = [least + (row < more) for row in range(num_requests)]
        return seconds_of(lambda: read_out(self._forward(queries).logits[0]), self.device)

    def _forward(self, queries: list[int]) -> Any:
        positions = [self.context + depth for count in queries for depth in range(count)]
        return packed_forward(
            self.target,
            self._ids[:, : len(positions)],
            torch.tensor([positions], device=self.device),
            cache=self.cache,
            layout=self.cache.layout(queries),
            output_hidden_states=self.hidden_states,
        )


@torch.no_grad()
def read_out(logits: torch.Tensor) -> list[int]:
    """What a greedy verification needs of logits `[B, V]` on the host."""
    return logits.float().argmax(-1).tolist()


class DraftStep:
    """
    A whole block of drafts for rows that hold `context` tokens, and the context of the round before it.

    Args:
        target ([`~transformers.PreTrainedModel`]), drafter ([`DSparkDrafter`]): The pair.
        context (`int`): Context tokens of every row.
        max_rows (`int`): The most rows that will be asked for.
        generator (`torch.Generator`): For token ids and features, on the CPU.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: DSparkDrafter,
        *,
        context: int,
        max_rows: int,
        generator: torch.Generator,
    ):
        self.view, self.context, self.device = TargetView(target, drafter), context, drafter.fc.weight.device
        self.session = DraftSession(
            self.view,
            max_rows,
            do_sample=False,
            processors=RowProcessors(LogitsProcessorList(), max_rows),
            random_source=RandomSource(generator),
            device=home_device(target),
        )
        vocab_size = target.get_input_embeddings().num_embeddings
        self._anchors = torch.randint(vocab_size, (max_rows,), generator=generator).tolist()
        width = drafter.fc.in_features
        features = torch.randn(CONTEXT_PER_ROUND, width, generator=generator)
        self._features = features.to(device=self.device, dtype=drafter.dtype)
        self._run(max_rows)  # reserves the slots
        for layer in self.session.cache.layers:
            for slab in layer.slabs:
                slab.fill_(FILLING)

    def seconds(self, num_requests: int) -> float:
        """Seconds of one round's drafting for `num_requests` rows."""
        return seconds_of(lambda: self._run(num_requests), self.device)

    def _run(self, num_rows: int) -> None:
        # The context written below is part of `context`; here it is written over and over.
        start = max(self.context - CONTEXT_PER_ROUND, 0)
        cache = self.session.cache
        cache.lengths = [start] * cache.num_rows
        positions = torch.arange(start, start + CONTEXT_PER_ROUND, device=self.device)
        for row in range(num_rows):
            self.session.add_context(row, self._features, positions, self._anchors[:1] * CONTEXT_PER_ROUND)
        drafts = self.session.propose(
            self._anchors[:num_rows],
            [start + CONTEXT_PER_ROUND] * num_rows,
            self.view.drafter.config.num_drafts,
            rows=range(num_rows),
            prefix=lambda entry, supposed: None,  # without processors nobody asks
        )
        drafts.ids.tolist()
        if drafts.confidence is not None:
            drafts.confidence.float().cpu()


class LoopStep:
    """
    Real rounds of the decoding loop, of which drafting and the target's forward are taken away.

    Args:
        target ([`~transformers.PreTrainedModel`]), drafter ([`DSparkDrafter`]): The pair.
        num_requests (`int`): R.
        max_rounds (`int`): The most rounds that will be asked for.
        generator (`torch.Generator`): For the prompts, on the CPU.
    """

    PROMPT_TOKENS = 8

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: DSparkDrafter,
        *,
        num_requests: int,
        max_rounds: int,
        generator: torch.Generator,
    ):
        self.device = home_device(target)
        vocab_size = target.get_input_embeddings().num_embeddings
        prompts = torch.randint(vocab_size, (num_requests, self.PROMPT_TOKENS), generator=generator).to(self.device)
        longest = self.PROMPT_TOKENS + 1 + (max_rounds + 1) * (1 + drafter.config.num_drafts)
        options = {"scheduler": FixedLength(), "max_draft_tokens": None, "on_round": None, "generator": None}
        self._decoder = _TimedDecoder(
            target,
            drafter.with_options(**options),
            prompts,
            logits_processor=LogitsProcessorList(),
            stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(longest)]),
            generation_config=GenerationConfig(do_sample=False),
            model_kwargs={"cache": DynamicCache(config=target.config), "logits_to_keep": 1},
        )
        with torch.no_grad():
            self._decoder.prefill()

    def seconds(self) -> float:
        """Seconds of one round beyond drafting and the forward, 0 or more."""
        with torch.no_grad():
            self._decoder.other_seconds = 0.0
            total = seconds_of(self._decoder.round, self.device)
        return max(total - self._decoder.other_seconds, 0.0)


class _TimedDecoder(Decoder):
    """The decoder, with a clock on what is measured elsewhere."""

    other_seconds = 0.0

    def draft(self, *args: Any, **kwargs: Any) -> Drafts:
        began = now(self.input_ids.device)
        drafts = super().draft(*args, **kwargs)
        self.other_seconds += now(self.input_ids.device) - began
        return drafts

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        device = self.input_ids.device
        began = now(device)
        outputs = super()._forward(*args, **kwargs)
        # A round reads the logits out, and so does `VerifyStep`. Doing it once more here tells what that takes.
        self.other_seconds += now(device) - began + 2 * seconds_of(lambda: read_out(outputs.logits[0]), device)
        return outputs

    def _check_logits(self, logits: torch.Tensor, owners: Any, when: str) -> None:
        bool(logits.isnan().any())  # takes its time, but random prompts prove nothing about the target
