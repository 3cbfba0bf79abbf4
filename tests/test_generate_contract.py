"""What people may do with `generate`, they may do with a drafter too."""

import asyncio
import copy
import importlib.util
import inspect
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import accelerate
import pytest
import torch
import transformers
from transformers import (
    AsyncTextIteratorStreamer,
    GenerationConfig,
    GenerationMixin,
    LlamaForCausalLM,
    TextIteratorStreamer,
    pipeline,
)
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

import hf_dspark
from hf_dspark import DSparkConfig, DSparkDrafter, DSparkGenerateOutput, FixedLength
from hf_dspark.target import TargetView, target_fingerprint
from tests.drafters import assert_drafted, generate, k_oracle, left_padded, oracle, tiny_drafter
from tests.tiny import PAD_ID, tiny_target
from tests.tokens import TEXT, byte_tokenizer, only

# ------------------------------------------------------------------------------------------------------ streamers


def writing_text(tokenizer, inputs, num_new_tokens=None):
    """Options that make the target write `TEXT`."""
    ids = tokenizer(TEXT)["input_ids"]
    return {
        "max_new_tokens": num_new_tokens or len(ids),
        "prefix_allowed_tokens_fn": only(ids, prompt_width=inputs["input_ids"].shape[1]),
        "do_sample": False,
    }


def in_thread(target, **kwargs):
    """Starts `generate` in a thread that swallows its error; the streamer has to tell it."""

    def run():
        try:
            target.generate(**kwargs)
        except Exception:
            pass

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def broken(row, ids):
    raise ArithmeticError("the constraint broke")


@pytest.mark.parametrize("right", [0, 1, 2, 3, 5])
def test_streamed_text_is_the_decoded_text_with_characters_split_over_tokens(right):
    target, inputs, tokenizer = tiny_target("llama"), left_padded([4]), byte_tokenizer()
    options, rounds = writing_text(tokenizer, inputs), []
    plain = target.generate(**inputs, **options)
    drafter = k_oracle(tiny_drafter(target), plain, right).with_options(on_round=rounds.append)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    thread = in_thread(target, **inputs, **options, assistant_model=drafter, streamer=streamer)
    pieces = list(streamer)
    thread.join()
    assert "".join(pieces) == TEXT
    assert "\ufffd" not in "".join(pieces)
    assert len([piece for piece in pieces if piece]) > 5
    assert_drafted(rounds)


class Tokens(BaseStreamer):
    """What was put, and whether it was ended."""

    def __init__(self):
        self.values, self.ended = [], False

    def put(self, value):
        self.values.append(value)

    def end(self):
        self.ended = True


@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_a_streamer_sees_the_prompt_and_then_each_rounds_tokens(family):
    target, inputs, streamer, rounds = tiny_target(family), left_padded([4]), Tokens(), []
    plain = generate(target, inputs, max_new_tokens=16).sequences
    drafter = k_oracle(tiny_drafter(target), plain, 2).with_options(on_round=rounds.append)
    options = {"max_new_tokens": 16, "return_dict_in_generate": False}
    output = generate(target, inputs, drafter, streamer=streamer, **options)
    prompt, first, *later = [value.flatten().tolist() for value in streamer.values]
    assert prompt == inputs["input_ids"][0].tolist()
    assert first == output[0, 4:5].tolist()
    assert later == [list(r.committed_ids) for r in rounds]
    assert streamer.ended
    assert_drafted(rounds)


FAILURES = {
    "in a processor": {"prefix_allowed_tokens_fn": broken},
    "in the arguments": {"use_cache": False},
    "before the decoding loop": {"assistant_model": "recurrent"},
    "in the callback": {"assistant_model": "callback"},
    "of the pair": {"assistant_model": "misfit"},
}


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES.keys())
def test_an_exception_of_the_generating_thread_reaches_the_reader_and_the_next_request_works(failure):
    target, inputs, tokenizer = tiny_target("llama"), left_padded([4]), byte_tokenizer()
    drafter = tiny_drafter(target)

    def fail(decoding_round):
        raise ArithmeticError("the callback broke")

    special = {
        "recurrent": (tiny_target("qwen3_5"), drafter),
        "callback": (target, drafter.with_options(on_round=fail)),
        "misfit": (target, tiny_drafter(tiny_target("gpt2"), hidden_size=64)),
    }
    failing, view = special.get(failure.get("assistant_model"), (target, drafter))
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    arguments = {"max_new_tokens": 12, "assistant_model": view, "streamer": streamer} | {
        name: value for name, value in failure.items() if name != "assistant_model"
    }
    thread = in_thread(failing, **inputs, **arguments)
    with pytest.raises(RuntimeError, match="generation failed while streaming: .+") as raised:
        list(streamer)
    assert raised.value.__cause__ is not None
    thread.join()

    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    options = writing_text(tokenizer, inputs)
    in_thread(target, **inputs, **options, assistant_model=drafter, streamer=streamer)
    assert "".join(streamer) == TEXT


