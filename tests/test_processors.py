"""Processors applied entry by entry give what plain `generate` computes for the same row and prefix."""

import functools

import pytest
import torch
from transformers import (
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    SynthIDTextWatermarkingConfig,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
    WatermarkingConfig,
)

from hf_dspark.processors import RowProcessors, stateful_reason
from tests.tiny import PAD_ID, VOCAB_SIZE, tiny_target

NEW_TOKENS = 12
PROMPT_LENGTHS = [1, 3, 9]
EOS_ID = 40


def left_padded_batch(lengths=PROMPT_LENGTHS):
    generator = torch.Generator().manual_seed(0)
    ids = torch.full((len(lengths), max(lengths)), PAD_ID)
    for row, length in enumerate(lengths):
        ids[row, ids.shape[1] - length :] = torch.randint(2, VOCAB_SIZE, (length,), generator=generator)
    return ids, (ids != PAD_ID).long()


def allowed_for_row(batch_id, ids):
    """A constraint per row that has no answer to the prefixes of other rows."""
    prompt = left_padded_batch()[0][batch_id]
    if not torch.equal(ids[: len(prompt)], prompt):
        raise LookupError(f"batch row {batch_id} was asked about a prefix that is not its own")
    return [token_id for token_id in range(2, VOCAB_SIZE) if token_id % 3 == (batch_id + len(ids)) % 3]


class BoundToTheBatch(LogitsProcessor):
    """A user's own: needs all rows, has one bias per row and looks at the prefix."""

    def __init__(self, num_rows):
        self._row_bias = torch.arange(1, num_rows + 1) * 0.5

    def __call__(self, input_ids, scores):
        if len(input_ids) != len(self._row_bias):
            raise ValueError("batch size changed")
        penalty = self._row_bias[:, None] * input_ids.shape[1]
        return scores.scatter_add(1, input_ids[:, -1:], -penalty)


class WritesInPlace(LogitsProcessor):
    """A user's own that changes the scores it is given."""

    def __call__(self, input_ids, scores):
        return scores.scatter_(1, input_ids[:, :1], 5.0)


OPTIONS = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "min_new_tokens": {"min_new_tokens": 10},
    "min_length": {"min_length": 15},
    "bad_words": {"bad_words_ids": [[5], [7, 9], [EOS_ID]]},
    "suppress_tokens": {"suppress_tokens": list(range(2, 30))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(2, 30))},
    "sequence_bias": {"sequence_bias": [[[11], 3.0], [[12, 13], 2.0]]},
    "prefix_allowed_tokens": {"prefix_allowed_tokens_fn": allowed_for_row},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.4},
    "encoder_no_repeat_ngram": {"encoder_no_repeat_ngram_size": 1},
    "forced_eos": {"forced_eos_token_id": EOS_ID},
    "exponential_decay": {"exponential_decay_length_penalty": (2, 1.2)},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=2.0)},
    "selfhash_watermark": {"watermarking_config": WatermarkingConfig(seeding_scheme="selfhash", context_width=2)},
    "own_processor": {"logits_processor": LogitsProcessorList([BoundToTheBatch(len(PROMPT_LENGTHS))])},
    "temperature_top_k_top_p": {"do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.9},
    "other_warpers": {
        "do_sample": True,
        "top_h": 0.9,
        "min_p": 0.05,
        "typical_p": 0.9,
        "epsilon_cutoff": 0.01,
        "eta_cutoff": 0.02,
        "renormalize_logits": True,
        "remove_invalid_values": True,
    },
    "many_at_once": {
        "do_sample": True,
        "temperature": 0.8,
        "top_k": 20,
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "suppress_tokens": [3, 4],
        "logits_processor": LogitsProcessorList([BoundToTheBatch(len(PROMPT_LENGTHS))]),
    },
    "several_sequences": {
        "do_sample": True,
        "num_return_sequences": 2,
        "repetition_penalty": 1.2,
        "encoder_no_repeat_ngram_size": 1,
        "prefix_allowed_tokens_fn": allowed_for_row,
    },
}


