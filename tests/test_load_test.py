"""The load test runs on tiny models, and says what it measured."""

import importlib
import json
import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
load_test = importlib.import_module("load_test")
METHODS = ["plain", "fixed 2", "auto"]


def test_arrivals_are_poisson_at_the_given_rate_and_the_same_for_everyone():
    moments = load_test.arrivals(4.0, 20000, seed=1)
    assert moments[0] == 0 and moments == sorted(moments) == load_test.arrivals(4.0, 20000, seed=1)
    gaps = torch.tensor(moments).diff()
    assert float(gaps.mean()) == pytest.approx(0.25, rel=0.03)
    assert float(gaps.std()) == pytest.approx(0.25, rel=0.05), "as wide as an exponential"
    assert load_test.arrivals(math.inf, 3, seed=1) == [0.0] * 3


def test_percentiles_are_of_the_values():
    values = list(range(100))
    assert load_test.percentile(values, 0.95) == 95 and load_test.percentile(values, 0.5) == 50
    assert load_test.percentile([3.0], 0.95) == 3.0


def test_repeats_are_summed_up_by_median_and_spread():
    repeats = [{"speed": value, "length": None, "rows": 2, "identical": True} for value in (5.0, 1.0, 2.0)]
    found = load_test.summed_up(repeats)
    assert found == {"speed": 2.0, "length": None, "rows": 2, "identical": True, "spread": {"speed": [1.0, 5.0]}}
    repeats[1]["identical"] = False
    assert load_test.summed_up(repeats)["identical"] is False and "spread" not in load_test.summed_up(repeats[:1])
    runs = [{name: {"throughput_tokens_per_second": speed} for name, speed in run.items()} for run in
            ({"plain": 2.0, "auto": 3.0}, {"plain": 4.0, "auto": 2.0})]  # fmt: skip
    assert load_test.against_plain(runs) == [1.5, 0.5] and load_test.against_plain([{"auto": {}}]) == []


@pytest.fixture
def short_profile(tmp_path):
    from tests.test_examples import measured_profile

    profile = measured_profile(tmp_path)
    settings = json.loads(profile.read_text())
    if "block_size" in settings:
        settings["block_size"] = 3
    profile.write_text(json.dumps(settings))
    return profile


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["load_test.py", *map(str, arguments)])
    threads = torch.get_num_threads()
    load_test.main()
    torch.set_num_threads(threads)


def test_a_smoke_run_compares_all_methods_at_all_rates(monkeypatch, capsys, tmp_path, short_profile):
    prompts, report, figure = tmp_path / "prompts.jsonl", tmp_path / "load.json", tmp_path / "load.png"
    prompts.write_text("".join(json.dumps({"turns": [f"What is {n} + 4?"]}) + "\n" for n in range(21)))
    arguments = [prompts, "--smoke", "--fixed", 2, "--profile", short_profile, "--json", report, "--plot", figure]
    run(monkeypatch, *arguments, "--repeats", 2)
    found = json.loads(report.read_text())
    assert [entry["requests_per_second"] for entry in found["rates"]] == [5.0, "all at once"]
    for entry in found["rates"]:
        assert list(entry["methods"]) == METHODS and len(entry["auto_over_plain"]) == 2
        for name, row in entry["methods"].items():
            assert row["identical"] is True
            assert row["throughput_tokens_per_second"] > 0 and row["user_tokens_per_second"] > 0
            assert 0 <= row["queue_seconds_mean"] <= row["latency_seconds_p95"] >= row["latency_seconds_p50"] > 0
            assert 1 <= row["rows_per_round"] <= load_test.SMOKE["max_batch_size"]
            assert (row["verify_length"] == 0) == (name == "plain") or name == "auto"
    assert figure.read_bytes().startswith(b"\x89PNG")
    lines = capsys.readouterr().out.splitlines()
    ratios = json.loads(lines[-1])["auto_over_plain_throughput"]
    assert ratios == {str(entry["requests_per_second"]): entry["auto_over_plain"] for entry in found["rates"]}
    for line, (rate, own) in zip(lines[-3:-1], ratios.items(), strict=True):
        middle = sum(own) / 2
        assert line.startswith(f"auto against plain at {rate}: {middle:.2f}x ({min(own):.2f} to {max(own):.2f})")
        assert line.endswith("at least as fast" if middle >= 1 else "SLOWER")


def test_methods_can_be_chosen(monkeypatch, capsys, tmp_path, short_profile):
    report = tmp_path / "load.json"
    run(monkeypatch, "--smoke", "--methods", "auto", "--profile", short_profile, "--json", report)
    for entry in json.loads(report.read_text())["rates"]:
        assert list(entry["methods"]) == ["auto"] and entry["auto_over_plain"] == []
        assert entry["methods"]["auto"]["identical"] is None, "there is no plain text to compare with"
    assert "against plain" not in capsys.readouterr().out
