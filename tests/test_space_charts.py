"""The Space's charts and sentences: they say what was measured, in marks at the right places and in plain words."""

import html
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace

import pytest

import charts
from ledger import NEWEST_BLOCKS, RECENT_STEPS, Bin, Ledger, Load
from summary import Measured, comparison, run_summary
from tests.test_terminal import decoding_round


def drawing(figure):
    """The SVG of a figure; a parse error if it is none."""
    return ElementTree.fromstring(re.search(r"<svg.*</svg>", figure, re.DOTALL).group())


def marks(figure, name):
    return [mark for mark in drawing(figure).iter() if mark.get("class") == name]


def step(num_running, verified, seconds=0.1):
    return SimpleNamespace(
        num_running=num_running,
        batch_tokens=num_running + verified,
        num_drafts_verified=verified,
        seconds=seconds,
    )


ALL_CHARTS = [
    charts.accepted_lengths([(2, 3), (0, 1)], most=6),
    charts.verify_lengths([Load(1, 3, 4.0)], [4, 4.5, 3, 2, 2, 1.5, 1, 1], num_running=1, block_size=5, most_rows=8),
    charts.reliability([None, Bin(3, 0.3, 0.4), None, None, Bin(9, 0.9, 0.9)]),
    charts.step_rates([(1, 9.0), (8, 4.0)], [(1, 8.0), (6, 5.0)], [(4, 0.2)], num_running=1),
]
EMPTY_CHARTS = [
    charts.accepted_lengths([], most=6),
    charts.verify_lengths([], [], num_running=0, block_size=5, most_rows=8),
    charts.reliability([None] * 5),
    charts.step_rates([], [], [], num_running=0),
]


@pytest.mark.parametrize("figure", ALL_CHARTS)
def test_a_chart_is_a_described_picture_that_loads_nothing(figure):
    svg = drawing(figure)
    assert svg.get("role") == "img" and len(svg.get("aria-label")) > 20
    assert "<figcaption>" in figure and "http" not in figure and "<script" not in figure
    for mark in svg.iter("text"):
        assert -1 <= float(mark.get("x")) <= charts.WIDTH + 1 and 0 <= float(mark.get("y")) <= charts.HEIGHT


def test_the_docs_call_the_charts_by_their_titles():
    titles = [html.unescape(re.search("<h4>(.*)</h4>", figure).group(1)) for figure in ALL_CHARTS]
    section = (Path(__file__).parents[1] / "docs" / "space.md").read_text().split("## The charts")[1].split("##")[0]
    assert re.findall(r"^- \*\*(.*?)\*\*", section, re.MULTILINE) == titles


@pytest.mark.parametrize("figure", EMPTY_CHARTS)
def test_a_chart_without_data_says_what_will_come(figure):
    assert "<svg" not in figure and "ds-empty" in figure and "<figcaption>" in figure


def test_accepted_lengths_are_stacked_and_averaged():
    figure = charts.accepted_lengths([(2, 3), (0, 1), (4, 5)], most=6)
    accepted, own = marks(figure, "accepted"), marks(figure, "own")
    unit = (charts.HEIGHT - charts.TOP - charts.BOTTOM) / 6  # the longest round, and one more
    assert [float(bar.get("height")) for bar in accepted] == pytest.approx([2 * unit, 0, 4 * unit], abs=0.1)
    assert [float(bar.get("height")) for bar in own] == pytest.approx([unit] * 3, abs=0.1)
    assert "mean 3.00" in figure


def test_only_the_newest_rounds_are_drawn_but_all_are_averaged():
    figure = charts.accepted_lengths([(0, 1)] * 100 + [(3, 4)] * charts.NEWEST_ROUNDS, most=6)
    assert len(marks(figure, "own")) == charts.NEWEST_ROUNDS
    assert f"mean {(100 + 4 * charts.NEWEST_ROUNDS) / (100 + charts.NEWEST_ROUNDS):.2f}" in figure


def test_drafts_that_a_stop_cut_off_are_not_drawn():
    figure = charts.accepted_lengths([(5, 2)], most=6)
    assert float(marks(figure, "own")[0].get("height")) == 0
    assert "mean 2.00" in figure


def test_the_bar_of_the_present_load_stands_out():
    loads = [Load(1, 30, 4.0), Load(2, 12, 1.5)]
    figure = charts.verify_lengths(loads, [], num_running=2, block_size=5, most_rows=8)
    (now,), (then,) = marks(figure, "checked now"), marks(figure, "checked then")
    assert float(now.get("x")) > float(then.get("x")) and float(now.get("height")) < float(then.get("height"))
    assert "2 at once: 1.5 drafts per answer over 12 steps" in drawing(figure).get("aria-label")


def test_what_is_expected_at_other_loads_is_a_line_and_words():
    expected = [2.0, 4.0, 3.0, 1.0]
    figure = charts.verify_lengths([Load(2, 9, 4.0)], expected, num_running=2, block_size=5, most_rows=4)
    heights = [float(dot.get("cy")) for dot in marks(figure, "forecast") if dot.tag.endswith("circle")]
    unit = (charts.HEIGHT - charts.TOP - charts.BOTTOM) / 5
    assert heights == pytest.approx([charts.HEIGHT - charts.BOTTOM - unit * length for length in expected], abs=0.1)
    assert "most at 2 answers (4.0), fewer at 4 (1.0)" in figure
    assert "expected of the newest drafts: 2.0, 4.0, 3.0, 1.0" in drawing(figure).get("aria-label")
    assert charts.turning_point([3.0, 2.0]) == "Now: the more answers, the fewer, from 3.0 to 2.0."
    assert charts.turning_point([2.0, 2.0]) == charts.turning_point([1.0, 2.0]) == charts.turning_point([]) == ""


