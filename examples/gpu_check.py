"""Does scheduling pay on this GPU? python examples/gpu_check.py --output gpu_check.json

Builds a random pair with the shapes of Qwen3-4B and of a DSpark drafter for it (5 layers, K = 7, Markov rank 256; no
download), measures the SPS profile, and decodes batches of 1 to 128 requests: plainly with transformers' `generate`,
with the engine but no drafts, with whole blocks, and with the scheduler `"auto"`. Random models accept nothing of each
other's, so confidences and acceptances come from a synthetic stream fitted to the paper's; everything else (drafting,
packed verification, caches, commit, the policies, all times) is real. Prints a Markdown table, writes JSON.

`--tiny` runs the same on the CPU with tiny shapes, to see that it works.
"""

import argparse
import dataclasses
import json
import platform
import sys
import time

import torch
import transformers
from simulation.recording import Recording, write_whole
from simulation.streams import synthetic_recording
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    Qwen3Config,
    StoppingCriteria,
    StoppingCriteriaList,
)

import hf_dspark
from hf_dspark import DSparkConfig, DSparkDrafter, FixedLength
from hf_dspark.decoding import Decoder
from hf_dspark.profiling import profile_sps
from hf_dspark.verification import Verdict

NUM_DRAFTS = 7
SEGMENT_TOKENS = 24  # a row reads so many anchors of one answer, then of the next: every run meets easy and hard text
REAL = dict(
    target=dict(
        vocab_size=151936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    ),
    drafter=dict(num_hidden_layers=5, target_layer_ids=[1, 9, 17, 25, 33], markov_rank=256),
    batches=[1, 2, 4, 8, 16, 32, 64, 128],
    prompt_tokens=256,
    rounds=24,
    profile=dict(contexts=(256, 1024)),
    dtype=torch.bfloat16,
)
TINY = dict(
    target=dict(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
    ),
    drafter=dict(num_hidden_layers=1, target_layer_ids=[0, 1, 2], markov_rank=8),
    batches=[1, 4],
    prompt_tokens=8,
    rounds=6,
    profile=dict(contexts=(16,), repeats=2),
    dtype=torch.float32,
)


def random_pair(shapes: dict, device: torch.device) -> tuple:
    """A target and a drafter of these shapes, drawn on `device`; the drafter borrows the target's embeddings."""
    config = Qwen3Config(
        **shapes["target"], max_position_embeddings=40960, eos_token_id=None, bos_token_id=1, pad_token_id=0
    )
    shared = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    drafter_config = DSparkConfig(
        **{name: getattr(config, name) for name in shared},
        **shapes["drafter"],
        head_dim=config.head_dim,
        block_size=NUM_DRAFTS,
        mask_token_id=2,
        num_target_layers=config.num_hidden_layers,
        max_position_embeddings=config.max_position_embeddings,
    )
    drafter_config.dtype = shapes["dtype"]
    with torch.device(device):
        target = AutoModelForCausalLM.from_config(config, dtype=shapes["dtype"])
        drafter = DSparkDrafter(drafter_config).to(shapes["dtype"])
    return target.eval(), drafter.eval()


