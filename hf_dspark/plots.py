"""Pictures of measurements, as files. Needs matplotlib (`pip install 'hf-dspark[plot]'`); draws and computes nothing.

Contract: a function takes finished figures and a path, and writes the picture whole or not at all. Nothing of
matplotlib's global state (pyplot, the backend) is touched.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .calibration_report import CalibrationReport, PositionQuality
    from .sps_profile import SPSProfile


def new_figure(**options: Any) -> Any:
    """
    A matplotlib figure that belongs to no window.

    Raises:
        ImportError: matplotlib is not there.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'hf-dspark[plot]'") from error
    return Figure(layout="constrained", **options)


def save_figure(figure: Any, path: str | os.PathLike) -> None:
    """Writes a PNG, which takes its name only when it is complete."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        figure.savefig(temporary, format="png", dpi=130)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def plot_sps(profile: "SPSProfile", path: str | os.PathLike) -> None:
    """
    Milliseconds of a round, and rounds per second, against the tokens of its verification.

    Lines are what the profile predicts, packed rounds for each context and plain ones (a token a row, not drafted) at
    the smallest. Points are what was measured: every sample of the target's forward, with the predicted time of the
    rest of the round on top.

    Args:
        profile ([`SPSProfile`]): What to show.
        path (`str` or `os.PathLike`): Where the PNG goes.

    Raises:
        ImportError: matplotlib is not there.
    """
    figure = new_figure(figsize=(11, 4.6))
    milliseconds, steps = figure.subplots(1, 2)
    _draw(milliseconds, profile, lambda seconds: 1000 * seconds)
    _draw(steps, profile, lambda seconds: 1 / seconds)
    milliseconds.set(ylabel="milliseconds a round", title="Duration of a round")
    steps.set(ylabel="rounds per second", title="SPS: rounds per second")
    for axes in (milliseconds, steps):
        axes.set(xlabel="tokens of the verification (B)", ylim=(0, None), xscale="log")
        ticks = [1 << power for power in range(profile.max_batch_tokens.bit_length())]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.25)
    milliseconds.legend(frameon=False, fontsize="small")
    figure.suptitle(_caption(profile), fontsize="small")
    save_figure(figure, path)


def _draw(axes: Any, profile: "SPSProfile", shown: Callable[[Any], Any]) -> None:
    """The curves and points of one picture; `shown` turns seconds into what its axis shows."""
    tokens = np.arange(1, profile.max_batch_tokens + 1)
    for index, context in enumerate(profile.contexts):
        curve = profile.round_seconds(tokens, context=context)
        axes.plot(tokens, shown(curve), color=f"C{index}", label=f"drafted, {context} cached tokens a row")
    plain = [point for point in profile.verify_points if point.num_requests == point.batch_tokens > 1]
    if plain:
        rows = tokens[: max(point.batch_tokens for point in plain)]
        curve = profile.round_seconds(rows, num_requests=rows, drafted=False)
        label = f"plain, a token a row, {profile.contexts[0]} cached"
        axes.plot(rows, shown(curve), color="0.4", linestyle="--", label=label)
    for point in profile.verify_points:
        if point.num_requests == point.batch_tokens > 1:
            if point.context != profile.contexts[0]:
                continue  # its line is not drawn
            color, rest = "0.4", profile.loop_seconds(point.num_requests)
        else:
            color = f"C{profile.contexts.index(point.context)}"
            rest = profile.loop_seconds(point.num_requests) + profile.draft_seconds(point.num_requests, point.context)
        seconds = np.asarray(point.seconds) + rest
        axes.scatter([point.batch_tokens] * len(seconds), shown(seconds), s=9, color=color, alpha=0.5, linewidths=0)


def _caption(profile: "SPSProfile") -> str:
    known = profile.description
    devices = ", ".join(known.get("target_devices", {}).values())
    words = [known.get("target"), known.get("target_dtype"), devices, known.get("source")]
    if known.get("threads"):
        words.append(f"threads: {known['threads']}")
    return ", ".join(str(word) for word in words if word)


def plot_reliability(reports: "Sequence[CalibrationReport]", path: str | os.PathLike) -> None:
    """
    Reliability diagrams: observed against predicted survival of the prefix, a row for each report and a panel for each
    draft position, before the temperatures and after them.

    A point is a bin of rounds, larger where there are more of them; on the diagonal, predictions came true. The bars
    below are the shares of the rounds in the bins, with the temperatures.

    Args:
        reports (`Sequence[CalibrationReport]`): What to show.
        path (`str` or `os.PathLike`): Where the PNG goes.

    Raises:
        ImportError: matplotlib is not there.
        ValueError: there is no report.
    """
    if not reports:
        raise ValueError("no reports to draw; give one at least")
    num_drafts = max(len(report.after) for report in reports)
    figure = new_figure(figsize=(0.8 + 2.3 * num_drafts, 0.5 + 2.75 * len(reports)))
    rows = figure.subplots(len(reports), num_drafts, sharex=True, sharey=True, squeeze=False)
    for row, report in zip(rows, reports, strict=True):
        for axes in row[len(report.after) :]:
            axes.set_visible(False)
        for k, (before, after) in enumerate(zip(report.before, report.after, strict=True)):
            axes = row[k]
            axes.plot([0, 1], [0, 1], color="0.6", linewidth=0.8, linestyle=":")
            _draw_bins(axes, before, report.num_rounds, color="C1", label="before")
            _draw_bins(axes, after, report.num_rounds, color="C0", label="after")
            shares = [each.num_rounds / report.num_rounds for each in after.bins]
            axes.bar([each.predicted for each in after.bins], shares, width=0.03, color="C0", alpha=0.2, linewidth=0)
            axes.set_title(f"draft {k + 1}, T = {report.temperatures[k]:.2f}", fontsize="medium")
            errors = f"ECE {100 * before.ece:.1f} → {100 * after.ece:.1f} %\nAUC {after.auc:.2f}"
            box = {"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 1.5}
            axes.text(
                0.03, 0.97, errors, transform=axes.transAxes, fontsize="small", verticalalignment="top", bbox=box
            )
            axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
            axes.grid(alpha=0.2)
        row[0].set_ylabel(f"{report.mode}: observed", fontsize="medium")
    for axes in rows[-1]:
        axes.set_xlabel("predicted", fontsize="medium")
    rows[0][0].legend(frameon=False, fontsize="small", loc="lower right")
    names = dict.fromkeys(f"{report.dataset}, {report.num_rounds} rounds ({report.mode})" for report in reports)
    figure.suptitle("Survival of the first k drafts. " + "; ".join(names), fontsize="small")
    save_figure(figure, path)


def _draw_bins(axes: Any, quality: "PositionQuality", num_rounds: int, *, color: str, label: str) -> None:
    predicted, observed = [each.predicted for each in quality.bins], [each.observed for each in quality.bins]
    axes.plot(predicted, observed, color=color, linewidth=1, label=label)
    sizes = [6 + 60 * (each.num_rounds / num_rounds) ** 0.5 for each in quality.bins]
    axes.scatter(predicted, observed, s=sizes, color=color, alpha=0.7, linewidths=0)
