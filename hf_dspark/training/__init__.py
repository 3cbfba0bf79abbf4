"""Training a drafter: examples -> teacher features -> draft blocks -> losses -> steps, one module each."""

import importlib
from typing import TYPE_CHECKING, Any

from .data import load_examples
from .evaluate import teacher_forced_acceptance
from .examples import TrainingExample, frequent_token_ids
from .initialization import default_target_layers, new_drafter

if TYPE_CHECKING:
    from .arguments import DSparkTrainingArguments
    from .trainer import DSparkTrainer, trained_drafter

__all__ = [
    "DSparkTrainer",
    "DSparkTrainingArguments",
    "TrainingExample",
    "default_target_layers",
    "frequent_token_ids",
    "load_examples",
    "new_drafter",
    "teacher_forced_acceptance",
    "trained_drafter",
]

_OF_TRAINER = {
    "DSparkTrainer": ".trainer",
    "DSparkTrainingArguments": ".arguments",
    "trained_drafter": ".trainer",
}


def __getattr__(name: str) -> Any:
    """
    What needs transformers' Trainer, on first use: that imports PEFT and PEFT bitsandbytes, which take their time and
    may have something to say.
    """
    if name in _OF_TRAINER:
        return getattr(importlib.import_module(_OF_TRAINER[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
