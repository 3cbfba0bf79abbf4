"""`evaluate` on the command line: one table for all drafters, nothing long before what cannot work is refused."""

import json

import pytest

from hf_dspark import cli
from hf_dspark.baselines import new_autoregressive_drafter
from hf_dspark.cli.evaluate import add_evaluate_command
from hf_dspark.evaluation import Evaluation
from tests.drafters import tiny_drafter
from tests.tiny import tiny_target
from tests.tokens import chat_tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny target with a tokenizer, and two drafters."""
    folder = tmp_path_factory.mktemp("models")
    target = tiny_target("qwen3", vocab_size=48)
    target.save_pretrained(folder / "target")
    chat_tokenizer().save_pretrained(folder / "target")
    for name, size in (("long", 4), ("short", 2)):
        tiny_drafter(target, block_size=size).save_pretrained(folder / name)
    new_autoregressive_drafter(target, block_size=3, target_layer_ids=[0, 1]).save_pretrained(folder / "eagle")
    return folder


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "words.jsonl"
    words = ("New", "and too", "Hello", "End", "too", "paragraph")
    path.write_text("".join(json.dumps({"turns": [word, "and"]}) + "\n" for word in words))
    return path


@pytest.fixture
def run(monkeypatch, folders, prompts):
    monkeypatch.setattr(cli, "COMMANDS", (add_evaluate_command,))

    def run(*arguments, drafters=("long",)):
        fast = ["--target", folders / "target", "--max-new-tokens", 6, "--batch-size", 4, "--first-turn"]
        named = [word for name in drafters for word in ("--drafter", folders / name)]
        return cli.main(list(map(str, ["evaluate", prompts, *fast, *named, *arguments])))

    return run


def refused(capsys, run, *arguments, **options):
    with pytest.raises(SystemExit) as exit_:
        run(*arguments, **options)
    assert exit_.value.code == 2
    return capsys.readouterr().err


def test_drafters_of_all_kinds_share_a_table_and_a_folder(run, tmp_path, capsys):
    output, drafters = tmp_path / "new" / "folder", ("long", "short", "eagle")
    assert run("--every", 5, "--allow-random", "--temperature", 0, "--output", output, drafters=drafters) == 0
    printed = capsys.readouterr().out
    assert "| drafter | T | words |" in printed and "| long | 0 |" in printed and "| short | 0 |" in printed
    assert "with the target's token" in printed and "without" in printed
    assert sorted(path.name for path in output.iterdir()) == ["evaluation.json", "evaluation.md"]
    results = Evaluation.load(output / "evaluation.json").results
    assert [(r.drafter, r.dataset, r.num_prompts, len(r.acceptance)) for r in results] == [
        ("long", "words", 2, 4),
        ("short", "words", 2, 2),
        ("eagle", "words", 2, 3),
    ]


def test_temperatures_add_up_and_both_are_the_default(run, tmp_path):
    common = ("--limit", 1, "--allow-random", "--output", tmp_path)
    run(*common)
    assert [r.temperature for r in Evaluation.load(tmp_path / "evaluation.json").results] == [0, 1]
    run(*common, "--force", "--temperature", 0.5, "--temperature", 0, 0.5)
    assert [r.temperature for r in Evaluation.load(tmp_path / "evaluation.json").results] == [0.5, 0]


def test_an_earlier_evaluation_is_replaced_whole_and_only_when_forced(run, tmp_path, capsys):
    ours = ("evaluation.json", "evaluation.md", "acceptance.png", "reliability.old.png")
    for name in (*ours, "notes.md", "mine.png"):
        (tmp_path / name).write_text("old")
    common = ("--limit", 1, "--allow-random", "--temperature", 0, "--output", tmp_path)
    assert "holds an evaluation (evaluation.json); --force replaces it" in refused(capsys, run, *common)
    assert all((tmp_path / name).read_text() == "old" for name in ours)
    assert run(*common, "--force") == 0
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["mine.png"]
    assert (tmp_path / "evaluation.json").read_text() != "old" and (tmp_path / "notes.md").read_text() == "old"


def test_what_is_finished_stays_when_the_rest_is_interrupted(run, tmp_path, monkeypatch, prompts):
    from hf_dspark.evaluation import _Run

    measure, calls = _Run.measure, []

    def interrupted(self, *args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(self, *args)

    monkeypatch.setattr(_Run, "measure", interrupted)
    assert run("--limit", 1, "--allow-random", "--output", tmp_path) == 130
    assert [r.temperature for r in Evaluation.load(tmp_path / "evaluation.json").results] == [0]
    assert "| long | 0 |" in (tmp_path / "evaluation.md").read_text()


def test_random_prompts_are_refused_unless_allowed(run, prompts, capsys):
    prompts.write_text(json.dumps({"turns": ["paragraph and paragraph"]}) + "\n")
    assert "look like random tokens" in refused(capsys, run)  # to a target with random weights all text is
    assert run("--allow-random", "--temperature", 0) == 0


@pytest.mark.parametrize(
    "options, said",
    [
        (["--drafter", "/nowhere"], "no folder with a config.json"),
        (["--drafter", "name="], "expected FOLDER or NAME=FOLDER"),
        (["--drafter", "x/long=/nowhere"], "no folder with a config.json"),
        (["--plot"], "--plot needs --output"),
        (["--temperature", "-1"], "argument --temperature"),
        (["--every", "0"], "argument --every"),
        (["--offset", "9"], "no prompts were given"),
        (["--max-new-tokens", "1"], "argument --max-new-tokens"),
        (["gsm9k"], "unrecognized arguments"),
    ],
)
def test_what_cannot_be_done_is_refused_with_its_reason(run, options, said, capsys):
    assert said in refused(capsys, run, *options)


def test_an_output_that_is_a_file_is_refused(run, prompts, capsys):
    assert f"--output {prompts}" in refused(capsys, run, "--output", prompts)


def test_two_drafters_of_one_name_need_names(run, folders, capsys):
    assert "two drafters are named 'long'" in refused(capsys, run, "--drafter", folders / "long")
    again = ("--drafter", f"again={folders / 'long'}", "--limit", 1, "--allow-random", "--temperature", 0)
    assert run(*again) == 0
    assert "| again | 0 |" in capsys.readouterr().out


def test_a_target_needs_its_drafter(run, capsys):
    assert "--target needs its --drafter" in refused(capsys, run, drafters=())


def test_a_broken_line_is_named(run, prompts, capsys):
    prompts.write_text('{"turns": ["fine"]}\nnot json\n')
    assert "words.jsonl, line 2: expected a JSON object" in refused(capsys, run)
