"""Replay verify-length policies on recorded or made-up acceptances, against measured or made-up costs.

    python examples/scheduler_simulation.py record prompts/gsm8k.jsonl --output recording.npz
    python examples/scheduler_simulation.py replay recording.npz --curve measured gpu --batch 1 8 32
    python examples/scheduler_simulation.py replay --synthetic paper --curve gpu --plot scheduler.png

`record` decodes held-out prompts (rows with index % 10 == 0 of each file, a JSON object with `turns` a line) once,
greedily, and notes at every token what the drafter proposes and how much of it would stand. `replay` needs no model:
it drives the policies that decode, and charges each round by the curve. Every policy is shown against plain decoding,
the best fixed length, and two oracles: one that knows before each round all confidences, and one that knows what
will be accepted.
"""

import argparse
import json
import math
import sys
from pathlib import Path

from simulation.curves import CURVES, curve
from simulation.figure import plot_concurrency
from simulation.recording import Recording, record
from simulation.replay import Replay, Served, serve_all
from simulation.streams import PAPER_ACCEPTED_LENGTHS, synthetic_recording

from hf_dspark.auto import Auto
from hf_dspark.policies import CausalGreedy, LaggedBudget, Lookahead
from hf_dspark.scheduling import ConfidenceThreshold, FixedLength, Scheduler

FIGURE_BATCHES = [1, 2, 4, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256]


def policies(num_drafts: int) -> dict[str, Scheduler]:
    """What is compared, by the names that are printed."""
    fixed = {f"FixedLength({length})": FixedLength(length) for length in range(1, num_drafts + 1)}
    thresholds = {f"ConfidenceThreshold({bound})": ConfidenceThreshold(bound) for bound in (0.3, 0.5, 0.7, 0.9)}
    return fixed | thresholds | {
        "CausalGreedy": CausalGreedy(),
        "CausalGreedy(envelope)": CausalGreedy(envelope=True),
        "LaggedBudget": LaggedBudget(),
        "Lookahead": Lookahead(),
        "Auto": Auto(),
    }  # fmt: skip


def table(served: dict[str, Served]) -> list[dict]:
    """One line for each policy: tokens a second, alone and against plain, the best fixed length and the oracle."""
    fixed = max(run.tokens_per_second for name, run in served.items() if name.startswith("FixedLength"))
    plain = served["plain"].tokens_per_second
    oracle = served["oracle"].tokens_per_second if "oracle" in served else math.nan
    return [
        {
            "policy": name,
            "tokens_per_second": round(run.tokens_per_second, 2),
            "to_plain": round(run.tokens_per_second / plain, 3),
            "to_best_fixed": round(run.tokens_per_second / fixed, 3),
            "to_oracle": None if math.isnan(oracle) else round(run.tokens_per_second / oracle, 3),
            "mean_verify_length": round(run.mean_verify_length, 3),
            "accepted_length": round(run.accepted_length, 3),
            "undrafted_rounds": round(run.num_undrafted / run.num_rounds, 3),
            "policy_milliseconds": round(1e3 * run.policy_seconds / run.num_rounds, 3),
        }
        for name, run in served.items()
    ]


def print_table(curve_name: str, batch: int, lines: list[dict]) -> None:
    print(f"\n{curve_name}, {batch} at a time")
    print("| policy | tokens/s | to plain | to best fixed | to oracle | verified | accepted length | undrafted |")
    print("|---|---|---|---|---|---|---|---|")
    for line in lines:
        to_oracle = "" if line["to_oracle"] is None else f"{line['to_oracle']:.2f}x"
        print(
            f"| {line['policy']} | {line['tokens_per_second']:.1f} | {line['to_plain']:.2f}x | "
            f"{line['to_best_fixed']:.2f}x | {to_oracle} | {line['mean_verify_length']:.2f} | "
            f"{line['accepted_length']:.2f} | {line['undrafted_rounds']:.0%} |"
        )


def run_replay(args: argparse.Namespace) -> None:
    recording = chosen_recording(args)
    chosen = policies(recording.num_drafts)
    if args.policies:
        kept = (*args.policies, "FixedLength")  # every comparison is with the best of them
        chosen = {name: policy for name, policy in chosen.items() if name.startswith(kept)}
    results = []
    for name in args.curve:
        replay = Replay(recording, curve(name, recording.num_drafts), noise=args.noise, seed=args.seed)
        for batch in args.batch:
            num_tokens = None if args.to_the_end else tokens_to_serve(recording, batch, args.tokens)
            served = serve_all(replay, chosen, batch, num_tokens, say)
            results.append({"curve": name, "batch": batch, "policies": table(served)})
            if not args.json:
                print_table(name, batch, results[-1]["policies"])
    if args.json:
        print(json.dumps({"recording": recording.description, "noise": args.noise, "results": results}, indent=1))
    if args.plot:
        plot(recording, args)


def plot(recording: Recording, args: argparse.Namespace) -> None:
    """The figure, on the first curve: chosen policies from one request to 256 at a time."""
    whole = f"FixedLength({recording.num_drafts})"
    chosen = {"Auto": Auto(), "Lookahead": Lookahead(), "CausalGreedy": CausalGreedy(), whole: FixedLength()}
    replay = Replay(recording, curve(args.curve[0], recording.num_drafts), noise=args.noise, seed=args.seed)
    lengths: dict[str, list[float]] = {}
    ratios: dict[str, list[float]] = {}
    for batch in FIGURE_BATCHES:
        served = serve_all(replay, chosen, batch, tokens_to_serve(recording, batch, args.tokens), say)
        served.pop("confidence oracle")  # too near to Auto to be told from it
        for name, run in served.items():
            lengths.setdefault(name, []).append(run.mean_verify_length)
            ratios.setdefault(name, []).append(run.tokens_per_second / served["plain"].tokens_per_second)
    lengths = {name: lengths[name] for name in chosen}
    kind = recording.description.get("synthetic")
    acceptances = "recorded acceptances" if kind is None else f"synthetic acceptances ({kind})"
    plot_concurrency(
        args.plot,
        FIGURE_BATCHES,
        lengths,
        ratios,
        title="The busier the machine, the fewer drafts are worth verifying",
        subtitle=f"Simulated: {acceptances}, K = {recording.num_drafts}, cost curve {args.curve[0]!r}",
    )
    say(f"wrote {args.plot}")


