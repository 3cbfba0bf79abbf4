"""Calibration through real decoding: what it stores, what it never touches, what it refuses."""

import copy
import json
import random

import pytest
import torch

from hf_dspark import DSparkDrafter, FixedLength
from hf_dspark.calibration import (
    MIN_ROUNDS,
    calibrate,
    collect_rounds,
    evaluate_calibration,
    load_sglang,
    save_calibration,
    store_calibration,
)
from hf_dspark.calibration_report import CalibrationReport, temperatures_from_sglang
from hf_dspark.recording import raw_view
from tests.drafters import BigramPair, generate, left_padded, scripted, tiny_drafter
from tests.tiny import tiny_target

OPTIONS = {"max_new_tokens": 96, "batch_size": 12, "dataset": "made up"}


@pytest.fixture(scope="module")
def target():
    """Its next token depends on the newest one alone, so a script can know it."""
    return BigramPair(copy.deepcopy(tiny_target("qwen3"))).target


@pytest.fixture(scope="module")
def next_ids(target):
    return target(torch.arange(64)[:, None]).logits[:, 0].argmax(-1).tolist()


@pytest.fixture
def drafter(target, next_ids):
    """Right about none to three drafts, by lot, whatever its confidences say."""

    def script(row, prefix, num_drafts):
        token, right, drafts = prefix[-1], random.Random(f"{row} {len(prefix)}").randrange(4), []
        for depth in range(num_drafts):
            token = next_ids[token]
            drafts.append(token if depth < right else (token + 1) % 64)
        return drafts

    return scripted(tiny_drafter(target, block_size=4), script)


def prompts(lengths=(3, 9, 5, 4, 12, 7) * 2):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 64, (length,), generator=generator).tolist() for length in lengths]


def report(mode="greedy", num_drafts=4, seed=0, num_rounds=400, offsets=None):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rounds, num_drafts, generator=generator)
    accepted = (torch.rand(num_rounds, num_drafts, generator=generator) < logits.sigmoid()).cumprod(1).sum(1)
    return CalibrationReport.of_rounds(
        logits, accepted, temperatures=[1.5] * num_drafts, offsets=offsets, mode=mode, dataset="made up"
    )


def test_calibration_stores_temperatures_and_where_they_come_from_and_a_reload_gives_the_same(
    target, drafter, tmp_path
):
    reports = calibrate(target, drafter, prompts(), **OPTIONS)
    config = drafter.config
    assert list(reports) == ["greedy", "sampling"]
    for mode, found in reports.items():
        assert config.confidence_temperatures[mode] == pytest.approx(found.temperatures, abs=1e-4)
        assert found.num_rounds >= MIN_ROUNDS
        assert all(after <= before for before, after in zip(found.ece_before, found.ece_after, strict=True))
        origin = config.confidence_calibration[mode]
        assert (origin["dataset"], origin["num_rounds"]) == ("made up", found.num_rounds)
        assert origin["temperature"] == {"greedy": 0.0, "sampling": 1.0}[mode]
        for name in ("conditional_acceptance", "ece_before", "ece_after"):
            assert len(origin[name]) == 4
    assert reports["greedy"].temperatures != (1.0,) * 4, "the fit found something to do"
    assert config.confidence_calibration["greedy"]["conditional_acceptance"][0] == pytest.approx(0.75, abs=0.1)

    drafter.save_pretrained(tmp_path)
    loaded = DSparkDrafter.from_pretrained(tmp_path)
    assert loaded.config.confidence_temperatures == config.confidence_temperatures
    assert loaded.config.confidence_calibration == config.confidence_calibration


def test_offsets_are_stored_for_their_mode_and_go_with_the_next_calibration(drafter, tmp_path):
    offsets = [-0.5, 0.0, 0.25, 0.0]
    store_calibration(drafter, report("sampling", offsets=offsets))
    store_calibration(drafter, report("greedy"))
    assert drafter.config.confidence_offsets == {"sampling": offsets}
    assert drafter.config.confidence_scaling("sampling") == ([1.5] * 4, offsets)
    assert drafter.config.confidence_scaling("greedy") == ([1.5] * 4, [0.0] * 4)
    drafter.save_pretrained(tmp_path)
    assert DSparkDrafter.from_pretrained(tmp_path).config.confidence_offsets == {"sampling": offsets}
    load_sglang(drafter, {"temperatures": [1.0] * 4}, mode="sampling")
    assert drafter.config.confidence_offsets is None


