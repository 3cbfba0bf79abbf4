"""The GPU check runs on the CPU with tiny shapes, and its acceptances are those of the stream."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_dspark import FixedLength
from hf_dspark.sps_profile import SPSProfile

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
gpu_check = importlib.import_module("gpu_check")
recordings = importlib.import_module("simulation.recording")


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *map(str, arguments)])
    gpu_check.main()


def test_tiny_check_measures_every_batch(monkeypatch, capsys, tmp_path):
    files = [tmp_path / "check.json", tmp_path / "profile.json"]
    run(monkeypatch, "--tiny", "--batch", 1, 2, "--rounds", 3, "--output", files[0], "--profile-output", files[1])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines[:4]] == ["batch", "---", "1", "2"]
    report = json.loads(files[0].read_text())
    assert json.loads(lines[-1]) == {name: value for name, value in report.items() if name != "results"}
    assert report["dtype"] == "float32" and report["torch"] == torch.__version__
    for batch, result in zip((1, 2), report["results"], strict=True):
        assert result["batch"] == batch
        assert result["plain"]["tokens_per_second"] > 0
        bare, fixed, auto = (result[name] for name in ("engine_without_drafts", "fixed", "auto"))
        assert (bare["undrafted_rounds"], bare["accepted_length"], bare["mean_verify_length"]) == (1, 1, 0)
        assert (fixed["undrafted_rounds"], fixed["mean_verify_length"]) == (0, gpu_check.NUM_DRAFTS)
        assert fixed["accepted_length"] > 1
        assert 0 <= auto["mean_verify_length"] <= gpu_check.NUM_DRAFTS
        assert auto["to_plain"] == pytest.approx(auto["tokens_per_second"] / result["plain"]["tokens_per_second"])
    assert SPSProfile.load(files[1]).block_size == gpu_check.NUM_DRAFTS


def test_replayed_rounds_commit_what_the_stream_says():
    generator = np.random.default_rng(0)
    answers = tuple(
        recordings.Answer(
            name="drawn",
            context=0,
            confidence=generator.random((60, gpu_check.NUM_DRAFTS)).astype(np.float32),
            acceptable=generator.integers(0, gpu_check.NUM_DRAFTS + 1, 60),
            max_lengths=np.full(60, gpu_check.NUM_DRAFTS),
        )
        for _ in range(3)
    )
    stream = gpu_check.Stream(recordings.Recording(answers, {}))
    target, drafter = gpu_check.random_pair(gpu_check.TINY, torch.device("cpu"))
    view, prompts = drafter.with_options(scheduler=FixedLength(4)), torch.randint(3, 256, (3, 8))
    measured = gpu_check.decode_replaying(target, view, prompts, stream, 2, 9)
    committed = 0
    for row in range(3):
        place = 0
        for step in range(2 + 9):
            gained = 1 + min(4, stream.at(row, place)[1])
            place += gained
            committed += gained if step >= 2 else 0
    assert measured["accepted_length"] == pytest.approx(committed / 27)
    assert measured["mean_verify_length"] == 4 and measured["undrafted_rounds"] == 0


def test_confidences_that_policies_see_are_the_streams():
    seen = []

    class Watching(FixedLength):
        def verify_lengths(self, request):
            seen.append(request.confidence)
            return super().verify_lengths(request)

    recording = gpu_check.synthetic_recording("gsm8k", num_answers=2, num_tokens=30)
    target, drafter = gpu_check.random_pair(gpu_check.TINY, torch.device("cpu"))
    view, prompts = drafter.with_options(scheduler=Watching(7)), torch.randint(3, 256, (2, 8))
    gpu_check.decode_replaying(target, view, prompts, gpu_check.Stream(recording), 0, 1)
    expected = np.stack([answer.confidence[0] for answer in recording.answers])
    assert np.array_equal(seen[0].numpy(), expected)


def test_without_a_gpu_it_says_so_and_fails(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no CUDA GPU is at hand.*--tiny"):
        run(monkeypatch)
