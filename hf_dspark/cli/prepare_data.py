"""`prepare-data`: prompts answered by the target, as training data."""

import argparse
from pathlib import Path
from typing import Any

from ..demo import DRAFTER_FOLDER
from ..preparation import Sampling, prepare_data
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


def add_prepare_data_command(commands: Any) -> None:
    """`prepare-data`: the target's own answers."""
    parser = commands.add_parser(
        "prepare-data",
        help="have the target answer prompts, as training data",
        description="Writes a JSONL file with an answer of the target in each line, turn by turn where there are "
        "several. Called again with the same arguments it goes on where it stopped.",
    )
    add_prompt_arguments(parser)
    add_model_arguments(parser)
    parser.add_argument("--output", type=Path, required=True, help="the JSONL file")
    parser.add_argument(
        "--hold-out",
        type=at_least(int, 2),
        metavar="N",
        help="leave out rows 0, N, 2 N ..., to evaluate on them",
    )
    parser.add_argument("--split", help="split of a Hub dataset (default: train)")
    parser.add_argument("--config", help="configuration of a Hub dataset")
    parser.add_argument(
        "--drafter", help="folder or Hub name of a drafter, to be faster (default: the embedded one for its target)"
    )
    parser.add_argument("--no-drafter", action="store_true", help="decode without one")
    parser.add_argument(
        "--temperature", type=at_least(float, 0), nargs="+", default=[1.0], help="0 is greedy (default: 1)"
    )
    parser.add_argument("--top-p", type=float, help="default: none")
    parser.add_argument("--top-k", type=int, help="default: none")
    parser.add_argument("--samples", type=at_least(int, 1), default=1, help="answers at each temperature above 0")
    parser.add_argument("--max-new-tokens", type=at_least(int, 1), default=512, help="default: %(default)s")
    parser.add_argument("--batch-size", type=at_least(int, 1), default=16, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--system", metavar="TEXT", help="system message for conversations that have none")
    parser.set_defaults(run=run_prepare_data, refuse=parser.error)


def run_prepare_data(args: argparse.Namespace) -> int:
    """Carries out `prepare-data`."""
    if not args.output.parent.is_dir() or args.output.is_dir():
        args.refuse(f"--output {args.output}: name a file in a folder that is there")
    refuse_unwritable(args, args.output)
    check_device(args)
    check_model_folders(args, drafters=[args.drafter] if args.drafter else [])
    try:
        how = Sampling(
            temperatures=tuple(args.temperature),
            top_p=args.top_p,
            top_k=args.top_k,
            max_new_tokens=args.max_new_tokens,
            samples_per_prompt=args.samples,
            seed=args.seed,
        )
    except ValueError as error:
        args.refuse(str(error))
    prompt_sets = load_prompt_sets(args, hold_out=args.hold_out, split=args.split, config=args.config)
    target, tokenizer = load_target(args)
    source = args.drafter or (None if args.target else DRAFTER_FOLDER)
    drafter = None if source is None or args.no_drafter else load_drafter(source, target)
    try:
        done = prepare_data(
            target,
            tokenizer,
            prompt_sets,
            args.output,
            drafter=drafter,
            how=how,
            batch_size=args.batch_size,
            thinking=thinking(args),
            system=args.system,
        )
    except ValueError as error:  # another's file, other parameters
        args.refuse(str(error))
    except KeyboardInterrupt:
        print(f"\nstopped; the same command goes on with {args.output}", flush=True)
        raise
    skipped = f"; {done.num_skipped} conversations were too long for the target" if done.num_skipped else ""
    print(f"{done.path}: {done.num_answers} answers, {done.num_tokens} tokens{skipped}")
    return 0
