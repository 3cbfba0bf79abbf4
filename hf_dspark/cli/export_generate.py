"""`export-generate`: writes a `custom_generate` folder, with which plain transformers decode with a drafter."""

import argparse
from pathlib import Path
from typing import Any


def add_export_generate_command(commands: Any) -> None:
    """`export-generate`: code for a repository."""
    parser = commands.add_parser(
        "export-generate",
        help="write a custom_generate folder",
        description="Writes custom_generate/generate.py, its requirements and a README. In a target's own folder or "
        "repository, models loaded from it with trust_remote_code=True decode with the drafter, and so does "
        "`transformers serve --trust-remote-code`; from any other one, model.generate(custom_generate=FOLDER, "
        "trust_remote_code=True) does.",
    )
    parser.add_argument("destination", type=Path, help="folder to write into")
    parser.add_argument(
        "--drafter",
        help="folder or Hub name of the drafter (default: the folder `drafter` beside the target's weights)",
    )
    parser.add_argument("--embed", action="store_true", help="copy the drafter's folder along, as `drafter`")
    parser.set_defaults(run=run_export_generate, refuse=parser.error)


def run_export_generate(args: argparse.Namespace) -> int:
    """Carries out `export-generate`."""
    from ..custom_generate import export_generate

    try:
        folder = export_generate(args.destination, drafter=args.drafter, embed=args.embed)
    except (OSError, ValueError) as error:
        args.refuse(str(error))
        raise  # `refuse` does not return
    print(f"written: {folder / 'custom_generate'} (README.md says how it is used)")
    return 0