@pytest.fixture
def plain_generate(monkeypatch):
    """Plain generation, returning its output and the processors it used."""
    recorded = []
    stock_sample = GenerationMixin._sample

    @functools.wraps(stock_sample)
    def recording_sample(self, input_ids, logits_processor, *args, **kwargs):
        recorded.append(logits_processor)
        return stock_sample(self, input_ids, logits_processor, *args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "_sample", recording_sample)

    def generate(lengths=PROMPT_LENGTHS, **options):
        torch.manual_seed(0)
        input_ids, attention_mask = left_padded_batch(lengths)
        output = tiny_target("llama").generate(
            input_ids,
            attention_mask=attention_mask,
            max_new_tokens=NEW_TOKENS,
            eos_token_id=EOS_ID,
            return_dict_in_generate=True,
            output_logits=True,
            output_scores=True,
            **{"do_sample": False, **options},
        )
        return output, recorded[-1]

    return generate


def ragged_entries(num_rows, num_steps, seed=0):
    """All pairs of row and step, shuffled, in groups of different sizes."""
    order = torch.randperm(num_rows * num_steps, generator=torch.Generator().manual_seed(seed)).tolist()
    entries = [(index % num_rows, index // num_rows) for index in order]
    return [entries[start : start + 7] for start in range(0, len(entries), 7)]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_scores_equal_those_of_plain_generate(plain_generate, options):
    output, processors = plain_generate(**options)
    assert len(processors) > 0
    num_rows, prompt_width = len(output.sequences), max(PROMPT_LENGTHS)
    row_processors = RowProcessors(processors, num_rows)
    changed = False
    for entries in ragged_entries(num_rows, len(output.logits)):
        logits = torch.stack([output.logits[step][row] for row, step in entries])
        before = logits.clone()
        scores = row_processors.apply(
            logits,
            rows=[row for row, _ in entries],
            prefix=lambda n, entries=entries: output.sequences[entries[n][0], : prompt_width + entries[n][1]],
        )
        assert torch.equal(scores, torch.stack([output.scores[step][row] for row, step in entries]))
        assert torch.equal(logits, before)
        changed |= not torch.equal(scores, logits)
    assert changed


@pytest.mark.parametrize("num_rows", [1, 4])
def test_scores_on_prefixes_nobody_generated_equal_a_call_for_the_whole_batch(num_rows):
    generator = torch.Generator().manual_seed(1)
    padding = torch.tensor([4, 0, 2, 1][:num_rows])
    processors = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.3, prompt_ignore_length=padding),
            NoRepeatNGramLogitsProcessor(2),
            WritesInPlace(),
            BoundToTheBatch(num_rows),
            TemperatureLogitsWarper(0.7),
            TopKLogitsWarper(12),
        ]
    )
    entries, inputs, expected = [], [], []
    for width in (6, 9, 13):
        ids = torch.randint(VOCAB_SIZE, (num_rows, width), generator=generator)
        logits = torch.randn(num_rows, VOCAB_SIZE, generator=generator)
        scores = processors(ids, logits.clone())
        for row in range(num_rows):
            entries.append((row, ids[row]))
            inputs.append(logits[row])
            expected.append(scores[row])
    order = torch.randperm(len(entries), generator=generator).tolist()
    scores = RowProcessors(processors, num_rows).apply(
        torch.stack([inputs[n] for n in order]),
        rows=[entries[n][0] for n in order],
        prefix=lambda n: entries[order[n]][1],
    )
    assert torch.equal(scores, torch.stack([expected[n] for n in order]))


def no_prefix(entry):
    raise AssertionError("the ids were asked for though no processor looks at them")


def test_processors_that_ignore_ids_run_once_for_all_entries(monkeypatch):
    calls = []
    original = TopKLogitsWarper.__call__

    def counting(self, input_ids, scores):
        calls.append(len(scores))
        return original(self, input_ids, scores)

    monkeypatch.setattr(TopKLogitsWarper, "__call__", counting)
    processors = [TemperatureLogitsWarper(0.5), SuppressTokensLogitsProcessor([3]), TopKLogitsWarper(4)]
    RowProcessors(processors, 2).apply(torch.randn(9, 16), rows=[0, 1] * 4 + [0], prefix=no_prefix)
    assert calls == [9]


def test_each_prefix_is_asked_for_once():
    asked = []

    def prefix(entry):
        asked.append(entry)
        return torch.tensor([1, 2, 1])

    processors = [NoRepeatNGramLogitsProcessor(2), RepetitionPenaltyLogitsProcessor(1.3), BoundToTheBatch(2)]
    RowProcessors(processors, 2).apply(torch.randn(3, 16), rows=[1, 0, 1], prefix=prefix)
    assert asked == [0, 1, 2]


