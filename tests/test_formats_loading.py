"""`DSparkDrafter.from_pretrained` on everybody's folders gives the drafter that was written, or says why not."""

import json
import shutil

import pytest
import torch

from hf_dspark import DSparkConfig, DSparkDrafter
from hf_dspark.calibration import save_calibration
from hf_dspark.formats.fields import default_layer_ids
from hf_dspark.formats.loading import load_drafter

from . import foreign
from .drafters import AUTOREGRESSIVE, tiny_drafter
from .tiny import tiny_target

SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
SPECULATORS_SLIDING = {"layer_types": SLIDING["layer_types"], "sliding_window": 3, "use_sliding_window": True}
FROM_SLOT = {"sliding_window_origin": "slot"}
DFLASH = {"markov_rank": 0, "enable_confidence_head": False, "sample_from_anchor": False}
GEMMA = {
    "backbone": "gemma4",
    "hidden_act": "gelu_pytorch_tanh",
    "final_logit_softcapping": 9.0,
    "rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 5000.0},
}

SURFACE = {
    "DeepSpec": (foreign.deepspec, {}, {}),
    "DeepSpec, gated": (foreign.deepspec, {"markov_head_type": "gated"}, {}),
    "DeepSpec, rnn": (foreign.deepspec, {"markov_head_type": "rnn"}, {}),
    "DeepSpec, plain confidence": (foreign.deepspec, {"confidence_head_with_markov": False}, {}),
    "DeepSpec's DFlash: rank 0, still from the anchor": (
        foreign.deepspec,
        {"markov_rank": 0, "enable_confidence_head": False},
        {},
    ),
    "DeepSpec, Gemma4": (foreign.gemma4, GEMMA, {}),
    "DeepSpec, Gemma4, keys as values": (foreign.gemma4, GEMMA | {"attention_k_eq_v": True}, {}),
    "SpecForge": (foreign.specforge, {}, {}),
    "SpecForge, old prefix": (foreign.specforge, {"markov_head_type": "gated"}, {"prefix": "logit_head."}),
    "SpecForge, sliding": (foreign.specforge, SLIDING | FROM_SLOT, {"sliding_window": 3}),
    "SpecForge, renamed for vLLM": (foreign.specforge, {}, {"architectures": ["Qwen3DSparkModel"]}),
    "Model-Optimizer": (foreign.model_optimizer, {}, {}),
    "Model-Optimizer, gated": (foreign.model_optimizer, {"markov_head_type": "gated"}, {}),
    "Model-Optimizer, rnn": (foreign.model_optimizer, {"markov_head_type": "rnn"}, {}),
    "Model-Optimizer, layout B": (
        foreign.model_optimizer,
        {"sample_from_anchor": False},
        {"dflash": {"shift_label": False}},
    ),
    "Model-Optimizer, sliding though it says full": (
        foreign.model_optimizer,
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 3, "sliding_block_causal": False} | FROM_SLOT,
        {"dflash": {"use_swa": True, "swa_window_size": 3, "causal": False}, "layer_types": ["full_attention"] * 2},
    ),
    "DFlash": (foreign.zlab, DFLASH, {}),
    "DFlash, block size and all inside": (
        foreign.zlab,
        DFLASH,
        {"block_size": None, "dflash_config": {"mask_token_id": 63, "target_layer_ids": [0, 1], "block_size": 4}},
    ),
    "DFlash, fused projections": (foreign.zlab, DFLASH, {"fused": True}),
    "speculators": (foreign.speculators, {}, {}),
    "speculators, layout B": (foreign.speculators, {"sample_from_anchor": False}, {}),
    "speculators, before the key existed": (
        foreign.speculators,
        {"sample_from_anchor": False},
        {"sample_from_anchor": None},
    ),
    "speculators, reduced": (foreign.speculators, {"draft_vocab_size": 16, "markov_head_type": "rnn"}, {}),
    "speculators, sliding, causal": (foreign.speculators, SLIDING, {"layers": SPECULATORS_SLIDING}),
    "speculators, sliding, not causal": (
        foreign.speculators,
        SLIDING | {"sliding_block_causal": False},
        {"layers": SPECULATORS_SLIDING, "sliding_window_non_causal": True},
    ),
    "speculators, DFlash": (foreign.speculators, DFLASH, {"kind": "dflash"}),
}


