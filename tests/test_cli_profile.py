"""`hf-dspark profile`: measures the models it is given, prints what it found and keeps it where generate looks."""

import json
import re

import pytest
import torch

from hf_dspark import cli, profile_cache
from hf_dspark.cli.profile import profile_table
from hf_dspark.profiling import cached_profile
from hf_dspark.sps_profile import DraftPoint, SPSProfile, VerifyPoint
from tests.drafters import tiny_drafter
from tests.tiny import tiny_target

SMALL = ["--max-batch-tokens", "6", "--contexts", "4", "20"]


@pytest.fixture
def folders(tmp_path):
    target = tiny_target("qwen3")
    target.save_pretrained(tmp_path / "target")
    tiny_drafter(target).save_pretrained(tmp_path / "drafter")
    return ["--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter")]


def test_it_measures_prints_and_writes(folders, tmp_path, capsys):
    outputs = {name: tmp_path / name for name in ("profile.json", "sps.json", "profile.png")}
    options = zip(("--output", "--sglang", "--plot"), map(str, outputs.values()), strict=True)
    assert cli.main(["profile", *folders, *SMALL, *(word for pair in options for word in pair)]) == 0
    printed = capsys.readouterr().out
    profile = SPSProfile.load(outputs["profile.json"])
    assert profile.max_batch_tokens == 6 and profile.contexts == (4, 20)
    assert set(profile_table(profile)) < set(printed.splitlines())
    assert len(re.findall(r"^ +\d+ .*\d$", printed, re.MULTILINE)) == len(profile.verify_points)
    assert all(str(path) in printed for path in outputs.values())
    assert json.loads(outputs["sps.json"].read_text()) == profile.to_sglang()
    assert outputs["profile.png"].read_bytes().startswith(b"\x89PNG")


def test_without_output_generate_finds_it(folders, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_DSPARK_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_DSPARK_NO_PROFILE", raising=False)
    monkeypatch.setattr(profile_cache, "_KEPT", {})
    assert cli.main(["profile", *folders, *SMALL]) == 0
    path = re.search(r"saved: (.+)", capsys.readouterr().out).group(1)
    target = tiny_target("qwen3")
    assert cached_profile(target, tiny_drafter(target), max_batch_tokens=6) == SPSProfile.load(path)


def test_a_target_alone_can_be_measured_in_half_precision(folders, tmp_path):
    path = tmp_path / "profile.json"
    assert cli.main(["profile", *folders[:2], *SMALL, "--dtype", "bfloat16", "--output", str(path)]) == 0
    profile = SPSProfile.load(path)
    assert profile.description["target_dtype"] == "bfloat16" and not profile.draft_points


def test_threads_are_those_asked_for(folders, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    assert cli.main(["profile", *folders[:2], *SMALL, "--threads", "3", "--output", str(tmp_path / "p.json")]) == 0
    assert asked == [3]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--max-batch-tokens", "0"], "argument --max-batch-tokens"),
        (["--contexts", "-1"], "argument --contexts"),
        (["--drafter", "somewhere"], "--drafter needs its --target"),
        (["--output", "no/such/folder/profile.json"], "no folder no/such/folder"),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_is_loaded(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr("hf_dspark.cli.profile.load_demo_pair", lambda **options: pytest.fail("loaded"))
    with pytest.raises(SystemExit) as exit_:
        cli.main(["profile", *arguments])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_a_target_that_cannot_be_packed_is_refused_with_the_reason(tmp_path, capsys):
    tiny_target("bloom").save_pretrained(tmp_path / "target")
    with pytest.raises(SystemExit) as exit_:
        cli.main(["profile", "--target", str(tmp_path / "target"), *SMALL])
    assert exit_.value.code == 2
    assert "cannot be packed" in capsys.readouterr().err


def test_the_table_tells_drafted_rounds_and_plain_ones_apart():
    points = (VerifyPoint(1, 1, 9, (0.1,)), VerifyPoint(4, 1, 9, (0.2,)), VerifyPoint(4, 4, 9, (0.25,)))
    lines = profile_table(SPSProfile(3, points, (DraftPoint(1, 9, (0.05,)),)))
    assert [line.split() for line in lines[1:]] == [
        ["1", "1", "9", "150.0", "100.0", "6.7", "6.7"],
        ["4", "1", "9", "250.0", "200.0", "4.0", "16.0"],
        ["4", "4", "9", "250.0", "250.0", "4.0", "16.0", "plain"],
    ]
