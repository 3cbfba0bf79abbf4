"""The card tells what was measured, and says of everything else that it was not."""

import json
import sys

import pytest
from huggingface_hub import ModelCard
from transformers import CONFIG_MAPPING

from hf_dspark import Evaluation
from hf_dspark.cli.publish import add_publish_command
from hf_dspark.evaluation_figures import SetFigures
from hf_dspark.model_card import CardFigures, model_card
from hf_dspark.recorded_answers import RecordedAnswer
from hf_dspark.rounds import DecodingRound
from hf_dspark.sps_profile import DraftPoint, SPSProfile, VerifyPoint
from hf_dspark.target import target_fingerprint
from tests.drafters import AUTOREGRESSIVE, tiny_drafter
from tests.tiny import tiny_target

CALIBRATION = {
    "dataset": "gsm8k",
    "num_rounds": 1234,
    "temperature": 0.0,
    "conditional_acceptance": [0.5, 0.625, 0.75, 0.5, 0.25],
    "ece_before": [0.02] * 5,
    "ece_after": [0.01] * 5,
}


def drafter(**overrides):
    return tiny_drafter(
        tiny_target("qwen3"),
        target_name_or_path="Qwen/Qwen3-4B",
        target_fingerprint=target_fingerprint(tiny_target("qwen3")),
        **overrides,
    )


def figures_of(name, dataset="math500"):
    rounds = [
        DecodingRound(
            row=0,
            step=step,
            anchor_id=3,
            draft_ids=(3,) * 5,
            confidence=(),
            verify_length=5,
            num_accepted=step % 6,
            next_id=3,
            committed_ids=(3,) * (step % 6 + 1),
            batch_tokens=6,
            draft_seconds=0.0,
            verify_seconds=0.0,
        )
        for step in range(12)
    ]
    return SetFigures.of_answers(
        [RecordedAnswer(4, (3,) * 42, tuple(rounds))],
        drafter=name,
        dataset=dataset,
        temperature=0.0,
        num_prompts=1,
        num_skipped=0,
        num_drafts=5,
        thresholds=(),
        confidence_temperatures=None,
    )


def profile(block_size=5, **description):
    points = [VerifyPoint(size, 1, 128, (0.01 * size,) * 3) for size in (1, 2, 4, 8)]
    known = {"target_devices": {"": "Test CPU"}, "target_dtype": "float32", "threads": 2} | description
    return SPSProfile(block_size, points, [DraftPoint(1, 128, (0.005,) * 3)], description=known)


def test_the_metadata_name_the_target_the_library_and_the_tags():
    card = ModelCard(model_card(drafter().config, "me/drafter", CardFigures(license="apache-2.0"), tags=["mine"]))
    assert card.data.base_model == "Qwen/Qwen3-4B"
    assert card.data.library_name == "hf_dspark" and card.data.license == "apache-2.0"
    assert card.data.pipeline_tag == "text-generation"
    assert {"dspark", "speculative-decoding", "mine"} <= set(card.data.tags)
    assert target_fingerprint(tiny_target("qwen3")) in card.text and "from_pretrained('me/drafter'" in card.text


def test_a_target_that_is_a_folder_is_no_base_model():
    config = tiny_drafter(tiny_target("qwen3"), target_name_or_path="/home/me/target").config
    assert ModelCard(model_card(config, "me/drafter")).data.base_model is None


def test_what_was_not_measured_is_said_to_be_missing():
    text = model_card(drafter().config, "me/drafter")
    for words in ("Not measured.", "The data was not stated.", "Not calibrated", "`hf-dspark profile` measures yours"):
        assert words in text
    assert "nan" not in text.lower().split()


def test_measured_figures_are_in_the_card():
    target = tiny_target("qwen3")
    own = drafter(confidence_calibration={"greedy": CALIBRATION}, thinking=False, training_length=2048)
    figures = CardFigures(
        evaluation=Evaluation({"dtype": "bfloat16", "device": "Test CPU", "max_new_tokens": 96}, (figures_of("a"),)),
        sps_profile=profile(),
        has_sps_files=True,
        memory=own.memory_report(target),
        data="Answers to 2,000 prompts.",
        recipe="learning_rate: 0.001\n",
    )
    text = model_card(own.config, "me/drafter", figures)
    assert "| math500 |" in text and "3.50" in text  # accepted length: 0 to 5 drafts, and the target's token
    assert "| gsm8k (fitted on) | 0 | 1,234 | 2.00 | 1.00 |" in text
    assert "On Test CPU, 2 CPU threads, float32, 128 cached tokens a row" in text and "![Step times](sps.png)" in text
    assert "| 1 | 10.0 | 15.0 | 66.7 |\n| 2 | 20.0 | 25.0 | 40.0 |" in text and "`dspark_sps.json`" in text
    assert "cache, 1k tokens of a row" in text and "learning_rate: 0.001" in text
    assert "Answers to 2,000 prompts." in text and "2,048 tokens" in text and "without thinking" in text


def test_without_an_evaluation_the_calibration_set_stands_in():
    text = model_card(drafter(confidence_calibration={"greedy": CALIBRATION}).config, "me/drafter")
    assert "| gsm8k | 0 | 0.50 | 0.62 | 0.75 | 0.50 | 0.25 |" in text


