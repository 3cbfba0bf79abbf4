"""`DSparkTrainer`: `transformers.Trainer` for a drafter whose frozen target teaches it.

Contract: the model that is trained, wrapped, checkpointed and pushed is the drafter (or a PEFT model on it) and
nothing else; the target stands beside it and comes out as it was. Everything that `Trainer` offers stays: accelerate
with DDP and FSDP, mixed precision, gradient accumulation, activation checkpointing, resuming, trackers, the Hub. A
step's loss is a sum over its draft blocks, divided by the sum of their position weights over all processes and
micro-batches. Data and anchors of a step depend on (seed, step) alone, so a resumed run equals an uninterrupted one.

Source: https://huggingface.co/papers/2607.05147, section 3.3.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedModel, Trainer
from transformers.trainer_utils import EvalLoopOutput
from transformers.utils import logging

from ..losses import position_weights
from ..modeling_drafter import Drafter
from ..target import TargetView, target_fingerprint
from .arguments import DSparkTrainingArguments
from .blocks import AcceptanceMeter, BlockOutcome, row_outcome, training_attention
from .collation import IndexedExample, PackedRow, PackingCollator
from .examples import TrainingExample, usable
from .feature_cache import FeatureCache
from .teacher import Teacher, frozen

logger = logging.get_logger(__name__)


class ExampleDataset(Dataset):
    """Examples with their numbers."""

    def __init__(self, examples: Sequence[TrainingExample]):
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, number: int) -> IndexedExample:
        return number, self.examples[number]


class DSparkTrainer(Trainer):
    """
    Trains a drafter against a frozen target.

    ```python
    >>> drafter = new_drafter(target, mask_token_id, num_hidden_layers=2, block_size=6)
    >>> arguments = DSparkTrainingArguments("my-drafter", num_train_epochs=3)
    >>> trainer = DSparkTrainer(drafter, arguments, target=target, train_dataset=examples)
    >>> trainer.train()
    >>> trainer.save_drafter("my-drafter")
    ```

    Args:
        model ([`Drafter`] or `peft.PeftModel`): The drafter, or LoRA adapters on one.
        args ([`DSparkTrainingArguments`]): Hyper-parameters.
        target ([`~transformers.PreTrainedModel`]): The teacher, in any dtype or quantisation, on the device where it
            is to run. It is not moved, not wrapped and not saved.
        train_dataset, eval_dataset (`Sequence[TrainingExample]`, *optional*): Examples without room for an anchor are
            skipped and counted.
        kwargs: As for [`~transformers.Trainer`].

    Raises:
        TypeError: `args` or examples of another kind.
        ValueError: No usable example, or target, drafter and tokens do not fit.
        FloatingPointError: In `train`: a loss or a gradient that is no finite number; the message names the step.
    """

    loss_is_scaled_for_ga = True  # divided by the weight of the whole step

    def __init__(
        self,
        model: nn.Module,
        args: DSparkTrainingArguments,
        *,
        target: PreTrainedModel,
        train_dataset: Sequence[TrainingExample] | None = None,
        eval_dataset: Sequence[TrainingExample] | None = None,
        **kwargs: Any,
    ):
        if not isinstance(args, DSparkTrainingArguments):
            raise TypeError(f"args must be DSparkTrainingArguments, got {type(args).__name__}")
        self.view = TargetView(target, drafter_of(model))
        check_vocabulary(self.view, [*_checked(train_dataset, "train"), *_checked(eval_dataset, "eval")])
        self.teacher = Teacher(self.view)
        super().__init__(
            model,
            args,
            data_collator=PackingCollator(args.max_length, args.packing),
            train_dataset=_dataset(train_dataset, args.max_length, "train"),
            eval_dataset=_dataset(eval_dataset, args.max_length, "eval"),
            **kwargs,
        )
        self.cache: FeatureCache | None = None
        self.meter = AcceptanceMeter(self.view.drafter.config.num_drafts)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As [`~transformers.Trainer.train`]; the drafter is in eval mode afterwards."""
        config = self.view.drafter.config
        for name in ("confidence_temperatures", "confidence_offsets", "confidence_calibration"):
            setattr(config, name, None)  # they were of the weights until now
        config.target_fingerprint = target_fingerprint(self.view.target)  # and so was the target
        config.target_name_or_path = self.view.target.name_or_path or config.target_name_or_path
        config.training_length = self.args.max_length
        with frozen(self.view.target), training_attention(self.view.drafter, self.args.device):
            self._open_cache()
            result = super().train(*args, **kwargs)
        self.model.eval()
        return result

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As [`~transformers.Trainer.evaluate`]: `eval_loss`, accepted length and acceptance, teacher-forced."""
        with frozen(self.view.target), training_attention(self.view.drafter, self.args.device):
            return super().evaluate(*args, **kwargs)

    def save_drafter(self, folder: str | os.PathLike) -> None:
        """
        Writes the trained drafter to `folder`, as `DSparkDrafter.from_pretrained` reads it; adapters are merged into
        its weights for good.
        """
        if hasattr(self.model, "peft_config"):
            if self.args.should_save:
                trained_drafter(self.model).save_pretrained(folder)
        else:
            self.save_model(os.fspath(folder))  # gathers the weights of a sharded drafter

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, torch.Tensor]:
        """The micro-batches of a step with anchors, and the weight of all its blocks over all processes."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        batches = [{"rows": self._with_anchors(batch["rows"], self.state.global_step)} for batch in batches]
        weight = sum((self._weight(batch["rows"]) for batch in batches), torch.zeros(()))
        return batches, self.accelerator.reduce(weight.to(device), "sum")

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        """The share of `inputs` in the loss of the step, times the number of processes (gradients are averaged)."""
        loss, outcomes = self._outcomes(model, inputs["rows"], num_items_in_batch)
        self._check_finite("the loss", loss.item())
        for outcome in outcomes:
            self.meter.add(outcome)
        loss = loss * self.accelerator.num_processes
        return (loss, outcomes) if return_outputs else loss

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Loss and teacher-forced acceptance over `dataloader`, anchors as of step 0."""
        model = self.model if self.is_in_train else self.accelerator.prepare_model(self.model, evaluation_mode=True)
        was_training, meter = model.training, AcceptanceMeter(self.view.drafter.config.num_drafts)
        model.eval()
        sums = torch.zeros(2, device=self.args.device)  # loss, weight
        with torch.no_grad():
            for batch in dataloader:
                rows = self._with_anchors(batch["rows"], step=0)
                loss, outcomes = self._outcomes(model, rows, torch.ones((), device=self.args.device))
                sums += torch.stack([loss, self._weight(rows).to(loss)])
                for outcome in outcomes:
                    meter.add(outcome)
        model.train(was_training)
        sums = self.accelerator.reduce(sums, "sum")
        metrics = {"loss": (sums[0] / sums[1]).item()} | self._acceptance(meter)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        return EvalLoopOutput(None, None, metrics, self.num_examples(dataloader))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the teacher-forced acceptance since the last line to the lines of the training loss."""
        if "loss" in logs:
            logs |= self._acceptance(self.meter)
            self.meter = AcceptanceMeter(self.view.drafter.config.num_drafts)
        super().log(logs, start_time)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Of the drafter, forwards and backwards, on the slots of all blocks."""
        slots = sum(len(row.anchors) for row in inputs["rows"]) * self.view.drafter.config.block_size
        return 6 * slots * self.view.drafter.num_parameters()

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm)
        if self.accelerator.scaler is None:  # float16's scaler meets infinities on its way, and skips those steps
            self._check_finite("the norm of the gradients", float(norm))
        return norm

    def _check_finite(self, name: str, value: float) -> None:
        if not math.isfinite(value):
            raise FloatingPointError(
                f"{name} is {value} at step {self.state.global_step + 1}: training stops before this step is taken; "
                "try a lower learning_rate, or a wider dtype of the target"
            )

    def _with_anchors(self, rows: Sequence[PackedRow], step: int) -> list[PackedRow]:
        return [row.with_drawn_anchors(self.args.num_anchors, seed=self.args.seed, step=step) for row in rows]

    def _weight(self, rows: Sequence[PackedRow]) -> torch.Tensor:
        """Sum of the position weights of the rows' blocks."""
        num_drafts, decay = self.view.drafter.config.num_drafts, self.args.loss_weights.decay
        weights = [position_weights(row.supervised(num_drafts), decay).sum() for row in rows]
        return torch.stack(weights).sum()

    def _outcomes(
        self, model: nn.Module, rows: Sequence[PackedRow], denominator: torch.Tensor | None
    ) -> tuple[torch.Tensor, list[BlockOutcome]]:
        """Loss and outcomes of rows; the teacher speaks outside of the wrapped model and its mixed precision."""
        rows = [row.to(self.args.device) for row in rows]
        teacher = self.cache or self.teacher
        taught = [(row, teacher.features(row)) for row in rows]
        options = {"weights": self.args.loss_weights, "logits_bytes": self.args.loss_chunk_mib * 2**20}

        def forward() -> tuple[torch.Tensor, list[BlockOutcome]]:
            with self.accelerator.autocast():
                outcomes = [
                    row_outcome(self.view, features, row, denominator=denominator, **options)
                    for row, features in taught
                ]
            loss = torch.stack([outcome.losses.total for outcome in outcomes]).sum()
            return loss, [dataclasses.replace(o, losses=_detached(o.losses)) for o in outcomes]

        return call_inside(model, forward)

    def _acceptance(self, meter: AcceptanceMeter) -> dict[str, float]:
        meter.counts = self.accelerator.reduce(meter.counts.to(self.args.device), "sum")
        if not meter.blocks:
            return {}
        conditional = {f"acceptance_{k}": round(value, 4) for k, value in enumerate(meter.conditional, start=1)}
        return {"accepted_length": round(meter.accepted_length, 4)} | conditional

    def _open_cache(self) -> None:
        """With `feature_cache`: computes what is missing, shared between the processes, before the first step."""
        if self.args.feature_cache is None or self.cache is not None:
            return
        with self.args.main_process_first(local=False, desc="feature cache"):
            cache = FeatureCache(self.args.feature_cache, self.teacher, self.args.feature_cache_dtype)
        datasets = [dataset for dataset in (self.train_dataset, self.eval_dataset) if dataset is not None]
        examples = [example for dataset in datasets for example in dataset.examples]
        cache.build(examples, process=self.args.process_index, num_processes=self.args.world_size)
        self.accelerator.wait_for_everyone()
        cache.refresh()
        self.cache = cache


