"""`calibrate` on the command line: a whole calibrated folder or none, and nothing overwritten unasked."""

import json
import re

import pytest

from hf_dspark import DSparkDrafter, cli
from hf_dspark.baselines import new_autoregressive_drafter
from hf_dspark.cli.calibrate import read_prompts
from hf_dspark.demo import DRAFTER_FOLDER
from hf_dspark.modeling_autoregressive import AutoregressiveDrafter
from hf_dspark.plots import plot_reliability
from tests.drafters import tiny_drafter
from tests.tiny import tiny_target


class Words:
    """A tokenizer without a chat template: a word is its length."""

    chat_template = None

    def __call__(self, text):
        return {"input_ids": [3 + len(word) for word in text.split()]}


@pytest.fixture
def folder(tmp_path):
    """A tiny drafter's folder, with a file that is none of transformers'."""
    tiny_drafter(tiny_target("qwen3"), block_size=4).save_pretrained(tmp_path / "drafter")
    (tmp_path / "drafter" / "README.md").write_text("mine")
    return tmp_path / "drafter"


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    texts = [" ".join("x" * (1 + (row * word) % 50) for word in range(1, 8)) for row in range(24)]
    path.write_text("".join(json.dumps({"turns": [text, "more"]}) + "\n" for text in texts))
    return path


@pytest.fixture
def run(monkeypatch, folder, prompts):
    """Runs the command on the tiny pair."""
    pair = tiny_target("qwen3"), Words()
    monkeypatch.setattr("hf_dspark.cli.calibrate.load_demo_target", lambda: pair)

    def run(*arguments):
        fast = ["--drafter", folder, "--max-new-tokens", "24", "--batch-size", "12"]
        return cli.main(["calibrate", str(prompts), *map(str, fast), *map(str, arguments)])

    return run


