"""The decoding loop: prefill, then rounds of draft -> schedule -> verify -> commit, every row in one packed forward.

Contract: a `Decoder` is one run of `generate(assistant_model=drafter)`; all of its state lives there and models keep
none of it. Between scheduling and verification the batch is frozen; the stop cut is made before anything else sees the
tokens.

Source: https://huggingface.co/papers/2607.05147, section 3 and Figure 2. Shape legend: R active rows, S prompt width,
K draft positions, N packed tokens of one verification (`sum(1 + l_r)`), M tapped layers, Dt target hidden, V target
vocabulary.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from .call_schedule import CallSchedule, measured_cost
from .drafting import Drafts, DraftSession
from .kept_cache import remember_context
from .modeling_dspark import DSparkDrafter
from .outputs import DSparkGenerateOutput, GenerationRecord
from .packed import packed_forward
from .prefill import prefill
from .processors import RowProcessors
from .rounds import DecodingRound, DecodingStats
from .stopping import StopChecker
from .target import TargetView
from .verification import RandomSource, Verdict, verify_greedy, verify_sampling


class Row:
    """One row of the batch, on the host: what it generated, and the position of its newest token, the anchor."""

    __slots__ = ("index", "anchor_position", "new_ids")

    def __init__(self, index: int, anchor_position: int):
        self.index, self.anchor_position = index, anchor_position
        self.new_ids: list[int] = []

    @property
    def anchor_id(self) -> int:
        return self.new_ids[-1]


class Decoder:
    """
    One `generate` call over a batch.

    Args:
        target ([`~transformers.PreTrainedModel`]): The model whose text is wanted; must pass `supports_packed`.
        drafter ([`DSparkDrafter`]): The drafter view; its options decide schedule, limits, callback and randomness.
        input_ids (`torch.LongTensor` of shape `[R, S]`): Left-padded prompts.
        logits_processor, stopping_criteria, generation_config, model_kwargs, streamer: As `generate` prepared them.
        random_source ([`RandomSource`], *optional*): All randomness; made from the view's generator by default.

    Raises:
        ValueError: Drafter, target, scheduler and arguments do not fit each other.
    """

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
        options = drafter.options
        self.target, self.input_ids, self.streamer = target, input_ids, streamer
        self.config, self.model_kwargs = generation_config, model_kwargs
        self.view = TargetView(target, drafter)
        cost = measured_cost(target, drafter, len(input_ids))
        self.plan = CallSchedule(drafter, cost, do_sample=generation_config.do_sample)
        self.on_round = options.on_round
        self.logits_processor = logits_processor
        self.processors = RowProcessors(logits_processor, len(input_ids))
        self.stops = StopChecker(stopping_criteria, len(input_ids))
        self.random_source = random_source or RandomSource(options.generator)
        self.record = GenerationRecord(generation_config, len(input_ids))
        self.rounds: list[DecodingRound] = []
        self.step = 0
        self.waited_seconds = 0.0  # with the caller's streamer and callback

    def run(self) -> torch.LongTensor | DSparkGenerateOutput:
        """Decodes until every row has stopped."""
        self.prefill()
        while self.num_active:
            self.round()
        if self.streamer is not None:
            self.streamer.end()
        return self.output()

    @property
    def active(self) -> list[Row]:
        """Rows still decoding; they lead both caches, in this order."""
        return self.rows[: self.num_active]

    def prefill(self) -> None:
        """The prompt, each row's first token (drawn as plain `generate` draws it), the drafter's first context."""
        everything = self.record.wants_hidden_states
        state = prefill(self.view, self.input_ids, self.config, self.model_kwargs, all_hidden_states=everything)
        self.cache, self.columns, self.earlier = state.cache, state.columns, state.earlier
        self.session = DraftSession(
            self.view,
            len(self.input_ids),
            do_sample=self.config.do_sample,
            processors=self.processors,
            random_source=self.random_source,
            device=self.input_ids.device,
            cache=None if state.earlier is None else state.earlier.cache,
        )
        for row, pairs in enumerate(state.context):
            for verified in pairs:
                self.session.add_context(row, *verified)
        if not self._gives_cache_back:
            self.model_kwargs["cache"].layers.clear()  # packed by now; the dense copy is nobody's
        self._check_logits(state.logits, "the prefill")
        scores = self.logits_processor(self.input_ids, state.logits.clone())
        first = self.random_source.categorical(scores.softmax(-1)) if self.config.do_sample else scores.argmax(-1)
        self.record.add_prefill(scores, state.logits, state.hidden_states)
        self.rows = [Row(index, position) for index, position in enumerate(state.last_positions)]
        self.num_active = len(self.rows)
        stopped = [self._commit(row, [token])[1] for row, token in zip(self.rows, first.tolist(), strict=True)]
        self._retire(stopped)

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

        features = self.view.context_features(outputs.hidden_states)[0]
        confidence = drafts.confidence.tolist() if drafts.confidence is not None else [()] * len(lengths)
        offset, stopped = 0, []
        for entry, row in enumerate(self.active):
            anchor_id, anchor_position = row.anchor_id, row.anchor_position
            kept, stop = self._commit(row, [*draft_ids[entry][: accepted[entry]], next_ids[entry]])
            stopped.append(stop)
            # Verified are the anchor and all that was kept but its newest token: as many as were kept.
            verified_part = slice(offset, offset + len(kept))
            self._absorb(entry, anchor_position, features[verified_part], [anchor_id, *kept[:-1]])
            self.record.add(row.index, verified_part, scores, logits, outputs.hidden_states)
            self._report(
                DecodingRound(
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
            )
            offset += 1 + lengths[entry]
        self._retire(stopped)
        self.step += 1
        seconds = time.perf_counter() - began - (self.waited_seconds - waited)
        unusual = drafts.ids.shape[1] > 0 and self.session.caught_up
        first_stands = None if verdict.first_stands is None else verdict.first_stands.tolist()
        self.plan.observe(lengths, accepted, math.nan if unusual else seconds, context, first_stands)

    def draft(self, context: float) -> Drafts:
        """Up to `draft_length` tokens for every row; no more than the row with most room can use."""
        num_drafts = min(self.plan.draft_length, max(self._room(row) for row in self.active))
        if not self.plan.wants_drafts(self.num_active, context) or num_drafts == 0:
            return Drafts.none(len(self.active), self.view.vocab_size, self.input_ids.device, self.config.do_sample)
        return self.session.propose(
            [row.anchor_id for row in self.active],
            [row.anchor_position for row in self.active],
            num_drafts,
            rows=[row.index for row in self.active],
            prefix=lambda entry, supposed: self._supposed_ids(self.rows[entry], supposed),
        )

    def schedule(self, drafts: Drafts, context: float) -> list[int]:
        """Verify lengths l_r, each within what was drafted and what the row can still use."""
        room, rows = [self._room(row) for row in self.active], [row.index for row in self.active]
        return self.plan.verify_lengths(drafts, room, rows=rows, step=self.step, context=context)

    def verify(self, draft_ids: list[list[int]], lengths: list[int]) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """One target forward over every row's anchor and drafts: its output, logits `[N, V]`, processed scores."""
        tokens = [[row.anchor_id, *ids[:n]] for row, ids, n in zip(self.active, draft_ids, lengths, strict=True)]
        outputs = self._forward(tokens)
        logits = outputs.logits[0].to(device=self.input_ids.device, dtype=torch.float32)
        self._check_logits(logits, f"round {self.step}")
        owners = [
            (row, part[1 : depth + 1])
            for row, part in zip(self.active, tokens, strict=True)
            for depth in range(len(part))
        ]
        scores = self.processors.apply(
            logits, rows=[row.index for row, _ in owners], prefix=lambda entry: self._supposed_ids(*owners[entry])
        )
        return outputs, logits, scores

    def judge(self, drafts: Drafts, scores: torch.Tensor, lengths: list[int]) -> Verdict:
        """Accepts and rejects (section 2 of the losslessness laws), from processed scores `[N, V]`."""
        device = scores.device
        if drafts.probs is None:
            return verify_greedy(drafts.ids.to(device), scores.argmax(-1), verify_lengths=lengths)
        return verify_sampling(
            drafts.ids.to(device),
            scores.softmax(-1),
            draft_probs=drafts.probs.to(device),
            verify_lengths=lengths,
            random_source=self.random_source,
            draft_token_ids=None if drafts.token_ids is None else drafts.token_ids.to(device),
        )

    def _forward(self, tokens: Sequence[Sequence[int]]) -> Any:
        """The target over `tokens` of every row, from its anchor on, in one packed forward."""
        positions = [
            row.anchor_position + depth
            for row, part in zip(self.rows[: len(tokens)], tokens, strict=True)
            for depth in range(len(part))
        ]
        return packed_forward(
            self.target,
            self.view.to_target(self.input_ids.new_tensor([[token for part in tokens for token in part]])),
            self.view.to_target(self.input_ids.new_tensor([positions])),
            cache=self.cache,
            layout=self.cache.layout([len(part) for part in tokens]),
            output_hidden_states=True if self.record.wants_hidden_states else self.view.hidden_state_indices,
        )

    def _absorb(self, entry: int, position: int, features: torch.Tensor, token_ids: list[int]) -> None:
        """Makes verified tokens a lasting part of a row, in both caches: `features [C, M*Dt]` from `position` on."""
        self.cache.lengths[entry] += len(token_ids)
        positions = torch.arange(position, position + len(token_ids), device=features.device)
        self.session.add_context(entry, features, positions, token_ids)

    def output(self) -> torch.LongTensor | DSparkGenerateOutput:
        """The finished batch, padded like plain `generate`'s."""
        for entry in range(len(self.rows)):  # back to the order of the batch
            while self.rows[entry].index != entry:
                self._swap(entry, self.rows[entry].index)
        pad = getattr(self.config, "_pad_token_tensor", None)
        width = max(len(row.new_ids) for row in self.rows)
        new_ids = [row.new_ids + [0 if pad is None else int(pad)] * (width - len(row.new_ids)) for row in self.rows]
        sequences = torch.cat([self.input_ids, self.input_ids.new_tensor(new_ids)], dim=1)
        if self._gives_cache_back:
            self._give_cache_back(sequences)
        if not self.config.return_dict_in_generate:
            return sequences
        return DSparkGenerateOutput(
            sequences=sequences,
            scores=self.record.stacked_scores(),
            logits=self.record.stacked_logits(),
            hidden_states=self.record.stacked_hidden_states(),
            cache=self.model_kwargs["cache"],
            rounds=self.rounds,
            stats=DecodingStats(self.rounds),
        )

    @property
    def _gives_cache_back(self) -> bool:
        """Whether somebody will see the cache after the call: the caller passed it in, or gets it in the output."""
        is_callers = getattr(self.model_kwargs["cache"], "_is_user_defined", False)
        return bool(self.config.return_dict_in_generate or is_callers)

    def _give_cache_back(self, sequences: torch.LongTensor) -> None:
        """Writes the verified tokens into the dense cache and leaves the drafter's context with it."""
        # Plain `generate` feeds every row until the last one ends, so rows that ended before have all tokens cached.
        longest = max(len(row.new_ids) for row in self.rows)
        ended = [row for row in self.rows if len(row.new_ids) < longest]
        if ended:
            outputs = self._forward([[row.anchor_id] if len(row.new_ids) < longest else [] for row in self.rows])
            for row, features in zip(ended, self.view.context_features(outputs.hidden_states)[0], strict=True):
                self._absorb(row.index, row.anchor_position, features[None], [row.anchor_id])
        cache, columns = self.model_kwargs["cache"], self.columns.of_slots(self.cache.lengths)
        self.cache.export_dense(cache, columns)
        self.session.write_pending(len(self.rows))
        remember_context(cache, self.view.drafter, self.session.cache, columns, sequences, self.earlier)

    def _check_logits(self, logits: torch.Tensor, when: str) -> None:
        """Raises `ValueError` if the target's logits hold a nan, unless the caller asked to have them removed."""
        if not self.config.remove_invalid_values and logits.isnan().any():
            raise ValueError(
                f"the target's logits are nan in {when}, so no token can be chosen. Check its weights and its dtype "
                "(some models overflow in float16: try bfloat16 or float32)"
            )

    def _room(self, row: Row) -> int:
        """Drafts the row can still use: one less than its remaining tokens, since a round adds one of its own."""
        if self.stops.max_length is None:
            return self.plan.draft_length
        return max(self.stops.max_length - self.input_ids.shape[1] - len(row.new_ids) - 1, 0)

    def _ids(self, row: Row, supposed: Sequence[int] = ()) -> torch.LongTensor:
        """Ids of a row as plain `generate` holds them: left-padded prompt, generated tokens; then supposed ones."""
        return torch.cat([self.input_ids[row.index], self.input_ids.new_tensor([*row.new_ids, *supposed])])

    def _supposed_ids(self, row: Row, supposed: Sequence[int]) -> torch.LongTensor | None:
        """The same, or `None` after a supposed token that ends the row: plain `generate` never asks what follows."""
        return self._ids(row, supposed) if self.stops.eos_ids.isdisjoint(supposed) else None

    def _commit(self, row: Row, token_ids: list[int]) -> tuple[list[int], bool]:
        """Appends tokens up to the first stop; returns those kept, and whether the row has stopped."""
        width = self.input_ids.shape[1] + len(row.new_ids)
        count, stopped = self.stops.kept(token_ids, width=width, prefix=lambda: self._ids(row), row=row.index)
        kept = token_ids[:count]
        row.new_ids.extend(kept)
        row.anchor_position += len(kept)
        if self.streamer is not None:
            self._hand_over(self.streamer.put, torch.tensor(kept))
        return kept, stopped

    def _swap(self, first: int, second: int) -> None:
        self.cache.swap_rows(first, second)
        self.session.swap_rows(first, second)
        self.rows[first], self.rows[second] = self.rows[second], self.rows[first]

    def _retire(self, stopped: list[bool]) -> None:
        """Moves stopped rows behind the active ones."""
        for entry in reversed(range(len(stopped))):
            if stopped[entry]:
                self.num_active -= 1
                self._swap(entry, self.num_active)

    def _report(self, decoding_round: DecodingRound) -> None:
        if self.config.return_dict_in_generate:
            self.rounds.append(decoding_round)
        if self.on_round is not None:
            self._hand_over(self.on_round, decoding_round)

    def _hand_over(self, receive: Callable[[Any], Any], what: Any) -> None:
        """Calls the caller; what they take their time for is not the round's."""
        began = time.perf_counter()
        receive(what)
        self.waited_seconds += time.perf_counter() - began
