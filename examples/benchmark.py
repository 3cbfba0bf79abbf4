"""Measure speed: plain generate, prompt lookup, fixed lengths and every scheduler, side by side on the demo pair.

    python examples/benchmark.py --easy prompts/gsm8k.jsonl --mixed prompts/*.jsonl --json speed.json --plot speed.png

Three kinds of prompts: easy and mixed ones, decoded greedily, and hostile ones: random tokens, continued at
temperature 1.5, where drafts have little to go on. A prompt file holds one JSON object a line with a list `turns`, the
first of which is used; only rows with index % 10 == 0 are taken, which the drafter has neither been trained nor
calibrated on. Without files the demo's own prompts are used.

All methods decode the same batches of prompts in one process after the same warm-up, one method after the other on
each batch, in an order that shifts from batch to batch. Reported are tokens per second, the ratio to plain `generate`
on the same prompts (of summed times, and the median over batches), the drafts verified per row and round, and whether
the text was identical. "no drafts" is the packed loop without a draft: what is gained (or lost) by it is not
speculation's.
"""

import argparse
import json
import platform
import statistics
from itertools import cycle, islice
from pathlib import Path

import torch

from hf_dspark import Auto, CausalGreedy, ConfidenceThreshold, FixedLength, LaggedBudget, Lookahead, SPSProfile
from hf_dspark.call_schedule import measured_cost
from hf_dspark.comparison import timed_generate, warm_up
from hf_dspark.demo import DEMO_PROMPTS, load_demo_pair
from hf_dspark.prompt_sets import load_prompts

HOSTILE = {"do_sample": True, "temperature": 1.5, "top_k": 0, "top_p": 1.0}
GREEDY = {"do_sample": False}


def all_methods(num_drafts):
    """Name -> what `generate` is given besides the prompts; a scheduler stands for a view of the drafter."""
    methods = {"plain": None, "lookup": {"prompt_lookup_num_tokens": 7}, "no drafts": FixedLength(0)}
    methods |= {f"fixed {k}": FixedLength(k) for k in (1, 2, 3, num_drafts)}
    methods |= {"threshold 0.5": ConfidenceThreshold(0.5), "greedy": CausalGreedy()}
    methods |= {"greedy envelope": CausalGreedy(envelope=True), "lagged": LaggedBudget(), "lookahead": Lookahead()}
    return methods | {"auto": Auto()}


def held_out(paths, limit):
    """Prompts of the files in turn, the same share of each."""
    columns = []
    for path in paths:
        prompts = load_prompts(path, every=10, turns=1, max_characters=1999)
        columns.append([conversation[-1]["content"] for conversation in prompts.conversations])
    longest = max(map(len, columns))
    mixed = [column[i] for i in range(longest) for column in columns if i < len(column)]
    return mixed[:limit]


def encoded(tokenizer, prompts):
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    )


def random_prompts(tokenizer, count, length=48):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, len(tokenizer) - 1000, (count, length), generator=generator)
    return [{"input_ids": row[None], "attention_mask": torch.ones(1, length, dtype=torch.long)} for row in ids]


