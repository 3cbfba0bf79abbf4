"""The training loop: a frozen target teaches a drafter online, on one machine.

Contract: `train` changes only the drafter and writes only checkpoints. Features come from the live target, one
sequence at a time. Every step's data and anchors depend on (seed, step) alone, so a resumed run equals an
uninterrupted one.

Source: https://huggingface.co/papers/2607.05147, section 3.3. Shape legend: A anchors, K drafts of a block.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..losses import LossWeights, contiguous_supervision, position_weights
from ..modeling_dspark import DSparkDrafter
from ..target import TargetView
from .blocks import AcceptanceMeter, sequence_outcome
from .checkpoints import load_checkpoint, save_checkpoint
from .examples import TrainingExample, shuffled, usable
from .teacher import FeatureStore, frozen, teacher_features


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingConfig:
    """
    Args:
        num_steps (`int`): optimiser steps.
        batch_size (`int`): sequences a step.
        num_anchors (`int`): draft blocks a sequence, drawn without replacement.
        learning_rate (`float`), warmup_steps (`int`): linear warm-up, then cosine to zero.
        max_grad_norm (`float`): gradient clipping.
        loss ([`LossWeights`]): the paper's loss weights.
        max_length (`int`): longer sequences are cut.
        seed (`int`): of data order and anchors.
        save_steps (`int`): checkpoint every so many steps into `output_dir` (if given).
        output_dir (`str`, *optional*): where checkpoints go; training resumes from one found there.
        cache_features (`bool`): keep the target's features in memory after their first use, in half precision.
    """

    num_steps: int = 1000
    batch_size: int = 1
    num_anchors: int = 64
    learning_rate: float = 6e-4
    warmup_steps: int = 40
    max_grad_norm: float = 1.0
    loss: LossWeights = LossWeights()
    max_length: int = 4096
    seed: int = 0
    save_steps: int = 500
    output_dir: str | None = None
    cache_features: bool = False

    def __post_init__(self) -> None:
        for name in ("num_steps", "batch_size", "num_anchors", "max_length", "save_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")


def learning_rate_at(step: int, config: TrainingConfig) -> float:
    """Linear warm-up, then cosine to zero at `num_steps`."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(config.num_steps - config.warmup_steps, 1)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def step_examples(step: int, num_examples: int, config: TrainingConfig) -> list[int]:
    """Which examples step `step` learns from: epochs of a fresh shuffle each."""
    chosen = range(step * config.batch_size, (step + 1) * config.batch_size)
    orders: dict[int, list[int]] = {}
    for position in chosen:
        epoch = position // num_examples
        orders.setdefault(epoch, shuffled(num_examples, seed=config.seed + 7919 * epoch))
    return [orders[position // num_examples][position % num_examples] for position in chosen]


def train(
    target: PreTrainedModel,
    drafter: DSparkDrafter,
    examples: Sequence[TrainingExample],
    config: TrainingConfig,
    *,
    on_step: Callable[[int, float, AcceptanceMeter], None] | None = None,
) -> DSparkDrafter:
    """
    Trains `drafter` on `examples` against the frozen `target` and returns it in eval mode.

    A checkpoint found in `config.output_dir` is resumed. Examples without room for an anchor are skipped and counted.

    Args:
        on_step (`Callable`, *optional*): called after each step with (step, loss, meter of the last 50 steps).

    Raises:
        ValueError: no usable example, or target and drafter do not fit.
    """
    view = TargetView(target, drafter)
    kept = usable(examples, config.max_length)
    if not kept:
        raise ValueError(f"none of the {len(examples)} examples has two supervised tokens in a row: nothing to learn")
    if len(kept) < len(examples):
        print(f"skipped {len(examples) - len(kept)} of {len(examples)} examples: too short to hold an anchor")
    with frozen(target):
        return _train(view, kept, config, on_step)


def _train(
    view: TargetView,
    examples: Sequence[TrainingExample],
    config: TrainingConfig,
    on_step: Callable[[int, float, AcceptanceMeter], None] | None,
) -> DSparkDrafter:
    drafter = view.drafter.train()
    parameters = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=config.learning_rate, betas=(0.9, 0.999), weight_decay=0.0, fused=True
    )
    first = load_checkpoint(drafter, optimizer, config.output_dir)
    features = FeatureStore(view, examples, config.cache_features)
    meter = AcceptanceMeter(drafter.config.num_drafts)
    progress = tqdm(range(first, config.num_steps), initial=first, total=config.num_steps, desc="train")
    for step in progress:
        if step % 50 == 0:
            meter = AcceptanceMeter(drafter.config.num_drafts)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, config)
        loss = training_step(view, features, step, config, meter)
        torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        conditional = " ".join(f"{value:.2f}"[1:] for value in meter.conditional)
        progress.set_postfix_str(f"loss {loss:.3f} length {meter.accepted_length:.2f} acceptance {conditional}")
        if on_step is not None:
            on_step(step, loss, meter)
        if config.output_dir and ((step + 1) % config.save_steps == 0 or step + 1 == config.num_steps):
            save_checkpoint(drafter, optimizer, step + 1, config.output_dir)
    return drafter.eval()


def training_step(
    view: TargetView, features: FeatureStore, step: int, config: TrainingConfig, meter: AcceptanceMeter
) -> float:
    """Gradients of one step, its denominator summed over all its sequences; returns the loss."""
    chosen = []
    for index in step_examples(step, len(features.examples), config):
        candidates = torch.tensor(features.examples[index].anchors(), device=view.target.device)
        order = shuffled(len(candidates), seed=config.seed + 104729 * step + index)
        chosen.append((index, candidates[sorted(order[: config.num_anchors])]))
    denominator = sum(
        position_weights(
            contiguous_supervision(
                torch.tensor([features.examples[index].loss_mask], device=anchors.device),
                anchors[None],
                view.drafter.config.num_drafts,
            ),
            config.loss.decay,
        ).sum()
        for index, anchors in chosen
    )
    total = 0.0
    for index, anchors in chosen:
        outcome = sequence_outcome(
            view,
            features[index],
            features.examples[index],
            anchors,
            weights=config.loss,
            denominator=denominator,
        )
        outcome.losses.total.backward()
        meter.add(outcome)
        total += outcome.losses.total.item()
    return total


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
    for index, example in enumerate(examples):
        starts = example.anchors() if anchors is None else anchors[index]
        if not starts:
            continue
        positions = torch.tensor(starts, device=target.device)
        features = teacher_features(view, example.input_ids)
        meter.add(sequence_outcome(view, features, example, positions, weights=LossWeights()))
    return meter