def test_an_exception_reaches_the_reader_of_an_asynchronous_streamer():
    target, inputs, tokenizer = tiny_target("llama"), left_padded([4]), byte_tokenizer()

    async def read(**options):
        streamer = AsyncTextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
        in_thread(target, **inputs, **options, assistant_model=tiny_drafter(target), streamer=streamer)
        return "".join([piece async for piece in streamer])

    with pytest.raises(RuntimeError, match="generation failed while streaming: the constraint broke"):
        asyncio.run(read(prefix_allowed_tokens_fn=broken, max_new_tokens=4))
    assert asyncio.run(read(**writing_text(tokenizer, inputs))) == TEXT


def test_another_streamer_is_ended_when_generation_fails():
    target, streamer = tiny_target("llama"), Tokens()
    with pytest.raises(ArithmeticError):
        options = {"prefix_allowed_tokens_fn": broken, "max_new_tokens": 4}
        generate(target, left_padded([4]), tiny_drafter(target), streamer=streamer, **options)
    assert streamer.ended


def test_a_streamer_for_two_rows_is_an_error_that_points_to_the_callback():
    target, tokenizer = tiny_target("llama"), byte_tokenizer()
    for streamer in (Tokens(), TextIteratorStreamer(tokenizer, timeout=60)):
        with pytest.raises(ValueError, match="on_round"):
            generate(target, left_padded([4, 4]), tiny_drafter(target), streamer=streamer, max_new_tokens=4)
    with pytest.raises(ValueError, match="on_round"):
        target.generate(left_padded([4, 4])["input_ids"], assistant_model=tiny_drafter(target), streamer=Tokens())
    two_samples = {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 4}
    with pytest.raises(ValueError, match="on_round"):
        generate(target, left_padded([4]), tiny_drafter(target), streamer=Tokens(), **two_samples)


def test_the_callback_streams_a_batch_row_by_row():
    target, inputs, texts = tiny_target("llama"), left_padded([4, 2]), {0: [], 1: []}
    plain = generate(target, inputs, max_new_tokens=16).sequences
    drafter = k_oracle(tiny_drafter(target), plain, lambda row: row + 1)
    view = drafter.with_options(on_round=lambda r: texts[r.row].extend(r.committed_ids))
    output = generate(target, inputs, view, max_new_tokens=16)
    assert output.sequences[:, 5:].tolist() == [texts[0], texts[1]]
    assert_drafted(output.rounds)


# ----------------------------------------------------------------------------------------- the returned dictionary


@pytest.mark.parametrize("prompt_lengths", [[9], [3, 9]], ids=["one row", "two rows"])
def test_scores_logits_and_hidden_states_are_plain_generates_one_for_each_new_token(prompt_lengths):
    target, inputs = tiny_target("llama"), left_padded(prompt_lengths)
    wanted = {"output_scores": True, "output_logits": True, "output_hidden_states": True}
    options = {"max_new_tokens": 16, "repetition_penalty": 1.2} | wanted
    plain = generate(target, inputs, **options)
    view = k_oracle(tiny_drafter(target), plain.sequences, right=lambda row: row + 2)
    output = generate(target, inputs, view, **options)
    assert isinstance(output, DSparkGenerateOutput)
    assert torch.equal(output.sequences, plain.sequences)
    assert_drafted(output.rounds)
    for name in ("scores", "logits"):
        torch.testing.assert_close(getattr(output, name), getattr(plain, name), atol=1e-4, rtol=0)
    assert len(output.hidden_states) == len(plain.hidden_states) == 16
    for ours, stock in zip(output.hidden_states, plain.hidden_states, strict=True):
        assert len(ours) == len(stock) == target.config.num_hidden_layers + 1
        torch.testing.assert_close(ours, stock, atol=1e-4, rtol=0)


