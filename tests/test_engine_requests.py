"""What an engine takes and what it refuses, saying what to do instead."""

import copy
import threading

import pytest
import torch
from transformers import BatchEncoding, DynamicCache, GenerationConfig

from hf_dspark import ConfidenceThreshold, DSparkEngine, FixedLength
from tests.drafters import tiny_drafter
from tests.engines import plain, prompts
from tests.tiny import PAD_ID, tiny_target
from tests.tokens import TEXT, byte_tokenizer

IDS = torch.tensor([5, 6, 7])


@pytest.fixture
def serving():
    target = tiny_target("llama")
    return DSparkEngine(target, tiny_drafter(target), scheduler=FixedLength())


REFUSED = {
    "beams": ({"num_beams": 2}, "not by beam search; call model.generate"),
    "several sequences": ({"num_return_sequences": 3, "do_sample": True}, "submit it as many times"),
    "dictionary": ({"return_dict_in_generate": True, "output_scores": True}, "request.rounds"),
    "an assistant": ({"assistant_model": tiny_target("llama")}, "drafter of its own"),
    "prompt lookup": ({"prompt_lookup_num_tokens": 3}, "not by assisted generation"),
    "a loop": ({"custom_generate": print}, "the engine is the decoding loop"),
    "embeddings": ({"inputs_embeds": torch.zeros(1, 3, 32)}, "takes ids"),
    "a cache": ({"cache": DynamicCache()}, "a cache of its own"),
    "a kind of cache": ({"cache_implementation": "static"}, "slabs of its own"),
    "no cache": ({"use_cache": False}, "leave use_cache at True"),
    "many devices": ({"synced_gpus": True}, "number of forwards"),
    "guidance": ({"guidance_scale": 1.5}, "tokens that may be rejected"),
    "stop strings alone": ({"stop_strings": ["a"]}, "tokenizer"),
    "what generate refuses": ({"temperature": -1.0, "do_sample": True}, "temperature"),
    "an unknown argument": ({"temprature": 1.0}, "temprature"),
    "other inputs": ({"token_type_ids": torch.zeros(1, 3, dtype=torch.long)}, "token_type_ids"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_served_is_refused_at_once(serving, options, message):
    with pytest.raises(ValueError, match=message):
        serving.submit(IDS, **{"max_new_tokens": 4} | options)
    assert serving.num_waiting == 0 and serving.step() is False
    assert serving.submit(IDS, max_new_tokens=4).id == 0, "a refused request takes no number and no place"


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (torch.zeros(2, 3, dtype=torch.long), ValueError, "submit each row of a batch by itself"),
        (torch.zeros(0, dtype=torch.long), ValueError, "empty"),
        (torch.tensor([3, 64]), ValueError, "within 0..63"),
        (torch.tensor([-1]), ValueError, "within 0..63"),
        (torch.zeros(3), TypeError, "must be integers"),
        ({"attention_mask": torch.ones(1, 3)}, ValueError, "must have `input_ids`"),
        ({"input_ids": IDS, "attention_mask": torch.zeros(1, 3)}, ValueError, "zero everywhere.*bos token"),
        (
            {"input_ids": IDS, "attention_mask": torch.ones(1, 4)},
            ValueError,
            r"form of input_ids, \[1, 3\], got \[1, 4\]",
        ),
    ],
    ids=["batch", "empty", "too large", "negative", "floats", "mapping", "nothing left", "another form"],
)
def test_prompts_that_are_none_are_refused(serving, ids, error, message):
    with pytest.raises(error, match=message):
        serving.submit(ids, max_new_tokens=4)


def test_arguments_of_the_wrong_type_are_refused(serving):
    with pytest.raises(TypeError, match="generator"):
        serving.submit(IDS, generator=3, do_sample=True)
    with pytest.raises(TypeError, match="on_round"):
        serving.submit(IDS, on_round=3)


@pytest.mark.parametrize("form", [IDS, IDS[None], IDS.tolist(), IDS.to(torch.int32), {"input_ids": IDS[None]}])
def test_a_prompt_may_come_in_several_forms(serving, form):
    (result,) = serving.generate_batch([form], do_sample=False, max_new_tokens=6)
    assert torch.equal(result, plain(serving.target, IDS, max_new_tokens=6))


@pytest.mark.parametrize(
    "mask", [[0, 0, 1, 1, 1], [[0, 0, 1, 1, 1]], torch.tensor([0, 0, 1, 1, 1]), torch.tensor([[0, 0, 1, 1, 1]])]
)
def test_a_mask_may_come_in_several_forms_and_counts_in_each(serving, mask):
    padded = [PAD_ID, PAD_ID, *IDS.tolist()]
    expected = plain(serving.target, IDS, max_new_tokens=6)
    options = {"do_sample": False, "max_new_tokens": 6}
    for ids in (padded, torch.tensor(padded)):
        (result,) = serving.generate_batch([BatchEncoding({"input_ids": ids, "attention_mask": mask})], **options)
        request = serving.submit(ids, attention_mask=mask, **options)
        serving.run()
        assert torch.equal(result, request.result()) and torch.equal(result[:, 2:], expected)


