"""The teacher: every family, packed or not, in every dtype and quantised, says what its own forward says."""

import importlib.util

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen3Config, Qwen3ForCausalLM

from hf_dspark.target import TargetView
from hf_dspark.training import TrainingExample
from hf_dspark.training.collation import pack_row
from hf_dspark.training.teacher import Teacher, frozen, teacher_features
from tests.drafters import tiny_drafter
from tests.tiny import FAMILIES, tiny_target

DOCUMENTS = [tuple(range(3, 17)), tuple(range(40, 60))]


def packed_row():
    return pack_row([(i, TrainingExample(ids, (1,) * len(ids))) for i, ids in enumerate(DOCUMENTS)])


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_features_and_distributions_are_those_of_each_document_alone(family):
    target = tiny_target(family)
    view = TargetView(target, tiny_drafter(target))
    features = Teacher(view).features(packed_row())
    start = 0
    for ids in DOCUMENTS:
        end = start + len(ids)
        with torch.no_grad():
            expected = target(torch.tensor([ids]), output_hidden_states=True)
        context = torch.cat([expected.hidden_states[i] for i in view.hidden_state_indices], dim=-1)[0]
        assert torch.allclose(features.context[start:end], context, atol=1e-3)
        positions = torch.arange(start, end)
        assert torch.allclose(features.log_probs_at(positions), expected.logits[0].log_softmax(-1), atol=1e-3)
        start = end


def test_a_target_that_mixes_packed_documents_is_found_out():
    assert Teacher(view_of("qwen3")).packs()
    assert not Teacher(view_of("gpt_oss")).packs()


def view_of(family, **overrides):
    target = tiny_target(family)
    return TargetView(target, tiny_drafter(target, **overrides))


def test_with_a_reduced_vocabulary_probabilities_are_of_the_full_one():
    view = view_of("gemma2", draft_vocab_size=20)
    features = teacher_features(view, DOCUMENTS[0])
    with torch.no_grad():
        logits = view.target(torch.tensor([DOCUMENTS[0]])).logits[0]
    kept = view.drafter.draft_token_ids()
    assert torch.allclose(features.log_probs, logits.log_softmax(-1)[:, kept], atol=1e-5)
    assert torch.equal(features.top_ids, logits.argmax(-1))
    draftable = features.draftable(torch.arange(len(logits)))
    assert draftable.tolist() == [int(top) in kept.tolist() for top in logits.argmax(-1)]


def test_a_target_whose_logits_come_about_in_another_way_is_refused():
    target = tiny_target("gemma2")
    view = TargetView(target, tiny_drafter(target))
    teacher = Teacher(view)
    teacher.head.softcap = None
    with pytest.raises(NotImplementedError, match="soft-capped and scaled"):
        teacher.features(packed_row())


@pytest.mark.parametrize("quantised", [{"load_in_4bit": True}, {"load_in_8bit": True}, {}], ids=str)
def test_a_target_in_half_precision_or_quantised_teaches_a_float32_drafter(tmp_path, quantised):
    if quantised and importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("needs bitsandbytes: pip install 'hf-dspark[quant]'")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, initializer_range=0.2,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    options = {"quantization_config": BitsAndBytesConfig(**quantised)} if quantised else {}
    target = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, **options).eval()
    drafter = tiny_drafter(target).float()
    features = Teacher(TargetView(target, drafter)).features(packed_row())
    assert features.context.dtype == torch.float32
    with torch.no_grad():
        expected = target(torch.tensor([DOCUMENTS[1]])).logits[0].float().softmax(-1)
    ours = features.log_probs_at(torch.arange(len(DOCUMENTS[0]), 34)).exp()
    assert (ours - expected).abs().sum(-1).mean() < 0.15


def test_frozen_targets_get_their_flags_back():
    target = tiny_target("llama")
    target.train()
    with frozen(target):
        assert not target.training and not any(p.requires_grad for p in target.parameters())
    assert target.training and all(p.requires_grad for p in target.parameters())
    target.eval()