def test_a_processor_that_writes_into_its_scores_leaves_the_logits_alone():
    def forbid_first_half(ids, scores):
        scores[:, :32] = float("-inf")
        return scores

    target, inputs = tiny_target("llama"), left_padded([5])
    options = {"max_new_tokens": 8, "output_logits": True, "output_scores": True}
    output = generate(target, inputs, tiny_drafter(target), logits_processor=[forbid_first_half], **options)
    assert_drafted(output.rounds)
    for logits, scores in zip(output.logits, output.scores, strict=True):
        assert logits.isfinite().all()
        assert scores[:, :32].isneginf().all() and torch.equal(scores[:, 32:], logits[:, 32:])


def test_a_row_that_has_ended_has_zeros_for_scores():
    target, inputs = tiny_target("llama"), left_padded([3, 9])
    text = generate(target, inputs, max_new_tokens=12).sequences
    output = generate(
        target, inputs, tiny_drafter(target), max_new_tokens=12, output_scores=True, eos_token_id=int(text[0, 9 + 3])
    )
    assert len(output.scores) == 12
    assert output.scores[3][0].any() and not output.scores[4][0].any()
    assert output.scores[11][1].any()


def test_only_what_was_asked_for_is_returned():
    target = tiny_target("llama")
    output = generate(target, left_padded([5]), tiny_drafter(target), max_new_tokens=6)
    assert output.scores is output.logits is output.hidden_states is output.attentions is None
    tokens = generate(target, left_padded([5]), tiny_drafter(target), max_new_tokens=6, return_dict_in_generate=False)
    assert torch.equal(tokens, output.sequences)


def test_attentions_are_refused_with_the_way_out():
    target = tiny_target("llama")
    with pytest.raises(ValueError, match="without assistant_model"):
        generate(target, left_padded([5]), tiny_drafter(target), output_attentions=True, max_new_tokens=4)


def test_rounds_and_stats_add_up_to_the_text():
    target, inputs = tiny_target("llama"), left_padded([5, 3])
    plain = generate(target, inputs, max_new_tokens=16).sequences
    output = generate(target, inputs, k_oracle(tiny_drafter(target), plain, 2), max_new_tokens=16)
    for row, text in enumerate(output.sequences[:, 5:].tolist()):
        committed = [token for r in output.rounds if r.row == row for token in r.committed_ids]
        assert [text[0], *committed] == text
        anchors = [r.anchor_id for r in output.rounds if r.row == row]
        assert anchors == [text[0], *[r.committed_ids[-1] for r in output.rounds if r.row == row][:-1]]
    for r in output.rounds:
        assert r.committed_ids == (*r.draft_ids[: r.num_accepted], r.next_id)
        assert r.draft_seconds > 0 and r.verify_seconds > 0
    assert output.stats.rounds == output.rounds
    assert output.stats.accepted_length == 3.0


# ------------------------------------------------------------------------------------------- modes of generation


def test_three_return_sequences_are_sampled_side_by_side():
    target, inputs = tiny_target("llama"), left_padded([5, 2])
    torch.manual_seed(0)
    output = generate(
        target, inputs, tiny_drafter(target), do_sample=True, num_return_sequences=3, top_k=0, max_new_tokens=12
    )
    assert output.sequences.shape == (6, 5 + 12)
    assert torch.equal(output.sequences[:, :5], inputs["input_ids"].repeat_interleave(3, dim=0))
    assert len({tuple(row) for row in output.sequences.tolist()}) == 6
    assert {r.row for r in output.rounds} == set(range(6))
    assert_drafted(output.rounds)


@pytest.fixture
def warned_once(monkeypatch):
    """Messages of `warning` and `warning_once`, however often they were given before."""
    messages = []
    for name in ("warning", "warning_once"):
        monkeypatch.setattr(logging.logging.Logger, name, lambda self, message, *args: messages.append(message))
    return messages


