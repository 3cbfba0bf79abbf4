"""The examples run as a person would run them, without a network once the demo target is in the cache."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_dspark import DSparkDrafter
from hf_dspark.demo import load_demo_target

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module", autouse=True)
def cached_target():
    load_demo_target()


def run_example(name, *arguments):
    # Nothing listens there: a download of any kind would fail.
    offline = {"HF_HUB_OFFLINE": "1", "HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"}
    command = [sys.executable, "-W", "error::DeprecationWarning:__main__", str(EXAMPLES / name), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **offline}, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_quickstart_prints_an_identical_answer():
    lines = run_example("quickstart.py")
    assert lines[-1] == "identical to plain decoding: True"
    assert "168" in " ".join(lines[:-1]) or "12" in " ".join(lines[:-1]), "it talks about the question"


def test_batched_answers_every_question_and_sums_up():
    lines = run_example("batched.py")
    assert sum(line.startswith("> ") for line in lines) == 4
    assert "accepted length" in lines[-1]


def test_streaming_tells_every_round():
    lines = run_example("streaming.py")
    assert all(line.startswith(f"round {step:2}: ") for step, line in enumerate(lines))
    assert len(lines) > 5


def test_train_drafter_leaves_a_drafter_that_generate_takes(tmp_path):
    folder = tmp_path / "my-drafter"
    run_example(
        "train_drafter.py", "--output", str(folder), "--steps", "2", "--max-new-tokens", "24",
        "--draft-vocabulary", "256", "--num-anchors", "8", "--layers", "1",
    )  # fmt: skip
    target, tokenizer = load_demo_target()
    inputs = tokenizer("One two three", return_tensors="pt")
    plain = target.generate(**inputs, max_new_tokens=6, do_sample=False)
    drafter = DSparkDrafter.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(target.generate(**inputs, max_new_tokens=6, do_sample=False, assistant_model=drafter), plain)


def test_benchmark_reports_acceptance_overhead_and_ratios(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [f"What is {n} + 4?"]}) + "\n" for n in range(6)))
    lines = run_example(
        "benchmark.py", str(prompts), "--limit", "2", "--max-new-tokens", "12", "--batch", "2", "--lengths", "2",
        "--teacher-forced",
    )  # fmt: skip
    rows = [json.loads(line) for line in lines]
    assert rows[1]["prompts"] == 2 and rows[1]["accepted_length"] >= 1
    assert rows[1]["teacher_forced_conditional_at_live_anchors"][0] >= 0
    assert rows[-1]["identical"] and rows[-1]["ratio"] > 0
