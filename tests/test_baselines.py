"""What DSpark is compared with: every baseline can be built, learns to draft what it is asked for, and is lossless."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from hf_dspark import FixedLength
from hf_dspark.baselines import new_autoregressive_drafter
from hf_dspark.losses import LossWeights, block_losses
from hf_dspark.modeling_autoregressive import AutoregressiveDrafter
from hf_dspark.modeling_dspark import DSparkDrafter
from hf_dspark.target import TargetView
from hf_dspark.training import (
    DSparkTrainer,
    DSparkTrainingArguments,
    TrainingExample,
    new_drafter,
    teacher_forced_acceptance,
)
from hf_dspark.training.blocks import draft_blocks
from tests.drafters import assert_drafted, generate, left_padded
from tests.tiny import tiny_target

DFLASH = {"markov_rank": 0, "enable_confidence_head": False}
LAYOUTS = {"layout A": True, "layout B": False}
HEADS = {
    "DFlash": DFLASH,
    "vanilla": {"markov_head_type": "vanilla"},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
}
TINY = {"target_layer_ids": [0, 1], "intermediate_size": 128, "initializer_range": 0.1}
NUM_PROMPT_TOKENS, NUM_NEW_TOKENS = 5, 20


def parallel(target, num_drafts, *, from_anchor=True, **fields):
    """A fresh drafter of K drafts in either layout."""
    slots = num_drafts if from_anchor else num_drafts + 1
    shape = TINY | {"num_hidden_layers": 1, "markov_rank": 8}
    return new_drafter(target, 2, block_size=slots, sample_from_anchor=from_anchor, **shape | fields)


def autoregressive(target, num_drafts, **fields):
    return new_autoregressive_drafter(target, block_size=num_drafts, **TINY | fields)


def assert_lossless(target, drafter, prompt_lengths):
    inputs = left_padded(prompt_lengths)
    plain = generate(target, inputs, max_new_tokens=20).sequences
    output = generate(target, inputs, drafter.eval(), max_new_tokens=20)
    assert torch.equal(output.sequences, plain)
    if drafter.config.num_drafts > 1:
        assert_drafted(output.rounds)
    assert max(len(r.draft_ids) for r in output.rounds) == drafter.config.num_drafts


def lesson(target):
    """Two prompts, and the target's greedy text of them."""
    inputs = left_padded([NUM_PROMPT_TOKENS] * 2, seed=3)
    return inputs, generate(target, inputs, max_new_tokens=NUM_NEW_TOKENS).sequences


def overfitted(target, drafter, *, steps=80, learning_rate=1e-2):
    """
    Trains `drafter` through the seam on the target's own greedy text of two prompts; the losses, and the share of
    accepted drafts when the target then decodes those prompts with it, whole blocks being verified.
    """
    inputs, text = lesson(target)
    view, num_drafts, length = TargetView(target, drafter.train()), drafter.config.num_drafts, text.shape[1]
    with torch.no_grad():
        states = target(text, output_hidden_states=view.hidden_state_indices, use_cache=False)
    context, probs = view.context_features(states.hidden_states), states.logits.softmax(-1)
    token_ids = drafter.draft_token_ids()
    token_ids = torch.arange(target.config.vocab_size) if token_ids is None else token_ids
    columns = torch.full((target.config.vocab_size,), -1).index_copy(0, token_ids, torch.arange(len(token_ids)))
    anchors = torch.arange(NUM_PROMPT_TOKENS, length - 1)
    labels = anchors[:, None] + torch.arange(1, num_drafts + 1)
    supervised, labels = labels < length, labels.clamp_max(length - 1)
    parameters = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0), []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1, (step + 1) / 10, (steps - step) / (steps / 2))
        row = step % len(text)
        logits, confidence = draft_blocks(view, SimpleNamespace(context=context[row]), text[row], anchors)
        loss = block_losses(
            logits,
            probs[row][labels - 1][..., token_ids],
            label_ids=columns[text[row][labels]],
            supervised=supervised,
            confidence_logits=confidence,
            weights=LossWeights(ce_weight=1.0, tv_weight=0.0, decay=None),
        ).total
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(loss.item())
    view = drafter.eval().with_options(scheduler=FixedLength())
    output = generate(target, inputs, view, max_new_tokens=NUM_NEW_TOKENS)
    assert torch.equal(output.sequences, text)
    return losses, sum(r.num_accepted for r in output.rounds) / sum(r.verify_length for r in output.rounds)


