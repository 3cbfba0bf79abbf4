"""Measure an engine under load: requests arrive at random, faster and faster, for plain batching, fixed K and auto.

    python examples/load_test.py prompts/*.jsonl --repeats 3 --json load.json --plot load.png

The paper's Fig. 7 and 8 on this machine. Arrivals are Poisson: gaps between requests are exponential with the given
mean, drawn once for each rate and repeat, so that all methods meet the same prompts at the same moments; at the rate
`inf` all requests are there at once, which is as much load as there can be. The methods take turns, in an order that
shifts from rate to rate and from repeat to repeat. A prompt file holds one JSON object a line with a list `turns`, the
first of which is used; only rows with index % 10 == 0 are taken, which the drafter has neither been trained nor
calibrated on. Without files the demo's own prompts are used.

Reported for each rate and method: throughput (new tokens of all requests over the time from the first arrival to the
last end), tokens per second that a user sees (new tokens over the time from the first token to the end; median),
drafts verified per row and round, mean number of rows in a round, time in the queue, latency from arrival to end
(median and 95th percentile), and whether every greedy text was the one of plain batching. Of several repeats these are
medians, with the lowest and highest beside them; `auto` is set against plain batching repeat by repeat.
"""

import argparse
import json
import math
import platform
import statistics
import threading
import time
from itertools import cycle, islice
from pathlib import Path

import torch

from hf_dspark import Auto, DSparkEngine, FixedLength, SPSProfile
from hf_dspark.call_schedule import measured_cost
from hf_dspark.demo import DEMO_PROMPTS, load_demo_pair
from hf_dspark.plots import new_figure, save_figure
from hf_dspark.prompt_sets import load_prompts

METHODS = ["plain", "fixed", "auto"]
SMOKE = {"requests": 3, "rates": [5.0, math.inf], "max_new_tokens": 6, "max_batch_size": 2}
COLORS = {"plain": "#868e96", "fixed": "#e8590c", "auto": "#0b7285"}


def held_out(paths, count):
    """Prompts of the files in turn, the same share of each."""
    columns = []
    for path in paths:
        prompts = load_prompts(path, every=10, turns=1, max_characters=1999)
        columns.append([conversation[-1]["content"] for conversation in prompts.conversations])
    longest = max(map(len, columns))
    return list(islice(cycle([column[i] for i in range(longest) for column in columns if i < len(column)]), count))


