"""A published folder, here or on the Hub: its config, and where its tensors are.

Contract: `Checkpoint.open` finds the files (downloading into the Hub's cache what is not there) and reads headers
only; `headers_only` fetches nothing but headers of what is not here. Refuses weights that are not safetensors.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import parse_safetensors_file_metadata
from transformers import PreTrainedConfig
from transformers.utils.hub import cached_file

from ..json_files import read_object
from .safetensors_files import TensorRef, read_header

HUB_ARGUMENTS = ("cache_dir", "force_download", "proxies", "token", "revision", "local_files_only", "subfolder")
"""What `from_pretrained` takes to find a folder."""
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """
    Attributes:
        source (`str`): What was asked for: a folder or a Hub id.
        config (`dict`): Its config.json.
        tensors (`dict[str, TensorRef]`): Its tensors by name.
    """

    source: str
    config: dict[str, Any]
    tensors: dict[str, TensorRef]

    @classmethod
    def open(
        cls,
        source: str | os.PathLike,
        *,
        headers_only: bool = False,
        check: Callable[[dict[str, Any]], Any] | None = None,
        wanted: Callable[[str], bool] | None = None,
        **hub: Any,
    ) -> "Checkpoint":
        """
        Finds a published folder.

        Args:
            source (`str` or `os.PathLike`): A folder, or a repository on the Hub.
            headers_only (`bool`): Do not download tensors; then not all of them have a path.
            check (`Callable`, *optional*): Called with the config before anything else is fetched; may raise.
            wanted (`Callable`, *optional*): Says of a tensor's name whether it is needed; files without any that is
                are passed over.
            hub: What [`~transformers.PreTrainedModel.from_pretrained`] takes: `revision`, `subfolder`, `token` ...

        Raises:
            OSError: There is no such folder, or it has no config.json or no safetensors.
            ValueError: A file is damaged.
        """
        config = read_config(source, **hub)
        if check is not None:
            check(config)
        found = {"_raise_exceptions_for_missing_entries": False, **hub}
        index = cached_file(source, _INDEX, **found)
        names = [_WEIGHTS]
        if index is not None:
            weight_map = json.loads(Path(index).read_text())["weight_map"]
            names = sorted({file for name, file in weight_map.items() if wanted is None or wanted(name)})
        tensors: dict[str, TensorRef] = {}
        for name in names:
            tensors |= _headers(source, name, headers_only, hub)
        return cls(str(source), config, tensors)


def read_config(source: str | os.PathLike, **hub: Any) -> dict[str, Any]:
    """
    The config.json of a folder or a Hub repository.

    Raises:
        OSError: There is no such folder, or no config.json in it. The Hub is not asked about what can only be a path.
        ValueError: It holds no JSON object.
    """
    folder = Path(source) / (hub.get("subfolder") or "")
    path = folder / "config.json"
    if path.is_file():
        try:
            read_object(path)
        except ValueError as error:  # broken JSON, broken text, no object
            raise ValueError(f"{path} is no config: {error}") from None
    elif Path(source).exists():
        raise OSError(f"{folder} holds no config.json")
    elif looks_local(source):
        raise OSError(f"there is no folder {source}")
    config, _ = PreTrainedConfig.get_config_dict(source, **hub)
    return config


def looks_local(source: str | os.PathLike) -> bool:
    """Whether `source` can be no name on the Hub: it is there, or it is written as a path."""
    text = str(source)
    return (
        not isinstance(source, str)
        or Path(source).exists()
        or text.startswith((".", "/", "~"))
        or text.endswith("/")
        or text.count("/") > 1
        or "\\" in text
    )


def hub_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `from_pretrained`'s arguments that say where a folder is."""
    return {name: arguments[name] for name in HUB_ARGUMENTS if arguments.get(name) is not None}


def _headers(source: str | os.PathLike, name: str, headers_only: bool, hub: Mapping[str, Any]) -> dict[str, TensorRef]:
    here = Path(source).is_dir() or not headers_only
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    path = cached_file(source, name, **quiet, **(hub if here else {**hub, "local_files_only": True}))
    if path is not None:
        return read_header(Path(path))
    if here:
        raise OSError(
            f"{source} has no {name}: drafters are read from safetensors only. Convert other weights first "
            "(`safetensors.torch.save_file`)"
        )
    remote = "/".join(filter(None, (hub.get("subfolder"), name)))
    known = {key: hub[key] for key in ("revision", "token") if key in hub}
    metadata = parse_safetensors_file_metadata(str(source), remote, **known)
    return {
        tensor: TensorRef(None, info.dtype, tuple(info.shape), info.data_offsets[0], _size(info.data_offsets))
        for tensor, info in metadata.tensors.items()
    }


def _size(offsets: tuple[int, int]) -> int:
    return offsets[1] - offsets[0]
