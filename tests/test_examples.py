"""The examples run as a person would run them, without a network once the demo target is in the cache."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_dspark.demo import load_demo_target

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module", autouse=True)
def cached_target():
    load_demo_target()


def run_example(name):
    # Nothing listens there: a download of any kind would fail.
    offline = {"HF_HUB_OFFLINE": "1", "HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"}
    command = [sys.executable, "-W", "error::DeprecationWarning:__main__", str(EXAMPLES / name)]
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