def encoded(tokenizer, prompts):
    """Ids `[S]` of each prompt."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return [
        torch.tensor(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])
        for chat in chats
    ]


def arrivals(rate, count, seed):
    """Seconds after the start at which requests arrive, `rate` a second on average; at once if that is infinite."""
    if math.isinf(rate):
        return [0.0] * count
    gaps = torch.empty(count, dtype=torch.float64).exponential_(rate, generator=torch.Generator().manual_seed(seed))
    return (gaps.cumsum(0) - gaps[0]).tolist()


def serve(target, drafter, scheduler, prompts, moments, args):
    """One method at one rate: the requests, in order of arrival, and the steps it took."""
    steps, requests = [], []
    engine = DSparkEngine(
        target,
        None if scheduler is None else drafter,
        scheduler=scheduler,
        max_batch_size=args.max_batch_size,
        max_waiting=len(prompts),
        prefill_chunk=args.prefill_chunk,
    )
    engine.on_step = steps.append
    with engine:
        began = time.perf_counter()
        for prompt, moment in zip(prompts, moments, strict=True):
            threading.Event().wait(max(0.0, began + moment - time.perf_counter()))
            requests.append(engine.submit(prompt, do_sample=False, max_new_tokens=args.max_new_tokens))
        for request in requests:
            request.result()
    return requests, steps


def percentile(values, share):
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def figures(requests, steps, texts):
    """What is reported of a run; `texts` are those of plain batching, if it was run."""
    tokens = sum(len(request.new_ids) for request in requests)
    latencies = [request.finished_at - request.submitted_at for request in requests]
    queueing = [request.started_at - request.submitted_at for request in requests]
    first = [request.first_token_at - request.submitted_at for request in requests]
    per_user = [
        (len(request.new_ids) - 1) / (request.finished_at - request.first_token_at)
        for request in requests
        if len(request.new_ids) > 1
    ]
    rounds = [entry for request in requests for entry in request.rounds]
    in_round = [step for step in steps if step.num_running]
    span = max(r.finished_at for r in requests) - min(r.submitted_at for r in requests)
    return {
        "throughput_tokens_per_second": round(tokens / span, 2),
        "user_tokens_per_second": round(statistics.median(per_user), 2) if per_user else None,
        "verify_length": round(statistics.mean(entry.verify_length for entry in rounds), 3) if rounds else None,
        "accepted_length": round(statistics.mean(len(e.committed_ids) for e in rounds), 3) if rounds else None,
        "rows_per_round": round(statistics.mean(step.num_running for step in in_round), 2) if in_round else None,
        "queue_seconds_mean": round(statistics.mean(queueing), 3),
        "first_token_seconds_p50": round(statistics.median(first), 3),
        "latency_seconds_p50": round(percentile(latencies, 0.5), 3),
        "latency_seconds_p95": round(percentile(latencies, 0.95), 3),
        "identical": None if texts is None else [request.new_ids for request in requests] == texts,
    }


def at_rate(target, drafter, methods, prompts, rate, shift, args):
    """Every method at one rate, once: name -> figures. `shift` sets the arrivals and who begins."""
    moments, runs = arrivals(rate, len(prompts), args.seed + shift), {}
    names = list(methods)
    first = shift % len(names)
    for name in names[first:] + names[:first]:
        runs[name] = serve(target, drafter, methods[name], prompts, moments, args)
    texts = [request.new_ids for request in runs["plain"][0]] if "plain" in runs else None
    return {name: figures(*runs[name], texts) for name in names}


def summed_up(repeats):
    """Of several runs of a method: the median of each figure, and `[lowest, highest]` where they differ."""
    middle, spread = {}, {}
    for key in repeats[0]:
        values = [entry[key] for entry in repeats]
        if None in values:
            middle[key] = None
        elif key == "identical":
            middle[key] = all(values)
        else:
            middle[key] = round(statistics.median(values), 3)
            if len(set(values)) > 1:
                spread[key] = [min(values), max(values)]
    return middle | ({"spread": spread} if spread else {})


def show(name, row):
    """A line about a method."""
    low, high = row.get("spread", {}).get("throughput_tokens_per_second", [None, None])
    print(
        f"  {name:8s} {row['throughput_tokens_per_second']:7.1f} tokens/s in all  "
        + (f"({low:.1f} to {high:.1f})  " if low is not None else "")
        + f"{row['user_tokens_per_second'] or 0:6.1f} a user  verified {row['verify_length'] or 0:4.2f}  "
        f"latency {row['latency_seconds_p50']:6.2f} s, p95 {row['latency_seconds_p95']:6.2f} s  "
        f"queue {row['queue_seconds_mean']:5.2f} s" + ("  (other text)" if row["identical"] is False else ""),
        flush=True,
    )


def against_plain(repeats):
    """Throughput of `auto` over that of plain batching, in each repeat; none if one of them was not run."""
    if not {"auto", "plain"} <= repeats[0].keys():
        return []
    key = "throughput_tokens_per_second"
    return [round(entry["auto"][key] / entry["plain"][key], 3) for entry in repeats]


def word(rate):
    """How a rate is called."""
    return "all at once" if math.isinf(rate) else f"{rate:g}"


def plot(rates, path):
    """Throughput, speed for a user, verify length and latency against the rate of arrivals."""
    figure = new_figure(figsize=(11, 7))
    panels = {
        "throughput_tokens_per_second": "throughput, tokens/s",
        "user_tokens_per_second": "tokens/s that a user sees (median)",
        "verify_length": "drafts verified per row and round",
        "latency_seconds_p95": "latency in seconds: median, and 95th percentile (dotted)",
    }
    offered = range(len(rates))
    for axes, (key, title) in zip(figure.subplots(2, 2).flat, panels.items(), strict=True):
        for name in rates[0]["methods"]:
            color = COLORS[name.split()[0]]
            values = [entry["methods"][name] for entry in rates]
            spread = [v.get("spread", {}).get(key, [v[key]] * 2) for v in values]
            if None not in [v[key] for v in values]:
                axes.fill_between(offered, *zip(*spread, strict=True), color=color, alpha=0.15, linewidth=0)
            if key.startswith("latency"):
                axes.plot(offered, [v["latency_seconds_p50"] for v in values], "o-", color=color, label=name)
                axes.plot(offered, [v[key] for v in values], "x:", color=color)
            else:
                axes.plot(offered, [v[key] for v in values], "o-", color=color, label=name)
        axes.set(title=title, xlabel="requests that arrive per second", ylim=(0, None))
        axes.set_xticks(offered, [str(entry["requests_per_second"]) for entry in rates])
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    save_figure(figure, path)


def load_pair(smoke):
    """The demo pair; with `smoke` a tiny random one of its tokenizer's size, which only shows that all runs."""
    target, tokenizer, drafter = load_demo_pair()
    if not smoke:
        return target, tokenizer, drafter
    from transformers import LlamaConfig, LlamaForCausalLM

    from hf_dspark import DSparkConfig, DSparkDrafter

    shape = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    shape |= {"vocab_size": len(tokenizer), "num_hidden_layers": 2, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    tiny = LlamaForCausalLM(LlamaConfig(**shape)).eval()
    config = DSparkConfig(
        **shape | {"num_hidden_layers": 1}, target_layer_ids=[0], num_target_layers=2, markov_rank=4, block_size=3,
        mask_token_id=0, head_dim=8,
    )  # fmt: skip
    return tiny, tokenizer, DSparkDrafter(config).eval()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="*", help="JSONL files; default: the demo's own prompts")
    parser.add_argument(
        "--rates",
        type=float,
        nargs="+",
        default=[0.1, 0.2, 0.4, 0.8, 1.6, math.inf],
        help="requests a second; inf: all at once",
    )
    parser.add_argument("--requests", type=int, default=24, help="at each rate")
    parser.add_argument("--repeats", type=int, default=1, help="of each rate, with arrivals of their own")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, help="what to compare")
    parser.add_argument("--fixed", type=int, nargs="+", default=[3], help="fixed lengths to compare with")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--max-batch-size", type=int, default=8)
    parser.add_argument("--prefill-chunk", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--profile", help="an SPS profile (JSON); by default it is measured, once")
    parser.add_argument("--smoke", action="store_true", help="a few requests on tiny random models: does it run?")
    parser.add_argument("--json", help="write all figures here")
    parser.add_argument("--plot", help="write a figure here (PNG)")
    args = parser.parse_args()
    if args.smoke:
        vars(args).update(SMOKE)
    torch.set_num_threads(args.threads)
    target, tokenizer, drafter = load_pair(args.smoke)
    if args.profile:
        drafter = drafter.with_options(sps_profile=SPSProfile.load(args.profile))
    measured_cost(target, drafter, args.max_batch_size)  # now, not in the first run
    texts = held_out(args.prompts, args.requests) if args.prompts else islice(cycle(DEMO_PROMPTS), args.requests)
    prompts = encoded(tokenizer, list(texts))
    known = {"plain": {"plain": None}, "fixed": {f"fixed {k}": FixedLength(k) for k in args.fixed}}
    known["auto"] = {"auto": Auto()}
    methods = {name: scheduler for kind in METHODS if kind in args.methods for name, scheduler in known[kind].items()}
    device = f"{platform.machine()} CPU, {torch.get_num_threads()} threads, {str(target.dtype).split('.')[-1]}"
    report = {"device": device, "max_batch_size": args.max_batch_size, "max_new_tokens": args.max_new_tokens}
    report |= {"requests": args.requests, "repeats": args.repeats, "smoke": args.smoke, "rates": []}
    print(device)
    for scheduler in methods.values():  # first touches of weights and kernels are nobody's
        serve(target, drafter, scheduler, prompts[:1], [0.0], argparse.Namespace(**vars(args) | {"max_new_tokens": 8}))
    for number, rate in enumerate(args.rates):
        print(f"\nrequests a second: {word(rate)}")
        shifts = [number + repeat * len(args.rates) for repeat in range(args.repeats)]
        repeats = [at_rate(target, drafter, methods, prompts, rate, shift, args) for shift in shifts]
        found = {name: summed_up([entry[name] for entry in repeats]) for name in methods}
        for name in methods:
            show(name, found[name])
        entry = {
            "requests_per_second": rate if math.isfinite(rate) else word(rate),
            "methods": found,
            "auto_over_plain": against_plain(repeats),
        }
        report["rates"].append(entry)
        if args.json:
            Path(args.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        plot(report["rates"], args.plot)
    ratios = {str(e["requests_per_second"]): e["auto_over_plain"] for e in report["rates"] if e["auto_over_plain"]}
    for rate, own in ratios.items():
        middle = statistics.median(own)
        verdict = (
            f"{middle:.2f}x ({min(own):.2f} to {max(own):.2f}): {'at least as fast' if middle >= 1 else 'SLOWER'}"
        )
        print(f"auto against plain at {rate}: {verdict}")
    print(json.dumps({"auto_over_plain_throughput": ratios}))


if __name__ == "__main__":
    main()
