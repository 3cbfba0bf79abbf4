"""Arguments that say which models and which rows of prompts a command works on, and what they stand for.

Contract: adds arguments to a parser, and turns what was parsed into models and prompt sets; whatever is wrong with it
is refused before anything long begins.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..demo import load_demo_target
from ..formats import loading
from ..formats.checkpoint import looks_local, read_config
from ..formats.detect import UnknownLayout, detect
from ..modeling_drafter import Drafter
from ..prompt_sets import HUB_SETS, PromptSet, load_prompts
from .arguments import at_least
from .mistakes import one_line

DTYPES = ("auto", "float32", "bfloat16", "float16")
THINKING = {"on": True, "off": False}


def add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    """Prompts, and which of them."""
    parser.add_argument(
        "prompts",
        nargs="+",
        metavar="PROMPTS",
        help="JSONL files with `turns`, `prompt` or `messages` in each row; Hub datasets (owner/name); or "
        f"{', '.join(HUB_SETS)} (from the Hub, needs the package datasets)",
    )
    parser.add_argument("--every", type=at_least(int, 1), default=1, metavar="N", help="take every N-th row ...")
    parser.add_argument("--offset", type=at_least(int, 0), default=0, metavar="M", help="... from row M on")
    parser.add_argument("--limit", type=at_least(int, 1), help="rows of each set, at most")
    parser.add_argument("--first-turn", action="store_true", help="only the first turn of each conversation")
    parser.add_argument("--max-characters", type=at_least(int, 1), metavar="N", help="leave out longer prompts")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The target, where it runs, and its thinking."""
    parser.add_argument("--target", help="folder or Hub name of the target (default: the embedded one)")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="default: the target's own")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, mps ... (default: %(default)s)")
    parser.add_argument("--threads", type=at_least(int, 1), help="CPU threads (default: torch's choice)")
    parser.add_argument("--thinking", choices=tuple(THINKING), help="tell the chat template (default: its own choice)")


def load_prompt_sets(args: argparse.Namespace, **options: Any) -> list[PromptSet]:
    """What the prompt arguments stand for; refused if a set cannot be read."""
    turns = 1 if args.first_turn else None
    chosen = {"every": args.every, "offset": args.offset, "limit": args.limit, "max_characters": args.max_characters}
    try:
        return [load_prompts(source, turns=turns, **chosen, **options) for source in args.prompts]
    except (OSError, ValueError, ImportError) as error:  # ConnectionError is an OSError
        args.refuse(str(error))
        raise  # `refuse` does not return


def check_device(args: argparse.Namespace) -> None:
    """Refuses a `--device` that is not there."""
    try:
        torch.empty(0, device=args.device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # unknown, not built in, not plugged in
        args.refuse(f"--device {args.device}: {(str(error).splitlines() or ['it is not there'])[0]}")


def check_model_folders(args: argparse.Namespace, *, drafters: Iterable[str | Path] = ()) -> None:
    """
    Refuses a `--target` and drafters that are no model's folder, or that of the other kind.

    Only what lies on this machine is looked at; whether the Hub has a name turns out when it is asked.
    """
    named = [("--target", args.target)] if args.target else []
    for option, source in named + [("--drafter", source) for source in drafters]:
        if not looks_local(source) and (option == "--target" or "/" in str(source)):
            continue  # a drafter on the Hub has an owner
        if option == "--drafter" and not (Path(source) / "config.json").is_file():
            args.refuse(f"{option} {source}: there is no folder with a config.json")
        try:
            is_drafter = _is_drafter(config := read_config(source))
        except (OSError, ValueError) as error:
            args.refuse(f"{option} {source}: {one_line(error)}")
            raise  # `refuse` does not return
        if is_drafter != (option == "--drafter"):
            found, needed = ("a drafter", "target") if is_drafter else ("no drafter", "drafter")
            args.refuse(f"{option} {source}: it is {found} ({_words(config)}); name the {needed} here")


def _is_drafter(config: dict[str, Any]) -> bool:
    try:
        detect(config)
    except UnknownLayout:
        return False
    return True


def _words(config: dict[str, Any]) -> str:
    named = {key: config[key] for key in ("model_type", "architectures") if config.get(key)}
    return ", ".join(f"{key} {value!r}" for key, value in named.items()) or "its config.json names no model"


def load_target(args: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The target and its tokenizer."""
    check_device(args)
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.target is None:
        dtype = torch.float32 if args.dtype == "auto" else getattr(torch, args.dtype)
        target, tokenizer = load_demo_target(dtype=dtype)
        return target.to(args.device), tokenizer
    dtype = args.dtype if args.dtype == "auto" else getattr(torch, args.dtype)
    try:
        target = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype).eval().to(args.device)
        return target, AutoTokenizer.from_pretrained(args.target)
    except OSError as error:  # the Hub's messages do not always say what was asked for
        raise OSError(f"--target {args.target}: {error}") from error


def load_drafter(source: str | Path, target: PreTrainedModel) -> Drafter:
    """A drafter for `target`, of the kind that its config says."""
    return loading.load_drafter(source, dtype=target.dtype).eval().to(target.device)


def thinking(args: argparse.Namespace) -> bool | None:
    """What `--thinking` stands for."""
    return None if args.thinking is None else THINKING[args.thinking]
