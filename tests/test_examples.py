"""The examples run as a person would run them, without a network once the demo target is in the cache."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_dspark import DSparkDrafter, SPSProfile
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


def held_out_prompts(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"turns": [f"What is {n} + 4?"]}, ensure_ascii=False) for n in range(21)]
    lines[10] = json.dumps({"turns": ["What is one\u2028 plus four?"]}, ensure_ascii=False)  # no end of a line
    prompts.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(prompts)


def test_acceptance_reports_acceptance_and_overhead(tmp_path):
    lines = run_example(
        "acceptance.py", held_out_prompts(tmp_path), "--limit", "2", "--max-new-tokens", "12", "--teacher-forced"
    )
    rows = [json.loads(line) for line in lines]
    assert rows[1]["prompts"] == 2 and rows[1]["accepted_length"] >= 1
    assert rows[1]["teacher_forced_conditional_at_live_anchors"][0] >= 0
    assert 0 < rows[2]["overhead_share"] < 1


def test_benchmark_compares_every_method_on_every_kind_of_prompts(tmp_path):
    prompts, report, figure = held_out_prompts(tmp_path), tmp_path / "speed.json", tmp_path / "speed.png"
    lines = run_example(
        "benchmark.py", "--easy", prompts, "--batch", "1", "2", "--kinds", "easy", "hostile", "--prompts", "2",
        "--single-prompts", "1", "--max-new-tokens", "4", "--json", str(report), "--plot", str(figure),
        "--methods", "lookup", "fixed 6", "lagged", "auto", "--profile", str(measured_profile(tmp_path)),
    )  # fmt: skip
    cells = json.loads(report.read_text())["cells"]
    assert [(cell["kind"], cell["batch"]) for cell in cells] == [
        ("easy", 1), ("hostile", 1), ("easy", 2), ("hostile", 2)
    ]  # fmt: skip
    assert cells[0]["methods"].keys() == {"plain", "lookup", "fixed 6", "lagged", "auto"}
    assert "lookup" not in cells[2]["methods"]
    assert all(row["identical"] for cell in cells[::2] for row in cell["methods"].values())
    assert all(row["ratio"] > 0 for cell in cells for row in cell["methods"].values())
    assert figure.read_bytes().startswith(b"\x89PNG")
    found = json.loads(lines[-1])
    assert found["cells"] == 4
    assert found["auto_against_best_fixed_least"] == found["auto_against_best_fixed_or_none_least"] > 0
    again = tmp_path / "again.png"
    lines = run_example("benchmark.py", "--read", str(report), str(report), "--plot", str(again))
    assert json.loads(lines[-1]) == found | {
        name: 2 * found[name] for name in ("cells", *(key for key in found if key.endswith("0.98")))
    }
    assert again.read_bytes().startswith(b"\x89PNG")


def measured_profile(tmp_path):
    """Step times of this project's reference machine, so that the test need not measure."""
    path = tmp_path / "profile.json"
    milliseconds = {1: 66, 2: 110, 4: 118, 8: 130, 16: 140, 32: 170}
    sglang = {
        "sample_batch_tokens": list(milliseconds),
        "sample_steps_per_sec": [1000 / ms for ms in milliseconds.values()],
        "max_batch_tokens": 32,
    }
    SPSProfile.from_sglang(sglang, block_size=6).save(path)
    return path
