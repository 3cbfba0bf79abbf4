"""Training a drafter: examples -> teacher features -> draft blocks -> losses -> steps, one module each."""

from .arguments import DSparkTrainingArguments
from .data import load_examples
from .evaluate import teacher_forced_acceptance
from .examples import TrainingExample, frequent_token_ids
from .initialization import default_target_layers, new_drafter
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
