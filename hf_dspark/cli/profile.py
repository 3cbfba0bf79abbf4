"""`profile`: measures what decoding rounds take on this machine, prints a table and keeps the figures."""

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..demo import load_demo_pair
from ..machine import describe
from ..modeling_drafter import Drafter
from ..profile_cache import keep
from ..profiling import CONTEXTS, MAX_BATCH_TOKENS, profile_sps
from ..sps_profile import SPSProfile
from .arguments import at_least, refuse_lost_outputs
from .models import check_device, check_model_folders, load_drafter

DTYPES = ("float32", "bfloat16", "float16")


def add_profile_command(commands: Any) -> None:
    """`profile`: step times of a pair."""
    parser = commands.add_parser(
        "profile",
        help="measure what decoding rounds take on this machine",
        description="Measures the step times that schedulers weigh drafts against, of the embedded pair or of your "
        "models, and keeps them where `generate` finds them.",
    )
    parser.add_argument("--target", help="folder or Hub name of a target (default: the embedded pair)")
    parser.add_argument("--drafter", help="folder or Hub name of its drafter; without one only the target is measured")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="default: %(default)s")
    parser.add_argument("--device", default="cpu", help="where to measure: cpu, cuda, mps ... (default: %(default)s)")
    parser.add_argument("--threads", type=at_least(int, 1), help="CPU threads (default: torch's choice)")
    parser.add_argument(
        "--max-batch-tokens",
        type=at_least(int, 1),
        default=MAX_BATCH_TOKENS,
        help="largest verification, in tokens: rows * (drafts + 1) (default: %(default)s)",
    )
    parser.add_argument(
        "--contexts",
        type=at_least(int, 0),
        nargs="+",
        default=CONTEXTS,
        metavar="TOKENS",
        help=f"cached tokens of a row (default: {' '.join(map(str, CONTEXTS))})",
    )
    parser.add_argument("--output", type=Path, help="write the profile here, not into the cache")
    parser.add_argument("--plot", type=Path, help="draw it as PNG (needs matplotlib)")
    parser.add_argument("--sglang", type=Path, help="write it as SGLang's SPS table, too")
    parser.set_defaults(run=run_profile, refuse=parser.error)


def run_profile(args: argparse.Namespace) -> int:
    """Carries out `profile`."""
    _check_paths(args)
    if args.threads:
        torch.set_num_threads(args.threads)
    target, drafter = _load_pair(args)
    try:
        profile = profile_sps(target, drafter, max_batch_tokens=args.max_batch_tokens, contexts=tuple(args.contexts))
    except ValueError as error:  # a target that cannot be packed
        args.refuse(str(error))
    print("\n".join(profile_table(profile)))
    known = profile.description
    print(
        f"\n{known['target']}, {known['target_dtype']}, on {', '.join(known['target_devices'].values())}, "
        f"threads: {known['threads']}; measured in {known['measuring_seconds']:.0f} s, lower quartiles"
    )
    if args.output:
        profile.save(args.output)
    print(f"saved: {args.output or keep(describe(target, drafter), profile)}")
    if args.sglang:
        profile.to_sglang(args.sglang)
        print(f"SGLang's table: {args.sglang}")
    if args.plot:
        profile.plot(args.plot)
        print(f"picture: {args.plot}")
    return 0


def profile_table(profile: SPSProfile) -> list[str]:
    """Lines: for each measured size and context, what a drafted round takes; then plain rounds."""
    rows: list[tuple[str, ...]] = [
        ("tokens", "rows", "context", "ms a round", "of them verifying", "rounds/s", "verified tokens/s", "")
    ]
    for context in profile.contexts:
        for point in sorted(profile.verify_points, key=lambda point: (point.batch_tokens, point.num_requests)):
            if point.context != context:
                continue
            plain = point.num_requests == point.batch_tokens > 1
            seconds = profile.round_seconds(
                point.batch_tokens, context=context, num_requests=point.num_requests, drafted=not plain
            )
            verify = profile.verify_seconds(point.batch_tokens, context, point.num_requests)
            figures = (1000 * seconds, 1000 * verify, 1 / seconds, point.batch_tokens / seconds)
            sizes = (str(point.batch_tokens), str(point.num_requests), str(context))
            rows.append((*sizes, *(f"{figure:.1f}" for figure in figures), "plain" if plain else ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _check_paths(args: argparse.Namespace) -> None:
    """Refuses what would fail only after all was measured."""
    if args.drafter and not args.target:
        args.refuse("--drafter needs its --target")
    check_device(args)
    check_model_folders(args, drafters=[args.drafter] if args.drafter else [])
    refuse_lost_outputs(args)


def _load_pair(args: argparse.Namespace) -> tuple[PreTrainedModel, Drafter | None]:
    dtype = getattr(torch, args.dtype)
    if args.target is None:
        target, _, drafter = load_demo_pair(dtype=dtype)
        return target.to(args.device), drafter.to(args.device)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype).eval().to(args.device)
    if args.drafter is None:
        return target, None
    return target, load_drafter(args.drafter, target)
