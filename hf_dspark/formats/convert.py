"""A drafter of any layout that is read, written in another: for other software, or into hf_dspark's own.

Contract: tensors are copied byte by byte from file to file, so a round trip is exact and memory stays small at any
size. What lies at the destination is complete: the folder is written beside it and renamed. Knows nothing about
decoding.
"""

import dataclasses
import os
from pathlib import Path
from typing import Any

from ..configuration_dspark import DSparkConfig
from ..json_files import read_object, write_object
from ..sps_profile import SPSProfile
from ..whole_folders import replacing
from .checkpoint import Checkpoint
from .description import kind
from .loading import ForeignDrafter
from .safetensors_files import SHARD_BYTES, TensorRef, total_bytes, write_checkpoint
from .serve_readme import SPS_FILE, public_name, readme, sts_file
from .writers import LAYOUTS

_COPIES = {
    "embed_tokens.weight": ("embed_tokens.weight",),
    "lm_head.weight": ("lm_head.weight", "embed_tokens.weight"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Conversion:
    """
    What [`convert`] wrote.

    Attributes:
        folder (`Path`): Where.
        layout (`str`): In which layout.
        source (`str`): Name of the layout that was read.
        num_tensors (`int`), num_bytes (`int`): How much, copies of the target's modules included.
        copies (`tuple[str, ...]`): Copies of the target's modules among them.
        notes (`tuple[str, ...]`): What its user should know.
    """

    folder: Path
    layout: str
    source: str
    num_tensors: int
    num_bytes: int
    copies: tuple[str, ...]
    notes: tuple[str, ...]


def convert(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    *,
    to: str,
    target: str | os.PathLike | None = None,
    sps: str | os.PathLike | None = None,
    force: bool = False,
    shard_bytes: int = SHARD_BYTES,
    **hub: Any,
) -> Conversion:
    """
    Writes a drafter in another layout, with a README that says how to serve it.

    Args:
        source (`str` or `os.PathLike`): A folder or a Hub repository of any layout that is read.
        destination (`str` or `os.PathLike`): The folder to write.
        to (`str`): `"native"`, `"deepspec"` (vLLM, SGLang, llama.cpp) or `"speculators"` (vLLM).
        target (`str` or `os.PathLike`, *optional*): The target's folder or Hub name. With `to="deepspec"` its
            embeddings and LM head are copied along, as DeepSpec's own loader needs them. Servers lend the target's and
            do not: without `target`, only copies that `source` has are kept.
        sps (`str` or `os.PathLike`, *optional*): Step times on the machine that will serve, as `profile` writes them
            or as SGLang's table; put into the folder for SGLang.
        force (`bool`): Replace what is at `destination`.
        shard_bytes (`int`): Size of a weight file, at most.
        hub: `revision`, `subfolder`, `token` ... of `source`.

    Raises:
        ValueError: `source` is of no layout that is read, or `to` has no word for what it needs.
        FileExistsError: There is something at `destination`.
        OSError: A folder is missing or cannot be written.
    """
    if to not in LAYOUTS:
        raise ValueError(f"to={to!r} must be one of {sorted(LAYOUTS)}")
    destination = Path(destination)
    _check_destination(destination, force)
    drafter = ForeignDrafter.open(source, **hub)
    if drafter.reading.detected.family == "autoregressive":
        raise ValueError(
            f"{os.fspath(source)} is {kind(drafter.config)}, which no other engine's layout is written for; it is in "
            "hf_dspark's own already, and decodes with transformers"
        )
    notes = list(drafter.reading.notes)
    if target is not None and drafter.config.target_name_or_path is None:
        drafter.config.target_name_or_path = str(target)
    elif target is not None and to != "deepspec":
        notes.append(f"the target given has no use: it is named in the config, and nothing of it goes into {to!r}")
    fields = LAYOUTS[to](drafter.config)
    copies = _target_copies(drafter, target) if to == "deepspec" else {}
    tensors = drafter.tensors | copies
    tables = _tables(drafter.config, sps)
    with replacing(destination) as work:
        write_checkpoint(work, tensors, shard_bytes=shard_bytes)
        write_object(work / "config.json", fields, indent=2)
        for name, table in tables.items():
            write_object(work / name, table)
        text = readme(
            drafter.config, to, folder=destination.resolve().name, source=public_name(str(source)), tables=list(tables)
        )
        (work / "README.md").write_text(text, encoding="utf-8")
    return Conversion(
        destination,
        to,
        drafter.reading.detected.name,
        len(tensors),
        total_bytes(tensors.values()),
        tuple(copies),
        tuple(notes),
    )


def _target_copies(drafter: ForeignDrafter, target: str | os.PathLike | None) -> dict[str, TensorRef]:
    """Embeddings and LM head for a DeepSpec folder, from the target or from the source; the latter may be none."""
    config = drafter.config
    names = [name for name in _COPIES if name not in drafter.tensors]  # a reduced vocabulary has its own head
    if target is None:
        return {name: drafter.ignored[name] for name in names if name in drafter.ignored}
    wanted = tuple(known for name in names for known in _COPIES[name])
    found = Checkpoint.open(target, wanted=lambda name: name.endswith(wanted)).tensors
    shape = (config.vocab_size, config.hidden_size)
    copies = {}
    for name in names:
        # A tied head is not stored; a model with towers may have other embeddings.
        named = [ref for known in _COPIES[name] for key, ref in found.items() if f".{key}".endswith(f".{known}")]
        fitting = [ref for ref in named if ref.shape == shape]
        if not fitting:
            shapes = f"shapes {[list(ref.shape) for ref in named]}" if named else "not there"
            raise ValueError(
                f"the drafter needs the target's {name} of shape {list(shape)}, but in {target} it is {shapes}; name "
                "the target that the drafter was trained for"
            )
        copies[name] = fitting[0]
    return copies


def _tables(config: DSparkConfig, sps: str | os.PathLike | None) -> dict[str, dict[str, Any]]:
    """Calibration and step times as SGLang reads them, by file name."""
    tables: dict[str, dict[str, Any]] = {}
    for mode, temperatures in (config.confidence_temperatures or {}).items():
        known = (config.confidence_calibration or {}).get(mode) or {}
        table: dict[str, Any] = {"temperatures": temperatures, "dataset": known.get("dataset")}
        table["num_samples"] = known.get("num_rounds")
        for name in ("ece_before", "ece_after"):
            errors = known.get(name)
            table[name] = sum(errors) / len(errors) if errors else None  # a mean over positions, as it has one number
        tables[sts_file(mode)] = table
    if sps is not None:
        tables[SPS_FILE] = _step_times(sps, config.block_size)
    return tables


def _step_times(path: str | os.PathLike, block_size: int) -> dict[str, Any]:
    """SGLang's table, from one or from a profile; `ValueError` for anything else."""
    try:
        table = read_object(path)
        if "bias_seconds" not in table and "sample_batch_tokens" not in table:
            return SPSProfile.load(path).to_sglang()
        if "sample_batch_tokens" in table:
            SPSProfile.from_sglang(table, block_size=block_size)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"sps={os.fspath(path)}: neither a profile that `hf-dspark profile --output` wrote nor SGLang's table "
            f"of step times ({error})"
        ) from None
    return table


def _check_destination(destination: Path, force: bool) -> None:
    if destination.is_dir() and not any(destination.iterdir()):
        return
    if destination.exists() and (not force or not destination.is_dir()):
        raise FileExistsError(f"{destination} is there and not an empty folder; force replaces it")