def test_after_the_end_of_a_text_no_processor_that_looks_at_ids_is_asked():
    """A user's constraint has no answer after end-of-sequence, where plain `generate` does not ask it."""

    def allowed_tokens(batch_id, ids):
        if EOS_ID in ids.tolist():
            raise LookupError("asked after the end")
        return [1]

    prefixes = [torch.tensor([3]), None]
    processors = [PrefixConstrainedLogitsProcessor(allowed_tokens, num_beams=1), TemperatureLogitsWarper(0.5)]
    scores = RowProcessors(processors, 1).apply(torch.ones(2, 4), rows=[0, 0], prefix=prefixes.__getitem__)
    assert scores.tolist() == [[float("-inf"), 2.0, float("-inf"), float("-inf")], [2.0, 2.0, 2.0, 2.0]]


def test_without_processors_the_scores_come_back_as_they_are():
    scores = torch.randn(3, 8)
    row_processors = RowProcessors(LogitsProcessorList(), 2)
    assert row_processors.apply(scores, rows=[0, 1, 1], prefix=no_prefix) is scores
    assert row_processors.vocabulary_free


def test_a_processor_that_writes_into_its_scores_does_not_write_into_ours():
    scores = torch.zeros(2, 4)
    processed = RowProcessors([WritesInPlace()], 1).apply(scores, rows=[0, 0], prefix=lambda n: torch.tensor([n]))
    assert processed.tolist() == [[5.0, 0.0, 0.0, 0.0], [0.0, 5.0, 0.0, 0.0]]
    assert not scores.any()


def test_scores_are_float32_whatever_the_logits_are():
    scores = torch.randn(1, 8).bfloat16()
    for processors in ([], [TemperatureLogitsWarper(0.3)]):
        processed = RowProcessors(processors, 1).apply(scores, rows=[0], prefix=no_prefix)
        assert torch.equal(processed, LogitsProcessorList(processors)(None, scores.float()))


def test_a_subclass_of_a_known_processor_is_not_taken_for_it():
    class LooksAtIds(TemperatureLogitsWarper):
        def __call__(self, input_ids, scores):
            return scores + input_ids[:, -1:]

    row_processors = RowProcessors([LooksAtIds(0.5)], 2)
    scores = row_processors.apply(torch.zeros(2, 4), rows=[1, 0], prefix=lambda n: torch.tensor([5 + n]))
    assert scores.tolist() == [[5.0] * 4, [6.0] * 4]
    assert not row_processors.vocabulary_free


@pytest.mark.parametrize(
    ("processors", "expected"),
    [
        ([TemperatureLogitsWarper(0.5), TopKLogitsWarper(4)], True),
        ([TemperatureLogitsWarper(0.5), SuppressTokensLogitsProcessor([3])], False),
        ([RepetitionPenaltyLogitsProcessor(1.2)], False),
        ([BoundToTheBatch(1)], False),
    ],
)
def test_only_processors_blind_to_ids_and_token_numbers_are_vocabulary_free(processors, expected):
    assert RowProcessors(processors, 1).vocabulary_free is expected


def test_a_constraint_without_answer_is_still_an_error():
    processors = [PrefixConstrainedLogitsProcessor(lambda batch_id, ids: [] if batch_id else [1], num_beams=1)]
    row_processors = RowProcessors(processors, 2)
    row_processors.apply(torch.zeros(1, 4), rows=[0], prefix=lambda n: torch.tensor([1]))
    with pytest.raises(ValueError, match="empty list"):
        row_processors.apply(torch.zeros(1, 4), rows=[1], prefix=lambda n: torch.tensor([1]))


def test_stateful_processors_are_named_with_what_makes_them_so():
    synth_id = SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2]).construct_processor(VOCAB_SIZE, "cpu")
    assert isinstance(synth_id, SynthIDTextWatermarkLogitsProcessor)
    guidance = UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, model=None)
    assert "SynthIDTextWatermark" in stateful_reason([TemperatureLogitsWarper(0.5), synth_id])
    assert "UnbatchedClassifierFreeGuidance" in stateful_reason([guidance])
    assert "cache of its own" in stateful_reason([guidance])
    assert stateful_reason(LogitsProcessorList([TemperatureLogitsWarper(0.5), BoundToTheBatch(1)])) is None