def write(tmp_path, name):
    """The drafter of a case, and its folder."""
    make, ours, theirs = SURFACE[name]
    rope = {} if "rope_parameters" in ours else {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
    model = foreign.drafter(**(ours | rope))
    folder = make(tmp_path / "foreign", model, **theirs)
    fields = json.loads((folder / "config.json").read_text())
    for missing in [key for key, value in theirs.items() if value is None]:
        fields.pop(missing)
    (folder / "config.json").write_text(json.dumps(fields))
    return model, folder


@torch.no_grad()
def block(model):
    """Hidden states of a block after seven tokens."""
    generator = torch.Generator().manual_seed(1)
    return model(
        torch.randn(1, 4, 32, generator=generator),
        torch.randn(1, 7, 64, generator=generator),
        position_ids=torch.arange(7, 11)[None],
        context_position_ids=torch.arange(7)[None],
    )


@pytest.mark.parametrize("name", SURFACE)
def test_a_folder_of_every_layout_loads_as_what_was_written(tmp_path, name):
    model, folder = write(tmp_path, name)
    loaded, info = DSparkDrafter.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, model.state_dict()[key]) for key, tensor in loaded.state_dict().items())
    assert torch.equal(block(loaded), block(model))
    same = ("num_drafts", "target_layer_ids", "mask_token_id", "final_logit_softcapping", "draft_vocab_size")
    assert [getattr(loaded.config, key) for key in same] == [getattr(model.config, key) for key in same]
    assert DSparkConfig.from_pretrained(folder).num_drafts == model.config.num_drafts


CONTRADICTIONS = {
    "a head of another rank": (foreign.deepspec, {"markov_rank": 8}, "markov_w1.weight has shape"),
    "a head that is not there": (foreign.deepspec, {"markov_head_type": "gated"}, "gate_proj.* is missing"),
    "a head that should not be there": (
        foreign.deepspec,
        {"markov_rank": 0, "confidence_head_with_markov": False},
        "no part of the drafter reads markov",
    ),
    "as many taps as fc has not": (foreign.deepspec, {"target_layer_ids": [0, 1, 2]}, "fc.weight has shape"),
    "two block sizes": (
        foreign.zlab,
        {"dflash_config": {"mask_token_id": 63, "target_layer_ids": [0, 1], "block_size": 8}},
        "block_size: config says 4, dflash_config says 8",
    ),
    "two RoPE bases": (foreign.deepspec, {"rope_parameters": {"rope_theta": 1.0}}, "rope_theta"),
    "no mask token": (foreign.deepspec, {"mask_token_id": None}, "lacks its mask_token_id"),
    "a confidence head fed by nothing": (
        foreign.deepspec,
        {"markov_rank": 0, "enable_confidence_head": True, "confidence_head_with_markov": True},
        "markov_rank=0",
    ),
    "sliding layers that do not say how": (
        foreign.deepspec,
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4},
        "sliding_block_causal",
    ),
    "more proposals than slots": (
        foreign.speculators,
        {"sample_from_anchor": False, "speculators_config": {"proposal_methods": [{"speculative_tokens": 4}]}},
        "drafts 3 tokens, but speculative_tokens is 4",
    ),
    "a reduced vocabulary without its head": (
        foreign.speculators,
        {"draft_vocab_size": 9},
        "lm_head.weight .*missing",
    ),
    "RNN in layout B": (foreign.speculators, {"sample_from_anchor": False, "markov_head_type": "rnn"}, "layout B"),
    "layers of another model": (foreign.deepspec, {"model_type": "llama"}, "llama"),
    "quantised": (foreign.deepspec, {"quantization_config": {"quant_method": "fp8"}}, "quantised"),
    "experts": (foreign.gemma4, {"enable_moe_block": True}, "enable_moe_block"),
    "per-layer inputs": (foreign.gemma4, {"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_config_and_tensors_that_contradict_each_other_are_refused_by_name(tmp_path, name):
    make, theirs, said = CONTRADICTIONS[name]
    zlab, gemma = make is foreign.zlab, make is foreign.gemma4
    model = foreign.drafter(**(DFLASH if zlab else GEMMA if gemma else {}))
    folder = make(tmp_path, model)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | theirs))
    with pytest.raises(ValueError, match=said):
        DSparkDrafter.from_pretrained(folder)


