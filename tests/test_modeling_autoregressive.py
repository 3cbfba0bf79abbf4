"""The autoregressive drafter: what it holds, and that its training forward is what it does in decoding."""

from types import SimpleNamespace

import pytest
import torch

from hf_dspark import ConfidenceThreshold, FixedLength, calibrate, profile_sps
from hf_dspark.configuration_autoregressive import AutoregressiveConfig
from hf_dspark.modeling_autoregressive import AutoregressiveDrafter
from hf_dspark.target import TargetView
from hf_dspark.training.blocks import draft_blocks
from tests.drafters import AUTOREGRESSIVE, assert_drafted, generate, left_padded, tiny_drafter
from tests.test_drafting import slow_steps, texts_before
from tests.tiny import tiny_target

KINDS = {"five steps": {}, "one step": {"block_size": 1}, "reduced vocabulary": {"draft_vocab_size": 20}}


def tiny(target, **overrides):
    return tiny_drafter(target, **AUTOREGRESSIVE | overrides)


def features_of(view, input_ids):
    """What the trainer hands over, as far as it is read."""
    with torch.no_grad():
        states = view.target(input_ids[None], output_hidden_states=view.hidden_state_indices, use_cache=False)
    return SimpleNamespace(context=view.context_features(states.hidden_states)[0])


def blocks(view, input_ids, anchors):
    with torch.no_grad():
        return draft_blocks(view, features_of(view, input_ids), input_ids, torch.tensor(anchors))


# ------------------------------------------------------------------------------------------------------ training


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_training_blocks_are_steps_run_anew_from_each_anchor(kind):
    target = tiny_target("llama")
    view = TargetView(target, tiny(target, **kind))
    input_ids = left_padded([14])["input_ids"][0]
    logits, confidence = blocks(view, input_ids, [0, 3, 8])
    num_drafts = view.drafter.config.num_drafts
    assert logits.shape[:2] == confidence.shape == (3, num_drafts)
    for row, anchor in enumerate((0, 3, 8)):
        context = features_of(view, input_ids).context[None, :anchor]
        previous = input_ids[None, anchor : anchor + num_drafts]
        with torch.no_grad():
            hidden = slow_steps(view, context, input_ids[None, :anchor], previous)
            expected = view.drafter.teacher_forced(hidden, view.base_logits(hidden), previous)
        torch.testing.assert_close(logits[row], expected[0][0], atol=1e-4, rtol=0)
        torch.testing.assert_close(confidence[row], expected[1][0], atol=1e-4, rtol=0)


def test_the_training_forward_at_the_anchors_of_live_rounds_is_the_live_drafting():
    target, inputs = tiny_target("llama"), left_padded([7])
    drafter = tiny(target)
    view = TargetView(target, drafter)
    output = generate(target, inputs, drafter, max_new_tokens=20)
    assert_drafted(output.rounds)
    for r, text in texts_before(output.rounds, inputs["input_ids"].tolist(), output.sequences[:, 7].tolist()):
        if not r.draft_ids:
            continue
        logits, confidence = blocks(view, torch.tensor([*text, r.anchor_id, *r.draft_ids]), [len(text)])
        count = len(r.draft_ids)
        assert tuple(logits[0, :count].argmax(-1).tolist()) == r.draft_ids
        torch.testing.assert_close(torch.tensor(r.confidence), confidence[0, :count].sigmoid(), atol=1e-4, rtol=0)