def test_a_report_of_before_there_were_offsets_is_read():
    found = report()
    values = found.to_dict()
    assert list(values.pop("offsets")) == [0.0] * 4
    assert CalibrationReport.from_dict(values) == found


def test_calibration_changes_neither_the_text_nor_the_weights(target, drafter):
    inputs = left_padded([4, 9])
    weights = {name: value.clone() for name, value in drafter.state_dict().items()}
    before = generate(target, inputs, drafter, max_new_tokens=24)
    calibrate(target, drafter, prompts(), modes=["greedy"], **OPTIONS)
    after = generate(target, inputs, drafter, max_new_tokens=24)
    assert torch.equal(before.sequences, after.sequences)
    assert before.rounds[0].confidence != after.rounds[0].confidence
    assert all(torch.equal(value, weights[name]) for name, value in drafter.state_dict().items())


@pytest.mark.parametrize("mode", ["greedy", "sampling"])
def test_a_temperature_divides_the_logit_of_every_confidence_and_an_offset_is_added(target, mode):
    raw, inputs = tiny_drafter(target, block_size=4), left_padded([4, 9])
    temperatures = [0.5, 2.0, 1.0, 4.0]
    other = {"greedy": "sampling", "sampling": "greedy"}[mode]
    scaled = raw.with_options()
    scaled.config = copy.deepcopy(raw.config)
    scaled.config.confidence_temperatures = {mode: temperatures, other: [9.0] * 4}
    offsets = [0.25, 0.0, -0.5, 0.0]
    scaled.config.confidence_offsets = {mode: offsets, other: [9.0] * 4}

    def confidences(drafter):
        torch.manual_seed(0)
        rounds = generate(target, inputs, drafter, max_new_tokens=16, do_sample=mode == "sampling").rounds
        return torch.tensor([r.confidence for r in rounds if len(r.confidence) == 4], dtype=torch.float64)

    expected = (confidences(raw).logit() / torch.tensor(temperatures) + torch.tensor(offsets)).sigmoid()
    torch.testing.assert_close(confidences(scaled), expected, atol=1e-5, rtol=1e-4)
    again = confidences(raw_view(scaled))
    assert torch.equal(again, confidences(raw))
    assert scaled.config.confidence_temperatures is not None


