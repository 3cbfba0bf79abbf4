"""The decoding loop: rounds of draft -> schedule -> verify -> commit, every row in one packed forward.

Contract: a [`DecodingLoop`] plays rounds over the rows it holds; a [`Decoder`] is one `generate(assistant_model=...)`
over a batch, and the engine (`engine_loop.py`) lets rows come and go between rounds. All state of a run lives there,
none on models. From scheduling to verification the batch is frozen; the stop cut comes before anybody sees the tokens.

Source: https://huggingface.co/papers/2607.05147, section 3 and Figure 2. Shape legend: R active rows, S prompt width,
K draft positions, N packed tokens of one verification (`sum(1 + l_r)`), M tapped layers, Dt target hidden, V target
vocabulary.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from .call_schedule import CallSchedule, measured_cost
from .choosing import Choice
from .drafting import Drafts, DraftSession
from .judging import NAN_LOGITS, entry_owners, judge, nan_rows, processed_scores, spoilt_by_drafts
from .modeling_dspark import DSparkDrafter
from .outputs import DSparkGenerateOutput
from .packed import SlabCache, packed_forward
from .processors import RowProcessors
from .rounds import DecodingRound
from .rows import Row
from .static_batch import StaticBatch
from .stopping import StopChecker
from .target import TargetView
from .verification import RandomSource, Verdict


class DecodingLoop:
    """
    Rounds over the rows that are active; they lead both caches, in order.

    Args:
        view ([`TargetView`]): Target and drafter.
        plan ([`CallSchedule`]): Decides what is drafted and verified.
        device (`torch.device`): Where ids live and processors work.

    Attributes:
        cache ([`SlabCache`]), session ([`DraftSession`], *optional*): The target's side and the drafter's; without a
            session nothing is drafted. Set by whoever brings the rows.
    """

    cache: SlabCache
    session: DraftSession | None = None

    def __init__(self, view: TargetView, plan: CallSchedule, device: torch.device):
        self.view, self.target, self.plan, self.device = view, view.target, plan, device
        self.captured: bool | list[int] = view.hidden_state_indices
        self.rows: list[Row] = []
        self.num_active = self.step = 0
        self.waited_seconds = 0.0  # with the caller's streamer and callback

    @property
    def active(self) -> list[Row]:
        """Rows still decoding; they lead both caches, in this order."""
        return self.rows[: self.num_active]

    def round(self) -> None:
        """One round of Figure 2: draft, schedule, verify, commit."""
        began, waited = time.perf_counter(), self.waited_seconds
        context = sum(self.cache.lengths[: self.num_active]) / self.num_active
        drafts = self.draft(context)
        draft_ids = drafts.ids.tolist()
        lengths = self.schedule(drafts, context)  # from here to the verdict the batch is frozen
        drafted = time.perf_counter()
        outputs, logits, scores = self.verify(draft_ids, lengths)
        verdict = self.judge(drafts, scores, lengths)
        accepted, next_ids = verdict.num_accepted.tolist(), verdict.next_ids.tolist()
        verified = time.perf_counter()
        features = None if self.session is None else self.view.context_features(outputs.hidden_states)[0]
        confidence = drafts.confidence.tolist() if drafts.confidence is not None else [()] * len(lengths)
        offset, stopped = 0, []
        for entry, row in enumerate(self.active):
            stopped.append(True)  # unless it goes well
            anchor_id, anchor_position = row.anchor_id, row.anchor_position
            with self._minding([row]):
                if row.error is None:
                    kept, stop = self._commit(row, [*draft_ids[entry][: accepted[entry]], next_ids[entry]])
                    part = slice(offset, offset + len(kept))  # the anchor, and all that was kept but its newest token
                    own_features = None if features is None else features[part]
                    self._absorb(entry, anchor_position, own_features, [anchor_id, *kept[:-1]])
                    self._record(row, part, scores, logits, outputs.hidden_states)
                    decoding_round = DecodingRound(
                        row=row.index,
                        step=self.step,
                        anchor_id=anchor_id,
                        draft_ids=tuple(draft_ids[entry]),
                        confidence=tuple(confidence[entry]),
                        verify_length=lengths[entry],
                        num_accepted=accepted[entry],
                        next_id=next_ids[entry],
                        committed_ids=tuple(kept),
                        batch_tokens=len(scores),
                        draft_seconds=drafted - began,
                        verify_seconds=verified - drafted,
                    )
                    if row.on_round is not None:
                        self._hand_over(row.on_round, decoding_round)
                    stopped[-1] = stop
            offset += 1 + lengths[entry]
        self._retire(stopped)
        seconds = time.perf_counter() - began - (self.waited_seconds - waited)
        unusual = drafts.ids.shape[1] > 0 and self.session is not None and self.session.caught_up
        first_stands = None if verdict.first_stands is None else verdict.first_stands.tolist()
        self.plan.observe(lengths, accepted, math.nan if unusual else seconds, context, first_stands)
        self.step += 1

    def draft(self, context: float) -> Drafts:
        """Up to `draft_length` tokens for every row; no more than the row with most room can use."""
        rows = self.active
        num_drafts = max(row.room(self.plan.draft_length) for row in rows)
        if not self.plan.wants_drafts(len(rows), context) or num_drafts == 0 or self.session is None:
            return Drafts.none(len(rows), self.view.vocab_size, self.device, any(row.choice.draws for row in rows))
        return self.session.propose(
            [row.anchor_id for row in rows],
            [row.anchor_position for row in rows],
            num_drafts,
            rows=[row.index for row in rows],
            prefix=lambda entry, supposed: rows[entry].supposed_ids(supposed),
            choices=[row.choice for row in rows],
            places=[len(row.new_ids) for row in rows],
            minding=lambda entries: self._minding([rows[entry] for entry in entries]),
        )

    def schedule(self, drafts: Drafts, context: float) -> list[int]:
        """Verify lengths l_r, each within what was drafted and what the row can still use."""
        room = [row.room(self.plan.draft_length) for row in self.active]
        rows = [row.index for row in self.active]
        return self.plan.verify_lengths(drafts, room, rows=rows, step=self.step, context=context)

    def verify(self, draft_ids: list[list[int]], lengths: list[int]) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """Target over anchors and drafts, spoilt ones taken back: output, logits `[N, V]`, processed scores."""
        tokens = [[row.anchor_id, *ids[:n]] for row, ids, n in zip(self.active, draft_ids, lengths, strict=True)]
        outputs = self._forward(tokens)
        logits = outputs.logits[0].to(device=self.device, dtype=torch.float32)
        owners = entry_owners(self.active, tokens)
        if logits.isnan().any():  # a draft's doing perhaps, which plain `generate` would not have seen
            if withdrawn := spoilt_by_drafts(logits, self.active, lengths):
                for entry in withdrawn:
                    self._blank(entry)
                    lengths[entry] = 0
                return self.verify(draft_ids, lengths)
            self._check_logits(logits, [row for row, _ in owners], f"round {self.step}")
        return outputs, logits, processed_scores(logits, owners, self._minding)

    def judge(self, drafts: Drafts, scores: torch.Tensor, lengths: list[int]) -> Verdict:
        """Accepts and rejects (section 2 of the losslessness laws), from processed scores `[N, V]`."""
        return judge(
            drafts,
            scores,
            lengths,
            choices=[row.choice for row in self.active],
            places=[len(row.new_ids) for row in self.active],
            minding=lambda entries: self._minding([self.active[entry] for entry in entries]),
        )

    def _forward(self, tokens: Sequence[Sequence[int]]) -> Any:
        """The target over `tokens` of every row, from its anchor on, in one packed forward."""
        rows = zip(self.rows, tokens, strict=False)
        positions = [row.anchor_position + depth for row, part in rows for depth in range(len(part))]
        packed_ids = [token for part in tokens for token in part]
        return packed_forward(
            self.target,
            *(self.view.to_target(torch.tensor([numbers], device=self.device)) for numbers in (packed_ids, positions)),
            cache=self.cache,
            layout=self.cache.layout([len(part) for part in tokens]),
            output_hidden_states=self.captured,
        )

    def _absorb(self, entry: int, position: int, features: torch.Tensor | None, token_ids: list[int]) -> None:
        """Makes verified tokens a lasting part of a row, in both caches: `features [C, M*Dt]` from `position` on."""
        self.cache.lengths[entry] += len(token_ids)
        if self.session is not None and features is not None:
            positions = torch.arange(position, position + len(token_ids), device=features.device)
            self.session.add_context(entry, features, positions, token_ids)

    def _check_logits(self, logits: torch.Tensor, owners: Sequence[Row], when: str) -> None:
        """Fails rows for which the target's logits `[N, V]` hold a nan, unless their processors remove it."""
        for row, entries in nan_rows(logits, owners).items():
            self._fail(row, ValueError(NAN_LOGITS.format(when)))
            logits[entries] = 0.0

    def _commit(self, row: Row, token_ids: list[int]) -> tuple[list[int], bool]:
        """Appends tokens up to the first stop; returns those kept, and whether the row has stopped."""
        width = len(row.prompt) + len(row.new_ids)
        count, stopped = row.stops.kept(token_ids, width=width, prefix=row.ids, row=row.index)
        kept = token_ids[:count]
        row.new_ids.extend(kept)
        row.anchor_position += len(kept)
        if row.streamer is not None:
            self._hand_over(row.streamer.put, torch.tensor(kept))
        return kept, stopped

    def _swap(self, first: int, second: int) -> None:
        self.cache.swap_rows(first, second)
        if self.session is not None:
            self.session.swap_rows(first, second)
        self.rows[first], self.rows[second] = self.rows[second], self.rows[first]

    def _retire(self, stopped: list[bool]) -> None:
        """Moves stopped rows behind the active ones."""
        for entry in reversed(range(len(stopped))):
            if stopped[entry]:
                if self.rows[entry].allows_nan:
                    self._blank(entry)
                self.num_active -= 1
                self._swap(entry, self.num_active)

    def _blank(self, entry: int, *, whole: bool = False) -> None:
        """Clears slots behind an entry's text, or all: hidden ones weigh nothing, but nothing times nan is nan."""
        for cache in [self.cache] + ([] if self.session is None else [self.session.cache]):
            for slab in [slab for layer in cache.layers for slab in layer.slabs]:
                slab[entry, :, 0 if whole else cache.lengths[entry] :].zero_()

    def _record(self, row: Row, part: slice, scores: Any, logits: Any, hidden_states: Any) -> None:
        """Keeps what a row's committed tokens were chosen from, if anybody wants it."""

    def _hand_over(self, receive: Callable[[Any], Any], what: Any) -> None:
        """Calls the caller; what they take their time for is not the round's."""
        began = time.perf_counter()
        receive(what)
        self.waited_seconds += time.perf_counter() - began

    @contextlib.contextmanager
    def _minding(self, rows: Sequence[Row]) -> Iterator[None]:
        """Within it, an error is the rows' own."""
        try:
            yield
        except Exception as error:
            for row in rows:
                self._fail(row, error)

    def _fail(self, row: Row, error: BaseException) -> None:
        """What becomes of the error of a row: in a batch of one call it is the call's."""
        raise error


