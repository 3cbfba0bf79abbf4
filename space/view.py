"""An answer as HTML: every piece of text carries where it came from, and joined together they are the decoded text.

Contract: rounds and times go in, strings of HTML come out; nothing here knows about gradio, engines or threads. All
text is escaped. Kept pieces are `<span>`, so that their text content joined is exactly the decoded text; rejected
drafts are `<s>`, shown for `FADE_SECONDS` and then no longer sent. A page that is replaced as a whole restarts its
animations, so each rejected draft says how far its own has got.

While an answer is being written it is sent many times a second, so only its newest pieces say all about themselves
and older ones of one look are joined; the finished answer says everything. Classes: see `style.css`.
"""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from hf_dspark.rounds import DecodingRound
from hf_dspark.spans import Span, SpanBuilder

FADE_SECONDS = 1.8  # the length of the animation in style.css
FROM_THE_PROMPT = "the big model’s own token, from reading the prompt"
NEWEST_PIECES = 32  # these say everything about themselves while the answer is being written
MOST_PIECES = 1024  # of a finished answer that say everything: what a page can be asked to hold
MOST_QUESTION_CHARACTERS = 400

CLASSES = {"target": "t", "accepted": "a", "correction": "c", "bonus": "b"}
LEGEND = (
    ("a", "accepted draft", "a right guess of the drafter; stronger where it was surer"),
    ("c", "correction", "the big model’s token in place of a wrong guess; the step ends"),
    ("b", "bonus", "the big model’s token after guesses that were all right; the step ends"),
    ("t", "no draft", "a step of the big model alone, without guesses"),
)


@dataclass(frozen=True, slots=True)
class Piece:
    """
    A piece of text on the page.

    Attributes:
        text (`str`): The characters, not escaped.
        kind (`str`): As in [`~hf_dspark.spans.Span`]; a rejected draft and those that fell with it are one piece.
        note (`str`): What a reader is told who points at it.
        strength (`float`): Opacity of its colour, in `0..1`.
        born (`float`): When it came, in seconds of any clock.
    """

    text: str
    kind: str
    note: str
    strength: float
    born: float

    @property
    def kept(self) -> bool:
        """Whether it is part of the answer."""
        return self.kind != "rejected"


