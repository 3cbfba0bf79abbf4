"""Each logits processor, alone, gives the text that plain `generate` gives with it."""

import json

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, SynthIDTextWatermarkingConfig, WatermarkingConfig
from transformers.utils import logging

from tests.drafters import assert_drafted, generate, k_oracle, left_padded, oracle, tiny_drafter
from tests.tiny import PAD_ID, VOCAB_SIZE, tiny_target

EOS_ID = 40


class PenalisesByRow(LogitsProcessor):
    """A user's own that is bound to the batch and looks at the ids."""

    def __call__(self, input_ids, scores):
        strength = torch.arange(1, len(input_ids) + 1)[:, None] * 0.3
        return scores.scatter_add(1, input_ids[:, -3:], -strength.expand(-1, input_ids[:, -3:].shape[1]))


def every_other_token(row, ids):
    """A constraint that depends on the row and on the newest token."""
    return list(range(3 + (int(ids[-1]) + row) % 2, VOCAB_SIZE, 2))


PROCESSORS = {
    "repetition penalty": {"repetition_penalty": 1.3},
    "no repeated bigram": {"no_repeat_ngram_size": 2},
    "min_new_tokens": {"min_new_tokens": 20, "eos_token_id": [40, 41, 42, 43, 44, 45]},
    "min_length": {"min_length": 25, "eos_token_id": [40, 41, 42, 43, 44, 45]},
    "bad words": {"bad_words_ids": [[5], [7, 9], [60, 63], [51, 55], [19]]},
    "suppressed tokens": {"suppress_tokens": list(range(10, 40))},
    "suppressed at the begin": {"begin_suppress_tokens": list(range(3, 60))},
    "sequence bias": {"sequence_bias": [[[11], 3.0], [[12, 13], 4.0]]},
    "forced end": {"forced_eos_token_id": EOS_ID},
    "decaying length": {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": EOS_ID},
    "encoder repetition": {"encoder_repetition_penalty": 1.4},
    "encoder n-grams": {"encoder_no_repeat_ngram_size": 1},
    "prefix constraint": {"prefix_allowed_tokens_fn": every_other_token},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=2.0)},
    "own processor": {"logits_processor": LogitsProcessorList([PenalisesByRow()])},
}


@pytest.mark.parametrize("prompt_lengths", [[9], [1, 3, 9, 17]], ids=["batch 1", "batch 4"])
@pytest.mark.parametrize("options", PROCESSORS.values(), ids=PROCESSORS.keys())
def test_a_processor_alone_gives_plain_generates_text(options, prompt_lengths):
    target, inputs = tiny_target("llama"), left_padded(prompt_lengths)
    plain = generate(target, inputs, max_new_tokens=24, **options).sequences
    without = generate(target, inputs, max_new_tokens=24).sequences
    assert plain.shape != without.shape or not torch.equal(plain, without)
    drafter = tiny_drafter(target)
    views = (drafter, k_oracle(drafter, plain, right=lambda row: row + 1), tiny_drafter(target, draft_vocab_size=24))
    for view in views:
        output = generate(target, inputs, view, max_new_tokens=24, **options)
        assert torch.equal(output.sequences, plain)
        assert_drafted(output.rounds)


def test_with_a_processor_that_decides_everything_each_draft_is_accepted():
    """The drafts go through the processors too: else they would know nothing of the constraint."""
    target, inputs = tiny_target("llama"), left_padded([3, 9])

    def only_one(row, ids):
        return [3 + (7 * len(ids) + row) % 50]

    output = generate(target, inputs, tiny_drafter(target), max_new_tokens=24, prefix_allowed_tokens_fn=only_one)
    assert_drafted(output.rounds)
    assert output.stats.verify_rate == 1.0


# ------------------------------------------------------------------------------------------------------ a grammar

# Values: numbers, arrays, objects with one-letter keys. Token i + 3 is symbol i; then comes the end of sequence.
SYMBOLS = ["{", "}", "[", "]", ",", '"a":', '"b":', "1", "2", "null"]
END_ID = 3 + len(SYMBOLS)
MAX_DEPTH = 3
# Brackets close in time.
BRIEF = [[[3 + SYMBOLS.index(symbol)], 4.0] for symbol in "}]"]


class JSONGrammar:
    """
    A strict pushdown automaton: it answers for prefixes that plain generation can reach, and no others.

    Plain generation asks about a row only as long as it is unfinished (batch of one), and never after a token that was
    not allowed.
    """

    def __init__(self, prompt_width):
        self.prompt_width = prompt_width
        self.num_calls = 0

    def __call__(self, row, ids):
        self.num_calls += 1
        stack, expect = [], "value"
        for token_id in ids[self.prompt_width :].tolist():
            allowed = self.allowed(stack, expect)
            if token_id == END_ID or token_id not in allowed:
                raise LookupError(f"asked about a prefix that no output begins with: {ids.tolist()}")
            stack, expect = self.step(stack, expect, SYMBOLS[token_id - 3])
        return self.allowed(stack, expect)

    @staticmethod
    def allowed(stack, expect):
        values = ["1", "2", "null", *(["{", "["] if len(stack) < MAX_DEPTH else [])]
        symbols = {
            "value": values,
            "value or ]": [*values, "]"],
            "key or }": ['"a":', "}"],
            "second key": ['"b":'],
            "rest of [": [",", "]"],
            "rest of {a": [",", "}"],
            "rest of {b": ["}"],
            "end": [],
        }[expect]
        return [3 + SYMBOLS.index(symbol) for symbol in symbols] or [END_ID]

    @staticmethod
    def step(stack, expect, symbol):
        if symbol == "[":
            return [*stack, "["], "value or ]"
        if symbol == "{":
            return [*stack, "{"], "key or }"
        if symbol in ('"a":', '"b":'):
            return [*stack[:-1], "{" + symbol[1]], "value"
        if symbol == ",":
            return stack, "value" if stack[-1] == "[" else "second key"
        if symbol in "]}":
            stack = stack[:-1]
        if not stack:
            return stack, "end"
        return stack, "rest of " + stack[-1]