class Decoder(DecodingLoop):
    """
    One `generate` call over a batch, which only shrinks.

    Args:
        target ([`~transformers.PreTrainedModel`]): The model whose text is wanted; must pass `supports_packed`.
        drafter ([`DSparkDrafter`]): The view; its options decide schedule, limits, callback and randomness.
        input_ids (`torch.LongTensor` of shape `[R, S]`): Left-padded prompts.
        logits_processor, stopping_criteria, generation_config, model_kwargs, streamer: As `generate` prepared them.
        random_source ([`RandomSource`], *optional*): All randomness; made from the view's generator by default.

    Raises `ValueError` where drafter, target, scheduler and arguments do not fit each other.
    """

    session: DraftSession

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: DSparkDrafter,
        input_ids: torch.LongTensor,
        *,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        streamer: Any = None,
        random_source: RandomSource | None = None,
    ):
        view, num_rows = TargetView(target, drafter), len(input_ids)
        do_sample = generation_config.do_sample
        cost = measured_cost(target, drafter, num_rows, do_sample=do_sample)
        super().__init__(view, CallSchedule(drafter, cost, do_sample=do_sample), input_ids.device)
        self.input_ids, self.config, self.streamer = input_ids, generation_config, streamer
        self.batch = StaticBatch(input_ids, generation_config, model_kwargs)
        self.captured = self.batch.record.wants_hidden_states or self.captured
        self.logits_processor = logits_processor
        random_source = random_source or RandomSource(drafter.options.generator)
        self.choice = Choice(RowProcessors(logits_processor, num_rows), do_sample, random_source)
        self.stops = StopChecker(stopping_criteria, num_rows)

    def run(self) -> torch.LongTensor | DSparkGenerateOutput:
        """Decodes until every row has stopped."""
        self.prefill()
        while self.num_active:
            self.round()
        if self.streamer is not None:
            self.streamer.end()
        return self.output()

    def prefill(self) -> None:
        """The prompts, each row's first token (drawn as plain `generate` draws it), the drafter's first context."""
        state = self.batch.prefill(self.view)
        self.cache = state.cache
        self.session = DraftSession(
            self.view,
            len(self.input_ids),
            do_sample=self.config.do_sample,
            processors=self.choice.processors,
            random_source=self.choice.random_source,
            device=self.device,
            cache=None if state.earlier is None else state.earlier.cache,
        )
        for row, pairs in enumerate(state.context):
            for verified in pairs:
                self.session.add_context(row, *verified)
        own = {"choice": self.choice, "stops": self.stops, "allows_nan": self.config.remove_invalid_values}
        told = {"streamer": self.streamer, "on_round": self._report}
        prompts = zip(state.last_positions, self.input_ids, strict=True)
        self.rows = [Row(index, last, prompt=ids, **own, **told) for index, (last, ids) in enumerate(prompts)]
        self._check_logits(state.logits, self.rows, "the prefill")
        scores = self.logits_processor(self.input_ids, state.logits.clone())
        sampled = self.config.do_sample
        first = self.choice.random_source.categorical(scores.softmax(-1)) if sampled else scores.argmax(-1)
        self.batch.record.add_prefill(scores, state.logits, state.hidden_states)
        self.num_active = len(self.rows)
        self._retire([self._commit(row, [token])[1] for row, token in zip(self.rows, first.tolist(), strict=True)])

    def output(self) -> torch.LongTensor | DSparkGenerateOutput:
        """The finished batch, as `generate` returns it."""
        for entry in range(len(self.rows)):  # back to the order of the batch
            while self.rows[entry].index != entry:
                self._swap(entry, self.rows[entry].index)
        sequences = self.batch.padded([row.new_ids for row in self.rows])
        if self.batch.gives_cache_back:
            self._feed_ended()
            self.batch.give_cache_back(self.view, self.cache, self.session, sequences)
        return self.batch.output(sequences)

    def _feed_ended(self) -> None:
        """Plain `generate` feeds every row until the last one ends: rows that ended before have all tokens cached."""
        longest = max(len(row.new_ids) for row in self.rows)
        ended = [row for row in self.rows if len(row.new_ids) < longest]
        if ended:
            outputs = self._forward([[row.anchor_id] if len(row.new_ids) < longest else [] for row in self.rows])
            for row, features in zip(ended, self.view.context_features(outputs.hidden_states)[0], strict=True):
                self._absorb(row.index, row.anchor_position, features[None], [row.anchor_id])

    def _record(self, row: Row, part: slice, scores: Any, logits: Any, hidden_states: Any) -> None:
        self.batch.record.add(row.index, part, scores, logits, hidden_states)

    def _report(self, decoding_round: DecodingRound) -> None:
        self.batch.note(decoding_round)
        if self.view.drafter.options.on_round is not None:
            self.view.drafter.options.on_round(decoding_round)
