"""A first trainer: a frozen target teaches a drafter online, on one machine, with nothing written but checkpoints.

Contract: `train(target, drafter, examples, config)` changes only the drafter. Features come from the live target, one
sequence at a time (kept in memory when `cache_features`). Every step's data and anchors depend on (seed, step) alone, so
a resumed run equals an uninterrupted one.

Source: https://huggingface.co/papers/2607.05147, section 3.3. Shape legend: T tokens of a sequence, A anchors, Q slots a
block, K drafts a block, M tapped layers, Dt target hidden, Vd draft vocabulary.
"""

import dataclasses
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from .configuration_dspark import DSparkConfig
from .losses import BlockLosses, LossWeights, block_losses, contiguous_supervision, position_weights
from .modeling_dspark import DSparkDrafter
from .target import TargetView, target_fingerprint


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingExample:
    """One sequence: `input_ids` of prompt and answer, `loss_mask` 1 on the answer's tokens."""

    input_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]

    def anchors(self) -> list[int]:
        """Positions that a block may start at: they and their successor are both supervised."""
        return [i for i in range(len(self.loss_mask) - 1) if self.loss_mask[i] and self.loss_mask[i + 1]]


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

    def __post_init__(self):
        for name in ("num_steps", "batch_size", "num_anchors", "max_length", "save_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")


@dataclasses.dataclass(frozen=True, slots=True)
class TeacherFeatures:
    """
    What the target knows of one sequence: tapped states `context [T, M*Dt]`; `log_probs [T, Vd]` of the next token on
    the draft vocabulary (normalised over the full one); `top_ids [T]`, its argmax as a draft id (-1: not draftable).
    """

    context: torch.Tensor
    log_probs: torch.Tensor
    top_ids: torch.LongTensor


def default_target_layers(num_layers: int, count: int = 5) -> list[int]:
    """`count` layers spread from the second to the third last, as in the released drafters (36 -> 1, 9, 17, 25, 33)."""
    last = max(num_layers - 3, 0)
    first = min(1, last)
    return sorted({round(first + i * (last - first) / max(count - 1, 1)) for i in range(count)})


def frequent_token_ids(examples: Sequence[TrainingExample], size: int, always: Sequence[int] = ()) -> list[int]:
    """The `size` most frequent supervised token ids (`always` among them), sorted: a reduced draft vocabulary."""
    counts = Counter(
        token for example in examples for token, keep in zip(example.input_ids, example.loss_mask, strict=True) if keep
    )
    kept = list(dict.fromkeys([*always, *(token for token, _ in counts.most_common())]))[:size]
    return sorted(kept)


def new_drafter(
    target: PreTrainedModel,
    mask_token_id: int,
    *,
    draft_token_ids: Sequence[int] | None = None,
    **config: object,
) -> DSparkDrafter:
    """
    An untrained float32 drafter for `target`: its shape follows the target's unless `config` (fields of [`DSparkConfig`])
    says otherwise.

    Args:
        target ([`~transformers.PreTrainedModel`]): the model to draft for.
        mask_token_id (`int`): a token of the target that text does not use.
        draft_token_ids (`Sequence[int]`, *optional*): a reduced draft vocabulary, as target ids. The drafter's head then
            starts from the target's rows and stays frozen.
    """
    text = target.config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    fields: dict[str, object] = {
        "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size,
        "intermediate_size": text.intermediate_size,
        "num_attention_heads": text.num_attention_heads,
        "num_key_value_heads": text.num_key_value_heads,
        "head_dim": head_dim,
        "rms_norm_eps": getattr(text, "rms_norm_eps", 1e-6),
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": text.max_position_embeddings,
        "bos_token_id": text.bos_token_id,
        "eos_token_id": text.eos_token_id,
        "pad_token_id": text.pad_token_id,
        "num_target_layers": text.num_hidden_layers,
        "target_layer_ids": default_target_layers(text.num_hidden_layers),
        "target_name_or_path": text.name_or_path or target.name_or_path,
        "target_fingerprint": target_fingerprint(target),
        "mask_token_id": mask_token_id,
        "draft_vocab_size": None if draft_token_ids is None else len(draft_token_ids),
    }
    drafter = DSparkDrafter(DSparkConfig(**(fields | config)))
    if draft_token_ids is not None:
        token_ids = torch.tensor(sorted(draft_token_ids))
        drafter.d2t.copy_(token_ids - torch.arange(len(token_ids)))
        drafter.t2d.zero_()[token_ids] = True
        drafter.lm_head.weight.data.copy_(target.get_output_embeddings().weight.data[token_ids])
        drafter.lm_head.requires_grad_(False)
    return drafter


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


