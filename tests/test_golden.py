"""
DeepSpec's Qwen3 and Gemma4 folders: what their own code computed, computed here (float32, 1e-5, of the
largest value where that is above 1; ids and lengths exactly). Other layouts are in `test_golden_layouts.py`.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_dspark import ConfidenceThreshold, DSparkDrafter
from hf_dspark.losses import LossWeights, block_losses
from hf_dspark.target import TargetView
from hf_dspark.training import TrainingExample
from hf_dspark.training.blocks import draft_blocks, row_outcome
from hf_dspark.training.collation import pack_row
from hf_dspark.training.teacher import Teacher, TeacherFeatures, TeacherHead

DATA = Path(__file__).with_name("data")
TARGETS = {
    "deepspec_qwen3_vanilla": "target_qwen3",
    "deepspec_qwen3_gated": "target_qwen3",
    "deepspec_gemma4_keqv": "target_gemma4_keqv",
}
TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=TARGETS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def target(name):
    return AutoModelForCausalLM.from_pretrained(DATA / TARGETS[name]).eval()


@pytest.fixture(scope="module")
def golden(name):
    folder = DATA / name
    drafter = DSparkDrafter.from_pretrained(folder).eval()
    return drafter, json.loads((folder / "expected.json").read_text()), load_file(folder / "expected.safetensors")


def assert_close(actual, expected, tolerance=TOLERANCE):
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max().item() <= tolerance * max(expected.abs().max().item(), 1.0)


def test_a_deepspec_folder_loads_with_nothing_missing_and_nothing_left_over(golden):
    drafter = golden[0]
    config = drafter.config
    assert config.model_type == "dspark" and config.sample_from_anchor and config.num_drafts == 5
    assert not any(name.startswith(("embed_tokens", "lm_head")) for name in drafter.state_dict())


def test_backbone_logits_and_confidence_equal_the_reference_slot_by_slot(golden, target):
    drafter, expected, tensors = golden
    view, num_rounds = TargetView(target, drafter), 0
    for prompt in expected["prompts"]:
        name, run = prompt["name"], prompt["runs"]["full"]
        features = tensors[f"{name}.full.context_features"]
        for index, round_ in enumerate(run["rounds"]):
            start = round_["start"]
            slots = torch.tensor([[round_["anchor"], *[drafter.config.mask_token_id] * 4]])
            with torch.no_grad():
                hidden = drafter(
                    view.noise_embeds(slots),
                    features[None, :start],
                    position_ids=torch.arange(start, start + 5)[None],
                    context_position_ids=torch.arange(start)[None],
                )
                base_logits = view.base_logits(hidden)
                previous = torch.tensor([[round_["anchor"], *round_["draft_ids"][:-1]]])
                logits, confidence = drafter.teacher_forced(hidden, base_logits, previous)
            assert_close(hidden[0], tensors[f"{name}.full.draft_hidden"][index])
            if f"{name}.full.base_logits" in tensors:
                assert_close(base_logits[0], tensors[f"{name}.full.base_logits"][index])
            assert_close(logits[0], tensors[f"{name}.full.draft_logits"][index])
            assert_close(confidence[0], tensors[f"{name}.full.confidence_logits"][index])
            num_rounds += 1
    assert num_rounds > 50


@pytest.mark.parametrize("run", ["full", "thr0.5", "thr0.8", "stop"])
def test_generate_reproduces_the_whole_decode_trace(golden, target, run):
    drafter, expected, tensors = golden
    for prompt in expected["prompts"]:
        trace = prompt["runs"][run]
        view = drafter.with_options(scheduler=ConfidenceThreshold(trace["confidence_threshold"]))
        output = target.generate(
            torch.tensor([prompt["prompt_ids"]]),
            assistant_model=view,
            max_new_tokens=41,
            do_sample=False,
            eos_token_id=trace["stop_token_ids"],
            pad_token_id=0,
            return_dict_in_generate=True,
        )
        # The peer's 40 new tokens do not count the first one, which comes from the prefill.
        assert output.sequences[0].tolist()[: len(trace["output_ids"])] == trace["output_ids"]
        assert max(len(r.draft_ids) for r in output.rounds) == 5
        whole = [r for r in output.rounds if len(r.draft_ids) == 5]  # the last ones have no room for a block
        for index, (ours, theirs) in enumerate(zip(whole, trace["rounds"], strict=False)):
            assert ours.anchor_id == theirs["anchor"]
            assert list(ours.draft_ids) == theirs["draft_ids"]
            assert ours.verify_length == theirs["proposal_length"]
            assert list(ours.committed_ids) == theirs["committed"][: len(ours.committed_ids)]
            if not theirs["terminated_by_stop"]:
                assert (ours.num_accepted, ours.next_id) == (theirs["accepted"], theirs["next_token"])
            survival = torch.tensor(ours.confidence).logit()
            assert_close(survival, tensors[f"{prompt['name']}.{run}.confidence_logits"][index], 2e-4)  # via sigmoid


def test_the_training_forward_gives_the_reference_logits_loss_and_gradients(golden, target):
    drafter, expected, tensors = golden
    view = TargetView(target, drafter)
    drafter.zero_grad()
    ids, anchors = tensors["train.input_ids"].long(), tensors["train.anchor_positions"].long()
    supervised = tensors["train.eval_mask"].bool()
    kept = tensors["train.block_keep_mask"].bool()
    logits, confidences, teacher = [], [], []
    for row in range(len(ids)):
        last_hidden = tensors["train.target_last_hidden_states"][row]
        features = TeacherFeatures(tensors["train.target_hidden_states"][row], last_hidden, TeacherHead(view))
        row_logits, row_confidence = draft_blocks(view, features, ids[row], anchors[row])
        teacher.append(features.log_probs_at((anchors[row][:, None] + torch.arange(5)).clamp_max(ids.shape[1] - 2)))
        logits.append(row_logits)
        confidences.append(row_confidence)
    logits, confidences = torch.stack(logits), torch.stack(confidences)
    assert_close(logits[kept], tensors["train.draft_logits"][kept], 2e-5)
    assert_close(confidences[kept], tensors["train.confidence_pred"][kept], 2e-5)
    labels = (anchors[..., None] + torch.arange(1, 6)).clamp_max(ids.shape[1] - 1)
    losses = block_losses(
        logits,
        torch.stack(teacher).exp(),
        label_ids=torch.stack([ids[row][labels[row]] for row in range(len(ids))]),
        supervised=supervised,
        confidence_logits=confidences,
        weights=LossWeights(),
    )
    assert losses.total.item() == pytest.approx(tensors["train.loss"].item(), abs=1e-5)
    losses.total.backward()
    gradients = {name: parameter.grad for name, parameter in drafter.named_parameters()}
    compared = [name for name in tensors if name.startswith("train.grad.")]
    assert compared
    for name in compared:
        assert_close(gradients[name.removeprefix("train.grad.")], tensors[name], 1e-5)
    drafter.zero_grad()


@pytest.mark.parametrize("logits_bytes", [1, 2**26], ids=["block by block", "at once"])
def test_both_sequences_packed_and_chunked_give_the_reference_loss_and_gradients(golden, target, logits_bytes):
    drafter, _, tensors = golden
    view = TargetView(target, drafter)
    drafter.zero_grad()
    texts = [
        TrainingExample(tuple(ids.tolist()), tuple(mask.tolist()))
        for ids, mask in zip(tensors["train.input_ids"], tensors["train.loss_mask"], strict=True)
    ]
    kept = tensors["train.block_keep_mask"].bool()
    anchors = [own[keep].tolist() for own, keep in zip(tensors["train.anchor_positions"], kept, strict=True)]
    row = pack_row(list(enumerate(texts))).with_anchors(anchors)
    assert torch.equal(row.supervised(5), tensors["train.eval_mask"].bool()[kept])
    live = Teacher(view).features(row)
    states = tensors["train.target_hidden_states"].flatten(0, 1)
    assert_close(live.context, states, 1e-4)
    features = TeacherFeatures(states, tensors["train.target_last_hidden_states"].flatten(0, 1), TeacherHead(view))
    losses = row_outcome(view, features, row, weights=LossWeights(), logits_bytes=logits_bytes).losses
    assert losses.total.item() == pytest.approx(tensors["train.loss"].item(), abs=1e-5)
    losses.total.backward()
    gradients = {name: parameter.grad for name, parameter in drafter.named_parameters()}
    for name in (name for name in tensors if name.startswith("train.grad.")):
        assert_close(gradients[name.removeprefix("train.grad.")], tensors[name], 1e-5)
    drafter.zero_grad()