def test_what_a_tokenizer_returns_is_a_prompt(serving):
    encoded = byte_tokenizer()(TEXT[:6])
    assert isinstance(encoded["input_ids"], list) and isinstance(encoded["attention_mask"], list)
    encoded.pop("token_type_ids", None)
    request = serving.submit(encoded, do_sample=False, max_new_tokens=6)
    serving.run()
    expected = plain(serving.target, torch.tensor(encoded["input_ids"]), max_new_tokens=6)
    assert torch.equal(request.result(), expected)


def test_a_mapping_is_no_list_of_prompts(serving):
    with pytest.raises(TypeError, match=r"a mapping with \['input_ids'\].*for a padded batch a mapping for each row"):
        serving.generate_batch({"input_ids": IDS[None]}, max_new_tokens=4)


def test_a_generation_config_counts_and_stays_as_it_is(serving):
    tokenizer = byte_tokenizer()
    config = GenerationConfig(max_new_tokens=9, do_sample=False, repetition_penalty=1.4, stop_strings=["é", "w"])
    before, own = copy.deepcopy(config.to_dict()), copy.deepcopy(serving.target.generation_config.to_dict())
    request = serving.submit(IDS, generation_config=config, tokenizer=tokenizer)
    serving.run()
    expected = serving.target.generate(IDS[None], generation_config=config, tokenizer=tokenizer)
    assert torch.equal(request.result(), expected)
    assert (config.to_dict(), serving.target.generation_config.to_dict()) == (before, own)


def test_stop_strings_of_the_models_own_config_count_where_there_is_a_tokenizer(serving, monkeypatch):
    tokenizer, new = byte_tokenizer(), plain(serving.target, IDS, max_new_tokens=12)[0, 3:].tolist()
    string = next(
        tokenizer.decode([n]) for n in new[3:] if 3 < n < len(tokenizer) and "�" not in tokenizer.decode([n])
    )
    monkeypatch.setattr(serving.target.generation_config, "stop_strings", [string])
    options = {"do_sample": False, "max_new_tokens": 12, "tokenizer": tokenizer}
    request = serving.submit(IDS, **options)
    serving.run()
    assert torch.equal(request.result(), serving.target.generate(IDS[None], **options))
    assert len(request.new_ids) < 12


def test_settings_are_prepared_at_submission_and_no_model_is_run(serving):
    def never(*args):
        raise AssertionError("a forward")

    handle = serving.target.register_forward_pre_hook(never)
    try:
        request = serving.submit(IDS, max_new_tokens=4)
    finally:
        handle.remove()
    assert request.state == "waiting" and request.prompt_ids == IDS.tolist() and not request.done


# ----------------------------------------------------------------------------------------------------- construction


@pytest.mark.parametrize("name", ["max_batch_size", "max_waiting", "prefill_chunk"])
def test_numbers_must_be_positive_integers(name):
    for value, error in ((0, ValueError), (-3, ValueError), (2.0, TypeError), (True, TypeError)):
        with pytest.raises(error, match=name):
            DSparkEngine(tiny_target("llama"), None, **{name: value})


@pytest.mark.parametrize(
    ("family", "reason"), [("bloom", "attention of `BloomForCausalLM`"), ("qwen3_5", "recurrent")]
)
def test_targets_that_cannot_be_packed_are_refused_at_construction(family, reason):
    with pytest.raises(ValueError, match=f"{reason}.*call model.generate"):
        DSparkEngine(tiny_target(family), None)


def test_what_does_not_fit_is_refused_at_construction():
    target = tiny_target("llama")
    with pytest.raises(ValueError, match="give a drafter"):
        DSparkEngine(target, None, scheduler=FixedLength())
    with pytest.raises(ValueError, match="hidden"):
        DSparkEngine(target, tiny_drafter(tiny_target("llama", hidden_size=16, num_attention_heads=2)))
    with pytest.raises(ValueError, match="confidence head"):
        DSparkEngine(target, tiny_drafter(target, enable_confidence_head=False), scheduler=ConfidenceThreshold(0.5))
    with pytest.raises(ValueError, match='"auto"'):
        DSparkEngine(target, tiny_drafter(target), scheduler="best")


def test_making_an_engine_copies_no_weight_and_starts_no_thread():
    target, before = tiny_target("llama"), threading.active_count()
    drafter = tiny_drafter(target)
    serving = DSparkEngine(target, drafter, scheduler=FixedLength(2))
    assert serving.target is target and serving.drafter.fc.weight is drafter.fc.weight
    assert drafter.options.scheduler is None, "options of the engine are a view's"
    assert threading.active_count() == before
    assert len(prompts()) > serving.max_batch_size
