"""What goes wrong with one request of an engine stays with it; what goes wrong with a round is over with the round."""

import itertools
from contextlib import contextmanager

import pytest
import torch
from transformers import TextIteratorStreamer
from transformers.generation.streamers import BaseStreamer

from hf_dspark import DSparkEngine, FixedLength, RequestCancelled
from hf_dspark.decoding import DecodingLoop
from tests.drafters import AUTOREGRESSIVE, assert_drafted, tiny_drafter
from tests.engines import equal, knowing, plain, prompts
from tests.test_engine_sampling import seeded, slow_text
from tests.tiny import tiny_target
from tests.tokens import byte_tokenizer

GREEDY = {"do_sample": False, "max_new_tokens": 16}


class Mishap(RuntimeError):
    """What the tests' own code raises."""


class Breaking:
    """A processor, criterion or callback that fails at its n-th call, and at every later one."""

    def __init__(self, at):
        self._calls, self._at = itertools.count(), at

    def __call__(self, ids=None, scores=None):
        if next(self._calls) >= self._at:
            raise Mishap(f"call {self._at}")
        return scores if scores is not None else torch.tensor([False])


class BreakingStreamer(BaseStreamer):
    def __init__(self, at, at_end=False):
        self._left, self._at_end = at, at_end

    def put(self, value):
        self._left -= 1
        if self._left < 0:
            raise Mishap("put")

    def end(self):
        if self._at_end:
            raise Mishap("end")


def breakages():
    sampled = {"do_sample": True, "max_new_tokens": 16}
    return {
        "processor of the first token": {"logits_processor": [Breaking(0)]},
        "processor of a draft": {"logits_processor": [Breaking(1)]},
        "processor of a later draft": {"logits_processor": [Breaking(3)]},
        "processor of a verification": {"logits_processor": [Breaking(7)]},
        "processor while sampling": {"logits_processor": [Breaking(2)]} | sampled,
        "processor while sampling with a seed": {"logits_processor": [Breaking(8)], "generator": seeded(1)} | sampled,
        "criterion at the first token": {"stopping_criteria": [Breaking(0)]},
        "criterion in a round": {"stopping_criteria": [Breaking(3)]},
        "callback": {"on_round": Breaking(1)},
        "streamer": {"streamer": BreakingStreamer(3)},
        "end of a streamer": {"streamer": BreakingStreamer(99, at_end=True)},
    }


ALONE = ["processor while sampling", "processor while sampling with a seed", "callback"]


@pytest.mark.parametrize(("name", "alone"), [(n, False) for n in breakages()] + [(n, True) for n in ALONE])
def test_an_error_of_one_request_ends_it_and_no_other(name, alone):
    target, (prompt, *others) = tiny_target("llama"), prompts((5, 9, 4))
    expected = [plain(target, other) for other in others]
    drawn = slow_text(target, others[0], int(torch.randint(1 << 62, (), generator=seeded(2))), 16)
    view = knowing(tiny_drafter(target), [*expected, drawn])
    serving = DSparkEngine(target, view, max_batch_size=4, scheduler=FixedLength())
    broken = serving.submit(prompt, **GREEDY | breakages()[name])
    requests = [] if alone else [serving.submit(other, **GREEDY) for other in others]
    sampled = serving.submit(others[0], do_sample=True, max_new_tokens=16, top_k=0, generator=seeded(2))
    serving.run()
    assert broken.state == "failed" and isinstance(broken.error, Mishap)
    for read in (broken.result, lambda: list(broken)):
        with pytest.raises(Mishap):
            read()
    assert equal([r.result() for r in requests], expected[: len(requests)])
    assert torch.equal(sampled.result(), drawn)
    assert_drafted(sampled.rounds)


@contextmanager
def poisoned(target, token_id):
    """Makes everything the target computes from a token nan."""

    def spoil(module, args, output):
        return torch.where((args[0] == token_id)[..., None], float("nan"), output)

    handle = target.get_input_embeddings().register_forward_hook(spoil)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("kind", [{}, AUTOREGRESSIVE], ids=["parallel", "autoregressive"])
@pytest.mark.parametrize("where", ["prompt", "round"])
def test_nan_in_the_logits_of_a_request_ends_it_alone_and_leaves_nothing_in_its_slot(where, kind):
    target, batch = tiny_target("llama"), prompts((5, 9, 4, 6, 3, 7))
    expected = [plain(target, prompt, max_new_tokens=24) for prompt in batch]
    bad = int(expected[0][0, 3]) if where == "prompt" else int(expected[0][0, 5 + 4])
    clean = [n for n in range(1, len(batch)) if bad not in expected[n][0]]
    assert len(clean) >= 2
    options = {"do_sample": False, "max_new_tokens": 24}
    with poisoned(target, bad):
        # Only right drafts: a wrong one may be the very token. The drafter itself works on nan.
        view = knowing(tiny_drafter(target, **kind), [expected[n] for n in clean], right=5)
        serving = DSparkEngine(target, view, max_batch_size=2, scheduler=FixedLength())
        first = serving.submit(batch[0], **options)
        requests = [serving.submit(batch[n], **options) for n in clean for _ in range(2)]
        serving.run()
    with pytest.raises(ValueError, match="nan in the prefill" if where == "prompt" else "nan in round"):
        first.result()
    assert equal([r.result() for r in requests], [expected[n] for n in clean for _ in range(2)])


