"""Where profiles are kept: in memory, and as JSON in the user's cache, under a hash of what they depend on.

Contract: `cached` measures at most once at a time, whatever threads and processes ask; a file is there whole or not at
all. A damaged file is measured anew, and a folder that cannot be written costs only the keeping; both are said once.
Knows nothing about models.
"""

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from huggingface_hub.utils import WeakFileLock
from transformers.utils import logging

from .sps_profile import SPSProfile

logger = logging.get_logger(__name__)

_MEASURING = threading.Lock()
_KEPT: dict[str, SPSProfile] = {}


def cached(
    description: Mapping[str, Any], measure: Callable[[], SPSProfile], *, max_batch_tokens: int
) -> SPSProfile | None:
    """
    The profile of what `description` describes, up to `max_batch_tokens` at least.

    Args:
        description (`Mapping[str, Any]`): All that the times depend on; JSON values.
        measure (`Callable`): Called if there is no such profile yet.
        max_batch_tokens (`int`): Largest verification that it is needed for.

    Returns:
        [`SPSProfile`], the same object whenever it is kept in memory, or `None` if HF_DSPARK_NO_PROFILE is set.
    """
    if os.environ.get("HF_DSPARK_NO_PROFILE", "") not in ("", "0"):
        return None
    key = _key(description)

    def enough(profile: SPSProfile | None) -> SPSProfile | None:
        return profile if profile is not None and profile.max_batch_tokens >= max_batch_tokens else None

    if profile := enough(_KEPT.get(key)):
        return profile
    with _MEASURING:  # two measurements at once would measure each other
        if profile := enough(_KEPT.get(key)):  # while we waited
            return profile
        path = _path(key)
        with _locked(path):
            kept = enough(_read(path))
            profile = kept or measure()
            if kept is None:
                _write(path, profile)
        _KEPT[key] = profile
        return profile


def keep(description: Mapping[str, Any], profile: SPSProfile) -> Path:
    """Puts a profile where `cached` finds it; returns its file. `OSError` if the folder cannot be written."""
    path = _path(_key(description))
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        profile.save(path)
    _KEPT.pop(path.stem, None)
    return path


def _key(description: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:32]


def _path(key: str) -> Path:
    cache = os.environ.get("HF_DSPARK_CACHE") or Path(constants.HF_HOME) / "hf_dspark"
    return Path(cache).expanduser() / "profiles" / f"{key}.json"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keeps other processes from measuring the same; without a folder to write in, it does not."""
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(WeakFileLock(path.with_suffix(".lock")))
        except (OSError, NotImplementedError) as error:
            logger.debug(f"no lock beside {path}: {error}")  # `_write` will say so if it cannot write either
        yield


def _read(path: Path) -> SPSProfile | None:
    try:
        return SPSProfile.load(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        logger.warning(f"A kept profile cannot be used, so step times are measured again: {error}")
        return None


def _write(path: Path, profile: SPSProfile) -> None:
    try:
        profile.save(path)
    except OSError as error:
        logger.warning_once(
            f"Step times cannot be kept in {path.parent} ({error}), so they are measured again in every process. Set "
            "HF_DSPARK_CACHE to a folder elsewhere."
        )
