"""Conversions copy tensors bit by bit, mean the same drafter, leave whole folders, and take little memory."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from hf_dspark import DSparkConfig, DSparkDrafter
from hf_dspark.formats.convert import convert
from hf_dspark.sps_profile import SPSProfile

from . import foreign
from .test_configuration_dspark import CALIBRATION
from .test_formats_loading import DFLASH, FROM_SLOT, GEMMA, SLIDING, block

DATA = Path(__file__).with_name("data")
GOLDEN = [path.parent.name for path in DATA.glob("*/config.json") if not path.parent.name.startswith("target")]
NATIVE = {
    "vanilla": {},
    "gated, reduced": {"markov_head_type": "gated", "draft_vocab_size": 16},
    "rnn": {"markov_head_type": "rnn"},
    "no heads, layout B": DFLASH,
    "no Markov head": {"markov_rank": 0},
    "sliding from the anchor": SLIDING | {"sliding_block_causal": False},
    "sliding with the slot": SLIDING | FROM_SLOT,
    "gemma4": GEMMA | {"attention_k_eq_v": True},
    "calibrated": {
        "confidence_temperatures": {"greedy": [1.0, 1.5, 2.0, 0.5]},
        "confidence_calibration": {"greedy": CALIBRATION},
        "draft_top_k": 8,
        "target_fingerprint": "0123456789abcdef",
        "embedding_scale": 2.0,
    },
    "YaRN": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0}},
}
NO_WORD = {("sliding with the slot", "speculators"), ("gemma4", "speculators")}


def meaning(folder):
    """A folder's config in our terms, without names and versions."""
    fields = DSparkConfig.from_pretrained(folder).to_dict()
    return {key: value for key, value in fields.items() if key not in ("transformers_version", "_name_or_path")}


@pytest.mark.parametrize("to", ["deepspec", "speculators"])
@pytest.mark.parametrize("name", NATIVE)
def test_there_and_back_again_is_bit_exact_and_means_the_same(tmp_path, name, to):
    model = foreign.drafter(**NATIVE[name])
    model.save_pretrained(tmp_path / "native")
    if (name, to) in NO_WORD:
        with pytest.raises(ValueError, match="has no word for"):
            convert(tmp_path / "native", tmp_path / "there", to=to)
        assert not (tmp_path / "there").exists()
        return
    convert(tmp_path / "native", tmp_path / "there", to=to)
    assert torch.equal(block(DSparkDrafter.from_pretrained(tmp_path / "there")), block(model))
    convert(tmp_path / "there", tmp_path / "back", to="native")
    assert meaning(tmp_path / "back") == meaning(tmp_path / "native")
    there, back = (load_file(tmp_path / folder / "model.safetensors") for folder in ("native", "back"))
    assert there.keys() == back.keys() and all(torch.equal(there[key], back[key]) for key in there)


@pytest.mark.parametrize("name", GOLDEN)
def test_every_golden_folder_becomes_native_and_keeps_its_bits(tmp_path, name):
    convert(DATA / name, tmp_path / "native", to="native")
    assert json.loads((tmp_path / "native" / "config.json").read_text())["model_type"] == "dspark"
    assert meaning(tmp_path / "native") == meaning(DATA / name)
    before, after = load_file(DATA / name / "model.safetensors"), load_file(tmp_path / "native" / "model.safetensors")
    assert before.keys() - after.keys() <= {"embed_tokens.weight", "lm_head.weight"}
    assert all(torch.equal(before[key], after[key]) for key in after)


def test_a_deepspec_folder_is_made_whole_again_with_its_target(tmp_path):
    source = DATA / "deepspec_qwen3_gated"
    convert(source, tmp_path / "native", to="native")
    done = convert(tmp_path / "native", tmp_path / "flat", to="deepspec", target=DATA / "target_qwen3")
    assert set(done.copies) == {"embed_tokens.weight", "lm_head.weight"}
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "flat" / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    fields = json.loads((tmp_path / "flat" / "config.json").read_text())
    published = json.loads((source / "config.json").read_text())
    read_by_servers = (
        "architectures block_size mask_token_id target_layer_ids markov_rank markov_head_type enable_confidence_head "
        "confidence_head_with_markov rope_parameters hidden_size layer_types num_hidden_layers vocab_size model_type "
        "head_dim"
    ).split()
    assert {key: fields[key] for key in read_by_servers} == {key: published[key] for key in read_by_servers}


