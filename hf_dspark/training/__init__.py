"""Training a drafter: examples -> teacher features -> draft blocks -> losses -> steps, one module each."""

from .examples import TrainingExample, frequent_token_ids
from .initialization import default_target_layers, new_drafter
from .trainer import TrainingConfig, teacher_forced_acceptance, train

__all__ = [
    "TrainingConfig",
    "TrainingExample",
    "default_target_layers",
    "frequent_token_ids",
    "new_drafter",
    "teacher_forced_acceptance",
    "train",
]
