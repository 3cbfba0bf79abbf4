"""What the live view writes: exactly the answer, whole characters only, each piece under its own colour."""

import io
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_dspark.comparison import Comparison, Run
from hf_dspark.rounds import DecodingRound, DecodingStats
from hf_dspark.spans import IncrementalDecoder, Span, SpanBuilder
from hf_dspark.terminal import CONFIDENCE_COLORS, LiveRounds, LiveStreamer, Terminal, comparison_table, wants_color

EOS = 256
TEXT = "I ate 3 \N{SLICE OF PIZZA}s,\n\n  und  Äpfel:\t漢字 \N{FAMILY}!"


def byte_tokenizer():
    """Token id = byte value, so every character beyond ASCII is split over several tokens; 256 is the end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = [char for char in alphabet if ord(char) < 256]  # bytes that stand for themselves; the others are moved up
    moved = [byte for byte in range(256) if chr(byte) not in own]
    vocabulary = {char: ord(char) for char in own} | dict(zip(alphabet[len(own) :], moved, strict=True))
    tokenizer = Tokenizer(models.BPE(vocabulary | {"<end>": EOS}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def word_tokenizer():
    """A decoder that strips the space at the very start of a text, as sentencepiece's does."""
    vocabulary = {"▁we": 0, "▁go": 1, "ing": 2, "▁": 3, "\n": 4, "<unk>": 5}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


BYTES, WORDS = byte_tokenizer(), word_tokenizer()


def decoding_round(draft_ids, num_accepted, next_id, *, anchor_id=0, verify_length=None, confidence=(), kept=None):
    committed = (*draft_ids[:num_accepted], next_id)
    return DecodingRound(
        row=0,
        step=0,
        anchor_id=anchor_id,
        draft_ids=tuple(draft_ids),
        confidence=tuple(confidence),
        verify_length=len(draft_ids) if verify_length is None else verify_length,
        num_accepted=num_accepted,
        next_id=next_id,
        committed_ids=committed if kept is None else committed[:kept],
        batch_tokens=1,
        draft_seconds=0.1,
        verify_seconds=0.1,
    )


def rounds_of(ids, num_accepted):
    """Rounds that commit `ids` after the first one, in groups of `num_accepted` drafts and the token after them."""
    groups = [ids[i : i + num_accepted + 1] for i in range(1, len(ids), num_accepted + 1)]
    anchors = [ids[0], *(group[-1] for group in groups)]
    return [
        # the draft that was rejected is another byte than the token that replaced it
        decoding_round((*group[:-1], (group[-1] + 1) % 256), len(group) - 1, group[-1], anchor_id=anchor)
        for group, anchor in zip(groups, anchors, strict=False)
    ]


def ids_of(text):
    return list(text.encode())


def terminal(color):
    return Terminal(io.StringIO(), color=color)


def written(target):
    return target.stream.getvalue()


@pytest.mark.parametrize("tokenizer, ids", [(BYTES, st.integers(0, EOS)), (WORDS, st.integers(0, 4))])
def test_joined_pieces_equal_the_decoded_ids(tokenizer, ids):
    @given(st.lists(ids, max_size=20))
    def law(ids):
        decoder = IncrementalDecoder(tokenizer)
        pieces = [decoder.push(token_id) for token_id in ids] + [decoder.flush()]
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)

    law()


@given(st.text(max_size=12))
def test_no_piece_of_a_valid_text_is_half_a_character(text):
    decoder = IncrementalDecoder(BYTES)
    pieces = [decoder.push(token_id) for token_id in ids_of(text)]
    assert "".join(pieces) + decoder.flush() == text
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces) or "\N{REPLACEMENT CHARACTER}" in text


def test_peeking_changes_nothing_and_shows_no_half_character():
    decoder = IncrementalDecoder(BYTES)
    pizza = ids_of("\N{SLICE OF PIZZA}")
    pieces = [decoder.push(token_id) for token_id in pizza[:-1]]
    assert decoder.peek(ord("x")) == "x"
    assert decoder.peek(pizza[-1]) == "\N{SLICE OF PIZZA}"
    assert decoder.peek(pizza[0]) == ""
    assert "".join(pieces) + decoder.push(pizza[-1]) == "\N{SLICE OF PIZZA}"


@pytest.mark.parametrize("num_accepted", [0, 1, 3, 7])
def test_kept_spans_join_to_the_answer(num_accepted):
    ids = [*ids_of(TEXT), EOS]
    builder = SpanBuilder(BYTES)
    spans = [span for round_ in rounds_of(ids, num_accepted) for span in builder.push(round_)]
    spans += builder.finish(ids)
    assert "".join(span.text for span in spans if span.kind != "rejected") == TEXT
    assert all(span.text for span in spans)


def test_every_kind_of_token_is_told_apart():
    builder = SpanBuilder(BYTES)
    a, b, c, d, x = map(ord, "abcdx")
    assert builder.push(decoding_round((a, x, x), 1, b, anchor_id=d, confidence=(0.9, 0.4, 0.1))) == [
        Span("d", "target"),
        Span("a", "accepted", 0.9, 1),
        Span("x", "rejected", 0.4, 2),
        Span("b", "correction"),
    ]
    assert builder.push(decoding_round((a, b), 2, c)) == [
        Span("a", "accepted", position=1),
        Span("b", "accepted", position=2),
        Span("c", "bonus"),
    ]
    assert builder.push(decoding_round((a, x), 0, b, verify_length=0)) == [Span("b", "target")]
    assert builder.push(decoding_round((a, x), 1, b, verify_length=1)) == [
        Span("a", "accepted", position=1),
        Span("b", "bonus"),
    ]