def test_of_a_sharded_target_only_the_files_with_its_embeddings_and_head_are_opened(tmp_path):
    target = AutoModelForCausalLM.from_pretrained(DATA / "target_qwen3")
    target.save_pretrained(tmp_path / "target", max_shard_size="60KB")
    index = json.loads((tmp_path / "target" / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {index[name] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    others = set(index.values()) - needed
    assert others
    for name in others:
        (tmp_path / "target" / name).unlink()
    convert(DATA / "zlab_dflash_qwen3", tmp_path / "flat", to="deepspec", target=tmp_path / "target")
    written = load_file(tmp_path / "flat" / "model.safetensors")
    assert torch.equal(written["embed_tokens.weight"], target.get_input_embeddings().weight)
    assert torch.equal(written["lm_head.weight"], target.get_output_embeddings().weight)


def test_a_target_of_another_size_is_refused(tmp_path):
    foreign.drafter().save_pretrained(tmp_path / "native")
    with pytest.raises(ValueError, match=r"shape \[64, 32\].*\[64, 48\]"):
        convert(tmp_path / "native", tmp_path / "flat", to="deepspec", target=DATA / "target_qwen3")
    assert not (tmp_path / "flat").exists() and not list(tmp_path.glob(".flat*"))


def test_the_source_keeps_its_copies_only_where_the_layout_has_them(tmp_path):
    source = DATA / "deepspec_qwen3_vanilla"
    assert len(convert(source, tmp_path / "flat", to="deepspec").copies) == 2
    assert convert(source, tmp_path / "speculators", to="speculators").copies == ()


def test_shards_are_written_with_an_index_and_read_back(tmp_path):
    convert(DATA / "zlab_dflash_qwen3", tmp_path / "sharded", to="native", shard_bytes=50_000)
    assert len(list((tmp_path / "sharded").glob("model-*.safetensors"))) > 2
    loaded = DSparkDrafter.from_pretrained(tmp_path / "sharded").state_dict()
    whole = load_file(DATA / "zlab_dflash_qwen3" / "model.safetensors")
    assert all(torch.equal(loaded[key], whole[key]) for key in whole)
    convert(tmp_path / "sharded", tmp_path / "one", to="deepspec")
    assert (tmp_path / "one" / "model.safetensors").is_file()


def test_a_folder_that_is_there_stays_unless_forced(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="force"):
        convert(DATA / "zlab_dflash_qwen3", out, to="native")
    assert (out / "mine.txt").read_text() == "mine"
    with pytest.raises(ValueError, match="must be one of"):
        convert(DATA / "zlab_dflash_qwen3", out, to="gguf", force=True)
    convert(DATA / "zlab_dflash_qwen3", out, to="native", force=True)
    assert not (out / "mine.txt").exists() and not list(tmp_path.glob(".out*"))


def test_a_damaged_source_leaves_nothing_behind(tmp_path):
    folder = foreign.specforge(tmp_path / "source", foreign.drafter())
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(ValueError, match="cut off"):
        convert(folder, tmp_path / "out", to="native")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_tables_for_sglang_lie_beside_a_calibrated_drafter(tmp_path):
    foreign.drafter(**NATIVE["calibrated"]).save_pretrained(tmp_path / "native")
    profile = {"sample_batch_tokens": [1, 8], "sample_steps_per_sec": [20.0, 10.0], "max_batch_tokens": 8}
    SPSProfile.from_sglang(profile, block_size=4).save(tmp_path / "profile.json")
    (tmp_path / "theirs.json").write_text(json.dumps(profile))
    for sps in ("profile.json", "theirs.json"):
        convert(tmp_path / "native", tmp_path / "flat", to="deepspec", sps=tmp_path / sps, force=True)
        assert json.loads((tmp_path / "flat" / "dspark_sps.json").read_text()) == profile
    table = json.loads((tmp_path / "flat" / "dspark_sts_greedy.json").read_text())
    assert table["temperatures"] == [1.0, 1.5, 2.0, 0.5]
    assert (table["dataset"], table["num_samples"]) == ("made up", 400)
    assert table["ece_before"] == pytest.approx(0.035)
    readme = (tmp_path / "flat" / "README.md").read_text()
    assert "dspark_sps.json" in readme and "dspark_sts_greedy.json" in readme


SERVED = {  # layout -> (config of the drafter, layout, what its README has to say, what it must not)
    "DSpark, flat": (
        {"target_name_or_path": "org/target"},
        "deepspec",
        (
            "vllm serve org/target",
            '"method": "dspark"',
            '"num_speculative_tokens": 4',
            "--speculative-algorithm DSPARK",
            "--speculative-dspark-block-size 4",
            "convert_hf_to_gguf.py",
            "--spec-type draft-dspark --spec-draft-n-max 4",
        ),
        ("TARGET stands",),
    ),
    "gated, flat": (
        {"markov_head_type": "gated"},
        "deepspec",
        ("reads only vanilla", "TARGET stands"),
        ("vllm serve",),
    ),
    "DFlash, flat": (
        DFLASH,
        "deepspec",
        ('"method": "dflash"', "needs a Markov head", "one token off"),
        ("launch_server",),
    ),
    "native": ({}, "native", ("--to deepspec", "assistant_model=drafter"), ("vllm serve", "launch_server")),
    "speculators": ({}, "speculators", ("vllm serve", "--to deepspec"), ("launch_server",)),
}


@pytest.mark.parametrize("name", SERVED)
def test_the_readme_has_the_commands_that_serve_the_folder_and_no_others(tmp_path, name):
    fields, to, said, unsaid = SERVED[name]
    foreign.drafter(**fields).save_pretrained(tmp_path / "native")
    convert(tmp_path / "native", tmp_path / "out", to=to)
    readme = (tmp_path / "out" / "README.md").read_text()
    assert all(text in readme for text in said), readme
    assert not any(text in readme for text in unsaid), readme


def test_a_converted_drafter_drafts_what_the_original_does(tmp_path):
    target = AutoModelForCausalLM.from_pretrained(DATA / "target_qwen3").eval()
    source = DATA / "speculators_A_reduced_swa_gated"
    convert(source, tmp_path / "flat", to="deepspec")
    rounds = []
    for folder in (source, tmp_path / "flat"):
        drafter = DSparkDrafter.from_pretrained(folder).eval()
        output = target.generate(
            torch.tensor([[43, 34, 23]]),
            assistant_model=drafter,
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
        )
        rounds.append([r.draft_ids for r in output.rounds])
    assert rounds[0] == rounds[1] and any(len(ids) > 1 for ids in rounds[0])


@pytest.mark.parametrize(("name", "kind"), [("vanilla", "qwen3"), ("gemma4", "gemma4_text")])
def test_a_flat_config_is_one_that_transformers_reads(tmp_path, name, kind):
    foreign.drafter(**NATIVE[name]).save_pretrained(tmp_path / "native")
    convert(tmp_path / "native", tmp_path / "flat", to="deepspec")
    config = AutoConfig.from_pretrained(tmp_path / "flat")
    assert config.model_type == kind and config.num_hidden_layers == 2 and config.block_size == 4
    if kind == "gemma4_text":
        assert config.per_layer_config[0].head_dim == 8 and config.per_layer_config[0].num_key_value_heads == 2


def test_the_readme_says_whose_head_it_is_and_no_path_of_this_machine(tmp_path):
    source = DATA / "speculators_A_reduced_swa_gated"
    done = convert(source, tmp_path / "out", to="native", target=str(DATA / "target_qwen3"))
    readme = (done.folder / "README.md").read_text()
    assert "the LM head, over 36 of 64 tokens, is the drafter's own" in readme
    assert str(tmp_path) not in readme and str(DATA) not in readme
    assert "from `speculators_A_reduced_swa_gated`" in readme and "from_pretrained('out'" in readme


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"sample_batch_tokens": 3}'])
def test_a_file_that_holds_no_step_times_is_named(tmp_path, text):
    (tmp_path / "sps.json").write_text(text)
    with pytest.raises(ValueError, match=r"sps.json: neither a profile .* nor SGLang's table"):
        convert(DATA / "deepspec_qwen3_gated", tmp_path / "out", to="deepspec", sps=tmp_path / "sps.json")
    assert not (tmp_path / "out").exists()


def test_a_target_without_use_is_told(tmp_path):
    foreign.drafter(target_name_or_path="org/target").save_pretrained(tmp_path / "named")
    done = convert(tmp_path / "named", tmp_path / "out", to="native", target="org/target")
    assert any("the target given has no use" in note for note in done.notes)
