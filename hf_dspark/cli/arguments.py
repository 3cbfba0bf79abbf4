"""Words of the command line that become objects: schedulers and bounded numbers, for `argparse`.

Contract: a parser takes the text and returns the object, or raises `argparse.ArgumentTypeError` naming the text and
what is allowed. Policies are imported when they are asked for.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from ..scheduling import ConfidenceThreshold, FixedLength, Scheduler

SCHEDULERS = (
    "fixed, fixed:DRAFTS, threshold:CONFIDENCE, auto, greedy, greedy:envelope, lagged, lagged:ROUNDS or lookahead"
)


def parse_scheduler(text: str) -> Scheduler:
    """`"fixed"`, `"fixed:3"`, `"threshold:0.5"`, `"auto"`, `"lagged:2"` ... as a scheduler (see `SCHEDULERS`)."""
    name, colon, value = text.partition(":")
    try:
        scheduler = _with_value(name, value) if colon else _by_name(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    if scheduler is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a scheduler; use {SCHEDULERS}")
    return scheduler


def _by_name(name: str) -> Scheduler | None:
    """The scheduler that needs no value, or `None`."""
    if name == "fixed":
        return FixedLength()
    if name == "auto":
        from ..auto import Auto

        return Auto()
    if name in ("greedy", "lagged", "lookahead"):
        from ..policies import CausalGreedy, LaggedBudget, Lookahead

        return {"greedy": CausalGreedy, "lagged": LaggedBudget, "lookahead": Lookahead}[name]()
    return None


def _with_value(name: str, value: str) -> Scheduler | None:
    """The scheduler written as `name:value`, or `None`; `ValueError` for a value that is none."""
    if name == "fixed":
        return FixedLength(int(value))
    if name == "threshold":
        return ConfidenceThreshold(float(value))
    if (name, value) == ("greedy", "envelope"):
        from ..policies import CausalGreedy

        return CausalGreedy(envelope=True)
    if name == "lagged":
        from ..policies import LaggedBudget

        return LaggedBudget(int(value))
    return None


def at_least(kind: Callable[[str], float], minimum: float) -> Callable[[str], float]:
    """A number for `argparse` that is not below `minimum`."""

    def parse(text: str) -> float:
        number = kind(text)
        if number < minimum:
            raise argparse.ArgumentTypeError(f"{text} is below {minimum}")
        return number

    return parse


def refuse_unwritable(args: argparse.Namespace, path: Path) -> None:
    """Refuses a file or folder to write whose nearest folder that exists does not let anything be written."""
    folder = path if path.is_dir() else path.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not os.access(folder, os.W_OK | os.X_OK):
        args.refuse(f"{path}: nothing can be written to {folder}; name another place")


def refuse_lost_outputs(args: argparse.Namespace) -> None:
    """Refuses `--output`, `--plot` and `--sglang` that would fail only once all was measured."""
    for path in filter(None, (args.output, args.plot, args.sglang)):
        if not path.parent.is_dir():
            args.refuse(f"{path}: there is no folder {path.parent}")
        refuse_unwritable(args, path)
    if args.plot:
        from ..plots import new_figure

        try:
            new_figure()
        except ImportError as error:
            args.refuse(f"--plot: {error}")
