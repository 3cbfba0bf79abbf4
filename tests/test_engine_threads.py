"""The engine among threads: submitting, waiting, stepping, closing; nothing hangs."""

import gc
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import pytest
import torch

from hf_dspark import DSparkEngine, EngineFull, FixedLength, Request, RequestCancelled, engine_thread
from tests.drafters import tiny_drafter
from tests.engines import equal, plain, prompts
from tests.tiny import tiny_target

GREEDY = {"do_sample": False, "max_new_tokens": 16}
ENDLESS = {"do_sample": False, "max_new_tokens": 400}


def an_engine(**options):
    target = tiny_target("llama")
    return DSparkEngine(target, tiny_drafter(target), **{"scheduler": FixedLength()} | options)


def in_threads(*functions):
    """Runs functions at the same time; what they return, or raise."""
    results = [None] * len(functions)

    def run(number, function):
        try:
            results[number] = function()
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


def test_eight_threads_submit_and_each_gets_its_own_text():
    batch = prompts([3 + n for n in range(16)])
    with an_engine(max_batch_size=4) as serving:

        def client(number):
            mine = [serving.submit(batch[n], **GREEDY) for n in (number, number + 8)]
            return [request.result(timeout=60) for request in mine]

        results = in_threads(*(lambda n=n: client(n) for n in range(8)))
    for number, own in enumerate(results):
        assert equal(own, [plain(serving.target, batch[n]) for n in (number, number + 8)])


def test_rounds_can_be_followed_from_another_thread_as_they_happen():
    (prompt,) = prompts((6,))
    with an_engine() as serving:
        request = serving.submit(prompt, **GREEDY)
        seen = []

        def follow():
            for decoding_round in request:
                seen.append((decoding_round, request.done))
            return [request.first_id, *(token for r, _ in seen for token in r.committed_ids)]

        first, second = in_threads(follow, lambda: list(request))
        assert first == request.new_ids == plain(serving.target, prompt)[0, 6:].tolist()
        assert second == [r for r, _ in seen] == request.rounds
    times = [request.submitted_at, request.started_at, request.first_token_at, request.finished_at]
    assert times == sorted(times)


def test_two_threads_may_run_the_same_engine():
    batch = prompts()
    serving = an_engine(max_batch_size=3)
    requests = [serving.submit(prompt, **GREEDY) for prompt in batch]
    in_threads(serving.run, serving.run, serving.run)
    serving.run()  # one may have left just before the last came
    assert equal([r.result() for r in requests], [plain(serving.target, prompt) for prompt in batch])


def test_a_full_engine_says_how_many_wait_and_what_to_do():
    serving = an_engine(max_batch_size=1, max_waiting=2)
    (prompt,) = prompts((6,))
    requests = [serving.submit(prompt, **GREEDY) for _ in range(2)]
    with pytest.raises(EngineFull, match=r"2 requests wait already, and max_waiting=2.*start\(\) it, or call run\(\)"):
        serving.submit(prompt, **GREEDY)
    serving.step()
    requests.append(serving.submit(prompt, **GREEDY))
    requests[1].cancel()
    requests.append(serving.submit(prompt, **GREEDY))
    with pytest.raises(EngineFull):
        serving.submit(prompt, **GREEDY)
    serving.run()
    assert [r.id for r in requests] == [0, 1, 2, 3]
    assert [r.state for r in requests] == ["finished", "cancelled", "finished", "finished"]


def test_waiting_has_a_limit_and_says_where_the_request_is():
    serving = an_engine()
    request = serving.submit(prompts((6,))[0], **GREEDY)
    with pytest.raises(TimeoutError, match="still waiting.*start"):
        request.result(timeout=0.01)
    serving.run()
    assert request.result(timeout=0).shape == (1, 22)


