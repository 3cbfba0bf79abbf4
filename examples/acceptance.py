"""Compare live with teacher-forced acceptance, and weigh the loop: python examples/acceptance.py prompts/gsm8k.jsonl

A prompt file holds one JSON object a line with a list `turns`, the first of which is used. Of every file only rows
with index % 5 == 0 are taken: the held-out ones. Reported are accepted length and conditional acceptance at each
position, whole block, live and (with --teacher-forced) on the same text in one pass, and the share of a round that is
neither the target's forward nor drafting. What drafters are worth on whole sets, `python -m hf_dspark evaluate` tells;
for speed see benchmark.py.
"""

import argparse
import json
import platform
import time
from pathlib import Path

import torch

from hf_dspark import DecodingStats, FixedLength
from hf_dspark.cli.models import load_drafter
from hf_dspark.demo import load_demo_pair, load_demo_target
from hf_dspark.prompt_sets import load_prompts
from hf_dspark.training import TrainingExample, teacher_forced_acceptance


def held_out(path, limit):
    prompts = load_prompts(path, every=5, turns=1, limit=limit, max_characters=2999)
    return [conversation[-1]["content"] for conversation in prompts.conversations]


def encoded(tokenizer, prompts):
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        for prompt in prompts
    ]
    return tokenizer(chats, return_tensors="pt", padding=True)


def batches(tokenizer, prompts, size):
    ordered = sorted(prompts, key=len)
    return [encoded(tokenizer, ordered[i : i + size]) for i in range(0, len(ordered), size)]


class Clock:
    """Seconds spent inside a module's forward."""

    def __init__(self, module):
        self.seconds = 0.0
        self.hooks = [
            module.register_forward_pre_hook(lambda *args: setattr(self, "began", time.perf_counter())),
            module.register_forward_hook(self._stop),
        ]

    def _stop(self, *args):
        self.seconds += time.perf_counter() - self.began

    def remove(self):
        for hook in self.hooks:
            hook.remove()


def timed(target, inputs, max_new_tokens, drafter=None):
    options = {"max_new_tokens": max_new_tokens, "do_sample": False, "return_dict_in_generate": True}
    began = time.perf_counter()
    output = target.generate(**inputs, assistant_model=drafter, **options)
    return output, time.perf_counter() - began


def acceptance(target, drafter, prompt_batches, args):
    """Accepted length and conditional acceptance at full block, live and teacher-forced on the same text."""
    rounds, examples, anchors = [], [], []
    for inputs in prompt_batches:
        output, _ = timed(target, inputs, args.max_new_tokens, drafter)
        rounds.extend(output.rounds)
        for row in range(len(inputs.input_ids)):
            prompt = inputs.input_ids[row][inputs.attention_mask[row].bool()].tolist()
            answer = output.sequences[row, inputs.input_ids.shape[1] :].tolist()
            eos = target.generation_config.eos_token_id
            answer = answer[: answer.index(eos) + 1] if eos in answer else answer
            examples.append(TrainingExample(tuple(prompt + answer), (0,) * len(prompt) + (1,) * len(answer)))
            sizes = [len(r.committed_ids) for r in output.rounds if r.row == row]
            anchors.append([len(prompt) + sum(sizes[:index]) for index in range(len(sizes))])
    stats, positions = DecodingStats(rounds), range(1, drafter.config.num_drafts + 1)
    result = {
        "accepted_length": round(stats.accepted_length, 3),
        "conditional_acceptance": [round(stats.conditional_acceptance_at(k), 3) for k in positions],
    }
    if args.teacher_forced:
        # At the anchors of the live rounds, then at every token: live rounds start where a draft just failed.
        for where, starts in (("live_anchors", anchors), ("all_anchors", None)):
            meter = teacher_forced_acceptance(target, drafter, examples, anchors=starts)
            result[f"teacher_forced_accepted_length_at_{where}"] = round(meter.accepted_length, 3)
            result[f"teacher_forced_conditional_at_{where}"] = [round(value, 3) for value in meter.conditional]
    return result


def overhead(target, drafter, inputs, args):
    """Share of a round that is neither the target's forward nor drafting, full block."""
    clock = Clock(target)
    began = time.perf_counter()
    output, _ = timed(target, inputs, args.max_new_tokens, drafter)
    total, clock_total = time.perf_counter() - began, clock.seconds
    clock.remove()
    drafting = sum({r.step: r.draft_seconds for r in output.rounds}.values())
    return {"overhead_share": round((total - clock_total - drafting) / total, 4)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="+", help="JSONL files with `turns`")
    parser.add_argument("--limit", type=int, default=16, help="prompts of each file")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--drafter", help="folder or Hub name of a drafter of any kind; default: the one that is shipped"
    )
    parser.add_argument("--teacher-forced", action="store_true", help="compare live with teacher-forced acceptance")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.drafter:
        target, tokenizer = load_demo_target()
        drafter = load_drafter(args.drafter, target)
    else:
        target, tokenizer, drafter = load_demo_pair()
    drafter = drafter.with_options(scheduler=FixedLength())
    device = f"{platform.machine()} CPU, {torch.get_num_threads()} threads, float32"
    print(json.dumps({"device": device, "greedy": True, "max_new_tokens": args.max_new_tokens}))
    for path in args.prompts:
        prompts = held_out(path, args.limit)
        warm_up = encoded(tokenizer, prompts[:1])
        timed(target, warm_up, 16)
        timed(target, warm_up, 16, drafter)
        found = acceptance(target, drafter, batches(tokenizer, prompts, 8), args)
        print(json.dumps({"set": Path(path).stem, "prompts": len(prompts)} | found), flush=True)
        print(json.dumps({"set": Path(path).stem} | overhead(target, drafter, warm_up, args)), flush=True)


if __name__ == "__main__":
    main()
