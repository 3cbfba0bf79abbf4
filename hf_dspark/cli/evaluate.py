"""`evaluate`: what drafters are worth on sets of prompts, as tables, JSON and pictures."""

import argparse
from pathlib import Path
from typing import Any

from ..demo import DRAFTER_FOLDER
from ..evaluation import THRESHOLDS, Evaluation, evaluate
from ..evaluation_report import earlier_report, markdown_report, remove_report, write_report
from ..modeling_drafter import Drafter
from .arguments import at_least, refuse_unwritable
from .models import (
    add_model_arguments,
    add_prompt_arguments,
    check_device,
    check_model_folders,
    load_drafter,
    load_prompt_sets,
    load_target,
    thinking,
)

SPEED_PROMPTS = 8


def add_evaluate_command(commands: Any) -> None:
    """`evaluate`: acceptance of drafters."""
    parser = commands.add_parser(
        "evaluate",
        help="measure what drafters are worth on sets of prompts",
        description="Decodes prompts with whole blocks verified and tells how much of them was accepted: per set and "
        "temperature, at each draft, by length of the text, and what thresholds on the confidence would do. Take "
        "prompts that the drafters were not trained on.",
    )
    add_prompt_arguments(parser)
    add_model_arguments(parser)
    parser.add_argument(
        "--drafter",
        action="append",
        metavar="[NAME=]FOLDER",
        help="folder or Hub name of a drafter; again for each to compare (default: the embedded one)",
    )
    parser.add_argument(
        "--temperature", type=at_least(float, 0), nargs="+", action="extend", help="0 is greedy (default: 0 and 1)"
    )
    parser.add_argument("--threshold", type=at_least(float, 0), nargs="+", default=list(THRESHOLDS), metavar="C")
    parser.add_argument("--max-new-tokens", type=at_least(int, 2), default=256, help="default: %(default)s")
    parser.add_argument("--batch-size", type=at_least(int, 1), default=8, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="for sampling (default: %(default)s)")
    parser.add_argument(
        "--speed",
        type=at_least(int, 1),
        nargs="?",
        const=SPEED_PROMPTS,
        default=0,
        metavar="PROMPTS",
        help="measure tokens/s, too, plain and with the drafter's own scheduler, on so many prompts of each set "
        f"(default: {SPEED_PROMPTS})",
    )
    parser.add_argument("--allow-random", action="store_true", help="take prompts that are random tokens, too")
    parser.add_argument("--output", type=Path, help="folder for evaluation.json and evaluation.md")
    parser.add_argument("--force", action="store_true", help="replace an earlier evaluation in --output")
    parser.add_argument("--plot", action="store_true", help="draw PNGs into --output, too (needs matplotlib)")
    parser.set_defaults(run=run_evaluate, refuse=parser.error)


def run_evaluate(args: argparse.Namespace) -> int:
    """Carries out `evaluate`."""
    sources = _drafter_sources(args)
    check_device(args)
    check_model_folders(args, drafters=sources.values())
    _check_output(args)
    prompt_sets = load_prompt_sets(args)
    target, tokenizer = load_target(args)
    drafters: dict[str, Drafter] = {name: load_drafter(source, target) for name, source in sources.items()}
    if args.output:
        remove_report(args.output)  # only now: models that cannot be loaded takes nothing away

    def keep(so_far: Evaluation) -> None:
        latest = so_far.results[-1]
        print(
            f"{latest.drafter}, {latest.dataset}, T = {latest.temperature:g}: accepted length "
            f"{latest.accepted_length:.2f} with the target's token, {latest.accepted_drafts:.2f} without; "
            f"{latest.num_rounds} rounds, repetition {latest.repetition_share:.1%}",
            flush=True,
        )
        if args.output:  # whatever is finished stays if the rest is interrupted
            write_report(so_far, args.output)

    try:
        found = evaluate(
            target,
            drafters,
            prompt_sets,
            tokenizer=tokenizer,
            temperatures=tuple(dict.fromkeys(args.temperature or (0.0, 1.0))),
            max_new_tokens=args.max_new_tokens,
            batch_size=args.batch_size,
            thresholds=args.threshold,
            thinking=thinking(args),
            seed=args.seed,
            speed_prompts=args.speed,
            allow_random=args.allow_random,
            on_result=keep,
        )
    except ValueError as error:  # random prompts, models that do not fit
        args.refuse(str(error))
    print("\n" + markdown_report(found))
    if args.output:
        print("\nwritten: " + ", ".join(map(str, write_report(found, args.output, plot=args.plot))))
    return 0


def _drafter_sources(args: argparse.Namespace) -> dict[str, str | Path]:
    """Name of each drafter and where it is."""
    if not args.drafter:
        if args.target:
            args.refuse("--target needs its --drafter")
        return {"demo": DRAFTER_FOLDER}
    sources: dict[str, str | Path] = {}
    for text in args.drafter:
        name, equals, source = text.partition("=")
        if not equals:
            name, source = Path(text).name, text
        if not name or not source:
            args.refuse(f"--drafter {text!r}: expected FOLDER or NAME=FOLDER")
        if name in sources:
            args.refuse(f"--drafter: two drafters are named {name!r}; say --drafter NAME=FOLDER")
        sources[name] = source
    return sources


def _check_output(args: argparse.Namespace) -> None:
    """Refuses what would fail only after all was decoded."""
    if args.plot:
        if not args.output:
            args.refuse("--plot needs --output, the folder to draw into")
        from ..plots import new_figure

        try:
            new_figure()
        except ImportError as error:
            args.refuse(f"--plot: {error}")
    if args.output:
        if not args.force and (found := earlier_report(args.output)):
            args.refuse(f"--output {args.output} holds an evaluation ({found[0].name}); --force replaces it")
        refuse_unwritable(args, args.output)
        try:
            args.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            args.refuse(f"--output {args.output}: {error}")
