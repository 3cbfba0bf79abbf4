"""A visitor's run through the engine: what is shown, what ends it, and what never reaches the page as an exception."""

import dataclasses
import functools
import html
import pickle
import re
import threading
import time

import pytest
import torch

from hf_dspark import SPSProfile
from hf_dspark.sps_profile import VerifyPoint
from orders import MOST_PROMPT_CHARACTERS, MOST_PROMPT_TOKENS, Order, Visit, Visits
from pairs import Pair, PairError
from schedules import choices
from shelf import Shelf
from tests.drafters import BigramPair
from tests.tiny import tiny_target
from tests.tokens import byte_tokenizer
from visit import PAUSE_SECONDS, Frame, frames

KEY = ("tiny/target", "tiny/drafter")
PROMPT = "and paragraph"
ATTENTION = 0.08  # of the strength it was drawn with: some drafts stand, some fall
KEPT = re.compile(r"<span class=\"\w\"[^>]*>([^<]*)</span>")
PROFILE = SPSProfile(
    5, (VerifyPoint(1, 1, 0, (0.004,)), VerifyPoint(6, 1, 0, (0.005,)), VerifyPoint(48, 8, 0, (0.03,)))
)


def tiny_pair(key=KEY):
    """A random target, a drafter that knows it only without its attention, a tokenizer that splits characters."""
    if not hasattr(tiny_pair, "models"):
        target = tiny_target("qwen3", vocab_size=72, max_position_embeddings=2048)  # nobody else's: it is changed here
        attention = [layer.self_attn.o_proj.weight.data.clone() for layer in target.model.layers]
        drafter = BigramPair(target).drafter
        for layer, weight in zip(target.model.layers, attention, strict=True):
            layer.self_attn.o_proj.weight.data.copy_(ATTENTION * weight)
        tiny_pair.models = (target, byte_tokenizer(), drafter.with_options(sps_profile=PROFILE))
    return Pair(key, *tiny_pair.models)


def load_tiny(key, say):
    if key == ("nobody/target", "nobody/drafter"):
        raise PairError("The Hub cannot be reached from here.")
    say("loading the tiny pair")
    return tiny_pair(key)


@pytest.fixture
def shelf(monkeypatch):
    monkeypatch.setattr("visit.PAUSE_SECONDS", 0.02)  # between frames; nobody watches
    shelf = Shelf(load_tiny, answers_at_once=4, most_waiting=2)
    yield shelf
    shelf.close()


class Steps(list):
    """When steps of the target began, and how long each of them waits."""

    seconds = 0.01


@pytest.fixture
def slow():
    """Makes steps of the tiny target take a while."""
    plain_ids(1)  # while it is still quick
    target, steps = tiny_pair().target, Steps()

    def wait(*_):
        steps.append(time.perf_counter())
        time.sleep(steps.seconds)

    hook = target.model.layers[0].register_forward_pre_hook(wait)
    yield steps
    hook.remove()


def order(**changes):
    return dataclasses.replace(Order(PROMPT, KEY, "auto", max_new_tokens=24), **changes)


def served(shelf, wanted, visit=None, **options):
    return list(frames(shelf, wanted, visit or Visit(), **options))


def text_of(panel):
    """The kept text of a panel, as a browser would read it."""
    return "".join(html.unescape(text) for text in KEPT.findall(panel))


def words_of(page):
    return html.unescape(re.sub(r"<[^>]*>", " ", page))


@functools.cache
def longest_plain_ids(prompt):
    pair = tiny_pair()
    inputs = pair.tokenizer(prompt, return_tensors="pt")
    with torch.no_grad():
        out = pair.target.generate(input_ids=inputs["input_ids"], do_sample=False, max_new_tokens=512)
    return out[0, inputs["input_ids"].shape[1] :].tolist()


def plain_ids(num_tokens, prompt=PROMPT):
    """What plain greedy decoding writes; a shorter answer is the beginning of a longer one."""
    return longest_plain_ids(prompt)[:num_tokens]


def plain_text(num_tokens, prompt=PROMPT):
    return tiny_pair().tokenizer.decode(plain_ids(num_tokens, prompt), skip_special_tokens=True)