class Stream:
    """Confidences and acceptances for every row and place, out of a recording."""

    def __init__(self, recording: Recording):
        self.answers = recording.answers

    def at(self, row: int, place: int) -> tuple:
        """Confidences `[K]` and how many drafts stand, for the anchor that is token `place` of a row's text."""
        answer = self.answers[(row + place // SEGMENT_TOKENS) % len(self.answers)]
        return answer.confidence[place % len(answer)], int(answer.acceptable[place % len(answer)])


class ReplayingDecoder(Decoder):
    """The real decoder, told what the drafter believes and what the target accepts; it counts, and keeps going."""

    stream: Stream

    def draft(self, *args, **kwargs):
        drafts = super().draft(*args, **kwargs)
        num_drafts = drafts.ids.shape[1]
        if num_drafts == 0:
            return drafts
        confidence = torch.tensor([self._told(row)[0][:num_drafts].tolist() for row in self.active])
        return dataclasses.replace(drafts, confidence=confidence.to(drafts.ids.device))

    def judge(self, drafts, scores, lengths):
        verdict = super().judge(drafts, scores, lengths)
        told = [min(length, self._told(row)[1]) for row, length in zip(self.active, lengths, strict=True)]
        self.counts += torch.tensor([sum(lengths), sum(told), len(told), drafts.ids.shape[1] == 0])
        return Verdict(torch.tensor(told, device=verdict.num_accepted.device), verdict.next_ids)

    def measure(self, warm_up: int, rounds: int) -> dict:
        """Seconds and counts of `rounds` rounds after `warm_up` others; no row ends."""
        self.counts = torch.zeros(4, dtype=torch.long)
        self.prefill()
        for _ in range(warm_up):
            self.round()
        self.counts.zero_()
        self._synchronize()
        began = time.perf_counter()
        for _ in range(rounds):
            self.round()
        self._synchronize()
        seconds = time.perf_counter() - began
        verified, accepted, row_rounds, undrafted = self.counts.tolist()
        return {
            "tokens_per_second": (accepted + row_rounds) / seconds,
            "milliseconds_per_round": 1e3 * seconds / rounds,
            "mean_verify_length": verified / row_rounds,
            "accepted_length": 1 + accepted / row_rounds,
            "undrafted_rounds": undrafted / rounds,
        }

    def _told(self, row) -> tuple:
        return self.stream.at(row.index, len(row.new_ids) - 1)

    def _synchronize(self) -> None:
        if self.input_ids.device.type == "cuda":
            torch.cuda.synchronize()


class StepClock(StoppingCriteria):
    """Never stops; notes when each step of plain `generate` ended."""

    def __init__(self):
        self.times = []

    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.is_cuda:
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def decode_plainly(target, prompts, warm_up: int, rounds: int) -> dict:
    """Transformers' own greedy decoding, prefill left out."""
    clock = StepClock()
    target.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        max_new_tokens=1 + warm_up + rounds,
        stopping_criteria=[clock],
    )
    seconds = clock.times[-1] - clock.times[warm_up]
    return {"tokens_per_second": len(prompts) * rounds / seconds, "milliseconds_per_round": 1e3 * seconds / rounds}


@torch.no_grad()
def decode_replaying(target, view, prompts, stream: Stream, warm_up: int, rounds: int) -> dict:
    """The engine on these prompts, with acceptances out of `stream`."""
    longest = prompts.shape[1] + 1 + (warm_up + rounds + 1) * (1 + NUM_DRAFTS)
    decoder = ReplayingDecoder(
        target,
        view,
        prompts,
        logits_processor=LogitsProcessorList(),
        stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(longest)]),
        generation_config=GenerationConfig(do_sample=False),
        model_kwargs={"cache": DynamicCache(config=target.config), "logits_to_keep": 1},
    )
    decoder.stream = stream
    return decoder.measure(warm_up, rounds)


