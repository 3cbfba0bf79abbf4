"""The drafting core in transformers' own loop does what it does in the packed one."""

import pytest
import torch
from transformers import GenerationMixin

import hf_dspark.generation
from hf_dspark import ConfidenceThreshold, DSparkCandidateGenerator, FixedLength
from hf_dspark.drafting import DraftSession
from tests.drafters import AUTOREGRESSIVE, assert_drafted, generate, k_oracle, left_padded, oracle, tiny_drafter
from tests.tiny import tiny_target


@pytest.fixture
def in_the_stock_loop(monkeypatch):
    """Runs `generate` with packing refused, whatever the target."""

    def run(*args, **kwargs):
        with monkeypatch.context() as patch:
            patch.setattr(hf_dspark.generation, "packs", lambda *args, **kwargs: (False, "this test"))
            return generate(*args, **kwargs)

    return run


def same_rounds(ours, theirs):
    """Everything about the rounds but the time they took; confidences to 1e-5."""
    fields = ("row", "step", "anchor_id", "draft_ids", "verify_length", "num_accepted", "next_id", "committed_ids")
    fields += ("batch_tokens",)
    for a, b in zip(ours, theirs, strict=True):
        assert [getattr(a, field) for field in fields] == [getattr(b, field) for field in fields]
        torch.testing.assert_close(torch.tensor(a.confidence), torch.tensor(b.confidence), atol=1e-5, rtol=0)
    assert_drafted(theirs)


DRAFTERS = {
    "vanilla": {},
    "rnn": {"markov_head_type": "rnn"},
    "layout B": {"sample_from_anchor": False},
    "reduced vocabulary": {"draft_vocab_size": 20},
    "top-k head": {"draft_top_k": 6},
    "autoregressive": AUTOREGRESSIVE,
}


@pytest.mark.parametrize("head", DRAFTERS.values(), ids=DRAFTERS.keys())
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_the_stock_loop_sees_the_drafts_of_the_packed_one(family, head, in_the_stock_loop):
    target, inputs = tiny_target(family), left_padded([6])
    drafter = tiny_drafter(target, **head)
    packed = generate(target, inputs, drafter, max_new_tokens=24)
    stock = in_the_stock_loop(target, inputs, drafter, max_new_tokens=24)
    assert torch.equal(stock.sequences, packed.sequences)
    same_rounds(stock.rounds, packed.rounds)


@pytest.mark.parametrize("right", [0, 2, 5])
def test_the_stock_loop_accepts_what_the_packed_one_accepts(right, in_the_stock_loop):
    target, inputs = tiny_target("llama"), left_padded([6])
    plain = generate(target, inputs, max_new_tokens=24).sequences
    drafter = k_oracle(tiny_drafter(target), plain, right)
    packed = generate(target, inputs, drafter, max_new_tokens=24)
    stock = in_the_stock_loop(target, inputs, drafter, max_new_tokens=24)
    assert torch.equal(stock.sequences, plain)
    same_rounds(stock.rounds, packed.rounds)


@pytest.mark.parametrize("scheduler", [FixedLength(2), FixedLength(0), ConfidenceThreshold(0.5)], ids=str)
def test_the_stock_loop_keeps_the_schedule(scheduler, in_the_stock_loop):
    target, inputs = tiny_target("llama"), left_padded([6])
    view = tiny_drafter(target).with_options(scheduler=scheduler)
    packed = generate(target, inputs, view, max_new_tokens=24)
    stock = in_the_stock_loop(target, inputs, view, max_new_tokens=24)
    assert torch.equal(stock.sequences, packed.sequences)
    fields = [[(r.draft_ids, r.verify_length, r.committed_ids) for r in output.rounds] for output in (packed, stock)]
    assert fields[0] == fields[1]


def test_left_padding_is_no_context_in_the_stock_loop_either(in_the_stock_loop):
    target, inputs = tiny_target("llama"), left_padded([6])
    padded = {name: torch.nn.functional.pad(value, (5, 0)) for name, value in inputs.items()}
    drafter = tiny_drafter(target)
    packed = generate(target, inputs, drafter, max_new_tokens=24)
    stock = in_the_stock_loop(target, padded, drafter, max_new_tokens=24)
    assert torch.equal(stock.sequences[:, 5:], packed.sequences)
    same_rounds(stock.rounds, packed.rounds)


def test_a_round_of_the_stock_loop_is_cut_at_the_end_of_sequence(in_the_stock_loop):
    target, inputs = tiny_target("llama"), left_padded([6])
    options = {"max_new_tokens": 24, "no_repeat_ngram_size": 1}
    text = generate(target, inputs, **options).sequences
    options["eos_token_id"] = int(text[0, 6 + 9])
    drafter = k_oracle(tiny_drafter(target), text, right=5)
    packed = generate(target, inputs, drafter, **options)
    stock = in_the_stock_loop(target, inputs, drafter, **options)
    assert torch.equal(stock.sequences, packed.sequences)
    assert [r.committed_ids for r in stock.rounds] == [r.committed_ids for r in packed.rounds]
    assert stock.sequences.shape[1] == 6 + 10


