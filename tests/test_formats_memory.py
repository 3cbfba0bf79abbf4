"""Loading takes no more memory than the drafter, converting hardly any: measured, up to published sizes."""

import json
import os
import subprocess
import sys

import pytest

from .formats_memory import sparse_deepspec, sparse_specforge

pytestmark = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="resets the peak of memory in Linux's /proc"
)

MEASURE = """
import json, shutil, sys
from pathlib import Path
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from hf_dspark import DSparkDrafter
from hf_dspark.formats.convert import convert
from hf_dspark.formats.description import describe_drafter

def rise_of_peak(action):
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    return action(), peak() - before

def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024

def load_and_read(source):
    return sum(float(p.detach().sum()) for p in DSparkDrafter.from_pretrained(source).parameters())

small, published = json.loads(sys.argv[1])
done, converting = rise_of_peak(lambda: convert(small, small + "-out", to="deepspec", shard_bytes=64 * 2**20))
_, reading = rise_of_peak(lambda: load_and_read(small))
print(json.dumps({"size": done.num_bytes, "converting": converting, "reading": reading}))
for source, one_layer, target in published:
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(AutoConfig.for_model(**target), dtype=torch.bfloat16)
    drafter, loading = rise_of_peak(lambda: DSparkDrafter.from_pretrained(source))
    report, size = drafter.memory_report(target), describe_drafter(source).num_bytes
    done, converting = rise_of_peak(lambda: convert(one_layer, one_layer + "-out", to="native"))
    found = {"size": size, "loading": loading, "weights": report.drafter_weight_bytes, "saved": report.saved_bytes}
    print(json.dumps(found | {"converted": done.num_bytes, "converting": converting}))
    shutil.rmtree(done.folder)
    del drafter
"""
PUBLISHED = {
    "qwen3-4b": dict(
        model_type="qwen3", vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    ),
    "gemma4-12b": dict(
        model_type="gemma4_text", vocab_size=262144, hidden_size=3840, intermediate_size=15360, num_hidden_layers=48,
        num_attention_heads=16, num_key_value_heads=8, head_dim=256, tie_word_embeddings=True,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What a process of its own found: of a drafter of 150 MB, then of those of published sizes."""
    folder, published = tmp_path_factory.mktemp("drafters"), []
    for name, target in PUBLISHED.items():
        whole = sparse_deepspec(folder / name, name)
        one_layer = sparse_deepspec(folder / f"{name}-1", name, num_hidden_layers=1)
        published.append((str(whole), str(one_layer), target))
    work = (str(sparse_specforge(folder / "small", shards=4)), published)
    command = [sys.executable, "-c", MEASURE, json.dumps(work)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_converting_takes_little_memory_and_reading_takes_the_drafter_once(measured):
    small = measured[0]
    assert small["size"] > 140 * 2**20
    assert small["converting"] < 0.3 * small["size"]
    assert small["reading"] < 1.3 * small["size"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_drafter_of_published_size_loads_reports_and_converts_without_a_second_copy(measured, name):
    """Qwen3-4B's (1.2 GB) and Gemma4-12B's (2.7 GB): real configs, tensors that are holes; of one layer to convert."""
    found, target = measured[1 + list(PUBLISHED).index(name)], PUBLISHED[name]
    assert found["size"] > 1e9 and found["loading"] < 0.1 * found["size"], "weights are read when they are used"
    assert found["size"] <= found["weights"] < 1.001 * found["size"], "the report counts what the files hold"
    assert found["saved"] == 2 * target["vocab_size"] * target["hidden_size"], "one table lent, in bfloat16"
    assert found["converted"] > 4e8 and found["converting"] < 0.1 * found["converted"]