def test_an_evaluation_of_several_drafters_needs_the_name():
    both = Evaluation({}, (figures_of("a"), figures_of("b", "other set")))
    with pytest.raises(ValueError, match=r"several drafters, \['a', 'b'\]"):
        model_card(drafter().config, "me/drafter", CardFigures(evaluation=both))
    with pytest.raises(ValueError, match="no drafter 'c'"):
        model_card(drafter().config, "me/drafter", CardFigures(evaluation=both, drafter_name="c"))
    text = model_card(drafter().config, "me/drafter", CardFigures(evaluation=both, drafter_name="b"))
    assert "other set" in text and "math500" not in text


def run(argv):
    import argparse

    parser = argparse.ArgumentParser()
    add_publish_command(parser.add_subparsers())
    args = parser.parse_args(["publish", *map(str, argv)])
    return args.run(args)


def test_a_dry_run_writes_what_would_be_sent(tmp_path, capsys):
    drafter().save_pretrained(tmp_path / "saved")
    tiny_target("qwen3").config.save_pretrained(tmp_path / "target")
    assert CONFIG_MAPPING["qwen3"].from_pretrained(tmp_path / "target").hidden_size == 32
    Evaluation({}, (figures_of("a"),)).save(tmp_path / "evaluation.json")
    argv = [tmp_path / "saved", "--repo", "me/drafter", "--evaluation", tmp_path / "evaluation.json", "--dry-run"]
    argv += ["--target", tmp_path / "target", "--remote-code", "--output", tmp_path / "out"]
    assert run(argv) == 0
    assert "written, not sent" in capsys.readouterr().out
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"README.md", "config.json", "model.safetensors", "modeling_hf_dspark.py"}
    text = (tmp_path / "out" / "README.md").read_text()
    assert "math500" in text and "saved by sharing embeddings" in text
    assert json.loads((tmp_path / "out" / "config.json").read_text())["auto_map"]["AutoModel"].endswith(
        "DSparkDrafter"
    )


def test_the_command_refuses_what_it_cannot_publish(tmp_path, capsys):
    for argv, words in (
        ([tmp_path, "--repo", "me/x", "--dry-run"], "--dry-run needs --output"),
        ([tmp_path, "--repo", "me/x", "--dry-run", "--output", tmp_path / "out"], "holds no drafter"),
    ):
        with pytest.raises(SystemExit):
            run(argv)
        assert words in capsys.readouterr().err


def test_step_times_are_published_as_a_table_a_picture_and_for_sglang(tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'hf-dspark[plot]'")
    drafter().save_pretrained(tmp_path / "saved")
    profile(target_fingerprint=target_fingerprint(tiny_target("qwen3"))).save(tmp_path / "sps.json")
    argv = [tmp_path / "saved", "--repo", "me/drafter", "--dry-run", "--output", tmp_path / "out"]
    assert run([*argv, "--sps", tmp_path / "sps.json"]) == 0
    assert (tmp_path / "out" / "sps.png").read_bytes().startswith(b"\x89PNG")
    table = json.loads((tmp_path / "out" / "dspark_sps.json").read_text())
    assert table == profile().to_sglang() and table["sample_batch_tokens"] == [1, 2, 4, 8]
    text = (tmp_path / "out" / "README.md").read_text()
    assert "On Test CPU" in text and "| 8 | 80.0 |" in text and "](sps.png)" in text


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (lambda path: path.write_text("{}"), "is not an SPS profile of hf_dspark"),
        (lambda path: None, "No such file"),
        (lambda path: profile(block_size=7).save(path), "7 drafts a round, but this drafter has 5"),
        (lambda path: profile(target_fingerprint="0" * 16).save(path), "another target"),
    ],
    ids=["no profile", "no file", "of other blocks", "of another target"],
)
def test_step_times_that_are_not_this_drafters_are_refused_before_anything_is_written(tmp_path, capsys, bad, words):
    drafter().save_pretrained(tmp_path / "saved")
    bad(tmp_path / "sps.json")
    argv = [tmp_path / "saved", "--repo", "me/drafter", "--dry-run", "--output", tmp_path / "out"]
    with pytest.raises(SystemExit):
        run([*argv, "--sps", tmp_path / "sps.json"])
    assert words in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_picture_that_cannot_be_drawn_is_told_before_anything_is_written(tmp_path, capsys, monkeypatch):
    drafter().save_pretrained(tmp_path / "saved")
    profile().save(tmp_path / "sps.json")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit):
        run(
            [
                tmp_path / "saved",
                "--repo",
                "me/x",
                "--dry-run",
                "--output",
                tmp_path / "out",
                "--sps",
                tmp_path / "sps.json",
            ]
        )
    assert "hf-dspark[plot]" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(("block_size", "words"), [(1, "MTP-1"), (4, "EAGLE-3-style")])
def test_the_card_of_an_autoregressive_drafter_loads_it_and_promises_no_other_server(block_size, words):
    own = tiny_drafter(tiny_target("qwen3"), **AUTOREGRESSIVE | {"block_size": block_size})
    text = model_card(own.config, "me/drafter")
    assert f"# Autoregressive ({words}) drafter for" in text
    assert "hf_dspark.AutoregressiveDrafter.from_pretrained('me/drafter'" in text
    assert text.count("Does not read this kind of drafter") == 3 and "hf-dspark convert" not in text