def other_tokens_for_other_rows(row, ids):
    return list(range(3 + (int(ids[-1]) + row) % 3, 64, 3))


PROCESSORS = {
    "for a row": {"no_repeat_ngram_size": 2},
    "bound to rows": {"repetition_penalty": 1.3, "prefix_allowed_tokens_fn": other_tokens_for_other_rows},
}


@pytest.mark.parametrize("options", PROCESSORS.values(), ids=PROCESSORS.keys())
@pytest.mark.parametrize("prompt_lengths", [[6], [6, 3, 9]], ids=["batch 1", "batch 3"])
def test_processors_work_in_the_stock_loop(options, prompt_lengths, in_the_stock_loop):
    target, inputs, rounds = tiny_target("llama"), left_padded(prompt_lengths), []
    plain = generate(target, inputs, max_new_tokens=24, **options).sequences
    view = tiny_drafter(target).with_options(on_round=rounds.append)
    output = in_the_stock_loop(target, inputs, view, max_new_tokens=24, return_dict_in_generate=False, **options)
    assert torch.equal(output, plain)
    assert_drafted(rounds)


@pytest.mark.parametrize("head", [{}, {"draft_vocab_size": 20}], ids=["whole vocabulary", "reduced vocabulary"])
def test_sampling_works_in_the_stock_loop(head, in_the_stock_loop):
    target, inputs, rounds = tiny_target("llama"), left_padded([6, 3]), []
    view = tiny_drafter(target, **head).with_options(on_round=rounds.append)
    for options in ({"top_k": 20, "temperature": 2.0}, {"top_k": 0, "temperature": 2.0, "repetition_penalty": 1.1}):
        torch.manual_seed(0)
        output = in_the_stock_loop(
            target, inputs, view, max_new_tokens=24, do_sample=True, return_dict_in_generate=False, **options
        )
        assert output.shape == (2, 6 + 24)
    assert_drafted(rounds)
    assert 0 < sum(r.num_accepted for r in rounds) < sum(r.verify_length for r in rounds)


@pytest.mark.parametrize("head", DRAFTERS.values(), ids=DRAFTERS.keys())
def test_the_logits_handed_over_are_the_distributions_drawn_from(head, in_the_stock_loop, monkeypatch):
    target, inputs, drafts, handed_over = tiny_target("llama"), left_padded([6]), [], []
    propose, get_candidates = DraftSession.propose, DSparkCandidateGenerator.get_candidates

    def recording_propose(self, *args, **kwargs):
        drafts.append(propose(self, *args, **kwargs))
        return drafts[-1]

    def recording_candidates(self, *args, **kwargs):
        ids, logits = get_candidates(self, *args, **kwargs)
        handed_over.extend([] if logits is None else [(ids, logits)])
        return ids, logits

    monkeypatch.setattr(DraftSession, "propose", recording_propose)
    monkeypatch.setattr(DSparkCandidateGenerator, "get_candidates", recording_candidates)
    in_the_stock_loop(target, inputs, tiny_drafter(target, **head), max_new_tokens=12, do_sample=True, top_k=7)
    for drawn, (ids, logits) in zip(drafts, handed_over, strict=True):
        assert torch.equal(ids[:, -drawn.ids.shape[1] :], drawn.ids)
        columns = torch.arange(64) if drawn.token_ids is None else drawn.token_ids
        expected = torch.zeros_like(logits).index_copy(2, columns, drawn.probs)
        torch.testing.assert_close(logits.softmax(-1), expected)


STOPS = {
    "custom criterion": {"stopping_criteria": [lambda ids, scores: torch.tensor([ids.shape[1] >= 9] * len(ids))]},
    "time": {"max_time": 0.0},
}


@pytest.mark.parametrize("options", STOPS.values(), ids=STOPS.keys())
def test_criteria_that_the_stock_loop_overshoots_are_met_exactly(options, in_the_stock_loop):
    target, inputs = tiny_target("llama"), left_padded([6])
    whole = generate(target, inputs, max_new_tokens=24).sequences
    plain = generate(target, inputs, max_new_tokens=24, **options).sequences
    assert plain.shape[1] < whole.shape[1]
    output = in_the_stock_loop(target, inputs, oracle(tiny_drafter(target), whole), max_new_tokens=24, **options)
    assert torch.equal(output.sequences, plain)


def test_the_generator_is_what_the_stock_loop_gets_for_a_drafter():
    target, inputs = tiny_target("llama"), left_padded([6])
    generation_config, _ = target._prepare_generation_config(None, max_new_tokens=4)
    generator = GenerationMixin._get_candidate_generator(
        target,
        generation_config=generation_config,
        input_ids=inputs["input_ids"],
        inputs_tensor=None,
        logits_processor=[],
        model_kwargs={},
        assistant_model=tiny_drafter(target),
    )
    assert isinstance(generator, DSparkCandidateGenerator)
    assert generator.get_candidates(inputs["input_ids"], is_first_iteration=True) == (inputs["input_ids"], None)
