"""`prepare-data` on the command line: a file that the same command goes on with."""

import json

import pytest

from hf_dspark import cli
from hf_dspark.cli.prepare_data import add_prepare_data_command
from hf_dspark.prompt_sets import read_jsonl
from tests.drafters import tiny_drafter
from tests.tiny import tiny_target
from tests.tokens import chat_tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    target = tiny_target("qwen3", vocab_size=48)
    target.save_pretrained(folder / "target")
    chat_tokenizer().save_pretrained(folder / "target")
    tiny_drafter(target).save_pretrained(folder / "drafter")
    return folder


@pytest.fixture
def run(monkeypatch, folders, tmp_path):
    monkeypatch.setattr(cli, "COMMANDS", (add_prepare_data_command,))
    prompts = tmp_path / "words.jsonl"
    words = ("New", "and too", "Hello", "End", "too", "paragraph")
    prompts.write_text("".join(json.dumps({"prompt": word}) + "\n" for word in words))

    def run(*arguments):
        fast = ["--target", folders / "target", "--max-new-tokens", 5, "--batch-size", 2, "--temperature", 0]
        return cli.main(list(map(str, ["prepare-data", prompts, *fast, *arguments])))

    return run


def refused(capsys, run, *arguments):
    with pytest.raises(SystemExit) as exit_:
        run(*arguments)
    assert exit_.value.code == 2
    return capsys.readouterr().err


def test_held_out_rows_are_left_out_and_the_sum_is_printed(run, tmp_path, capsys):
    output = tmp_path / "answers.jsonl"
    assert run("--hold-out", 5, "--output", output) == 0
    rows = read_jsonl(output)
    assert sorted(row["index"] for row in rows) == [1, 2, 3, 4]
    tokens = sum(len(row["completion_ids"]) for row in rows)
    assert f"answers.jsonl: 4 answers, {tokens} tokens" in capsys.readouterr().out


def test_a_drafter_does_not_change_the_text(run, folders, tmp_path, monkeypatch):
    from hf_dspark import FixedLength
    from hf_dspark.cli import prepare_data

    load = prepare_data.load_drafter  # `auto` would measure this machine first
    fixed = FixedLength()
    monkeypatch.setattr(prepare_data, "load_drafter", lambda *args: load(*args).with_options(scheduler=fixed))
    run("--output", tmp_path / "plain.jsonl")
    run("--output", tmp_path / "drafted.jsonl", "--drafter", folders / "drafter")
    assert (tmp_path / "plain.jsonl").read_bytes() == (tmp_path / "drafted.jsonl").read_bytes()
    assert json.loads((tmp_path / "drafted.jsonl.meta.json").read_text())["parameters"]["drafted"]


def test_an_interrupted_run_is_taken_up_by_the_same_command(run, tmp_path, monkeypatch, capsys):
    from hf_dspark import preparation

    run("--output", tmp_path / "whole.jsonl")
    answer, calls = preparation._answer, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return answer(*args)

    monkeypatch.setattr(preparation, "_answer", interrupted)
    output = tmp_path / "answers.jsonl"
    assert run("--output", output) == 130
    assert "the same command goes on" in capsys.readouterr().out and len(read_jsonl(output)) == 2
    assert run("--output", output) == 0
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes() and len(calls) == 4


def test_other_parameters_are_refused(run, tmp_path, capsys):
    run("--output", tmp_path / "answers.jsonl")
    assert "seed: 0 then, 1 now" in refused(capsys, run, "--output", tmp_path / "answers.jsonl", "--seed", 1)


def test_thinking_and_sampling_are_recorded(run, tmp_path):
    output = tmp_path / "answers.jsonl"
    run("--output", output, "--thinking", "off", "--temperature", 0.5, "--top-p", 0.9, "--samples", 2, "--limit", 1)
    rows = read_jsonl(output)
    assert [(row["thinking"], row["temperature"], row["top_p"], row["top_k"]) for row in rows] == [
        (False, 0.5, 0.9, None)
    ] * 2


@pytest.mark.parametrize(
    "options, said",
    [
        (["--output", "/nowhere/x.jsonl"], "name a file in a folder that is there"),
        (["--output", "."], "name a file in a folder that is there"),
        ([], "the following arguments are required: --output"),
        (["--output", "x.jsonl", "--top-p", "2"], "top_p=2.0 must be above 0"),
        (["--output", "x.jsonl", "--hold-out", "1"], "argument --hold-out"),
        (["--output", "x.jsonl", "--offset", "9"], "no prompts were given"),
    ],
)
def test_what_cannot_be_done_is_refused_with_its_reason(run, options, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert said in refused(capsys, run, *options)
