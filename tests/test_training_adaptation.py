"""LoRA on a trained drafter: it learns a domain on few weights, and leaves as a plain drafter folder."""

import copy
import importlib.util

import pytest
import torch

from hf_dspark import DSparkDrafter
from hf_dspark.training import TrainingExample, teacher_forced_acceptance, trained_drafter
from hf_dspark.training.assembly import with_adapters
from hf_dspark.training.recipe import recipe_of
from tests.test_training import fresh, losses_of, train, trainer_of
from tests.tiny import tiny_target

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="needs peft: pip install 'hf-dspark[train]'"
)


def pair(**lora):
    values = {"output_dir": "out", "use_cpu": True, "train_files": "a.jsonl", "drafter": "x", "lora_rank": 8}
    return recipe_of(values | lora).pair


@pytest.fixture(scope="module")
def target():
    """
    A target with two languages, low and high token ids: the next token depends on the newest one alone, and is nearly
    always of its language.
    """
    target = copy.deepcopy(tiny_target("qwen3"))
    language = torch.where(torch.arange(64) < 32, 1.0, -1.0)[:, None]
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        direction = torch.nn.functional.normalize(torch.randn(32, generator=torch.Generator().manual_seed(0)), dim=0)
        target.model.embed_tokens.weight += language * direction
        target.lm_head.weight += language * direction
    return target


def texts(target, first, count):
    """The target's sampled continuations of openings in the language of `first`."""
    torch.manual_seed(first)
    prompts = torch.randint(first, first + 28, (count, 3))
    rows = target.generate(prompts, max_new_tokens=24, do_sample=True, temperature=0.5).tolist()
    return [TrainingExample(tuple(row), (0,) * 3 + (1,) * 24) for row in rows]


@pytest.fixture(scope="module")
def domain(target):
    """Texts in the second language: some to learn, some held out."""
    made = texts(target, 33, 32)
    return made[8:], made[:8]


@pytest.fixture(scope="module")
def trained(target, tmp_path_factory):
    """A drafter that has seen the first language."""
    drafter = fresh(target, markov_rank=16, target_layer_ids=[0, 1])
    steps = {"max_steps": 150, "per_device_train_batch_size": 4}
    return train(target, drafter, texts(target, 3, 24), tmp_path_factory.mktemp("base"), **steps).model


def copy_of(drafter, folder):
    drafter.save_pretrained(folder)
    return DSparkDrafter.from_pretrained(folder)


@pytest.mark.parametrize(("whole", "gain"), [([], 0.3), (["markov_head"], 1.5)], ids=["alone", "with the Markov head"])
def test_adapters_raise_acceptance_on_held_out_text_of_their_domain(target, trained, domain, tmp_path, whole, gain):
    learnt, held_out = domain
    drafter = copy_of(trained, tmp_path / "base")
    before = teacher_forced_acceptance(target, drafter, held_out).accepted_length
    base = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    model = with_adapters(drafter, pair(lora_modules_to_save=["confidence_head", *whole]))
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert whole or trainable < 0.5 * sum(tensor.numel() for tensor in base.values())
    trainer = train(
        target, model, learnt, tmp_path / "adapted", max_steps=150, per_device_train_batch_size=4,
    )  # fmt: skip
    untouched = [name for name in base if not any(part in name for part in ("_proj", "fc", "confidence_head", *whole))]
    assert untouched and all(torch.equal(base[name], trainer.view.drafter.state_dict()[name]) for name in untouched)
    trainer.save_drafter(tmp_path / "final")
    final = DSparkDrafter.from_pretrained(tmp_path / "final")
    assert final.state_dict().keys() == base.keys()
    after = teacher_forced_acceptance(target, final, held_out).accepted_length
    assert after > before + gain
    prompt = torch.tensor([held_out[0].input_ids[:6]])
    plain = target.generate(prompt, max_new_tokens=12, do_sample=False)
    assert torch.equal(target.generate(prompt, max_new_tokens=12, do_sample=False, assistant_model=final), plain)


def test_adapters_resume_to_the_bit_and_checkpoints_hold_adapters_alone(target, trained, domain, tmp_path):
    def run(folder, steps):
        torch.manual_seed(0)
        model = with_adapters(copy_of(trained, tmp_path / "base"), pair())
        return trainer_of(
            target,
            model,
            domain[0],
            tmp_path / folder,
            max_steps=6,
            save_strategy="steps",
            save_steps=steps,
            activation_checkpointing=True,
        )

    whole = run("whole", 3)
    whole.train()
    resumed = run("parts", 3)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert losses_of(resumed)[-3:] == losses_of(whole)[-3:]
    names = {path.name for path in (tmp_path / "whole" / "checkpoint-6").iterdir()}
    assert "adapter_model.safetensors" in names and "model.safetensors" not in names
    merged = [trained_drafter(trainer.model).state_dict() for trainer in (whole, resumed)]
    assert all(torch.equal(merged[0][name], merged[1][name]) for name in merged[0])


def test_modules_that_a_drafter_lacks_are_not_asked_for(target):
    model = with_adapters(
        fresh(target, target_layer_ids=[0], enable_confidence_head=False),
        pair(lora_modules_to_save=["confidence_head"]),
    )
    assert any("lora_A" in name for name, _ in model.named_parameters())
