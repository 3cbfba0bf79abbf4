"""Pictures of measurements, as files. Needs matplotlib (`pip install 'hf-dspark[plot]'`); draws and computes nothing.

Contract: a function takes finished figures and a path, and writes the picture whole or not at all. Nothing of
matplotlib's global state (pyplot, the backend) is touched.
"""

import math
import os
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .calibration_report import CalibrationReport, PositionQuality
    from .evaluation_figures import SetFigures
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
    draft position, before temperatures and offsets and after them.

    A point is a bin of rounds, larger where there are more of them; on the diagonal, predictions came true. The bars
    below are the shares of the rounds in the bins, with them.

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
    names = dict.fromkeys(f"{report.dataset}, {report.num_rounds} rounds ({report.mode})" for report in reports)
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
            title = f"draft {k + 1}\nlogit / {report.temperatures[k]:.2f} {report.offsets[k]:+.2f}"
            axes.set_title(title, fontsize="small")
            errors = f"ECE {100 * before.ece:.1f} → {100 * after.ece:.1f} %\nAUC {_figure(after.auc)}"
            box = {"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 1.5}
            axes.text(
                0.03, 0.97, errors, transform=axes.transAxes, fontsize="small", verticalalignment="top", bbox=box
            )
            axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
            axes.grid(alpha=0.2)
        name = report.mode if len(names) <= 2 else f"{report.dataset}, {report.mode}"
        row[0].set_ylabel(f"{name}: observed", fontsize="medium")
    for axes in rows[-1]:
        axes.set_xlabel("predicted", fontsize="medium")
    rows[0][0].legend(frameon=False, fontsize="small", loc="lower right")
    title = "Survival of the first k drafts. " + ("; ".join(names) if len(names) <= 2 else "")
    figure.suptitle(textwrap.fill(title, width=24 * num_drafts), fontsize="small")
    save_figure(figure, path)


def _draw_bins(axes: Any, quality: "PositionQuality", num_rounds: int, *, color: str, label: str) -> None:
    predicted, observed = [each.predicted for each in quality.bins], [each.observed for each in quality.bins]
    axes.plot(predicted, observed, color=color, linewidth=1, label=label)
    sizes = [6 + 60 * (each.num_rounds / num_rounds) ** 0.5 for each in quality.bins]
    axes.scatter(predicted, observed, s=sizes, color=color, alpha=0.7, linewidths=0)


MARKERS = "osD^vPX*"
SHIFT = 0.08  # of a draft, between drafters
FEW_ROUNDS = 30  # a share of fewer is drawn hollow


def plot_conditional_acceptance(results: "Sequence[SetFigures]", path: str | os.PathLike) -> None:
    """
    Conditional acceptance at each draft, a curve for each drafter and a panel for each set (across) and temperature
    (down): Fig. 2 of the paper. Drafters are a little apart, so that equal ones show. Points of fewer than 30 rounds
    are hollow.

    Args:
        results (`Sequence[SetFigures]`): What to show.
        path (`str` or `os.PathLike`): Where the PNG goes.

    Raises:
        ImportError: matplotlib is not there.
        ValueError: there is no result.
    """
    figure, panels = _panels(results)
    num_drafts = max(len(result.conditional_acceptance) for result in results)
    for (dataset, temperature), (axes,) in panels.items():
        for style, shift, result in _curves(results, dataset, temperature):
            positions = np.arange(1, len(result.conditional_acceptance) + 1)
            values, reached = np.array(result.conditional_acceptance), np.array(result.num_reached)
            axes.plot(positions + shift, values, label=result.drafter, **{**style, "marker": None})
            for enough, face in ((reached >= FEW_ROUNDS, style["color"]), (reached < FEW_ROUNDS, "white")):
                x, marker = positions[enough] + shift, style["marker"]
                axes.scatter(
                    x, values[enough], s=24, marker=marker, facecolor=face, edgecolor=style["color"], zorder=3
                )
        axes.set_xticks(range(1, num_drafts + 1))
        axes.set(ylim=(0, 1.03), title=f"{dataset}, T = {temperature:g}", xlabel="draft")
    _finish(figure, panels, ("accepted, if all before were",))
    save_figure(figure, path)


def plot_thresholds(results: "Sequence[SetFigures]", path: str | os.PathLike) -> None:
    """
    Share of the verified drafts that stand, and drafts verified a round, against the confidence threshold; a curve for
    each drafter, panels for each set (across) and temperature (down): Fig. 5 of the paper.

    Args:
        results (`Sequence[SetFigures]`): What to show.
        path (`str` or `os.PathLike`): Where the PNG goes.

    Raises:
        ImportError: matplotlib is not there.
        ValueError: there is no result.
    """
    figure, panels = _panels(results, each=2)
    num_drafts = max(len(result.acceptance) for result in results)
    for (dataset, temperature), (rates, lengths) in panels.items():
        for style, _, result in _curves(results, dataset, temperature):
            thresholds = [each.threshold for each in result.thresholds]
            rates.plot(thresholds, [t.verify_rate for t in result.thresholds], label=result.drafter, **style)
            lengths.plot(thresholds, [t.verify_length for t in result.thresholds], **style)
        rates.set(ylim=(0, 1.03), title=f"{dataset}, T = {temperature:g}")
        lengths.set(ylim=(0, num_drafts), xlabel="confidence threshold")
        rates.sharex(lengths)  # where nothing was verified there is no rate
    _finish(figure, panels, ("verified drafts accepted", "drafts verified a round"))
    save_figure(figure, path)


def _panels(results: "Sequence[SetFigures]", each: int = 1) -> tuple[Any, dict[tuple[str, float], list[Any]]]:
    """A figure, and the `each` axes, one below the other, of every set and temperature."""
    if not results:
        raise ValueError("no results to draw; give one at least")
    sets = list(dict.fromkeys(result.dataset for result in results))
    temperatures = list(dict.fromkeys(result.temperature for result in results))
    figure = new_figure(figsize=(max(1.2 + 2.9 * len(sets), 5.4), 0.6 + 2.4 * each * len(temperatures)))
    grid = figure.subplots(each * len(temperatures), len(sets), squeeze=False)
    return figure, {
        (dataset, temperature): list(grid[each * row : each * (row + 1), column])
        for row, temperature in enumerate(temperatures)
        for column, dataset in enumerate(sets)
    }


def _curves(
    results: "Sequence[SetFigures]", dataset: str, temperature: float
) -> "list[tuple[dict[str, Any], float, SetFigures]]":
    """
    Results of a panel: each with the style of its drafter, and how far it is moved aside. The first curves are the
    widest, so that those that coincide show below the later ones.
    """
    drafters = list(dict.fromkeys(result.drafter for result in results))
    found = []
    for result in results:
        if (result.dataset, result.temperature) == (dataset, temperature):
            number = drafters.index(result.drafter)
            width = min(1.3 + 1.2 * (len(drafters) - 1 - number), 6.0)
            style = {"color": f"C{number}", "marker": MARKERS[number % len(MARKERS)], "linewidth": width, "alpha": 0.8}
            found.append((style, SHIFT * (number - (len(drafters) - 1) / 2), result))
    return found


def _figure(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}"


def _finish(figure: Any, panels: dict[tuple[str, float], list[Any]], labels: Sequence[str]) -> None:
    """Grids, the labels of the first column, and one legend."""
    first_set = next(iter(panels))[0]
    for (dataset, _), axes in panels.items():
        for each, label in zip(axes, labels, strict=True):
            each.grid(alpha=0.25)
            if dataset == first_set:
                each.set_ylabel(label)
    handles, names = next(iter(panels.values()))[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=min(len(names), 4), frameon=False)