def tokens_to_serve(recording: Recording, batch: int, tokens: int) -> int:
    """At least `tokens`, at least 60 in every row; a whole number of times round the recording if it is short."""
    once = sum(len(answer) for answer in recording.answers)
    wanted = max(tokens, 60 * batch)
    return wanted if wanted < once else -(-wanted // once) * once


def chosen_recording(args: argparse.Namespace) -> Recording:
    if (args.recording is None) == (args.synthetic is None):
        raise ValueError("give either a recording or --synthetic, to say what is replayed")
    if args.synthetic is not None:
        return synthetic_recording(args.synthetic, seed=args.seed)
    return Recording.load(args.recording)


def run_record(args: argparse.Namespace) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hf_dspark.cli.models import load_drafter
    from hf_dspark.demo import load_demo_pair, load_demo_target

    if args.threads:
        torch.set_num_threads(args.threads)
    prompts = {path: held_out(path, args.every, args.limit) for path in args.prompts}  # before any model is loaded
    if args.target:
        target = AutoModelForCausalLM.from_pretrained(args.target).eval()
        tokenizer = AutoTokenizer.from_pretrained(args.target, padding_side="left")
    else:
        target, tokenizer = load_demo_target()
    drafter = load_drafter(args.drafter, target) if args.drafter else load_demo_pair()[2]

    def batches():
        for path, rows in prompts.items():
            for first in range(0, len(rows), args.batch):
                say(f"{Path(path).stem}: {first} of {len(rows)}")
                yield Path(path).stem, encoded(tokenizer, rows[first : first + args.batch])

    answers = tuple(record(target, drafter, batches(), args.max_new_tokens))
    if not answers:
        raise ValueError("no answer has a second token, so there is nothing to record")
    description = {
        "target": args.target or "demo target",
        "drafter": args.drafter or "demo drafter",
        "sets": {Path(path).stem: len(rows) for path, rows in prompts.items()},
        "max_new_tokens": args.max_new_tokens,
    }
    Recording(answers, description).save(args.output)
    say(f"wrote {args.output}: {len(answers)} answers, {sum(len(answer) for answer in answers)} anchors")


def held_out(path: str, every: int, limit: int) -> list[str]:
    """Prompts of a file, shortest first so that batches are even."""
    with open(path, encoding="utf-8", newline="\n") as lines:  # str.splitlines would cut within a JSON string
        prompts = [json.loads(line)["turns"][0] for line in lines if line.strip()]
    return sorted([prompt for prompt in prompts[::every] if len(prompt) < 2000][:limit], key=len)


def encoded(tokenizer, prompts: list[str]) -> dict:
    if tokenizer.chat_template:
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
            for prompt in prompts
        ]
    return tokenizer(prompts, return_tensors="pt", padding=True)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(required=True)
    recording = commands.add_parser("record", help="decode prompts and note what could be accepted at every token")
    recording.add_argument("prompts", nargs="+", help="JSONL files with `turns`")
    recording.add_argument("--output", required=True, help="the recording, .npz")
    recording.add_argument("--target", help="a target's folder; default: the demo target")
    recording.add_argument("--drafter", help="a drafter's folder; default: the demo drafter")
    recording.add_argument("--every", type=int, default=10, help="take every so manieth row, from the first")
    recording.add_argument("--limit", type=int, default=32, help="prompts of each file")
    recording.add_argument("--batch", type=int, default=8)
    recording.add_argument("--max-new-tokens", type=int, default=128)
    recording.add_argument("--threads", type=int)
    recording.set_defaults(run=run_record)
    replay = commands.add_parser("replay", help="compare policies on a recording")
    replay.add_argument("recording", nargs="?", help="what `record` wrote")
    replay.add_argument(
        "--synthetic",
        metavar="KIND",
        help=f"draw acceptances instead: paper, hostile, or one of {', '.join(PAPER_ACCEPTED_LENGTHS)}",
    )
    replay.add_argument("--curve", nargs="+", default=["gpu"], help=f"{', '.join(CURVES)}, measured, or a profile")
    replay.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="concurrent requests")
    replay.add_argument(
        "--policies",
        nargs="+",
        help="beginnings of the names of those to compare with the fixed lengths; default: all",
    )
    replay.add_argument("--tokens", type=int, default=10000, help="tokens of each run, at least")
    replay.add_argument(
        "--to-the-end",
        action="store_true",
        help="decode batches until their last answer ends, as `generate` does; else an answer that ends is replaced",
    )
    replay.add_argument("--noise", type=float, default=0.0, help="spread of a random factor on each round's time")
    replay.add_argument("--seed", type=int, default=0)
    replay.add_argument("--json", action="store_true")
    replay.add_argument("--plot", metavar="FILE", help="also draw the first curve from 1 to 256 at a time, as PNG")
    replay.set_defaults(run=run_replay)
    return top


def main() -> None:
    args = parser().parse_args()
    try:
        args.run(args)
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