def test_beams_give_plain_beam_search_and_one_warning(warned_once):
    target, inputs = tiny_target("llama"), left_padded([5])
    plain = generate(target, inputs, num_beams=2, max_new_tokens=12).sequences
    warned_once.clear()
    output = generate(target, inputs, tiny_drafter(target), num_beams=2, max_new_tokens=12)
    assert torch.equal(output.sequences, plain)
    assert len([message for message in warned_once if "assist" in message]) == 1


@pytest.mark.parametrize("length", [1, 2, 4, 5, 6])
def test_prompts_around_the_block_size_are_continued_exactly(length):
    target, inputs = tiny_target("llama"), left_padded([length])
    plain = generate(target, inputs, max_new_tokens=16).sequences
    for view in (tiny_drafter(target), oracle(tiny_drafter(target), plain)):
        output = generate(target, inputs, view, max_new_tokens=16)
        assert torch.equal(output.sequences, plain)
        assert_drafted(output.rounds)


def test_left_padding_changes_neither_tokens_nor_drafts():
    target, inputs = tiny_target("llama"), left_padded([6])
    padded = {name: torch.nn.functional.pad(value, (5, 0), value=PAD_ID) for name, value in inputs.items()}
    drafter = tiny_drafter(target)
    bare, behind = (generate(target, prompt, drafter, max_new_tokens=20) for prompt in (inputs, padded))
    assert torch.equal(bare.sequences, behind.sequences[:, 5:])
    assert [r.draft_ids for r in bare.rounds] == [r.draft_ids for r in behind.rounds]
    confidences = [torch.tensor([c for r in output.rounds for c in r.confidence]) for output in (bare, behind)]
    torch.testing.assert_close(*confidences, atol=1e-4, rtol=0)
    assert_drafted(bare.rounds)


MASKS = {"left": [0, 0, 1, 1, 1, 1], "right": [1, 1, 1, 1, 0, 0], "inside": [1, 1, 0, 0, 1, 1], "bool": [True] * 6}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_whatever_the_mask_hides_the_text_is_plain_generates(family, mask):
    target, inputs = tiny_target(family), left_padded([6, 6])
    inputs["attention_mask"] = torch.tensor([[True] * 6, mask]).to(bool if mask[0] is True else int)
    plain = generate(target, inputs, max_new_tokens=16, return_dict_in_generate=False)
    rounds = []
    view = tiny_drafter(target).with_options(on_round=rounds.append)
    output = generate(target, inputs, view, max_new_tokens=16, return_dict_in_generate=False)
    assert torch.equal(output, plain)
    assert_drafted(rounds)


def test_without_a_prompt_generation_starts_from_the_begin_token():
    target = tiny_target("llama")
    plain = generate(target, {}, max_new_tokens=16).sequences
    output = generate(target, {}, oracle(tiny_drafter(target), plain), max_new_tokens=16)
    assert torch.equal(output.sequences, plain)
    assert plain[0, 0] == target.config.bos_token_id
    assert_drafted(output.rounds)


@pytest.mark.parametrize("with_ids", [False, True])
def test_a_prompt_of_embeddings_is_continued(with_ids):
    target, inputs = tiny_target("llama"), left_padded([6, 3])
    prompt = {
        "inputs_embeds": target.get_input_embeddings()(inputs["input_ids"]).detach(),
        "attention_mask": inputs["attention_mask"],
    }
    if with_ids:
        prompt["input_ids"] = inputs["input_ids"]
    plain = generate(target, prompt, max_new_tokens=16).sequences
    output = generate(target, prompt, tiny_drafter(target), max_new_tokens=16)
    assert torch.equal(output.sequences, plain)
    assert_drafted(output.rounds)


def test_given_position_ids_are_kept():
    target, inputs = tiny_target("llama"), left_padded([6, 6])
    shifted = inputs | {"position_ids": torch.arange(40, 46)[None].expand(2, -1)}
    plain = generate(target, shifted, max_new_tokens=16).sequences
    output = generate(target, shifted, tiny_drafter(target), max_new_tokens=16)
    assert torch.equal(output.sequences, plain)
    assert_drafted(output.rounds)


