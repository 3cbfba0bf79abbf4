"""Hundreds of mixed requests with cancels, stops and errors: nothing is lost or given twice, and memory stays flat."""

import gc
import random

import pytest
import torch

from hf_dspark import DSparkEngine, FixedLength
from tests.drafters import tiny_drafter
from tests.engines import knowing, plain, prompts
from tests.test_engine_sampling import slow_text
from tests.tiny import tiny_target


class Broken(RuntimeError):
    pass


def break_at(width):
    def processor(ids, scores):
        if ids.shape[1] >= width:
            raise Broken
        return scores

    return processor


def live_bytes():
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return len(tensors), sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def slab_bytes(serving):
    caches = [serving._work._loop.cache, serving._work._loop.session.cache]
    return sum(slab.nbytes for cache in caches for layer in cache.layers for slab in layer.slabs)


@pytest.mark.parametrize(("threaded", "count"), [(False, 60), (True, 200)], ids=["stepped", "own thread"])
def test_mixed_requests_with_cancels_stops_and_errors_are_neither_lost_nor_given_twice(threaded, count):
    target, draws = tiny_target("llama"), random.Random(0)
    batch = prompts([draws.randint(1, 30) for _ in range(10)], seed=3)
    greedy = [plain(target, prompt, max_new_tokens=14) for prompt in batch]
    seeds = [int(torch.randint(1 << 62, (), generator=torch.Generator().manual_seed(n))) for n in range(10)]
    sampled = [slow_text(target, prompt, seed, 14) for prompt, seed in zip(batch, seeds, strict=True)]
    view = knowing(tiny_drafter(target), greedy + sampled, right=2)
    serving = DSparkEngine(target, view, max_batch_size=5, scheduler=FixedLength(), prefill_chunk=8)
    if threaded:
        serving.start()
    told, kinds, requests, plain_texts = {}, [], [], {}

    def tell(decoding_round):
        told.setdefault(decoding_round.row, []).append(decoding_round)

    for _ in range(count):
        which, kind = draws.randrange(10), draws.choice(["greedy", "sampled", "short", "stop", "error", "cancel"])
        options = {"do_sample": False, "max_new_tokens": 14, "on_round": tell}
        if kind == "sampled":
            generator = torch.Generator().manual_seed(which)
            options |= {"do_sample": True, "top_k": 0, "generator": generator}
        elif kind == "short":
            options["max_new_tokens"] = draws.randint(1, 5)
        elif kind == "stop":
            options["eos_token_id"] = int(greedy[which][0, len(batch[which]) + draws.randrange(14)])
        elif kind == "error":
            options["logits_processor"] = [break_at(len(batch[which]) + draws.randrange(12))]
        while serving.num_waiting >= serving.max_waiting // 2:
            serving.step()
        requests.append(serving.submit(batch[which], **options))
        kinds.append((kind, which, options))
        if draws.random() < 0.6:
            serving.step()
        for request, (other, *_) in zip(requests, kinds, strict=True):
            if other == "cancel" and not request.done and draws.random() < 0.2:
                request.cancel()
    if not threaded:
        serving.run()
    for number, (request, (kind, which, options)) in enumerate(zip(requests, kinds, strict=True)):
        assert request.id == number
        if kind == "cancel" and request.state == "cancelled":
            text = greedy[which][0, len(batch[which]) :].tolist()
            assert request.new_ids == text[: len(request.new_ids)]
        elif kind == "error":
            with pytest.raises(Broken):
                request.result(timeout=60)
        else:
            result = request.result(timeout=60)
            if kind == "sampled":
                expected = sampled[which]
            else:
                own = {name: options[name] for name in ("eos_token_id", "max_new_tokens") if name in options}
                key = (which, *sorted(own.items()))
                if key not in plain_texts:
                    plain_texts[key] = plain(target, batch[which], **own)
                expected = plain_texts[key]
            assert torch.equal(result, expected), (number, kind)
        if request.state == "finished":
            told_ids = [token for r in told.get(number, []) for token in r.committed_ids]
            assert request.new_ids == [request.first_id, *told_ids], "every token once, and in order"
            assert told.get(number, []) == request.rounds
    states = [request.state for request in requests]
    assert {"finished", "cancelled", "failed"} == set(states) and states.count("finished") > count // 3
    assert serving.num_running == serving.num_waiting == 0
    serving.close()


def test_memory_stays_flat_over_hundreds_of_requests():
    target = tiny_target("llama")
    serving = DSparkEngine(target, tiny_drafter(target), max_batch_size=3, scheduler=FixedLength(), prefill_chunk=8)
    batch, sizes, slabs = prompts((20, 3, 11, 7)), [], set()
    for number in range(110):  # the engine is never idle, so its caches live on
        while serving.num_waiting > 3:
            serving.step()
        options = {"do_sample": number % 3 == 0, "max_new_tokens": 3 + number % 7}
        if number % 3 == 0 and number % 2 == 0:
            options["generator"] = torch.Generator().manual_seed(number)
        if number % 10 == 0:
            options["logits_processor"] = [break_at(10)]
        request = serving.submit(batch[number % 4], **options)
        if number % 11 == 0:
            request.cancel()
        if number in (40, 109):
            sizes.append(live_bytes())
        if number >= 40:
            slabs.add(slab_bytes(serving))
    (tensors, size), (tensors_later, size_later) = sizes
    assert len(slabs) == 1, "slabs do not grow"
    assert abs(tensors_later - tensors) < 60 and abs(size_later - size) < 0.05 * size
    serving.run()
    assert serving._work._loop is None


def test_errors_that_are_kept_hold_no_tensors_of_their_rounds():
    target, failed, counts = tiny_target("llama"), [], []
    serving = DSparkEngine(target, tiny_drafter(target), max_batch_size=3, scheduler=FixedLength())
    for number in range(24):
        failed.append(serving.submit(prompts((9,))[0], max_new_tokens=9, logits_processor=[break_at(11)]))
        serving.run()
        if number in (8, 23):
            counts.append(live_bytes()[0])
    assert all(isinstance(request.error, Broken) for request in failed)
    assert counts[1] - counts[0] <= 15 * 3, "what a request itself keeps: nothing of its rounds"
