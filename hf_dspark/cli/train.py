"""`train`: trains a drafter as a recipe says, or tells what that would take."""

import argparse
import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .arguments import at_least


def add_train_command(commands: Any) -> None:
    """`train`: a drafter for a target."""
    parser = commands.add_parser(
        "train",
        help="train a drafter, or adapt one",
        description="Trains a drafter as a recipe says: a YAML file whose keys are those of PairArguments, "
        "DataArguments and DSparkTrainingArguments, the latter with all of transformers' TrainingArguments. With "
        "several processes: accelerate launch -m hf_dspark train RECIPE.",
    )
    parser.add_argument("recipe", type=Path, help="YAML file; see examples/recipes")
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="values in place of the recipe's, in YAML",
    )
    parser.add_argument("--output", type=Path, help="folder of the drafter and its checkpoints (output_dir)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint there")
    parser.add_argument("--dry-run", action="store_true", help="print what it would take; load no weights")
    parser.add_argument("--force", action="store_true", help="write into an output folder that holds something")
    parser.add_argument("--threads", type=at_least(int, 1), help="CPU threads (default: torch's choice)")
    parser.set_defaults(run=run_train, refuse=parser.error)


def run_train(args: argparse.Namespace) -> int:
    """Carries out `train`."""
    import torch

    with _errors_only("bitsandbytes"):  # transformers imports PEFT, and PEFT that; on some CPUs it misses a kernel
        from ..training.assembly import assemble, plan
    from ..training.checkpoints import remove_checkpoints
    from ..training.recipe import read_recipe

    if args.threads:
        torch.set_num_threads(args.threads)
    fixed = {"output_dir": str(args.output)} if args.output else {}
    try:
        recipe = read_recipe(args.recipe, args.overrides, **fixed)
        output = Path(recipe.training.output_dir or "")
        if args.dry_run:
            print("\n".join(plan_lines(plan(recipe))))
            return 0
        checkpoint = _checkpoint(args, output)
        trainer = assemble(recipe)
    except (OSError, ValueError, ImportError, NotImplementedError) as error:
        args.refuse(str(error))
    if args.force and checkpoint is None and recipe.training.should_save:
        remove_checkpoints(output)  # else --resume would go on with the run that was there
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
        if trainer.eval_dataset is not None:
            trainer.evaluate()
    except (OSError, ValueError, FloatingPointError, NotImplementedError) as error:
        print(f"error: {error}; no drafter was written", file=sys.stderr)
        return 1
    trainer.save_drafter(output)
    if recipe.training.should_save:
        kind = type(trainer.view.drafter).__name__
        print(f"drafter: {output}; use it with target.generate(..., assistant_model={kind}.from_pretrained(...))")
    return 0


@contextlib.contextmanager
def _errors_only(name: str) -> Iterator[None]:
    """Keeps a library's warnings back, but not its errors."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def plan_lines(found: Any) -> list[str]:
    """A [`~hf_dspark.training.assembly.TrainingPlan`] as lines to print."""
    mib = 2**20
    return [
        f"examples        {found.num_examples:,} ({found.num_skipped:,} skipped: too short to hold an anchor), "
        f"{found.num_eval_examples:,} held out",
        f"tokens          {found.num_tokens:,}, of them {found.num_supervised:,} to learn; "
        f"{100 * found.coverage:.1f} % of these can be drafted",
        f"drafter         {found.num_parameters:,} parameters, {found.num_trained:,} trained",
        f"steps           {found.num_steps:,}",
        f"checkpoint      {found.checkpoint_bytes:,} bytes ({found.checkpoint_bytes / mib:,.1f} MiB)",
        f"feature cache   {found.cache_bytes:,} bytes ({found.cache_bytes / mib:,.1f} MiB) on disk, if feature_cache "
        "is set; training online (the default) writes none",
    ]


def _checkpoint(args: argparse.Namespace, output: Path) -> str | None:
    """The checkpoint to go on from. Refuses to write over something."""
    if output.exists() and not output.is_dir():
        raise ValueError(f"{output} is a file; name a folder with --output")
    filled = output.is_dir() and any(output.iterdir())
    if args.resume:
        from ..training.checkpoints import last_checkpoint

        if (found := last_checkpoint(output)) is None:
            raise ValueError(f"--resume: there is no whole checkpoint in {output}; --force starts anew")
        return str(found)
    if filled and not args.force:
        raise ValueError(f"{output} holds something: --resume goes on with it, --force writes over it")
    return None