def test_chunked_prefill_is_ignored_with_a_warning(warned_once):
    target, inputs = tiny_target("llama"), left_padded([9])
    plain = generate(target, inputs, max_new_tokens=8).sequences
    output = generate(target, inputs, tiny_drafter(target), max_new_tokens=8, prefill_chunk_size=4)
    assert torch.equal(output.sequences, plain)
    assert any("prefill_chunk_size" in message for message in warned_once)


def test_a_subclass_that_wraps_generate_is_served():
    class Wrapping(LlamaForCausalLM):
        def generate(self, *args, **kwargs):
            return super().generate(*args, **kwargs)

    stock = tiny_target("llama")
    target = Wrapping(stock.config).eval()
    target.load_state_dict(stock.state_dict())
    target.generation_config = stock.generation_config
    plain = generate(stock, left_padded([5]), max_new_tokens=16).sequences
    output = generate(target, left_padded([5]), oracle(tiny_drafter(target), plain), max_new_tokens=16)
    assert torch.equal(output.sequences, plain)
    assert_drafted(output.rounds)


def test_a_pipeline_serves_batches_of_three():
    target, tokenizer, rounds = tiny_target("llama"), byte_tokenizer(), []
    drafter = tiny_drafter(target).with_options(on_round=rounds.append)
    prompts = ["Hello", "wo", "and the rest", "new"]
    options = {"max_new_tokens": 12, "do_sample": False, "batch_size": 3}
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)(prompts, **options)
    ours = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=drafter)(prompts, **options)
    assert ours == plain
    assert {r.row for r in rounds} == {0, 1, 2}
    assert_drafted(rounds)


# ------------------------------------------------------------------------------------- nothing is left behind


def state_of(model):
    attention = model.config._attn_implementation
    return copy.deepcopy((model.config.to_dict(), model.generation_config.to_dict(), attention))


def test_configs_modules_and_keys_are_as_before_after_a_call():
    target, inputs = tiny_target("llama"), left_padded([5, 2])
    drafter = tiny_drafter(target)
    before = state_of(target), drafter.config.to_dict(), list(drafter.state_dict()), list(vars(target))
    drafter_attributes = list(vars(drafter))
    generation_config = GenerationConfig(max_new_tokens=8, do_sample=True, top_k=5)
    given = copy.deepcopy(generation_config.to_dict())
    rounds = []
    view = drafter.with_options(on_round=rounds.append)
    target.generate(**inputs, assistant_model=view, generation_config=generation_config)
    assert_drafted(rounds)
    assert before == (state_of(target), drafter.config.to_dict(), list(drafter.state_dict()), list(vars(target)))
    assert list(vars(drafter)) == drafter_attributes
    assert generation_config.to_dict() == given


def test_the_targets_weights_are_borrowed_not_copied():
    target = tiny_target("llama")
    view = TargetView(target, tiny_drafter(target))
    assert view.embed_tokens is target.get_input_embeddings()
    assert view.lm_head is target.get_output_embeddings()
    own = {parameter.data_ptr() for parameter in view.drafter.parameters()}
    assert not own & {parameter.data_ptr() for parameter in target.parameters()}
    assert not any(name.startswith(("embed_tokens", "lm_head")) for name in view.drafter.state_dict())


def test_nothing_is_sized_from_a_million_positions():
    target = tiny_target("llama", max_position_embeddings=2**20)
    drafter = tiny_drafter(target, max_position_embeddings=2**20)
    output = generate(target, left_padded([5]), drafter, max_new_tokens=8)
    assert_drafted(output.rounds)
    for module in (target, drafter):
        assert max(tensor.numel() for tensor in [*module.parameters(), *module.buffers()]) < 2**16
    assert all(layer.keys.shape[2] == 12 for layer in output.cache.layers)


@pytest.mark.parametrize("head", [{}, {"draft_vocab_size": 20}], ids=["the target's head", "its own head"])
def test_an_offloaded_target_is_drafted_for(head):
    stock, inputs = tiny_target("llama"), left_padded([5, 2])
    target = accelerate.cpu_offload(copy.deepcopy(stock), execution_device=torch.device("cpu"))
    assert target.device.type == "meta"
    output = generate(target, inputs, tiny_drafter(stock, **head), max_new_tokens=12)
    assert torch.equal(output.sequences, generate(stock, inputs, max_new_tokens=12).sequences)
    assert_drafted(output.rounds)


