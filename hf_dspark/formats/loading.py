"""Drafters from wherever they are: foreign folders in our terms, and the class that a folder's config asks for.

Contract: for `DSparkDrafter.from_pretrained`, turns the arguments of a call on a foreign folder into those of one that
hands transformers a config and a state dict, so that dtype, device map, attention implementation and all else work as
ever. Tensors are backed by their files: the drafter is in memory once. Native folders are left to transformers.
"""

import dataclasses
import os
from typing import Any

import torch

from ..configuration_dspark import DSparkConfig
from ..modeling_drafter import Drafter
from .checkpoint import Checkpoint, hub_arguments, read_config
from .detect import detect, refuse_autoregressive
from .fields import wrong_types_refused
from .plan import drafter_class, plan_tensors
from .reading import Reading, read_published
from .safetensors_files import TensorRef

_FILES_ONLY = ("variant", "use_safetensors", "weights_only", "trust_remote_code")


@dataclasses.dataclass(frozen=True, slots=True)
class ForeignDrafter:
    """
    A foreign folder, ready to be loaded or written.

    Attributes:
        checkpoint ([`Checkpoint`]): The folder.
        reading ([`Reading`]): Its layout.
        config ([`DSparkConfig`]): The drafter's.
        tensors (`dict[str, TensorRef]`): The drafter's, by our names.
        ignored (`dict[str, TensorRef]`): The folder's copies of what the target lends, by the folder's names.
    """

    checkpoint: Checkpoint
    reading: Reading
    config: DSparkConfig
    tensors: dict[str, TensorRef]
    ignored: dict[str, TensorRef]

    @classmethod
    def open(
        cls,
        source: str | os.PathLike,
        *,
        headers_only: bool = False,
        changes: dict[str, Any] | None = None,
        **hub: Any,
    ) -> "ForeignDrafter":
        """
        Reads what a folder holds, native ones too; no tensor is loaded.

        Args:
            source, headers_only, hub: See [`Checkpoint.open`].
            changes (`dict`, *optional*): Config fields to replace.

        Raises:
            ValueError: The layout is not read here, or contradicts itself.
        """
        checkpoint = Checkpoint.open(source, headers_only=headers_only, check=read_published, **hub)
        reading = read_published(checkpoint.config, checkpoint.tensors)
        with wrong_types_refused():
            config_class = drafter_class(reading.fields.get("model_type")).config_class
            config = config_class.from_dict({**reading.fields, **(changes or {})})
        config.name_or_path = str(source)
        tensors, ignored = plan_tensors(config, checkpoint.tensors, reading.rename)
        return cls(checkpoint, reading, config, tensors, ignored)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The drafter's tensors, backed by their files."""
        return {name: ref.load() for name, ref in self.tensors.items()}


def load_drafter(source: str | os.PathLike, **options: Any) -> Drafter:
    """
    Loads a drafter of any kind and layout.

    Args:
        source (`str` or `os.PathLike`): A folder or a Hub repository.
        options: As in [`DSparkDrafter.from_pretrained`].

    Raises:
        ValueError: The layout is not read here, or contradicts itself.
        OSError: There is no such folder.
    """
    model_type = read_config(source, **hub_arguments(options)).get("model_type")
    return drafter_class(model_type).from_pretrained(source, **options)


def foreign_arguments(source: str | os.PathLike, arguments: dict[str, Any]) -> dict[str, Any] | None:
    """
    Arguments that load a foreign folder from a config and a state dict; `None` for a native one.

    Args:
        source (`str` or `os.PathLike`): First argument of `from_pretrained`.
        arguments (`dict`): Its keywords. Fields of the config among them replace the folder's.

    Raises:
        ValueError: The layout is not read here, or contradicts itself; the message says what was found.
    """
    hub = hub_arguments(arguments)
    detected = detect(read_config(source, **hub))
    refuse_autoregressive(detected)
    if detected.family == "native":
        return None
    if arguments.get("variant") is not None:
        raise ValueError(f"variant={arguments['variant']!r} is read from hf_dspark folders only, not {detected.name}")
    known = DSparkConfig().to_dict().keys() - {"dtype"}
    changes = {name: value for name, value in arguments.items() if name in known}
    drafter = ForeignDrafter.open(source, changes=changes, **hub)
    dropped = {*hub, *changes, *_FILES_ONLY, "force_download", "local_files_only"}
    kept = {name: value for name, value in arguments.items() if name not in dropped}
    return kept | {"config": drafter.config, "state_dict": drafter.state_dict()}