def test_a_sampling_neighbour_survives_nan_in_a_slot_it_takes_over():
    target, batch = tiny_target("llama"), prompts((5, 9))
    bad = int(plain(target, batch[0])[0, 8])
    others = [p for p in prompts((9, 6, 4, 8), seed=5) if bad not in p]
    with poisoned(target, bad):
        serving = DSparkEngine(target, tiny_drafter(target), max_batch_size=2, scheduler=FixedLength())
        broken = serving.submit(batch[0], **GREEDY)
        kept = [
            serving.submit(p, do_sample=True, suppress_tokens=[bad], max_new_tokens=20)
            for p in others
            for _ in range(2)
        ]
        serving.run()
    assert broken.state == "failed"
    assert [r.state for r in kept] == ["finished"] * len(kept)


def test_a_round_that_fails_takes_those_in_it_and_no_others(monkeypatch):
    target, batch = tiny_target("llama"), prompts((5, 9, 4, 6))
    serving = DSparkEngine(target, tiny_drafter(target), max_batch_size=2, scheduler=FixedLength())
    requests = [serving.submit(prompt, **GREEDY) for prompt in batch]
    forward, calls = DecodingLoop._forward, itertools.count()

    def failing(self, tokens):
        if next(calls) == 3:
            raise torch.OutOfMemoryError("made up")
        return forward(self, tokens)

    monkeypatch.setattr(DecodingLoop, "_forward", failing)
    serving.run()
    assert [r.state for r in requests] == ["failed", "failed", "finished", "finished"]
    for failed in requests[:2]:
        with pytest.raises(torch.OutOfMemoryError):
            failed.result()
    assert equal([r.result() for r in requests[2:]], [plain(target, prompt) for prompt in batch[2:]])


def test_an_interrupted_round_fails_its_requests_and_is_passed_on():
    target, (prompt, other) = tiny_target("llama"), prompts((5, 9))

    def interrupt(decoding_round):
        raise KeyboardInterrupt

    serving = DSparkEngine(target, tiny_drafter(target), scheduler=FixedLength())
    broken = serving.submit(prompt, on_round=interrupt, **GREEDY)
    with pytest.raises(KeyboardInterrupt):
        serving.run()
    assert isinstance(broken.error, KeyboardInterrupt)
    assert equal(serving.generate_batch([other], **GREEDY), [plain(target, other)])


def test_a_failing_callback_of_the_steps_is_logged_and_no_more(caplog):
    target, batch = tiny_target("llama"), prompts((5, 9))
    serving = DSparkEngine(target, tiny_drafter(target), scheduler=FixedLength())
    serving.on_step = Breaking(0)
    assert equal(serving.generate_batch(batch, **GREEDY), [plain(target, prompt) for prompt in batch])


def test_the_reader_of_a_stream_is_told_what_failed():
    target, (prompt,) = tiny_target("llama"), prompts((5,))
    streamer = TextIteratorStreamer(byte_tokenizer(), skip_prompt=True, timeout=10)
    serving = DSparkEngine(target, tiny_drafter(target), scheduler=FixedLength())
    serving.submit(prompt, streamer=streamer, logits_processor=[Breaking(4)], **GREEDY)
    serving.run()
    with pytest.raises(RuntimeError, match="generation failed while streaming: call 4"):
        list(streamer)


def test_a_reader_that_waits_on_after_an_error_keeps_its_variables():
    target, (prompt,) = tiny_target("llama"), prompts((5,))
    serving = DSparkEngine(target, tiny_drafter(target), scheduler=FixedLength())
    broken = serving.submit(prompt, logits_processor=[Breaking(4)], **GREEDY)

    def story():
        try:
            yield from broken
        except Mishap as error:
            yield f"error: {error}"
            yield "goodbye"

    reader, told, end = story(), [], broken.end

    def read_at_once(*args):
        ended = end(*args)
        told.append(next(item for item in reader if isinstance(item, str)))  # before the step is over
        return ended

    broken.end = read_at_once
    serving.run()
    assert told == ["error: call 4"] and next(reader) == "goodbye"


# ------------------------------------------------------------------------------------------------------------- cancel


