"""The teacher: what the frozen target knows of a sequence, computed online.

Contract: `teacher_features` runs the live target once over a sequence; `FeatureStore` can remember the results. The
target is lent, not changed: `frozen` keeps gradients out of it.

Source: https://huggingface.co/papers/2607.05147, section 3.3. Shape legend: T tokens of a sequence, M tapped layers,
Dt target hidden, Vd draft vocabulary.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedModel

from ..modeling_dspark import DSparkDrafter
from ..target import TargetView
from .examples import TrainingExample


@dataclasses.dataclass(frozen=True, slots=True)
class TeacherFeatures:
    """
    What the target knows of one sequence: tapped states `context [T, M*Dt]`; `log_probs [T, Vd]` of the next token on
    the draft vocabulary (normalised over the full one); `top_ids [T]`, its argmax as a draft id (-1: not draftable).
    """

    context: torch.Tensor
    log_probs: torch.Tensor
    top_ids: torch.LongTensor


@torch.no_grad()
def teacher_features(view: TargetView, input_ids: Sequence[int]) -> TeacherFeatures:
    """Runs the frozen target once over `input_ids` (T tokens)."""
    ids = torch.tensor([list(input_ids)], device=view.target.device)
    outputs = view.target(ids, output_hidden_states=view.hidden_state_indices, use_cache=False)
    logits = outputs.logits[0].float()
    top_ids = logits.argmax(-1)
    log_norm = logits.logsumexp(-1, keepdim=True)
    if (kept := view.drafter.draft_token_ids()) is not None:
        logits = logits[:, kept.to(logits.device)]
    top_ids = draft_ids_of(view.drafter, top_ids)
    return TeacherFeatures(view.context_features(outputs.hidden_states)[0], logits - log_norm, top_ids)


def draft_ids_of(drafter: DSparkDrafter, token_ids: torch.LongTensor) -> torch.LongTensor:
    """Target ids `[...]` as draft ids, -1 where a token cannot be drafted."""
    kept = drafter.draft_token_ids()
    if kept is None:
        return token_ids
    kept = kept.to(token_ids.device)
    position = torch.searchsorted(kept, token_ids).clamp_max(len(kept) - 1)
    return torch.where(kept[position] == token_ids, position, -1)


class FeatureStore:
    """Teacher features by example, computed on demand and, if asked, remembered in half precision."""

    def __init__(self, view: TargetView, examples: Sequence[TrainingExample], remember: bool):
        self.view, self.examples, self.remember = view, examples, remember
        self.kept: dict[int, TeacherFeatures] = {}

    def __getitem__(self, index: int) -> TeacherFeatures:
        if index in self.kept:
            return self.kept[index]
        features = teacher_features(self.view, self.examples[index].input_ids)
        if self.remember:
            halved = TeacherFeatures(features.context.half(), features.log_probs.half(), features.top_ids)
            self.kept[index] = features = halved
        return features


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
