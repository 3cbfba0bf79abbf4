"""Measured step times of a target and a drafter on one machine: the SPS ("steps per second") profile.

Contract: plain data and interpolation. A profile holds the raw samples of three parts of a round: *verify* (the
target's packed forward), *draft* (the drafter's block) and *loop* (everything else). It answers what a round of so
many tokens takes, keeps the jags of the curve, and reads and writes JSON, its own and SGLang's. It knows nothing about
models, devices or how a time was taken; `profiling.py` measures.

How a prediction is made from the lower quartiles of samples (see `_seconds`):
- Two curves at the smallest context run through the measured token counts: *packed* rounds, with as few rows as can
  hold the tokens, and *plain* ones, a token a row. A round of R rows lies between them, linearly in R.
- Longer context adds seconds per cached token (R * context), as measured between neighbouring contexts. A row that
  brings more queries pays more for each of its cached tokens, so that price depends on B / R; it is never negative.
- Beyond the largest measured size a curve goes on along its last slope that is not negative.

Source: https://huggingface.co/papers/2607.05147, section 3.2 (`SPS(B)` of Algorithm 1). Shape legend: B tokens of a
verification, R rows (requests), K drafts a block.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from .json_files import read_object, write_object
from .step_curves import ContextPrice, Curve

FORMAT, VERSION = "hf_dspark.sps_profile", 1

Number = TypeVar("Number", float, np.ndarray)
Path_ = str | os.PathLike


@dataclasses.dataclass(frozen=True, slots=True)
class VerifyPoint:
    """Samples of a target forward: `batch_tokens` tokens of `num_requests` rows that hold `context` tokens each."""

    batch_tokens: int
    num_requests: int
    context: int
    seconds: tuple[float, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class DraftPoint:
    """Samples of drafting a whole block for `num_requests` rows that hold `context` tokens each."""

    num_requests: int
    context: int
    seconds: tuple[float, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class LoopPoint:
    """Samples of what a round of `num_requests` rows takes beyond drafting and the target's forward."""

    num_requests: int
    seconds: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class SPSProfile:
    """
    What a decoding round takes.

    Args:
        block_size (`int`): K, the most that a row drafts in a round.
        verify_points (`Sequence[VerifyPoint]`): At least one.
        draft_points (`Sequence[DraftPoint]`, *optional*): None of them: drafting takes no time.
        loop_points (`Sequence[LoopPoint]`, *optional*): None of them: the loop takes no time.
        max_batch_tokens (`int`, *optional*): Size up to which it was measured; defaults to the largest point's.
        description (`Mapping[str, Any]`, *optional*): What was measured, where and when. JSON values.

    Raises:
        ValueError: A size or a sample is not possible, or there is no verify point.
    """

    block_size: int
    verify_points: tuple[VerifyPoint, ...]
    draft_points: tuple[DraftPoint, ...] = ()
    loop_points: tuple[LoopPoint, ...] = ()
    max_batch_tokens: int = 0
    description: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name, kind in _POINTS.items():
            points = tuple(getattr(self, name))
            for index, point in enumerate(points):
                _check_point(f"{name}[{index}]", point, kind)
            object.__setattr__(self, name, points)
        if not self.verify_points:
            raise ValueError("a profile needs at least one verify point")
        if not self.max_batch_tokens:
            object.__setattr__(self, "max_batch_tokens", max(point.batch_tokens for point in self.verify_points))
        for name in ("block_size", "max_batch_tokens"):
            _check_count(name, getattr(self, name), at_least=1)

    @property
    def contexts(self) -> tuple[int, ...]:
        """The measured contexts in tokens, ascending."""
        return tuple(sorted({point.context for point in self.verify_points}))

    def verify_seconds(
        self, batch_tokens: Number, context: float | None = None, num_requests: float | np.ndarray | None = None
    ) -> Number:
        """
        Seconds of the target's forward.

        Args:
            batch_tokens (`int` or `np.ndarray`): B, 1 or more; the result has the same shape.
            context (`float`, *optional*): Tokens that a row holds in the cache; the smallest measured by default.
            num_requests (`int` or `np.ndarray`, *optional*): R; as few rows as can hold B tokens by default.

        Raises:
            ValueError: if `batch_tokens` is below 1.
        """
        tokens = np.asarray(batch_tokens, dtype=float)
        if tokens.size and tokens.min() < 1:
            raise ValueError(f"`batch_tokens` must be 1 or more, but is {batch_tokens}.")
        fewest = np.ceil(tokens / (self.block_size + 1))
        rows = fewest if num_requests is None else np.asarray(num_requests, dtype=float)
        plain_share = np.clip((rows - fewest) / np.maximum(tokens - fewest, 1), 0, 1)
        packed, gap = self._verify_curves
        seconds = packed(tokens) + plain_share * gap(tokens)
        return _like(batch_tokens, seconds + self._verify_context.seconds(rows, tokens / rows, context))

    def draft_seconds(self, num_requests: Number, context: float | None = None) -> Number:
        """Seconds of drafting a whole block for `num_requests` rows (an `int` or an array), context write included."""
        rows = np.asarray(num_requests, dtype=float)
        return _like(num_requests, self._draft_curve(rows) + self._draft_context.seconds(rows, 1.0, context))

    def loop_seconds(self, num_requests: Number) -> Number:
        """Seconds that a round of `num_requests` rows (an `int` or an array) takes beyond drafting and the forward."""
        return _like(num_requests, self._loop_curve(np.asarray(num_requests, dtype=float)))

    def round_seconds(
        self,
        batch_tokens: Number,
        *,
        context: float | None = None,
        num_requests: float | np.ndarray | None = None,
        drafted: bool = True,
    ) -> Number:
        """Seconds of a whole round; without drafting if it is not `drafted`. Arguments: see `verify_seconds`."""
        rows: Any = num_requests
        if rows is None:
            rows = _like(batch_tokens, np.ceil(np.asarray(batch_tokens) / (self.block_size + 1)))
        seconds: Any = self.verify_seconds(batch_tokens, context, rows) + self.loop_seconds(rows)
        return seconds + self.draft_seconds(rows, context) if drafted else seconds

    def steps_per_second(
        self, batch_tokens: Number, context: float | None = None, num_requests: float | np.ndarray | None = None
    ) -> Number:
        """Rounds per second, drafting included: `SPS(B)`. Takes the same few interpolations for any B."""
        return 1 / self.round_seconds(batch_tokens, context=context, num_requests=num_requests)

    def save(self, path: Path_) -> None:
        """Writes the profile as JSON, raw samples included."""
        write_object(path, {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)})

    @classmethod
    def load(cls, path: Path_) -> "SPSProfile":
        """
        Reads what `save` wrote.

        Raises:
            ValueError: The file is not a profile; the message names what is wrong.
        """
        try:
            data = read_object(path)
            if (data.pop("format", None), data.pop("version", None)) != (FORMAT, VERSION):
                raise ValueError(f'it does not start with "format": "{FORMAT}", "version": {VERSION}')
            names = {field.name for field in dataclasses.fields(cls)}
            if set(data) != names:
                raise ValueError(f"it must have the fields {sorted(names)}, but has {sorted(data)}")
            if not isinstance(data["description"], dict):
                raise ValueError("description must be an object")
            points = {name: _points_of(name, data[name], kind) for name, kind in _POINTS.items()}
            return cls(**{**data, **points})
        except ValueError as error:
            raise ValueError(f"{path} is not an SPS profile of hf_dspark: {error}") from None

    def to_sglang(self, path: Path_ | None = None) -> dict[str, Any]:
        """SGLang's SPS table: rounds per second at the measured token counts, drafting included; written to `path`."""
        smallest = self.contexts[0]
        tokens = sorted({point.batch_tokens for point in self.verify_points if point.context == smallest})
        table = {
            "sample_batch_tokens": tokens,
            "sample_steps_per_sec": [float(self.steps_per_second(count)) for count in tokens],
            "max_batch_tokens": self.max_batch_tokens,
        }
        if path is not None:
            write_object(path, table)
        return table

    @classmethod
    def from_sglang(cls, source: Mapping[str, Any] | Path_, *, block_size: int) -> "SPSProfile":
        """
        A profile out of SGLang's SPS table. The table tells a step's time as a whole: it goes into `verify_seconds`,
        and drafting and the loop take none.

        Args:
            source (`Mapping` or path): `sample_batch_tokens`, `sample_steps_per_sec` and `max_batch_tokens`.
            block_size (`int`): K of the drafter it was measured with.

        Raises:
            ValueError: The table is broken; the message names what is wrong.
        """
        table, name = (source, "the table") if isinstance(source, Mapping) else (None, str(source))
        try:
            table = read_object(source) if table is None else table  # type: ignore[arg-type]  # no Mapping: a path
            _check_count("block_size", block_size, at_least=1)
            keys = ("sample_batch_tokens", "sample_steps_per_sec", "max_batch_tokens")
            if missing := [key for key in keys if key not in table]:
                raise ValueError(f"it lacks {missing}")
            tokens, speeds, largest = (table[key] for key in keys)
            _check_count("max_batch_tokens", largest, at_least=1)
            if not isinstance(tokens, list | tuple) or not isinstance(speeds, list | tuple):
                raise ValueError("sample_batch_tokens and sample_steps_per_sec must be lists")
            if len(tokens) != len(speeds):
                raise ValueError(f"it has {len(tokens)} sample_batch_tokens but {len(speeds)} sample_steps_per_sec")
            for index, (count, speed) in enumerate(zip(tokens, speeds, strict=True)):
                _check_count(f"sample_batch_tokens[{index}]", count, at_least=1)
                if not _is_number(speed) or speed <= 0:
                    raise ValueError(f"sample_steps_per_sec[{index}] must be a positive number, but is {speed!r}")
            points = [
                VerifyPoint(count, math.ceil(count / (block_size + 1)), 0, (1 / speed,))
                for count, speed in zip(tokens, speeds, strict=True)
            ]
            return cls(block_size, tuple(points), max_batch_tokens=largest, description={"source": "SGLang SPS table"})
        except ValueError as error:
            raise ValueError(f"{name} is not an SPS table of SGLang: {error}") from None

    def plot(self, path: Path_) -> None:
        """Writes a picture: rounds per second and milliseconds a round against B. Needs matplotlib."""
        from .plots import plot_sps

        plot_sps(self, path)

    @functools.cached_property
    def _verify_curves(self) -> tuple[Curve, Curve]:
        """At the smallest context: packed rounds, and what plain ones take more."""
        fewest: dict[int, VerifyPoint] = {}
        plain: dict[int, float] = {}
        for point in self.verify_points:
            if point.context == self.contexts[0]:
                count = point.batch_tokens
                if count not in fewest or point.num_requests < fewest[count].num_requests:
                    fewest[count] = point
                if point.num_requests == count:
                    plain[count] = _seconds(point)
        packed = Curve({count: _seconds(point) for count, point in fewest.items()})
        if max(plain, default=1) == 1:
            return packed, Curve({1: 0.0})
        # Both are curves of their own between their points, so the gap bends at the points of either.
        plain_curve, last = Curve(plain), max(plain)
        gap = {n: float(plain_curve(n) - packed(n)) for n in {*plain, *fewest} if min(plain) <= n <= last}
        return packed, Curve(
            gap, tail=max(float(gap[last]) / last, 0.0)
        )  # the gap is a matter of rows: in proportion to them

    @functools.cached_property
    def _verify_context(self) -> ContextPrice:
        return ContextPrice(
            {
                (point.context, point.num_requests, point.batch_tokens / point.num_requests): _seconds(point)
                for point in self.verify_points
            }
        )

    @functools.cached_property
    def _draft_curve(self) -> Curve:
        smallest = min((point.context for point in self.draft_points), default=0)
        return Curve({point.num_requests: _seconds(point) for point in self.draft_points if point.context == smallest})

    @functools.cached_property
    def _draft_context(self) -> ContextPrice:
        return ContextPrice({(point.context, point.num_requests, 1.0): _seconds(point) for point in self.draft_points})

    @functools.cached_property
    def _loop_curve(self) -> Curve:
        return Curve({point.num_requests: _seconds(point) for point in self.loop_points})