def batches(kind, size, tokenizer, args):
    """Batches of `size` prompts of a kind, as `generate` takes them: as many as `args.prompts` fill, at least one."""
    count = max(size, args.prompts // size * size if size > 1 else args.single_prompts)
    if kind == "hostile":
        rows = random_prompts(tokenizer, count)
        groups = [rows[i : i + size] for i in range(0, count, size)]
        return [{name: torch.cat([row[name] for row in group]) for name in group[0]} for group in groups]
    files = args.easy if kind == "easy" else args.mixed
    prompts = list(DEMO_PROMPTS) if files is None else held_out(files, count)
    prompts = list(islice(cycle(prompts), count))
    return [encoded(tokenizer, prompts[i : i + size]) for i in range(0, count, size)]


def run(target, drafter, inputs, method, args, options):
    """One timed call."""
    kwargs = dict(options, max_new_tokens=args.max_new_tokens)
    if isinstance(method, dict):
        kwargs |= method
    elif method is not None:
        kwargs["assistant_model"] = drafter.with_options(scheduler=method)
    return timed_generate(target, inputs, **kwargs)


def cell(target, drafter, prompt_batches, methods, args, options):
    """Every method on every batch of one kind and size, all of them in turn, again and again: name -> figures."""
    runs = {name: [[] for _ in prompt_batches] for name in methods}
    for turn in range(args.repeats):
        for number, inputs in enumerate(prompt_batches):
            names = list(methods)
            shift = 2 * (turn + number) % len(names)
            for name in names[shift:] + names[:shift]:
                runs[name][number].append(run(target, drafter, inputs, methods[name], args, options))
    kept = {name: [_median(again) for again in batches] for name, batches in runs.items()}
    found = {name: figures(results, kept["plain"]) for name, results in kept.items()}
    for name, row in found.items():  # how far one turn through all batches is from another
        turns = [sum(again[turn].seconds for again in runs[name]) for turn in range(args.repeats)]
        row["spread"] = round(max(turns) / min(turns) - 1, 3)
    return found


def _median(results):
    """The middle one by time; of two, the faster."""
    return sorted(results, key=lambda r: r.seconds)[(len(results) - 1) // 2]


def figures(results, plain):
    rate = sum(r.num_tokens for r in results) / sum(r.seconds for r in results)
    plain_rate = sum(r.num_tokens for r in plain) / sum(r.seconds for r in plain)
    ratios = [r.tokens_per_second / p.tokens_per_second for r, p in zip(results, plain, strict=True)]
    found = {
        "tokens_per_second": round(rate, 2),
        "ratio": round(rate / plain_rate, 3),
        "median_ratio": round(statistics.median(ratios), 3),
        "identical": all(r.new_ids == p.new_ids for r, p in zip(results, plain, strict=True)),
    }
    rounds = [entry for r in results if r.stats is not None for entry in r.stats.rounds]
    if rounds:
        found["verify_length"] = round(statistics.mean(r.verify_length for r in rounds), 2)
        found["accepted_length"] = round(statistics.mean(len(r.committed_ids) for r in rounds), 2)
        found["drafted_share"] = round(statistics.mean(bool(r.draft_ids) for r in rounds), 2)
    return found


def print_cell(kind, size, found):
    print(f"\n{kind}, batch {size}")
    for name, row in found.items():
        extra = f"  verified {row['verify_length']:.2f}" if "verify_length" in row else ""
        print(f"  {name:16s} {row['tokens_per_second']:7.1f} tokens/s  {row['ratio']:.3f}x{extra}", flush=True)


def summary(cells):
    """How `auto` fares over all cells: against plain decoding, and against the best fixed length of each (or none)."""
    rows = [cell["methods"] for cell in cells]
    report = {"cells": len(rows), "auto_against_plain_least": min(row["auto"]["ratio"] for row in rows)}
    for name, kinds in {"best_fixed": ("fixed",), "best_fixed_or_none": ("fixed", "no drafts")}.items():
        best = [max((v["ratio"] for k, v in row.items() if k.startswith(kinds)), default=0) for row in rows]
        against = [row["auto"]["ratio"] / ratio for row, ratio in zip(rows, best, strict=True) if ratio]
        if against:
            report[f"auto_against_{name}_at_least_0.98"] = sum(ratio >= 0.98 for ratio in against)
            report[f"auto_against_{name}_least"] = round(min(against), 3)
    return report


def plot(cells, path):
    """Drafts verified and throughput against batch size, for each kind of prompts (the paper's Figure 8)."""
    from matplotlib.figure import Figure  # the extra `plot`
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(9, 4), layout="constrained")
    lengths, speeds = figure.subplots(1, 2)
    colors = {"easy": "#0b7285", "mixed": "#e8590c", "hostile": "#868e96"}
    fixed = sorted({name for cell in cells for name in cell["methods"] if name.startswith("fixed")})[-1:]
    styles = {"auto": "o-", **dict.fromkeys(fixed, "x:"), "no drafts": "--"}
    for kind, color in colors.items():
        own = sorted((cell for cell in cells if cell["kind"] == kind), key=lambda cell: cell["batch"])
        sizes = [cell["batch"] for cell in own]
        lengths.plot(sizes, [cell["methods"]["auto"]["verify_length"] for cell in own], "o-", color=color, label=kind)
        for name, style in styles.items():
            kept = [(cell["batch"], cell["methods"][name]["ratio"]) for cell in own if name in cell["methods"]]
            if kept:
                speeds.plot(*zip(*kept, strict=True), style, color=color, linewidth=2 if name == "auto" else 1)
    speeds.axhline(1, color="black", linewidth=0.8)
    lengths.set(title="auto: drafts verified per row and round", ylim=(0, None))
    speeds.set(title="throughput over plain generate", ylim=(0, None))
    lengths.legend(frameon=False, fontsize=8)
    keys = [
        Line2D([], [], color="#495057", marker=s.strip("-:"), ls=s.strip("ox"), label=n) for n, s in styles.items()
    ]
    speeds.legend(handles=keys, frameon=False, fontsize=8)
    sizes = sorted({cell["batch"] for cell in cells})
    for axes in (lengths, speeds):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, map(str, sizes))
        axes.set_xlabel("batch size")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--easy", nargs="+", help="JSONL files of easy prompts (maths)")
    parser.add_argument("--mixed", nargs="+", help="JSONL files of all kinds")
    parser.add_argument("--kinds", nargs="+", default=["easy", "mixed", "hostile"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--methods", nargs="+", help="default: all")
    parser.add_argument("--prompts", type=int, default=16, help="prompts of each kind, in batches")
    parser.add_argument("--single-prompts", type=int, default=6, help="prompts at batch 1")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=1, help="turns through all methods; medians count")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--profile", help="an SPS profile (JSON); by default it is measured, once")
    parser.add_argument("--json", help="write all figures here")
    parser.add_argument("--plot", help="write a figure here (PNG)")
    parser.add_argument(
        "--read", nargs="+", help="JSON files of earlier runs: draw and sum up their cells, run nothing"
    )
    args = parser.parse_args()
    if args.read:
        cells = [cell for path in args.read for cell in json.loads(Path(path).read_text(encoding="utf-8"))["cells"]]
        cells = [cell for cell in cells if "auto" in cell["methods"]]
        if not cells:
            parser.error("there is no cell with `auto` in these files, so there is nothing to draw or sum up")
        print(json.dumps(summary(cells)))
        if args.plot:
            plot(cells, args.plot)
        return
    torch.set_num_threads(args.threads)
    target, tokenizer, drafter = load_demo_pair()
    methods = all_methods(drafter.config.num_drafts)
    methods = {name: methods[name] for name in ["plain", *(args.methods or list(methods)[1:])]}
    if args.profile:
        drafter = drafter.with_options(sps_profile=SPSProfile.load(args.profile))
    measured_cost(target, drafter, max(args.batch))  # now, not within the first timed call
    device = f"{platform.machine()} CPU, {torch.get_num_threads()} threads, {str(target.dtype).split('.')[-1]}"
    report = {"device": device, "max_new_tokens": args.max_new_tokens, "cells": []}
    print(device)
    for size in args.batch:
        for kind in args.kinds:
            prompt_batches = batches(kind, size, tokenizer, args)
            warm_up(target, prompt_batches[0], drafter)
            # transformers' prompt lookup decodes one row at a time
            usable = {k: v for k, v in methods.items() if k != "lookup" or size == 1}
            options = HOSTILE if kind == "hostile" else GREEDY
            found = cell(target, drafter, prompt_batches, usable, args, options)
            print_cell(kind, size, found)
            report["cells"].append({"kind": kind, "batch": size, "methods": found})
            if args.json:
                Path(args.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if "auto" in methods:
        report["summary"] = summary(report["cells"])
        print("\n" + json.dumps(report["summary"]))
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        plot(report["cells"], args.plot)


if __name__ == "__main__":
    main()
