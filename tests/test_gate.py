"""The gate opens for what runs packed, and says what keeps the rest out."""

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache, StaticCache

from hf_dspark.gate import supports_packed
from tests.tiny import FAMILIES, tiny_target


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gate_opens_for_every_family(family):
    inputs = {"attention_mask": torch.ones(1, 3), "use_cache": True, "cache": DynamicCache()}
    assert supports_packed(tiny_target(family), inputs) == (True, "")


@pytest.mark.parametrize(("family", "reason"), [("qwen3_5", "recurrent state"), ("bloom", "attention of `Bloom")])
def test_the_gate_names_what_a_model_lacks(family, reason):
    supported, why = supports_packed(tiny_target(family), {})
    assert not supported and reason in why


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"pixel_values": torch.ones(1)}, "`pixel_values`"),
        ({"position_ids": torch.ones(3, 1, 4)}, "position_ids with 3 dimensions"),
        ({"attention_mask": torch.ones(1, 1, 4, 4)}, "attention_mask with 4 dimensions"),
        ({"cache": StaticCache(config=tiny_target("qwen3").config, max_cache_len=8)}, "`StaticCache`"),
    ],
)
def test_the_gate_names_what_an_input_does(kwargs, reason):
    supported, why = supports_packed(tiny_target("qwen3"), kwargs)
    assert not supported and reason in why


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 512,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_length_dependent_rotary_embeddings_are_packed_up_to_the_length_they_change_at(rope):
    target = tiny_target("llama", rope_parameters=rope)
    assert supports_packed(target, {}, max_length=512)[0]
    for max_length in (513, None):
        supported, why = supports_packed(target, {}, max_length=max_length)
        assert not supported and rope["rope_type"] in why


def test_prompt_learning_and_compiled_models_are_not_packed():
    target = copy.deepcopy(tiny_target("qwen3"))
    peft = SimpleNamespace(active_peft_config=SimpleNamespace(is_prompt_learning=True))
    target.prepare_inputs_for_generation = type(target).prepare_inputs_for_generation.__get__(peft)
    assert "prompt-learning" in supports_packed(target, {})[1]
    del target.prepare_inputs_for_generation
    assert supports_packed(target, {})[0]
    target.forward = torch.compile(target.forward, backend="eager")
    assert "compiled" in supports_packed(target, {})[1]
