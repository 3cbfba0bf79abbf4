"""Hyper-parameters of a training run: those of `transformers.TrainingArguments`, with the paper's defaults, and ours.

Source: https://huggingface.co/papers/2607.05147, section 3.3.
"""

import dataclasses
import math
import os
from dataclasses import dataclass, field

from transformers import TrainingArguments

from ..losses import LossWeights
from .feature_cache import DTYPES


@dataclass
class DSparkTrainingArguments(TrainingArguments):
    r"""
    Every argument of [`~transformers.TrainingArguments`], with the paper's defaults: AdamW at 6e-4 (betas 0.9 and
    0.999, no weight decay), 4 % warm-up, cosine, gradients clipped at 1, 10 epochs. A batch counts sequences; the
    paper's holds 512, over all processes and accumulation steps.

    Args:
        max_length (`int`, *optional*, defaults to 4096): Tokens; longer sequences are cut, rows are packed up to it.
        packing (`bool`, *optional*, defaults to `True`): Put the sequences of a batch into as few rows as they fit in.
        num_anchors (`int`, *optional*, defaults to 512): Draft blocks a sequence, drawn anew at every step.
        ce_weight, tv_weight, confidence_weight (`float`, *optional*): Of the three losses; the paper's 0.1, 0.9, 1.
        loss_decay (`float`, *optional*, defaults to 4.0): Position weights are exp(-(k-1)/loss_decay); 0: all 1.
        loss_chunk_mib (`int`, *optional*, defaults to 64): Size of one float32 tensor of logits, in MiB; the loss
            holds about ten at a time.
        feature_cache (`str`, *optional*): Folder to keep the target's features in. `None` asks the target every time.
        feature_cache_dtype (`str`, *optional*, defaults to `"bfloat16"`): What they are stored in.
    """

    learning_rate: float = field(default=6e-4, metadata={"help": "Peak learning rate of AdamW."})
    num_train_epochs: float = field(default=10.0, metadata={"help": "Epochs."})
    warmup_steps: float = field(default=0.04, metadata={"help": "Warm-up: steps, or a share below 1 of all steps."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "What the learning rate follows."})
    per_device_train_batch_size: int = field(default=1, metadata={"help": "Sequences a process and micro-batch."})
    logging_steps: float = field(default=10, metadata={"help": "Steps between log lines."})
    save_total_limit: int | None = field(default=2, metadata={"help": "Checkpoints that are kept."})
    report_to: str | list[str] = field(default="none", metadata={"help": "tensorboard, wandb, trackio ..."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "Not used: rows are no columns."})
    dataloader_pin_memory: bool = field(default=False, metadata={"help": "Not used: rows are no tensors."})
    max_length: int = field(default=4096, metadata={"help": "Tokens of a row; longer sequences are cut."})
    packing: bool = field(default=True, metadata={"help": "Pack the sequences of a batch into few rows."})
    num_anchors: int = field(default=512, metadata={"help": "Draft blocks a sequence and step."})
    ce_weight: float = field(default=0.1, metadata={"help": "Weight of the cross-entropy on the text."})
    tv_weight: float = field(default=0.9, metadata={"help": "Weight of sum|p_d - p_t|."})
    confidence_weight: float = field(default=1.0, metadata={"help": "Weight of the confidence head's loss."})
    loss_decay: float = field(default=4.0, metadata={"help": "Decay along the block, in positions; 0: none."})
    loss_chunk_mib: int = field(default=64, metadata={"help": "MiB of one float32 tensor of logits in the loss."})
    feature_cache: str | None = field(default=None, metadata={"help": "Folder for the target's features."})
    feature_cache_dtype: str = field(default="bfloat16", metadata={"help": ", ".join(DTYPES)})

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{spec.name}={value} must be a finite number")
        if self.learning_rate < 0:
            raise ValueError(f"learning_rate={self.learning_rate} must not be negative")
        if self.output_dir is not None and not os.fspath(self.output_dir).strip():
            raise ValueError("output_dir is empty: name the folder that the drafter is to be written to")
        for name in ("max_length", "num_anchors", "loss_chunk_mib", "per_device_train_batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("ce_weight", "tv_weight", "confidence_weight", "loss_decay"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        if not self.ce_weight + self.tv_weight:
            raise ValueError("ce_weight and tv_weight are both 0: there is nothing to learn drafts from")
        if self.feature_cache_dtype not in DTYPES:
            raise ValueError(f"feature_cache_dtype={self.feature_cache_dtype!r} is not one of {', '.join(DTYPES)}")
        super().__post_init__()

    @property
    def loss_weights(self) -> LossWeights:
        """The losses' weights as `losses` takes them."""
        return LossWeights(self.ce_weight, self.tv_weight, self.confidence_weight, self.loss_decay or None)
