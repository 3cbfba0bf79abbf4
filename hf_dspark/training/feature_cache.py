"""Teacher features on disk: computed once per text, read back by later epochs and runs.

Contract: `FeatureCache(folder, teacher)` has the interface of `Teacher`: `features(row)`. A text is found by the hash
of its tokens, in a subfolder named for what its features depend on: the target (shape and a sample of its weights),
the tapped layers and the stored dtype. Distributions are not stored: the last hidden state and the normaliser are, and
the target's head makes distributions of them. Shards are written beside their name and renamed, so one that is there
is whole. `estimate_bytes` tells the size beforehand.

Shape legend: T tokens of a text, M tapped layers, Dt target hidden.
"""

import contextlib
import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm.auto import tqdm

from ..json_files import write_object
from ..target import TargetView, target_fingerprint
from .collation import PackedRow, pack_row
from .examples import TrainingExample
from .teacher import Teacher, TeacherFeatures

SHARD_BYTES = 256 * 2**20
HEADER_BYTES = 4 * 135  # of the safetensors header, for the four tensors of a text
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
    """

    def __init__(self, folder: str | os.PathLike, teacher: Teacher, dtype: str = "bfloat16"):
        if dtype not in DTYPES:
            raise ValueError(f"feature cache dtype {dtype!r} is not one of {', '.join(DTYPES)}")
        self.teacher, self.dtype = teacher, DTYPES[dtype]
        described = describe_features(teacher.view) | {"dtype": dtype}
        name = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]
        self.folder = Path(folder) / name
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (manifest := self.folder / "manifest.json").exists():
            write_object(manifest, described)
        self._shards: dict[str, Path] = {}
        self.refresh()

    def refresh(self) -> None:
        """Looks again at what is on disk, as after another process wrote."""
        for path in sorted(self.folder.glob("shard-*.safetensors")):
            with safe_open(path, framework="pt") as shard:
                self._shards |= {key.split(".")[0]: path for key in shard.keys()}

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
        self.build(row.examples)
        device = row.input_ids.device
        parts = [[self._read(example, name).to(device) for name in STORED] for example in row.examples]
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
            save_file(shard, temporary)
            os.replace(temporary, final)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
        self._shards |= {key.split(".")[0]: final for key in shard}

    def _read(self, example: TrainingExample, name: str) -> torch.Tensor:
        return _opened(str(self._shards[example.key])).get_tensor(f"{example.key}.{name}")


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
