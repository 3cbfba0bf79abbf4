"""The trainer learns, resumes to the bit, skips what teaches nothing, and leaves the target alone."""

import copy
import math

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from hf_dspark import DSparkDrafter
from hf_dspark.losses import LossWeights
from hf_dspark.target import TargetView
from hf_dspark.training import (
    TrainingConfig,
    TrainingExample,
    default_target_layers,
    frequent_token_ids,
    new_drafter,
    teacher_forced_acceptance,
    train,
)
from hf_dspark.training.blocks import block_mask, sequence_outcome
from hf_dspark.training.teacher import FeatureStore, draft_ids_of, teacher_features
from hf_dspark.training.trainer import learning_rate_at, step_examples


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


def test_overfitting_eight_prompts_reaches_more_than_nine_tenths_acceptance_live(target, examples):
    config = TrainingConfig(num_steps=300, batch_size=4, num_anchors=24, learning_rate=1e-2, cache_features=True)
    drafter = train(target, fresh(target, markov_rank=32, intermediate_size=256), examples, config)
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


@pytest.mark.parametrize(
    "config", [{}, {"markov_head_type": "rnn"}, {"sample_from_anchor": False}, {"markov_rank": 0}]
)
def test_every_kind_of_drafter_learns(target, examples, config):
    losses = []
    steps = TrainingConfig(num_steps=60, batch_size=4, num_anchors=12, learning_rate=1e-2, warmup_steps=5)
    train(target, fresh(target, **config), examples, steps, on_step=lambda step, loss, meter: losses.append(loss))
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_a_reduced_vocabulary_learns_and_keeps_its_head_frozen(target, examples):
    kept = frequent_token_ids(examples, 24, always=[1])
    drafter = fresh(target, draft_vocab_size=None)
    drafter = new_drafter(
        target, 63, draft_token_ids=kept, num_hidden_layers=1, block_size=4, markov_rank=8, target_layer_ids=[0, 1, 2]
    )
    head = drafter.lm_head.weight.clone()
    assert (
        torch.equal(drafter.draft_token_ids(), torch.tensor(kept))
        and drafter.t2d.nonzero().squeeze(1).tolist() == kept
    )
    train(target, drafter, examples, TrainingConfig(num_steps=5, learning_rate=1e-2))
    assert torch.equal(drafter.lm_head.weight, head)
    assert torch.equal(head, target.lm_head.weight[torch.tensor(kept)])


def test_an_interrupted_run_resumes_to_the_bit(target, examples, tmp_path):
    def config(steps, folder):
        return TrainingConfig(
            num_steps=12, num_anchors=6, learning_rate=5e-3, save_steps=steps, output_dir=str(tmp_path / folder)
        )

    class Stop(Exception):
        pass

    def stop_after_seven(step, loss, meter):
        if step == 7:
            raise Stop

    whole = train(target, fresh(target), examples, config(100, "whole"))
    with pytest.raises(Stop):
        train(target, fresh(target), examples, config(4, "parts"), on_step=stop_after_seven)
    resumed_at = []
    resumed = train(
        target, fresh(target), examples, config(4, "parts"), on_step=lambda step, *rest: resumed_at.append(step)
    )
    assert resumed_at == list(range(4, 12)) or resumed_at == list(range(8, 12))
    for ours, theirs in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


def test_examples_without_room_for_an_anchor_are_skipped_and_counted(target, examples, capsys):
    short = [TrainingExample((5, 6, 7), mask) for mask in ((0, 0, 0), (0, 0, 1))]
    losses = []
    train(
        target,
        fresh(target),
        [*short, *examples[:1], TrainingExample((5, 6, 7, 8), (0, 0, 1, 1))],
        TrainingConfig(num_steps=4),
        on_step=lambda step, loss, meter: losses.append(loss),
    )
    assert "skipped 2 of 4" in capsys.readouterr().out
    assert all(math.isfinite(loss) for loss in losses)
    with pytest.raises(ValueError, match="none of the 2 examples"):
        train(target, fresh(target), short, TrainingConfig(num_steps=1))


