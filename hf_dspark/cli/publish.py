"""`publish`: sends a drafter to the Hub with a model card, or writes the folder that would be sent."""

import argparse
import tempfile
from pathlib import Path
from typing import Any


def add_publish_command(commands: Any) -> None:
    """`publish`: a drafter, its card and its tables in one commit."""
    parser = commands.add_parser(
        "publish",
        help="send a drafter to the Hub, with a model card",
        description="Writes a model card from the drafter's config and from what was measured, and sends both in one "
        "commit: all of it or nothing. The token is the one that `hf auth login` stored, or HF_TOKEN.",
    )
    parser.add_argument("folder", type=Path, help="the drafter, as `train`, `calibrate` or save_pretrained wrote it")
    parser.add_argument("--repo", required=True, metavar="OWNER/NAME", help="repository; made if it does not exist")
    parser.add_argument("--evaluation", type=Path, help="evaluation.json of `evaluate`")
    parser.add_argument("--name", help="which drafter of the evaluation this is, if there are several")
    parser.add_argument(
        "--sps",
        type=Path,
        metavar="PROFILE.json",
        help="step times of this pair, as `profile --output` writes them: a table in the card, a picture (needs "
        "matplotlib), and SGLang's table",
    )
    parser.add_argument(
        "--target", help="folder or Hub name of the target: its config tells what memory the pair takes"
    )
    parser.add_argument("--data", metavar="TEXT", help="what it was trained on, in a sentence")
    parser.add_argument("--recipe", type=Path, help="the recipe it was trained with")
    parser.add_argument("--license", metavar="NAME", help="such as apache-2.0")
    parser.add_argument(
        "--private", action="store_true", default=None, help="if the repository is made: for you alone"
    )
    parser.add_argument("--revision", help="branch to commit to")
    parser.add_argument("--pull-request", action="store_true", help="open a pull request")
    parser.add_argument("--remote-code", action="store_true", help="add code with which AutoModel finds hf_dspark")
    parser.add_argument("--output", type=Path, help="write the folder here")
    parser.add_argument("--dry-run", action="store_true", help="only write the folder; nothing is sent")
    parser.set_defaults(run=run_publish, refuse=parser.error)


def run_publish(args: argparse.Namespace) -> int:
    """Carries out `publish`."""
    from ..hub import PublishError, publish

    if args.dry_run and not args.output:
        args.refuse("--dry-run needs --output, the folder to write")
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.output or Path(temporary) / "drafter"
        try:
            _write(args, folder)
        except (OSError, ValueError, ImportError) as error:
            args.refuse(str(error))
        names = ", ".join(sorted(path.name for path in folder.iterdir()))
        if args.dry_run:
            print(f"written, not sent: {folder} ({names})")
            return 0
        try:
            url = publish(folder, args.repo, private=args.private, revision=args.revision, create_pr=args.pull_request)
        except PublishError as error:
            args.refuse(str(error))
            raise  # `refuse` does not return
    print(f"published: {url} ({names})")
    return 0


def _write(args: argparse.Namespace, folder: Path) -> None:
    """Writes the folder, card included."""
    from ..evaluation import Evaluation
    from ..formats.plan import drafter_class
    from ..formats.serve_readme import SPS_FILE
    from ..hub import checked_config, publishable_folder
    from ..model_card import SPS_PICTURE, CardFigures, model_card

    kind = drafter_class(checked_config(args.folder)["model_type"])
    config = kind.config_class.from_pretrained(args.folder)
    profile = None if args.sps is None else _step_times(args.sps, config)
    figures = CardFigures(
        evaluation=None if args.evaluation is None else Evaluation.load(args.evaluation),
        drafter_name=args.name,
        sps_profile=profile,
        has_sps_files=profile is not None,
        memory=None if args.target is None else _memory(kind, config, args.target),
        data=args.data,
        recipe=None if args.recipe is None else args.recipe.read_text(encoding="utf-8"),
        license=args.license,
    )
    publishable_folder(args.folder, folder, model_card(config, args.repo, figures), remote_code=args.remote_code)
    if profile is not None:
        profile.plot(folder / SPS_PICTURE)
        profile.to_sglang(folder / SPS_FILE)


def _step_times(path: Path, config: Any) -> Any:
    """The profile in a file; refused if it is none, is not of this pair, or could not be drawn."""
    from ..plots import new_figure
    from ..sps_profile import SPSProfile

    profile = SPSProfile.load(path)
    if profile.block_size != config.num_drafts:
        raise ValueError(
            f"--sps {path}: measured with {profile.block_size} drafts a round, but this drafter has "
            f"{config.num_drafts}; measure it with `hf-dspark profile --target ... --drafter ... --output ...`"
        )
    measured = profile.description.get("target_fingerprint")
    if measured and config.target_fingerprint and measured != config.target_fingerprint:
        raise ValueError(f"--sps {path}: measured with another target than the one this drafter was trained for")
    new_figure()
    return profile


def _memory(kind: Any, config: Any, target: str) -> Any:
    """What the pair takes, from the two configs alone."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    target_config = AutoConfig.from_pretrained(target)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(target_config, dtype=target_config.dtype or torch.float32)
        drafter = kind(config).to(config.dtype or model.dtype)
    return drafter.memory_report(model)
