"""The card tells what was measured, and says of everything else that it was not."""

import json

import pytest
from huggingface_hub import ModelCard
from transformers import CONFIG_MAPPING

from hf_dspark import Evaluation
from hf_dspark.cli.publish import add_publish_command
from hf_dspark.evaluation_figures import SetFigures
from hf_dspark.model_card import CardFigures, model_card
from hf_dspark.recorded_answers import RecordedAnswer
from hf_dspark.rounds import DecodingRound
from hf_dspark.sps_profile import SPSProfile, VerifyPoint
from hf_dspark.target import target_fingerprint
from tests.drafters import tiny_drafter
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


def profile():
    points = [VerifyPoint(size, 1, 128, (0.01 * size,) * 3) for size in (1, 2, 4, 8)]
    return SPSProfile(5, points, description={"target_devices": {"": "Test CPU"}, "target_dtype": "float32"})


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
        has_sps_picture=True,
        memory=own.memory_report(target),
        data="Answers to 2,000 prompts.",
        recipe="learning_rate: 0.001\n",
    )
    text = model_card(own.config, "me/drafter", figures)
    assert "| math500 |" in text and "3.50" in text  # accepted length: 0 to 5 drafts, and the target's token
    assert "| gsm8k (fitted on) | 0 | 1,234 | 2.00 | 1.00 |" in text
    assert "verifying 1 token 10.0 ms, 6 tokens 60.0 ms" in text and "![Step times](sps.png)" in text
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
