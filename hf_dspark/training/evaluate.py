"""Teacher-forced acceptance: how often a drafter's argmax is the target's, given the true tokens before it.

Contract: reads a pair and examples, changes nothing.
"""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from ..losses import LossWeights
from ..modeling_dspark import DSparkDrafter
from ..target import TargetView
from .blocks import AcceptanceMeter, row_outcome
from .collation import pack_row
from .examples import TrainingExample
from .teacher import Teacher


@torch.no_grad()
def teacher_forced_acceptance(
    target: PreTrainedModel,
    drafter: DSparkDrafter,
    examples: Sequence[TrainingExample],
    *,
    anchors: Sequence[Sequence[int]] | None = None,
) -> AcceptanceMeter:
    """
    Greedy acceptance of `drafter` on `examples`, each draft fed the true tokens before it.

    Args:
        anchors (`Sequence[Sequence[int]]`, *optional*): For each example, where blocks start; everywhere if `None`.
            At the anchors of live rounds the result is the live acceptance.
    """
    view, meter = TargetView(target, drafter), AcceptanceMeter(drafter.config.num_drafts)
    teacher = Teacher(view)
    for index, example in enumerate(examples):
        starts = example.anchors() if anchors is None else list(anchors[index])
        if not starts:
            continue
        row = pack_row([(index, example)]).with_anchors([starts]).to(drafter.device)
        meter.add(row_outcome(view, teacher.features(row), row, weights=LossWeights()))
    return meter
