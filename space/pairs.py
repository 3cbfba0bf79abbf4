"""A target with its drafter: the embedded pair, or two ids from the Hub, loaded with checks that speak plainly.

Contract: `load_pair` returns a pair that fits together and is ready to decode, or raises [`PairError`] whose message a
visitor understands; it says what it is doing while it does. What fits no memory is refused before it is downloaded.
Folders of this machine are taken only where it is the visitor's own: not on a Space. No code of a repository is run,
and weights are read from safetensors alone: others are neither counted nor safe.
"""

import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_dspark.cli.mistakes import one_line
from hf_dspark.cli.models import load_drafter
from hf_dspark.demo import DemoAssetsError, load_demo_pair
from hf_dspark.formats.checkpoint import looks_local, read_config
from hf_dspark.modeling_drafter import Drafter
from hf_dspark.target import TargetView

Key = tuple[str, str]
"""Ids of a target and a drafter."""

EMBEDDED: Key = ("", "")
SPARE_MEMORY = 1.2  # loading takes more than the weights
_HUB_ID = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)


class PairError(RuntimeError):
    """A pair cannot be had; the message says why, in words for the visitor."""


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """
    Attributes:
        key (`tuple[str, str]`): Ids of target and drafter; empty for the embedded pair.
        target ([`~transformers.PreTrainedModel`]): The big model.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Its tokenizer.
        drafter ([`~hf_dspark.modeling_drafter.Drafter`]): The small one.
        warning (`str`): What a visitor should know about the pair; mostly empty.
    """

    key: Key
    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafter: Drafter
    warning: str = ""

    @property
    def num_drafts(self) -> int:
        """K, the most drafts a round."""
        return int(self.drafter.config.num_drafts)

    @property
    def has_confidence(self) -> bool:
        """Whether the drafter says how sure it is."""
        return self.drafter.confidence_head is not None

    @property
    def name(self) -> str:
        """What to call it."""
        return "SmolLM2-135M-Instruct with its drafter" if self.key == EMBEDDED else " with ".join(self.key)


def load_pair(key: Key, say: Callable[[str], None] = lambda words: None) -> Pair:
    """
    Loads a pair.

    Args:
        key (`tuple[str, str]`): Ids of target and drafter; [`EMBEDDED`] for the embedded pair.
        say (`Callable[[str], None]`, *optional*): Told what is being done.

    Raises:
        PairError: It cannot be loaded, or does not fit together or into memory.
    """
    if key == EMBEDDED:
        say("loading the embedded pair (the first time it is downloaded: 93 MB) …")
        try:
            target, tokenizer, drafter = load_demo_pair()
        except DemoAssetsError as error:
            raise PairError(str(error)) from error
        return Pair(key, target.to(_device()), tokenizer, drafter.to(_device()))
    target_id, drafter_id = key
    _check_name("target", target_id)
    _check_name("drafter", drafter_id)
    offline = False
    say("looking at the two repositories …")
    num_bytes = 0
    for role, source in (("target", target_id), ("drafter", drafter_id)):
        size = _num_bytes(role, source)
        if size == 0:
            raise PairError(
                f"The {role} {source} has no *.safetensors, and weights are read from those alone. Choose another one."
            )
        offline, num_bytes = offline or size is None, num_bytes + (size or 0)
    _check_memory(num_bytes)
    hub = {"local_files_only": True} if offline else {}
    try:
        if offline:
            read_config(target_id, **hub)  # says at once what is not there, without trying the Hub again and again
        say(f"loading the target {target_id} …")
        options = {"dtype": "auto", "use_safetensors": True, **hub}
        target = AutoModelForCausalLM.from_pretrained(target_id, **options).eval().to(_device())
        tokenizer = AutoTokenizer.from_pretrained(target_id, padding_side="left", **hub)
    except Exception as error:  # whatever a stranger's repository may bring about
        raise PairError(_why("target", target_id, error, offline)) from error
    try:
        say(f"loading the drafter {drafter_id} …")
        drafter = load_drafter(drafter_id, target)
        say("checking that they fit …")
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", UserWarning)
            TargetView(target, drafter)
    except Exception as error:
        raise PairError(_why("drafter", drafter_id, error, offline)) from error
    return Pair(key, target, tokenizer, drafter, "; ".join(str(warning.message) for warning in told))


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _check_name(role: str, source: str) -> None:
    if not source:
        raise PairError(f"Name a {role}: both boxes are needed, or none of them for the embedded pair.")
    if _HUB_ID.fullmatch(source) and not looks_local(source):  # loading would prefer a folder of that name
        return
    if "SPACE_ID" not in os.environ and (Path(source) / "config.json").is_file():
        return
    raise PairError(f"{source!r} is no Hub id of a {role}: it looks like owner/name and is no folder here.")


def _num_bytes(role: str, source: str) -> int | None:
    """Bytes of weights; `None` if the Hub cannot be asked, then only what was downloaded before can be loaded."""
    if Path(source).is_dir():
        return sum(path.stat().st_size for path in Path(source).glob("*.safetensors"))
    try:
        files = HfApi().model_info(source, files_metadata=True, timeout=10).siblings or []
    except HfHubHTTPError as error:
        raise PairError(f"The Hub has no {role} {source} that may be read from here ({one_line(error)}).") from error
    except Exception:  # no connection, in whatever words of the HTTP library
        return None
    return sum(file.size or 0 for file in files if file.rfilename.endswith(".safetensors"))


def _check_memory(num_bytes: int) -> None:
    available = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else psutil.virtual_memory().available
    if num_bytes * SPARE_MEMORY > available:
        raise PairError(
            f"These models have {num_bytes / 2**30:.1f} GiB of weights, but only {available / 2**30:.1f} GiB of "
            "memory are free here. Choose smaller ones."
        )


def _why(role: str, source: str, error: Exception, offline: bool) -> str:
    if offline and isinstance(error, OSError):
        return f"The Hub cannot be reached from here, and the {role} {source} was not downloaded before."
    return f"The {role} {source} cannot be used: {one_line(error)}"
