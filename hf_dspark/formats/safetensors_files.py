"""Safetensors files as byte ranges: headers read without tensors, files written without holding any.

Contract: a `TensorRef` says where a tensor's bytes lie; copying a checkpoint is copying ranges, so it is exact to the
bit for every dtype and takes a few MiB of memory at any size. Knows nothing about models.

Format: https://huggingface.co/docs/safetensors: an unsigned 64-bit length, a JSON header of that length, the bytes.
"""

import dataclasses
import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

CHUNK_BYTES = 4 * 2**20
SHARD_BYTES = 5 * 10**9
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclasses.dataclass(frozen=True, slots=True)
class TensorRef:
    """
    A tensor in a file.

    Attributes:
        path (`Path`, *optional*): Its file; `None` where only the header was fetched.
        dtype (`str`): By the format's names, `"F32"` ...
        shape (`tuple[int, ...]`): Its shape.
        start (`int`): Its first byte, from the beginning of the file.
        num_bytes (`int`): Its size.
    """

    path: Path | None
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int

    def rows(self, first: int, count: int) -> "TensorRef":
        """`count` rows from `first` on."""
        row_bytes = self.num_bytes // self.shape[0]
        shape = (count, *self.shape[1:])
        return dataclasses.replace(
            self, shape=shape, start=self.start + first * row_bytes, num_bytes=count * row_bytes
        )

    def load(self) -> torch.Tensor:
        """The tensor, backed by its file: memory is taken as it is read, and given back when others need it."""
        if self.num_bytes == 0:
            return torch.empty(self.shape, dtype=DTYPES[self.dtype])
        mapped = torch.from_file(str(self.path), size=self.start + self.num_bytes, dtype=torch.uint8)[self.start :]
        if self.start % DTYPES[self.dtype].itemsize:
            mapped = mapped.clone()
        return mapped.view(DTYPES[self.dtype]).view(self.shape)


def read_header(path: Path) -> dict[str, TensorRef]:
    """
    The tensors of a file by name.

    Raises:
        ValueError: The file is not in the format, or shorter than its header says.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if 8 + length > size:
            raise ValueError(f"{path} is not a safetensors file, or was cut off")
        header = json.loads(file.read(length))
    refs = {
        name: TensorRef(path, entry["dtype"], tuple(entry["shape"]), 8 + length + begin, end - begin)
        for name, entry in header.items()
        if name != "__metadata__"
        for begin, end in [entry["data_offsets"]]
    }
    if refs and max(ref.start + ref.num_bytes for ref in refs.values()) > size:
        raise ValueError(f"{path} is shorter than its header says; it was cut off")
    return refs


def write_checkpoint(folder: Path, tensors: Mapping[str, TensorRef], *, shard_bytes: int = SHARD_BYTES) -> None:
    """Writes `tensors` into `model.safetensors`, or into shards of `shard_bytes` with an index beside them."""
    shards = _shards(tensors, shard_bytes)
    if len(shards) == 1:
        write_file(folder / "model.safetensors", shards[0])
        return
    files = {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, start=1)}
    for name, shard in files.items():
        write_file(folder / name, shard)
    index: dict[str, Any] = {
        "metadata": {"total_size": sum(ref.num_bytes for ref in tensors.values())},
        "weight_map": {tensor: name for name, shard in files.items() for tensor in shard},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def write_file(path: Path, tensors: Mapping[str, TensorRef]) -> None:
    """Writes one file, copying the bytes of each tensor from where they lie."""
    # Larger items first, as the format's own writer does: every tensor then starts where its dtype wants it.
    order = sorted(tensors, key=lambda name: (-DTYPES[tensors[name].dtype].itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in order:
        ref = tensors[name]
        header[name] = {
            "dtype": ref.dtype,
            "shape": list(ref.shape),
            "data_offsets": [offset, offset + ref.num_bytes],
        }
        offset += ref.num_bytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for name in order:
            _copy(tensors[name], file)


def total_bytes(tensors: Iterable[TensorRef]) -> int:
    """Their size together."""
    return sum(ref.num_bytes for ref in tensors)


def _copy(ref: TensorRef, target: BinaryIO) -> None:
    if ref.path is None:
        raise ValueError("only the header of this checkpoint was fetched; its tensors cannot be copied")
    with ref.path.open("rb") as source:
        source.seek(ref.start)
        left = ref.num_bytes
        while left:
            chunk = source.read(min(left, CHUNK_BYTES))
            if not chunk:
                raise ValueError(f"{ref.path} is shorter than its header says; it was cut off")
            target.write(chunk)
            left -= len(chunk)


def _shards(tensors: Mapping[str, TensorRef], shard_bytes: int) -> list[dict[str, TensorRef]]:
    shards: list[dict[str, TensorRef]] = [{}]
    room = shard_bytes
    for name, ref in tensors.items():
        if ref.num_bytes > room and shards[-1]:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = ref
        room -= ref.num_bytes
    return shards
