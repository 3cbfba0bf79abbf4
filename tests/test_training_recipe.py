"""Recipes: the shipped ones are the paper's, and what is wrong with one is said before anything is loaded."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma4TextConfig, LlamaConfig, Qwen3Config

from hf_dspark.training import new_drafter
from hf_dspark.training.recipe import read_recipe, recipe_of

RECIPES = Path(__file__).parents[1] / "examples" / "recipes"


def qwen3(hidden_size, intermediate_size, heads, layers):
    return Qwen3Config(
        vocab_size=151936, hidden_size=hidden_size, intermediate_size=intermediate_size, num_attention_heads=heads,
        num_key_value_heads=8, head_dim=128, num_hidden_layers=layers, max_position_embeddings=40960,
    )  # fmt: skip


TARGETS = {
    "qwen3-4b": qwen3(2560, 9728, 32, 36),
    "qwen3-8b": qwen3(4096, 12288, 32, 36),
    "qwen3-14b": qwen3(5120, 17408, 40, 40),
    "gemma4-12b": Gemma4TextConfig(hidden_size=256, num_hidden_layers=48, vocab_size=262144, intermediate_size=512),
    "demo": LlamaConfig(vocab_size=49152, hidden_size=576, num_hidden_layers=30, num_attention_heads=9),
}
BASE = {"output_dir": "out", "use_cpu": True, "train_files": ["a.jsonl"], "drafter_config": {"mask_token_id": 3}}


@pytest.mark.parametrize("name", TARGETS)
def test_shipped_recipes_build_a_drafter_that_fits_their_target(name):
    recipe = read_recipe(RECIPES / f"{name}.yaml", ["use_cpu=true"])
    fields = dict(recipe.pair.drafter_config)
    fields.setdefault("mask_token_id", 3)
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(TARGETS[name])
        drafter = new_drafter(target, **fields)
    assert drafter.config.num_target_layers == TARGETS[name].num_hidden_layers
    assert drafter.config.target_layer_ids == recipe.pair.drafter_config["target_layer_ids"]
    assert drafter.config.hidden_size == TARGETS[name].hidden_size


def test_there_is_no_recipe_that_is_not_tested():
    assert {path.stem for path in RECIPES.glob("*.yaml")} == TARGETS.keys()


@pytest.mark.parametrize("name", [name for name in TARGETS if name != "demo"])
def test_recipes_of_published_pairs_are_the_papers(name):
    recipe = read_recipe(RECIPES / f"{name}.yaml", ["use_cpu=true"])
    args, config = recipe.training, recipe.pair.drafter_config
    assert (config["num_hidden_layers"], config["block_size"], config["markov_rank"]) == (5, 7, 256)
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps * 8 == 512
    assert (args.learning_rate, args.adam_beta1, args.adam_beta2, args.weight_decay) == (6e-4, 0.9, 0.999, 0)
    assert (args.num_train_epochs, args.max_length, args.num_anchors, args.warmup_steps) == (10, 4096, 512, 0.04)
    weights = args.loss_weights
    assert (weights.ce_weight, weights.tv_weight, weights.confidence_weight, weights.decay) == (0.1, 0.9, 1, 4)


def test_overrides_reach_inside_and_numbers_may_be_spelt_in_any_way(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("learning_rate: 6e-4\ntrain_files: a.jsonl\noutput_dir: here\nuse_cpu: true\nmask_token: x\n")
    recipe = read_recipe(
        path, ["drafter_config.block_size=4", "num_anchors=7", "loss_decay=3", "save_strategy=no"], output_dir="there"
    )
    assert recipe.training.save_strategy == "no"
    assert recipe.training.learning_rate == 6e-4 and recipe.training.output_dir == "there"
    assert recipe.pair.drafter_config == {"block_size": 4} and recipe.training.num_anchors == 7
    assert recipe.data.train_files == ["a.jsonl"] and recipe.training.loss_weights.decay == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_anchor": 5}, "unknown key 'num_anchor'; did you mean 'num_anchors'"),
        ({"drafter_config": {"mask_token_id": 3, "blok_size": 5}}, "did you mean 'block_size'"),
        ({"num_anchors": "many"}, "num_anchors: expected int, got 'many'"),
        ({"packing": 1}, "packing: expected bool"),
        ({"learning_rate": "fast"}, "learning_rate: expected float"),
        ({"drafter": "folder"}, "leave them out"),
        ({"drafter_config": {}}, "mask_token"),
        ({"drafter_kind": "medusa"}, "not one of dspark, autoregressive"),
        ({"lora_rank": 4}, "name it with drafter"),
        ({"target_quantization": "2bit"}, "4bit"),
        ({"train_files": []}, "train_files is missing"),
        ({"hold_out": 1}, "at least 2"),
        ({"draft_vocab_size": 0}, "at least 1"),
        ({"num_anchors": 0}, "at least 1"),
        ({5: 1}, "unknown key 5"),
        ({"drafter_config": {"mask_token_id": 3, 5: 1}}, "unknown key 5"),
        ({"train_files": [5]}, "train_files: expected a list of texts, got 5"),
        ({"eval_files": [None]}, "eval_files: expected a list of texts"),
        ({"lora_targets": [5]}, "lora_targets: expected a list of texts"),
        ({"lora_alpha": 0}, "lora_alpha=0 must be at least 1"),
        ({"max_examples": 0}, "max_examples=0 must be at least 1"),
        ({"max_examples": -3}, "max_examples=-3"),
        ({"output_dir": ""}, "output_dir is empty"),
        ({"output_dir": None}, "output_dir is missing: .* give --output"),
        ({"learning_rate": float("nan")}, "learning_rate=nan must be a finite"),
        ({"learning_rate": -1.0}, "not be negative"),
        ({"ce_weight": float("inf")}, "ce_weight=inf must be a finite"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm=nan must be a finite"),
    ],
)
def test_what_cannot_be_meant_is_said(change, message):
    with pytest.raises(ValueError, match=message):
        recipe_of(BASE | change)


def test_a_file_that_is_no_recipe_is_refused(tmp_path):
    for text, message in (
        ("- a\n- b", "key: value"),
        ("a: [", "no YAML"),
        ("a: 1\nb: {c: 1, c: 2}", "'c' is there twice"),
    ):
        (tmp_path / "recipe.yaml").write_text(text)
        with pytest.raises(ValueError, match=message):
            read_recipe(tmp_path / "recipe.yaml")
    (tmp_path / "recipe.yaml").write_text("use_cpu: true")
    with pytest.raises(ValueError, match="no key=value"):
        read_recipe(tmp_path / "recipe.yaml", ["nothing"])


def test_importing_what_trains_loads_no_trainer_and_says_nothing():
    """bitsandbytes warns where it is imported; PEFT imports it, and transformers' Trainer imports PEFT."""
    code = "import sys, hf_dspark.baselines, hf_dspark.training as t; print({'peft', 'bitsandbytes'} & {*sys.modules})"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (child.returncode, child.stdout.strip(), child.stderr) == (0, "set()", "")
