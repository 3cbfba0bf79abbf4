"""The command line: `python -m hf_dspark <command>`, also installed as `hf-dspark`.

Contract: parses arguments, calls the library and prints; whatever computes something lives elsewhere. A command is a
function that adds its parser, with `run` set to the function that carries it out; `COMMANDS` lists them.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from .comparison import Comparison, Run, timed_generate, warm_up
from .demo import DEMO_PROMPTS, DemoAssetsError, load_demo_pair
from .scheduling import ConfidenceThreshold, FixedLength, Scheduler
from .terminal import LiveRounds, LiveStreamer, Terminal, comparison_table

# Measured best on the demo pair on two CPU cores: verifying 8 rows of 1 + 3 tokens costs little more than 8 tokens.
BATCH_SCHEDULER = FixedLength(3)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that `argv` (default: the process's arguments) names; returns the exit status."""
    parser = argparse.ArgumentParser(prog="hf-dspark", description="DSpark speculative decoding for transformers.")
    commands = parser.add_subparsers(title="commands", metavar="command", required=True)
    for add_command in COMMANDS:
        add_command(commands)
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except DemoAssetsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def parse_scheduler(text: str) -> Scheduler:
    """`"fixed"`, `"fixed:3"` or `"threshold:0.5"` as a scheduler, for `argparse`."""
    name, _, value = text.partition(":")
    try:
        if name == "fixed":
            return FixedLength(int(value) if value else None)
        if name == "threshold":
            return ConfidenceThreshold(float(value))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    raise argparse.ArgumentTypeError(f"{text!r} is not a scheduler; use fixed, fixed:DRAFTS or threshold:CONFIDENCE")


def add_demo_command(commands: Any) -> None:
    """`demo`: the embedded pair at work."""
    parser = commands.add_parser(
        "demo",
        help="watch a small model answer, plain and with its drafter",
        description="Answers a prompt twice, plain and with the drafter, then a batch of prompts, and compares.",
    )
    parser.add_argument("--prompt", default=DEMO_PROMPTS[0], help="what to ask (default: %(default)r)")
    parser.add_argument("--temperature", type=_at_least(float, 0), default=0.0, help="0 (default) decodes greedily")
    parser.add_argument(
        "--batch", type=_at_least(int, 1), default=8, help="rows of the batched run; 1 leaves it out (default: 8)"
    )
    parser.add_argument(
        "--scheduler",
        type=parse_scheduler,
        help="drafts to verify in each round: fixed, fixed:DRAFTS or threshold:CONFIDENCE (default: the whole block "
        f"for one prompt, fixed:{BATCH_SCHEDULER.length} for the batch)",
    )
    parser.add_argument("--max-new-tokens", type=_at_least(int, 2), default=128, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="for sampling (default: %(default)s)")
    parser.add_argument("--threads", type=_at_least(int, 1), help="CPU threads (default: torch's choice)")
    parser.add_argument("--no-color", action="store_true", help="write the answers without colours (also: NO_COLOR)")
    parser.set_defaults(run=run_demo)


def run_demo(args: argparse.Namespace) -> int:
    """Carries out `demo`."""
    terminal = Terminal(color=False if args.no_color else None)
    if args.threads:
        torch.set_num_threads(args.threads)
    logging.disable_progress_bar()  # loading the weights takes less time than reading its bar
    target, tokenizer, drafter = load_demo_pair()
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
    scheduler = args.scheduler or FixedLength()
    drafted = run(inputs, assistant_model=drafter.with_options(scheduler=scheduler, on_round=live.on_round))
    live.end(drafted.new_ids[0])
    comparisons = [Comparison(f"1 prompt, {_words(scheduler)}", plain, drafted)]

    if args.batch > 1:
        terminal.line(f"\nnow {args.batch} prompts at once, without showing them ...")
        prompts = list(islice(cycle([args.prompt, *DEMO_PROMPTS[1:]]), args.batch))
        inputs, scheduler = _encode(tokenizer, prompts), args.scheduler or BATCH_SCHEDULER
        warm_up(target, inputs, drafter)
        drafted = run(inputs, assistant_model=drafter.with_options(scheduler=scheduler))
        comparisons.append(Comparison(f"{args.batch} prompts, {_words(scheduler)}", run(inputs), drafted))

    decoding = f"temperature {args.temperature:g}, seed {args.seed}" if sampling else "greedy"
    terminal.line("\n" + "\n".join(comparison_table(comparisons, sampling=sampling)))
    terminal.line(
        f"on {target.device.type}, {str(target.dtype).removeprefix('torch.')}, threads: {torch.get_num_threads()}, "
        f"{decoding}, up to {args.max_new_tokens} new tokens; one run each after a warm-up, prefill included"
    )
    return 0


COMMANDS = (add_demo_command,)


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
    return str(scheduler)


def _at_least(kind: Callable[[str], float], minimum: float) -> Callable[[str], float]:
    """A number for `argparse` that is not below `minimum`."""

    def parse(text: str) -> float:
        number = kind(text)
        if number < minimum:
            raise argparse.ArgumentTypeError(f"{text} is below {minimum}")
        return number

    return parse
