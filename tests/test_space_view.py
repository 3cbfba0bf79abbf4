"""The Space's answer as HTML: exactly the decoded text, all of it escaped, every token's fate told, and bounded."""

import html
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_dspark.spans import Span
from tests.test_terminal import BYTES, EOS, TEXT, decoding_round, ids_of, rounds_of
from view import (
    FADE_SECONDS,
    MOST_QUESTION_CHARACTERS,
    NEWEST_PIECES,
    AnswerView,
    legend_html,
    message_html,
    panel_html,
    question_html,
)

KEPT = re.compile(r"<span class=\"(\w)\"([^>]*)>([^<]*)</span>")
GHOST = re.compile(r"<s class=\"r\"[^>]*animation-delay:-([\d.]+)s\">([^<]*)</s>")


def shown(page):
    """The text content of the kept pieces, as a browser would read it."""
    return "".join(html.unescape(text) for _, _, text in KEPT.findall(page))


def view_of(rounds, ids=(), *, seconds=0.0):
    view = AnswerView(BYTES)
    for each in rounds:
        view.push(each, seconds)
    if ids:
        view.finish(ids, seconds)
    return view


@pytest.mark.parametrize("num_accepted", [0, 1, 3, 7])
@pytest.mark.parametrize("finished", [False, True])
def test_joined_spans_are_the_decoded_text(num_accepted, finished):
    ids = [*ids_of(TEXT + TEXT), EOS]
    view = view_of(rounds_of(ids, num_accepted), ids)
    assert shown(view.html(0.0, finished=finished)) == view.text == TEXT + TEXT


@given(st.text(max_size=30))
def test_joined_spans_are_the_decoded_text_whatever_it_is(text):
    ids = [*ids_of(text), EOS]
    assert shown(view_of(rounds_of(ids, 2), ids).html(0.0, finished=True)) == text


def test_nothing_in_a_text_is_markup():
    evil = "<script>alert('\"&')</script>\r\n"
    ids = ids_of(evil)
    page = view_of(rounds_of(ids, 2), ids).html(0.0)
    assert shown(page) == evil
    assert re.findall(r"</?([a-z]+)", page) and set(re.findall(r"</?([a-z]+)", page)) == {"span", "s"}
    assert "\r" not in page, "a browser would read it as a newline"
    for made in (question_html(evil), message_html(evil), panel_html(evil, "", status=evil, hint=evil)):
        assert "<script" not in made and "&lt;script&gt;" in made


def test_each_token_tells_where_it_came_from():
    a, b, c, d, x = map(ord, "abcdx")
    first = decoding_round((a, x, c), 1, b, anchor_id=d, confidence=(0.9, 0.4, 0.1))
    page = view_of([first, decoding_round((a, b), 2, c, confidence=(0.5, 0.5)), decoding_round((), 0, a)]).html(0.0)
    titles = re.findall(r'<span class="(\w)"[^>]* title="([^"]*)"', page)
    draft = "draft {}, accepted · confidence {} in this one · survival {}, of all up to it · {}"
    assert titles == [
        ("t", "the big model’s own token, from reading the prompt"),
        ("a", draft.format(1, "0.90", "0.90", "step 1, 3 drafts checked")),
        ("c", "correction: the big model’s own token instead of “xc” · step 1, 3 drafts checked"),
        ("a", draft.format(1, "0.50", "0.50", "step 2, 2 drafts checked")),
        ("a", draft.format(2, "0.50", "0.25", "step 2, 2 drafts checked")),
        ("b", "bonus: the big model’s own token after drafts that all stood · step 2, 2 drafts checked"),
        ("t", "the big model’s own token · step 3, no drafts checked"),
    ]
    assert page.count('tabindex="0"') == len(titles), "each of them can be reached with a keyboard or a finger"


def test_opacity_is_confidence():
    page = view_of([decoding_round(ids_of("abc"), 3, ord("d"), confidence=(0.25, 1.5, 0.755))]).html(0.0)
    assert re.findall(r"--c:([\d.]+)", page) == ["0.25", "1.00", "0.76"]
    without = view_of([decoding_round(ids_of("ab"), 2, ord("c"))]).html(0.0)
    assert re.findall(r"--c:([\d.]+)", without) == ["0.60", "0.60"], "a drafter without a confidence head"


def test_rejected_drafts_fade_and_are_gone():
    view = view_of([decoding_round(ids_of("a\nx"), 0, ord("b"), anchor_id=ord("c"))], seconds=10.0)
    assert GHOST.findall(view.html(10.0)) == [("0.00", "a⏎x")]
    assert GHOST.findall(view.html(10.5)) == [("0.50", "a⏎x")], "a page that is replaced goes on where it was"
    assert GHOST.findall(view.html(10.0 + FADE_SECONDS)) == []
    finished = view_of([decoding_round(ids_of("ax"), 0, ord("b"), anchor_id=ord("c"))], seconds=10.0)
    assert GHOST.findall(finished.html(10.0, finished=True)) == [], "what can be copied is the answer alone"
    assert shown(view.html(99.0)) == "cb"


def test_half_a_character_that_was_rejected_leaves_no_mark():
    pizza = ids_of("\N{SLICE OF PIZZA}")
    view = view_of([decoding_round(pizza[:1], 0, ord("b"), anchor_id=ord("c"))])
    assert GHOST.findall(view.html(0.0)) == []
    assert "instead of" not in view.html(0.0)


def test_only_the_newest_pieces_say_all_while_more_is_coming():
    ids = ids_of("word " * 200)
    view = view_of(rounds_of(ids, 4))
    live, finished = view.html(99.0), view.html(99.0, finished=True)
    assert live.count("title=") == NEWEST_PIECES
    assert finished.count("title=") == len(ids), "the finished answer says everything"
    assert shown(live) == shown(finished)
    assert len(live) < len(finished) / 3


def test_a_live_page_grows_slowly_with_the_answer():
    sizes = []
    for repeats in (100, 200):
        ids = ids_of("word " * repeats)
        confidence = (0.91, 0.52, 0.33, 0.74)
        rounds = [
            decoding_round(r.draft_ids, r.num_accepted, r.next_id, confidence=confidence) for r in rounds_of(ids, 4)
        ]
        sizes.append(len(view_of(rounds).html(99.0)))
    assert sizes[1] - sizes[0] < 45 * 500, "bytes for another 500 tokens"


def test_a_long_question_is_cut():
    page = question_html("x" * (MOST_QUESTION_CHARACTERS + 1))
    assert page.count("x") == MOST_QUESTION_CHARACTERS and "…" in page
    assert "…" not in question_html("x" * MOST_QUESTION_CHARACTERS)


def test_the_legend_shows_every_look_of_a_token():
    assert set(re.findall(r'<span class="(\w)"', legend_html())) == {"a", "c", "b", "t"}
    assert "<s " in legend_html()


def test_a_message_says_what_kind_it_is():
    assert 'role="alert"' in message_html("no", kind="error") and 'role="status"' in message_html("yes")


def test_answers_without_rounds_are_shown():
    assert shown(view_of([], [ord("a"), EOS]).html(0.0, finished=True)) == "a"
    assert Span("a", "target").position is None
