"""The trainer learns, resumes to the bit, skips what teaches nothing, and leaves the target alone."""

import copy
import math

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, TrainerCallback, TrainingArguments

from hf_dspark import DSparkDrafter
from hf_dspark.target import target_fingerprint
from hf_dspark.training import (
    DSparkTrainer,
    DSparkTrainingArguments,
    TrainingExample,
    default_target_layers,
    frequent_token_ids,
    new_drafter,
    teacher_forced_acceptance,
)


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, initializer_range=0.3, eos_token_id=1, pad_token_id=0, bos_token_id=2,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def examples(target):
    """Eight prompts and the target's own greedy answers."""
    prompts = torch.randint(3, 60, (8, 6), generator=torch.Generator().manual_seed(1))
    answers = target.generate(prompts, max_new_tokens=24, do_sample=False, eos_token_id=None)
    return [TrainingExample(tuple(row), (0,) * 6 + (1,) * 24) for row in answers.tolist()]


def fresh(target, **config):
    torch.manual_seed(3)
    fields = {"num_hidden_layers": 1, "block_size": 4, "markov_rank": 8, "target_layer_ids": [0, 1, 2]}
    return new_drafter(target, 63, **(fields | config))


def trainer_of(target, drafter, examples, folder, *, callbacks=None, eval_dataset=None, **options):
    defaults = {
        "learning_rate": 1e-2, "num_anchors": 12, "save_strategy": "no", "use_cpu": True, "logging_steps": 1,
        "disable_tqdm": True, "warmup_steps": 2,
    }  # fmt: skip
    args = DSparkTrainingArguments(str(folder), **(defaults | options))
    return DSparkTrainer(
        drafter, args, target=target, train_dataset=examples, eval_dataset=eval_dataset, callbacks=callbacks
    )


def train(*args, **options):
    trainer = trainer_of(*args, **options)
    trainer.train()
    return trainer


