"""Drafting: the sequential stage of a round, over hidden states from a proposer, for all active rows at once.

Contract: a `DraftSession` lives as long as one decoding run. It queues the drafter's context and proposes blocks; what
becomes of them is none of its business. The probabilities it returns are exactly those its drafts were drawn from
(Markov-corrected, processed, restricted), which is what losslessness rests on. Where hidden states come from (a
parallel stage, or a pass a token) is left to `proposers.py`.

Source: https://huggingface.co/papers/2607.05147, section 3.1, Eq. 4-7. Shape legend: R active rows, L drafted
positions (at most K), M tapped layers, Dt target hidden, V / Vd target / draft vocabulary.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch

from .packed import SlabCache
from .processors import RowProcessors
from .proposers import AutoregressiveProposer, ParallelProposer, Proposer
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
        probs (`torch.FloatTensor` of shape `[R, L, Vd]`, *optional*): What each was drawn from; `None` when greedy.
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
        do_sample (`bool`): Draw drafts, or take the argmax.
        processors ([`RowProcessors`]): The call's logits processors, applied to every draft as to every target token.
        random_source ([`RandomSource`]): Where draws come from.
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
        self.view, self.do_sample, self.processors, self.random_source = view, do_sample, processors, random_source
        kind = AutoregressiveProposer if view.drafter.is_autoregressive else ParallelProposer
        self.proposer: Proposer = kind(view, num_rows, cache)
        self._pending: list[list[tuple[torch.Tensor, torch.Tensor, Sequence[int]]]] = [[] for _ in range(num_rows)]
        config = view.drafter.config
        self.device = device
        token_ids = view.drafter.draft_token_ids()
        self._token_ids = None if token_ids is None else token_ids.to(device)
        temperatures = (config.confidence_temperatures or {}).get("sampling" if do_sample else "greedy")
        self._temperatures = [1.0] * config.num_drafts if temperatures is None else temperatures
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
    ) -> Drafts:
        """
        Drafts up to `num_drafts` tokens after the anchor of every active row.

        Args:
            anchor_ids (`Sequence[int]` of length R): Newest committed tokens, x_0.
            anchor_positions (`Sequence[int]` of length R): Their position ids.
            num_drafts (`int`): L, at most the block's K.
            rows (`Sequence[int]` of length R): Batch row of each, for the processors.
            prefix ([`Prefix`]): Ids of entry r with supposed tokens after its anchor; asked only if needed.
        """
        self.write_pending(len(rows))
        self.proposer.begin(anchor_ids, anchor_positions, num_drafts)
        return self._sequential_stage(anchor_ids, num_drafts, rows, prefix)

    def _sequential_stage(
        self, anchor_ids: Sequence[int], num_drafts: int, rows: Sequence[int], prefix: Prefix
    ) -> Drafts:
        """Eq. 4-7, left to right: correct, process, draw."""
        drafter = self.view.drafter
        previous = torch.tensor(anchor_ids, device=self.device)
        usable = torch.full_like(previous, num_drafts)
        token_ids = self._token_ids if self.processors.vocabulary_free else None
        embeds, latent, state = None, None, None
        drawn: list[torch.Tensor] = []
        probs: list[torch.Tensor] = []
        confidence: list[torch.Tensor] = []
        for position in range(num_drafts):
            here, logits = self.proposer.step(position, previous)
            if drafter.markov_head is not None:
                embeds = drafter.markov_head.embed(previous.to(here.device))
                latent, state = drafter.markov_head.step(embeds, here, state)
            if drafter.confidence_head is not None:  # before the draw: it must not see this position's draft
                confidence.append(drafter.confidence_head(here, embeds) / self._temperatures[position])
            logits = self._corrected(logits, latent).to(self.device)
            logits, usable = self._processed(logits, rows, prefix, drawn, usable)
            columns = logits.argmax(-1)
            if self.do_sample:
                probs.append(logits.softmax(-1))
                columns = self.random_source.categorical(probs[-1])
            previous = columns if token_ids is None else token_ids[columns]
            drawn.append(previous)
        return Drafts(
            ids=torch.stack(drawn, dim=1),
            probs=torch.stack(probs, dim=1) if probs else None,
            token_ids=token_ids,
            confidence=torch.stack(confidence, dim=1).sigmoid() if confidence else None,
            usable=usable,
        )

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

    def _processed(
        self,
        logits: torch.Tensor,
        rows: Sequence[int],
        prefix: Prefix,
        drawn: list[torch.Tensor],
        usable: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Applies the call's processors to the logits of the position after `drawn`; shortens `usable` if need be."""
        position = len(drawn)
        if not self.processors.vocabulary_free:  # they name tokens: give them the target's vocabulary
            logits = self._over_target_vocabulary(logits)

        def prefix_so_far(entry: int) -> torch.Tensor | None:
            if int(usable[entry]) < position:
                return None  # after a draft that cannot be: no processor need have an answer to it
            return prefix(entry, [int(step[entry]) for step in drawn])

        processed = self.processors.apply(logits, rows=rows, prefix=prefix_so_far)
        if processed is logits:
            return logits, usable
        possible = processed.isfinite().any(-1)
        usable = torch.where(possible, usable, usable.clamp_max(position))
        return torch.where(possible[:, None], processed, logits), usable

    def _over_target_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """`[R, Vd]` -> `[R, V]`, -inf where nothing can be drafted."""
        full = logits.new_full((logits.shape[0], self.view.vocab_size), float("-inf"))
        if self._token_ids is not None:
            return full.index_copy_(1, self._token_ids, logits)
        full[:, : logits.shape[1]] = logits
        return full