_POINTS: dict[str, type] = {"verify_points": VerifyPoint, "draft_points": DraftPoint, "loop_points": LoopPoint}


def _seconds(point: VerifyPoint | DraftPoint | LoopPoint) -> float:
    """
    The lower quartile: what disturbs a step only makes it longer. And a size that looks dearer than it is is not
    chosen, so that nothing ever corrects it, while one that looks cheaper is found out by the rounds that choose it.
    """
    return float(np.quantile(point.seconds, 0.25))


def _like(given: Any, seconds: np.ndarray | float) -> Any:
    """Seconds as a float where a number was given, else as an array."""
    return seconds if isinstance(given, np.ndarray) else float(seconds)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_count(name: str, value: Any, *, at_least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ValueError(f"{name} must be an integer from {at_least} on, but is {value!r}")


def _check_point(name: str, point: Any, kind: type) -> None:
    if not isinstance(point, kind):
        raise ValueError(f"{name} must be a {kind.__name__}, but is {point!r}")
    for field in dataclasses.fields(kind):
        value = getattr(point, field.name)
        if field.name != "seconds":
            _check_count(f"{name}.{field.name}", value, at_least=0 if field.name == "context" else 1)
        elif not isinstance(value, tuple) or not value:
            raise ValueError(f"{name}.seconds must be a tuple of at least one sample, but is {value!r}")
        # The loop's share is a difference of times, and may be none at all; a forward takes time.
        elif not all(_is_number(sample) and sample >= 0 and (sample or kind is LoopPoint) for sample in value):
            raise ValueError(f"{name}.seconds must be positive numbers, but is {value!r}")
    if isinstance(point, VerifyPoint) and point.num_requests > point.batch_tokens:
        raise ValueError(f"{name} has {point.num_requests} rows for {point.batch_tokens} tokens; each row has one")


def _points_of(name: str, items: Any, kind: type) -> tuple[Any, ...]:
    """Points out of JSON."""
    names = {field.name for field in dataclasses.fields(kind)}
    if not isinstance(items, list):
        raise ValueError(f"{name} must be a list")
    for index, item in enumerate(items):
        if not isinstance(item, dict) or set(item) != names or not isinstance(item["seconds"], list):
            raise ValueError(f"{name}[{index}] must be an object of {sorted(names)}, seconds a list, but is {item!r}")
    return tuple(kind(**{**item, "seconds": tuple(item["seconds"])}) for item in items)