@pytest.mark.parametrize("when", ["while waiting", "while its prompt is read", "while running", "in its last round"])
def test_a_streamer_that_fails_at_the_end_of_a_cancelled_request_hurts_nobody(when):
    target, (long, other) = tiny_target("llama"), prompts((30, 9))
    serving = DSparkEngine(target, tiny_drafter(target), scheduler=FixedLength(2), max_batch_size=2, prefill_chunk=4)
    running, streamer = serving.submit(other, **GREEDY), BreakingStreamer(99, at_end=True)
    serving.step()
    prompt = long if when == "while its prompt is read" else other
    cancelled = serving.submit(prompt, streamer=streamer, **GREEDY)
    if when == "in its last round":

        def put(value):
            if len(cancelled.rounds) == 1:
                cancelled.cancel()
                raise Mishap("put")

        streamer.put = put
    elif when != "while waiting":
        while cancelled.state != {"while its prompt is read": "prefilling", "while running": "running"}[when]:
            serving.step()
    if when != "in its last round":
        assert cancelled.cancel() is True
    serving.run()
    assert cancelled.state == "cancelled"
    assert torch.equal(running.result(), plain(target, other))
    serving.close()


def test_closing_cancels_all_though_a_streamer_fails():
    target, (prompt,) = tiny_target("llama"), prompts((9,))
    serving = DSparkEngine(target, tiny_drafter(target), scheduler=FixedLength(), max_batch_size=1)
    streamers = (None, BreakingStreamer(99, at_end=True), None)
    requests = [serving.submit(prompt, streamer=streamer, **GREEDY) for streamer in streamers]
    serving.close()
    assert [request.state for request in requests] == ["cancelled"] * 3


def test_cancelling_works_in_every_state_and_hurts_nobody():
    target, (long, prompt, *others) = tiny_target("llama"), prompts((60, 5, 9, 4, 7, 3))
    expected = [plain(target, other) for other in others]
    view = knowing(tiny_drafter(target), expected)
    serving = DSparkEngine(target, view, max_batch_size=3, scheduler=FixedLength(), prefill_chunk=4)
    running = [serving.submit(p, **GREEDY) for p in (prompt, others[0])]
    serving.step()
    prefilling = serving.submit(long, **GREEDY)
    waiting = serving.submit(long, **GREEDY)
    serving.step()
    states = [r.state for r in (running[0], prefilling, waiting)]
    assert states == ["running", "prefilling", "waiting"] and serving.num_running == 3 and serving.num_waiting == 1
    so_far = running[0].new_ids
    for request in (running[0], prefilling, waiting):
        assert request.cancel() is True and request.cancel() is False
        assert request.state == "cancelled" and request.done
    assert serving.num_waiting == 0
    rest = [serving.submit(p, **GREEDY) for p in others[1:]]
    serving.step()
    assert serving.num_running == 2, "their places are free with the next step: one still runs, one comes"
    serving.run()
    assert equal([r.result() for r in (running[1], *rest)], expected)
    with pytest.raises(RequestCancelled, match="cancelled after") as raised:
        running[0].result()
    assert raised.value.sequences.tolist() == [[*prompt.tolist(), *so_far]]
    assert running[0].new_ids == so_far and [r.step for r in running[0]] == [0, 1]
    assert list(prefilling) == list(waiting) == [] and prefilling.first_id is None
    assert running[1].cancel() is False and running[1].state == "finished"


@pytest.mark.parametrize("started", [False, True], ids=["while waiting", "while running"])
def test_the_stream_of_a_cancelled_request_ends(started):
    target, (prompt,) = tiny_target("llama"), prompts((5,))
    streamer = TextIteratorStreamer(byte_tokenizer(), skip_prompt=True, timeout=10)
    serving = DSparkEngine(target, tiny_drafter(target), scheduler=FixedLength())
    request = serving.submit(prompt, streamer=streamer, do_sample=False, max_new_tokens=400)
    if started:
        serving.step()
    request.cancel()
    if started:
        serving.step()
    assert len("".join(streamer)) < 400


def test_a_callback_may_cancel_and_submit_but_not_step():
    target, (prompt, other) = tiny_target("llama"), prompts((5, 9))
    serving = DSparkEngine(target, tiny_drafter(target), scheduler=FixedLength())
    later = []

    def callback(decoding_round):
        if not later:
            later.append(serving.submit(other, **GREEDY))
        elif decoding_round.step == 2:
            cancelled.cancel()

    def stepping(decoding_round):
        serving.step()

    cancelled = serving.submit(prompt, on_round=callback, **GREEDY)
    refused = serving.submit(prompt, on_round=stepping, **GREEDY)
    serving.run()
    assert cancelled.state == "cancelled" and len(cancelled.rounds) == 3
    assert equal([later[0].result()], [plain(target, other)])
    with pytest.raises(RuntimeError, match="from within a step"):
        refused.result()
