"""`calibrate`: fits the temperatures of a drafter's confidences on prompts, and writes the drafter with them."""

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..calibration import MIN_ROUNDS, calibrate, check_enough_prompts, evaluate_calibration, save_calibration
from ..calibration_report import CalibrationReport
from ..chats import prompt_ids
from ..configuration_dspark import CALIBRATED_MODES
from ..demo import DRAFTER_FOLDER, load_demo_target
from ..modeling_drafter import Drafter
from ..prompt_sets import Conversation, load_prompts
from ..whole_folders import replacing
from .arguments import at_least, refuse_lost_outputs
from .models import check_model_folders, load_drafter

MAX_PROMPT_CHARACTERS = 3000


def add_calibrate_command(commands: Any) -> None:
    """`calibrate`: confidences that come true."""
    parser = commands.add_parser(
        "calibrate",
        help="make a drafter's confidences come true",
        description="Decodes prompts that the drafter was not trained on, fits a temperature for each draft position "
        "(sequential temperature scaling) and writes the drafter with them. A prompt file holds one JSON object a "
        "line with `turns`, `prompt` or `messages`; first turns are used. At least "
        f"{MIN_ROUNDS} rounds that verify a whole block are needed for each mode (as a rule some hundred prompts).",
    )
    parser.add_argument("prompts", type=Path, nargs="+", help="JSONL files to fit on")
    parser.add_argument("--held-out", type=Path, nargs="+", metavar="FILE", help="JSONL files to measure on")
    parser.add_argument("--every", type=at_least(int, 1), default=1, metavar="N", help="take every N-th row ...")
    parser.add_argument("--offset", type=at_least(int, 0), default=0, metavar="M", help="... from row M on (fit)")
    parser.add_argument(
        "--held-out-offset", type=at_least(int, 0), default=0, metavar="M", help="... from row M on (held out)"
    )
    parser.add_argument("--limit", type=at_least(int, 1), help="rows of each file, at most")
    parser.add_argument("--target", help="folder or Hub name of the target (default: the embedded one)")
    parser.add_argument("--drafter", type=Path, help="folder of the drafter (default: the embedded one)")
    parser.add_argument("--output", type=Path, help="folder to write the calibrated drafter to")
    parser.add_argument("--force", action="store_true", help="replace --output if there is something in it")
    parser.add_argument("--plot", type=Path, help="draw reliability diagrams as PNG (needs matplotlib)")
    parser.add_argument("--sglang", type=Path, help="write SGLang's STS table, too; with two modes one file for each")
    parser.add_argument("--modes", nargs="+", choices=CALIBRATED_MODES, default=list(CALIBRATED_MODES))
    parser.add_argument("--temperature", type=positive, default=1.0, help="of sampled text (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=at_least(int, 2), default=128, help="default: %(default)s")
    parser.add_argument("--batch-size", type=at_least(int, 1), default=8, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="for sampling (default: %(default)s)")
    parser.add_argument("--threads", type=at_least(int, 1), help="CPU threads (default: torch's choice)")
    parser.set_defaults(run=run_calibrate, refuse=parser.error)


def run_calibrate(args: argparse.Namespace) -> int:
    """Carries out `calibrate`."""
    _check_paths(args)
    try:
        fitted = read_prompts(args.prompts, args.every, args.offset, args.limit)
        held_out_prompts = read_prompts(args.held_out or [], args.every, args.held_out_offset, args.limit)
    except (OSError, ValueError) as error:
        args.refuse(str(error))
    if args.threads:
        torch.set_num_threads(args.threads)
    target, tokenizer, drafter = _load(args)
    options: dict[str, Any] = {
        "modes": args.modes,
        "temperature": args.temperature,
        "max_new_tokens": args.max_new_tokens,
        "batch_size": args.batch_size,
        "seed": args.seed,
    }
    try:
        if held_out_prompts:  # or it would be refused only once the others were decoded
            check_enough_prompts(len(held_out_prompts), drafter, args.max_new_tokens)
        ids = [prompt_ids(tokenizer, conversation) for conversation in fitted]
        reports = calibrate(target, drafter, ids, dataset=_name(args.prompts), **options)
        shown = list(reports.values())
        _print("fitted on", shown)
        _write_results(args, drafter, reports)  # before more is decoded: nothing can take it back
        if held_out_prompts:
            ids = [prompt_ids(tokenizer, conversation) for conversation in held_out_prompts]
            held_out = evaluate_calibration(target, drafter, ids, dataset=_name(args.held_out), **options)
            shown = list(held_out.values())
            _print("held out", shown)
    except ValueError as error:  # no confidence head, too few rounds, models that do not fit
        args.refuse(str(error))
    if args.plot:
        from ..plots import plot_reliability

        plot_reliability(shown, args.plot)
        print(f"picture: {args.plot}")
    return 0


def read_prompts(paths: list[Path], every: int, offset: int, limit: int | None) -> list[Conversation]:
    """
    First turns of the chosen rows of JSONL files; those of more than 3000 characters are left out.

    Raises:
        ValueError: A line holds no prompt, or no row is left; the message says where.
        OSError: A file cannot be read.
    """
    options: dict[str, Any] = {"turns": 1, "max_characters": MAX_PROMPT_CHARACTERS}
    sets = [load_prompts(path, every=every, offset=offset, limit=limit, **options) for path in paths]
    return [conversation for prompts in sets for conversation in prompts.conversations]


def write_drafter(source: Path, output: Path, drafter: Drafter) -> None:
    """
    Copies a drafter folder, with the calibration of `drafter` in its config; in place if the two are the same.

    The weights are copied as they are. What lies at `output` is complete: the copy is made beside it and renamed.
    """
    if output.exists() and output.samefile(source):
        save_calibration(drafter, output)
        return
    with replacing(output) as work:
        shutil.copytree(source, work, dirs_exist_ok=True)
        save_calibration(drafter, work)


def positive(text: str) -> float:
    """A number above 0, for `argparse`."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0; greedy decoding is a mode of its own (--modes)")
    return number


def _check_paths(args: argparse.Namespace) -> None:
    """Refuses what would fail, or destroy something, only after all was decoded."""
    if args.target and not args.drafter:
        args.refuse("--target needs its --drafter")
    check_model_folders(args, drafters=[args.drafter] if args.drafter else [])
    if args.held_out and (args.offset - args.held_out_offset) % args.every == 0:
        if both := {path.resolve() for path in args.prompts} & {path.resolve() for path in args.held_out}:
            args.refuse(f"the same rows of {both.pop()} would be fitted and held out; see --every and the offsets")
    refuse_lost_outputs(args)
    if args.output and args.output.exists() and not args.force:
        if not args.output.is_dir() or any(args.output.iterdir()):
            args.refuse(f"--output {args.output} is there and not an empty folder; --force replaces it")
    if args.output and args.output.exists() and not args.output.is_dir():
        args.refuse(f"--output {args.output} is a file; name a folder")


def _load(args: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Drafter]:
    if args.target is None:
        target, tokenizer = load_demo_target()
    else:
        target = AutoModelForCausalLM.from_pretrained(args.target, dtype="auto").eval()
        tokenizer = AutoTokenizer.from_pretrained(args.target)
    folder = args.drafter or DRAFTER_FOLDER
    return target, tokenizer, load_drafter(folder, target)


def _write_results(args: argparse.Namespace, drafter: Drafter, reports: dict[str, CalibrationReport]) -> None:
    if args.output:
        write_drafter(args.drafter or DRAFTER_FOLDER, args.output, drafter)
        print(f"calibrated drafter: {args.output}")
    if args.sglang:
        for mode, report in reports.items():
            report.to_sglang(path := _of_mode(args.sglang, mode, len(reports)))
            print(f"SGLang's table: {path}")


def _name(paths: list[Path]) -> str:
    return ", ".join(path.stem for path in paths)


def _of_mode(path: Path, mode: str, num_modes: int) -> Path:
    return path if num_modes == 1 else path.with_name(f"{path.stem}.{mode}{path.suffix}")


def _print(what: str, reports: list[CalibrationReport]) -> None:
    for report in reports:
        print(f"{what}: {report}\n", flush=True)
