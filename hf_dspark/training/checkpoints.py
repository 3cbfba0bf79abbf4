"""A run's checkpoints on disk: which of them are whole, and taking those of an older run away.

Contract: looks at files, loads no tensor. A checkpoint is whole if the trainer's state is JSON and every file of
tensors has the length and the directory that its format says.
"""

import json
import re
import shutil
import warnings
import zipfile
from pathlib import Path

from safetensors import SafetensorError, safe_open

NAME = re.compile(r"checkpoint-(\d+)")


def checkpoints(folder: Path) -> list[Path]:
    """The `checkpoint-N` folders in `folder`, newest first; none if it is not there."""
    found = [(int(match[1]), path) for path in folder.glob("checkpoint-*") if (match := NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True) if path.is_dir()]


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint in `folder` that is whole; warns of newer ones that are not."""
    damaged: list[str] = []
    for path in checkpoints(folder):
        if (reason := damage(path)) is None:
            if damaged:
                warnings.warn(f"going on from {path.name}: {'; '.join(damaged)}", UserWarning, stacklevel=2)
            return path
        damaged.append(f"{path.name} is damaged ({reason})")
    return None


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, or `None`."""
    try:
        state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "trainer_state.json cannot be read"
    if not isinstance(state, dict) or not isinstance(state.get("global_step"), int):
        return "trainer_state.json names no step"
    weights = [*checkpoint.glob("*.safetensors"), *checkpoint.glob("pytorch_model*")]
    if not weights:
        return "there are no weights"
    for path in checkpoint.glob("*.safetensors.index.json"):
        try:
            parts = set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return f"{path.name} cannot be read"
        if lost := sorted(name for name in parts if not (checkpoint / name).is_file()):
            return f"{lost[0]} is missing"
    for path in sorted(checkpoint.iterdir()):
        if path.is_file() and not _opens(path):
            return f"{path.name} cannot be read"
    return None


def remove_checkpoints(folder: Path) -> None:
    """Removes the `checkpoint-N` folders in `folder`, and nothing else."""
    for path in checkpoints(folder):
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path)


def _opens(path: Path) -> bool:
    """Whether a file of tensors has the directory, and the length, that its format says; others are not looked at."""
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt"):
                return True
        except (SafetensorError, OSError):
            return False
    return path.suffix not in (".pt", ".pth") or zipfile.is_zipfile(path)  # what torch.save writes is an archive