# ------------------------------------------------------------------------------------------------ parallel drafters


@pytest.mark.parametrize("from_anchor", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("num_drafts", [1, 4, 7, 16])
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
def test_any_head_in_any_layout_and_length_is_lossless(head, num_drafts, from_anchor):
    target = tiny_target("llama")
    if head.get("markov_head_type") == "rnn" and not from_anchor:
        with pytest.raises(ValueError, match="layout B"):
            parallel(target, num_drafts, from_anchor=from_anchor, **head)
        return
    drafter = parallel(target, num_drafts, from_anchor=from_anchor, **head)
    assert drafter.config.num_drafts == num_drafts and type(drafter) is DSparkDrafter
    assert_lossless(target, drafter, [3, 8])


@pytest.mark.parametrize("from_anchor", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("num_layers", [1, 2, 3, 5])
def test_any_number_of_layers_is_lossless(num_layers, from_anchor):
    target = tiny_target("qwen3")
    drafter = parallel(target, 4, from_anchor=from_anchor, num_hidden_layers=num_layers)
    assert len(drafter.layers) == num_layers
    assert_lossless(target, drafter, [6])


@pytest.mark.parametrize(
    "head, from_anchor",
    [
        pytest.param(head, from_anchor, id=f"{name}, {layout}")
        for name, head in HEADS.items()
        for layout, from_anchor in LAYOUTS.items()
        if name != "rnn" or from_anchor  # an rnn head in layout B is refused, see above
    ],
)
def test_what_a_head_learnt_in_either_layout_is_accepted_live(head, from_anchor):
    target = tiny_target("llama")
    torch.manual_seed(0)
    losses, accepted = overfitted(target, parallel(target, 4, from_anchor=from_anchor, **head))
    assert sum(losses[-4:]) < 0.5 * sum(losses[:4]) and accepted > 0.9


@pytest.mark.parametrize("fields", [{"num_hidden_layers": 3}, {"num_hidden_layers": 5}], ids=["3 layers", "5 layers"])
def test_what_a_deeper_dflash_learnt_is_accepted_live(fields):
    target = tiny_target("llama")
    torch.manual_seed(0)
    _, accepted = overfitted(target, parallel(target, 7, from_anchor=False, **DFLASH | fields), steps=60)
    assert accepted > 0.9


def test_a_layout_read_the_wrong_way_round_is_not_accepted():
    """The control: these tests see drafts that are off by one."""
    target = tiny_target("llama")
    torch.manual_seed(0)
    drafter = parallel(target, 4, from_anchor=False, **DFLASH)
    _, right = overfitted(target, drafter)
    swapped = parallel(target, 5, from_anchor=True, **DFLASH)
    swapped.load_state_dict(drafter.state_dict())
    _, wrong = overfitted(target, swapped, steps=0)
    assert right > 0.9 and wrong < 0.3


# ---------------------------------------------------------------------------------------- autoregressive drafters


@pytest.mark.parametrize("num_drafts", [1, 4, 7, 16])
def test_an_autoregressive_drafter_of_any_length_is_lossless(num_drafts):
    target = tiny_target("llama")
    assert_lossless(target, autoregressive(target, num_drafts), [3, 8, 1, 12])


@pytest.mark.parametrize(
    ("num_drafts", "fields", "reduced"),
    [(7, {}, False), (7, {}, True), (1, {"enable_confidence_head": False}, False), (1, {}, True)],
    ids=["EAGLE-3", "EAGLE-3, reduced vocabulary", "MTP-1 without confidences", "MTP-1, reduced vocabulary"],
)
def test_what_an_autoregressive_drafter_learnt_is_accepted_live(num_drafts, fields, reduced):
    target = tiny_target("llama")
    kept = lesson(target)[1].unique().tolist() if reduced else None
    torch.manual_seed(0)
    drafter = autoregressive(target, num_drafts, draft_token_ids=kept, **fields)
    losses, accepted = overfitted(target, drafter)
    assert sum(losses[-4:]) < 0.5 * sum(losses[:4]) and accepted > 0.9


def test_the_trainer_trains_an_autoregressive_drafter_like_any_other(tmp_path):
    target = tiny_target("llama")
    inputs, text = lesson(target)
    mask = (0,) * NUM_PROMPT_TOKENS + (1,) * NUM_NEW_TOKENS
    examples = [TrainingExample(tuple(row), mask) for row in text.tolist()]
    torch.manual_seed(0)
    options = {"learning_rate": 1e-2, "num_anchors": 20, "save_strategy": "no", "use_cpu": True, "logging_steps": 5}
    arguments = DSparkTrainingArguments(
        str(tmp_path), max_steps=40, per_device_train_batch_size=2, disable_tqdm=True, **options
    )
    trainer = DSparkTrainer(autoregressive(target, 3), arguments, target=target, train_dataset=examples)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.9 * losses[0]
    trainer.save_model()
    loaded = AutoregressiveDrafter.from_pretrained(tmp_path)
    meter = teacher_forced_acceptance(target, loaded, examples)
    output = generate(target, inputs, loaded, max_new_tokens=NUM_NEW_TOKENS)
    assert torch.equal(output.sequences, text)
    assert meter.accepted_length > 1.8 and output.stats.verify_rate > 0.3


def test_a_new_autoregressive_drafter_fits_its_target():
    target = tiny_target("llama")
    drafter = new_autoregressive_drafter(target)
    config = drafter.config
    assert type(drafter) is AutoregressiveDrafter and config.num_drafts == 7 and config.mask_token_id is None
    assert (config.hidden_size, config.vocab_size, config.num_target_layers) == (32, 64, 3)
    assert drafter.markov_head is None and drafter.confidence_head is not None and not drafter.has_own_vocabulary
    assert all(parameter.requires_grad for parameter in drafter.parameters())
    TargetView(target, drafter)


def test_a_reduced_vocabulary_starts_from_the_targets_rows_and_stays_frozen():
    target = tiny_target("llama")
    drafter = new_autoregressive_drafter(target, draft_token_ids=[9, 3, 40])
    assert drafter.draft_token_ids().tolist() == [3, 9, 40]
    assert drafter.t2d.nonzero().squeeze(1).tolist() == [3, 9, 40]
    assert torch.equal(drafter.lm_head.weight, target.lm_head.weight[[3, 9, 40]])
    assert not drafter.lm_head.weight.requires_grad


def test_fields_that_contradict_the_kind_are_refused():
    with pytest.raises(ValueError, match="markov_rank=8 is not possible"):
        new_autoregressive_drafter(tiny_target("llama"), markov_rank=8)


@pytest.mark.parametrize("new", [partial(new_drafter, mask_token_id=2), new_autoregressive_drafter])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"blok_size": 3}, "no field 'blok_size'; did you mean 'block_size'"),
        ({"block_size": "three"}, "'block_size' expected int"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be at least 1"),
        ({"draft_token_ids": [3, 4, 3]}, "holds 3 more than once"),
        ({"draft_token_ids": [3, 10**6]}, "holds 1000000; the target's tokens are 0 to"),
        ({"draft_token_ids": [-1, 3]}, "holds -1"),
        ({"draft_token_ids": []}, "draft_token_ids is empty"),
    ],
)
def test_fields_that_make_no_drafter_are_named(new, fields, message):
    with pytest.raises(ValueError, match=message):
        new(tiny_target("llama"), **fields)
