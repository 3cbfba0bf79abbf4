"""`hf-dspark train`: from a recipe to a drafter that `generate` takes, and refusals before anything is loaded."""

import argparse
import json
from types import SimpleNamespace

import pytest
import torch
import yaml

from hf_dspark import DSparkDrafter
from hf_dspark.cli.train import add_train_command
from hf_dspark.modeling_autoregressive import AutoregressiveDrafter
from hf_dspark.training import DSparkTrainingArguments, assembly
from hf_dspark.training.recipe import DataArguments, PairArguments, Recipe
from tests.test_training_data import TEMPLATE, tokenizer_with
from tests.tiny import tiny_target


def main(*arguments):
    parser = argparse.ArgumentParser()
    add_train_command(parser.add_subparsers())
    args = parser.parse_args(["train", *map(str, arguments)])
    return args.run(args)


@pytest.fixture
def recipe(tmp_path):
    """A recipe for a tiny target, its tokenizer and its own answers."""
    target = tiny_target("qwen3")
    target.save_pretrained(tmp_path / "target")
    tokenizer_with(TEMPLATE).save_pretrained(tmp_path / "target")
    prompts = torch.randint(3, 14, (10, 4), generator=torch.Generator().manual_seed(0))
    answers = target.generate(prompts, max_new_tokens=16, do_sample=False)[:, 4:].tolist()
    rows = [{"prompt_ids": p, "completion_ids": a} for p, a in zip(prompts.tolist(), answers, strict=True)]
    rows.append({"prompt_ids": [3, 4], "completion_ids": [5]})
    rows = [row | {"thinking": False} for row in rows]
    (tmp_path / "answers.jsonl").write_text("\n".join(map(json.dumps, rows)))
    values = {
        "target": str(tmp_path / "target"), "mask_token": "?", "drafter_config": {
            "num_hidden_layers": 1, "block_size": 4, "markov_rank": 8, "target_layer_ids": [0, 1]
        },
        "train_files": [str(tmp_path / "answers.jsonl")], "hold_out": 4, "output_dir": str(tmp_path / "out"),
        "use_cpu": True, "max_steps": 8, "save_steps": 4, "learning_rate": 1.0e-2, "per_device_train_batch_size": 2,
        "num_anchors": 8, "disable_tqdm": True, "logging_steps": 4,
    }  # fmt: skip
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.mark.filterwarnings("error:'pin_memory'")
def test_it_trains_a_drafter_that_generate_takes(recipe, tmp_path, capsys):
    assert main(recipe) == 0
    printed = capsys.readouterr().out
    assert "eval_accepted_length" in printed and str(tmp_path / "out") in printed
    drafter, target = DSparkDrafter.from_pretrained(tmp_path / "out"), tiny_target("qwen3")
    prompt = torch.tensor([[3, 4, 5]])
    plain = target.generate(prompt, max_new_tokens=12, do_sample=False)
    assert torch.equal(target.generate(prompt, max_new_tokens=12, do_sample=False, assistant_model=drafter), plain)
    assert drafter.config.target_fingerprint and drafter.config.mask_token_id == 13
    assert drafter.config.thinking is False and drafter.config.training_length == 4096