def test_an_autoregressive_drafter_is_no_parallel_one_and_the_general_loader_takes_both(tmp_path):
    target = tiny_target("qwen3")
    for name, fields in (("parallel", {}), ("autoregressive", AUTOREGRESSIVE)):
        drafter = tiny_drafter(target, **fields)
        drafter.save_pretrained(tmp_path / name)
        loaded = load_drafter(tmp_path / name, dtype=torch.bfloat16)
        assert type(loaded) is type(drafter) and loaded.dtype == torch.bfloat16
        assert loaded.state_dict().keys() == drafter.state_dict().keys()
    for read in (DSparkDrafter.from_pretrained, DSparkConfig.from_pretrained):
        with pytest.raises(ValueError, match="load it with hf_dspark.AutoregressiveDrafter"):
            read(tmp_path / "autoregressive")


def test_dtype_device_map_attention_and_config_fields_are_honoured(tmp_path):
    _, folder = write(tmp_path, "Model-Optimizer")
    loaded = DSparkDrafter.from_pretrained(
        folder, dtype="bfloat16", device_map="cpu", attn_implementation="eager", draft_top_k=5
    )
    assert loaded.dtype == torch.bfloat16 and loaded.device.type == "cpu"
    assert loaded.config._attn_implementation == "eager" and loaded.config.draft_top_k == 5
    assert loaded.name_or_path == str(folder) and not loaded.training


def test_a_variant_is_refused_rather_than_passed_over(tmp_path):
    _, folder = write(tmp_path, "DFlash")
    with pytest.raises(ValueError, match="variant='fp16'"):
        DSparkDrafter.from_pretrained(folder, variant="fp16")


def test_a_dflash_folder_without_layer_ids_taps_what_its_own_code_would():
    assert default_layer_ids(36, 5) == [1, 9, 17, 25, 33]
    assert default_layer_ids(40, 5) == [1, 10, 19, 28, 37]
    assert default_layer_ids(28, 1) == [14]


def test_a_loaded_foreign_drafter_saves_as_a_native_one(tmp_path):
    model, folder = write(tmp_path, "SpecForge, old prefix")
    DSparkDrafter.from_pretrained(folder).save_pretrained(tmp_path / "native")
    assert json.loads((tmp_path / "native" / "config.json").read_text())["model_type"] == "dspark"
    assert torch.equal(block(DSparkDrafter.from_pretrained(tmp_path / "native")), block(model))


@pytest.mark.parametrize("name", ["Model-Optimizer", "speculators", "SpecForge", "DeepSpec"])
def test_a_calibration_is_kept_in_a_folder_of_any_layout(tmp_path, name):
    _, folder = write(tmp_path, name)
    drafter = DSparkDrafter.from_pretrained(folder)
    drafter.config.confidence_temperatures = {"greedy": [1.0, 2.0, 3.0, 4.0]}
    save_calibration(drafter, folder)
    again = DSparkDrafter.from_pretrained(folder)
    assert again.config.confidence_temperatures == drafter.config.confidence_temperatures


def test_a_hub_id_is_read_from_the_cache_by_revision_and_subfolder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    commit = "0123456789abcdef0123456789abcdef01234567"
    models = {}
    for place, name in (("", "speculators"), ("draft", "Model-Optimizer")):
        models[place], folder = write(tmp_path / place, name)
        snapshot = tmp_path / "hub" / "models--org--drafter" / "snapshots" / commit / place
        shutil.copytree(folder, snapshot, dirs_exist_ok=True)
    references = tmp_path / "hub" / "models--org--drafter" / "refs"
    references.mkdir()
    (references / "main").write_text(commit)
    for where in ({}, {"revision": commit}, {"revision": "main", "subfolder": "draft"}):
        loaded = DSparkDrafter.from_pretrained("org/drafter", cache_dir=tmp_path / "hub", **where)
        assert torch.equal(block(loaded), block(models[where.get("subfolder", "")]))
        assert loaded.name_or_path == "org/drafter"
    with pytest.raises(OSError):
        DSparkDrafter.from_pretrained("org/drafter", cache_dir=tmp_path / "hub", revision="elsewhere")


def test_weights_that_are_not_safetensors_are_refused(tmp_path):
    _, folder = write(tmp_path, "DFlash")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        DSparkDrafter.from_pretrained(folder)