def test_what_is_learned_from_does_not_depend_on_earlier_temperatures_options_or_the_random_state(target, drafter):
    expected = collect_rounds(target, drafter, prompts(), mode="sampling", max_new_tokens=96, seed=3)
    drafter.config.confidence_temperatures = {"sampling": [3.0] * 4}
    view = drafter.with_options(max_draft_tokens=1, on_round=lambda r: pytest.fail("the caller's callback"))
    torch.manual_seed(5)
    state = torch.get_rng_state()
    found = collect_rounds(target, view, prompts(), mode="sampling", max_new_tokens=96, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(found.num_accepted, expected.num_accepted)
    torch.testing.assert_close(found.logits, expected.logits)


def test_only_rounds_that_verified_the_whole_block_are_learned_from(target, drafter):
    seen = []
    view = drafter.with_options(on_round=seen.append, scheduler=None)
    found = collect_rounds(target, drafter, prompts([5] * 12), mode="greedy", max_new_tokens=96, batch_size=12)
    inputs = {"input_ids": torch.tensor(prompts([5] * 12)), "attention_mask": torch.ones(12, 5, dtype=torch.long)}
    generate(target, inputs, view.with_options(scheduler=FixedLength()), max_new_tokens=96)
    whole = [r for r in seen if r.verify_length == 4]
    assert len(whole) < len(seen)
    assert found.num_accepted.tolist() == [r.num_accepted for r in whole]


def test_batches_are_decoded_as_they_come(target, drafter):
    inputs = left_padded([5] * 12)
    rows = inputs["input_ids"].tolist()
    options = {"mode": "greedy", "max_new_tokens": 96}
    batch = collect_rounds(target, drafter, [inputs], **options)
    assert torch.equal(
        batch.num_accepted, collect_rounds(target, drafter, rows, **options, batch_size=12).num_accepted
    )


def test_calibrating_one_mode_keeps_the_other(target, drafter):
    store_calibration(drafter, report("sampling"))
    kept = copy.deepcopy(drafter.config.confidence_calibration["sampling"])
    calibrate(target, drafter, prompts(), modes=["greedy"], **OPTIONS)
    assert drafter.config.confidence_temperatures["sampling"] == [1.5] * 4
    assert drafter.config.confidence_calibration["sampling"] == kept


def test_held_out_evaluation_uses_the_stored_temperatures_and_changes_nothing(target, drafter):
    store_calibration(drafter, report("greedy"))
    config = copy.deepcopy(drafter.config.to_dict())
    (found,) = evaluate_calibration(target, drafter, prompts(), max_new_tokens=96, dataset="other").values()
    assert (found.mode, found.dataset, found.temperatures) == ("greedy", "other", (1.5,) * 4)
    assert found.before != found.after
    assert drafter.config.to_dict() == config
    with pytest.raises(ValueError, match="no confidence_temperatures for \\['sampling'\\]: run calibrate"):
        evaluate_calibration(target, drafter, prompts(), modes=["sampling"])


def test_an_error_while_decoding_or_fitting_leaves_the_drafter_as_it_was(target, drafter, monkeypatch):
    store_calibration(drafter, report("greedy"))
    config = copy.deepcopy(drafter.config.to_dict())
    calls = []

    def failing(logits, num_accepted):
        calls.append(len(logits))
        if len(calls) == 2:
            raise RuntimeError("the second mode")
        return (2.0,) * 4, (0.0,) * 4

    monkeypatch.setattr("hf_dspark.calibration.fit_scaling", failing)
    with pytest.raises(RuntimeError, match="the second mode"):
        calibrate(target, drafter, prompts(), **OPTIONS)
    with pytest.raises(ValueError):
        calibrate(target, drafter, prompts(), **OPTIONS, logits_processor=[], temperature=-1.0)
    assert drafter.config.to_dict() == config


@pytest.mark.parametrize(
    "given, error, said",
    [
        ({"prompts": []}, ValueError, "no prompts"),
        ({"prompts": ["text"]}, TypeError, "encode text"),
        ({"prompts": "text"}, TypeError, "encode text"),
        ({"prompts": [[3], []]}, ValueError, "prompt 1 is empty"),
        ({"modes": ["warm"]}, ValueError, "allowed are one or both"),
        ({"modes": []}, ValueError, "allowed are one or both"),
        ({"modes": "greedy"}, ValueError, "as a list"),
        ({"prompts": [[3, 4]], "max_new_tokens": 12}, ValueError, rf"needs {MIN_ROUNDS} rounds.*: give \d+ prompts"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(target, drafter, given, error, said):
    with pytest.raises(error, match=said):
        calibrate(target, drafter, **{"prompts": prompts(), "max_new_tokens": 96} | given)
    assert drafter.config.confidence_temperatures is None


def test_a_drafter_without_a_confidence_head_is_refused(target):
    with pytest.raises(ValueError, match="no confidence head"):
        calibrate(target, tiny_drafter(target, enable_confidence_head=False), prompts())


def test_temperatures_for_another_block_are_refused(drafter):
    with pytest.raises(ValueError, match="4 positive numbers"):
        store_calibration(drafter, report(num_drafts=3))
    with pytest.raises(ValueError, match="4 positive numbers"):
        load_sglang(drafter, {"temperatures": [1.0, 2.0]}, mode="greedy")
    assert drafter.config.confidence_temperatures is None


def test_a_position_that_no_round_got_to_is_stored_as_one_that_is_not_accepted(drafter):
    logits, num_accepted = torch.zeros(300, 4), torch.tensor([0, 1, 2] * 100)
    found = CalibrationReport.of_rounds(logits, num_accepted, temperatures=[1.0] * 4, mode="greedy", dataset="made up")
    store_calibration(drafter, found)
    assert drafter.config.confidence_calibration["greedy"]["conditional_acceptance"] == [0.6667, 0.5, 0.0, 0.0]


def test_saving_changes_two_fields_of_a_folder_and_nothing_else(drafter, tmp_path):
    drafter.save_pretrained(tmp_path)
    before = json.loads((tmp_path / "config.json").read_text())
    weights = (tmp_path / "model.safetensors").read_bytes()
    store_calibration(drafter, report())
    save_calibration(drafter, tmp_path)
    after = json.loads((tmp_path / "config.json").read_text())
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {"confidence_temperatures", "confidence_calibration"} and set(after) == set(before)
    assert (tmp_path / "model.safetensors").read_bytes() == weights
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    with pytest.raises(ValueError, match="no drafter folder"):
        save_calibration(drafter, tmp_path / "absent")


def test_a_config_written_before_there_was_calibration_still_loads(drafter, tmp_path):
    drafter.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    del stored["confidence_calibration"], stored["confidence_temperatures"]
    (tmp_path / "config.json").write_text(json.dumps(stored))
    assert DSparkDrafter.from_pretrained(tmp_path).config.confidence_calibration is None


def test_a_report_survives_json(tmp_path):
    found = report(seed=2, num_rounds=6)
    assert CalibrationReport.from_dict(json.loads(json.dumps(found.to_dict(), allow_nan=False))).to_dict() == (
        found.to_dict()
    )
    full = report()
    assert CalibrationReport.from_dict(full.to_dict()) == full
    with pytest.raises(ValueError, match="not a calibration report"):
        CalibrationReport.from_dict({"mode": "greedy"})
    with pytest.raises(ValueError, match="not a calibration report"):
        CalibrationReport.from_dict(full.to_dict() | {"bins": 1})


def test_bins_hold_every_round_once_and_add_up_to_the_error():
    for quality in report().after:
        assert sum(each.num_rounds for each in quality.bins) == 400
        gaps = sum(each.num_rounds * abs(each.predicted - each.observed) for each in quality.bins)
        assert gaps / 400 == pytest.approx(quality.ece)


def test_a_report_prints_a_line_for_each_draft():
    lines = str(report()).splitlines()
    assert lines[0].startswith("greedy, made up: 400 rounds; ECE")
    assert [line.split("|")[1].strip() for line in lines[4:]] == ["1", "2", "3", "4"]
    assert len({line.count("|") for line in lines[2:]}) == 1


def test_sglang_tables_go_out_and_come_back(drafter, tmp_path):
    path, found = tmp_path / "sts.json", report()
    found.to_sglang(path)
    table = json.loads(path.read_text())
    assert set(table) == {"temperatures", "dataset", "num_samples", "ece_before", "ece_after"}
    assert table["num_samples"] == 400 and table["ece_after"] == pytest.approx(sum(found.ece_after) / 4)
    store_calibration(drafter, report("sampling"))
    load_sglang(drafter, path, mode="sampling")
    load_sglang(drafter, table, mode="greedy")
    assert drafter.config.confidence_temperatures == {"greedy": [1.5] * 4, "sampling": [1.5] * 4}
    assert drafter.config.confidence_calibration is None, "nobody knows where these come from"
    with pytest.raises(ValueError, match="'warm'"):
        load_sglang(drafter, path, mode="warm")


@pytest.mark.parametrize(
    "content", ["", "[1.0]", "{}", '{"temperatures": []}', '{"temperatures": [1, 0]}', '{"temperatures": ["1"]}',
                '{"temperatures": [true]}', '{"temperatures": 1.0}', '{"temperatures": [NaN]}'],
)  # fmt: skip
def test_a_file_that_is_no_sglang_table_is_refused_by_name(tmp_path, content):
    path = tmp_path / "sts.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="sts.json"):
        temperatures_from_sglang(path)
