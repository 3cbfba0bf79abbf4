"""Four small charts as inline SVG: no scripts, no fonts, colours from the page's CSS variables (light and dark).

Contract: plain numbers go in, a `<figure>` comes out, with a caption in plain words and a description for those who
cannot see it. Every chart has one size in its own units and takes the width it is given.
"""

import html
from collections.abc import Iterable, Sequence
from statistics import median

from ledger import NUM_BINS, Bin, Load

WIDTH, HEIGHT = 300, 170
LEFT, RIGHT, TOP, BOTTOM = 28, 18, 16, 30
NEWEST_ROUNDS = 40

Point = tuple[float, float]


class Plot:
    """
    Axes, and marks in their units.

    Args:
        x (`tuple[float, float]`): Range of the horizontal axis.
        y (`tuple[float, float]`): Range of the vertical axis.
    """

    def __init__(self, x: tuple[float, float], y: tuple[float, float]):
        self._x, self._y = x, y
        self._marks: list[str] = []

    def at(self, x: float, y: float) -> Point:
        """Where a point is drawn."""
        across = (x - self._x[0]) / (self._x[1] - self._x[0])
        up = (y - self._y[0]) / (self._y[1] - self._y[0])
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    def bar(self, x: float, low: float, high: float, width: float, name: str) -> None:
        """A bar around `x`, from `low` to `high`, `width` wide in units of the axis."""
        left, top = self.at(x - width / 2, high)
        right, bottom = self.at(x + width / 2, low)
        place = f'x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{max(bottom - top, 0):.1f}"'
        self._marks.append(f'<rect class="{name}" {place} rx="1.5"/>')

    def line(self, points: Iterable[Point], name: str) -> None:
        """A line through points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (self.at(*point) for point in points))
        self._marks.append(f'<polyline class="{name}" points="{path}"/>')

    def dot(self, x: float, y: float, radius: float, name: str) -> None:
        """A dot, `radius` in units of the drawing."""
        left, top = self.at(x, y)
        self._marks.append(f'<circle class="{name}" cx="{left:.1f}" cy="{top:.1f}" r="{radius:.1f}"/>')

    def text(self, x: float, y: float, words: str, *, anchor: str = "middle", shift: Point = (0, 0)) -> None:
        """Words at a point, shifted in units of the drawing."""
        left, top = self.at(x, y)
        place = f'x="{left + shift[0]:.1f}" y="{top + shift[1]:.1f}" text-anchor="{anchor}"'
        self._marks.append(f"<text {place}>{html.escape(words)}</text>")

    def ticks(self, x: Iterable[float], y: Iterable[float], *, labels: Sequence[str] | None = None) -> None:
        """Numbers along both axes and lines across; `labels` replaces the numbers of the horizontal one."""
        for value in y:
            self.line([(self._x[0], value), (self._x[1], value)], "grid")
            self.text(self._x[0], value, f"{value:g}", anchor="end", shift=(-5, 3.5))
        for index, value in enumerate(x):
            self.text(value, self._y[0], labels[index] if labels else f"{value:g}", shift=(0, 13))

    def name_axes(self, x: str, y: str) -> None:
        """What the axes measure."""
        self._marks.append(f'<text class="axis" x="{WIDTH - RIGHT}" y="{HEIGHT - 3}" text-anchor="end">{x}</text>')
        self._marks.append(f'<text class="axis" x="{LEFT}" y="{TOP - 4}" text-anchor="start">{y}</text>')

    def svg(self, description: str) -> str:
        """The drawing."""
        words = html.escape(description, quote=True)
        return (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{words}">' + "".join(self._marks) + "</svg>"
        )


def accepted_lengths(rounds: Sequence[tuple[int, int]], *, most: int) -> str:
    """
    Tokens that each step of the target brought to one answer.

    Args:
        rounds (`Sequence[tuple[int, int]]`): `(accepted drafts, tokens kept)` of each round.
        most (`int`): The most tokens that a round can bring, K + 1.
    """
    title = "Tokens per step"
    caption = (
        "A bar is one step of the big model: accepted drafts, and on top its own token. Line: the mean so far. "
        "Dashed: plain decoding, always 1."
    )
    if not rounds:
        return figure(title, empty("one bar per step, from the first step on"), caption)
    means, total = [], 0
    for count, (_, kept) in enumerate(rounds, start=1):
        total += kept
        means.append(total / count)
    shown = list(enumerate(rounds, start=1))[-NEWEST_ROUNDS:]
    first, last = shown[0][0], max(shown[-1][0], shown[0][0] + 11)
    highest = min(max(max(kept for _, kept in rounds) + 1, 4), most)
    plot = Plot((first - 0.7, last + 0.7), (0, highest))
    plot.ticks([first, last], range(0, highest + 1, 2 if highest > 5 else 1))
    for number, (accepted, kept) in shown:
        accepted = min(accepted, kept)
        plot.bar(number, 0, accepted, 0.7, "accepted")
        plot.bar(number, accepted, kept, 0.7, "own")
    plot.line([(first - 0.7, 1), (last + 0.7, 1)], "reference")
    plot.line([(number, means[number - 1]) for number, _ in shown], "mean")
    plot.name_axes("step", "tokens")
    described = f"{len(rounds)} steps, {means[-1]:.2f} tokens a step on average, the newest {rounds[-1][1]}."
    return figure(title, plot.svg(described), caption, figure_of=f"mean {means[-1]:.2f}")


def verify_lengths(
    loads: Sequence[Load], expected: Sequence[float], *, num_running: int, block_size: int, most_rows: int
) -> str:
    """
    Drafts verified per answer and step, against the number of answers at once.

    Args:
        loads (`Sequence[Load]`): What occurred so far, all visitors together.
        expected (`Sequence[float]`): What the newest drafts would get from the scheduler at 1, 2, ... answers at once;
            empty if that is not known.
        num_running (`int`): Answers at once just now.
        block_size (`int`): K, the most that can be verified.
        most_rows (`int`): The most answers at once.
    """
    title = "Drafts checked, by load"
    caption = (
        "Drafts checked per answer and step, by how many answers are written at once: open more tabs for more bars. "
        "Dashed: what would be checked of the newest drafts at each load. "
    ) + turning_point(expected)
    if not loads:
        return figure(title, empty("one bar for every load that occurs"), caption)
    plot = Plot((0.4, most_rows + 0.6), (0, block_size))
    plot.ticks(range(1, most_rows + 1), range(0, block_size + 1, 2 if block_size > 4 else 1))
    for load in loads:
        now = "now" if load.num_running == num_running else "then"
        plot.bar(load.num_running, 0, load.verify_length, 0.64, f"checked {now}")
    plot.line(enumerate(expected, start=1), "forecast")
    for number, length in enumerate(expected, start=1):
        plot.dot(number, length, 2.2, "forecast")
    for load in loads:
        beside = expected[load.num_running - 1] if load.num_running <= len(expected) else block_size
        inside = 0 <= beside - load.verify_length < 0.17 * block_size and load.verify_length > 0.2 * block_size
        plot.text(load.num_running, load.verify_length, f"{load.verify_length:.1f}", shift=(0, 12 if inside else -4))
    plot.name_axes("answers at once", "drafts")
    described = "; ".join(
        f"{load.num_running} at once: {load.verify_length:.1f} drafts per answer over {load.num_steps} steps"
        for load in loads
    )
    if expected:
        described += "; expected of the newest drafts: " + ", ".join(f"{length:.1f}" for length in expected)
    return figure(title, plot.svg(described), caption, figure_of=f"now: {num_running}")


def turning_point(expected: Sequence[float]) -> str:
    """In words, from which load on more answers at once mean fewer drafts each."""
    if not expected or max(expected) - expected[-1] < 0.05:
        return ""
    most = max(range(len(expected)), key=lambda index: expected[index])
    if most == 0:
        return f"Now: the more answers, the fewer, from {expected[0]:.1f} to {expected[-1]:.1f}."
    return f"Now: most at {most + 1} answers ({expected[most]:.1f}), fewer at {len(expected)} ({expected[-1]:.1f})."


def reliability(bins: Sequence[Bin | None]) -> str:
    """
    How often drafts were accepted against how sure the drafter was of them.

    Args:
        bins (`Sequence[Bin | None]` of length 5): By confidence.
    """
    title = "Is confidence justified?"
    caption = (
        "Of drafts that the drafter was 80 % sure of, 80 % should be accepted: then dots lie on the diagonal. "
        "The numbers count drafts."
    )
    present = [entry for entry in bins if entry]
    if not present:
        return figure(title, empty("dots appear as drafts are checked"), caption)
    plot = Plot((0, 1), (0, 1))
    plot.ticks([0, 0.5, 1], [0, 0.5, 1], labels=["0 %", "50 %", "100 %"])
    for edge in range(1, NUM_BINS):
        plot.line([(edge / NUM_BINS, 0), (edge / NUM_BINS, 0.02)], "grid")
    plot.line([(0, 0), (1, 1)], "reference")
    plot.line([(entry.predicted, entry.realised) for entry in present], "trace")
    total = sum(entry.count for entry in present)
    for entry in present:
        plot.dot(entry.predicted, entry.realised, 3 + 5 * (entry.count / total) ** 0.5, "bin")
        above = entry.realised < 0.85
        plot.text(entry.predicted, entry.realised, f"{entry.count}", shift=(0, -10 if above else 17))
    plot.name_axes("confidence", "accepted")
    described = "; ".join(
        f"{entry.count} drafts with mean confidence {entry.predicted:.2f}: {entry.realised:.0%} accepted"
        for entry in present
    )
    return figure(title, plot.svg(described), caption, figure_of=f"{total} drafts")


def step_rates(
    profiled: Sequence[Point], likely: Sequence[Point], recent: Sequence[tuple[int, float]], *, num_running: int
) -> str:
    """
    Steps per second against the tokens of a step, and where the engine is now.

    Args:
        profiled (`Sequence[tuple[float, float]]`): `(tokens, steps per second)` as measured once; may be empty.
        likely (`Sequence[tuple[float, float]]`): The same for the present load, as followed since; may be empty.
        recent (`Sequence[tuple[int, float]]`): `(tokens, seconds)` of recent steps, oldest first.
        num_running (`int`): Answers at once just now.
    """
    title = "What a step costs"
    caption = (
        "The more tokens are checked in a step, the fewer steps a second. The scheduler weighs this against the "
        "confidences. Large dot: the newest step."
    )
    times: dict[int, list[float]] = {}
    for tokens, seconds in recent:
        times.setdefault(tokens, []).append(seconds)
    seen = sorted((tokens, 1 / median(values)) for tokens, values in times.items())
    if not (profiled or seen):
        return figure(title, empty("measured at the first use"), caption)
    largest = max([8, *(2 * x for x, _ in [*likely, *seen])])
    profiled = [point for point in profiled if point[0] <= largest]
    everything = [*profiled, *likely, *seen]
    highest = 1.1 * max(y for _, y in everything)
    plot = Plot((0, largest * 1.03), (0, highest))
    plot.ticks(nice_ticks(largest), nice_ticks(highest))
    plot.line(profiled, "profile")
    plot.line(likely, "likely")
    for tokens, rate in seen:
        plot.dot(tokens, rate, 1.8, "seen")
    figure_of = "as measured"
    if recent:
        tokens, rate = recent[-1][0], dict(seen)[recent[-1][0]]
        plot.dot(tokens, rate, 5, "here")
        figure_of = f"{tokens} token{'s' * (tokens != 1)}: {rate:.1f}/s"
    plot.name_axes("tokens in a step", "steps/s")
    described = f"{figure_of}; {num_running} answers at once"
    if profiled:
        described += f"; profile from {profiled[0][1]:.1f} to {profiled[-1][1]:.1f} steps per second"
    return figure(title, plot.svg(described), caption, figure_of=figure_of)


def nice_ticks(largest: float) -> list[float]:
    """Three to six round numbers from 0 up to `largest`."""
    unit = 10.0**-3
    while True:
        for step in (unit, 2 * unit, 5 * unit):
            if largest / step < 6:
                return [round(index * step, 6) for index in range(int(largest / step) + 1)]
        unit *= 10


def empty(words: str) -> str:
    """What stands in the place of a chart that has nothing to show yet."""
    return f'<div class="ds-empty" style="aspect-ratio:{WIDTH}/{HEIGHT}">{html.escape(words)}</div>'


def figure(title: str, body: str, caption: str, *, figure_of: str = "") -> str:
    """A chart with its heading, its newest number and its caption."""
    return (
        f'<figure class="ds-chart"><header><h4>{html.escape(title)}</h4><span>{html.escape(figure_of)}</span></header>'
        f"{body}<figcaption>{html.escape(caption)}</figcaption></figure>"
    )


def board(figures: Iterable[str]) -> str:
    """Charts side by side, as many as fit."""
    return f'<div class="ds-charts">{"".join(figures)}</div>'
