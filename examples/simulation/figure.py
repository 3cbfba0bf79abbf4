"""The picture: what policies verify, and what it brings, from one request to hundreds at a time.

Contract: draws what it is given; matplotlib is imported when drawing starts, and no state of it is touched.
"""

import io
import os
from collections.abc import Mapping, Sequence
from typing import Any

from .recording import write_whole

# Colours that tell apart with any kind of colour vision; the default policy on top, and darkest.
STYLES: dict[str, dict[str, Any]] = {
    "Auto": dict(color="#0B3C7D", linewidth=2.8),
    "Lookahead": dict(color="#D55E00", linewidth=1.8, linestyle=(0, (5, 2))),
    "CausalGreedy": dict(color="#009E73", linewidth=1.8),
    "oracle": dict(color="#8C8C8C", linewidth=1.4, linestyle=(0, (2, 2))),
    "FixedLength": dict(color="#B48AC8", linewidth=1.8),
    "plain": dict(color="#404040", linewidth=1.2),
}
GREY, GRID, LOSS, LOSS_TEXT = "#6A6A6A", "#E8E8E8", "#FAEEEC", "#A04030"


def plot_concurrency(
    path: str | os.PathLike,
    batches: Sequence[int],
    verify_lengths: Mapping[str, Sequence[float]],
    ratios: Mapping[str, Sequence[float]],
    *,
    title: str,
    subtitle: str,
) -> None:
    """
    Writes a PNG: mean verify length above, throughput over plain decoding below, both against concurrency.

    Args:
        path (`str` or `os.PathLike`): The file, replaced whole.
        batches (`Sequence[int]`): Concurrent requests.
        verify_lengths, ratios (`Mapping[str, Sequence[float]]`): For each policy one value per entry of `batches`.
        title, subtitle (`str`): What is seen, and how it was made.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'hf-dspark[plot]'") from error
    figure = Figure(figsize=(8.6, 7.6), dpi=150, facecolor="white")
    figure.subplots_adjust(left=0.08, right=0.79, top=0.885, bottom=0.075, hspace=0.12)
    upper, lower = figure.subplots(2, 1, sharex=True)
    upper.set_ylim(-0.15, 1.06 * max(max(values) for values in verify_lengths.values()))
    lower.set_ylim(min(0.5, *map(min, ratios.values())), 1.06 * max(max(values) for values in ratios.values()))
    lower.axhspan(lower.get_ylim()[0], 1, color=LOSS, zorder=0)
    lower.text(batches[0] * 1.08, 0.97, "slower than plain", va="top", fontsize=8, color=LOSS_TEXT)
    for axes, series, form in ((upper, verify_lengths, "{:.1f}"), (lower, ratios, "{:.2f}x")):
        _draw(axes, batches, series, form)
    upper.set_ylabel("drafts verified a row and round", fontsize=9.5)
    lower.set_ylabel("tokens/s over plain decoding", fontsize=9.5)
    lower.set_xlabel("concurrent requests", fontsize=9.5)
    figure.text(0.08, 0.955, title, fontsize=12.5, fontweight="bold")
    figure.text(0.08, 0.918, subtitle, fontsize=9, color=GREY)
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    write_whole(path, buffer.getvalue())


def _draw(axes: Any, batches: Sequence[int], series: Mapping[str, Sequence[float]], form: str) -> None:
    """The lines of one panel, each named at its right end."""
    from matplotlib.ticker import FixedLocator, NullLocator

    for name, values in series.items():
        axes.plot(batches, values, solid_capstyle="round", zorder=10 - _rank(name), **_style(name))
    bottom, top = axes.get_ylim()
    ends = sorted((float(values[-1]), -_rank(name), name) for name, values in series.items())
    heights = _spread([value for value, _, _ in ends], (top - bottom) * 0.052, bottom, top)
    for height, (value, _, name) in zip(heights, ends, strict=True):
        axes.annotate(
            f"{name}  {form.format(value)}",
            xy=(1, value),
            xytext=(1.045, height),
            xycoords=axes.get_yaxis_transform(),
            textcoords=axes.get_yaxis_transform(),
            va="center",
            fontsize=8.8,
            color=_style(name)["color"],
            fontweight="bold" if name == "Auto" else "normal",
            arrowprops=dict(
                arrowstyle="-", color=_style(name)["color"], linewidth=0.6, shrinkA=2, shrinkB=0, relpos=(0, 0.5)
            ),
            annotation_clip=False,
        )
    axes.set_xscale("log", base=2)
    axes.set_xlim(batches[0], batches[-1])
    axes.xaxis.set_major_locator(FixedLocator([batch for batch in batches if batch & (batch - 1) == 0]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#BBBBBB")
    axes.tick_params(length=0, labelsize=9)


def _style(name: str) -> dict[str, Any]:
    return list(STYLES.values())[_rank(name)]


def _rank(name: str) -> int:
    return next(rank for rank, key in enumerate(STYLES) if name.startswith(key))


def _spread(values: list[float], distance: float, bottom: float, top: float) -> list[float]:
    """Heights for labels of ascending values: `distance` apart or more, within the panel, near to their values."""
    heights = list(values)
    for _ in range(300):
        for index in range(len(heights) - 1):
            overlap = distance - (heights[index + 1] - heights[index])
            if overlap > 0:
                heights[index] -= overlap / 2
                heights[index + 1] += overlap / 2
        if heights[0] < bottom:
            heights[0] = bottom
        if heights[-1] > top:
            heights[-1] = top
    return heights
