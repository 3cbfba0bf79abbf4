"""A batch as `generate` takes and returns it: padded prompts in, padded sequences (and what else was asked for) out.

Contract: what a call over a fixed batch has around the decoding loop. The loop itself is in `decoding.py`, and knows
rows only. Source: transformers' `generate`. Shape legend: R rows, S prompt width, W width with generated tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from .drafting import DraftSession
from .kept_cache import remember_context
from .outputs import DSparkGenerateOutput, GenerationRecord
from .packed import SlabCache
from .prefill import Prefill, prefill
from .rounds import DecodingRound, DecodingStats
from .target import TargetView


class StaticBatch:
    """
    Args:
        input_ids (`torch.LongTensor` of shape `[R, S]`): Left-padded prompts.
        generation_config, model_kwargs: As `generate` prepared them.

    Attributes:
        record ([`GenerationRecord`]): Scores, logits and hidden states, if they are wanted.
        rounds (`list[DecodingRound]`): Every row's rounds, if the caller gets a dictionary.
    """

    def __init__(self, input_ids: torch.LongTensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]):
        self.input_ids, self.config, self.model_kwargs = input_ids, generation_config, model_kwargs
        self.record = GenerationRecord(generation_config, len(input_ids))
        self.rounds: list[DecodingRound] = []

    @property
    def gives_cache_back(self) -> bool:
        """Whether somebody will see the cache after the call: the caller passed it in, or gets it in the output."""
        is_callers = getattr(self.model_kwargs["cache"], "_is_user_defined", False)
        return bool(self.config.return_dict_in_generate or is_callers)

    def prefill(self, view: TargetView) -> Prefill:
        """Runs the prompts through the target."""
        everything = self.record.wants_hidden_states
        state = prefill(view, self.input_ids, self.config, self.model_kwargs, all_hidden_states=everything)
        self._columns, self._earlier = state.columns, state.earlier
        if not self.gives_cache_back:
            self.model_kwargs["cache"].layers.clear()  # packed by now; the dense copy is nobody's
        return state

    def note(self, decoding_round: DecodingRound) -> None:
        """Keeps a round for the output."""
        if self.config.return_dict_in_generate:
            self.rounds.append(decoding_round)

    def padded(self, new_ids: Sequence[Sequence[int]]) -> torch.LongTensor:
        """Prompts and new tokens of every row, `[R, W]`, padded like plain `generate`'s."""
        pad = getattr(self.config, "_pad_token_tensor", None)
        width = max(map(len, new_ids))
        rows = [[*own, *[0 if pad is None else int(pad)] * (width - len(own))] for own in new_ids]
        return torch.cat([self.input_ids, self.input_ids.new_tensor(rows)], dim=1)

    def give_cache_back(
        self, view: TargetView, cache: SlabCache, session: DraftSession, sequences: torch.LongTensor
    ) -> None:
        """Writes the verified tokens into the dense cache and leaves the drafter's context with it."""
        dense, columns = self.model_kwargs["cache"], self._columns.of_slots(cache.lengths)
        cache.export_dense(dense, columns)
        session.write_pending(len(sequences))
        remember_context(dense, view.drafter, session.cache, columns, sequences, self._earlier)

    def output(self, sequences: torch.LongTensor) -> torch.LongTensor | DSparkGenerateOutput:
        """What `generate` returns."""
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
