"""Folders on disk, written whole or not at all. Knows nothing about what is in them."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(destination: Path) -> Iterator[Path]:
    """A folder beside `destination` that takes its place when all went well, and is gone otherwise."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    name = destination.resolve().name
    work, old = (destination.parent / f".{name}.{os.getpid()}.{word}" for word in ("incomplete", "old"))
    work.mkdir()
    try:
        yield work
        if destination.exists():
            destination.rename(old)
        try:
            work.rename(destination)
        except OSError:
            if old.exists():
                old.rename(destination)
            raise
    finally:
        for leftover in (work, old):
            shutil.rmtree(leftover, ignore_errors=True)
