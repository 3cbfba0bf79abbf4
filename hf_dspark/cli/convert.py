"""`convert`: writes a drafter in another layout, with a README that says how to serve it."""

import argparse
from pathlib import Path
from typing import Any

from .inspect import add_hub_arguments, hub_options
from .mistakes import one_line

LAYOUTS = ("native", "deepspec", "speculators")


def add_convert_command(commands: Any) -> None:
    """`convert`: any layout to another."""
    parser = commands.add_parser(
        "convert",
        help="write a drafter in another layout",
        description="Writes a drafter of any layout that is read as hf_dspark's own (native), as DeepSpec's (vLLM, "
        "SGLang, llama.cpp) or as speculators' (vLLM). Tensors are copied bit by bit. The folder has a README with "
        "the commands that serve it, and SGLang's tables of temperatures and step times where they are known.",
    )
    parser.add_argument("source", help="folder or Hub name of the drafter")
    parser.add_argument("destination", type=Path, help="folder to write")
    parser.add_argument("--to", choices=LAYOUTS, required=True, help="layout to write")
    parser.add_argument(
        "--target",
        help="folder or Hub name of the target; with --to deepspec its embeddings and LM head are copied along",
    )
    parser.add_argument("--sps", type=Path, help="step times of the serving machine (`profile`, or SGLang's table)")
    parser.add_argument("--force", action="store_true", help="replace the destination if there is something in it")
    add_hub_arguments(parser)
    parser.set_defaults(run=run_convert, refuse=parser.error)


def run_convert(args: argparse.Namespace) -> int:
    """Carries out `convert`."""
    from ..formats.convert import convert

    try:
        done = convert(
            args.source,
            args.destination,
            to=args.to,
            target=args.target,
            sps=args.sps,
            force=args.force,
            **hub_options(args),
        )
    except (OSError, ValueError) as error:
        args.refuse(one_line(error))
        raise  # `refuse` does not return
    print(f"{done.source} -> {done.layout}: {done.num_tensors} tensors, {done.num_bytes / 2**20:,.1f} MiB")
    if done.copies:
        print(f"with copies of the target's {', '.join(done.copies)}")
    for note in done.notes:
        print(f"note: {note}")
    print(f"written: {done.folder} (README.md says how to serve it)")
    return 0