def test_a_block_sees_no_state_of_the_target_from_its_anchor_on_and_no_other_block():
    target = tiny_target("llama")
    view = TargetView(target, tiny(target))
    input_ids = left_padded([14])["input_ids"][0]
    features = features_of(view, input_ids)
    spoilt = SimpleNamespace(context=features.context.clone())
    spoilt.context[6:] = 9.0
    with torch.no_grad():
        ours, _ = draft_blocks(view, features, input_ids, torch.tensor([2, 6, 8]))
        alone, _ = draft_blocks(view, features, input_ids, torch.tensor([6]))
        blind, _ = draft_blocks(view, spoilt, input_ids, torch.tensor([6, 8]))
    torch.testing.assert_close(ours[1], alone[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(blind[0], alone[0], atol=1e-5, rtol=0)
    assert (blind[1] - ours[2]).abs().max() > 1e-2  # the control: before an anchor, states count


def test_every_weight_but_the_frozen_head_gets_a_gradient():
    target = tiny_target("llama")
    view = TargetView(target, tiny(target))
    input_ids = left_padded([14])["input_ids"][0]
    logits, confidence = draft_blocks(view, features_of(view, input_ids), input_ids, torch.tensor([3, 8]))
    (logits.log_softmax(-1)[..., 5].mean() + confidence.mean()).backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in view.drafter.parameters())


@pytest.mark.parametrize("implementation", ["eager", "flex_attention"])
def test_every_attention_implementation_trains_alike(implementation):
    target = tiny_target("llama")
    input_ids = left_padded([14])["input_ids"][0]
    stock, other = tiny(target), tiny(target)
    other.config._attn_implementation_internal = implementation
    ours, theirs = (blocks(TargetView(target, drafter), input_ids, [3, 8])[0] for drafter in (other, stock))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


# ------------------------------------------------------------------------------------------------------ decoding


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma3", "gpt_neox"])
def test_a_ragged_batch_is_greedy_equal_to_plain_generate(family):
    target = tiny_target(family)
    for lengths in ([5], [1, 3, 9, 17]):
        inputs = left_padded(lengths)
        plain = generate(target, inputs, max_new_tokens=24).sequences
        output = generate(target, inputs, tiny(target), max_new_tokens=24)
        assert torch.equal(output.sequences, plain)
        assert_drafted(output.rounds)


@pytest.mark.parametrize("prompt_lengths", [[5], [1, 3, 9, 17]], ids=["one row", "four rows"])
def test_a_single_token_a_round_is_lossless_and_drafts_the_right_position(prompt_lengths):
    target, inputs = tiny_target("llama"), left_padded(prompt_lengths)
    plain = generate(target, inputs, max_new_tokens=16).sequences
    output = generate(target, inputs, tiny(target, block_size=1), max_new_tokens=16)
    assert torch.equal(output.sequences, plain)
    assert sum(r.verify_length for r in output.rounds) > 0.9 * len(output.rounds)


def test_a_round_of_k_drafts_takes_k_passes_of_the_layer_and_one_for_the_whole_batch():
    target, inputs, widths = tiny_target("llama"), left_padded([4, 7]), []
    drafter = tiny(target)
    handle = drafter.layer.register_forward_pre_hook(lambda module, args: widths.append(args[0].shape))
    try:
        view = drafter.with_options(scheduler=FixedLength(3))
        output = generate(target, inputs, view, max_new_tokens=24)
    finally:
        handle.remove()
    full = [r for r in output.rounds if r.verify_length == 3]
    assert len(full) > 8
    assert len(widths) == sum(len(r.draft_ids) for r in {r.step: r for r in output.rounds}.values())
    assert {shape[:2] for shape in widths} <= {(1, 2), (1, 1)}


def test_a_prompt_of_embeddings_is_continued():
    target, inputs = tiny_target("llama"), left_padded([6, 3])
    prompt = {
        "inputs_embeds": target.get_input_embeddings()(inputs["input_ids"]).detach(),
        "attention_mask": inputs["attention_mask"],
    }
    plain = generate(target, prompt, max_new_tokens=16).sequences
    output = generate(target, prompt, tiny(target), max_new_tokens=16)
    assert torch.equal(output.sequences, plain)
    assert_drafted(output.rounds)


def test_a_scheduler_that_reads_confidences_needs_the_head_for_them():
    target, inputs = tiny_target("llama"), left_padded([5])
    plain = generate(target, inputs, max_new_tokens=12).sequences
    policy = ConfidenceThreshold(0.3)
    with pytest.raises(ValueError, match="needs a drafter with a confidence head.*use FixedLength"):
        view = tiny(target, enable_confidence_head=False).with_options(scheduler=policy)
        generate(target, inputs, view, max_new_tokens=12)
    for view in (tiny(target), tiny(target, enable_confidence_head=False).with_options(scheduler=FixedLength(2))):
        assert torch.equal(generate(target, inputs, view, max_new_tokens=12).sequences, plain)
    output = generate(target, inputs, tiny(target).with_options(scheduler=policy), max_new_tokens=12)
    assert torch.equal(output.sequences, plain)


@pytest.mark.parametrize("kind", [{}, {"enable_confidence_head": False}], ids=["confidences", "none"])
def test_step_times_are_measured_and_the_default_scheduler_goes_by_them(kind):
    target, inputs = tiny_target("llama"), left_padded([5, 9])
    drafter = tiny(target, **kind)
    profile = profile_sps(target, drafter, max_batch_tokens=12, contexts=(10,), repeats=1, progress=False)
    assert profile.block_size == 5 and len(profile.draft_points) > 0
    assert all(min(point.seconds) > 0 for point in profile.draft_points)
    plain = generate(target, inputs, max_new_tokens=24).sequences
    output = generate(target, inputs, drafter.with_options(sps_profile=profile), max_new_tokens=24)
    assert torch.equal(output.sequences, plain)


def test_confidences_are_calibrated_like_those_of_any_drafter(tmp_path):
    target, drafter = tiny_target("llama"), tiny(tiny_target("llama"), block_size=2)
    prompts = left_padded([4] * 12)["input_ids"].tolist()
    report = calibrate(target, drafter, prompts, modes=["greedy"], max_new_tokens=24)["greedy"]
    assert drafter.config.confidence_temperatures["greedy"] == pytest.approx(report.temperatures, abs=1e-4)
    drafter.save_pretrained(tmp_path)
    loaded = AutoregressiveDrafter.from_pretrained(tmp_path)
    assert loaded.config.confidence_calibration == drafter.config.confidence_calibration


# ----------------------------------------------------------------------------------------------- module and config


def test_saving_writes_only_the_drafters_own_tensors_and_loads_back_equal(tmp_path):
    drafter = tiny(tiny_target("llama"), draft_vocab_size=20)
    drafter.save_pretrained(tmp_path)
    loaded, info = AutoregressiveDrafter.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert {**loaded.config.to_dict(), "_name_or_path": ""} == drafter.config.to_dict()
    assert not {"embed_tokens", "markov_head"} & {name.split(".")[0] for name in loaded.state_dict()}
    for ours, theirs in zip(drafter.state_dict().values(), loaded.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
    target, inputs = tiny_target("llama"), left_padded([5])
    outputs = [generate(target, inputs, d, max_new_tokens=12).rounds for d in (drafter, loaded)]
    assert [r.draft_ids for r in outputs[0]] == [r.draft_ids for r in outputs[1]]


def test_views_share_weights_and_keep_their_options_to_themselves():
    drafter = tiny(tiny_target("llama"))
    view = drafter.with_options(scheduler=FixedLength(1), max_draft_tokens=2)
    assert type(view) is AutoregressiveDrafter and view.fc.weight is drafter.fc.weight
    assert (view.options.max_draft_tokens, drafter.options.max_draft_tokens) == (2, None)
    with pytest.raises(TypeError, match="unknown options"):
        drafter.with_options(temperature=1.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_hidden_layers": 2},
        {"markov_rank": 8},
        {"sample_from_anchor": False},
        {"backbone": "gemma4"},
        {"layer_types": ["sliding_attention"]},
    ],
    ids=str,
)
def test_what_an_autoregressive_drafter_cannot_be_is_refused(fields):
    with pytest.raises(ValueError, match=f"{next(iter(fields))}=.* is not possible for an autoregressive drafter"):
        AutoregressiveConfig(vocab_size=64, hidden_size=32, target_layer_ids=[0], **fields)


def test_a_drafter_without_taps_is_refused():
    with pytest.raises(ValueError, match="needs target_layer_ids"):
        AutoregressiveDrafter(AutoregressiveConfig(vocab_size=64, hidden_size=32))