# ------------------------------------------------------------------------------------------------------- threads


def test_four_threads_on_one_drafter_get_their_serial_results():
    target = tiny_target("llama")
    drafter = tiny_drafter(target)
    prompts = [left_padded([1 + seed % 9, 4][: 1 + seed % 2], seed=seed) for seed in range(20)]

    def run(start):
        results = []
        for call in range(20):
            output = generate(target, prompts[(start + call) % 20], drafter, max_new_tokens=6)
            assert_drafted(output.rounds)
            drafts = [(r.row, r.draft_ids, r.num_accepted) for r in output.rounds]
            results.append((output.sequences.tolist(), drafts))
        return results[-start:] + results[:-start]

    serial = run(0)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(run, (1, 6, 11, 16))) == [serial] * 4


def test_two_views_in_two_threads_never_meet():
    target = tiny_target("llama")
    drafter, inputs = tiny_drafter(target), left_padded([5])
    seen = {1: [], 3: []}
    views = {
        length: drafter.with_options(scheduler=FixedLength(length), on_round=seen[length].append) for length in seen
    }
    barrier = threading.Barrier(2)

    def run(length):
        barrier.wait()
        for _ in range(10):
            generate(target, inputs, views[length], max_new_tokens=10)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, seen))
    for length, rounds in seen.items():
        assert max(r.verify_length for r in rounds) == max(len(r.draft_ids) for r in rounds) == length
    assert drafter.options.scheduler is None and drafter.options.on_round is None


def test_plain_generate_in_another_thread_is_untouched():
    target, inputs = tiny_target("llama"), left_padded([5, 9])
    plain = generate(target, inputs, max_new_tokens=20).sequences
    stop = threading.Event()

    def speculate():
        while not stop.is_set():
            generate(target, inputs, tiny_drafter(target), max_new_tokens=20)

    thread = threading.Thread(target=speculate)
    thread.start()
    try:
        for _ in range(5):
            assert torch.equal(generate(target, inputs, max_new_tokens=20).sequences, plain)
    finally:
        stop.set()
        thread.join()


# -------------------------------------------------------------------------------------------------- options, views


def test_options_of_chained_views_add_up_and_the_last_one_counts():
    target = tiny_target("llama")
    drafter, callback = tiny_drafter(target), [].append
    view = drafter.with_options(max_draft_tokens=3, on_round=callback).with_options(scheduler=FixedLength(2))
    assert (view.options.max_draft_tokens, view.options.on_round) == (3, callback)
    assert view.options.scheduler == FixedLength(2)
    assert view.with_options(max_draft_tokens=None).options.max_draft_tokens is None
    assert drafter.options == type(drafter.options)()
    assert all(own is shared for own, shared in zip(view.parameters(), drafter.parameters(), strict=True))
    output = generate(target, left_padded([5]), view, max_new_tokens=12)
    assert max(r.verify_length for r in output.rounds) == 2


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"schedular": FixedLength(1)}, TypeError),
        ({"scheduler": 3}, TypeError),
        ({"max_draft_tokens": 0}, ValueError),
        ({"max_draft_tokens": 2.5}, TypeError),
        ({"on_round": []}, TypeError),
        ({"generator": 42}, TypeError),
    ],
)
def test_options_that_cannot_be_decoded_with_are_refused_at_once(options, error):
    with pytest.raises(error, match=next(iter(options))):
        tiny_drafter(tiny_target("llama")).with_options(**options)


# ------------------------------------------------------------------------------------------------- the hook


def functions_of(namespace):
    """The code behind methods, decorators taken off."""
    return [inspect.unwrap(value) for value in namespace.values() if inspect.isfunction(value)]


