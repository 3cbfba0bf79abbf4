"""The losses equal DeepSpec's own on fixed inputs, and treat a reduced vocabulary as what it is."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_dspark.losses import (
    LossWeights,
    block_losses,
    chunked_block_losses,
    contiguous_supervision,
    position_weights,
)

DATA = Path(__file__).with_name("data") / "deepspec_loss"
CASES = json.loads((DATA / "expected.json").read_text())["cases"]


@pytest.fixture(scope="module")
def tensors():
    return load_file(DATA / "expected.safetensors")


def inputs(tensors):
    supervised = tensors["in.eval_mask"].bool() & tensors["in.block_keep_mask"].bool()[..., None]
    logits = tensors["in.draft_logits"].clone().requires_grad_(True)
    confidence = tensors["in.confidence_pred"].clone().requires_grad_(True)
    return logits, confidence, tensors["in.target_ids"], supervised


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["has_target_logits"]])
def test_loss_and_gradients_equal_the_reference(tensors, name):
    case = CASES[name]
    logits, confidence, labels, supervised = inputs(tensors)
    losses = block_losses(
        logits,
        tensors["in.target_logits"].softmax(-1),
        label_ids=labels,
        supervised=supervised,
        confidence_logits=confidence if case["has_confidence"] else None,
        weights=LossWeights(
            case["ce_loss_alpha"], case["l1_loss_alpha"], case["confidence_head_alpha"], case["loss_decay_gamma"]
        ),
    )
    assert losses.total.item() == pytest.approx(case["loss"], abs=1e-5)
    losses.total.backward()
    assert (logits.grad - tensors[f"{name}.grad_draft_logits"]).abs().max() < 1e-6
    if case["has_confidence"]:
        assert (confidence.grad - tensors[f"{name}.grad_confidence_pred"]).abs().max() < 1e-6


def test_acceptance_is_one_minus_half_the_l1_distance(tensors):
    logits, _, labels, supervised = inputs(tensors)
    losses = block_losses(logits, tensors["in.target_logits"].softmax(-1), label_ids=labels, supervised=supervised)
    assert (losses.acceptance - tensors["accept_rate_3d"]).abs().max() < 1e-6


def test_position_weights_equal_the_reference_and_are_flat_without_decay(tensors):
    supervised = tensors["in.eval_mask"].bool()
    assert (position_weights(supervised, 4.0) - tensors["loss_weight_mask_gamma4"]).abs().max() < 1e-6
    assert torch.equal(position_weights(supervised, None), supervised.float())


def test_supervision_is_the_contiguous_run_of_labels_after_the_anchor(tensors):
    ours = contiguous_supervision(tensors["mask.loss_mask"], tensors["mask.anchor_positions"].long(), 5)
    kept = tensors["mask.block_keep_mask"].bool()
    assert torch.equal(ours[kept], tensors["mask.eval_mask"].bool()[kept])


def test_two_halves_with_a_shared_denominator_add_up_to_the_whole(tensors):
    logits, confidence, labels, supervised = inputs(tensors)
    target_probs = tensors["in.target_logits"].softmax(-1)
    whole = block_losses(logits, target_probs, label_ids=labels, supervised=supervised, confidence_logits=confidence)
    denominator = position_weights(supervised, 4.0).sum()
    halves = [
        block_losses(
            logits[row],
            target_probs[row],
            label_ids=labels[row],
            supervised=supervised[row],
            confidence_logits=confidence[row],
            denominator=denominator,
        ).total
        for row in range(2)
    ]
    assert sum(halves).item() == pytest.approx(whole.total.item(), abs=1e-6)


def test_mass_outside_a_reduced_vocabulary_counts_as_variation():
    generator = torch.Generator().manual_seed(0)
    draft, target = torch.randn(2, 3, 6, generator=generator), torch.randn(2, 3, 10, generator=generator)
    target_probs = target.softmax(-1)
    reduced = block_losses(
        draft, target_probs[..., :6], label_ids=torch.zeros(2, 3, dtype=torch.long), supervised=torch.ones(2, 3)
    )
    full = torch.cat([draft, torch.full((2, 3, 4), float("-inf"))], dim=-1).softmax(-1)
    assert torch.allclose(reduced.acceptance, torch.minimum(full, target_probs).sum(-1), atol=1e-6)


def test_a_label_that_cannot_be_drafted_adds_no_cross_entropy():
    logits = torch.randn(1, 2, 4)
    kept = block_losses(
        logits, logits.softmax(-1), label_ids=torch.tensor([[1, -1]]), supervised=torch.ones(1, 2)
    ).cross_entropy
    expected = -logits[0, 0].log_softmax(-1)[1] / position_weights(torch.ones(1, 2), 4.0).sum()
    assert kept.item() == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["has_target_logits"]])
@pytest.mark.parametrize("blocks_per_chunk", [1, 3, 8])
def test_chunks_give_the_reference_loss_and_gradients_too(tensors, name, blocks_per_chunk):
    case = CASES[name]
    logits, confidence, labels, supervised = inputs(tensors)
    losses = chunked_block_losses(
        lambda draft, target: (draft, target.softmax(-1)),
        [logits.flatten(0, 1), tensors["in.target_logits"].flatten(0, 1)],
        label_ids=labels.flatten(0, 1),
        supervised=supervised.flatten(0, 1),
        confidence_logits=confidence.flatten(0, 1) if case["has_confidence"] else None,
        weights=LossWeights(
            case["ce_loss_alpha"], case["l1_loss_alpha"], case["confidence_head_alpha"], case["loss_decay_gamma"]
        ),
        blocks_per_chunk=blocks_per_chunk,
    )
    assert losses.total.item() == pytest.approx(case["loss"], abs=1e-5)
    losses.total.backward()
    assert (logits.grad - tensors[f"{name}.grad_draft_logits"]).abs().max() < 1e-6
    if case["has_confidence"]:
        assert (confidence.grad - tensors[f"{name}.grad_confidence_pred"]).abs().max() < 1e-6


def test_the_share_of_each_of_two_processes_adds_up_to_the_reference_of_two(tensors):
    expected = json.loads((DATA / "expected.json").read_text())["two_ranks"]
    ranks = []
    for rank in range(2):
        part = {name.removeprefix(f"rank{rank}."): t for name, t in tensors.items() if name.startswith(f"rank{rank}.")}
        ranks.append({name.removeprefix("in."): tensor for name, tensor in part.items()})
    supervised = [part["eval_mask"].bool() & part["block_keep_mask"].bool()[..., None] for part in ranks]
    denominator = sum(position_weights(mask, 4.0).sum() for mask in supervised)
    for part, mask, theirs in zip(ranks, supervised, expected["backward_loss"], strict=True):
        losses = block_losses(
            part["draft_logits"],
            part["target_logits"].softmax(-1),
            label_ids=part["target_ids"],
            supervised=mask,
            confidence_logits=part["confidence_pred"],
            denominator=denominator,
        )
        assert 2 * losses.total.item() == pytest.approx(theirs, abs=1e-5)


def test_logits_exist_for_one_chunk_at_a_time():
    seen = []

    def logits_of(hidden):
        seen.append(len(hidden))
        return hidden @ torch.ones(4, 6), torch.full((*hidden.shape[:-1], 6), 1 / 6)

    hidden = torch.randn(7, 2, 4, requires_grad=True)
    losses = chunked_block_losses(
        logits_of, [hidden], label_ids=torch.zeros(7, 2, dtype=torch.long), supervised=torch.ones(7, 2),
        blocks_per_chunk=3,
    )  # fmt: skip
    assert seen == [3, 3, 1]
    losses.total.backward()
    assert sorted(seen) == [1, 1, 3, 3, 3, 3], "made again, chunk by chunk, on the way back"
