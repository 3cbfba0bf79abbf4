"""JSON objects on disk: read or refused, written whole or not at all. Knows nothing about what is in them."""

import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_object(path: str | os.PathLike) -> dict[str, Any]:
    """The JSON object in a file; `ValueError` if the file holds anything else."""
    data = json.loads(Path(path).read_text(encoding="utf-8"))
    if not isinstance(data, dict):
        raise ValueError(f"it must hold a JSON object, but holds a {type(data).__name__}")
    return data


def write_object(path: str | os.PathLike, data: Mapping[str, Any], *, indent: int = 1) -> None:
    """Writes a file that is complete whenever it is there: a temporary one beside it takes its place."""
    text = json.dumps(data, indent=indent) + "\n"
    handle, temporary = tempfile.mkstemp(dir=Path(path).parent, prefix=".", suffix=".tmp")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)  # a temporary file is for its owner alone, but a folder may be shared
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def without_nan(value: Any) -> Any:
    """`value` with tuples as lists and `nan`, which JSON has no word for, as `None`."""
    if isinstance(value, Mapping):
        return {key: without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(entry) for entry in value]
    return None if isinstance(value, float) and math.isnan(value) else value
