"""A JSONL file that grows batch by batch and survives being stopped at any moment.

Contract: beside `<file>` lies `<file>.meta.json` with the parameters that the content follows from and how many
batches and bytes are known to be complete. Lines reach the disk before the record says so: whatever lies behind the
recorded end, a torn line included, is cut off when the file is opened again. Opening with other parameters is refused,
naming what differs. Knows nothing about what the lines hold. One process writes a file at a time.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from .json_files import read_object, write_object

FORMAT = 1


class GrowingFile:
    """
    The file, opened for appending; a context manager.

    Args:
        path (`str` or `os.PathLike`): The file.
        parameters (`Mapping[str, Any]`): JSON values that the content follows from.

    Attributes:
        path (`Path`): The file.
        batches (`int`): Complete batches in it.
        totals (`dict[str, int]`): Sums that were kept with the batches.

    Raises:
        ValueError: There is a file that was not written here or was made with other parameters, or it has lost data.
        OSError: The file cannot be written.
    """

    def __init__(self, path: str | os.PathLike, parameters: Mapping[str, Any]):
        self.path = Path(path)
        self._record_path = self.path.with_name(f"{self.path.name}.meta.json")
        self._parameters = json.loads(json.dumps(parameters))  # as they will be read again
        self.batches, self._bytes, self.totals = 0, 0, dict[str, int]()
        if self._record_path.exists():
            self._take_up()
        elif self.path.exists() and self.path.stat().st_size:
            raise ValueError(
                f"{self.path} is there, without the record {self._record_path.name} that would tell how to go on with "
                "it; name another file, or remove it"
            )
        self._file: IO[bytes] = self.path.open("ab")
        self._file.truncate(self._bytes)
        self._save()

    def append(self, lines: Sequence[Mapping[str, Any]], **totals: int) -> None:
        """Writes the lines of one more batch, and adds `totals` to the sums."""
        data = "".join(json.dumps(line) + "\n" for line in lines).encode()
        self._file.write(data)
        self._file.flush()
        os.fsync(self._file.fileno())
        self.batches, self._bytes = self.batches + 1, self._bytes + len(data)
        self.totals = {name: self.totals.get(name, 0) + value for name, value in totals.items()}
        self._save()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _save(self) -> None:
        done = {"batches": self.batches, "bytes": self._bytes, **self.totals}
        write_object(self._record_path, {"format": FORMAT, "parameters": self._parameters, "done": done})

    def _take_up(self) -> None:
        """Reads the record of an earlier run."""
        try:
            record = read_object(self._record_path)
            done, parameters = dict(record["done"]), dict(record["parameters"])
            self.batches, self._bytes = int(done.pop("batches")), int(done.pop("bytes"))
            self.totals = {name: int(value) for name, value in done.items()}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self._record_path} is no record of a growing file ({error!r}); remove both") from None
        names = [name for name in {**parameters, **self._parameters} if self._differs(name, parameters)]
        if names:
            differences = "; ".join(
                f"{name}: {_shown(parameters.get(name))} then, {_shown(self._parameters.get(name))} now"
                for name in names
            )
            raise ValueError(
                f"{self.path} was begun with other parameters ({differences}); go on with those, name another file, "
                f"or remove it and {self._record_path.name}"
            )
        size = self.path.stat().st_size if self.path.exists() else 0
        if size < self._bytes:
            raise ValueError(
                f"{self.path} holds {size} bytes, but its record says {self._bytes}: data are lost. Bring the file "
                f"back, or remove it and {self._record_path.name}"
            )

    def _differs(self, name: str, parameters: Mapping[str, Any]) -> bool:
        missing = object()
        return parameters.get(name, missing) != self._parameters.get(name, missing)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
