"""Draft blocks in packed rows: what they see, what counts, and that documents never meet."""

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_dspark.losses import LossWeights, position_weights
from hf_dspark.target import TargetView
from hf_dspark.training import TrainingExample, frequent_token_ids
from hf_dspark.training.blocks import BlockVisibility, draft_hidden, row_outcome
from hf_dspark.training.collation import PackingCollator, draw_anchors, pack_row
from hf_dspark.training.teacher import Teacher, draft_ids_of, teacher_features
from tests.drafters import AUTOREGRESSIVE, tiny_drafter
from tests.tiny import tiny_target

WEIGHTS = LossWeights()


def example(length, prompt, seed=0):
    ids = torch.randint(3, 64, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return TrainingExample(tuple(ids), (0,) * prompt + (1,) * (length - prompt))


class MostLogits(TorchDispatchMode):
    """Notes the blocks of the largest tensor `[blocks, K, V]` that is made inside, on the way back too."""

    def __init__(self, num_drafts, width):
        super().__init__()
        self.logits, self.blocks = (num_drafts, width), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, torch.Tensor) and tensor.dim() == 3 and tensor.shape[1:] == self.logits:
                self.blocks = max(self.blocks, len(tensor))
        return made


def whole(input_ids):
    """An example that is all answer."""
    return TrainingExample(tuple(input_ids.tolist()), (1,) * len(input_ids))


EXAMPLES = [example(14, 4, 1), example(9, 0, 2), example(20, 11, 3)]


def outcome(view, row, **options):
    return row_outcome(view, Teacher(view).features(row), row, weights=WEIGHTS, **options)


def test_blocks_see_their_documents_context_before_their_anchor_and_themselves():
    documents = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    visible = BlockVisibility(documents, torch.tensor([2, 5]), 3).dense()[0, 0]
    for slot in range(6):
        anchor, first = (2, 0) if slot < 3 else (5, 3)
        same = [documents[position] == documents[anchor] and position < anchor for position in range(7)]
        assert visible[slot, :7].tolist() == same
        assert visible[slot, 7:].tolist() == [first <= other < first + 3 for other in range(6)]


def test_the_masks_of_all_attention_functions_agree():
    from torch.nn.attention.flex_attention import create_mask

    documents = torch.arange(4).repeat_interleave(40)
    visibility = BlockVisibility(documents, torch.tensor([3, 39, 77, 100, 159]), 6)
    dense = visibility.dense()
    assert torch.equal(create_mask(visibility, 1, 1, *visibility.shape, device="cpu"), dense)
    assert torch.equal(visibility.mask("eager", torch.float32) == 0, dense)
    blocks = visibility.mask("flex_attention", torch.float32)
    assert torch.equal(create_mask(blocks.mask_mod, 1, 1, *visibility.shape, device="cpu"), dense)


def test_padding_for_flex_attention_changes_nothing(monkeypatch):
    target = tiny_target("qwen3")
    drafter = tiny_drafter(target)
    view = TargetView(target, drafter)
    row = pack_row([(0, EXAMPLES[0]), (1, EXAMPLES[1])]).with_anchors([[5, 8], [2]])
    plain = outcome(view, row)
    # Flex attention trains on accelerators only: its shapes and its mask, in SDPA's form, on SDPA.
    monkeypatch.setattr(drafter.config, "_attn_implementation_internal", "flex_attention")
    monkeypatch.setattr(BlockVisibility, "mask", lambda self, implementation, dtype: self.dense())
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flex_attention", ALL_ATTENTION_FUNCTIONS["sdpa"])
    padded = outcome(view, row)
    assert padded.losses.acceptance.shape == (3, 5)
    assert torch.allclose(padded.losses.total, plain.losses.total, atol=1e-6)


@pytest.mark.parametrize("overrides", [{}, {"sample_from_anchor": False}, {"draft_vocab_size": 20}], ids=str)
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt_oss"])
def test_the_loss_of_packed_documents_is_the_sum_of_their_losses(family, overrides):
    target = tiny_target(family)
    drafter = tiny_drafter(target, **overrides)
    view = TargetView(target, drafter)
    anchors = [e.anchors() for e in EXAMPLES]
    one = torch.ones(())
    packed = pack_row(list(enumerate(EXAMPLES))).with_anchors(anchors)
    together = outcome(view, packed, denominator=one)
    alone = [outcome(view, row, denominator=one) for row in packed.documents()]
    assert [row.anchors.tolist() for row in packed.documents()] == anchors
    assert together.losses.total.item() == pytest.approx(sum(o.losses.total.item() for o in alone), rel=1e-5)
    assert torch.equal(together.supervised, torch.cat([o.supervised for o in alone]))
    counted = together.supervised
    assert torch.equal(together.matches[counted], torch.cat([o.matches for o in alone])[counted])


CHUNKED = {
    "gated head": {"markov_head_type": "gated"},
    "no head": {"markov_rank": 0},
    "reduced vocabulary": {"draft_vocab_size": 20},
    "autoregressive": AUTOREGRESSIVE,
    "autoregressive, reduced vocabulary": AUTOREGRESSIVE | {"draft_vocab_size": 20},
}