class AnswerView:
    """
    The text of one answer, round after round.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The target's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._builder = SpanBuilder(tokenizer, discarded=True)
        self._pieces: list[Piece] = []
        self._num_rounds = 0

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(piece.text for piece in self._pieces if piece.kept)

    def push(self, decoding_round: DecodingRound, seconds: float) -> None:
        """Takes the next round, which came at `seconds`."""
        self._num_rounds += 1
        spans = self._builder.push(decoding_round)
        rejected = "".join(span.text for span in spans if span.kind in ("rejected", "discarded"))
        for span in spans:
            if span.kind in ("rejected", "discarded"):
                continue
            if span.kind == "correction" and rejected:
                self._pieces.append(Piece(rejected, "rejected", "", 1.0, seconds))
            note = describe(span, decoding_round, self._num_rounds, rejected=rejected)
            self._pieces.append(Piece(span.text, span.kind, note, strength(span), seconds))

    def finish(self, new_ids: Sequence[int], seconds: float) -> None:
        """Takes all new ids of the answer, when no more rounds will come."""
        for span in self._builder.finish(new_ids):
            self._pieces.append(Piece(span.text, span.kind, FROM_THE_PROMPT, strength(span), seconds))

    def html(self, seconds: float, *, finished: bool = False) -> str:
        """The pieces as they are to be shown at `seconds`."""
        lasting = 0 if finished else FADE_SECONDS  # what is to stay holds nothing but the answer
        self._pieces = [piece for piece in self._pieces if piece.kept or seconds - piece.born < lasting]
        first = max(len(self._pieces) - (MOST_PIECES if finished else NEWEST_PIECES), 0)
        old = joined(self._pieces[:first])
        return "".join([_old_html(piece, seconds) for piece in old] + _new_html(self._pieces[first:], seconds))


def describe(span: Span, decoding_round: DecodingRound, number: int, *, rejected: str = "") -> str:
    """
    What a reader is told about a span.

    Args:
        span ([`~hf_dspark.spans.Span`]): The span.
        decoding_round ([`~hf_dspark.DecodingRound`]): The round that brought it.
        number (`int`): Number of that round within the answer, from 1.
        rejected (`str`, *optional*): The text of the rejected drafts that a correction replaced.
    """
    checked = f"step {number}, {_drafts(decoding_round.verify_length)} checked"
    if span.position is not None:
        parts = [f"draft {span.position}, {span.kind}"]
        if span.confidence is not None:
            survival = math.prod(decoding_round.confidence[: span.position])
            parts += [f"confidence {span.confidence:.2f} in this one", f"survival {survival:.2f}, of all up to it"]
        return " · ".join([*parts, checked])
    if span.kind == "correction":
        instead = f" instead of “{rejected}”" if rejected else ""
        return f"correction: the big model’s own token{instead} · {checked}"
    if span.kind == "bonus":
        return f"bonus: the big model’s own token after drafts that all stood · {checked}"
    if decoding_round.verify_length:
        return FROM_THE_PROMPT
    return f"the big model’s own token · {checked}"


def strength(span: Span) -> float:
    """Opacity of a span's colour: the confidence of drafts; tokens of the target are certain."""
    if span.kind != "accepted":
        return 1.0
    return 0.6 if span.confidence is None else min(max(span.confidence, 0.0), 1.0)


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Neighbours of one look as one piece without a note; rejected drafts are left as they are."""
    result: list[Piece] = []
    for piece in pieces:
        plain = Piece(piece.text, piece.kind, "", round(piece.strength, 1), piece.born)
        last = result[-1] if result else None
        if last and piece.kept and (last.kind, last.strength) == (plain.kind, plain.strength):
            result[-1] = Piece(last.text + piece.text, piece.kind, "", last.strength, last.born)
        else:
            result.append(plain)
    return result


def escape(text: str) -> str:
    """`text` for HTML, in attributes too; a carriage return would otherwise arrive as a newline."""
    return html.escape(text, quote=True).replace("\r", "&#13;")


def legend_html() -> str:
    """What the colours mean."""
    entries = "".join(
        f'<li><span class="{name}" style="--c:{0.8 if name == "a" else 1}">{word}</span> {escape(meaning)}</li>'
        for name, word, meaning in LEGEND
    )
    return (
        f'<ul class="ds-legend">{entries}<li><s class="sample">rejected draft</s> '
        "a wrong guess, and those after it; they fade and never get into the text</li></ul>"
    )


def panel_html(title: str, body: str, *, status: str = "", live: bool = False, hint: str = "") -> str:
    """
    A framed text with a heading.

    Args:
        title (`str`): The heading.
        body (`str`): HTML.
        status (`str`, *optional*): A few words beside the heading.
        live (`bool`, *optional*): Whether more text is to come; shows a caret.
        hint (`str`, *optional*): A line under the text.
    """
    return (
        f'<section class="ds-panel" data-live="{str(live).lower()}"><header><h3>{escape(title)}</h3>'
        f'<span class="ds-status">{escape(status)}</span></header><div class="ds-text">{body}</div>'
        + (f'<div class="ds-hint">{escape(hint)}</div>' if hint else "")
        + "</section>"
    )


def question_html(prompt: str) -> str:
    """The visitor's prompt, cut if it is long."""
    cut = prompt if len(prompt) <= MOST_QUESTION_CHARACTERS else prompt[:MOST_QUESTION_CHARACTERS].rstrip() + " …"
    return f'<div class="ds-question">{escape(cut.strip())}</div>'


def message_html(text: str, *, kind: str = "note") -> str:
    """
    Words to the visitor in the place of an answer.

    Args:
        text (`str`): What to say.
        kind (`str`, *optional*): `"note"` or `"error"`.
    """
    role = "alert" if kind == "error" else "status"
    return f'<div class="ds-message {kind}" role="{role}">{escape(text)}</div>'


def _new_html(pieces: Sequence[Piece], seconds: float) -> list[str]:
    return [
        f'<span class="{CLASSES[p.kind]}"{_opacity(p)} tabindex="0" title="{escape(p.note)}">{escape(p.text)}</span>'
        if p.kept
        else _ghost(p, seconds)
        for p in pieces
    ]


def _old_html(piece: Piece, seconds: float) -> str:
    if not piece.kept:
        return _ghost(piece, seconds)
    return f'<span class="{CLASSES[piece.kind]}"{_opacity(piece)}>{escape(piece.text)}</span>'


def _opacity(piece: Piece) -> str:
    return f' style="--c:{piece.strength:.2f}"' if piece.kind == "accepted" else ""


def _ghost(piece: Piece, seconds: float) -> str:
    text = escape(piece.text.replace("\n", "⏎").replace("\t", "⇥"))  # it must not move what follows
    delay = max(seconds - piece.born, 0.0)
    return f'<s class="r" aria-hidden="true" style="animation-delay:-{delay:.2f}s">{text}</s>'


def _drafts(count: int) -> str:
    return f"{count or 'no'} draft{'' if count == 1 else 's'}"
