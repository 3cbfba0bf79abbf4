"""Teacher features on disk: computed once per text, read back by later epochs and runs.

Contract: `FeatureCache(folder, teacher)` has the interface of `Teacher`: `features(row)`. A text is found by the hash
of its tokens, in a subfolder named for what its features depend on: the target (shape and a sample of its weights),
the tapped layers and the stored dtype. Distributions are not stored: the last hidden state and the normaliser are, and
the target's head makes distributions of them. Shards are written beside their name and renamed, with a checksum of
each text that is looked at when the text is first read; a shard that is damaged is dropped and made again.
`estimate_bytes` tells the size beforehand.

Shape legend: T tokens of a text, M tapped layers, Dt target hidden.
"""

import contextlib
import functools
import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm.auto import tqdm
from transformers.utils import logging

from ..json_files import write_object
from ..target import TargetView, target_fingerprint
from .collation import PackedRow, pack_row
from .examples import TrainingExample
from .teacher import Teacher, TeacherFeatures

logger = logging.get_logger(__name__)

SHARD_BYTES = 256 * 2**20
HEADER_BYTES = 4 * 135 + 46  # of the safetensors header, for the four tensors of a text and their checksum
STORED = ("context", "last_hidden", "log_norm", "top_ids")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def bytes_per_token(num_layers: int, hidden_size: int, dtype: torch.dtype) -> int:
    """Stored bytes of a token: M = `num_layers` tapped states and the last one, a normaliser and an id."""
    return (num_layers + 1) * hidden_size * dtype.itemsize + 4 + 4


def estimate_bytes(
    examples: Sequence[TrainingExample], *, num_layers: int, hidden_size: int, dtype: torch.dtype
) -> int:
    """
    Bytes that a cache of `examples` takes on disk.

    Args:
        num_layers (`int`): M, tapped layers of the drafter.
        hidden_size (`int`): Dt, width of the target's hidden states.
        dtype (`torch.dtype`): Of the stored states.
    """
    texts = {example.key: len(example.input_ids) for example in examples}
    return sum(texts.values()) * bytes_per_token(num_layers, hidden_size, dtype) + len(texts) * HEADER_BYTES


