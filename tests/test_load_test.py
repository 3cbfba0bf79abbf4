"""The load test runs on tiny models, and says what it measured."""

import importlib
import json
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


def test_percentiles_are_of_the_values():
    values = list(range(100))
    assert load_test.percentile(values, 0.95) == 95 and load_test.percentile(values, 0.5) == 50
    assert load_test.percentile([3.0], 0.95) == 3.0


@pytest.fixture
def short_profile(tmp_path):
    from tests.test_examples import measured_profile

    profile = measured_profile(tmp_path)
    settings = json.loads(profile.read_text())
    if "block_size" in settings:
        settings["block_size"] = 3
    profile.write_text(json.dumps(settings))
    return profile


def test_a_smoke_run_compares_all_methods_at_all_rates(monkeypatch, capsys, tmp_path, short_profile):
    prompts, report, figure = tmp_path / "prompts.jsonl", tmp_path / "load.json", tmp_path / "load.png"
    prompts.write_text("".join(json.dumps({"turns": [f"What is {n} + 4?"]}) + "\n" for n in range(21)))
    arguments = [prompts, "--smoke", "--fixed", 2, "--profile", short_profile, "--json", report, "--plot", figure]
    monkeypatch.setattr(sys, "argv", ["load_test.py", *map(str, arguments)])
    threads = torch.get_num_threads()
    load_test.main()
    torch.set_num_threads(threads)
    found = json.loads(report.read_text())
    assert [entry["requests_per_second"] for entry in found["rates"]] == load_test.SMOKE["rates"]
    for entry in found["rates"]:
        assert list(entry["methods"]) == METHODS
        for name, row in entry["methods"].items():
            assert row["identical"] is True
            assert row["throughput_tokens_per_second"] > 0 and row["user_tokens_per_second"] > 0
            assert 0 <= row["queue_seconds_mean"] <= row["latency_seconds_p95"] >= row["latency_seconds_p50"] > 0
            assert 1 <= row["rows_per_round"] <= load_test.SMOKE["max_batch_size"]
            assert (row["verify_length"] == 0) == (name == "plain") or name == "auto"
    assert figure.read_bytes().startswith(b"\x89PNG")
    lines = capsys.readouterr().out.splitlines()
    assert len(json.loads(lines[-1])["auto_over_plain_throughput"]) == 2