def call_inside(model: nn.Module, function: Callable[[], Any]) -> Any:
    """
    Calls `function` as the forward of the (wrapped) `model`, so that DDP and FSDP do what they do around a forward:
    the training step reads several parts of the drafter, not its `forward` alone.
    """
    inner = model
    while isinstance(wrapped := getattr(inner, "module", None), nn.Module):
        inner = wrapped
    own = inner.__dict__.get("forward")

    def forward() -> Any:
        restore()
        return function()

    def restore() -> None:
        if own is None:
            inner.__dict__.pop("forward", None)
        else:
            inner.forward = own

    inner.forward = forward
    try:
        return model()
    finally:
        restore()


def drafter_of(model: nn.Module) -> Drafter:
    """The drafter in `model`, which is one or a PEFT model on one."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def trained_drafter(model: nn.Module) -> Drafter:
    """The drafter to save: adapters merged into its weights, if `model` has some."""
    return model.merge_and_unload().eval() if hasattr(model, "peft_config") else model.eval()


def check_token_ids(examples: Sequence[TrainingExample], size: int, owner: str = "target") -> None:
    """Raises `ValueError` for a token in `examples` that is not one of the `size` that `owner` knows."""
    for token in (get(e.input_ids) for e in examples if e.input_ids for get in (min, max)):
        if not 0 <= token < size:
            raise ValueError(
                f"the data holds token {token}, but the {owner} knows {size}: was it made for another one?"
            )


def check_vocabulary(view: TargetView, examples: Sequence[TrainingExample]) -> None:
    """Raises `ValueError` unless target and drafter fit, and both know all tokens of `examples`."""
    config, size = view.drafter.config, view.vocab_size
    if view.drafter.markov_head is not None and not view.drafter.has_own_vocabulary and config.vocab_size > size:
        raise ValueError(
            f"the drafter drafts {config.vocab_size} tokens (vocab_size), but the target's logits have {size}; use a "
            "drafter of this target"
        )
    check_token_ids(examples, getattr(view.embed_tokens, "num_embeddings", None) or size)
    check_token_ids(examples, config.vocab_size, "drafter")


def _checked(examples: Sequence[TrainingExample] | None, name: str) -> Sequence[TrainingExample]:
    """`examples`, none for `None`; `TypeError` for what is no example."""
    for example in examples or ():
        if not isinstance(example, TrainingExample):
            raise TypeError(f"{name}_dataset must hold TrainingExamples, got {type(example).__name__}")
    return examples or ()


def _detached(losses: Any) -> Any:
    values = {field.name: getattr(losses, field.name).detach() for field in dataclasses.fields(losses)}
    return dataclasses.replace(losses, **values)


def _dataset(examples: Sequence[TrainingExample] | None, max_length: int, name: str) -> ExampleDataset | None:
    """The usable examples; tells how many were skipped."""
    if examples is None:
        return None
    if not len(examples):
        raise ValueError(f"{name}_dataset is empty: it needs at least one example, or None")
    kept = usable(examples, max_length)
    if not kept:
        raise ValueError(
            f"none of the {len(examples)} {name} examples has two supervised tokens in a row: nothing to learn"
        )
    if len(kept) < len(examples):
        skipped = len(examples) - len(kept)
        logger.warning(f"skipped {skipped} of {len(examples)} {name} examples: too short to hold an anchor")
    return ExampleDataset(kept)
