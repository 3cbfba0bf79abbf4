"""How a row's next token is chosen from logits: its processors, then the argmax, a draw, or a draw bound to a place.

Contract: a [`Choice`] is all that decides which token follows a prefix, for the target's tokens and for drafts alike.
Rows of one `generate` call share one; requests of an engine have their own, so rows that choose differently decode in
the same round. Knows nothing about models, caches or schedules.

[`PlaceNoise`] is sampling whose outcome does not depend on how decoding went about it. Every place of a text has noise
of its own, `E [V]` with independent Exp(1) entries, and the token there is `argmax p / E`, which is distributed as p.
The drafter proposes `argmax q / E` with the same noise; a draft stands iff it is the target's token. So the text is a
function of the target, the prompt and the seed alone: no draft, no verify length and no other row changes it, whatever
the scheduler. The price is acceptance: the two agree less often than speculative sampling accepts (1 - d for a total
variation d of p and q; here at least (1 - d) / (1 + d), https://huggingface.co/papers/2408.07978).

Shapes: R rows, N entries, V vocabulary.
"""

import dataclasses
from collections.abc import Sequence

import torch

from .processors import RowProcessors
from .verification import RandomSource

_MASK = (1 << 64) - 1


class PlaceNoise:
    """
    Noise for every place of one text, always the same for a seed.

    Args:
        seed (`int`): Of the text.
        device (`torch.device`): Where scores are.
    """

    def __init__(self, seed: int, device: torch.device):
        self._seed = seed
        self._generator = torch.Generator(device)
        self._kept: dict[int, torch.Tensor] = {}

    def at(self, first: int, depth: int, vocab_size: int) -> torch.Tensor:
        """
        Noise of a place, `[V]`: `depth` places after `first`, where the current round begins. What is before that is
        forgotten.
        """
        place = first + depth
        if place not in self._kept:
            self._kept = {kept: noise for kept, noise in self._kept.items() if kept >= first}
            self._generator.manual_seed(_mixed(self._seed, place))
            noise = torch.empty(vocab_size, device=self._generator.device)
            # Never 0: it is divided by.
            noise.exponential_(generator=self._generator).clamp_(min=torch.finfo(torch.float32).tiny)
            self._kept[place] = noise
        return self._kept[place]


def _mixed(seed: int, place: int) -> int:
    """A seed for a place: neighbouring places and seeds give unrelated ones (the finaliser of splitmix64)."""
    value = (seed + (place + 1) * 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return (value ^ (value >> 31)) >> 1


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """
    How tokens are chosen.

    Attributes:
        processors ([`RowProcessors`]): Applied to every draft as to every target token.
        do_sample (`bool`): Sample, or take the argmax.
        random_source ([`RandomSource`]): Where draws come from, if there is no `noise`.
        noise ([`PlaceNoise`], *optional*): Draws bound to places; the choice is then one row's own.
    """

    processors: RowProcessors
    do_sample: bool
    random_source: RandomSource
    noise: PlaceNoise | None = None

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn from probabilities, so that drafts are judged by speculative sampling."""
        return self.do_sample and self.noise is None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Group:
    """
    Entries that share a choice.

    Attributes:
        choice ([`Choice`]): What they share.
        entries (`list[int]`): Which they are.
        index (`torch.LongTensor`, *optional*): The same as a tensor; `None` if they are all there are.
    """

    choice: Choice
    entries: list[int]
    index: torch.Tensor | None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The group's part of `tensor [N, ...]`."""
        return tensor if self.index is None else tensor[self.index]

    def put(self, whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """`whole [N, ...]` with the group's part replaced, in place; `part` itself if the group is all there is."""
        if self.index is None:
            return part
        whole[self.index] = part
        return whole


def grouped(choices: Sequence[Choice], device: torch.device) -> list[Group]:
    """Entries by choice, in the order of first appearance."""
    entries: dict[int, list[int]] = {}
    for entry, choice in enumerate(choices):
        entries.setdefault(id(choice), []).append(entry)
    if len(entries) == 1:
        return [Group(choices[0], list(range(len(choices))), None)]
    return [Group(choices[own[0]], own, torch.tensor(own, device=device)) for own in entries.values()]


def place_tokens(probs: torch.Tensor, noise: PlaceNoise, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Tokens at consecutive places of one text.

    Args:
        probs (`torch.FloatTensor` of shape `[N, V]`): What to draw from at the places `first`, `first + 1`, ...
        noise ([`PlaceNoise`]), first (`int`): See there.

    Returns:
        `tuple`: ids `[N]`, and whether there was something to draw from, bool `[N]`.
    """
    noises = torch.stack([noise.at(first, depth, probs.shape[-1]) for depth in range(len(probs))])
    best, ids = (probs / noises).max(dim=-1)
    return ids, ~best.isnan()
