"""The live view: an answer coloured token by token while it is decoded, and a small table at the end.

Contract: writes spans and comparisons to a text stream. With colour, accepted drafts are green (stronger: the drafter
was more confident), corrections yellow, bonus tokens blue, and each rejected draft stands struck through before its
correction. Without colour only the answer itself is written, so that the output can be piped and compared. Knows
nothing about models.
"""

import os
import sys
from collections.abc import Sequence
from typing import TextIO

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from .comparison import Comparison
from .rounds import DecodingRound
from .spans import IncrementalDecoder, Span, SpanBuilder

CONFIDENCE_COLORS = (65, 71, 77, 76, 40)  # of the 256-colour palette, from a greyish to a bright green
COLORS = {"correction": "38;5;178", "bonus": "38;5;75", "rejected": "9;38;5;167", "target": ""}
# A model can write any character; those that would steer the terminal are shown as their pictures (ESC as "␛").
_CONTROLS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
_CONTROLS |= dict.fromkeys(range(0x7F, 0xA0), "\N{REPLACEMENT CHARACTER}")


def wants_color(stream: TextIO) -> bool:
    """Whether `stream` is a terminal that shows colours and its user has not said otherwise (`NO_COLOR`)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Terminal:
    """
    Where the demo writes.

    Args:
        stream (`TextIO`, *optional*): Defaults to the standard output.
        color (`bool`, *optional*): Defaults to what [`wants_color`] says of `stream`.
    """

    def __init__(self, stream: TextIO | None = None, *, color: bool | None = None):
        self.stream = stream or sys.stdout
        self.color = wants_color(self.stream) if color is None else color

    def line(self, text: str = "") -> None:
        """Writes a line."""
        print(text, file=self.stream, flush=True)

    def heading(self, text: str) -> None:
        """Writes a line that stands out."""
        self.line(self._styled(text, "1"))

    def legend(self) -> None:
        """Says what the colours mean; nothing without colour."""
        if self.color:
            samples = [
                *(Span(word, "accepted", i / 4) for i, word in enumerate(("accepted ", "draft, ", "surer "))),
                Span("and surer", "accepted", 1.0),
                Span("rejected draft", "rejected"),
                Span("its correction", "correction"),
                Span("bonus token", "bonus"),
                Span("target alone", "target"),
            ]
            painted = [self.paint(sample) for sample in samples]
            self.line("".join(painted[:4]) + " | " + " | ".join(painted[4:]))

    def spans(self, spans: Sequence[Span]) -> None:
        """Writes spans where the cursor is."""
        self.stream.write("".join(map(self.paint, spans)))
        self.stream.flush()

    def paint(self, span: Span) -> str:
        """The characters that show `span`; empty for a rejected draft without colour."""
        text = span.text.translate(_CONTROLS)
        if not self.color:
            return "" if span.kind == "rejected" else text
        if span.kind == "accepted":
            return self._styled(text, f"38;5;{_confidence_color(span.confidence)}")
        if span.kind == "rejected":
            text = text.replace("\n", "⏎").replace("\t", "⇥")  # it must not move what follows
        return self._styled(text, COLORS[span.kind])

    def _styled(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.color and code else text


class LiveStreamer(BaseStreamer):
    """A streamer for `generate` that shows a plain answer of one row while it is decoded."""

    def __init__(self, terminal: Terminal, tokenizer: PreTrainedTokenizerBase):
        self._terminal = terminal
        self._decoder = IncrementalDecoder(tokenizer)
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompt first, then new ids."""
        if self._prompt_seen:
            self._write("".join(self._decoder.push(token_id) for token_id in value.flatten().tolist()))
        self._prompt_seen = True

    def end(self) -> None:
        """Writes what is left."""
        self._write(self._decoder.flush() + "\n")

    def _write(self, text: str) -> None:
        self._terminal.spans([Span(text, "target")])


class LiveRounds:
    """Shows the rounds of one row while they happen: pass `on_round` to `with_options`, call `end` afterwards."""

    def __init__(self, terminal: Terminal, tokenizer: PreTrainedTokenizerBase):
        self._terminal = terminal
        self._builder = SpanBuilder(tokenizer)

    def on_round(self, round_: DecodingRound) -> None:
        """Writes one round."""
        self._terminal.spans(self._builder.push(round_))

    def end(self, generated_ids: Sequence[int]) -> None:
        """Writes what is left of a row whose new ids are `generated_ids`."""
        self._terminal.spans(self._builder.finish(generated_ids))
        self._terminal.line()


def comparison_table(comparisons: Sequence[Comparison], *, sampling: bool) -> list[str]:
    """
    Lines of a table with one row per comparison.

    Args:
        comparisons (`Sequence[Comparison]`): What to show.
        sampling (`bool`): Whether tokens were sampled; then equal texts are not to be expected, equal laws are.
    """
    rows = [("", "plain tok/s", "drafter tok/s", "ratio", "accepted length", "text")]
    for comparison in comparisons:
        plain, drafted = comparison.plain, comparison.drafted
        rows.append(
            (
                comparison.label,
                f"{plain.tokens_per_second:.1f}",
                f"{drafted.tokens_per_second:.1f}",
                f"{comparison.speedup:.2f}x",
                f"{drafted.stats.accepted_length:.2f}" if drafted.stats else "-",
                "same distribution" if sampling else "identical" if comparison.identical else "DIFFERENT",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    # The words on the left and on the right start at a margin, the figures end at one.
    return [
        "  ".join(
            cell.ljust(width) if i in (0, len(row) - 1) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _confidence_color(confidence: float | None) -> int:
    if confidence is None:
        return CONFIDENCE_COLORS[len(CONFIDENCE_COLORS) // 2]
    return CONFIDENCE_COLORS[min(int(confidence * len(CONFIDENCE_COLORS)), len(CONFIDENCE_COLORS) - 1)]
