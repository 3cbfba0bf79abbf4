"""Rounds as text: which piece of the answer came from an accepted draft, a correction, a bonus or the target alone.

Contract: token ids go in one by one, exact text comes out: the kept pieces joined equal `tokenizer.decode` of all kept
ids, and no piece ever holds half a character. A front end (the terminal, a web page) only has to colour what it gets.
Knows nothing about colours, clocks or models.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase

from .rounds import DecodingRound

SpanKind = Literal["target", "accepted", "correction", "bonus", "rejected", "discarded"]


@dataclass(frozen=True, slots=True)
class Span:
    """
    A piece of text and where it came from.

    Attributes:
        text (`str`): Whole characters, never empty.
        kind (`str`):
            `"accepted"`: a draft that the target confirmed. `"correction"`: the target's token in the place of the
            draft it rejected. `"bonus"`: the target's token after a wholly accepted block. `"target"`: the target's
            token where nothing was verified (the prefill's, or a round without drafts). `"rejected"`: the draft that
            the following correction replaced; it is no part of the text. `"discarded"`: the verified drafts after a
            rejected one, which fell with it; no part of the text either.
        confidence (`float` or `None`): The drafter's confidence in a draft, if it has a confidence head.
        position (`int` or `None`): Which draft of its round completed the text, from 1; `None` for other tokens.
    """

    text: str
    kind: SpanKind
    confidence: float | None = None
    position: int | None = None


class IncrementalDecoder:
    """
    Decodes a growing sequence of ids. `"".join` of everything returned, [`flush`] included, is `decode(all ids)`.

    A token may hold a part of a character only, and some tokenizers decode a token differently at the start of a
    text. So each piece is the difference of two decodes that start at the same, earlier token; a piece that ends in
    an incomplete character waits for the next token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # both decodes begin here: the first token of the last returned piece
        self._returned = 0  # tokens whose text has been returned

    def push(self, token_id: int) -> str:
        """The text that is complete now and was not before; often empty for multi-byte characters."""
        self._ids.append(token_id)
        piece = self._pending()
        if not piece or piece.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._start, self._returned = self._returned, len(self._ids)
        return piece

    def peek(self, *token_ids: int) -> str:
        """The text that `token_ids` would complete; they are not kept. Incomplete characters are left out."""
        self._ids += token_ids
        piece = self._pending()
        del self._ids[len(self._ids) - len(token_ids) :]
        return piece.replace("\N{REPLACEMENT CHARACTER}", "")

    def flush(self) -> str:
        """The rest, when no more ids will come."""
        piece = self._pending()
        self._start, self._returned = self._returned, len(self._ids)
        return piece

    def _pending(self) -> str:
        known = self._decode(self._ids[self._start : self._returned])
        return self._decode(self._ids[self._start :])[len(known) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class SpanBuilder:
    """
    Turns the rounds of one row into spans, as they happen.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The target's tokenizer.
        discarded (`bool`, *optional*, defaults to `False`):
            Whether to tell, in a span of its own, which verified drafts fell with a rejected one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, discarded: bool = False):
        self._decoder = IncrementalDecoder(tokenizer)
        self._discarded = discarded
        self._num_ids = 0

    def push(self, round_: DecodingRound) -> list[Span]:
        """Spans of one round; those of the first round begin with the prefill's token, its anchor."""
        spans = [] if self._num_ids else self._kept(round_.anchor_id, "target")
        for position, token_id in enumerate(round_.committed_ids):
            confidence = round_.confidence[position] if position < len(round_.confidence) else None
            if position < round_.num_accepted:
                spans += self._kept(token_id, "accepted", confidence, position + 1)
            elif position < round_.verify_length:
                rejected, *fallen = round_.draft_ids[position : round_.verify_length]
                text = self._decoder.peek(rejected)
                spans += _span(text, "rejected", confidence, position + 1)
                if self._discarded and fallen:
                    spans += _span(self._decoder.peek(rejected, *fallen)[len(text) :], "discarded")
                spans += self._kept(token_id, "correction")
            else:
                spans += self._kept(token_id, "bonus" if round_.verify_length else "target")
        return spans

    def finish(self, generated_ids: Sequence[int]) -> list[Span]:
        """
        The last spans of the row.

        Args:
            generated_ids (`Sequence[int]`): All new ids of the row; those that no round brought are the target's.
        """
        spans = [span for token_id in generated_ids[self._num_ids :] for span in self._kept(token_id, "target")]
        return spans + _span(self._decoder.flush(), "target")

    def _kept(
        self, token_id: int, kind: SpanKind, confidence: float | None = None, position: int | None = None
    ) -> list[Span]:
        self._num_ids += 1
        return _span(self._decoder.push(token_id), kind, confidence, position)


def _span(text: str, kind: SpanKind, confidence: float | None = None, position: int | None = None) -> list[Span]:
    return [Span(text, kind, confidence, position)] if text else []
