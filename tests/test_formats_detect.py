"""A layout is told from what a config says, never guessed; what is refused is named, with where it does run."""

import pytest

from hf_dspark.formats.detect import UnknownLayout, detect

LAYOUTS = {
    "native": {"model_type": "dspark"},
    "autoregressive": {"model_type": "dspark_autoregressive"},
    "deepspec": {"model_type": "qwen3", "architectures": ["Qwen3DSparkModel"]},
    "deepspec, Gemma4": {"model_type": "gemma4_unified_text", "architectures": ["Gemma4DSparkModel"]},
    "speculators": {"speculators_model_type": "dspark", "architectures": ["DSparkDraftModel"]},
    "speculators, DFlash": {"speculators_model_type": "dflash", "architectures": ["DFlashSpeculator"]},
    "specforge": {"architectures": ["DSparkDraftModel"], "dflash_config": {"projector_type": "dspark"}},
    "specforge, renamed for vLLM": {
        "architectures": ["Qwen3DSparkModel"],
        "dflash_config": {"projector_type": "dspark"},
    },
    "model_optimizer": {
        "architectures": ["DFlashDraftModel"],
        "dflash_config": {"projector_type": "dspark", "shift_label": True},
    },
    "zlab": {"architectures": ["DFlashDraftModel"], "dflash_config": {"mask_token_id": 1}},
}

REFUSED = {
    "nothing at all": ({}, "no model_type and no architectures"),
    "a language model": ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, "as the target"),
    "an unknown architecture": ({"architectures": ["SomethingElse"]}, "SomethingElse.*Read are"),
    "DeepSeek-V4's bundled drafter": (
        {"architectures": ["DeepseekV4ForCausalLM"], "dspark_target_layer_ids": [40, 41, 42]},
        "bundled with its DeepSeek-V4 target.*SGLang",
    ),
    "a draft of layers not built": ({"architectures": ["DeepseekV4DSparkModel"]}, "DeepseekV4DSparkModel.*vLLM"),
    "a projector not known": ({"dflash_config": {"projector_type": "domino"}}, "domino"),
    "another speculators kind": ({"speculators_model_type": "eagle3"}, "eagle3.*vllm serve"),
    "EAGLE": ({"architectures": ["LlamaForCausalLMEagle3"]}, "EAGLE"),
    "transformers' own": ({"model_type": "muse_glimmer_assistant"}, "transformers"),
    "two layouts at once": (
        {"speculators_model_type": "dspark", "dflash_config": {"projector_type": "dspark"}},
        "contradicts itself.*speculators_model_type.*dflash_config",
    ),
    "layout A and layout B": (
        {"architectures": ["Qwen3DSparkModel"], "dflash_config": {"mask_token_id": 1}},
        "contradicts itself.*no projector_type.*Qwen3DSparkModel",
    ),
    "a dflash_config that is none": ({"dflash_config": None}, "must be an object"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_recognised_with_its_reason(name):
    detected = detect(LAYOUTS[name])
    assert detected.family == name.split(",")[0]
    assert detected.reason and detected.name


def test_heads_without_prefix_tell_model_optimizer_from_specforge():
    config = {"dflash_config": {"projector_type": "dspark"}}
    assert detect(config, ["markov_w1.weight"]).family == "model_optimizer"
    assert detect(config, ["markov_head.markov_w1.weight"]).family == "specforge"


def test_a_bundled_drafter_is_known_by_its_tensors_too():
    with pytest.raises(UnknownLayout, match=r"mtp\.0.*SGLang"):
        detect({"model_type": "deepseek_v4"}, ["mtp.0.attn.weight"])


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_refused_and_says_what_was_found(name):
    config, said = REFUSED[name]
    with pytest.raises(UnknownLayout, match=said):
        detect(config)
