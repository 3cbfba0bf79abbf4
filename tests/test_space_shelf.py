"""What visitors share: pairs, engines and the places in them; and the words that choose between schedulers."""

# ruff: noqa: F811 (fixtures of another module are arguments here)
import threading
import time

import pytest
import torch

from hf_dspark import ConfidenceThreshold, FixedLength
from hf_dspark.auto import Auto
from pairs import PairError
from schedules import choices, scheduler_of
from shelf import PLAIN, Shelf
from tests.test_space_visit import KEY, order, plain_text, served, shelf, slow, text_of, tiny_pair  # noqa: F401
from visit import PAUSE_SECONDS


def test_a_full_engine_asks_to_come_back(shelf, slow):
    with shelf.using(KEY, "auto") as service:
        ids = torch.tensor([[5, 6, 7]])
        busy = [service.engine.submit(ids, max_new_tokens=512, do_sample=False) for _ in range(2)]
        while len(busy) < shelf.answers_at_once + shelf.most_waiting:
            if service.engine.num_waiting < shelf.most_waiting:
                busy.append(service.engine.submit(ids, max_new_tokens=512, do_sample=False))
            time.sleep(0.01)
        while service.engine.num_waiting < shelf.most_waiting:
            time.sleep(0.01)
            if service.engine.num_running < shelf.answers_at_once:
                continue
            busy.append(service.engine.submit(ids, max_new_tokens=512, do_sample=False))
        *_, last = served(shelf, order())
        assert "try again in a minute" in last.answer and 'role="status"' in last.answer
        for request in busy:
            request.cancel()
    assert text_of(served(shelf, order())[-1].answer) == plain_text(24)


def test_visitors_share_one_engine(shelf, slow):
    results = {}

    def visit(name):
        results[name] = served(shelf, order(max_new_tokens=64))

    visitors = [threading.Thread(target=visit, args=(name,)) for name in ("first", "second")]
    for visitor in visitors:
        visitor.start()
    for visitor in visitors:
        visitor.join()
    assert {text_of(shown[-1].answer) for shown in results.values()} == {plain_text(64)}
    with shelf.using(KEY, "auto") as service:
        assert 2 in {load.num_running for load in service.ledger.snapshot().loads}
    assert len(shelf._services) == 1
    assert any("2 at once" in frame.charts for shown in results.values() for frame in shown)


def test_nobody_waits_for_the_models_of_others():
    gate = threading.Event()

    def load(key, say):
        if key != KEY:
            gate.wait(20)
        return tiny_pair(key)

    shelf = Shelf(load)
    served(shelf, order(max_new_tokens=1))
    loading = threading.Thread(target=shelf.pair, args=(("large/target", "large/drafter"),))
    loading.start()
    try:
        assert text_of(served(shelf, order())[-1].answer) == plain_text(24)
        assert loading.is_alive()
    finally:
        gate.set()
        loading.join()
        shelf.close()


def test_engines_not_in_use_are_closed_and_those_in_use_are_not(shelf, monkeypatch):
    monkeypatch.setattr("shelf.MOST_SERVICES", 2)
    with shelf.using(KEY, "auto") as kept:
        for word in ("fixed:1", "fixed:2", PLAIN):
            with shelf.using(KEY, word):
                pass
        assert len(shelf._services) <= 3 and shelf.ready(KEY, "auto") and not shelf.ready(KEY, "fixed:1")
        assert kept.engine.generate_batch([torch.tensor([5, 6])], max_new_tokens=2, do_sample=False)
    assert text_of(served(shelf, order(scheduler="fixed:1"))[-1].answer) == plain_text(24), "made anew when needed"


def test_pairs_that_nobody_uses_make_room(shelf, monkeypatch):
    monkeypatch.setattr("shelf.MOST_PAIRS", 2)
    keys = [("a/target", str(number)) for number in range(3)]
    with shelf.using(keys[0], "auto"):
        for key in keys[1:]:
            with shelf.using(key, "auto"):
                pass
        assert set(shelf._pairs) == {keys[0], keys[2]}
    assert not shelf.ready(keys[1], "auto")


def test_a_pair_whose_service_is_being_made_is_not_dropped(shelf, monkeypatch):
    monkeypatch.setattr("shelf.MOST_PAIRS", 1)
    known = shelf._known

    def meanwhile(key, word):  # between its loading and its start, another visitor loads something else
        monkeypatch.setattr(shelf, "_known", known)
        shelf.pair(("a/target", "another"))
        return known(key, word)

    monkeypatch.setattr(shelf, "_known", meanwhile)
    with shelf.using(KEY, "auto") as service:
        assert shelf.pair(KEY) is service.pair, "it is not loaded again"
    shelf.pair(("a/target", "third"))
    assert KEY not in shelf._pairs, "but it makes room when it is used no longer"


def test_a_pair_dropped_just_after_it_was_loaded_is_still_handed_out(shelf, monkeypatch):
    monkeypatch.setattr(shelf, "_drop_pairs", lambda *, besides: shelf._pairs.clear())
    assert shelf.pair(KEY).key == KEY


def test_a_pair_that_cannot_be_loaded_leaves_the_others(shelf):
    before = shelf.pair(KEY)
    with pytest.raises(PairError, match="reached"):
        shelf.pair(("nobody/target", "nobody/drafter"))
    assert shelf.pair(KEY) is before


def test_after_a_fork_engines_are_made_anew(shelf, monkeypatch):
    served(shelf, order(max_new_tokens=1))
    before = shelf._services[KEY, "auto"]
    monkeypatch.setattr("shelf.os.getpid", lambda: -1)
    assert not shelf.ready(KEY, "auto")
    assert text_of(served(shelf, order())[-1].answer) == plain_text(24)
    assert shelf._services[KEY, "auto"] is not before
    before.engine.close()


def test_words_are_schedulers():
    assert scheduler_of("auto", 5) == Auto() and scheduler_of("fixed:5", 5) == FixedLength(5)
    assert scheduler_of("threshold:0.5", 5) == ConfidenceThreshold(0.5)
    words = [word for _, word in choices(2, confidence=False)]
    assert words == ["auto", "fixed:0", "fixed:1", "fixed:2"], "the others need a confidence head"
    with pytest.raises(ValueError, match="none of those"):
        scheduler_of("threshold:0.55", 5)
    assert PAUSE_SECONDS >= 0.05, "20 frames a second"
