"""`examples/acceptance.py` on a tiny pair: any kind of drafter loads; live and teacher-forced figures agree."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from tests.drafters import AUTOREGRESSIVE, tiny_drafter
from tests.test_training_data import TEMPLATE, tokenizer_with
from tests.tiny import tiny_target

EXAMPLE = Path(__file__).parents[1] / "examples" / "acceptance.py"


@pytest.mark.parametrize("kind", [{}, AUTOREGRESSIVE], ids=["parallel", "autoregressive"])
def test_live_acceptance_is_what_one_teacher_forced_pass_says(tmp_path, monkeypatch, capsys, kind):
    target, tokenizer = tiny_target("llama"), tokenizer_with(TEMPLATE)
    tokenizer.pad_token, tokenizer.padding_side = "</s>", "left"
    tiny_drafter(target, **kind).save_pretrained(tmp_path / "drafter")
    rows = [{"turns": [text]} for text in ("hello there", *["left out"] * 4, "see you")]
    (tmp_path / "greetings.jsonl").write_text("\n".join(map(json.dumps, rows)))
    main = runpy.run_path(str(EXAMPLE))["main"]
    monkeypatch.setitem(main.__globals__, "load_demo_target", lambda: (target, tokenizer))
    arguments = ["--drafter", tmp_path / "drafter", "--max-new-tokens", 24, "--teacher-forced"]
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *map(str, [tmp_path / "greetings.jsonl", *arguments])])
    main()
    device, found, overhead = map(json.loads, capsys.readouterr().out.splitlines())
    assert device["greedy"] and found["set"] == overhead["set"] == "greetings" and found["prompts"] == 2
    assert 1 <= found["accepted_length"] <= 6 and 0 < overhead["overhead_share"] < 1
    forced = found["teacher_forced_conditional_at_live_anchors"]
    assert forced[0] == pytest.approx(found["conditional_acceptance"][0], abs=0.1), "but for blocks that the end cuts"
