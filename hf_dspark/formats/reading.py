"""A published config in `DSparkConfig` terms, whatever layout it has.

Contract: pure; `read_published` detects the layout and asks its reader. Tensors are not needed, but their names settle
what a config leaves open. Knows nothing about files.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

from . import deepspec, dflash_config, speculators
from .detect import NATIVE_MODEL_TYPE, OWN_FAMILIES, Detected, detect, refuse_autoregressive
from .fields import own_fields, wrong_types_refused

_READERS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    **dict.fromkeys(OWN_FAMILIES.values(), dict),
    "deepspec": deepspec.read,
    "speculators": speculators.read,
    "specforge": dflash_config.read_specforge,
    "model_optimizer": dflash_config.read_model_optimizer,
    "zlab": dflash_config.read_zlab,
}
_RENAMES: dict[str, Callable[[str], str]] = {
    "specforge": dflash_config.rename_specforge,
    "model_optimizer": dflash_config.rename_model_optimizer,
}
_NOTES: dict[str, Callable[[Mapping[str, Any]], list[str]]] = {
    "speculators": speculators.notes,
    "model_optimizer": dflash_config.notes,
    "zlab": dflash_config.notes,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """
    A published drafter as we call things.

    Attributes:
        detected ([`Detected`]): Its layout.
        fields (`dict[str, Any]`): Keywords for [`DSparkConfig`], `model_type` among them.
        rename (`Callable`): Our name of each of its tensors.
        notes (`list[str]`): What its user should know.
    """

    detected: Detected
    fields: dict[str, Any]
    rename: Callable[[str], str]
    notes: list[str]


def read_published(config: Mapping[str, Any], tensor_names: Collection[str] = ()) -> Reading:
    """
    Reads a published config.

    Raises:
        ValueError: It is of no layout that is read, contradicts itself, or asks for what is not built; the message
            says what was found.
    """
    with wrong_types_refused():
        detected = detect(config, tensor_names)
        fields = _READERS[detected.family](config)
        if detected.family not in OWN_FAMILIES.values():
            fields |= own_fields(config)  # `calibrate` adds its results to a folder of any layout
            fields |= {"model_type": NATIVE_MODEL_TYPE, "architectures": ["DSparkDrafter"]}
            if "sliding_attention" not in fields["layer_types"]:  # how it would slide says nothing
                fields = {name: value for name, value in fields.items() if not name.startswith("sliding_")}
        rename = _RENAMES.get(detected.family, str)
        notes = _NOTES.get(detected.family, lambda config: [])(config)
    return Reading(detected, fields, rename, notes)


def config_fields(config: dict[str, Any]) -> dict[str, Any]:
    """A published config as a `DSparkConfig` one; an empty one stays empty. `ValueError` for other kinds' configs."""
    if not config:
        return config
    reading = read_published(config)
    refuse_autoregressive(reading.detected)
    return reading.fields