def test_a_filled_output_is_kept_unless_forced_and_can_be_resumed(recipe, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(recipe, "--resume")
    assert main(recipe, "--set", "max_steps=4") == 0
    with pytest.raises(SystemExit):
        main(recipe)
    assert "--resume goes on with it" in capsys.readouterr().err
    (tmp_path / "out" / "checkpoint-99").mkdir()  # left by a crash
    with pytest.warns(UserWarning, match="going on from checkpoint-4: checkpoint-99 is damaged"):
        assert main(recipe, "--resume") == 0
    state = json.loads((tmp_path / "out" / "checkpoint-8" / "trainer_state.json").read_text())
    assert state["global_step"] == 8
    assert main(recipe, "--set", "max_steps=2", "--force") == 0
    left = {path.name for path in (tmp_path / "out").glob("checkpoint-*")}
    assert left == {"checkpoint-2"}, "those of the old run are gone, so that --resume cannot go on with it"


def test_a_run_whose_checkpoints_are_all_damaged_is_not_resumed(recipe, tmp_path, capsys):
    assert main(recipe, "--set", "max_steps=4") == 0
    weights = tmp_path / "out" / "checkpoint-4" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(SystemExit):
        main(recipe, "--resume")
    assert "no whole checkpoint" in capsys.readouterr().err


def test_a_run_that_diverges_writes_no_drafter(recipe, tmp_path, capsys):
    assert main(recipe, "--set", "learning_rate=1e30", "warmup_steps=0", "save_strategy=no") == 1
    said = capsys.readouterr().err
    assert "the loss is nan at step 2" in said and "no drafter was written" in said
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_the_autoregressive_baseline_trains_from_a_recipe_too(recipe, tmp_path, capsys):
    values = yaml.safe_load(recipe.read_text())
    del values["mask_token"]
    shape = {"block_size": 3, "target_layer_ids": [0, 1]}
    recipe.write_text(yaml.safe_dump(values | {"drafter_kind": "autoregressive", "drafter_config": shape}))
    assert main(recipe, "--set", "max_steps=2") == 0
    assert AutoregressiveDrafter.from_pretrained(tmp_path / "out").config.num_drafts == 3
    del values["drafter_config"]
    recipe.write_text(yaml.safe_dump(values | {"drafter": str(tmp_path / "out"), "output_dir": str(tmp_path / "b")}))
    assert main(recipe, "--set", "max_steps=1") == 0
    assert AutoregressiveDrafter.from_pretrained(tmp_path / "b").config.num_drafts == 3
    assert "assistant_model=AutoregressiveDrafter.from_pretrained" in capsys.readouterr().out


def test_a_drafter_can_be_adapted(recipe, tmp_path, capsys):
    pytest.importorskip("peft", reason="needs peft: pip install 'hf-dspark[train]'")
    assert main(recipe) == 0
    values = yaml.safe_load(recipe.read_text())
    for key in ("mask_token", "drafter_config"):
        del values[key]
    recipe.write_text(yaml.safe_dump(values | {"drafter": str(tmp_path / "out"), "lora_rank": 4}))
    assert main(recipe, "--output", tmp_path / "adapted") == 0
    for name in ("lora_targets", "lora_modules_to_save"):
        with pytest.raises(SystemExit):
            main(recipe, "--output", tmp_path / "none", "--set", f"{name}=[q_proj, nothing]")
        assert f"{name}: the drafter has no 'nothing'" in capsys.readouterr().err
    adapted, base = (DSparkDrafter.from_pretrained(tmp_path / name).state_dict() for name in ("adapted", "out"))
    assert adapted.keys() == base.keys()
    assert not torch.equal(adapted["fc.weight"], base["fc.weight"])
    assert torch.equal(adapted["norm.weight"], base["norm.weight"])


def test_a_dry_run_prints_the_price_and_writes_nothing(recipe, tmp_path, capsys):
    assert main(recipe, "--dry-run", "--set", "draft_vocab_size=12") == 0
    printed = capsys.readouterr().out
    assert "7 (1 skipped" in printed and "3 held out" in printed
    estimate = int(printed.split("feature cache")[1].split("bytes")[0].replace(",", ""))
    assert not (tmp_path / "out").exists()
    cache = tmp_path / "cache"
    assert main(recipe, "--set", f"feature_cache={cache}", "draft_vocab_size=12", "max_steps=1") == 0
    real = sum(path.stat().st_size for path in cache.rglob("shard-*"))
    assert abs(estimate - real) < 0.06 * real, "texts of 20 tokens; see the tests of the cache for long ones"
    drafter = DSparkDrafter.from_pretrained(tmp_path / "out")
    assert f"drafter         {drafter.num_parameters():,} parameters" in printed


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("num_anchor=5", "did you mean 'num_anchors'"),
        ("train_files=missing.jsonl", "there is no such file"),
        ("mask_token=nowhere", "no token of the target"),
        ("drafter_config.target_layer_ids=[2]", "last layer"),
        ("drafter_config.block_size=four", "'block_size' expected int"),
        ("drafter_config.num_hidden_layers=0", "at least 1"),
        ("draft_vocab_size=9999", "more than the target's"),
        ("train_files=[5]", "expected a list of texts"),
    ],
)
def test_what_is_wrong_is_said(recipe, capsys, override, message):
    with pytest.raises(SystemExit):
        main(recipe, "--set", override)
    assert message in capsys.readouterr().err


def test_data_made_for_another_target_is_refused(recipe, tmp_path, capsys):
    (tmp_path / "answers.jsonl").write_text(json.dumps({"prompt_ids": [1], "completion_ids": [5, 6, 9999]}))
    with pytest.raises(SystemExit):
        main(recipe, "--set", "hold_out=null")
    assert "token 9999" in capsys.readouterr().err


def test_filters_that_leave_no_row_are_named(recipe, tmp_path, capsys):
    (tmp_path / "answers.jsonl").write_text(json.dumps({"prompt_ids": [1], "completion_ids": [5, 6]}))
    with pytest.raises(SystemExit):
        main(recipe)
    assert "no row is left to learn from: hold_out=4 keeps 1" in capsys.readouterr().err


def test_a_quantised_demo_target_is_loaded_from_its_prepared_folder(recipe, monkeypatch):
    loaded = []
    prepared = SimpleNamespace(name_or_path="prepared")
    monkeypatch.setattr(assembly, "load_demo_target", lambda **options: (prepared, None))
    monkeypatch.setattr(
        assembly.AutoModelForCausalLM, "from_pretrained", lambda *a, **k: loaded.append((a, k)) or tiny_target("qwen3")
    )
    pair = PairArguments(target="demo", target_quantization="8bit", mask_token="?")
    arguments = DSparkTrainingArguments("out", use_cpu=True)
    assembly.load_target(Recipe(pair, DataArguments(["a.jsonl"]), arguments))
    (((source,), options),) = loaded
    assert source == "prepared" and options["quantization_config"].load_in_8bit