def test_the_last_frame_shows_the_whole_text_and_says_what_happened(shelf):
    *_, last = served(shelf, order(max_new_tokens=64, scheduler="fixed:5"))
    assert text_of(last.answer) == plain_text(64)
    assert "done · 64 tokens" in last.answer and PROMPT in last.answer
    assert "the first came with reading the prompt, the other 63 took" in words_of(last.summary)
    assert last.charts.count("<svg") == 4 and last.plain == ""
    assert {"a", "c"} <= set(re.findall(r'<span class="(\w)"', last.answer)), "accepted drafts and corrections"


def test_the_text_grows_frame_by_frame(shelf, slow):
    texts = [text_of(frame.answer) for frame in served(shelf, order(max_new_tokens=48))]
    assert len(set(texts)) > 3
    assert all(later.startswith(earlier) for earlier, later in zip(texts, texts[1:], strict=False))


def test_every_frame_survives_pickling_and_is_words_alone(shelf):
    for frame in served(shelf, order(compare=True)):
        assert pickle.loads(pickle.dumps(frame)) == frame
        assert all(isinstance(getattr(frame, field.name), str) for field in dataclasses.fields(Frame))
    assert pickle.loads(pickle.dumps(order())) == order(), "orders go to the process that has the GPU"


def test_a_long_run_is_at_most_20_frames_a_second_of_bounded_size(shelf, monkeypatch):
    monkeypatch.setattr("visit.PAUSE_SECONDS", PAUSE_SECONDS)
    began, shown = time.perf_counter(), []
    for frame in frames(shelf, order(max_new_tokens=512), Visit(), most_new_tokens=512):
        shown.append((time.perf_counter(), frame))
    assert len(shown) > 3 and len(shown) / (time.perf_counter() - began) <= 20
    gaps = [later - earlier for (earlier, _), (later, _) in zip(shown, shown[1:], strict=False)]
    assert min(gaps) >= 0.05
    assert max(len(frame.answer) for _, frame in shown[:-1]) < 32_000
    assert len(shown[-1][1].answer) < 160_000 and max(len(frame.charts) for _, frame in shown) < 40_000
    assert text_of(shown[-1][1].answer) == plain_text(512)


def test_side_by_side_the_plain_text_is_found_to_be_the_same(shelf):
    *_, last = served(shelf, order(compare=True))
    assert text_of(last.plain) == text_of(last.answer) == plain_text(24)
    assert "the same text, token for token" in last.summary and "tokens/s with drafts" in last.summary
    assert "Other visitors" not in last.summary


def test_side_by_side_sampled_texts_are_not_called_different(shelf):
    *_, last = served(shelf, order(compare=True, temperature=1.0))
    assert "distribution" in last.summary and "another text" not in last.summary


def test_a_seed_repeats_a_sampled_text(shelf):
    texts = {
        seed: [text_of(served(shelf, order(temperature=1.5, seed=seed))[-1].answer) for _ in range(2)]
        for seed in (1, 2)
    }
    assert texts[1][0] == texts[1][1] != texts[2][0]


@pytest.mark.parametrize("word", [word for _, word in choices(5)])
def test_every_scheduler_gives_the_same_greedy_text(shelf, word):
    *_, last = served(shelf, order(scheduler=word))
    assert text_of(last.answer) == plain_text(24)
    if word == "fixed:0":
        assert "No draft was checked" in last.summary


def test_stop_ends_a_run_within_a_round(shelf, slow):
    served(shelf, order(max_new_tokens=1))  # the engine is there
    visit, shown, num_rounds = Visit(), [], 0
    for frame in frames(shelf, order(max_new_tokens=256), visit):
        shown.append(frame)
        if not num_rounds and visit.request is not None and len(visit.request.rounds) > 1:
            num_rounds, num_frames = len(visit.request.rounds), len(shown)
            visit.stop()
            steps = len(slow)
    assert num_rounds > 1 and len(visit.request.rounds) <= num_rounds + 1
    assert len(slow) <= steps + 1, "nor does the engine go on with it"
    assert "stopped after" in shown[-1].answer and len(shown) <= num_frames + 2
    assert plain_text(256).startswith(text_of(shown[-1].answer)) and text_of(shown[-1].answer)
    *_, after = served(shelf, order())
    assert text_of(after.answer) == plain_text(24)


def test_stop_between_the_two_runs_leaves_the_second_out(shelf):
    visit = Visit()
    for frame in frames(shelf, order(compare=True), visit):
        if "done ·" in frame.answer:
            visit.stop()
        last = frame
    assert text_of(last.answer) == plain_text(24) and "token for token" not in last.summary


