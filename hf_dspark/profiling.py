"""Measures what decoding rounds take on this machine, for the scheduler: which shapes, how often, within which time.

Contract: `profile_sps` runs the packed path on the device the target is on and returns an `SPSProfile` with its raw
samples. Linear layers choose how to multiply first. Every point is run once to warm up; then all points are sampled in
turn, round after round, so that a slow phase of the machine does not bend one point alone. Nothing is left on the
models, and the user's random generators are not touched. `step_timing.py` runs the steps, `profile_cache.py` keeps
profiles.

Source: https://huggingface.co/papers/2607.05147, section 3.2. Shape legend: B tokens of a verification, R rows, K
drafts a block.
"""

import contextlib
import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from .machine import describe
from .modeling_dspark import DSparkDrafter
from .narrow_linear import settle
from .packed import packs
from .profile_cache import cached
from .sps_profile import DraftPoint, LoopPoint, SPSProfile, VerifyPoint
from .step_timing import DraftStep, LoopStep, VerifyStep, home_device, num_slots

# With a block on top each fits into a power of two, which is how caches grow; a question, and a long answer.
CONTEXTS = (120, 1000)
MAX_BATCH_TOKENS = 64
MIN_REPEATS, MAX_REPEATS = 3, 9
BUDGET_SECONDS = 15.0  # for all samples; a slow machine takes longer, for three of each
DEFAULT_BLOCK_SIZE = 7  # the paper's, where no drafter says otherwise
# Shapes whose cache would need more than this are left out, and predicted from smaller ones.
MAX_CACHED_TOKENS, MAX_CACHE_BYTES = 2**14, 2**30
LOOP_ROWS, LOOP_ROUNDS = 8, 4


