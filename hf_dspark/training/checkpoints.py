"""Checkpoints of a training run: written whole or not at all.

Contract: a checkpoint is a drafter folder with the optimiser's state beside the weights. A crash at any moment leaves
the previous one loadable.
"""

import os
import shutil
from pathlib import Path

import torch

from ..modeling_dspark import DSparkDrafter


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