def test_the_hook_comes_and_goes_and_twice_is_once():
    target, inputs = tiny_target("llama"), left_padded([5])
    drafter = tiny_drafter(target)
    plain = generate(target, inputs, max_new_tokens=8).sequences
    wrapped = dict(vars(GenerationMixin))
    hf_dspark.install()
    assert dict(vars(GenerationMixin)) == wrapped
    try:
        hf_dspark.uninstall()
        stock = dict(vars(GenerationMixin))
        assert all(inspect.getmodule(function) is transformers.generation.utils for function in functions_of(stock))
        hf_dspark.uninstall()
        assert dict(vars(GenerationMixin)) == stock
        assert torch.equal(generate(target, inputs, max_new_tokens=8).sequences, plain)
    finally:
        hf_dspark.install()
    assert vars(GenerationMixin).keys() == stock.keys()
    output = generate(target, inputs, drafter, max_new_tokens=8)
    assert torch.equal(output.sequences, plain)
    assert_drafted(output.rounds)


def test_ordinary_assistants_pass_through():
    target, inputs = tiny_target("llama"), left_padded([5])
    plain = generate(target, inputs, max_new_tokens=12).sequences
    assistant = tiny_target("llama", num_hidden_layers=1)
    output = generate(target, inputs, assistant, max_new_tokens=12)
    assert torch.equal(output.sequences, plain)
    assert not hasattr(output, "rounds")
    with pytest.raises(ValueError, match="num_return_sequences"):
        generate(target, inputs, assistant, do_sample=True, num_return_sequences=2)
    lookup = target.generate(**inputs, prompt_lookup_num_tokens=3, max_new_tokens=12, do_sample=False)
    assert torch.equal(lookup, plain)


def test_a_remote_code_copy_of_the_class_is_served(tmp_path):
    """Code loaded with `trust_remote_code` makes classes that are not instances of ours."""
    source = importlib.util.find_spec("hf_dspark.modeling_dspark").origin
    text = open(source).read().replace("from .", "from hf_dspark.")
    path = tmp_path / "modeling_copy.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("modeling_copy", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["modeling_copy"] = module
    try:
        spec.loader.exec_module(module)
        target, inputs = tiny_target("llama"), left_padded([5, 2])
        ours = tiny_drafter(target)
        theirs = module.DSparkDrafter(ours.config).eval()
        theirs.load_state_dict(ours.state_dict())
        assert not isinstance(theirs, DSparkDrafter)
        expected, output = (generate(target, inputs, drafter, max_new_tokens=12) for drafter in (ours, theirs))
        assert torch.equal(output.sequences, expected.sequences)
        assert [r.draft_ids for r in output.rounds] == [r.draft_ids for r in expected.rounds]
        assert_drafted(output.rounds)
    finally:
        del sys.modules["modeling_copy"]


# ---------------------------------------------------------------------------------------- does the pair fit?


@pytest.mark.parametrize(("drafter_size", "target_size"), [(64, 72), (72, 64)])
@pytest.mark.parametrize("head", [{}, {"draft_top_k": 6}, {"draft_vocab_size": 20}])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampling"])
def test_a_padded_vocabulary_may_differ_between_drafter_and_target(drafter_size, target_size, head, do_sample):
    target, inputs = tiny_target("llama", vocab_size=target_size), left_padded([5, 2])
    drafter = tiny_drafter(target, vocab_size=drafter_size, **head)
    options = {"max_new_tokens": 16, "do_sample": do_sample, "repetition_penalty": 1.1}
    output = generate(target, inputs, drafter, **options)
    assert_drafted(output.rounds)
    assert max(token for r in output.rounds for token in r.draft_ids) < min(drafter_size, target_size)
    if not do_sample:
        assert torch.equal(output.sequences, generate(target, inputs, **options).sequences)


def test_a_drafter_of_another_width_is_refused_with_both_widths():
    target = tiny_target("llama")
    with pytest.raises(ValueError, match=r"width 64 .*hidden_size=32"):
        generate(target, left_padded([5]), tiny_drafter(target, hidden_size=64), max_new_tokens=4)
    with pytest.raises(ValueError, match="hidden_size=64 must equal the target's 32"):
        generate(
            target, left_padded([5]), tiny_drafter(target, hidden_size=64, target_hidden_size=32), max_new_tokens=4
        )


@pytest.mark.parametrize(("wrong", "message"), [(3, "several draft ids to one"), (64, "names token 64")])
def test_a_draft_vocabulary_that_no_target_token_stands_behind_is_refused(wrong, message):
    target = tiny_target("llama")
    drafter = tiny_drafter(target, draft_vocab_size=4)
    drafter.d2t.copy_(torch.tensor([0, 3, 7, wrong]) - torch.arange(4))
    with pytest.raises(ValueError, match=message):
        generate(target, left_padded([5]), drafter, max_new_tokens=4)


