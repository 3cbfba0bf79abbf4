"""The engine serves every request as plain `generate` would, whatever else is in the batch, and reuses its slots."""

import pytest
import torch
from transformers import TextIteratorStreamer

from hf_dspark import ConfidenceThreshold, DSparkEngine, FixedLength, Scheduler, admission, engine
from hf_dspark.round_cost import RoundCost
from tests.drafters import AUTOREGRESSIVE, assert_drafted, tiny_drafter
from tests.engines import LENGTHS, equal, knowing, plain, prompts
from tests.reference import TableProfile
from tests.tiny import FAMILIES, PAD_ID, tiny_target
from tests.tokens import TEXT, byte_tokenizer, only

GREEDY = {"do_sample": False, "max_new_tokens": 16}


def submit_all(serving, batch, **options):
    return [serving.submit(prompt, **GREEDY | options) for prompt in batch]


# ------------------------------------------------------------------------------------------------------ one's own text

DRAFTERS = {
    "full vocabulary": {},
    "reduced vocabulary": {"draft_vocab_size": 20},
    "autoregressive": AUTOREGRESSIVE,
    "layout B": {"sample_from_anchor": False},
}


@pytest.mark.parametrize("head", DRAFTERS.values(), ids=DRAFTERS.keys())
def test_greedy_text_is_plain_generates_whatever_the_batch_size_and_the_order_of_arrival(head):
    target, batch = tiny_target("llama"), prompts()
    drafter, expected = tiny_drafter(target, **head), [plain(target, prompt) for prompt in batch]
    for max_batch_size, order in ((1, 1), (8, 1)) if not head else ((3, -1),):
        serving = DSparkEngine(target, drafter, max_batch_size=max_batch_size, scheduler=FixedLength())
        requests = submit_all(serving, batch[::order])
        serving.run()
        assert equal([r.result() for r in requests], expected[::order])
        assert_drafted([r for request in requests for r in request.rounds])
        assert all(request.new_ids == request.result()[0, len(request.prompt_ids) :].tolist() for request in requests)


def test_texts_keep_apart_from_neighbours_that_come_go_and_sample():
    target, batch = tiny_target("llama"), prompts()
    expected = [plain(target, prompt) for prompt in batch]
    view = knowing(tiny_drafter(target), expected)
    serving = DSparkEngine(target, view, max_batch_size=3, scheduler=FixedLength(), prefill_chunk=8)
    requests = []
    for prompt in batch:
        requests.append(serving.submit(prompt, **GREEDY))
        serving.submit(prompt, do_sample=True, max_new_tokens=5, temperature=1.7)
        serving.step()
    serving.run()
    assert equal([r.result() for r in requests], expected)
    rounds = [r for request in requests for r in request.rounds]
    assert sum(r.num_accepted for r in rounds) / len(rounds) > 1.5


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_read_in_chunks_and_served_in_one_batch(family):
    target, batch = tiny_target(family), prompts((21, 5, 13))
    expected = [plain(target, prompt) for prompt in batch]
    view = knowing(tiny_drafter(target, block_size=4), expected, right=2)
    serving = DSparkEngine(target, view, max_batch_size=2, scheduler=FixedLength(), prefill_chunk=6)
    requests = submit_all(serving, batch)
    serving.run()
    assert equal([r.result() for r in requests], expected)
    assert_drafted([r for request in requests for r in request.rounds])


def test_settings_of_requests_in_one_batch_are_each_ones_own():
    target, batch = tiny_target("llama"), prompts((6, 6, 9, 4, 7, 5))
    settings = [
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 1},
        {"suppress_tokens": list(range(20, 60))},
        {"min_new_tokens": 12, "eos_token_id": list(range(30, 64))},
        {"max_new_tokens": 5},
        {"bad_words_ids": [[n] for n in range(3, 40)]},
    ]
    settings = [{"max_new_tokens": 20} | own for own in settings]
    expected = [plain(target, prompt, **own) for prompt, own in zip(batch, settings, strict=True)]
    serving = DSparkEngine(target, tiny_drafter(target, draft_vocab_size=40), scheduler=FixedLength())
    requests = [serving.submit(p, do_sample=False, **own) for p, own in zip(batch, settings, strict=True)]
    serving.run()
    assert equal([r.result() for r in requests], expected)
    unguided = [plain(target, prompt, max_new_tokens=20) for prompt in batch]
    assert all(not torch.equal(e, u) for e, u in zip(expected, unguided, strict=True)), "each setting has an effect"


