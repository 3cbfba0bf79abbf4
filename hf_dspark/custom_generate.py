"""A `custom_generate` folder: transformers' own way to let a repository decode in its own manner.

Contract: writes `custom_generate/generate.py` with `requirements.txt`, and a README with the Hub's tag. Put into a
target's repository, `from_pretrained(..., trust_remote_code=True)` decodes with the drafter, and so does
`transformers serve --trust-remote-code`; elsewhere `model.generate(custom_generate=FOLDER, trust_remote_code=True)`
does. The written code is a few lines: it calls `generate_with`, which hands the drafter to `generate` itself.
"""

import os
import shutil
import threading
import weakref
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from transformers import PreTrainedModel

from .formats.loading import load_drafter
from .hub import FILES, checked_config
from .model_card import LIBRARY, PACKAGE
from .modeling_drafter import Drafter

DRAFTER_FOLDER = "drafter"  # in a target's repository
TAG = "custom_generate"

_GENERATE = '''"""Speculative decoding with a DSpark drafter, where a call has no assistant of its own."""

try:
    from hf_dspark.custom_generate import generate_with
except ImportError as error:
    raise ImportError("this custom_generate needs the package hf_dspark: pip install {package}") from error

DRAFTER = {drafter!r}  # a folder or a Hub repository; None: the folder "{folder}" of the model's own repository


def generate(inputs=None, *args, model=None, **kwargs):
    return generate_with(DRAFTER, model, inputs, *args, **kwargs)
'''

_README = """---
{metadata}
---

# Speculative decoding with DSpark

`generate` takes several tokens a step, with the model's text unchanged. It needs `pip install {package}`.

{use}

## Arguments

Those of `generate`, and

- `drafter` (*optional*): folder or Hub name of a drafter, or a drafter; in place of {standard}.

Decoding with an `assistant_model` of your own, or with beams, is `generate` as ever.
"""


_LOADED: "weakref.WeakKeyDictionary[PreTrainedModel, dict[str | None, Drafter]]" = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def generate_with(
    source: str | None,
    model: PreTrainedModel,
    inputs: Any = None,
    *args: Any,
    drafter: Drafter | str | None = None,
    **kwargs: Any,
) -> Any:
    """
    `model.generate` with a drafter as its assistant; what the written code calls.

    Args:
        source (`str`, *optional*): Where the drafter is, if the call names no other: a folder, or a name on the Hub.
            `None`: the folder `drafter` of the model's own repository. Loaded once for each model.
        model ([`~transformers.PreTrainedModel`]): The target.
        inputs, args, kwargs: As in `generate`. An `assistant_model` of the call's own, and beams, are left alone.
        drafter ([`Drafter`] or `str`, *optional*): Another drafter, or where it is.
    """
    kwargs.pop("trust_remote_code", None)
    kwargs.pop("custom_generate", None)
    if kwargs.get("assistant_model") is None:
        kwargs["assistant_model"] = drafter if isinstance(drafter, Drafter) else _loaded(drafter or source, model)
    return type(model).generate(model, inputs, *args, **kwargs)  # `model.generate` may be what called this


def _loaded(source: str | None, model: PreTrainedModel) -> Drafter:
    with _LOCK:
        loaded = _LOADED.setdefault(model, {})
        if source not in loaded:
            place: dict[str, str] = {}
            if source is None:
                place["subfolder"] = DRAFTER_FOLDER
                if commit := getattr(model.config, "_commit_hash", None):  # of one piece with the model
                    place["revision"] = commit
            name = model.config._name_or_path if source is None else source
            home = "cpu" if model.device.type == "meta" else model.device  # the model is offloaded
            loaded[source] = load_drafter(name, dtype=model.dtype, **place).eval().to(home)
        return loaded[source]


def export_generate(
    destination: str | os.PathLike, *, drafter: str | os.PathLike | None = None, embed: bool = False
) -> Path:
    """
    Writes a `custom_generate` folder.

    Args:
        destination (`str` or `os.PathLike`): A folder; a target's own, or one that is made. What is written is
            `custom_generate`, `drafter` and, if there is none yet, README.md.
        drafter (`str` or `os.PathLike`, *optional*): What to decode with: a folder, or `owner/name` on the Hub.
            `None`: the folder `drafter` of the model's own repository.
        embed (`bool`, *optional*, defaults to `False`): Copy the drafter's folder into the destination, as `drafter`.

    Returns:
        `Path`: The destination.

    Raises:
        ValueError: `embed` without a folder of a drafter, or there is a `custom_generate` already.
    """
    destination = Path(destination)
    if (destination / TAG).exists():
        raise ValueError(f"{destination / TAG} is there already; remove it, or name another folder")
    source = _source(drafter, embed)
    if embed and drafter is not None:
        config = Path(drafter) / "config.json"
        (destination / DRAFTER_FOLDER).mkdir(parents=True, exist_ok=True)
        for path in (config, *(path for pattern in FILES for path in sorted(Path(drafter).glob(pattern)))):
            shutil.copyfile(path, destination / DRAFTER_FOLDER / path.name)
    code = _GENERATE.format(package=PACKAGE, drafter=source, folder=DRAFTER_FOLDER)
    (destination / TAG).mkdir(parents=True)
    (destination / TAG / "generate.py").write_text(code, encoding="utf-8")
    (destination / TAG / "requirements.txt").write_text(f"{PACKAGE}\n", encoding="utf-8")
    if not (destination / "README.md").exists():
        (destination / "README.md").write_text(_readme(source), encoding="utf-8")
    return destination


def _source(drafter: str | os.PathLike | None, embed: bool) -> str | None:
    """What the code is to load: a full path, a name on the Hub, or `None` for the folder beside it."""
    is_folder = drafter is not None and Path(drafter).is_dir()
    if embed and not is_folder:
        raise ValueError(f"copying the drafter along needs its folder, got {drafter!r}")
    if drafter is None:
        return None
    if is_folder:
        checked_config(Path(drafter))
        return None if embed else str(Path(drafter).resolve())
    return str(drafter)


def _readme(source: str | None) -> str:
    if source is None:
        standard = f"the one in the folder `{DRAFTER_FOLDER}` of the model's repository"
        use = (
            "```python\nmodel = AutoModelForCausalLM.from_pretrained(REPOSITORY, trust_remote_code=True)\n"
            "output = model.generate(**inputs, max_new_tokens=128)\n```\n\n"
            "or `transformers serve --trust-remote-code`. REPOSITORY is the one that holds this folder."
        )
    else:
        standard = f"`{source}`"
        use = (
            "```python\noutput = model.generate(\n    **inputs, custom_generate=FOLDER, trust_remote_code=True, "
            "max_new_tokens=128\n)\n```\n\nFOLDER is this one, or its repository on the Hub."
        )
    metadata = ModelCardData(library_name="transformers", tags=[TAG, LIBRARY, "speculative-decoding"]).to_yaml()
    return _README.format(metadata=metadata, package=PACKAGE, use=use, standard=standard)
