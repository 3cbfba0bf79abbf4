"""A finished run in a sentence or two; only what was measured is said.

Contract: rounds, ids and seconds go in, plain text comes out. Knows nothing about engines or pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hf_dspark.rounds import DecodingRound, DecodingStats


@dataclass(frozen=True, slots=True)
class Measured:
    """
    What a run took.

    Attributes:
        new_ids (`tuple[int, ...]`): New ids.
        seconds (`float`): From the moment its prompt was taken up to its last token.
    """

    new_ids: tuple[int, ...]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """New tokens a second, reading the prompt included."""
        return len(self.new_ids) / self.seconds if self.seconds > 0 else 0.0


def run_summary(measured: Measured, rounds: Sequence[DecodingRound]) -> str:
    """
    How many tokens came in how many steps of the target, and what became of the drafts.

    Args:
        measured ([`Measured`]): The run with drafts.
        rounds (`Sequence[DecodingRound]`): Its rounds.
    """
    count = len(measured.new_ids)
    if not rounds:
        return f"{_count(count, 'token')}, from reading the prompt alone: too short for a draft."
    stats = DecodingStats(rounds)
    verified = sum(r.verify_length for r in rounds)
    accepted = sum(r.num_accepted for r in rounds)
    kept = sum(len(r.committed_ids) for r in rounds)
    steps = _count(len(rounds), "step")
    if not verified:
        return (
            f"{_count(count, 'token')}: the first came with reading the prompt, the other {kept} took {steps} of the "
            "big model, one each. No draft was checked: the scheduler did not expect any to pay."
        )
    return (
        f"{_count(count, 'token')}: the first came with reading the prompt, the other {kept} took {steps} of the big "
        f"model, where it alone would have taken {kept}: {stats.accepted_length:.1f} tokens per step. Of "
        f"{_count(verified, 'checked draft')} it accepted {accepted}."
    )


def comparison(drafted: Measured, plain: Measured, *, sampling: bool, others: bool) -> str:
    """
    The run with drafts against plain decoding of the same prompt.

    Args:
        drafted ([`Measured`]): The run with drafts.
        plain ([`Measured`]): The plain run.
        sampling (`bool`): Whether tokens were drawn; then equal texts are not to be expected.
        others (`bool`): Whether other visitors were served meanwhile; then the times say little.
    """
    if sampling:
        words = "Sampled texts differ from run to run; both follow the big model’s distribution."
    elif drafted.new_ids == plain.new_ids:
        words = "Plain decoding wrote the same text, token for token."
    else:
        pairs = enumerate(zip(drafted.new_ids, plain.new_ids, strict=False), start=1)
        shorter = min(len(drafted.new_ids), len(plain.new_ids)) + 1
        place = next((number for number, (one, other) in pairs if one != other), shorter)
        words = (
            f"Plain decoding wrote another text from token {place} on. In float32 this must not happen; in half "
            "precision it can, where two tokens are nearly tied."
        )
    rates = (
        f"{drafted.tokens_per_second:.1f} tokens/s with drafts, {plain.tokens_per_second:.1f} without: "
        f"{drafted.tokens_per_second / plain.tokens_per_second:.2f}x."
        if plain.tokens_per_second
        else ""
    )
    caution = "Other visitors were served meanwhile, so take the speeds with a grain of salt." if others else ""
    return " ".join(part for part in (words, rates, caution) if part)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