def test_what_a_stop_cut_off_is_not_shown():
    builder = SpanBuilder(BYTES)
    a, b, x = map(ord, "abx")
    assert builder.push(decoding_round((a, b, x), 2, a, anchor_id=a, kept=1)) == [
        Span("a", "target"),
        Span("a", "accepted", position=1),
    ]
    assert builder.finish([a, a]) == []


def test_drafts_that_fell_with_a_rejected_one_are_told_on_request():
    a, b, c, d, x = map(ord, "abcdx")
    round_ = decoding_round((a, x, c, d, b), 1, b, anchor_id=d, verify_length=4)
    kinds = [(span.text, span.kind) for span in SpanBuilder(BYTES, discarded=True).push(round_)]
    assert kinds == [("d", "target"), ("a", "accepted"), ("x", "rejected"), ("cd", "discarded"), ("b", "correction")]
    assert "discarded" not in {span.kind for span in SpanBuilder(BYTES).push(round_)}


def test_an_answer_without_rounds_is_the_targets():
    assert SpanBuilder(BYTES).finish([ord("a"), EOS]) == [Span("a", "target")]


def test_without_colour_the_view_writes_the_answer_and_nothing_else():
    target, ids = terminal(color=False), ids_of(TEXT)
    live = LiveRounds(target, BYTES)
    for round_ in rounds_of(ids, 2):
        live.on_round(round_)
    live.end(ids)
    target.legend()
    assert written(target) == TEXT + "\n"


def test_colours_add_only_escape_codes_and_struck_drafts():
    target, ids = terminal(color=True), ids_of(TEXT)
    live = LiveRounds(target, BYTES)
    for round_ in rounds_of(ids, 2):
        live.on_round(round_)
    live.end(ids)
    without_struck = re.sub(r"\x1b\[9;[0-9;]*m[^\x1b]*\x1b\[0m", "", written(target))
    assert without_struck != written(target)
    assert re.sub(r"\x1b\[[0-9;]*m", "", without_struck) == TEXT + "\n"


def test_a_plain_answer_streams_as_it_is():
    target = terminal(color=True)
    streamer = LiveStreamer(target, BYTES)
    streamer.put(torch.tensor([ids_of("the prompt")]))
    for token_id in ids_of(TEXT):
        streamer.put(torch.tensor([token_id]))
    streamer.end()
    assert written(target) == TEXT + "\n"


def test_a_surer_draft_is_brighter():
    target = terminal(color=True)
    shades = [target.paint(Span("a", "accepted", c)) for c in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)]
    expected = [*CONFIDENCE_COLORS, CONFIDENCE_COLORS[-1]]
    assert shades == [f"\x1b[38;5;{color}ma\x1b[0m" for color in expected]
    assert target.paint(Span("a", "accepted")) == shades[2], "without a confidence head: the middle"


@pytest.mark.parametrize("color", [True, False])
def test_a_model_cannot_steer_the_terminal(color):
    target = terminal(color)
    target.spans([Span("a\x1b[2J\r\x07\x9b1mb\n\t", "target")])
    assert written(target) == "a␛[2J␍␇�1mb\n\t"


def test_a_rejected_newline_does_not_break_the_line():
    painted = terminal(color=True).paint(Span("\n\tx", "rejected"))
    assert "⏎⇥x" in painted and "\n" not in painted


class Screen(io.StringIO):
    def isatty(self):
        return True


def test_colour_is_for_terminals_whose_user_did_not_decline(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert wants_color(Screen())
    assert not wants_color(io.StringIO()), "a pipe"
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_color(Screen())
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not wants_color(Screen())


def comparison(plain_ids, drafted_ids, label="1 prompt"):
    stats = DecodingStats([decoding_round((1, 2), 1, 3), decoding_round((1, 2), 2, 3)])
    return Comparison(label, Run(plain_ids, 2.0, None), Run(drafted_ids, 1.0, stats))


def test_the_table_says_how_fast_and_whether_the_text_is_the_same():
    same, other = [[5, 6, 7, 8]], [[5, 6, 7, 9]]
    lines = comparison_table([comparison(same, same), comparison(same, other, "two prompts")], sampling=False)
    assert [re.split(r"  +", line) for line in lines] == [
        ["", "plain tok/s", "drafter tok/s", "ratio", "accepted length", "text"],
        ["1 prompt", "2.0", "4.0", "2.00x", "2.50", "identical"],
        ["two prompts", "2.0", "4.0", "2.00x", "2.50", "DIFFERENT"],
    ]
    assert len({line.index("text" if i == 0 else line.split()[-1]) for i, line in enumerate(lines)}) == 1, "columns"


def test_sampled_texts_are_not_called_identical_or_different():
    for drafted in ([[5, 6]], [[5, 7]]):
        assert comparison_table([comparison([[5, 6]], drafted)], sampling=True)[1].endswith("same distribution")