def refused(capsys, run, *arguments):
    with pytest.raises(SystemExit) as exit_:
        run(*arguments)
    assert exit_.value.code == 2
    return capsys.readouterr().err


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_calibrated_folder_differs_from_its_source_in_the_calibration_alone(run, folder, tmp_path, capsys):
    source, output = contents(folder), tmp_path / "calibrated"
    assert run("--output", output, "--sglang", tmp_path / "sts.json", "--plot", tmp_path / "reliability.png") == 0
    printed = capsys.readouterr().out
    assert re.findall(r"^fitted on: (\w+), prompts: \d+ rounds", printed, re.MULTILINE) == ["greedy", "sampling"]
    assert contents(folder) == source, "the source is only read"
    written = contents(output)
    before, after = json.loads(source.pop("config.json")), json.loads(written.pop("config.json"))
    assert written == source
    changed = {name for name in after if after[name] != before.get(name)}
    assert {"confidence_temperatures", "confidence_calibration"} <= changed
    assert changed <= {"confidence_temperatures", "confidence_offsets", "confidence_calibration"}
    config = DSparkDrafter.from_pretrained(output).config
    assert config.confidence_calibration["sampling"]["dataset"] == "prompts"
    for mode in ("greedy", "sampling"):
        table = json.loads((tmp_path / f"sts.{mode}.json").read_text())
        assert table["temperatures"] == pytest.approx(config.confidence_temperatures[mode], abs=1e-4)
    assert (tmp_path / "reliability.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_held_out_rows_are_measured_and_one_mode_has_one_sglang_file(run, prompts, tmp_path, capsys):
    options = ["--every", 2, "--offset", 1, "--held-out", prompts, "--held-out-offset", 0, "--modes", "greedy"]
    assert run(*options, "--sglang", tmp_path / "sts.json") == 0
    printed = capsys.readouterr().out
    assert re.findall(r"^(fitted on|held out): greedy", printed, re.MULTILINE) == ["fitted on", "held out"]
    assert len(json.loads((tmp_path / "sts.json").read_text())["temperatures"]) == 4


def test_the_same_folder_is_calibrated_in_place_only_when_forced(run, folder, capsys):
    source = contents(folder)
    assert "--force replaces it" in refused(capsys, run, "--output", folder)
    assert contents(folder) == source
    assert run("--output", folder, "--force", "--modes", "greedy") == 0
    changed = {name for name, data in contents(folder).items() if data != source[name]}
    assert changed == {"config.json"}


def test_a_folder_that_is_not_empty_is_replaced_whole_when_forced(run, tmp_path, capsys):
    output = tmp_path / "there"
    output.mkdir()
    (output / "stale.txt").write_text("old")
    assert "is there and not an empty folder" in refused(capsys, run, "--output", output)
    assert contents(output) == {"stale.txt": b"old"}
    assert run("--output", output, "--force", "--modes", "greedy") == 0
    assert sorted(contents(output)) == ["README.md", "config.json", "model.safetensors"]


def test_a_copy_that_fails_leaves_what_was_there(run, tmp_path, monkeypatch, capsys):
    output = tmp_path / "there"
    output.mkdir()
    (output / "precious.txt").write_text("old")

    def failing(drafter, folder):
        raise OSError("the disk is full")

    monkeypatch.setattr("hf_dspark.cli.calibrate.save_calibration", failing)
    assert run("--output", output, "--force", "--modes", "greedy") == 1
    assert capsys.readouterr().err == "error: the disk is full\n"
    assert contents(output) == {"precious.txt": b"old"}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_packaged_drafter_is_never_written_without_being_named(run, prompts, monkeypatch):
    before = (DRAFTER_FOLDER / "config.json").read_bytes()
    assert run("--modes", "greedy") == 0
    assert (DRAFTER_FOLDER / "config.json").read_bytes() == before


@pytest.mark.parametrize(
    "options, said",
    [
        (["--drafter", "/nowhere"], "no folder with a config.json"),
        (["--output", "/nowhere/at/all"], "there is no folder /nowhere/at"),
        (["--plot", "/nowhere/x.png"], "there is no folder /nowhere"),
        (["--temperature", "0"], "argument --temperature"),
        (["--every", "0"], "argument --every"),
        (["--modes", "warm"], "argument --modes"),
        (["--every", "30", "--offset", "25"], "no prompts were given"),
        (["--limit", "1"], "calibration needs 200 rounds"),
    ],
)
def test_what_cannot_be_done_is_refused_with_its_reason(run, options, said, capsys):
    assert said in refused(capsys, run, *options)


def test_too_few_prompts_are_refused_before_anything_is_decoded(run, prompts, monkeypatch, capsys):
    monkeypatch.setattr("hf_dspark.calibration.WholeBlocks", None)
    error = refused(capsys, run, "--limit", "4")
    assert "4 prompts of at most 24 new tokens have 80 at most: give 10 prompts at the very least" in error
    held_out = prompts.with_name("held_out.jsonl")
    held_out.write_text('{"turns": ["x xx xxx"]}\n')
    assert "but 1 prompt of at most" in refused(capsys, run, "--held-out", held_out)
    assert "leaves no room" in refused(capsys, run, "--max-new-tokens", "4")


def test_a_drafter_of_the_other_kind_is_calibrated_too(run, tmp_path):
    source, output = tmp_path / "eagle", tmp_path / "calibrated"
    new_autoregressive_drafter(tiny_target("qwen3"), block_size=3, target_layer_ids=[0, 1]).save_pretrained(source)
    assert run("--drafter", source, "--output", output, "--modes", "greedy") == 0
    config = AutoregressiveDrafter.from_pretrained(output).config
    assert len(config.confidence_temperatures["greedy"]) == config.num_drafts


def test_rows_that_were_fitted_are_not_held_out(run, prompts, capsys):
    assert "the same rows" in refused(capsys, run, "--held-out", prompts)
    assert "the same rows" in refused(capsys, run, "--held-out", prompts, "--every", 5, "--offset", 5)


@pytest.mark.parametrize("line", ["not json", "{}", '{"turns": []}', '{"turns": [3]}', "[]", ""])
def test_a_broken_line_is_named(run, prompts, line, capsys):
    prompts.write_text('{"turns": ["fine"]}\n' + line + '\n{"turns": ["fine"]}\n')
    assert "prompts.jsonl, line 2: expected" in refused(capsys, run)


def test_rows_are_chosen_by_number_and_long_prompts_left_out(tmp_path):
    path = tmp_path / "rows.jsonl"
    texts = [f"row {number}" for number in range(10)]
    texts[4], texts[7] = "x" * 3001, "seven\u2028lines"
    path.write_text("\n".join(json.dumps({"turns": [text]}, ensure_ascii=False) for text in texts), encoding="utf-8")
    assert contents_of(read_prompts([path], every=3, offset=1, limit=None)) == ["row 1", "seven\u2028lines"]
    assert contents_of(read_prompts([path, path], every=5, offset=0, limit=1)) == ["row 0", "row 0"]


def contents_of(conversations):
    assert all(len(conversation) == 1 for conversation in conversations)
    return [message["content"] for (message,) in conversations]


def test_a_picture_of_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no reports"):
        plot_reliability([], tmp_path / "none.png")
    assert list(tmp_path.iterdir()) == []