def block_mask(anchors: torch.LongTensor, length: int, block_size: int) -> torch.Tensor:
    """
    Additive mask `[1, 1, A*Q, T + A*Q]`: block i sees the context before its anchor, and itself.
    """
    num_slots = len(anchors) * block_size
    owner = torch.arange(len(anchors), device=anchors.device).repeat_interleave(block_size)
    context = torch.arange(length, device=anchors.device)[None] < anchors[owner][:, None]
    visible = torch.cat([context, owner[:, None] == owner[None]], dim=1)
    mask = torch.zeros(num_slots, length + num_slots, device=anchors.device)
    return mask.masked_fill_(~visible, torch.finfo(mask.dtype).min)[None, None]


def draft_blocks(
    view: TargetView, features: TeacherFeatures, input_ids: torch.LongTensor, anchors: torch.LongTensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """
    Teacher-forced draft logits `[A, K, Vd]` and confidence logits `[A, K]` of the blocks at `anchors [A]` of one
    sequence `input_ids [T]`.
    """
    config, num_anchors, length = view.drafter.config, len(anchors), len(input_ids)
    slots = anchors.new_full((num_anchors, config.block_size), config.mask_token_id)
    slots[:, 0] = input_ids[anchors]
    positions = anchors[:, None] + torch.arange(config.block_size, device=anchors.device)
    home = view.drafter.fc.weight
    hidden = view.drafter(
        view.noise_embeds(slots.flatten())[None],
        features.context.to(home.dtype)[None],
        position_ids=positions.flatten()[None],
        context_position_ids=torch.arange(length, device=anchors.device)[None],
        attention_mask=block_mask(anchors, length, config.block_size).to(home.dtype),
    )
    hidden = hidden.view(num_anchors, config.block_size, -1)[:, -config.num_drafts :]
    previous = anchors[:, None] + torch.arange(config.num_drafts, device=anchors.device)
    return view.drafter.teacher_forced(hidden, view.base_logits(hidden), input_ids[previous.clamp_max(length - 1)])


@dataclasses.dataclass(frozen=True, slots=True)
class BlockOutcome:
    """Losses of one sequence's blocks, and whether each draft's argmax was the target's, `matches [A, K]`."""

    losses: BlockLosses
    matches: torch.BoolTensor
    supervised: torch.BoolTensor


def sequence_outcome(
    view: TargetView,
    features: TeacherFeatures,
    example: TrainingExample,
    anchors: torch.LongTensor,
    *,
    weights: LossWeights,
    denominator: torch.Tensor | None = None,
) -> BlockOutcome:
    """Drafts the blocks at `anchors [A]` of one example and compares them with the teacher."""
    input_ids = torch.tensor(example.input_ids, device=anchors.device)
    loss_mask = torch.tensor([example.loss_mask], device=anchors.device)
    num_drafts = view.drafter.config.num_drafts
    supervised = contiguous_supervision(loss_mask, anchors[None], num_drafts)[0]
    draft_logits, confidence_logits = draft_blocks(view, features, input_ids, anchors)
    labels = (anchors[:, None] + torch.arange(1, num_drafts + 1, device=anchors.device)).clamp_max(len(input_ids) - 1)
    losses = block_losses(
        draft_logits,
        features.log_probs[labels - 1].float().exp(),
        label_ids=draft_ids_of(view.drafter, input_ids[labels]),
        supervised=supervised,
        confidence_logits=confidence_logits,
        weights=weights,
        denominator=denominator,
    )
    return BlockOutcome(losses, draft_logits.argmax(-1) == features.top_ids[labels - 1], supervised)


class AcceptanceMeter:
    """Running greedy acceptance of teacher-forced blocks, per position and as an accepted length."""

    def __init__(self, num_drafts: int):
        self.reached, self.accepted = torch.zeros(num_drafts), torch.zeros(num_drafts)
        self.blocks = 0

    def add(self, outcome: BlockOutcome) -> None:
        """Counts blocks whose every label is supervised (others would be cut by the end of the text)."""
        whole = outcome.supervised.all(dim=-1)
        survived = outcome.matches[whole].long().cumprod(-1).float().cpu()
        self.accepted += survived.sum(0)
        self.reached += torch.cat([torch.ones(len(survived), 1), survived[:, :-1]], dim=1).sum(0)
        self.blocks += len(survived)

    @property
    def conditional(self) -> list[float]:
        """Chance that draft k matches, given that all before it in its block did; `[K]`."""
        return (self.accepted / self.reached.clamp_min(1)).tolist()

    @property
    def accepted_length(self) -> float:
        """Mean tokens a round, the bonus token included (the paper's tau)."""
        return 1 + (self.accepted.sum() / max(self.blocks, 1)).item()


def learning_rate_at(step: int, config: TrainingConfig) -> float:
    """Linear warm-up, then cosine to zero at `num_steps`."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(config.num_steps - config.warmup_steps, 1)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


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


def usable(examples: Sequence[TrainingExample], max_length: int) -> list[TrainingExample]:
    """Examples cut to `max_length` that still hold an anchor."""
    cut = [TrainingExample(e.input_ids[:max_length], e.loss_mask[:max_length]) for e in examples]
    return [example for example in cut if example.anchors()]


def pick(count: int, among: int, *, seed: int) -> list[int]:
    """`count` of `range(among)` without replacement (all of them, if fewer), determined by `seed`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(among, generator=generator)[:count].tolist()


def step_examples(step: int, num_examples: int, config: TrainingConfig) -> list[int]:
    """Which examples step `step` learns from: epochs of a fresh shuffle each."""
    chosen = range(step * config.batch_size, (step + 1) * config.batch_size)
    orders: dict[int, list[int]] = {}
    for position in chosen:
        epoch = position // num_examples
        orders.setdefault(epoch, pick(num_examples, num_examples, seed=config.seed + 7919 * epoch))
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
    target.eval()
    drafter.train()
    parameters = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=config.learning_rate, betas=(0.9, 0.999), weight_decay=0.0, fused=True
    )
    first = load_checkpoint(drafter, optimizer, config.output_dir)
    features = FeatureStore(view, kept, config.cache_features)
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
        example = features.examples[index]
        candidates = example.anchors()
        picked = pick(config.num_anchors, len(candidates), seed=config.seed + 104729 * step + index)
        chosen.append((index, torch.tensor(sorted(candidates[i] for i in picked), device=view.target.device)))
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
    target: PreTrainedModel, drafter: DSparkDrafter, examples: Sequence[TrainingExample]
) -> AcceptanceMeter:
    """Greedy acceptance of `drafter` over every anchor of `examples`, each draft fed the true tokens before it."""
    view, meter = TargetView(target, drafter), AcceptanceMeter(drafter.config.num_drafts)
    for example in usable(examples, max_length=10**9):
        anchors = torch.tensor(example.anchors(), device=target.device)
        features = teacher_features(view, example.input_ids)
        meter.add(sequence_outcome(view, features, example, anchors, weights=LossWeights()))
    return meter


