"""An engine's own thread outlives steps that fail, and threads that share a short queue wait for each other."""

import contextlib
import threading
import time

import pytest
import torch

from hf_dspark import EngineFull, engine, engine_work
from hf_dspark.engine_work import EngineWork
from tests.engines import equal, plain, prompts
from tests.test_engine_threads import GREEDY, an_engine, in_threads


@pytest.mark.parametrize("error", [SystemExit, RuntimeError])
def test_the_thread_outlives_a_step_that_fails(error, monkeypatch):
    batch, step, fails = prompts((9, 5, 4)), EngineWork._play_round, [True]

    def failing(work, *args):
        if work.num_admitted and fails:
            raise error(f"made up {fails.pop()}")
        return step(work, *args)

    monkeypatch.setattr(EngineWork, "_play_round", failing)
    serving = an_engine(max_batch_size=1)
    requests = [serving.submit(prompt, **GREEDY) for prompt in batch]
    with serving:
        with pytest.raises(error, match="made up"):
            requests[0].result(timeout=30)
        for request, prompt in zip(requests[1:], batch[1:], strict=True):
            assert torch.equal(request.result(timeout=30), plain(serving.target, prompt))
        assert serving._bell.thread.is_alive()


def test_the_thread_outlives_an_interruption_by_a_callback():
    def leave(decoding_round):
        raise SystemExit("made up")

    batch = prompts((9, 5))
    serving = an_engine(max_batch_size=1)
    left = serving.submit(batch[0], on_round=leave, **GREEDY)
    later = serving.submit(batch[1], **GREEDY)
    with serving:
        with pytest.raises(SystemExit, match="made up"):
            left.result(timeout=30)
        assert torch.equal(later.result(timeout=30), plain(serving.target, batch[1]))


def test_a_queue_that_cannot_be_served_at_all_ends_with_the_error(monkeypatch):
    def never(*args):
        raise MemoryError("made up")

    monkeypatch.setattr(engine_work, "EngineLoop", never)
    with an_engine() as serving:
        requests = [serving.submit(prompt, **GREEDY) for prompt in prompts((9, 5))]
        for request in requests:
            with pytest.raises(MemoryError, match="made up"):
                request.result(timeout=30)


@pytest.mark.parametrize("threaded", [False, True], ids=["stepped", "own thread"])
def test_threads_that_share_a_short_queue_wait_for_each_other(threaded, monkeypatch):
    serving, batch = an_engine(max_batch_size=2, max_waiting=1), prompts([5] * 4)
    submit, together, full = serving.submit, threading.Barrier(2), []
    expected = [plain(serving.target, prompt, max_new_tokens=3) for prompt in batch]

    def at_the_same_time(*args, **kwargs):
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(10)  # both have seen that there is room
        together.abort()
        try:
            return submit(*args, **kwargs)
        except EngineFull:
            full.append(args)
            raise

    monkeypatch.setattr(serving, "submit", at_the_same_time)
    prepare = engine.prepare_request

    def slowly(*args, **kwargs):
        time.sleep(0.05)
        return prepare(*args, **kwargs)

    monkeypatch.setattr(engine, "prepare_request", slowly)
    if threaded:
        serving.start()
    batches = in_threads(*[lambda: serving.generate_batch(batch, do_sample=False, max_new_tokens=3)] * 2)
    serving.close()
    assert full, "one of them was too late at least once"
    assert all(isinstance(texts, list) and equal(texts, expected) for texts in batches)


def test_waiting_for_a_place_that_somebody_else_is_about_to_take_is_no_busy_waiting(monkeypatch):
    serving, (prompt,) = an_engine(max_waiting=1), prompts((5,))
    preparing, go_on, prepare, steps = threading.Event(), threading.Event(), engine.prepare_request, []

    def slowly(*args, **kwargs):
        preparing.set()
        assert go_on.wait(30)
        return prepare(*args, **kwargs)

    monkeypatch.setattr(engine, "prepare_request", slowly)
    turn = serving._work.turn
    monkeypatch.setattr(serving._work, "turn", lambda on_step: (steps.append(1), turn(on_step))[1])

    def refused():
        serving.submit(prompt, num_beams=2, max_new_tokens=4)  # takes no place in the end

    def release():
        assert preparing.wait(30)
        time.sleep(0.1)
        seen = len(steps)
        go_on.set()
        return seen

    def second():
        assert preparing.wait(30)
        return serving.generate_batch([prompt], **GREEDY)

    error, texts, seen = in_threads(refused, second, release)
    assert isinstance(error, ValueError) and equal(texts, [plain(serving.target, prompt)])
    assert seen <= 2