@pytest.mark.parametrize(
    "head", [{}, {"draft_vocab_size": 20}, {"draft_top_k": 3}], ids=["whole vocabulary", "reduced", "top-k"]
)
def test_100_of_100_outputs_of_a_json_grammar_parse_and_equal_plain_generates(head):
    target = tiny_target("llama")
    drafter, rounds = tiny_drafter(target, **head), []
    view = drafter.with_options(on_round=rounds.append)
    for seed in range(100):
        inputs = left_padded([1 + seed % 7], seed=seed)
        width = inputs["input_ids"].shape[1]
        options = {"max_new_tokens": 60, "eos_token_id": END_ID, "sequence_bias": BRIEF}
        options["return_dict_in_generate"] = False
        plain = generate(target, inputs, prefix_allowed_tokens_fn=JSONGrammar(width), **options)
        output = generate(target, inputs, view, prefix_allowed_tokens_fn=JSONGrammar(width), **options)
        assert torch.equal(output, plain)
        *symbols, end = output[0, width:].tolist()
        assert end == END_ID
        json.loads("".join(SYMBOLS[token_id - 3] for token_id in symbols))
    assert_drafted(rounds)


class Masking(LogitsProcessor):
    """The grammar as a user's own processor, which does not rescue a vocabulary without an allowed token."""

    def __init__(self, prompt_width):
        self.grammar = JSONGrammar(prompt_width)

    def __call__(self, input_ids, scores):
        mask = torch.full_like(scores, float("-inf"))
        for row, ids in enumerate(input_ids):
            mask[row, self.grammar(row, ids)] = 0
        return scores + mask


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampling"])
@pytest.mark.parametrize("head", [{"draft_vocab_size": 20}, {"draft_top_k": 3}], ids=["reduced", "top-k"])
def test_where_nothing_that_can_be_drafted_is_allowed_the_draft_ends_and_nobody_asks_what_follows(head, do_sample):
    target = tiny_target("llama")
    drafter, rounds = tiny_drafter(target, **head), []
    view = drafter.with_options(on_round=rounds.append)
    options = {"max_new_tokens": 60, "eos_token_id": END_ID, "sequence_bias": BRIEF, "do_sample": do_sample}
    for seed in range(20):
        inputs = left_padded([4], seed=seed)
        output = generate(target, inputs, view, logits_processor=LogitsProcessorList([Masking(4)]), **options)
        json.loads("".join(SYMBOLS[token_id - 3] for token_id in output.sequences[0, 4:-1].tolist()))
        if not do_sample:
            plain = generate(target, inputs, logits_processor=LogitsProcessorList([Masking(4)]), **options)
            assert torch.equal(output.sequences, plain.sequences)
    assert sum(r.verify_length < len(r.draft_ids) for r in rounds) > 20
    assert max(r.verify_length for r in rounds) > 1


def test_a_sampled_grammar_is_kept_too():
    target = tiny_target("llama")
    drafter, rounds = tiny_drafter(target, draft_vocab_size=20), []
    view = drafter.with_options(generator=torch.Generator().manual_seed(0), on_round=rounds.append)
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 60, "eos_token_id": END_ID, "sequence_bias": BRIEF}
    for _ in range(20):
        output = generate(target, left_padded([4]), view, prefix_allowed_tokens_fn=JSONGrammar(4), **options)
        json.loads("".join(SYMBOLS[token_id - 3] for token_id in output.sequences[0, 4:-1].tolist()))
    assert_drafted(rounds)


# ------------------------------------------------------------------------------------------------ stateful processors


@pytest.fixture
def warnings_of_the_library(monkeypatch):
    """What is logged, each message every time."""
    messages = []
    monkeypatch.setattr(logging.logging.Logger, "warning_once", lambda self, message, *args: messages.append(message))
    return messages


@pytest.mark.parametrize(
    "options",
    [
        {"watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2, 3])},
        {"guidance_scale": 1.5},
    ],
    ids=["SynthID", "unbatched guidance"],
)
@pytest.mark.parametrize("prompt_lengths", [[5], [5, 5]], ids=["batch 1", "batch 2"])
def test_stateful_processors_run_without_drafting_and_say_why(options, prompt_lengths, warnings_of_the_library):
    target, inputs = tiny_target("llama"), left_padded(prompt_lengths)
    sampled = {"do_sample": True, "top_k": 5, "max_new_tokens": 10}
    torch.manual_seed(0)
    plain = generate(target, inputs, **sampled, **options).sequences
    warnings_of_the_library.clear()
    torch.manual_seed(0)
    output = generate(target, inputs, tiny_drafter(target), **sampled, **options)
    assert torch.equal(output.sequences, plain)
    assert output.rounds == []
    assert any("without drafting" in message for message in warnings_of_the_library)


def test_finished_rows_are_padded_and_the_others_keep_their_processors():
    target, inputs = tiny_target("llama"), left_padded([1, 3, 9, 17])
    options = {"max_new_tokens": 24, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2}
    text = generate(target, inputs, **options).sequences[:, 17:]
    options["eos_token_id"] = [int(text[1, 5]), int(text[3, 11])]
    plain = generate(target, inputs, **options).sequences
    assert (plain == PAD_ID)[:, 17:].any()
    drafter = tiny_drafter(target)
    output = generate(target, inputs, oracle(drafter, plain), **options)
    assert torch.equal(output.sequences, plain)
    assert_drafted(output.rounds)
