"""Configs that exist can be built; those that contradict themselves say why."""

import json

import pytest

from hf_dspark import DSparkConfig, DSparkDrafter

CALIBRATION = {
    "dataset": "made up", "num_rounds": 400, "temperature": 0.0, "conditional_acceptance": [0.5, 0.6, 0.0, 1.0],
    "ece_before": [0.05, 0.04, 0.03, 0.02], "ece_after": [0.01] * 4,
}  # fmt: skip


def config(**fields):
    base = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "mask_token_id": 63, "target_layer_ids": [0, 1],
        "num_target_layers": 4, "markov_rank": 4, "block_size": 4,
    }  # fmt: skip
    return DSparkConfig(**(base | fields))


def test_layout_a_drafts_the_whole_block_and_layout_b_one_less():
    assert config().num_drafts == 4
    assert config(sample_from_anchor=False).num_drafts == 3


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"target_layer_ids": [0, 3]}, "last layer"),
        ({"target_layer_ids": [0, 7]}, "4 layers"),
        ({"target_layer_ids": [-2]}, "at least -1"),
        ({"markov_rank": 0, "confidence_head_with_markov": True}, "markov_rank=0"),
        ({"markov_head_type": "lstm"}, "vanilla"),
        ({"markov_head_type": "rnn", "sample_from_anchor": False}, "layout B"),
        ({"block_size": 1, "sample_from_anchor": False}, "block_size"),
        ({"mask_token_id": 64}, "mask_token_id=64"),
        ({"draft_vocab_size": 65}, "draft_vocab_size=65"),
        ({"draft_top_k": 0}, "draft_top_k=0"),
        ({"layer_types": ["sliding_attention"]}, "sliding_window"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 0}, "at least 1 token"),
        ({"layer_types": ["linear_attention"]}, "full_attention"),
        ({"layer_types": ["full_attention"] * 2}, "1 draft layers"),
        ({"sliding_window_origin": "block"}, "anchor"),
        ({"backbone": "llama"}, "gemma4"),
        ({"attention_k_eq_v": True}, "gemma4"),
        ({"final_logit_softcapping": 0.0}, "final_logit_softcapping"),
        ({"confidence_temperatures": {"greedy": [1.0]}}, "4 positive numbers"),
        ({"confidence_temperatures": {"warm": [1.0] * 4}}, "'greedy' and 'sampling'"),
        ({"confidence_temperatures": {"greedy": [1.0, 1.0, 0.0, 1.0]}}, "4 positive numbers"),
        ({"confidence_temperatures": {"greedy": [1.0, 1.0, float("nan"), 1.0]}}, "4 positive numbers"),
        ({"confidence_offsets": {"greedy": [0.0]}}, "4 finite numbers"),
        ({"confidence_offsets": {"greedy": [0.0, 0.0, float("inf"), 0.0]}}, "4 finite numbers"),
        ({"confidence_offsets": {"warm": [0.0] * 4}}, "'greedy' and 'sampling'"),
        ({"confidence_calibration": {"warm": CALIBRATION}}, "'greedy' and 'sampling'"),
        ({"confidence_calibration": {"greedy": {"dataset": "made up"}}}, "lacks .*'num_rounds'"),
        ({"confidence_calibration": {"greedy": CALIBRATION | {"ece_after": [0.01]}}}, "4 numbers from 0 to"),
        ({"confidence_calibration": {"greedy": CALIBRATION | {"ece_before": [2.0] * 4}}}, "4 numbers from 0 to"),
    ],
)
def test_a_contradiction_is_refused_with_its_reason(fields, said):
    with pytest.raises(ValueError, match=said):
        config(**fields)


def test_rank_zero_switches_the_markov_head_and_its_share_of_the_confidence_head_off():
    drafter = DSparkDrafter(config(markov_rank=0))
    assert drafter.markov_head is None
    assert drafter.confidence_head.proj.in_features == 32


def test_the_full_vocabulary_written_as_draft_vocabulary_is_no_reduction():
    assert config(draft_vocab_size=64).draft_vocab_size is None


def test_a_config_survives_saving_and_loading(tmp_path):
    temperatures = {"greedy": [1.0, 1.5, 2.0, 0.5]}
    saved = config(
        markov_head_type="gated",
        confidence_temperatures=temperatures,
        confidence_offsets={"greedy": [0.0, -0.5, 0.0, 0.0]},
        confidence_calibration={"greedy": CALIBRATION},
        draft_top_k=8,
    )
    saved.save_pretrained(tmp_path)
    loaded = DSparkConfig.from_pretrained(tmp_path)
    assert loaded.to_dict() == saved.to_dict()


@pytest.mark.parametrize(
    "published",
    [
        {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
        {"model_type": "llama", "architectures": ["SomethingElse"]},
    ],
)
def test_a_layout_that_is_not_read_is_refused_and_named(tmp_path, published):
    (tmp_path / "config.json").write_text(json.dumps(published))
    with pytest.raises(ValueError, match="not a drafter layout") as error:
        DSparkConfig.from_pretrained(tmp_path)
    assert published["architectures"][0] in str(error.value)


@pytest.mark.parametrize(
    "rope", [{"rope_theta": 5000.0}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}]
)
def test_old_flat_and_new_nested_rope_give_the_same_frequencies(tmp_path, rope):
    fields = config().to_dict()
    fields.pop("rope_parameters")
    fields |= rope | {"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    loaded = DSparkDrafter(DSparkConfig.from_pretrained(tmp_path))
    expected = [5000.0 ** (-2 * i / 8) for i in range(4)]
    assert loaded.rotary_emb.inv_freq.tolist() == pytest.approx(expected)
