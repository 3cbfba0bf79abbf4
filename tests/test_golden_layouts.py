"""
speculators, SpecForge and DFlash folders: what their own code computed, computed here (float32, 1e-5, of the largest
value where that is above 1; ids exactly).

Block outputs are compared twice: in one forward of the drafter, and in the drafting session, where the blocks of all
anchors are rows of one ragged packed batch.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LogitsProcessorList

from hf_dspark import ConfidenceThreshold, DSparkDrafter
from hf_dspark.drafting import DraftSession
from hf_dspark.processors import RowProcessors
from hf_dspark.target import TargetView
from hf_dspark.training.blocks import draft_blocks
from hf_dspark.training.teacher import TeacherFeatures
from hf_dspark.verification import RandomSource

from .test_golden import assert_close

DATA = Path(__file__).with_name("data")
BLOCKS = ["speculators_A_reduced_swa_gated", "speculators_B_full_mixed_vanilla", "specforge_dspark_full_vanilla"]


@pytest.fixture(scope="module")
def target():
    return AutoModelForCausalLM.from_pretrained(DATA / "target_qwen3").eval()


@pytest.fixture(params=BLOCKS)
def blocks(request, target):
    folder = DATA / request.param
    tensors = load_file(folder / "expected.safetensors")
    if "greedy.prev_token_ids" not in tensors:
        anchor_ids = tensors["input_ids"][0, tensors["anchor_positions"].flatten()]
        tensors["greedy.prev_token_ids"] = torch.cat([anchor_ids[:, None], tensors["greedy.draft_ids"][:, :-1]], dim=1)
    return TargetView(target, DSparkDrafter.from_pretrained(folder).eval()), tensors


def anchors_of(tensors):
    """The anchors whose context is not empty."""
    return tensors["anchor_positions"].flatten().tolist()


@torch.no_grad()
def test_features_are_the_targets_tapped_states(blocks):
    view, tensors = blocks
    states = view.target(tensors["input_ids"], output_hidden_states=True).hidden_states
    assert_close(view.context_features(states), tensors["context_features"])


@torch.no_grad()
def test_block_outputs_equal_the_reference_slot_by_slot(blocks):
    view, tensors = blocks
    config, ids, features = view.drafter.config, tensors["input_ids"][0], tensors["context_features"]
    first = config.block_size - config.num_drafts
    for index, anchor in enumerate(anchors_of(tensors)):
        slots = torch.tensor([[int(ids[anchor]), *[config.mask_token_id] * (config.block_size - 1)]])
        hidden = view.drafter(
            view.noise_embeds(slots),
            features[:, :anchor],
            position_ids=torch.arange(anchor, anchor + config.block_size)[None],
            context_position_ids=torch.arange(anchor)[None],
        )
        assert_close(hidden[0], tensors["block_hidden"][index])
        base = view.base_logits(hidden)
        assert_close(base[0], tensors["base_logits"][index])
        for chain in ("teacher_forced", "greedy"):
            previous = tensors[f"{chain}.prev_token_ids"][index, first:][None]
            logits, confidence = view.drafter.teacher_forced(hidden[:, first:], base[:, first:], previous)
            assert_close(logits[0], tensors[f"{chain}.draft_logits"][index, first:])
            assert_close(confidence[0], tensors[f"{chain}.confidence_logits"][index, first:])


@torch.no_grad()
def test_a_ragged_packed_batch_of_all_blocks_drafts_the_reference_chains(blocks):
    view, tensors = blocks
    config, ids, features = view.drafter.config, tensors["input_ids"][0], tensors["context_features"][0]
    anchors = anchors_of(tensors)
    session = DraftSession(
        view,
        len(anchors),
        do_sample=False,
        processors=RowProcessors(LogitsProcessorList(), len(anchors)),
        random_source=RandomSource(),
        device=ids.device,
    )
    for row, anchor in enumerate(anchors):  # in two parts, as rounds write it
        middle = anchor // 2
        for part in (slice(0, middle), slice(middle, anchor)):
            where = torch.arange(anchor)[part]
            session.add_context(row, features[part], where, ids[part].tolist())
    drafts = session.propose(
        ids[anchors].tolist(), anchors, config.num_drafts, rows=range(len(anchors)), prefix=lambda entry, drawn: None
    )
    expected = tensors["greedy.token_ids"] if "greedy.token_ids" in tensors else tensors["greedy.draft_ids"]
    assert drafts.ids.tolist() == expected.tolist()
    confidence = tensors["greedy.confidence_logits"][:, config.block_size - config.num_drafts :]
    assert_close(drafts.confidence, confidence.sigmoid())


@torch.no_grad()
def test_the_training_forward_over_all_anchors_equals_the_reference(blocks):
    view, tensors = blocks
    config, ids = view.drafter.config, tensors["input_ids"][0]
    features = TeacherFeatures(tensors["context_features"][0], None, None)
    logits, confidence = draft_blocks(view, features, ids, tensors["anchor_positions"].flatten())
    first = config.block_size - config.num_drafts
    # Past the end of the text, what comes before a slot is the exporter's choice; those are masked in training.
    known = (tensors["anchor_positions"].reshape(-1, 1) + torch.arange(config.num_drafts)) < len(ids)
    assert_close(logits[known], tensors["teacher_forced.draft_logits"][:, first:][known])
    assert_close(confidence[known], tensors["teacher_forced.confidence_logits"][:, first:][known])


def decode(target, folder, trace_of, runs):
    """Runs the traces of a folder; yields our rounds and theirs."""
    drafter = DSparkDrafter.from_pretrained(DATA / folder).eval()
    for prompt in json.loads((DATA / folder / trace_of).read_text())["prompts"]:
        for run in runs:
            trace = prompt["runs"][run]
            view = drafter.with_options(scheduler=ConfidenceThreshold(trace.get("confidence_threshold", 0.0)))
            output = target.generate(
                torch.tensor([prompt["prompt_ids"]]),
                assistant_model=view,
                max_new_tokens=41,
                do_sample=False,
                eos_token_id=trace.get("stop_token_ids"),
                pad_token_id=0,
                return_dict_in_generate=True,
            )
            width = min(len(trace["output_ids"]), output.sequences.shape[1])
            assert output.sequences[0].tolist()[:width] == trace["output_ids"][:width]
            whole = [r for r in output.rounds if len(r.draft_ids) == drafter.config.num_drafts]
            assert len(whole) >= 3
            yield prompt["name"], whole, trace["rounds"]


def test_a_dflash_folder_decodes_as_its_own_code_does(target):
    tensors = load_file(DATA / "zlab_dflash_qwen3" / "expected.safetensors")
    for name, ours, theirs in decode(target, "zlab_dflash_qwen3", "expected.json", ["full"]):
        assert f"{name}.full.draft_logits" in tensors
        for our, their in zip(ours, theirs, strict=False):
            assert (our.anchor_id, list(our.draft_ids)) == (their["anchor"], their["draft_ids"])
            assert (our.num_accepted, our.next_id) == (their["accepted"], their["next_token"])


@torch.no_grad()
def test_a_dflash_folders_block_outputs_equal_the_reference(target):
    folder = DATA / "zlab_dflash_qwen3"
    drafter, tensors = DSparkDrafter.from_pretrained(folder).eval(), load_file(folder / "expected.safetensors")
    view, num_rounds = TargetView(target, drafter), 0
    assert not drafter.config.sample_from_anchor and drafter.config.num_drafts == 5
    assert drafter.markov_head is None and drafter.confidence_head is None
    for prompt in json.loads((folder / "expected.json").read_text())["prompts"]:
        key = f"{prompt['name']}.full"
        for index, round_ in enumerate(prompt["runs"]["full"]["rounds"]):
            start = round_["start"]
            hidden = drafter(
                view.noise_embeds(torch.tensor([[round_["anchor"], *[drafter.config.mask_token_id] * 5]])),
                tensors[f"{key}.context_features"][None, :start],
                position_ids=torch.arange(start, start + 6)[None],
                context_position_ids=torch.arange(start)[None],
            )
            assert_close(hidden[0], tensors[f"{key}.draft_hidden"][index])
            assert_close(view.base_logits(hidden)[0, 1:], tensors[f"{key}.draft_logits"][index])
            num_rounds += 1
    assert num_rounds > 40


@pytest.mark.parametrize("run", ["full", "thr0.5"])
def test_a_specforge_folder_decodes_as_the_reference_evaluator_does(target, run):
    for _, ours, theirs in decode(target, "specforge_dspark_full_vanilla", "decode.json", [run]):
        for our, their in zip(ours, theirs, strict=False):
            assert (our.anchor_id, list(our.draft_ids)) == (their["anchor"], their["draft_ids"])
            assert our.verify_length == their["proposal_length"]
            assert (our.num_accepted, our.next_id) == (their["accepted"], their["next_token"])
            expected = torch.tensor(their["confidence_logits"]).sigmoid()
            assert_close(torch.tensor(our.confidence), expected)
