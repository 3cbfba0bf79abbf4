"""An evaluation as Markdown tables and as pictures.

Contract: figures in, text and files out. Every table says which counting of accepted length it is about. With several
drafters each has its own row and its own curve, so that they can be compared.
"""

import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from .calibration_report import CalibrationReport
from .evaluation import Evaluation
from .evaluation_figures import SetFigures, SpeedFigures
from .recorded_answers import REPEATED_LENGTH


def write_report(evaluation: Evaluation, folder: str | os.PathLike, *, plot: bool = False) -> list[Path]:
    """
    Writes `evaluation.json` and `evaluation.md` into a folder, which is made if need be; with `plot` the pictures
    `acceptance.png` (Fig. 2), `thresholds.png` (Fig. 5) and, one for each drafter, `reliability.png` (Fig. 6); the
    latter two if there are confidences.

    Returns:
        `list[Path]`: What was written.

    Raises:
        ImportError: `plot` without matplotlib.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "evaluation.json", folder / "evaluation.md"]
    evaluation.save(written[0])
    written[1].write_text(markdown_report(evaluation) + "\n", encoding="utf-8")
    if plot:
        from .plots import plot_conditional_acceptance, plot_reliability, plot_thresholds

        results = evaluation.results
        plot_conditional_acceptance(results, path := folder / "acceptance.png")
        written.append(path)
        if swept := [result for result in results if result.thresholds]:
            plot_thresholds(swept, path := folder / "thresholds.png")
            written.append(path)
        by_drafter: dict[str, list[CalibrationReport]] = {}
        for result in results:
            if result.reliability is not None:
                by_drafter.setdefault(result.drafter, []).append(result.reliability)
        for name, reports in by_drafter.items():
            path = folder / ("reliability.png" if len(by_drafter) == 1 else f"reliability.{_file_word(name)}.png")
            plot_reliability(reports, path)
            written.append(path)
    return written


def earlier_report(folder: str | os.PathLike) -> list[Path]:
    """What [`write_report`] wrote into a folder before, pictures included; empty if there is nothing of it."""
    patterns = ("evaluation.json", "evaluation.md", "acceptance.png", "thresholds.png", "reliability*.png")
    return [path for pattern in patterns for path in sorted(Path(folder).glob(pattern)) if path.is_file()]


def remove_report(folder: str | os.PathLike) -> None:
    """Removes what [`earlier_report`] finds, and nothing else: no picture of another run stays beside a new table."""
    for path in earlier_report(folder):
        path.unlink()


def markdown_report(evaluation: Evaluation) -> str:
    """All tables, as Markdown."""
    results = evaluation.results
    settings = evaluation.settings
    parts = [
        f"Target {settings['target']}, {settings['dtype']} on {settings['device']}, up to "
        f"{settings['max_new_tokens']} new tokens, batches of {settings['batch_size']}, seed {settings['seed']}. "
        "Whole blocks verified. A round is one verification of one row; ± is one standard error over answers.",
        "## Accepted length, the target's own token included (the paper's τ)",
        accepted_length_table(results, lambda r: r.accepted_length, lambda r: r.accepted_length_error),
        "## Accepted drafts a round (the target's own token not included)",
        accepted_length_table(results, lambda r: r.accepted_drafts),
        "## Sets",
        sets_table(results),
        f"Verify rate: accepted share of the verified drafts. Repetition: share of the tokens that lie in a run of "
        f"{REPEATED_LENGTH} which the same answer held before; such text is easy to draft.",
        *_speed_words(results),
        "## Conditional acceptance at each draft",
        positions_table(results, lambda r: r.conditional_acceptance),
        "Share of the rounds whose earlier drafts all stood in which this one stood, too.",
        "## Acceptance at each draft",
        positions_table(results, lambda r: r.acceptance),
        "Share of the rounds in which this draft and all before it stood, among those with room for it (an answer's "
        "last rounds may have room for less than a block).",
        "## Acceptance by length of the text",
        contexts_table(results),
    ]
    if any(result.thresholds for result in results):
        parts += [
            "## Stopping at the first confidence below a threshold",
            thresholds_table(results),
            "Replayed on the recorded rounds: what each would have verified and kept.",
        ]
    if any(result.reliability for result in results):
        parts += [
            "## Reliability of the confidences",
            reliability_table(results),
            "Calibration error (ECE) and AUC of the predicted survival of the first k drafts, k = 1, 2, ...; before "
            "and after the temperatures in the drafter's config.",
        ]
    return "\n\n".join(parts)


def accepted_length_table(
    results: Sequence[SetFigures],
    value: Callable[[SetFigures], float],
    error: Callable[[SetFigures], float] | None = None,
) -> str:
    """A row for each drafter and temperature, a column for each set, and their mean where all sets are there."""
    sets = list(dict.fromkeys(result.dataset for result in results))
    rows = []
    for temperature, drafter in dict.fromkeys((result.temperature, result.drafter) for result in results):
        own = {r.dataset: r for r in results if (r.temperature, r.drafter) == (temperature, drafter)}
        cells = [
            _pm(value(own[name]), error(own[name]) if error else math.nan) if name in own else "" for name in sets
        ]
        if len(sets) > 1:
            cells.append(_figure(sum(map(value, own.values())) / len(sets)) if len(own) == len(sets) else "")
        rows.append([drafter, f"{temperature:g}", *cells])
    return _table(["drafter", "T", *sets, *(["mean"] if len(sets) > 1 else [])], rows)


def sets_table(results: Sequence[SetFigures]) -> str:
    """A row for each result: both countings, rates and speed."""
    rows = []
    for r in results:
        speed = r.speed
        row = [
            *(r.drafter, r.dataset, f"{r.temperature:g}", _prompts(r), str(r.num_rounds)),
            *(_figure(r.accepted_length), _figure(r.accepted_drafts), _figure(r.verify_length)),
            *(_percent(r.verify_rate), _percent(r.repetition_share)),
        ]
        if any(each.speed for each in results):
            row += (
                ["", "", ""]
                if speed is None
                else [f"{speed.plain_tokens_per_second:.1f}", f"{speed.tokens_per_second:.1f}", _ratio(r, speed)]
            )
        rows.append(row)
    heads = ["drafter", "set", "T", "prompts", "rounds", "accepted length (with the target's token)"]
    heads += ["accepted drafts (without)", "drafts verified", "verify rate", "repetition"]
    if any(each.speed for each in results):
        heads += ["plain tokens/s", "drafter tokens/s", "ratio"]
    return _table(heads, rows)


def positions_table(results: Sequence[SetFigures], values: Callable[[SetFigures], Sequence[float]]) -> str:
    """A row for each result, a column for each draft."""
    num_drafts = max(len(values(result)) for result in results)
    rows = [[*_key(r), *(_figure(each) for each in values(r)), *[""] * (num_drafts - len(values(r)))] for r in results]
    return _table(["drafter", "set", "T", *map(str, range(1, num_drafts + 1))], rows)


def contexts_table(results: Sequence[SetFigures]) -> str:
    """A row for each result, a column for each range of lengths: both countings and the number of rounds."""
    heads = [
        f"< {_thousand(c.below)}" if not c.at_least else f"≥ {_thousand(c.at_least)}" for c in results[0].contexts
    ]
    rows = [
        [
            *_key(r),
            *(
                f"{c.accepted_length:.2f} / {c.accepted_drafts:.2f} ({c.num_rounds})" if c.num_rounds else "–"
                for c in r.contexts
            ),
        ]
        for r in results
    ]
    return _table(["drafter", "set", "T", *(f"{head} tokens: with / without (rounds)" for head in heads)], rows)


def thresholds_table(results: Sequence[SetFigures]) -> str:
    """A row for each result and threshold."""
    rows = [
        [
            *(*_key(r), f"{t.threshold:g}", _figure(t.verify_length), _percent(t.verify_rate)),
            *(_figure(t.accepted_length), _figure(t.accepted_drafts)),
        ]
        for r in results
        for t in r.thresholds
    ]
    heads = ["drafter", "set", "T", "threshold", "drafts verified", "verify rate"]
    return _table([*heads, "accepted length (with)", "accepted drafts (without)"], rows)


def reliability_table(results: Sequence[SetFigures]) -> str:
    """A row for each result that has confidences."""
    rows = [
        [
            *(*_key(r), str(r.reliability.num_rounds)),
            *(_percents(r.reliability.ece_before), _percents(r.reliability.ece_after)),
            " ".join(_figure(each.auc) for each in r.reliability.after),
        ]
        for r in results
        if r.reliability is not None
    ]
    return _table(["drafter", "set", "T", "rounds", "ECE before, %", "ECE after, %", "AUC after"], rows)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def _key(result: SetFigures) -> tuple[str, str, str]:
    return result.drafter, result.dataset, f"{result.temperature:g}"


def _prompts(result: SetFigures) -> str:
    return f"{result.num_prompts}" + (f" ({result.num_skipped} cut: too long)" if result.num_skipped else "")


def _figure(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}"


def _pm(value: float, error: float) -> str:
    return _figure(value) + ("" if math.isnan(error) else f" ± {error:.2f}")


def _ratio(result: SetFigures, speed: SpeedFigures) -> str:
    return f"{speed.ratio:.2f}x" + ("" if speed.identical or result.temperature > 0 else " (text differs)")


def _percent(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.1%}"


def _percents(values: Iterable[float]) -> str:
    return " ".join(f"{100 * value:.1f}" for value in values)


def _speed_words(results: Sequence[SetFigures]) -> list[str]:
    speeds = [result.speed for result in results if result.speed is not None]
    if not speeds:
        return []
    return [
        f"Speed: up to {max(speed.num_prompts for speed in speeds)} prompts of each set, in batches of up to "
        f"{speeds[0].batch_size}; each was decoded {speeds[0].repeats} times, plainly and with the drafter's own "
        "scheduler in turn. Medians, prefill included."
    ]


def _file_word(name: str) -> str:
    return re.sub(r"[^\w.-]", "_", name)


def _thousand(tokens: int | None) -> str:
    return "" if tokens is None else f"{tokens // 1024}k"