def losses_of(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class StopAfter(TrainerCallback):
    """Ends a run after so many steps, as a crash would, the learning rate's schedule unaware of it."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


def test_overfitting_eight_prompts_reaches_more_than_nine_tenths_acceptance_live(target, examples, tmp_path):
    drafter = fresh(target, markov_rank=32, intermediate_size=256)
    trainer = train(
        target, drafter, examples, tmp_path, max_steps=260, per_device_train_batch_size=4, num_anchors=24,
        logging_steps=100,
    )  # fmt: skip
    trainer.save_model()
    drafter = DSparkDrafter.from_pretrained(tmp_path)
    prompts = torch.tensor([example.input_ids[:6] for example in examples])
    output = target.generate(
        prompts, max_new_tokens=24, do_sample=False, eos_token_id=None, assistant_model=drafter,
        return_dict_in_generate=True,
    )  # fmt: skip
    assert output.sequences.tolist() == [list(example.input_ids) for example in examples]
    live = output.stats.conditional_acceptance_at(1)
    assert output.stats.mean_verify_length > 1 and live > 0.9 and output.stats.verify_rate > 0.9
    meter = teacher_forced_acceptance(target, drafter, examples)
    assert abs(meter.conditional[0] - live) < 0.1
    logged = trainer.state.log_history[-2]
    assert logged["accepted_length"] > 4 and logged["acceptance_1"] > 0.9


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"markov_head_type": "rnn"},
        {"markov_head_type": "gated", "num_hidden_layers": 5},
        {"sample_from_anchor": False},
        {"markov_rank": 0, "block_size": 16},
        {"enable_confidence_head": False},
    ],
    ids=str,
)
def test_every_kind_of_drafter_learns(target, examples, tmp_path, config):
    steps = {"max_steps": 40, "per_device_train_batch_size": 4, "lr_scheduler_type": "constant"}
    losses = losses_of(train(target, fresh(target, **config), examples, tmp_path, **steps))
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


@pytest.mark.parametrize("options", [{"activation_checkpointing": True}, {"bf16": True}], ids=str)
def test_options_of_the_trainer_keep_the_loss(target, examples, tmp_path, options):
    plain = losses_of(train(target, fresh(target), examples, tmp_path, max_steps=3))
    other = losses_of(train(target, fresh(target), examples, tmp_path, max_steps=3, **options))
    assert other == pytest.approx(plain, rel=0.02 if "bf16" in options else 1e-5)


def test_micro_batches_and_packing_change_nothing(target, examples, tmp_path):
    short = [TrainingExample(e.input_ids[: 12 + i], e.loss_mask[: 12 + i]) for i, e in enumerate(examples)]
    runs = [
        train(target, fresh(target), short, tmp_path / str(i), max_steps=4, **options)
        for i, options in enumerate(
            [
                {"per_device_train_batch_size": 4, "packing": False},
                {"per_device_train_batch_size": 4, "max_length": 40},
                {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
            ]
        )
    ]
    for run in runs[1:]:
        assert losses_of(run) == pytest.approx(losses_of(runs[0]), rel=1e-5)
        for ours, theirs in zip(run.model.parameters(), runs[0].model.parameters(), strict=True):
            assert torch.allclose(ours, theirs, atol=1e-4)


def test_a_reduced_vocabulary_learns_and_keeps_its_head_frozen(target, examples, tmp_path):
    kept = frequent_token_ids(examples, 24, always=[1])
    drafter = new_drafter(
        target, 63, draft_token_ids=kept, num_hidden_layers=1, block_size=4, markov_rank=8, target_layer_ids=[0, 1, 2]
    )
    head = drafter.lm_head.weight.clone()
    assert torch.equal(drafter.draft_token_ids(), torch.tensor(kept))
    assert drafter.t2d.nonzero().squeeze(1).tolist() == kept
    losses = losses_of(train(target, drafter, examples, tmp_path, max_steps=20))
    assert losses[-1] < losses[0]
    assert torch.equal(drafter.lm_head.weight, head)
    assert torch.equal(head, target.lm_head.weight[torch.tensor(kept)])


def test_an_interrupted_run_resumes_to_the_bit(target, examples, tmp_path):
    def run(folder, **options):
        steps = {"max_steps": 12, "num_anchors": 6, "save_strategy": "steps", "save_steps": 4}
        return trainer_of(target, fresh(target), examples, tmp_path / folder, **(steps | options))

    whole = run("whole")
    whole.train()
    run("parts", callbacks=[StopAfter(7)]).train()
    resumed = run("parts")
    resumed.train(resume_from_checkpoint=True)
    assert losses_of(resumed)[-4:] == losses_of(whole)[-4:]
    for ours, theirs in zip(whole.model.state_dict().values(), resumed.model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
    saved = DSparkDrafter.from_pretrained(tmp_path / "parts" / "checkpoint-12")
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), whole.model.parameters(), strict=True))
    assert len(list((tmp_path / "parts").glob("checkpoint-*"))) == 2, "older checkpoints go"


def test_examples_without_room_for_an_anchor_are_skipped_and_counted(target, examples, tmp_path, caplog):
    short = [TrainingExample((5, 6, 7), mask) for mask in ((0, 0, 0), (0, 0, 1))]
    tiny = TrainingExample((5, 6, 7, 8), (0, 0, 1, 1))  # fewer labels than a block has drafts
    with caplog.at_level("WARNING"):
        trainer = train(target, fresh(target), [*short, *examples[:1], tiny], tmp_path, max_steps=4)
    assert len(trainer.train_dataset) == 2
    assert all(math.isfinite(loss) and loss > 0 for loss in losses_of(trainer))
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
    with pytest.raises(ValueError, match="none of the 2 train examples"):
        trainer_of(target, fresh(target), short, tmp_path)


def test_training_changes_nothing_of_the_target(target, examples, tmp_path):
    before, flags = copy.deepcopy(target.state_dict()), [p.requires_grad for p in target.parameters()]
    trainer = train(target, fresh(target), examples, tmp_path, max_steps=3)
    trainer.save_model()
    assert all(torch.equal(a, b) for a, b in zip(before.values(), target.state_dict().values(), strict=True))
    assert [p.requires_grad for p in target.parameters()] == flags and any(flags)
    assert all(parameter.grad is None for parameter in target.parameters())
    optimised = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert optimised == {id(p) for p in trainer.model.parameters()}


def test_what_a_drafter_was_calibrated_and_made_for_is_forgotten(target, examples, tmp_path):
    drafter = fresh(target, target_fingerprint="another", confidence_temperatures={"greedy": [1.5] * 4})
    with pytest.warns(UserWarning, match="another target"):
        trainer = trainer_of(target, drafter, examples, tmp_path, max_steps=1)
    trainer.train()
    assert drafter.config.target_fingerprint == target_fingerprint(target)
    assert drafter.config.confidence_temperatures is None


def test_online_training_writes_checkpoints_of_the_drafter_and_nothing_else(target, examples, tmp_path):
    drafter = fresh(target)
    train(target, drafter, examples, tmp_path, max_steps=6, save_strategy="steps", save_steps=1)
    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    weights = sum(tensor.nbytes for tensor in drafter.state_dict().values())
    assert size < 2 * (3 * weights + 200_000), "two checkpoints: weights and two moments of them"


def test_evaluation_reports_loss_and_acceptance_and_the_same_each_time(target, examples, tmp_path):
    trainer = trainer_of(target, fresh(target), examples[:6], tmp_path, eval_dataset=examples[6:], max_steps=2)
    first, again = trainer.evaluate(), trainer.evaluate()
    assert first["eval_loss"] == again["eval_loss"] > 0
    assert 1 <= first["eval_accepted_length"] <= 5 and {f"eval_acceptance_{k}" for k in range(1, 5)} <= first.keys()
    meter = teacher_forced_acceptance(target, trainer.model, examples[6:])
    trainer.args.num_anchors = 100
    assert trainer.evaluate()["eval_accepted_length"] == pytest.approx(meter.accepted_length, abs=1e-3)


def test_default_taps_are_those_of_the_released_drafters():
    assert default_target_layers(36) == [1, 9, 17, 25, 33]
    assert default_target_layers(40) == [1, 10, 19, 28, 37]
    for num_layers in (2, 3, 4):
        assert max(default_target_layers(num_layers)) < num_layers - 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_anchors": 0}, "num_anchors=0 must be at least 1"),
        ({"tv_weight": -1.0}, "tv_weight=-1.0 must not be negative"),
        ({"tv_weight": 0.0, "ce_weight": 0.0}, "nothing to learn"),
        ({"feature_cache_dtype": "int8"}, "int8"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(tmp_path, wrong, message):
    with pytest.raises(ValueError, match=message):
        DSparkTrainingArguments(str(tmp_path), **wrong)


def test_the_defaults_are_the_papers(tmp_path):
    args = DSparkTrainingArguments(str(tmp_path), use_cpu=True)
    assert (args.learning_rate, args.adam_beta1, args.adam_beta2, args.weight_decay) == (6e-4, 0.9, 0.999, 0)
    assert (args.warmup_steps, args.lr_scheduler_type, args.max_grad_norm) == (0.04, "cosine", 1)
    assert (args.num_train_epochs, args.max_length, args.num_anchors) == (10, 4096, 512)
    weights = args.loss_weights
    assert (weights.ce_weight, weights.tv_weight, weights.confidence_weight, weights.decay) == (0.1, 0.9, 1, 4)


def test_training_stops_at_a_loss_or_gradient_that_is_no_number_and_names_the_step(target, examples, tmp_path):
    drafter = fresh(target)
    drafter.fc.weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(FloatingPointError, match="norm of the gradients is .* at step 1"):
        train(target, drafter, examples, tmp_path, max_steps=2)
    assert all(parameter.isfinite().all() for parameter in drafter.parameters()), "the step was not taken"
    with pytest.raises(FloatingPointError, match="the loss is nan at step 2"):
        train(target, fresh(target), examples, tmp_path, max_steps=4, learning_rate=1e30, warmup_steps=0)


def test_arguments_and_examples_of_another_kind_are_refused(target, examples, tmp_path):
    drafter = fresh(target)
    with pytest.raises(TypeError, match="DSparkTrainingArguments, got TrainingArguments"):
        DSparkTrainer(drafter, TrainingArguments(str(tmp_path), use_cpu=True), target=target, train_dataset=examples)
    for name in ("train_dataset", "eval_dataset"):
        given = {"train_dataset": examples} | {name: [[1, 2, 3]]}
        args = DSparkTrainingArguments(str(tmp_path), use_cpu=True)
        with pytest.raises(TypeError, match=f"{name} must hold TrainingExamples, got list"):
            DSparkTrainer(drafter, args, target=target, **given)
    with pytest.raises(ValueError, match="train_dataset is empty"):
        trainer_of(target, drafter, [], tmp_path)


def test_tokens_and_drafters_of_another_vocabulary_are_refused_before_a_step(target, examples, tmp_path):
    beyond = TrainingExample((3, 4, 64), (1, 1, 1))
    with pytest.raises(ValueError, match="token 64, but the target knows 64"):
        trainer_of(target, fresh(target), [*examples, beyond], tmp_path)
    with pytest.raises(ValueError, match="but the drafter knows 20"):
        trainer_of(target, new_drafter(target, 3, vocab_size=20, num_hidden_layers=1), examples, tmp_path)
    with pytest.raises(ValueError, match="the drafter drafts 99 tokens"):
        trainer_of(target, fresh(target, vocab_size=99), examples, tmp_path)