def test_dots_of_trustworthy_confidences_lie_on_the_diagonal():
    figure = charts.reliability([None, None, Bin(5, 0.5, 0.5), None, Bin(50, 0.9, 0.9)])
    small, large = marks(figure, "bin")
    for dot in (small, large):
        across = (float(dot.get("cx")) - charts.LEFT) / (charts.WIDTH - charts.LEFT - charts.RIGHT)
        up = (charts.HEIGHT - charts.BOTTOM - float(dot.get("cy"))) / (charts.HEIGHT - charts.TOP - charts.BOTTOM)
        assert across == pytest.approx(up, abs=0.01)
    assert float(small.get("r")) < float(large.get("r")), "more drafts, a larger dot"
    assert "55 drafts" in figure


def test_the_operating_point_is_the_newest_steps():
    figure = charts.step_rates([(1, 10.0), (8, 4.0)], [], [(1, 0.1), (6, 0.5), (6, 0.25), (6, 0.2)], num_running=2)
    assert "6 tokens: 4.0/s" in figure, "the median of recent steps of its size"
    assert len(marks(figure, "here")) == 1 and len(marks(figure, "seen")) == 2
    unmeasured = charts.step_rates([], [], [(3, 0.5)], num_running=1)
    assert "3 tokens: 2.0/s" in unmeasured and len(marks(unmeasured, "here")) == 1


@pytest.mark.parametrize("largest", [0.004, 0.9, 1, 5, 14.9, 56, 730, 12345])
def test_ticks_are_few_and_round(largest):
    ticks = charts.nice_ticks(largest)
    assert 3 <= len(ticks) <= 6 and ticks[0] == 0 and ticks[-1] <= largest
    assert len({round(b - a, 9) for a, b in zip(ticks, ticks[1:], strict=False)}) == 1


def test_the_ledger_counts_drafts_up_to_the_first_rejected_one():
    ledger = Ledger()
    ledger.add_round(decoding_round((1, 2, 3, 4), 1, 9, confidence=(0.9, 0.5, 0.95, 0.1), verify_length=3))
    ledger.add_round(decoding_round((1, 2, 3), 2, 9, confidence=(0.85, 1.0, 0.9), verify_length=2))
    assert ledger.snapshot().bins == (
        None,
        None,
        Bin(1, 0.5, 0.0),
        None,
        Bin(3, pytest.approx((0.9 + 0.85 + 1.0) / 3), 1.0),
    )


def test_the_ledger_tells_loads_apart():
    ledger = Ledger()
    for each in (step(1, 5), step(1, 3), step(2, 2), step(0, 0)):
        ledger.add_step(each)
    happened = ledger.snapshot()
    assert happened.loads == (Load(1, 2, 4.0), Load(2, 1, 1.0)), "per answer"
    assert happened.num_running == 2, "a step that served nobody does not count"
    assert happened.recent == ((6, 0.1), (4, 0.1), (4, 0.1))


def test_the_ledger_is_bounded():
    ledger = Ledger()
    for number in range(2000):
        ledger.add_step(step(1, 3 if number < 1900 else 1))
        ledger.add_round(decoding_round((1, 2), 1, 9, confidence=(0.5, number / 2000)))
    happened = ledger.snapshot()
    assert len(happened.recent) == RECENT_STEPS and happened.loads[0].num_steps == 2000
    assert happened.loads[0].verify_length == pytest.approx((100 + 3 * (RECENT_STEPS - 100)) / RECENT_STEPS)
    assert len(happened.newest) == NEWEST_BLOCKS and happened.newest[-1] == (0.5, 1999 / 2000)


def test_a_run_in_a_sentence():
    rounds = [decoding_round((1, 2, 3), 2, 9), decoding_round((1, 2, 3), 0, 9)]
    assert run_summary(Measured((5, 1, 2, 9, 9), 2.0), rounds) == (
        "5 tokens: the first came with reading the prompt, the other 4 took 2 steps of the big model, where it alone "
        "would have taken 4: 2.0 tokens per step. Of 6 checked drafts it accepted 2."
    )
    plain = [decoding_round((), 0, 9)] * 3
    assert "took 3 steps of the big model, one each. No draft was checked" in run_summary(
        Measured((1,) * 4, 1.0), plain
    )
    assert run_summary(Measured((1,), 1.0), []) == "1 token, from reading the prompt alone: too short for a draft."


def test_the_comparison_says_what_was_measured():
    drafted, plain = Measured((1, 2, 3, 4), 2.0), Measured((1, 2, 3, 4), 3.0)
    same = comparison(drafted, plain, sampling=False, others=False)
    assert "the same text, token for token" in same and "2.0 tokens/s with drafts, 1.3 without: 1.50x." in same
    other = comparison(drafted, Measured((1, 2, 9), 3.0), sampling=False, others=False)
    assert "another text from token 3 on" in other
    assert "from token 4 on" in comparison(drafted, Measured((1, 2, 3), 3.0), sampling=False, others=False)
    assert "distribution" in comparison(drafted, Measured((7,), 3.0), sampling=True, others=False)
    assert "Other visitors" in comparison(drafted, plain, sampling=False, others=True) and "Other" not in same