class FeatureCache:
    """
    Args:
        folder (`str` or `os.PathLike`): Where caches live; this one takes a subfolder.
        teacher ([`Teacher`]): Computes what is not there yet.
        dtype (`str`, *optional*, defaults to `"bfloat16"`): Of the stored states.

    Raises:
        ValueError: The folder cannot be one, or cannot be written to.
    """

    def __init__(self, folder: str | os.PathLike, teacher: Teacher, dtype: str = "bfloat16"):
        if dtype not in DTYPES:
            raise ValueError(f"feature cache dtype {dtype!r} is not one of {', '.join(DTYPES)}")
        self.teacher, self.dtype = teacher, DTYPES[dtype]
        described = describe_features(teacher.view) | {"dtype": dtype}
        name = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]
        self.folder = Path(folder) / name
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not (manifest := self.folder / "manifest.json").exists():
                write_object(manifest, described)
        except OSError as error:
            raise ValueError(
                f"feature_cache={os.fspath(folder)!r} cannot be used as a folder ({error.strerror}); name another one"
            ) from error
        self._shards: dict[str, Path] = {}
        self._verified: set[str] = set()
        self._warned = False
        self.refresh()

    def refresh(self) -> None:
        """Looks again at what is on disk, as after another process wrote."""
        for path in sorted(self.folder.glob("shard-*.safetensors")):
            try:
                with safe_open(path, framework="pt") as shard:
                    self._shards |= {key.split(".")[0]: path for key in shard.keys()}
            except (SafetensorError, OSError):
                self._drop(path)

    def __contains__(self, example: TrainingExample) -> bool:
        return example.key in self._shards

    def build(self, examples: Sequence[TrainingExample], *, process: int = 0, num_processes: int = 1) -> None:
        """
        Computes and writes what is missing of `examples`; an interrupted build is taken up again.

        Args:
            process, num_processes (`int`): The share of this process; call `refresh` once all are done.
        """
        missing = list({example.key: example for example in examples if example not in self}.values())
        mine = missing[process::num_processes]
        shard: dict[str, torch.Tensor] = {}
        for example in tqdm(mine, desc="features", disable=not mine or process > 0):
            shard |= self._stored(example)
            if sum(tensor.nbytes for tensor in shard.values()) >= SHARD_BYTES:
                self._write(shard)
                shard = {}
        if shard:
            self._write(shard)

    def features(self, row: PackedRow) -> TeacherFeatures:
        """As [`Teacher.features`], from disk; texts that are not there are computed and written first."""
        device = row.input_ids.device
        parts = [[tensor.to(device) for tensor in self._found(example)] for example in row.examples]
        context, last_hidden, log_norm, top_ids = (torch.cat(part) for part in zip(*parts, strict=True))
        view = self.teacher.view
        if not view.drafter.has_own_vocabulary:  # normalised where it is asked for: the head is computed there anyway
            return TeacherFeatures(context, last_hidden, self.teacher.head)
        return TeacherFeatures(context, last_hidden, self.teacher.head, log_norm, top_ids.long())

    def _stored(self, example: TrainingExample) -> dict[str, torch.Tensor]:
        row = pack_row([(0, example)]).to(self.teacher.view.drafter.device)
        features = self.teacher.features(row)
        log_norm, top_ids = features.log_norm, features.top_ids
        if log_norm is None or top_ids is None:
            log_norm, top_ids = features.head.normalisers(features.last_hidden)
        tensors = (self._cast(features.context), self._cast(features.last_hidden), log_norm.float(), top_ids.int())
        if not all(bool(tensor.isfinite().all()) for tensor in tensors):
            raise FloatingPointError(
                f"the target's hidden states of a text of {len(example.input_ids)} tokens are not finite numbers; "
                "load it in a wider dtype"
            )
        return {
            f"{example.key}.{name}": tensor.cpu().contiguous() for name, tensor in zip(STORED, tensors, strict=True)
        }

    def _cast(self, states: torch.Tensor) -> torch.Tensor:
        limit = torch.finfo(self.dtype).max
        return states.clamp(-limit, limit).to(self.dtype)  # outliers of some targets overflow float16

    def _write(self, shard: dict[str, torch.Tensor]) -> None:
        name = hashlib.sha256("".join(sorted(shard)).encode()).hexdigest()[:16]
        final = self.folder / f"shard-{name}.safetensors"
        handle, temporary = tempfile.mkstemp(dir=self.folder, prefix=".", suffix=".incomplete")
        os.close(handle)
        try:
            keys = dict.fromkeys(key.split(".")[0] for key in shard)
            sums = {key: _checksum([shard[f"{key}.{name}"] for name in STORED]) for key in keys}
            save_file(shard, temporary, metadata=sums)
            os.replace(temporary, final)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
        self._shards |= {key.split(".")[0]: final for key in shard}

    def _found(self, example: TrainingExample) -> list[torch.Tensor]:
        """The tensors of a text, read or made; a second time if what was read is damaged."""
        for _ in range(2):
            self.build([example])
            path = self._shards[example.key]
            with contextlib.suppress(SafetensorError, OSError):
                if (tensors := self._read(path, example)) is not None:
                    return tensors
            self._drop(path)
        raise OSError(f"{self.folder}: what is written there reads differently; set feature_cache to another folder")

    def _read(self, path: Path, example: TrainingExample) -> list[torch.Tensor] | None:
        """The tensors of a text in a shard; `None` if they are not what was written."""
        shard, key = _opened(str(path)), example.key
        tensors = [shard.get_tensor(f"{key}.{name}") for name in STORED]
        if key not in self._verified:
            expected = (shard.metadata() or {}).get(key)  # shards of earlier versions have none
            if expected is not None and expected != _checksum(tensors):
                return None
            if not all(len(t) == len(example.input_ids) and bool(t.isfinite().all()) for t in tensors):
                return None
            self._verified.add(key)
        return tensors

    def _drop(self, path: Path) -> None:
        """Forgets a shard and removes it; warns once."""
        if not self._warned:
            logger.warning(f"{path} is damaged: it is removed, and its features are computed again")
        self._warned = True
        gone = {key for key, shard in self._shards.items() if shard == path}
        self._shards = {key: shard for key, shard in self._shards.items() if key not in gone}
        self._verified -= gone
        _opened.cache_clear()
        path.unlink(missing_ok=True)


def _checksum(tensors: Sequence[torch.Tensor]) -> str:
    value = 0
    for tensor in tensors:
        value = zlib.crc32(tensor.contiguous().view(torch.uint8).numpy(), value)
    return f"{value:08x}"


@functools.lru_cache(maxsize=64)
def _opened(path: str) -> safe_open:
    """A shard, mapped into memory; shards never change."""
    return safe_open(path, framework="pt")


def describe_features(view: TargetView) -> dict[str, object]:
    """What the features of a text depend on, beside the text."""
    config = view.drafter.config
    return {
        "format": 1,
        "target": view.target.config.get_text_config().name_or_path or view.target.name_or_path,
        "target_fingerprint": target_fingerprint(view.target),
        "target_weights": "".join(_sampled_weights(view)),
        "target_layer_ids": list(config.target_layer_ids or ()),
    }


def _sampled_weights(view: TargetView) -> Iterator[str]:
    """Hash of up to 64 numbers of every weight that is at hand: other weights of one shape are another target."""
    digest = hashlib.sha256()
    for name, parameter in view.target.named_parameters():
        if parameter.device.type == "meta":
            continue
        flat = parameter.detach().flatten()
        sample = flat[:: max(len(flat) // 64, 1)][:64].float().cpu()
        digest.update(name.encode() + sample.numpy().tobytes())
    yield digest.hexdigest()[:16]
