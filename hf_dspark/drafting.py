"""Drafting: the sequential stage of a round, over hidden states from a proposer, for all active rows at once.

Contract: a `DraftSession` lives as long as one decoding run. It queues the drafter's context and proposes blocks; what
becomes of them is none of its business. The probabilities it returns are exactly those its drafts were drawn from
(Markov-corrected, processed, restricted), which is what losslessness rests on. Rows may choose their tokens in
different ways (`choosing.py`). Where hidden states come from (a parallel stage, or a pass a token) is left to
`proposers.py`.

Source: https://huggingface.co/papers/2607.05147, section 3.1, Eq. 4-7. Shape legend: R active rows, L drafted
positions (at most K), M tapped layers, Dt target hidden, V / Vd target / draft vocabulary.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from .choosing import Choice, Group, grouped
from .packed import SlabCache
from .processors import RowProcessors
from .proposers import AutoregressiveProposer, EntryCache, ParallelProposer, Proposer
from .target import TargetView
from .verification import RandomSource

# (entry, supposed tokens after its anchor) -> the row's ids with them, or None if the row would have ended before.
Prefix = Callable[[int, list[int]], torch.Tensor | None]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Drafts:
    """
    One round's proposals.

    Attributes:
        ids (`torch.LongTensor` of shape `[R, L]`): Drafted target token ids.
        probs (`torch.FloatTensor` of shape `[R, L, Vd]`, *optional*): What each was drawn from; `None` if no row draws
            from probabilities. Means nothing in rows that do not.
        token_ids (`torch.LongTensor` of shape `[Vd]`, *optional*): Target id of each column of `probs`; `None`: the
            same.
        confidence (`torch.FloatTensor` of shape `[R, L]`, *optional*): Calibrated survival chance of each, given those
            before it (Eq. 7); known before the draft is drawn.
        usable (`torch.LongTensor` of shape `[R]`): Leading drafts that may be verified: those before the position at
            which the call's processors forbid everything that can be drafted. That is known before the position is
            drawn, so the limit is lossless.
    """

    ids: torch.Tensor
    probs: torch.Tensor | None
    token_ids: torch.Tensor | None
    confidence: torch.Tensor | None
    usable: torch.Tensor

    @classmethod
    def none(cls, num_rows: int, vocab_size: int, device: torch.device, do_sample: bool) -> "Drafts":
        """A round without drafts: the target decodes one token a row."""
        nothing = torch.empty(num_rows, 0, dtype=torch.long, device=device)
        no_probs = torch.empty(num_rows, 0, vocab_size, device=device) if do_sample else None
        return cls(nothing, no_probs, None, None, torch.zeros(num_rows, dtype=torch.long, device=device))


class DraftSession:
    """
    The drafter at work on one batch.

    Args:
        view ([`TargetView`]): Drafter and target.
        num_rows (`int`): Rows of the batch.
        do_sample (`bool`), processors ([`RowProcessors`]), random_source ([`RandomSource`]): How drafts are chosen,
            where `propose` is not told; see [`Choice`].
        device (`torch.device`): Where ids live and processors work: the device of the call's `input_ids`.
        cache ([`SlabCache`], *optional*): Context of an earlier turn to go on with.
    """

    def __init__(
        self,
        view: TargetView,
        num_rows: int,
        *,
        do_sample: bool,
        processors: RowProcessors,
        random_source: RandomSource,
        device: torch.device,
        cache: SlabCache | None = None,
    ):
        self.view, self.do_sample, self.choice = view, do_sample, Choice(processors, do_sample, random_source)
        kind = AutoregressiveProposer if view.drafter.is_autoregressive else ParallelProposer
        self.proposer: Proposer = kind(view, num_rows, cache)
        self._pending: list[list[tuple[torch.Tensor, torch.Tensor, Sequence[int]]]] = [[] for _ in range(num_rows)]
        config = view.drafter.config
        self.device = device
        token_ids = view.drafter.draft_token_ids()
        self._token_ids = None if token_ids is None else token_ids.to(device)
        # [greedy or sampling][temperature or offset][position]
        self._scalings = [config.confidence_scaling(mode) for mode in ("greedy", "sampling")]
        self.caught_up = False  # whether the last context write was long: a prompt, or rounds without drafts

    @property
    def cache(self) -> SlabCache:
        """The drafter's context."""
        return self.proposer.cache

    def add_context(self, row: int, features: torch.Tensor, positions: torch.Tensor, token_ids: Sequence[int]) -> None:
        """
        Queues tapped states of newly verified tokens of a row; the next `propose` reads them.

        Args:
            row (`int`): Active row.
            features (`torch.Tensor` of shape `[C, M*Dt]`): From [`TargetView.context_features`].
            positions (`torch.LongTensor` of shape `[C]`): Their position ids.
            token_ids (`Sequence[int]` of length C): The tokens.
        """
        self._pending[row].append((features, positions, token_ids))

    def swap_rows(self, first: int, second: int) -> None:
        """Exchanges two rows."""
        self.cache.swap_rows(first, second)
        self._pending[first], self._pending[second] = self._pending[second], self._pending[first]

    def empty_row(self, row: int) -> None:
        """Forgets all that a row was, so that another text can begin there."""
        self._pending[row] = []
        self.cache.lengths[row] = 0
        if isinstance(self.cache, EntryCache):
            self.cache.forget(row)

    def write_pending(self, num_rows: int) -> None:
        """Moves the queued context of the first `num_rows` rows into the cache (Eq. 2)."""
        queued = [item for row in self._pending[:num_rows] for item in row]
        counts = [sum(len(token_ids) for *_, token_ids in row) for row in self._pending[:num_rows]]
        self.caught_up = max(counts) > 1 + self.view.drafter.config.num_drafts
        if not queued:
            return
        features = torch.cat([features for features, _, _ in queued])
        positions = torch.cat([positions for _, positions, _ in queued]).to(features.device)
        self.proposer.read(features, positions, [token for *_, token_ids in queued for token in token_ids], counts)
        for row, count in enumerate(counts):
            self.cache.lengths[row] += count
            self._pending[row] = []

    def propose(
        self,
        anchor_ids: Sequence[int],
        anchor_positions: Sequence[int],
        num_drafts: int,
        *,
        rows: Sequence[int],
        prefix: Prefix,
        choices: Sequence[Choice] | None = None,
        places: Sequence[int] | None = None,
        minding: Callable[[Sequence[int]], AbstractContextManager[None]] | None = None,
    ) -> Drafts:
        """
        Drafts up to `num_drafts` tokens after the anchor of every active row.

        Args:
            anchor_ids (`Sequence[int]` of length R): Newest committed tokens, x_0.
            anchor_positions (`Sequence[int]` of length R): Their position ids.
            num_drafts (`int`): L, at most the block's K.
            rows (`Sequence[int]` of length R): Batch row of each, for the processors.
            prefix ([`Prefix`]): Ids of entry r with supposed tokens after its anchor; asked only if needed.
            choices (`Sequence[Choice]` of length R, *optional*): How each row chooses; by default as the session does.
            places (`Sequence[int]` of length R, *optional*): New tokens of each row, where noise is bound to places.
            minding (*optional*): See [`~hf_dspark.judging.Minding`]; by default an error is everybody's.
        """
        choices = [self.choice] * len(rows) if choices is None else choices
        self.do_sample = any(choice.draws for choice in choices)
        self.write_pending(len(rows))
        self.proposer.begin(anchor_ids, anchor_positions, num_drafts)
        block = _Block(
            groups=grouped(choices, self.device),
            rows=rows,
            places=places or [0] * len(rows),
            prefix=prefix,
            minding=minding or (lambda entries: contextlib.nullcontext()),
            usable=torch.full((len(rows),), num_drafts, device=self.device),
        )
        return self._sequential_stage(anchor_ids, num_drafts, block)

    def _sequential_stage(self, anchor_ids: Sequence[int], num_drafts: int, block: "_Block") -> Drafts:
        """Eq. 4-7, left to right: correct, process, draw."""
        drafter = self.view.drafter
        previous = torch.tensor(anchor_ids, device=self.device)
        temperatures, offsets = self._scaling_of(block.groups, len(anchor_ids))
        embeds, latent, state = None, None, None
        probs: list[torch.Tensor] = []
        confidence: list[torch.Tensor] = []
        for position in range(num_drafts):
            here, logits = self.proposer.step(position, previous)
            if drafter.markov_head is not None:
                embeds = drafter.markov_head.embed(previous.to(here.device))
                latent, state = drafter.markov_head.step(embeds, here, state)
            if drafter.confidence_head is not None:  # before the draw: it must not see this position's draft
                certainty = drafter.confidence_head(here, embeds)
                confidence.append(certainty / temperatures[position] + offsets[position])
            logits = self._corrected(logits, latent).to(self.device)
            previous, drawn_from = self._drawn(logits, block)
            block.drawn.append(previous)
            if drawn_from is not None:
                probs.append(drawn_from)
        return Drafts(
            ids=torch.stack(block.drawn, dim=1),
            probs=torch.stack(probs, dim=1) if probs else None,
            token_ids=self._vocabulary(block.groups[0]) if len(block.groups) == 1 else None,
            confidence=torch.stack(confidence, dim=1).sigmoid() if confidence else None,
            usable=block.usable,
        )

    def _scaling_of(self, groups: Sequence[Group], num_rows: int) -> Sequence[Sequence[float]] | torch.Tensor:
        """Temperatures and offsets of confidence logits for each position: a number, or `[R]` where rows differ."""
        if len({group.choice.do_sample for group in groups}) == 1:
            return self._scalings[groups[0].choice.do_sample]
        table = torch.tensor(self._scalings, device=self.view.drafter.fc.weight.device)
        modes = torch.zeros(num_rows, dtype=torch.long)
        for group in groups:
            modes[group.entries] = int(group.choice.do_sample)
        return table[modes.to(table.device)].permute(1, 2, 0)

    def _vocabulary(self, group: Group) -> torch.Tensor | None:
        """Target ids of the columns that a group draws from; processors that name tokens need them all."""
        return self._token_ids if group.choice.processors.vocabulary_free else None

    def _drawn(self, logits: torch.Tensor, block: "_Block") -> tuple[torch.Tensor, torch.Tensor | None]:
        """Drafts `[R]` from corrected logits `[R, Vd]`, and what those that are drawn from probabilities came from."""
        if len(block.groups) == 1:
            columns, probs = self._drawn_alike(logits, block.groups[0], block)
            token_ids = self._vocabulary(block.groups[0])
            return columns if token_ids is None else token_ids[columns], probs
        ids = torch.empty(len(logits), dtype=torch.long, device=self.device)
        all_probs = logits.new_zeros(len(logits), self.view.vocab_size) if self.do_sample else None
        for group in block.groups:
            columns, probs = self._drawn_alike(group.of(logits), group, block)
            token_ids = self._vocabulary(group)
            group.put(ids, columns if token_ids is None else token_ids[columns])
            if probs is not None and all_probs is not None:
                own = slice(probs.shape[1]) if token_ids is None else token_ids
                for entry, row_probs in zip(group.entries, probs, strict=True):
                    all_probs[entry, own] = row_probs
        return ids, all_probs

    def _drawn_alike(
        self, logits: torch.Tensor, group: Group, block: "_Block"
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The same for rows that share a choice: columns `[n]` of their vocabulary, and probabilities if they draw."""
        drawn: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        with block.minding(group.entries):
            processed, block.usable = self._processed(logits, group, block)
            drawn.append(self._picked(processed, group, block))
        if drawn:
            return drawn[0]
        # Rows that failed are over; until the round is, their drafts may be anything.
        if not group.choice.processors.vocabulary_free:
            logits = self._over_target_vocabulary(logits)
        return logits.argmax(-1), logits.softmax(-1) if group.choice.draws else None

    def _picked(self, logits: torch.Tensor, group: Group, block: "_Block") -> tuple[torch.Tensor, torch.Tensor | None]:
        choice = group.choice
        if not choice.do_sample:
            return logits.argmax(-1), None
        probs = logits.softmax(-1)
        if choice.noise is None:
            return choice.random_source.categorical(probs), probs
        noise = choice.noise.at(block.places[group.entries[0]], len(block.drawn), self.view.vocab_size)
        token_ids = self._vocabulary(group)
        return (probs / (noise[: probs.shape[1]] if token_ids is None else noise[token_ids])).argmax(-1), None

    def _corrected(self, logits: torch.Tensor, latent: torch.Tensor | None) -> torch.Tensor:
        """Adds the transition bias to `[R, Vd]`; with `draft_top_k`, only the largest base logits stay in play."""
        head, top_k = self.view.drafter.markov_head, self.view.drafter.config.draft_top_k
        if top_k is None or top_k >= logits.shape[-1]:
            if head is None or latent is None:
                return logits
            return logits + head.bias(latent).float()[..., : logits.shape[-1]]
        kept, candidates = logits.topk(top_k, dim=-1)
        if head is not None and latent is not None:
            kept = kept + head.bias(latent, candidates).float()
        return torch.full_like(logits, float("-inf")).scatter_(-1, candidates, kept)

    def _processed(self, logits: torch.Tensor, group: Group, block: "_Block") -> tuple[torch.Tensor, torch.Tensor]:
        """Applies a group's processors to the logits of the position after `drawn`; shortens `usable` if need be."""
        processors, position = group.choice.processors, len(block.drawn)
        if not processors.vocabulary_free:  # they name tokens: give them the target's vocabulary
            logits = self._over_target_vocabulary(logits)

        def prefix_so_far(number: int) -> torch.Tensor | None:
            entry = group.entries[number]
            if int(block.usable[entry]) < position:
                return None  # after a draft that cannot be: no processor need have an answer to it
            return block.prefix(entry, [int(step[entry]) for step in block.drawn])

        rows = [block.rows[entry] for entry in group.entries]
        processed = processors.apply(logits, rows=rows, prefix=prefix_so_far)
        if processed is logits:
            return logits, block.usable
        possible = processed.isfinite().any(-1)
        usable = group.of(block.usable)
        usable = group.put(block.usable, torch.where(possible, usable, usable.clamp_max(position)))
        return torch.where(possible[:, None], processed, logits), usable

    def _over_target_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """`[R, Vd]` -> `[R, V]`, -inf where nothing can be drafted."""
        full = logits.new_full((logits.shape[0], self.view.vocab_size), float("-inf"))
        if self._token_ids is not None:
            return full.index_copy_(1, self._token_ids, logits)
        full[:, : logits.shape[1]] = logits
        return full


@dataclasses.dataclass(slots=True, eq=False)
class _Block:
    """A block being drafted: what its rows need, what was drawn so far, and how much of it can be used."""

    groups: list[Group]
    rows: Sequence[int]
    places: Sequence[int]
    prefix: Prefix
    minding: Callable[[Sequence[int]], AbstractContextManager[None]]
    usable: torch.Tensor
    drawn: list[torch.Tensor] = dataclasses.field(default_factory=list)