def test_a_visitor_who_leaves_takes_the_request_along(shelf, slow):
    visits = Visits()

    def generate():
        with visits.one("tab") as visit:
            for frame in frames(shelf, order(max_new_tokens=256), visit):
                yield visit, frame

    stream = generate()
    for visit, _ in stream:
        if visit.request is not None and visit.request.state == "running":
            break
    assert visits.by_session
    stream.close()
    assert visit.request.state == "cancelled" and not visits.by_session
    steps = len(slow)
    time.sleep(10 * slow.seconds)
    assert len(slow) <= steps + 1


def test_stopping_a_session_stops_its_runs_alone():
    visits = Visits()
    with visits.one("mine") as first, visits.one("mine") as second, visits.one("other") as third:
        visits.stop("mine")
        visits.stop("nobody")
        assert first.stopped.is_set() and second.stopped.is_set() and not third.stopped.is_set()
    assert not visits.by_session and third.stopped.is_set(), "a visit that has ended is over"


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"prompt": " \n"}, "Write a prompt first"),
        ({"prompt": "a" * (MOST_PROMPT_CHARACTERS + 1)}, f"up to {MOST_PROMPT_CHARACTERS} are taken"),
        ({"prompt": "a" * (MOST_PROMPT_TOKENS + 1)}, f"has {MOST_PROMPT_TOKENS + 1} tokens; up to"),
        ({"max_new_tokens": 257}, "1 to 256 tokens, not 257"),
        ({"max_new_tokens": 0}, "1 to 256 tokens, not 0"),
        ({"temperature": -1.0}, "temperature may be 0"),
        ({"temperature": float("nan")}, "temperature may be 0"),
        ({"scheduler": "fixed:9"}, "'fixed:9' is none of those"),
        ({"key": ("nobody/target", "nobody/drafter")}, "Hub cannot be reached"),
    ],
)
def test_what_is_not_served_is_refused_in_words(shelf, changes, words):
    *_, last = served(shelf, order(**changes))
    assert 'role="alert"' in last.answer and words in words_of(last.answer)
    assert text_of(served(shelf, order())[-1].answer) == plain_text(24), "and the next prompt works"


def test_an_error_in_a_generation_is_shown_and_the_next_prompt_works(shelf):
    served(shelf, order(max_new_tokens=1))
    target, calls = tiny_pair().target, []

    def fail(*_):
        calls.append(1)
        if len(calls) == 12:
            raise RuntimeError("the <machine> is on fire")

    hook = target.model.layers[0].register_forward_pre_hook(fail)
    try:
        *_, last = served(shelf, order(max_new_tokens=64))
    finally:
        hook.remove()
    assert "RuntimeError: the <machine> is on fire" in words_of(last.answer) and "<machine>" not in last.answer
    assert "failed after" in last.answer
    assert plain_text(64).startswith(text_of(last.answer)) and text_of(last.answer), "what there was stays"
    assert text_of(served(shelf, order())[-1].answer) == plain_text(24)


def test_the_comparison_says_when_others_were_served(shelf, slow):
    with shelf.using(KEY, "auto") as service:
        other = service.engine.submit(torch.tensor([[5, 6]]), max_new_tokens=1000, do_sample=False)
        *_, last = served(shelf, order(compare=True))
        other.cancel()
    assert "Other visitors were served meanwhile" in last.summary


def test_the_visitor_is_told_what_takes_so_long():
    gate = threading.Event()

    def load(key, say):
        say("loading something large")
        gate.wait(10)
        return tiny_pair(key)

    shelf = Shelf(load)
    stream = frames(shelf, order(), Visit())
    try:
        assert "loading something large" in next(stream).answer
        gate.set()
        *_, last = stream
        assert text_of(last.answer) == plain_text(24)
    finally:
        shelf.close()


def test_one_who_leaves_while_models_load_holds_nothing():
    gate = threading.Event()

    def load(key, say):
        gate.wait(10)
        return tiny_pair(key)

    shelf = Shelf(load)
    visit = Visit()
    stream = frames(shelf, order(), visit)
    next(stream)
    visit.stop()
    assert "Stopped" in list(stream)[-1].answer, "without waiting for the models"
    gate.set()
    with shelf.using(KEY, "auto") as service:
        for _ in range(100):
            if service.users == 1:
                break
            time.sleep(0.01)
        assert service.users == 1
    shelf.close()