def test_text_ends_where_plain_generate_ends_it():
    target, (prompt,), tokenizer = tiny_target("llama"), prompts((6,)), byte_tokenizer()
    whole = plain(target, prompt, max_new_tokens=40)
    new = whole[0, 6:].tolist()
    view, texts = knowing(tiny_drafter(target), [whole], right=5), tokenizer(TEXT)["input_ids"][:20]
    string = tokenizer.decode(texts[3:6])
    cases = [
        {"eos_token_id": new[7]},
        {"max_new_tokens": 1},
        {"max_length": 13},
        {"stopping_criteria": [lambda ids, scores: torch.tensor([len(ids[0]) >= 15])]},
        {"stop_strings": [string], "tokenizer": tokenizer, "prefix_allowed_tokens_fn": only(texts, prompt_width=6)},
    ]
    serving = DSparkEngine(target, view, max_batch_size=4, scheduler=FixedLength())
    requests = []
    for case in cases:
        options = {"do_sample": False, "pad_token_id": PAD_ID} | case
        options |= {} if "max_length" in case else {"max_new_tokens": case.get("max_new_tokens", 40)}
        requests.append((serving.submit(prompt, **options), target.generate(prompt[None], **options)))
    serving.run()
    for request, expected in requests:
        assert request.result().tolist() == expected.tolist()
        assert len(request.new_ids) < 40
    assert requests[1][0].rounds == [] and list(requests[1][0]) == []


def test_a_left_padded_prompt_is_served_as_plain_generate_serves_it():
    target, (prompt,) = tiny_target("mistral"), prompts((7,))
    inputs = {
        "input_ids": torch.cat([torch.full((1, 3), PAD_ID), prompt[None]], dim=1),
        "attention_mask": torch.tensor([[0] * 3 + [1] * 7]),
    }
    expected = target.generate(**inputs, **GREEDY)
    serving = DSparkEngine(target, tiny_drafter(target), scheduler=FixedLength())
    (result,) = serving.generate_batch([inputs], **GREEDY)
    assert torch.equal(result, expected)
    assert torch.equal(result[:, 3:], plain(target, prompt))


def test_a_streamer_gets_the_text_while_it_grows():
    target, (prompt, other), tokenizer = tiny_target("llama"), prompts((6, 9)), byte_tokenizer()
    ids = tokenizer(TEXT)["input_ids"]
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=10)
    options = {"max_new_tokens": len(ids), "prefix_allowed_tokens_fn": only(ids, prompt_width=6)}
    with DSparkEngine(target, tiny_drafter(target), scheduler=FixedLength()) as serving:
        serving.submit(other, **GREEDY)
        serving.submit(prompt, do_sample=False, streamer=streamer, **options)
        pieces = list(streamer)
    assert "".join(pieces) == TEXT and len(pieces) > 5


# --------------------------------------------------------------------------------------------------- prefill, slots


@pytest.fixture
def chunks(monkeypatch):
    """Lengths of the prompts' forwards."""
    lengths, read_tokens = [], admission.read_tokens

    def recording(view, cache, token_ids, *args, **kwargs):
        lengths.append(len(token_ids))
        return read_tokens(view, cache, token_ids, *args, **kwargs)

    monkeypatch.setattr(admission, "read_tokens", recording)
    return lengths


def test_a_prompt_in_chunks_gives_the_rounds_of_one_read_at_once(chunks):
    target, (first, long) = tiny_target("gemma3"), prompts((5, 45))
    drafter, rounds = tiny_drafter(target), {}
    for chunk in (8, 1000):
        serving = DSparkEngine(target, drafter, scheduler=FixedLength(), prefill_chunk=chunk)
        running = serving.submit(first, do_sample=False, max_new_tokens=60)
        serving.step()
        chunks.clear()
        request = serving.submit(long, **GREEDY)
        steps = 0
        while request.state in ("waiting", "prefilling"):
            before = len(running.rounds)
            assert serving.step() and serving.num_running == 2
            assert len(running.rounds) == before + 1, "the running row has a round for each chunk"
            steps += 1
        assert chunks == ([8, 8, 8, 8, 8, 5] if chunk == 8 else [45]) and steps == len(chunks)
        serving.run()
        assert torch.equal(request.result(), plain(target, long))
        rounds[chunk] = [(r.draft_ids, r.num_accepted, r.committed_ids) for r in request.rounds]
    assert rounds[8] == rounds[1000]
    assert max(len(draft_ids) for draft_ids, _, _ in rounds[8]) == 5