def test_training_changes_nothing_of_the_target(target, examples):
    before, flags = copy.deepcopy(target.state_dict()), [p.requires_grad for p in target.parameters()]
    train(target, fresh(target), examples, TrainingConfig(num_steps=3))
    assert all(torch.equal(a, b) for a, b in zip(before.values(), target.state_dict().values(), strict=True))
    assert [p.requires_grad for p in target.parameters()] == flags and any(flags)
    assert all(parameter.grad is None for parameter in target.parameters())


def test_blocks_see_the_context_before_their_anchor_and_themselves():
    visible = block_mask(torch.tensor([2, 4]), 6, 3)[0, 0] == 0
    for slot in range(6):
        anchor, first = (2, 0) if slot < 3 else (4, 3)
        assert visible[slot, :6].tolist() == [position < anchor for position in range(6)]
        assert visible[slot, 6:].tolist() == [first <= other < first + 3 for other in range(6)]


def test_a_blocks_loss_does_not_depend_on_the_other_anchors(target, examples):
    drafter = fresh(target)
    view = TargetView(target, drafter)
    features = teacher_features(view, examples[0].input_ids)
    with torch.no_grad():
        both = sequence_outcome(view, features, examples[0], torch.tensor([8, 15]), weights=LossWeights())
        alone = sequence_outcome(view, features, examples[0], torch.tensor([15]), weights=LossWeights())
    assert torch.allclose(both.losses.acceptance[1], alone.losses.acceptance[0], atol=1e-6)


def test_remembered_features_are_those_of_the_target(target, examples):
    store = FeatureStore(TargetView(target, fresh(target)), examples, remember=True)
    first, again = store[2], store[2]
    direct = teacher_features(store.view, examples[2].input_ids)
    assert again is first and torch.allclose(first.context.float(), direct.context, atol=1e-2)
    assert torch.allclose(direct.log_probs.exp().sum(-1), torch.ones(30), atol=1e-5)


def test_every_epoch_sees_every_example_once():
    config = TrainingConfig(batch_size=3)
    for epoch in range(2):
        seen = [i for step in range(epoch * 2, epoch * 2 + 2) for i in step_examples(step, 6, config)]
        assert sorted(seen) == list(range(6))


def test_learning_rate_warms_up_and_ends_at_zero():
    config = TrainingConfig(num_steps=100, warmup_steps=10, learning_rate=1.0)
    rates = [learning_rate_at(step, config) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)]) and max(rates) == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True) and rates[-1] < 0.01


def test_default_taps_are_those_of_the_released_drafters():
    assert default_target_layers(36) == [1, 9, 17, 25, 33]
    assert default_target_layers(40) == [1, 10, 19, 28, 37]
    for num_layers in (2, 3, 4):
        assert max(default_target_layers(num_layers)) < num_layers - 1


def test_tokens_outside_the_draft_vocabulary_have_no_draft_id(target, examples):
    drafter = new_drafter(
        target, 63, draft_token_ids=[3, 10, 60], num_hidden_layers=1, markov_rank=4, target_layer_ids=[0]
    )
    assert draft_ids_of(drafter, torch.tensor([[3, 4], [60, 63]])).tolist() == [[0, -1], [2, -1]]


def test_a_crash_while_saving_leaves_the_last_checkpoint(target, examples, tmp_path, monkeypatch):
    config = TrainingConfig(num_steps=4, save_steps=2, output_dir=str(tmp_path), learning_rate=1e-2)

    original, calls = torch.save, []

    def fail_at_the_second(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise OSError("disk full")
        return original(*args, **kwargs)

    monkeypatch.setattr(torch, "save", fail_at_the_second)
    with pytest.raises(OSError, match="disk full"):
        train(target, fresh(target), examples, config)
    assert DSparkDrafter.from_pretrained(tmp_path / "checkpoint") is not None
    assert torch.load(tmp_path / "checkpoint" / "trainer_state.pt", weights_only=True)["step"] == 2
