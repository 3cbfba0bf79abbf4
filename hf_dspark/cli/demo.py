"""`demo`: the embedded pair at work, plain and with its drafter, one prompt live and then a batch."""

import argparse
from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..auto import Auto
from ..comparison import Comparison, Run, timed_generate, warm_up
from ..demo import DEMO_PROMPTS, load_demo_pair
from ..scheduling import FixedLength, Scheduler
from ..terminal import LiveRounds, LiveStreamer, Terminal, comparison_table
from .arguments import SCHEDULERS, at_least, parse_scheduler


def add_demo_command(commands: Any) -> None:
    """`demo`: the embedded pair at work."""
    parser = commands.add_parser(
        "demo",
        help="watch a small model answer, plain and with its drafter",
        description="Answers a prompt twice, plain and with the drafter, then a batch of prompts, and compares.",
    )
    parser.add_argument("--prompt", default=DEMO_PROMPTS[0], help="what to ask (default: %(default)r)")
    parser.add_argument("--temperature", type=at_least(float, 0), default=0.0, help="0 (default) decodes greedily")
    parser.add_argument(
        "--batch", type=at_least(int, 1), default=8, help="rows of the batched run; 1 leaves it out (default: 8)"
    )
    parser.add_argument(
        "--scheduler",
        type=parse_scheduler,
        default=Auto(),
        help=f"drafts to verify in each round: {SCHEDULERS} (default: auto, for which step times are measured once)",
    )
    parser.add_argument("--max-new-tokens", type=at_least(int, 2), default=128, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="for sampling (default: %(default)s)")
    parser.add_argument("--threads", type=at_least(int, 1), help="CPU threads (default: torch's choice)")
    parser.add_argument("--no-color", action="store_true", help="write the answers without colours (also: NO_COLOR)")
    parser.set_defaults(run=run_demo)


def run_demo(args: argparse.Namespace) -> int:
    """Carries out `demo`."""
    terminal = Terminal(color=False if args.no_color else None)
    if args.threads:
        torch.set_num_threads(args.threads)
    logging.disable_progress_bar()  # loading the weights takes less time than reading its bar
    target, tokenizer, drafter = load_demo_pair()
    drafter = drafter.with_options(scheduler=args.scheduler)
    sampling = args.temperature > 0
    generation: dict[str, Any] = {"do_sample": sampling, "max_new_tokens": args.max_new_tokens}
    if sampling:
        generation["temperature"] = args.temperature

    def run(inputs: Mapping[str, torch.Tensor], **options: Any) -> Run:
        return timed_generate(target, inputs, seed=args.seed, **generation, **options)

    terminal.line(f"target SmolLM2-135M-Instruct, {_size(target)}; drafter {_size(drafter)}")
    terminal.line(f"prompt: {args.prompt}\n")
    inputs = _encode(tokenizer, [args.prompt])
    warm_up(target, inputs, drafter)
    terminal.heading("plain")
    plain = run(inputs, streamer=LiveStreamer(terminal, tokenizer))
    terminal.heading("\nwith the drafter")
    terminal.legend()
    live = LiveRounds(terminal, tokenizer)
    drafted = run(inputs, assistant_model=drafter.with_options(on_round=live.on_round))
    live.end(drafted.new_ids[0])
    comparisons = [Comparison(f"1 prompt, {_words(args.scheduler)}", plain, drafted)]

    if args.batch > 1:
        terminal.line(f"\nnow {args.batch} prompts at once, without showing them ...")
        prompts = list(islice(cycle([args.prompt, *DEMO_PROMPTS[1:]]), args.batch))
        inputs = _encode(tokenizer, prompts)
        warm_up(target, inputs, drafter)
        drafted = run(inputs, assistant_model=drafter)
        comparisons.append(Comparison(f"{args.batch} prompts, {_words(args.scheduler)}", run(inputs), drafted))

    decoding = f"temperature {args.temperature:g}, seed {args.seed}" if sampling else "greedy"
    terminal.line("\n" + "\n".join(comparison_table(comparisons, sampling=sampling)))
    terminal.line(
        f"on {target.device.type}, {str(target.dtype).removeprefix('torch.')}, threads: {torch.get_num_threads()}, "
        f"{decoding}, up to {args.max_new_tokens} new tokens; one run each after a warm-up, prefill included"
    )
    return 0


def _encode(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> Mapping[str, torch.Tensor]:
    """Prompts as one left-padded batch of chats that await their answer: `input_ids`, `attention_mask` `[R, S]`."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    )


def _size(model: PreTrainedModel) -> str:
    return f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.1f}M parameters"


def _words(scheduler: Scheduler) -> str:
    if isinstance(scheduler, FixedLength):
        return "whole block" if scheduler.length is None else f"{scheduler.length} drafts"
    return "auto" if scheduler == Auto() else str(scheduler)
