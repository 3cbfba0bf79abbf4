"""The command line: `python -m hf_dspark <command>`, also installed as `hf-dspark`.

Contract: parses arguments, calls the library and prints; whatever computes something lives elsewhere. A command is a
function that adds its parser, with `run` set to the function that carries it out; `COMMANDS` lists them. Mistakes of
the user are one line on stderr (see `mistakes.py`), everything else keeps its traceback.
"""

import argparse
import sys
from collections.abc import Sequence

from ..demo import DemoAssetsError
from .arguments import parse_scheduler
from .calibrate import add_calibrate_command
from .convert import add_convert_command
from .demo import add_demo_command
from .evaluate import add_evaluate_command
from .export_generate import add_export_generate_command
from .inspect import add_inspect_command
from .mistakes import is_mistake, one_line
from .prepare_data import add_prepare_data_command
from .profile import add_profile_command
from .publish import add_publish_command
from .train import add_train_command

__all__ = ["COMMANDS", "command_parser", "main", "parse_scheduler"]

COMMANDS = (
    add_demo_command,
    add_profile_command,
    add_prepare_data_command,
    add_train_command,
    add_calibrate_command,
    add_evaluate_command,
    add_inspect_command,
    add_convert_command,
    add_publish_command,
    add_export_generate_command,
)


def command_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(prog="hf-dspark", description="DSpark speculative decoding for transformers.")
    commands = parser.add_subparsers(title="commands", metavar="command", required=True)
    for add_command in COMMANDS:
        add_command(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that `argv` (default: the process's arguments) names; returns the exit status."""
    args = command_parser().parse_args(argv)
    try:
        return args.run(args)
    except DemoAssetsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if not is_mistake(error):
            raise
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 1
