"""Loads and converts drafters of the published sizes, made of random bytes, and prints what that takes of memory.

    python examples/formats_at_full_size.py [--folder FOLDER] [--shape qwen3-4b gemma4-12b]

Needs about three times the drafter's size on disk (1.2 GB and 2.7 GB in bfloat16) and its size once in memory.
"""

import argparse
import json
import math
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from hf_dspark import DSparkConfig, DSparkDrafter
from hf_dspark.formats.convert import convert
from hf_dspark.formats.description import describe_drafter
from hf_dspark.formats.plan import expected_shapes
from hf_dspark.formats.reading import config_fields

SHARD_BYTES = 400 * 2**20
COMMON = {
    "num_hidden_layers": 5,
    "block_size": 7,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "dtype": "bfloat16",
    "rms_norm_eps": 1e-6,
}
SHAPES = {
    "qwen3-4b": {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 1_000_000.0,
        "mask_token_id": 151669,
        "target_layer_ids": [1, 9, 17, 25, 33],
        "num_target_layers": 36,
    },
    "gemma4-12b": {
        "architectures": ["Gemma4DSparkModel"],
        "model_type": "gemma4_unified_text",
        "vocab_size": 262144,
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "final_logit_softcapping": 30.0,
        "hidden_size_per_layer_input": 0,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
        },
        "mask_token_id": 4,
        "target_layer_ids": [5, 17, 29, 41, 46],
        "num_target_layers": 48,
    },
}


def write_random(folder: Path, fields: dict) -> None:
    """A sharded DeepSpec folder of random bfloat16 weights, a few MiB in memory at a time."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(fields))
    shapes = expected_shapes(DSparkConfig.from_dict(config_fields(fields)))
    noise = (torch.randn(2**22) * 0.02).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in shapes.items():
        if sum(2 * math.prod(s) for s in shards[-1].values()) + 2 * math.prod(shape) > SHARD_BYTES and shards[-1]:
            shards.append({})
        shards[-1][name] = shape
    weight_map = {}
    for number, shard in enumerate(shards):
        header, end = {}, 0
        for name, shape in shard.items():
            begin, end = end, end + 2 * math.prod(shape)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
            weight_map[name] = f"model-{number}.safetensors"
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)
        with (folder / f"model-{number}.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(encoded)) + encoded)
            for start in range(0, end, len(noise)):
                file.write(noise[: end - start])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def peak_mebibytes() -> float:
    """Most memory this process ever had."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024


def measure(shape: str, folder: Path) -> None:
    """Describes, converts there and back, loads; prints what each took."""
    source, native, back = (folder / name for name in ("source", "native", "back"))
    write_random(source, COMMON | SHAPES[shape])
    print(describe_drafter(source), flush=True)
    for name, start, end, layout in (("native", source, native, "native"), ("back", native, back, "deepspec")):
        before, began = peak_mebibytes(), time.perf_counter()
        convert(start, end, to=layout)
        seconds = time.perf_counter() - began
        print(f"  convert {name:<7}{seconds:6.1f} s, peak memory +{peak_mebibytes() - before:,.0f} MiB", flush=True)
    before, began = peak_mebibytes(), time.perf_counter()
    drafter = DSparkDrafter.from_pretrained(back)
    total = sum(parameter.detach().float().abs().mean().item() for parameter in drafter.parameters())
    size = sum(parameter.numel() * parameter.element_size() for parameter in drafter.parameters()) / 2**20
    print(
        f"  load and read  {time.perf_counter() - began:6.1f} s, peak memory +{peak_mebibytes() - before:,.0f} MiB "
        f"for {size:,.0f} MiB of parameters (checksum {total:.3f})"
    )


def main() -> None:
    """Each shape in a process of its own, whose peak is its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--only", choices=SHAPES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        if args.only:
            measure(args.only, folder)
        for shape in () if args.only else args.shape:
            subprocess.run([sys.executable, __file__, "--only", shape, "--folder", str(folder)], check=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