def profile_sps(
    target: PreTrainedModel,
    drafter: DSparkDrafter | None = None,
    *,
    max_batch_tokens: int = MAX_BATCH_TOKENS,
    contexts: Sequence[int] = CONTEXTS,
    repeats: int = MAX_REPEATS,
    block_size: int | None = None,
    progress: bool | None = None,
) -> SPSProfile:
    """
    Measures the step times of a pair of models on the device they are on, with as many threads as torch uses now.

    Some 25 seconds on a CPU, a few on a GPU. Where even three samples a point would take longer than twice that,
    fewer points are measured.

    Args:
        target ([`~transformers.PreTrainedModel`]): The target.
        drafter ([`DSparkDrafter`], *optional*): Its drafter. Without one, drafting and the loop take no time.
        max_batch_tokens (`int`, *optional*, defaults to 64): Largest verification in tokens, rows * (K + 1).
        contexts (`Sequence[int]`, *optional*, defaults to `(120, 1000)`):
            Cached tokens of a row; all but the smallest are measured at a few sizes only.
        repeats (`int`, *optional*, defaults to 9): Samples of a point, if there is time; else fewer, but 3.
        block_size (`int`, *optional*): K. Defaults to the drafter's, without one to 7.
        progress (`bool`, *optional*):
            Whether to tell on stderr what happens; `None` does, with a bar unless transformers' bars are disabled.

    Raises:
        ValueError: The target's requests cannot be packed, or an argument is not possible.
    """
    num_drafts = _block_size(drafter, block_size)
    for name, value in {"max_batch_tokens": max_batch_tokens, "repeats": repeats}.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if not contexts or min(contexts) < 0:
        raise ValueError(f"contexts={list(contexts)} must be numbers of cached tokens, 0 or more, at least one")
    max_length = getattr(target.config.get_text_config(), "max_position_embeddings", None) or 2**30
    contexts = sorted({max(min(context, max_length - num_drafts - 1), 0) for context in contexts})
    packable, reason = packs(target, {}, home_device(target), max_length=contexts[-1] + num_drafts + 1)
    if not packable:
        raise ValueError(
            f"{type(target).__name__} cannot be profiled, since its requests cannot be packed: {reason}. It is "
            "decoded row by row, for which FixedLength or ConfidenceThreshold need no profile"
        )
    began = time.perf_counter()
    with _undisturbed(target, drafter), _Progress(progress) as bar:
        for model in (target, drafter):
            if model is not None:
                settle(model, max_batch_tokens)
        settled = time.perf_counter()
        plan = _Plan(target, drafter, num_drafts, max_batch_tokens, contexts)
        tasks = _sample(plan.tasks, repeats, bar)
        within = time.perf_counter() - settled < 2 * BUDGET_SECONDS
        loop_points = () if drafter is None else _loop_points(target, drafter, plan.most_rows, max_length, within)
    description = {**describe(target, drafter), "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    description["points_left_out"] = len(plan.tasks) - len(tasks)  # for lack of time
    description["measuring_seconds"] = round(time.perf_counter() - began, 1)
    return SPSProfile(
        num_drafts,
        tuple(task.point() for task in tasks if task.kind is VerifyPoint),
        tuple(task.point() for task in tasks if task.kind is DraftPoint),
        loop_points,
        max_batch_tokens,
        description,
    )


def cached_profile(
    target: PreTrainedModel, drafter: DSparkDrafter | None, *, max_batch_tokens: int
) -> SPSProfile | None:
    """
    The profile of a pair on this machine: from memory, from the user's cache on disk, or measured now and kept.

    It is kept in `profiles/` within HF_DSPARK_CACHE (by default `hf_dspark` in the Hugging Face home), under a hash of
    all that times depend on. One that was measured for smaller batches is measured again, with room for growth.

    Args:
        target ([`~transformers.PreTrainedModel`]), drafter ([`DSparkDrafter`], *optional*): The pair.
        max_batch_tokens (`int`): Largest verification that the profile is needed for.

    Returns:
        [`SPSProfile`], or `None` if HF_DSPARK_NO_PROFILE is set (to anything but 0).

    Raises:
        ValueError: See [`profile_sps`].
    """

    def measure() -> SPSProfile:
        room = max(MAX_BATCH_TOKENS, 1 << (max_batch_tokens - 1).bit_length())
        return profile_sps(target, drafter, max_batch_tokens=room)

    return cached(describe(target, drafter), measure, max_batch_tokens=max_batch_tokens)


def token_counts(largest: int) -> list[int]:
    """Token counts to measure: 1, 2, 3, 4, 6, 8, 12, ... (powers of two and what is halfway), and `largest` itself."""
    counts = {size for power in range(largest.bit_length()) for size in (1 << power, 3 << power) if size <= largest}
    return sorted(counts | {largest})


@dataclasses.dataclass(slots=True, eq=False)
class _Task:
    """A point to measure: the class of the point, its shape, what takes a sample of it, and the samples so far."""

    kind: type
    shape: dict[str, int]
    sample: Callable[[], float]
    seconds: list[float] = dataclasses.field(default_factory=list)

    def point(self) -> Any:
        return self.kind(**self.shape, seconds=tuple(self.seconds))


class _Plan:
    """The points of a profile, the most important ones first, and the steps that sample them."""

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: DSparkDrafter | None,
        num_drafts: int,
        max_batch_tokens: int,
        contexts: Sequence[int],
    ):
        self._models, self._block = (target, drafter), num_drafts + 1
        self._generator = torch.Generator().manual_seed(0)
        probe = VerifyStep(target, drafter, context=0, max_rows=1, max_queries=1, generator=self._generator)
        affordable = int(MAX_CACHE_BYTES / len(contexts) / max(probe.bytes_per_token, 1))
        self._max_slots = min(MAX_CACHED_TOKENS, affordable)
        self.most_rows = math.ceil(max_batch_tokens / self._block)
        rows = [1 << power for power in range((self.most_rows - 1).bit_length() + 1)]
        counts = token_counts(max_batch_tokens)
        coarse = [count for count in counts if count & (count - 1) == 0 or count == max_batch_tokens]
        first, *longer = contexts
        packed, fine = self._packed(coarse), self._packed([count for count in counts if count not in coarse])
        plain = [(count, count) for count in rows if count <= max_batch_tokens and (count, count) not in packed]
        verify, *finer = self._verify_tasks(first, [packed, plain, fine])
        drafts = self._draft_tasks(first, rows)
        self.tasks = [*verify, *drafts, *(task for group in finer for task in group)]
        for context in longer:
            few = self._packed([count for count in counts if count in (1, 8, 32, 128, 512)])
            self.tasks += self._verify_tasks(context, [[*few, *(shape for shape in plain if shape[0] == 8)]])[0]
            self.tasks += self._draft_tasks(context, [count for count in rows if count in (1, 8)])

    def _packed(self, counts: Sequence[int]) -> list[tuple[int, int]]:
        """(B, R) with as few rows as can hold the tokens."""
        return [(count, math.ceil(count / self._block)) for count in counts]

    def _verify_tasks(self, context: int, groups: Sequence[Sequence[tuple[int, int]]]) -> list[list[_Task]]:
        """Tasks for groups of (B, R), without those that the cache would be too large for."""
        max_rows = max(self._max_slots // num_slots(context, self._block), 1)
        allowed = [[shape for shape in group if shape[1] <= max_rows] for group in groups]
        rows = max((rows for group in allowed for _, rows in group), default=1)
        target, drafter = self._models
        sizes = {"context": context, "max_rows": rows, "max_queries": self._block}
        step = VerifyStep(target, drafter, **sizes, generator=self._generator)
        return [
            [
                _Task(
                    VerifyPoint,
                    {"batch_tokens": count, "num_requests": rows, "context": context},
                    lambda count=count, rows=rows: step.seconds(count, rows),  # type: ignore[misc]
                )
                for count, rows in group
            ]
            for group in allowed
        ]

    def _draft_tasks(self, context: int, row_counts: Sequence[int]) -> list[_Task]:
        target, drafter = self._models
        if drafter is None:
            return []
        max_rows = max(self._max_slots // num_slots(context, self._block), 1)
        allowed = [count for count in row_counts if count <= max_rows]
        step = DraftStep(target, drafter, context=context, max_rows=max(allowed), generator=self._generator)
        return [
            _Task(
                DraftPoint,
                {"num_requests": count, "context": context},
                lambda count=count: step.seconds(count),  # type: ignore[misc]
            )
            for count in allowed
        ]


def _sample(tasks: Sequence[_Task], repeats: int, bar: "_Progress") -> list[_Task]:
    """Takes samples of all points that there is time for, in turn; returns these points."""
    least = min(repeats, MIN_REPEATS)
    bar.expect(len(tasks) * (1 + least))
    began = time.perf_counter()
    kept: list[_Task] = []
    for task in tasks:
        elapsed = time.perf_counter() - began
        # Without one token, two and a draft it would be no profile.
        needed = len(kept) < 2 or task.shape["num_requests"] == 1 and task.kind is DraftPoint
        if needed or elapsed * (1 + least) < 2 * BUDGET_SECONDS:
            task.sample()
            kept.append(task)
        bar.update()
    warm_up_seconds = time.perf_counter() - began
    affordable = int((BUDGET_SECONDS - warm_up_seconds) / max(warm_up_seconds, 1e-9))
    repeats = min(max(affordable, least), repeats)
    bar.expect(len(tasks) + len(kept) * repeats)
    for _ in range(repeats):
        for task in kept:
            task.seconds.append(task.sample())
            bar.update()
    return kept


def _loop_points(
    target: PreTrainedModel, drafter: DSparkDrafter, most_rows: int, max_length: int, within: bool
) -> tuple[LoopPoint, ...]:
    """The loop for one row and, if there is time, for more; nothing for a target too short for a few rounds."""
    block = 1 + drafter.config.num_drafts
    rounds = min(LOOP_ROUNDS, (max_length - LoopStep.PROMPT_TOKENS - 1) // block - 1)
    if rounds < 2:
        return ()
    points = []
    for rows in sorted({1, min(LOOP_ROWS, most_rows) if within else 1}):
        generator = torch.Generator().manual_seed(rows)
        step = LoopStep(target, drafter, num_requests=rows, max_rounds=rounds, generator=generator)
        _, *samples = [step.seconds() for _ in range(rounds)]  # the first gives the drafter its prompt
        points.append(LoopPoint(rows, tuple(samples)))
    return tuple(points)


def _block_size(drafter: DSparkDrafter | None, block_size: int | None) -> int:
    own = block_size if drafter is None else drafter.config.num_drafts
    if block_size is not None and (block_size < 1 or block_size != own):
        raise ValueError(
            f"block_size={block_size} must be at least 1 and, if a drafter is given, its own ({own}); leave it out"
        )
    return DEFAULT_BLOCK_SIZE if own is None else own


@contextlib.contextmanager
def _undisturbed(target: PreTrainedModel, drafter: DSparkDrafter | None) -> Iterator[None]:
    """Puts the global random generators back, where dropout would draw from them."""
    models = [model for model in (target, drafter) if model is not None]
    if not any(model.training for model in models):
        yield  # nothing draws; and whoever decodes at the same time goes on drawing
        return
    devices = sorted({model.device.index or 0 for model in models if model.device.type == "cuda"})
    with torch.random.fork_rng(devices):
        yield


class _Progress:
    """Tells on stderr what is being measured."""

    def __init__(self, progress: bool | None):
        self._silent = progress is False
        self._bar: Any = None

    def __enter__(self) -> "_Progress":
        if not self._silent:
            print(
                f"Measuring how long decoding steps take here, about {BUDGET_SECONDS:.0f} s. To go without: "
                "set HF_DSPARK_NO_PROFILE=1, or pass a profile, with_options(sps_profile=...).",
                file=sys.stderr,
                flush=True,
            )
            if logging.is_progress_bar_enabled():
                self._bar = logging.tqdm(desc="step times", unit="step", leave=False)
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._bar is not None:
            self._bar.close()

    def expect(self, steps: int) -> None:
        """There will be `steps` in all."""
        if self._bar is not None:
            self._bar.total = steps
            self._bar.refresh()

    def update(self) -> None:
        """One step is done."""
        if self._bar is not None:
            self._bar.update()