def save_checkpoint(drafter: DSparkDrafter, optimizer: torch.optim.Optimizer, step: int, output_dir: str) -> None:
    """Writes `output_dir/checkpoint` beside its name first, then puts it in place: an old one survives a crash."""
    final, fresh, old = (Path(output_dir) / name for name in ("checkpoint", "checkpoint.new", "checkpoint.old"))
    shutil.rmtree(fresh, ignore_errors=True)
    drafter.save_pretrained(fresh)
    torch.save({"step": step, "optimizer": optimizer.state_dict()}, fresh / "trainer_state.pt")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        os.replace(final, old)
    os.replace(fresh, final)
    shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(drafter: DSparkDrafter, optimizer: torch.optim.Optimizer, output_dir: str | None) -> int:
    """Restores weights and optimiser from `output_dir`, if a checkpoint is there; returns the step to go on with."""
    if output_dir is None:
        return 0
    found = next(
        (path for name in ("checkpoint", "checkpoint.old") if (path := Path(output_dir) / name).is_dir()), None
    )
    if found is None:
        return 0
    saved = DSparkDrafter.from_pretrained(found, dtype=drafter.dtype)
    drafter.load_state_dict(saved.state_dict())
    state = torch.load(found / "trainer_state.pt", weights_only=True)
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])