@pytest.mark.parametrize("overrides", CHUNKED.values(), ids=CHUNKED.keys())
def test_chunks_of_logits_change_nothing_but_their_size(overrides):
    target = tiny_target("gemma2")
    drafter = tiny_drafter(target, **overrides)
    view = TargetView(target, drafter)
    row = pack_row(list(enumerate(EXAMPLES[:2]))).with_anchors([e.anchors() for e in EXAMPLES[:2]])
    features, results = Teacher(view).features(row), []
    width = drafter.config.draft_vocab_size or drafter.config.vocab_size
    for logits_bytes in (1, 2**26):
        drafter.zero_grad()
        with MostLogits(drafter.config.num_drafts, width) as seen:
            losses = row_outcome(view, features, row, weights=WEIGHTS, logits_bytes=logits_bytes).losses
            losses.total.backward()
        assert seen.blocks == (len(row.anchors) if logits_bytes > 1 else 1)
        gradients = [p.grad for p in drafter.parameters() if p.grad is not None]
        results.append((losses.total.detach(), losses.confidence.detach(), gradients))
    (total, confidence, ours), (expected_total, expected_confidence, theirs) = results
    assert total.item() == pytest.approx(expected_total.item(), rel=1e-6)
    assert confidence.item() == pytest.approx(expected_confidence.item(), rel=1e-6)
    assert len(ours) == len(theirs) and any(gradient.any() for gradient in ours)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours, theirs, strict=True))


def test_a_labels_probability_is_the_targets_after_the_token_before_it():
    target = tiny_target("gemma2")
    view = TargetView(target, tiny_drafter(target))
    ids = torch.tensor(EXAMPLES[0].input_ids)
    with torch.no_grad():
        expected = target(ids[None]).logits[0].log_softmax(-1)
    features = teacher_features(view, EXAMPLES[0].input_ids)
    assert torch.allclose(features.log_probs, expected, atol=1e-5)
    assert torch.allclose(features.log_probs_at(torch.tensor([3, 7])), expected[[3, 7]], atol=1e-5)


def test_supervision_ends_with_the_document():
    row = pack_row([(0, example(6, 2)), (1, example(6, 0))]).with_anchors([[3], [0]])
    assert row.supervised(4).tolist() == [[True, True, False, False], [True] * 4]


def test_a_drafter_with_its_own_blocks_gets_documents_one_by_one():
    target = tiny_target("qwen3")
    drafter, calls = tiny_drafter(target), []
    plain = TargetView(target, tiny_drafter(target))

    def own(view, features, input_ids, anchors):
        calls.append((len(features.context), len(input_ids), anchors.tolist()))
        document = dataclasses.replace(pack_row([(0, whole(input_ids))]), anchors=anchors)
        return draft_hidden(plain, features, document)

    object.__setattr__(drafter, "draft_training_hidden", own)
    row = pack_row(list(enumerate(EXAMPLES))).with_anchors([[4, 6], [], [12]])
    ours, theirs = outcome(TargetView(target, drafter), row), outcome(plain, row)
    assert calls == [(14, 14, [4, 6]), (20, 20, [12])]
    assert torch.allclose(ours.losses.total, theirs.losses.total, atol=1e-6)


def test_a_blocks_loss_does_not_depend_on_the_other_anchors():
    target = tiny_target("qwen3")
    view = TargetView(target, tiny_drafter(target))
    row = pack_row([(0, EXAMPLES[0])])
    with torch.no_grad():
        both = outcome(view, row.with_anchors([[5, 9]]))
        alone = outcome(view, row.with_anchors([[9]]))
    assert torch.allclose(both.losses.acceptance[1], alone.losses.acceptance[0], atol=1e-6)


def test_rows_are_filled_and_never_beyond_their_length():
    documents = list(enumerate(EXAMPLES))
    rows = PackingCollator(24)(documents)["rows"]
    assert [row.example_ids for row in rows] == [(0, 1), (2,)]
    assert rows[0].position_ids.tolist() == [*range(14), *range(9)]
    assert rows[0].document_ids.tolist() == [0] * 14 + [1] * 9
    assert [row.example_ids for row in PackingCollator(100, packing=False)(documents)["rows"]] == [(0,), (1,), (2,)]


def test_anchors_are_drawn_anew_at_each_step_and_the_same_whoever_draws():
    long = example(200, 10)
    drawn = [draw_anchors(long, 20, seed=0, step=step, example_id=7) for step in range(3)]
    assert drawn[0] != drawn[1] != drawn[2]
    assert draw_anchors(long, 20, seed=0, step=1, example_id=7) == drawn[1]
    assert draw_anchors(long, 20, seed=1, step=1, example_id=7) != drawn[1]
    for anchors in drawn:
        assert len(set(anchors)) == 20 and anchors == sorted(anchors) and set(anchors) <= set(long.anchors())
    assert draw_anchors(long, 1000, seed=0, step=0, example_id=7) == long.anchors()
    row = pack_row([(7, long)]).with_drawn_anchors(20, seed=0, step=1)
    assert row.anchors.tolist() == drawn[1]
    assert position_weights(row.supervised(4), None).sum() == row.supervised(4).sum()


def test_tokens_outside_the_draft_vocabulary_have_no_draft_id_and_never_match():
    target = tiny_target("qwen3")
    kept = frequent_token_ids(EXAMPLES, 5)
    drafter = tiny_drafter(target, draft_vocab_size=5)
    drafter.d2t.copy_(torch.tensor(kept) - torch.arange(5))
    outside = next(token for token in range(64) if token not in kept)
    assert draft_ids_of(drafter, torch.tensor([[kept[2], outside]])).tolist() == [[2, -1]]
    view = TargetView(target, drafter)
    row = pack_row([(0, EXAMPLES[0])]).with_anchors([EXAMPLES[0].anchors()])
    features = Teacher(view).features(row)
    never = dataclasses.replace(features, top_ids=torch.full_like(features.top_ids, outside))
    assert not row_outcome(view, never, row, weights=WEIGHTS).matches.any()
