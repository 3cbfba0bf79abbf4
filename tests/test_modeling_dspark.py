"""The drafter module: what it holds, what it shares, and that its two stages mean what the paper says."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModel

from hf_dspark import DSparkDrafter, FixedLength

from .test_configuration_dspark import config


def drafter(**fields):
    torch.manual_seed(0)
    return DSparkDrafter(config(**fields)).eval()


def block_inputs(length=5, slots=4):
    generator = torch.Generator().manual_seed(1)
    return {
        "noise_embeds": torch.randn(1, slots, 32, generator=generator),
        "context_hidden_states": torch.randn(1, length, 64, generator=generator),
        "position_ids": torch.arange(length, length + slots)[None],
        "context_position_ids": torch.arange(length)[None],
    }


@torch.no_grad()
def test_every_slot_of_a_block_sees_every_other_and_the_context():
    model, inputs = drafter(), block_inputs()
    reference = model(**inputs)
    for name, index in (("noise_embeds", 3), ("context_hidden_states", 0)):
        changed = {k: v.clone() for k, v in inputs.items()}
        changed[name][0, index] += 1
        assert ((model(**changed) - reference).abs().amax(-1) > 1e-5).all()


@torch.no_grad()
def test_only_relative_positions_matter():
    model, inputs = drafter(), block_inputs()
    shifted = inputs | {name: inputs[name] + 100 for name in ("position_ids", "context_position_ids")}
    assert torch.allclose(model(**inputs), model(**shifted), atol=1e-4)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@torch.no_grad()
def test_stepping_through_a_block_equals_scanning_it(head):
    model = drafter(markov_head_type=head)
    hidden, previous = torch.randn(3, 4, 32), torch.randint(0, 64, (3, 4))
    embeds = model.markov_head.embed(previous)
    scanned, state = model.markov_head.scan(embeds, hidden), None
    for position in range(4):
        latent, state = model.markov_head.step(embeds[:, position], hidden[:, position], state)
        assert torch.allclose(latent, scanned[:, position], atol=1e-6)


@torch.no_grad()
def test_the_bias_of_some_candidates_is_the_full_bias_at_those():
    head, latent = drafter().markov_head, torch.randn(3, 4)
    candidates = torch.tensor([[1, 5, 9], [2, 2, 63], [0, 1, 2]])
    assert torch.allclose(head.bias(latent, candidates), head.bias(latent).gather(1, candidates), atol=1e-6)


@torch.no_grad()
def test_confidence_depends_on_the_previous_token_and_never_on_the_draft_itself():
    model, hidden = drafter(), torch.randn(1, 4, 32)
    base, previous = torch.randn(1, 4, 64), torch.tensor([[1, 2, 3, 4]])
    _, reference = model.teacher_forced(hidden, base, previous)
    other = previous.clone()
    other[0, 2] = 9  # the draft at position 1, the previous token of position 2
    changed = (model.teacher_forced(hidden, base, other)[1] - reference).abs()[0] > 1e-7
    assert changed.tolist() == [False, False, True, False]


def test_saving_writes_only_the_drafters_own_tensors_and_loads_back_equal(tmp_path):
    model = drafter(draft_vocab_size=16, markov_head_type="gated")
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert names == set(model.state_dict()) and "embed_tokens.weight" not in names
    loaded, info = DSparkDrafter.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), loaded.state_dict().values(), strict=True)
    )


def test_auto_model_loads_a_saved_drafter(tmp_path):
    model = drafter()
    model.save_pretrained(tmp_path)
    loaded, info = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert isinstance(loaded, DSparkDrafter) and not any(info.values())
    assert torch.equal(loaded.fc.weight, model.fc.weight)


def test_a_drafter_for_the_full_vocabulary_has_no_embedding_and_no_head_of_its_own():
    assert not {"embed_tokens", "lm_head"} & {name.split(".")[0] for name in drafter().state_dict()}


def test_nothing_is_sized_by_max_position_embeddings():
    small, large = drafter(), drafter(max_position_embeddings=10**6)

    def size(model):
        return sum(t.numel() for t in [*model.parameters(), *model.buffers()])

    assert size(small) == size(large)


def test_views_share_weights_and_keep_their_options_to_themselves():
    model = drafter()
    one, two = model.with_options(scheduler=FixedLength(1)), model.with_options(max_draft_tokens=2)
    assert one.fc.weight is model.fc.weight is two.fc.weight
    assert (one.options.scheduler, two.options.scheduler, model.options.scheduler) == (FixedLength(1), None, None)
    both = one.with_options(max_draft_tokens=3)
    assert (both.options.scheduler, both.options.max_draft_tokens) == (FixedLength(1), 3)
    with torch.no_grad():
        one.fc.weight.add_(1)
    assert torch.equal(one.fc.weight, model.fc.weight)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"temperature": 1.0}, TypeError),
        ({"scheduler": 3}, TypeError),
        ({"max_draft_tokens": 0}, ValueError),
        ({"max_draft_tokens": True}, TypeError),
        ({"on_round": 1}, TypeError),
        ({"generator": 0}, TypeError),
    ],
)
def test_an_option_that_could_not_be_decoded_with_is_refused(options, error):
    with pytest.raises(error, match=next(iter(options))):
        drafter().with_options(**options)


def test_a_drafter_without_taps_or_mask_token_is_refused():
    for missing in ({"target_layer_ids": []}, {"mask_token_id": None}):
        with pytest.raises(ValueError, match="target_layer_ids and mask_token_id"):
            drafter(**missing)


def test_a_drafter_can_be_copied_and_pickled():
    model = drafter()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin.fc.weight, model.fc.weight)


def test_official_folders_keep_their_parameter_names():
    folder = Path(__file__).with_name("data") / "deepspec_qwen3_gated"
    with safe_open(folder / "model.safetensors", "pt") as file:
        published = {name for name in file.keys() if not name.startswith(("embed_tokens", "lm_head"))}
    assert published == set(DSparkDrafter.from_pretrained(folder).state_dict())
