"""`inspect`: says what a published drafter is, from its config and the headers of its files."""

import argparse
from typing import Any

from .mistakes import one_line


def add_inspect_command(commands: Any) -> None:
    """`inspect`: layout, heads and size of a drafter."""
    parser = commands.add_parser(
        "inspect",
        help="say what a published drafter is",
        description="Detects the layout of a drafter (hf_dspark, DeepSpec, NeMo, speculators, SpecForge, "
        "Model-Optimizer, DFlash) and prints what it is. Nothing is loaded; of a repository on the Hub only headers "
        "are fetched.",
    )
    parser.add_argument("drafter", help="folder or Hub name")
    add_hub_arguments(parser)
    parser.set_defaults(run=run_inspect, refuse=parser.error)


def add_hub_arguments(parser: argparse.ArgumentParser) -> None:
    """Where on the Hub a drafter is."""
    parser.add_argument("--revision", help="branch, tag or commit on the Hub")
    parser.add_argument("--subfolder", help="folder inside the repository")


def hub_options(args: argparse.Namespace) -> dict[str, Any]:
    """What those arguments stand for."""
    return {name: value for name in ("revision", "subfolder") if (value := getattr(args, name)) is not None}


def run_inspect(args: argparse.Namespace) -> int:
    """Carries out `inspect`."""
    from ..formats.description import describe_drafter

    try:
        print(describe_drafter(args.drafter, **hub_options(args)))
    except (OSError, ValueError) as error:
        args.refuse(one_line(error))
    return 0
