"""`DSparkCandidateGenerator`: the drafting core inside transformers' own assisted loop, batch 1.

Contract: the same `DraftSession` as the packed engine, fed from the stock loop's outputs. It is the fallback for
targets whose attention cannot be packed; the packed engine is faster and stops exactly, so it is preferred wherever it
runs.

Source: https://huggingface.co/papers/2607.05147, section 3.1. Shape legend: S tokens so far, K draft positions, V
target vocabulary.
"""

import time
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from .call_schedule import CallSchedule
from .drafting import DraftSession
from .modeling_dspark import DSparkDrafter
from .processors import RowProcessors
from .round_cost import RoundCost
from .rounds import DecodingRound
from .target import TargetView
from .verification import RandomSource


class DSparkCandidateGenerator(CandidateGenerator):
    """
    Proposes DSpark drafts to `GenerationMixin._assisted_decoding`.

    Args:
        target ([`~transformers.PreTrainedModel`]): The model that verifies.
        drafter ([`DSparkDrafter`]): The drafter view.
        input_ids (`torch.LongTensor` of shape `[1, S]`): The prompt.
        generation_config, logits_processor: As `generate` prepared them.
        kwargs: What else the stock loop hands to candidate generators; not needed here.
    """

    requires_model_outputs = True

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: DSparkDrafter,
        *,
        input_ids: torch.LongTensor,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
        **kwargs: Any,
    ):
        options = drafter.options
        self.view = TargetView(target, drafter)
        # Measured profiles are of the packed engine; here only one that the caller vouches for applies.
        cost = None if options.sps_profile is None else RoundCost(options.sps_profile)
        self.plan = CallSchedule(drafter, cost, do_sample=generation_config.do_sample)
        self.on_round = options.on_round
        self.max_length = generation_config.max_length
        eos = getattr(generation_config, "_eos_token_tensor", None)
        self.end_ids = frozenset([] if eos is None else eos.flatten().tolist())
        self.session = DraftSession(
            self.view,
            1,
            do_sample=generation_config.do_sample,
            processors=RowProcessors(logits_processor, 1),
            random_source=RandomSource(options.generator),
            device=input_ids.device,
        )
        self.model_kwargs_overrides = {"output_hidden_states": self.view.hidden_state_indices}
        self.step = 0
        self.proposal: dict[str, Any] | None = None
        self.began = self.proposed = 0.0

    def get_candidates(
        self,
        input_ids: torch.LongTensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: Any = None,
        is_first_iteration: bool = False,
        n_last_matches: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """
        Drafts after `input_ids [1, S]`.

        Returns:
            `[1, S + l]` and the drafts' logits `[1, l, V]`; `(input_ids, None)` for a round without drafts (the
            stock loop cannot take empty logits), as for the first call, which is the target's prefill.
        """
        if is_first_iteration or model_outputs is None:
            return input_ids, None
        self.began = time.perf_counter()
        self._read_context(model_outputs, model_kwargs or {}, input_ids, int(n_last_matches))
        candidates, logits = self._propose(input_ids)
        self.proposed = time.perf_counter()
        return candidates, logits

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """Reports the round that the stock loop just finished; `input_ids [1, S]` end with what it kept."""
        if self.proposal is None:
            return
        seconds = time.perf_counter() - self.began
        self.plan.observe([self.proposal["verify_length"]], [int(num_matches)], seconds, self.position)
        if self.on_round is not None:
            kept = input_ids[0, input_ids.shape[1] - int(num_matches) - 1 :].tolist()
            self.on_round(
                DecodingRound(
                    row=0,
                    step=self.step,
                    num_accepted=int(num_matches),
                    next_id=kept[-1],
                    committed_ids=tuple(kept),
                    batch_tokens=1 + self.proposal["verify_length"],
                    draft_seconds=self.proposed - self.began,
                    verify_seconds=time.perf_counter() - self.proposed,
                    **self.proposal,
                )
            )
        self.step += 1
        self.proposal = None

    def _propose(self, input_ids: torch.LongTensor) -> tuple[torch.LongTensor, torch.Tensor | None]:
        anchor_id = int(input_ids[0, -1])
        self.proposal = {"anchor_id": anchor_id, "draft_ids": (), "confidence": (), "verify_length": 0}
        num_drafts = min(self.plan.draft_length, self.max_length - input_ids.shape[1] - 1)
        if not self.plan.wants_drafts(1, self.position) or num_drafts <= 0:
            return input_ids, None

        def prefix(entry: int, supposed: list[int]) -> torch.Tensor | None:
            if not self.end_ids.isdisjoint(supposed):
                return None
            return torch.cat([input_ids[0], input_ids.new_tensor(supposed)])

        drafts = self.session.propose([anchor_id], [self.position], num_drafts, rows=[0], prefix=prefix)
        confidence = None if drafts.confidence is None else drafts.confidence.float().cpu()
        (length,) = self.plan.verify_lengths(drafts, [num_drafts], rows=[0], step=self.step, context=self.position)
        self.proposal |= {"draft_ids": tuple(drafts.ids[0].tolist()), "verify_length": length}
        self.proposal["confidence"] = () if confidence is None else tuple(confidence[0].tolist())
        if length == 0:
            return input_ids, None
        candidates = torch.cat([input_ids, drafts.ids[:, :length].to(input_ids.device)], dim=1)
        if drafts.probs is None:
            return candidates, None
        return candidates, self._target_logits(drafts.probs[:, :length], drafts.token_ids)

    def _read_context(
        self, outputs: Any, model_kwargs: dict[str, Any], input_ids: torch.LongTensor, num_matches: int
    ) -> None:
        """Queues the tapped states of the tokens that the last forward verified: all but the newest token."""
        features = self.view.context_features(outputs.hidden_states)[0]
        mask = model_kwargs.get("attention_mask")
        real = torch.ones(input_ids.shape[1], dtype=torch.bool) if mask is None else mask[0].bool().cpu()
        real = real[: input_ids.shape[1]]
        position_ids = (real.long().cumsum(0) - 1).clamp_min(0)
        self.position = int(position_ids[-1])
        is_prefill = not any(self.session.cache.lengths)
        count = input_ids.shape[1] - 1 if is_prefill else num_matches + 1
        # The forward may have run over rejected drafts too; verified ones come first.
        new = slice(input_ids.shape[1] - 1 - count, input_ids.shape[1] - 1)
        kept = real[new].to(features.device)
        token_ids = input_ids[0, new].cpu()[real[new]].tolist()
        self.session.add_context(0, features[:count][kept], position_ids[new].to(features.device)[kept], token_ids)
        self.session.write_pending(1)

    def _target_logits(self, probs: torch.Tensor, token_ids: torch.Tensor | None) -> torch.Tensor:
        """Draft probabilities `[1, l, Vd]` as logits over the target's vocabulary `[1, l, V]`."""
        full = probs.new_full((*probs.shape[:2], self.view.vocab_size), float("-inf"))
        if token_ids is None:
            token_ids = torch.arange(probs.shape[-1], device=probs.device)
        return full.index_copy_(2, token_ids, probs.log())