@pytest.mark.parametrize("layers", [[0, 3], [-2, 1], [0, 7]])
def test_tapped_layers_that_the_target_lacks_are_refused(layers):
    target = tiny_target("llama")
    with pytest.raises(ValueError, match="target_layer_ids"):
        generate(
            target,
            left_padded([5]),
            tiny_drafter(target, target_layer_ids=layers, num_target_layers=None),
            max_new_tokens=4,
        )


def test_the_last_layer_cannot_be_tapped():
    with pytest.raises(ValueError, match="taps the target's last layer 2"):
        tiny_drafter(tiny_target("llama"), target_layer_ids=[0, 2])
    with pytest.raises(ValueError, match="taps the target's last layer 2"):
        drafter = tiny_drafter(tiny_target("llama"), target_layer_ids=[0, 2], num_target_layers=None)
        generate(tiny_target("llama"), left_padded([5]), drafter, max_new_tokens=4)


def test_a_confidence_head_cannot_be_fed_a_markov_embedding_that_is_not_there():
    with pytest.raises(ValueError, match="confidence_head_with_markov"):
        tiny_drafter(tiny_target("llama"), markov_rank=0, confidence_head_with_markov=True)


def test_a_drafter_of_another_target_draws_a_warning():
    target = tiny_target("llama")
    with pytest.warns(UserWarning, match="trained for another target"):
        generate(target, left_padded([5]), tiny_drafter(target, target_fingerprint="0" * 16), max_new_tokens=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own = tiny_drafter(target, target_fingerprint=target_fingerprint(target))
        generate(target, left_padded([5]), own, max_new_tokens=4)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_neox", "gpt2", "deepseek_v3"])
def test_the_feature_of_a_layer_is_what_a_forward_hook_on_that_layer_sees(family):
    target, inputs = tiny_target(family), left_padded([5])
    stack = getattr(target.base_model, "layers", None) or target.base_model.h
    seen = {}

    def keep(index):
        def hook(module, args, output):
            seen[index] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [layer.register_forward_hook(keep(index)) for index, layer in enumerate(stack)]
    try:
        view = TargetView(target, tiny_drafter(target, target_layer_ids=[1, 0]))
        hidden_states = target(**inputs, output_hidden_states=view.hidden_state_indices).hidden_states
    finally:
        for handle in handles:
            handle.remove()
    assert torch.equal(view.context_features(hidden_states), torch.cat([seen[1], seen[0]], dim=-1))


def test_old_and_new_rope_settings_give_the_same_frequencies():
    shared = {"hidden_size": 32, "head_dim": 8, "target_layer_ids": [0], "mask_token_id": 2, "vocab_size": 64}
    shared |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    old = DSparkDrafter(DSparkConfig(**shared, rope_theta=12345.0))
    new = DSparkDrafter(DSparkConfig(**shared, rope_parameters={"rope_type": "default", "rope_theta": 12345.0}))
    other = DSparkDrafter(DSparkConfig(**shared, rope_theta=10000.0))
    assert torch.equal(old.rotary_emb.inv_freq, new.rotary_emb.inv_freq)
    assert not torch.equal(old.rotary_emb.inv_freq, other.rotary_emb.inv_freq)


@pytest.mark.parametrize("target_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("drafter_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_drafter_and_target_may_differ_in_dtype(target_dtype, drafter_dtype):
    stock = tiny_target("llama")
    target = LlamaForCausalLM.from_pretrained(
        None, config=copy.deepcopy(stock.config), state_dict=stock.state_dict(), dtype=target_dtype
    )
    drafter = tiny_drafter(target, markov_head_type="rnn").to(drafter_dtype)
    for do_sample in (False, True):
        output = generate(target, left_padded([5, 2]), drafter, max_new_tokens=12, do_sample=do_sample)
        assert output.sequences.shape == (2, 17)
        assert_drafted(output.rounds)
    assert (target.dtype, drafter.dtype) == (target_dtype, drafter_dtype)
