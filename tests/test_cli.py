"""The command line: arguments are understood or refused with the remedy, and the demo runs from end to end."""

import re

import pytest

from hf_dspark import cli
from hf_dspark.auto import Auto
from hf_dspark.demo import DemoAssetsError
from hf_dspark.policies import CausalGreedy, LaggedBudget, Lookahead
from hf_dspark.scheduling import ConfidenceThreshold, FixedLength


@pytest.mark.parametrize(
    "text, scheduler",
    [
        ("fixed", FixedLength()),
        ("fixed:0", FixedLength(0)),
        ("fixed:3", FixedLength(3)),
        ("threshold:0.5", ConfidenceThreshold(0.5)),
        ("auto", Auto()),
        ("greedy", CausalGreedy()),
        ("greedy:envelope", CausalGreedy(envelope=True)),
        ("lagged", LaggedBudget()),
        ("lagged:3", LaggedBudget(3)),
        ("lookahead", Lookahead()),
    ],
)
def test_a_scheduler_can_be_written_as_a_word(text, scheduler):
    parsed = cli.parse_scheduler(text)
    assert type(parsed) is type(scheduler) and parsed == scheduler


@pytest.mark.parametrize(
    "text",
    [
        "",
        "quick",
        "fixed:",
        "fixed:x",
        "fixed:-1",
        "threshold",
        "threshold:2",
        "threshold:nan",
        "auto:1",
        "greedy:x",
        "lagged:x",
    ],
)
def test_a_wrong_scheduler_is_refused_by_name(text, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["demo", "--scheduler", text])
    assert exit_.value.code == 2
    assert f"argument --scheduler: {text!r}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", [["--batch", "0"], ["--max-new-tokens", "1"], ["--temperature", "-1"], ["--seed", "x"]]
)
def test_a_wrong_number_is_refused(option, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["demo", *option])
    assert exit_.value.code == 2
    assert f"argument {option[0]}" in capsys.readouterr().err


@pytest.mark.parametrize("arguments, expected", [(["--help"], "demo"), (["demo", "--help"], "default: auto")])
def test_help_needs_no_model(arguments, expected, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 0
    assert expected in capsys.readouterr().out


def test_a_missing_pair_is_one_line_and_no_traceback(monkeypatch, capsys):
    def load_demo_pair():
        raise DemoAssetsError("the disk is full")

    monkeypatch.setattr("hf_dspark.cli.demo.load_demo_pair", load_demo_pair)
    assert cli.main(["demo"]) == 1
    assert capsys.readouterr().err == "error: the disk is full\n"


def run_demo(capsys, *arguments):
    assert cli.main(["demo", "--max-new-tokens", "12", "--batch", "2", *arguments]) == 0
    return capsys.readouterr().out


def test_the_demo_shows_both_answers_and_finds_them_identical(capsys):
    output = run_demo(capsys, "--prompt", "What is the capital of France?")
    assert "\x1b" not in output, "not a terminal: no colours"
    plain, drafted = re.search(r"\nplain\n(.+)\n\nwith the drafter\n(.+)\n\nnow 2 prompts", output, re.DOTALL).groups()
    assert plain == drafted and "Paris" in plain
    assert len(re.findall(r"identical$", output, re.MULTILINE)) == 2
    assert "DIFFERENT" not in output
    assert re.search(r"^1 prompt, auto .*x ", output, re.MULTILINE)
    assert re.search(r"^2 prompts, auto .*x ", output, re.MULTILINE)
    assert "on cpu, float32" in output and "greedy" in output


def test_the_sampled_demo_claims_only_the_distribution(capsys):
    output = run_demo(capsys, "--temperature", "0.7", "--seed", "5", "--scheduler", "fixed:2")
    assert len(re.findall(r"2 drafts .*same distribution$", output, re.MULTILINE)) == 2
    assert "temperature 0.7, seed 5" in output
    assert "identical" not in output