def test_closing_cancels_what_is_left_and_wakes_who_waits():
    serving = an_engine(max_batch_size=2, prefill_chunk=4).__enter__()
    batch = prompts((5, 6, 7, 8))
    requests = [serving.submit(prompt, **ENDLESS) for prompt in batch]
    next(iter(requests[0]))

    def close():
        time.sleep(0.05)
        serving.close()

    *results, _ = in_threads(*(request.result for request in requests), close)
    assert all(isinstance(result, RequestCancelled) for result in results)
    assert results[0].sequences.shape[1] > 6 and serving.num_running == serving.num_waiting == 0
    assert not serving._bell.thread.is_alive() and serving._work._loop is None
    serving.close()
    assert serving.step() is False
    for refused in (serving.start, lambda: serving.submit(batch[0], **GREEDY)):
        with pytest.raises(RuntimeError, match="closed"):
            refused()


def test_closing_an_engine_that_nobody_runs_cancels_too():
    serving = an_engine(max_batch_size=1)
    requests = [serving.submit(prompt, **ENDLESS) for prompt in prompts((5, 6))]
    serving.step()
    serving.close()
    assert [r.state for r in requests] == ["cancelled", "cancelled"] and len(requests[0].new_ids) > 0
    assert serving.num_running == 0


def test_closing_cancels_a_request_on_its_way_from_the_queue_to_its_place(monkeypatch):
    begin, taken, go_on = Request.begin, threading.Event(), threading.Event()

    def slowly(request):
        taken.set()
        assert go_on.wait(30)
        return begin(request)

    monkeypatch.setattr(Request, "begin", slowly)
    serving = an_engine().__enter__()
    request = serving.submit(prompts((9,))[0], **ENDLESS)
    assert taken.wait(30)
    closing = threading.Thread(target=serving.close)
    closing.start()
    while not serving._bell.thread.is_alive() or not serving._bell.closed:
        time.sleep(0.001)
    time.sleep(0.05)  # close() has seen who is there by now
    go_on.set()
    closing.join(30)
    assert request.state == "cancelled" and serving._work._loop is None


@pytest.mark.parametrize("blocked", [False, True], ids=["from a callback", "while a callback blocks"])
def test_closing_never_hangs(blocked, monkeypatch):
    monkeypatch.setattr(engine_thread.Bell, "PATIENCE_SECONDS", 2.0)
    released, entered = threading.Event(), threading.Event()
    serving = an_engine()

    def callback(decoding_round):
        entered.set()
        if blocked:
            released.wait(30)
        else:
            serving.close()

    serving.start()
    request = serving.submit(prompts((6,))[0], on_round=callback, **ENDLESS)
    assert entered.wait(30)
    began = time.perf_counter()
    serving.close()
    assert time.perf_counter() - began < 3.6, "one deadline, for the thread and the step"
    with pytest.raises(RequestCancelled):
        request.result(timeout=10)
    released.set()
    serving._bell.thread.join(30)
    assert not serving._bell.thread.is_alive()


def test_an_idle_thread_sleeps_and_one_whose_engine_is_gone_ends():
    serving = an_engine().__enter__()
    serving.generate_batch(prompts((5, 9)), **GREEDY)
    thread, gone = serving._bell.thread, weakref.ref(serving)
    time.sleep(0.1)
    began = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - began < 0.15, "no busy waiting"
    del serving
    gc.collect()
    thread.join(10)
    assert gone() is None and not thread.is_alive()


def test_the_interpreter_exits_with_an_engine_at_work():
    script = """
        import torch
        from hf_dspark import DSparkEngine
        from tests.tiny import tiny_target
        engine = DSparkEngine(tiny_target("llama"), None)
        engine.start()
        request = engine.submit(torch.tensor([5, 6, 7]), do_sample=False, max_new_tokens=100000)
        next(iter(request))
        print(len(request.new_ids) > 0, flush=True)
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stdout) == (0, "True\n"), result.stderr


def test_generation_elsewhere_on_the_same_models_goes_on_meanwhile():
    batch = prompts((5, 9, 4, 7))
    with an_engine() as serving:
        drafter = serving.drafter

        def beside():
            return [
                serving.target.generate(prompt[None], assistant_model=drafter, **GREEDY)
                for prompt in batch
                for _ in "ab"
            ]

        results, texts = in_threads(lambda: serving.generate_batch(batch * 2, **GREEDY), beside)
    expected = [plain(serving.target, prompt) for prompt in batch]
    assert equal(results, expected * 2)
    assert torch.equal(texts[0], expected[0]) and equal(texts[::2], expected)