def test_while_nobody_waits_for_it_a_prompt_is_read_in_bigger_steps(chunks):
    target, (long, *short) = tiny_target("llama"), prompts((45, 3, 4, 5))
    serving = DSparkEngine(target, tiny_drafter(target), scheduler=FixedLength(), prefill_chunk=8)
    submit_all(serving, [long, *short])
    serving.step()
    assert chunks == [45, 3, 4, 5] and serving.num_running == 4


def test_slots_are_reused_at_once_and_there_are_no_more_of_them():
    target, steps = tiny_target("llama"), []
    serving = DSparkEngine(target, tiny_drafter(target), max_batch_size=2, scheduler=FixedLength(0))
    serving.on_step = steps.append
    long, *short = prompts((9, 3, 3, 3, 3, 3))
    running = serving.submit(long, do_sample=False, max_new_tokens=40)
    requests = submit_all(serving, short, max_new_tokens=5)
    serving.run()
    assert all(r.state == "finished" for r in (running, *requests))
    busy = [step.num_running for step in steps if step.step <= max(r.rounds[-1].step for r in requests)]
    assert busy == [2] * len(busy) and len(busy) == 5 * 4
    assert all(step.batch_tokens == step.num_running for step in steps)


@pytest.mark.parametrize("kind", [{}, AUTOREGRESSIVE], ids=["parallel", "autoregressive"])
def test_nothing_of_a_former_row_is_left_in_its_slot(kind):
    target, drafted = tiny_target("llama"), {}
    long, other, short = prompts((40, 30, 3))
    for former in ([], [long, other]):
        serving = DSparkEngine(target, tiny_drafter(target, **kind), max_batch_size=2, scheduler=FixedLength())
        submit_all(serving, former, max_new_tokens=4)
        serving.submit(long, do_sample=False, max_new_tokens=50)  # the slots stay in use
        request = serving.submit(short, **GREEDY)
        serving.run()
        drafted[len(former)] = [(r.draft_ids, r.confidence[0]) for r in request.rounds]
    assert [ids for ids, _ in drafted[0]] == [ids for ids, _ in drafted[2]]
    assert [c for _, c in drafted[0]] == pytest.approx([c for _, c in drafted[2]], abs=1e-5)


def test_an_idle_engine_holds_no_cache_and_goes_on():
    target, batch = tiny_target("llama"), prompts((4, 9, 1, 6))
    serving = DSparkEngine(target, tiny_drafter(target), max_batch_size=3, scheduler=FixedLength())
    for _ in range(2):
        assert equal(serving.generate_batch(batch, **GREEDY), [plain(target, prompt) for prompt in batch])
        assert serving._work._loop is None and serving.step() is False


# ------------------------------------------------------------------------------------------------- schedule, options


class Watching(Scheduler):
    """The whole block; what it is told."""

    def __init__(self):
        self.requests, self.settings, self.outcomes = [], [], []

    def for_call(self, setting):
        self.settings.append(setting)
        return self

    def verify_lengths(self, request):
        self.requests.append(request)
        return list(request.max_lengths)

    def observe(self, outcome):
        self.outcomes.append(outcome)


def test_one_schedule_serves_all_requests_and_knows_them_by_their_numbers():
    target, watching, batch = tiny_target("llama"), Watching(), prompts()
    serving = DSparkEngine(target, tiny_drafter(target), max_batch_size=3, scheduler=watching)
    requests = submit_all(serving, batch)
    serving.run()
    (setting,) = watching.settings
    assert setting.drains is False and setting.num_drafts == 5
    assert [r.id for r in requests] == list(range(len(LENGTHS)))
    seen = {row for asked in watching.requests for row in asked.rows}
    assert seen == set(range(len(LENGTHS)))
    for asked in watching.requests:
        served = [r for request in requests for r in request.rounds if r.step == asked.step]
        assert sorted(asked.rows) == sorted(r.row for r in served) and len(asked.rows) <= 3
        assert {r.batch_tokens for r in served} == {sum(1 + r.verify_length for r in served)}
    assert len(watching.outcomes) == len({r.step for request in requests for r in request.rounds})


