"""The teacher: what the frozen target knows of the tokens of a row, computed online.

Contract: `Teacher` runs the live target, in whatever dtype or quantisation it is, once over a row; `TeacherFeatures`
keeps the tapped states and the last hidden state, never logits of all positions: distributions are made from the
target's own head when they are asked for. The target is lent, not changed: `frozen` keeps gradients out of it.

Source: https://huggingface.co/papers/2607.05147, section 3.3. Shape legend: T tokens of a row, M tapped layers, Dt
target hidden, V target vocabulary, Vd draft vocabulary.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.utils import logging

from ..modeling_dspark import DSparkDrafter
from ..target import TargetView
from .collation import PackedRow, pack_row
from .examples import TrainingExample

logger = logging.get_logger(__name__)

HEAD_CHUNK_NUMBERS = 2**24
"""Logits that exist at a time when normalisers are computed: 64 MiB in float32."""


class TeacherHead:
    """
    The target's LM head on its last hidden states, soft-capped and scaled as its own forward does it.

    Args:
        view ([`~hf_dspark.target.TargetView`]): The target, and the drafter whose vocabulary counts.
    """

    def __init__(self, view: TargetView):
        self.view, self.module = view, view.target.get_output_embeddings()
        text = view.target.config.get_text_config()
        self.softcap = getattr(text, "final_logit_softcapping", None)
        # Cohere multiplies by logit_scale, Granite divides by logits_scaling.
        self.scale = (getattr(text, "logit_scale", None) or 1.0) / (getattr(text, "logits_scaling", None) or 1.0)
        self._rows: torch.Tensor | None = None

    def logits(self, last_hidden: torch.Tensor) -> torch.Tensor:
        """`last_hidden [..., Dt]` (after the target's final norm) -> the target's logits `[..., V]`, float32."""
        hidden = self.view.to_target(last_hidden.to(self.view.target.dtype))
        return self._finished(self.module(hidden)).to(last_hidden.device)

    def draft_logits(self, last_hidden: torch.Tensor) -> torch.Tensor:
        """The target's logits of the draft vocabulary, `[..., Vd]`, float32."""
        kept = self.view.drafter.draft_token_ids()
        if kept is None:
            return self.logits(last_hidden)[..., : self.view.drafter.config.vocab_size]
        weight: Any = getattr(self.module, "weight", None)
        plain = isinstance(self.module, torch.nn.Linear) and weight is not None and weight.is_floating_point()
        if not plain or weight.device.type == "meta" or self.module.bias is not None:  # quantised or offloaded
            return self.logits(last_hidden)[..., kept.to(last_hidden.device)]
        if self._rows is None:
            self._rows = weight.detach()[kept.to(weight.device)]
        logits = functional.linear(self.view.to_target(last_hidden.to(weight.dtype)), self._rows)
        return self._finished(logits).to(last_hidden.device)

    @torch.no_grad()
    def normalisers(self, last_hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logsumexp of the target's logits and their argmax, `[T]` each, a few positions at a time."""
        pieces = []
        for chunk in last_hidden.split(max(HEAD_CHUNK_NUMBERS // self.view.vocab_size, 1)):
            logits = self.logits(chunk)
            top, top_ids = logits.max(-1)  # one fused kernel each, which logsumexp and argmax are not on CPUs
            pieces.append((top + functional.cross_entropy(logits, top_ids, reduction="none"), top_ids))
        log_norm, argmax = zip(*pieces, strict=True)
        return torch.cat(log_norm), torch.cat(argmax)

    def _finished(self, logits: torch.Tensor) -> torch.Tensor:
        logits = logits.float()
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TeacherFeatures:
    """
    What the target knows of a row.

    Attributes:
        context (`torch.Tensor` of shape `[T, M*Dt]`): Tapped states.
        last_hidden (`torch.Tensor` of shape `[T, Dt]`): After the final norm: what the head reads.
        head ([`TeacherHead`]): Makes distributions of them.
        log_norm (`torch.Tensor` of shape `[T]`, *optional*): Normaliser over the full vocabulary.
        top_ids (`torch.LongTensor` of shape `[T]`, *optional*): The target's argmax, as a target id. Both are needed
            with a reduced draft vocabulary only.
    """

    context: torch.Tensor
    last_hidden: torch.Tensor
    head: TeacherHead
    log_norm: torch.Tensor | None = None
    top_ids: torch.Tensor | None = None

    @torch.no_grad()
    def log_probs_at(self, positions: torch.Tensor) -> torch.Tensor:
        """Next-token log probabilities on the draft vocabulary after `positions [...]`: `[..., Vd]`, float32."""
        log_norm = None if self.log_norm is None else self.log_norm[positions]
        return self.log_probs_of(self.last_hidden[positions], log_norm)

    def log_probs_of(self, last_hidden: torch.Tensor, log_norm: torch.Tensor | None) -> torch.Tensor:
        """The same of given states `[..., Dt]` and normalisers `[...]`."""
        logits = self.head.draft_logits(last_hidden)
        return logits.log_softmax(-1) if log_norm is None else logits - log_norm[..., None]

    @property
    def log_probs(self) -> torch.Tensor:
        """`[T, Vd]` of every position; for short texts."""
        return self.log_probs_at(torch.arange(len(self.context), device=self.context.device))

    def part(self, start: int, end: int) -> "TeacherFeatures":
        """Those of the tokens from `start` up to `end`."""
        return TeacherFeatures(
            self.context[start:end],
            self.last_hidden[start:end],
            self.head,
            None if self.log_norm is None else self.log_norm[start:end],
            None if self.top_ids is None else self.top_ids[start:end],
        )

    def draftable(self, positions: torch.Tensor) -> torch.Tensor | None:
        """Whether the target's argmax after `positions [...]` can be drafted; `None` if everything can."""
        if self.top_ids is None:
            return None
        return draft_ids_of(self.head.view.drafter, self.top_ids[positions]) >= 0


class Teacher:
    """
    Runs the frozen target.

    Whether the target keeps packed documents apart is found out by trying, at the first row that holds two; one that
    does not (a recurrent state, attention without masks) gets them one by one.

    Raises:
        NotImplementedError: The target's logits are not its head's on its last hidden state.
    """

    def __init__(self, view: TargetView):
        self.view, self.head = view, TeacherHead(view)
        self._packs: bool | None = None
        self._checked = False

    @torch.no_grad()
    def features(self, row: PackedRow) -> TeacherFeatures:
        """What the target knows of `row`."""
        self._check_head(row)
        if len(row.examples) > 1 and self.packs():
            context, last_hidden = self._run(row.input_ids, row.position_ids)
        else:
            parts = [self._run(ids) for ids in row.input_ids.split(row.lengths)]
            context, last_hidden = (torch.cat(part) for part in zip(*parts, strict=True))
        norms = self.head.normalisers(last_hidden) if self.view.drafter.has_own_vocabulary else (None, None)
        return TeacherFeatures(context, last_hidden, self.head, *norms)

    def packs(self) -> bool:
        """Whether two documents in one forward come out as they do alone."""
        if self._packs is None:
            ids = torch.arange(16, device=self.view.device) % self.view.vocab_size
            positions = torch.arange(8, device=self.view.device).repeat(2)
            packed, alone = self._run(ids, positions)[1][8:], self._run(ids[8:])[1]
            limit = 0.05 if alone.dtype == torch.float32 else 0.2
            self._packs = bool((packed - alone).norm() < limit * alone.norm())
            if not self._packs:
                logger.info("This target does not keep packed documents apart: it reads them one by one.")
        return self._packs

    def _run(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """One forward over `input_ids [T]`: tapped states `[T, M*Dt]` and last hidden states `[T, Dt]`."""
        view = self.view
        last = view.target.config.get_text_config().num_hidden_layers
        options = {} if position_ids is None else {"position_ids": view.to_target(position_ids[None])}
        hidden_states = view.target(
            view.to_target(input_ids[None]),
            output_hidden_states=[*view.hidden_state_indices, last],
            use_cache=False,
            logits_to_keep=torch.tensor([len(input_ids) - 1]),  # a slice would have bfloat16 heads copied on CPUs
            **options,
        ).hidden_states
        context = view.context_features(hidden_states)[0]
        return context, hidden_states[last][0].to(context.device)

    def _check_head(self, row: PackedRow) -> None:
        """Once: the logits made here are those of the target's own forward."""
        if self._checked:
            return
        ids = row.input_ids[: min(4, row.lengths[0])]
        theirs = self.view.target(self.view.to_target(ids[None]), use_cache=False).logits[0, -1].float()
        ours = self.head.logits(self._run(ids)[1][-1:])[0].to(theirs.device)
        difference = (ours.softmax(-1) - theirs[: len(ours)].softmax(-1)).abs().sum().item()
        if not difference < (1e-3 if self.view.target.dtype == torch.float32 else 0.1):
            raise NotImplementedError(
                f"{type(self.view.target).__name__} does not compute its logits as its output embeddings on its last "
                f"hidden state, soft-capped and scaled (probabilities differ by {difference:.2g}); such a target "
                "cannot teach yet"
            )
        self._checked = True


def teacher_features(view: TargetView, input_ids: Sequence[int]) -> TeacherFeatures:
    """Runs the frozen target once over one document `input_ids` (T tokens)."""
    ids = tuple(map(int, input_ids))
    return Teacher(view).features(pack_row([(0, TrainingExample(ids, (1,) * len(ids)))]).to(view.drafter.device))


def draft_ids_of(drafter: DSparkDrafter, token_ids: torch.LongTensor) -> torch.LongTensor:
    """Target ids `[...]` as draft ids, -1 where a token cannot be drafted."""
    kept = drafter.draft_token_ids()
    if kept is None:
        return token_ids
    kept = kept.to(token_ids.device)
    position = torch.searchsorted(kept, token_ids.contiguous()).clamp_max(len(kept) - 1)
    return torch.where(kept[position] == token_ids, position, -1)


@contextlib.contextmanager
def frozen(target: PreTrainedModel) -> Iterator[None]:
    """Keeps gradients out of the target's modules that the drafter borrows, and its flags as they were."""
    trainable = [parameter for parameter in target.parameters() if parameter.requires_grad]
    was_training = target.training
    target.eval()
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        target.train(was_training)
        for parameter in trainable:
            parameter.requires_grad_(True)