def check_batch(target, drafter, profile, stream: Stream, batch: int, shapes: dict) -> dict:
    """All ways of decoding at one batch size."""
    device = target.device
    generator = torch.Generator().manual_seed(batch)
    prompts = torch.randint(3, shapes["target"]["vocab_size"], (batch, shapes["prompt_tokens"]), generator=generator)
    prompts = prompts.to(device)
    # Few rows meet few acceptances, so they decode longer.
    rounds = shapes["rounds"] * (4 if batch == 1 else 2 if batch <= 4 else 1)
    warm_up = max(2, shapes["rounds"] // 6)
    views = {
        "engine_without_drafts": drafter.with_options(scheduler=FixedLength(0)),
        "fixed": drafter.with_options(scheduler=FixedLength()),
        "auto": drafter.with_options(scheduler="auto", sps_profile=profile),
    }
    result = {"batch": batch, "rounds": rounds, "plain": decode_plainly(target, prompts, warm_up, rounds)}
    for name, view in views.items():
        result[name] = decode_replaying(target, view, prompts, stream, warm_up, rounds)
    plain = result["plain"]["tokens_per_second"]
    for name in views:
        result[name]["to_plain"] = result[name]["tokens_per_second"] / plain
    result["auto_to_fixed"] = result["auto"]["tokens_per_second"] / result["fixed"]["tokens_per_second"]
    return result


def line(result: dict) -> str:
    plain, bare, fixed, auto = (result[name] for name in ("plain", "engine_without_drafts", "fixed", "auto"))
    return (
        f"| {result['batch']} | {plain['tokens_per_second']:.0f} | {bare['tokens_per_second']:.0f} | "
        f"{fixed['tokens_per_second']:.0f} | {auto['tokens_per_second']:.0f} | {fixed['to_plain']:.2f}x | "
        f"{auto['to_plain']:.2f}x | {auto['mean_verify_length']:.2f} | {auto['accepted_length']:.2f} | "
        f"{auto['undrafted_rounds']:.0%} |"
    )


def describe(device: torch.device, shapes: dict) -> dict:
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else f"{platform.machine()} CPU",
        "dtype": str(shapes["dtype"]).removeprefix("torch."),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_dspark": hf_dspark.__version__,
        "prompt_tokens": shapes["prompt_tokens"],
        "drafts": NUM_DRAFTS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU: only to see that it runs")
    parser.add_argument("--batch", type=int, nargs="+", help="batch sizes; default: 1 to 128")
    parser.add_argument("--acceptances", default="paper", help="which synthetic stream: paper, hostile, gsm8k, ...")
    parser.add_argument("--rounds", type=int, help="rounds that are timed at each batch size")
    parser.add_argument("--output", help="JSON with everything that was measured")
    parser.add_argument("--profile-output", help="the SPS profile, as JSON")
    args = parser.parse_args()
    if not args.tiny and not torch.cuda.is_available():
        sys.exit("error: no CUDA GPU is at hand. Run this on a machine with one, or with --tiny on the CPU.")
    shapes = dict(TINY if args.tiny else REAL)
    shapes["rounds"] = args.rounds or shapes["rounds"]
    batches = args.batch or shapes["batches"]
    device = torch.device("cpu" if args.tiny else "cuda:0")
    began = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - began:6.1f} s] {text}", file=sys.stderr, flush=True)

    torch.manual_seed(0)
    stream = Stream(synthetic_recording(args.acceptances, num_answers=8, num_tokens=256))
    target, drafter = random_pair(shapes, device)
    say(f"built {sum(p.numel() for p in target.parameters()) / 1e9:.2f}B and its drafter; measuring the profile")
    most_tokens = max(batches) * (1 + NUM_DRAFTS)
    profile = profile_sps(target, drafter, max_batch_tokens=most_tokens, progress=False, **shapes["profile"])
    say("measured the profile")
    if args.profile_output:
        profile.save(args.profile_output)
    print("| batch | plain tok/s | engine, no drafts | whole blocks | auto | blocks/plain | auto/plain | "
          "verified | accepted length | undrafted |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|")
    results = []
    for batch in batches:
        results.append(check_batch(target, drafter, profile, stream, batch, shapes))
        print(line(results[-1]), flush=True)
        say(f"batch {batch} done")
    report = describe(device, shapes) | {
        "acceptances": args.acceptances,
        "seconds": round(time.perf_counter() - began, 1),
        "results": results,
    }
    if args.output:
        write_whole(args.output, json.dumps(report, indent=1).encode())
    print(json.dumps({name: value for name, value in report.items() if name != "results"}))


if __name__ == "__main__":
    main()