def test_the_cost_is_measured_for_the_largest_batch_and_refined(monkeypatch):
    target, asked, steps = tiny_target("llama"), [], []
    cost = RoundCost(TableProfile([1e-3] * 64))

    def measured(model, drafter, num_rows):
        asked.append((model, num_rows))
        return cost

    monkeypatch.setattr(engine, "measured_cost", measured)
    serving = DSparkEngine(target, tiny_drafter(target), max_batch_size=5, scheduler="auto")
    serving.on_step = steps.append
    assert asked == [(target, 5)] and serving.cost is cost
    before = cost.predict(5, 0, 10.0, drafted=False)
    results = serving.generate_batch(prompts(), **GREEDY)
    assert equal(results, [plain(target, prompt) for prompt in prompts()])
    assert cost.predict(5, 0, 10.0, drafted=False) != before
    in_rounds = [step for step in steps if step.num_running]
    assert all(step.predicted_seconds > 0 and step.seconds > 0 for step in in_rounds)
    assert sum(step.prefill_tokens for step in steps) == sum(LENGTHS)
    assert all(s.batch_tokens == s.num_running + s.num_drafts_verified for s in steps)
    assert max(step.num_waiting for step in steps) == 5


def test_a_drafters_options_count(monkeypatch):
    target, told, own = tiny_target("llama"), [], []
    view = tiny_drafter(target).with_options(scheduler=FixedLength(4), max_draft_tokens=2, on_round=told.append)
    serving = DSparkEngine(target, view)
    request = serving.submit(prompts()[1], **GREEDY, on_round=own.append)
    serving.run()
    assert max(r.verify_length for r in request.rounds) == 2
    assert told == own == request.rounds


@pytest.mark.parametrize("drafts", [False, True], ids=["no drafter", "length 0"])
def test_without_drafts_it_is_plain_continuous_batching_and_nothing_is_tapped(drafts):
    target, batch = tiny_target("llama"), prompts()
    drafter = tiny_drafter(target) if drafts else None
    serving = DSparkEngine(target, drafter, scheduler=FixedLength(0) if drafts else None, max_batch_size=4)
    requests = submit_all(serving, batch)
    serving.step()
    assert serving._work._loop.session is None and serving._work._loop.captured is False
    serving.run()
    assert equal([r.result() for r in requests], [plain(target, prompt) for prompt in batch])
    assert {(r.verify_length, len(r.committed_ids)) for q in requests for r in q.rounds} == {(0, 1)}
    assert serving.cost is None


def test_confidences_are_calibrated_for_how_each_row_chooses():
    target, (prompt,) = tiny_target("llama"), prompts((6,))
    temperatures = {"greedy": [0.5] * 5, "sampling": [2.0] * 5}
    seen = {}
    for name, drafter in (("raw", tiny_drafter(target)), ("both", None)):
        drafter = drafter or tiny_drafter(target, confidence_temperatures=temperatures)
        serving = DSparkEngine(target, drafter, scheduler=ConfidenceThreshold(0.0))
        greedy = serving.submit(prompt, **GREEDY)
        sampled = serving.submit(prompt, do_sample=True, top_k=1, max_new_tokens=16)
        serving.run()
        seen[name] = [torch.tensor(r.rounds[0].confidence).logit() for r in (greedy, sampled)]
    torch.testing.assert_close(seen["both"][0], seen["raw"][0] / 0.5, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(seen["both"][1], seen["raw"][1] / 2.0, atol=1e-4, rtol=1e-4)


def test_generate_batch_takes_more_than_may_wait_whoever_steps():
    target, batch = tiny_target("llama"), prompts()
    expected = [plain(target, prompt) for prompt in batch]
    for started in (False, True):
        serving = DSparkEngine(target, tiny_drafter(target), max_batch_size=2, max_waiting=3, scheduler=FixedLength())
        if started:
            serving.start()
        assert equal(serving.generate_batch(batch, **GREEDY), expected)
        serving.close()
