"""The Space as a client of its API meets it: events stream through gradio's queue, and stopping reaches the engine."""

import os
import pickle
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from orders import Order
from shelf import Shelf
from tests.test_space_visit import KEY, PROMPT, load_tiny, plain_text, text_of, tiny_pair

pytest.importorskip("gradio", reason="needs pip install 'hf-dspark[space]'")
pytestmark = pytest.mark.filterwarnings("ignore:.*no_silent_downcasting")  # gradio's, about its own use of pandas


@pytest.fixture(scope="module")
def space():
    from app import Space

    space = Space(Shelf(load_tiny), key=KEY, num_drafts=5, most_new_tokens=512)
    with space.shelf.using(KEY, "auto"):
        pass
    _, space.url, _ = space.launch(prevent_thread_lock=True, quiet=True, server_name="127.0.0.1")
    yield space
    space.close()


@pytest.fixture
def client(space):
    from gradio_client import Client

    client = Client(space.url, verbose=False)
    yield client
    client.close()


@pytest.fixture
def slow():
    plain_text(1)  # while it is still quick
    hook = tiny_pair().target.model.layers[0].register_forward_pre_hook(lambda *_: time.sleep(0.01))
    yield
    hook.remove()


def submit(client, prompt=PROMPT, *, scheduler="auto", num_tokens=96):
    return client.submit(prompt, scheduler, 0.0, num_tokens, 0, False, api_name="/generate")


def test_a_client_receives_the_answer_as_it_is_written(client, slow):
    job = submit(client, scheduler="fixed:3")  # "auto" may find that no draft is worth checking
    answer, plain, summary, charts = job.result()
    texts = [text_of(event[0]) for event in job.outputs()]
    assert len(set(texts)) > 3, "generators go through the queue"
    assert all(later.startswith(earlier) for earlier, later in zip(texts, texts[1:], strict=False))
    assert text_of(answer) == texts[-1] == plain_text(96)
    assert plain == "" and "96 tokens" in summary and charts.count("<svg") == 4


def test_a_long_run_is_at_most_20_events_a_second(client):
    began = time.perf_counter()
    job = submit(client, num_tokens=256)
    job.result()
    events = job.outputs()
    assert 3 < len(events) <= 20 * (time.perf_counter() - began)
    assert max(len(text) for event in events for text in event) < 80_000
    assert text_of(events[-1][0]) == plain_text(256)


def test_stop_reaches_the_engine_and_the_last_event_says_so(client, space, slow):
    job = submit(client, num_tokens=512)
    while len(job.outputs()) < 3:
        time.sleep(0.02)
    client.predict(api_name="/stop")
    answer, *_ = job.result(timeout=5)
    assert "stopped after" in answer and len(text_of(answer)) < len(plain_text(96))
    assert space.shelf.num_running() == 0 and not space.visits.by_session


def test_a_client_that_is_gone_takes_its_request_along(space, slow):
    from gradio_client import Client

    client = Client(space.url, verbose=False)
    job = submit(client, num_tokens=512)
    while len(job.outputs()) < 3:
        time.sleep(0.02)
    assert space.shelf.num_running() == 1
    job.cancel()
    client.close()
    for _ in range(60):
        if not space.visits.by_session:
            break
        time.sleep(0.05)
    assert not space.visits.by_session and space.shelf.num_running() == 0


def test_nothing_is_reported_to_anybody(space):
    assert os.environ["GRADIO_ANALYTICS_ENABLED"] == "False" and not space.page.analytics_enabled


def test_the_generating_function_can_be_given_a_gpu(monkeypatch):
    """On a Space the package `spaces` wraps it; then what goes in and out must be plain data."""
    import app

    asked = []

    def gpu(duration):
        asked.append(duration)

        def decorate(function):
            def elsewhere(*args):
                for frame in function(*pickle.loads(pickle.dumps(args))):
                    yield pickle.loads(pickle.dumps(frame))

            return elsewhere

        return decorate

    monkeypatch.setattr(app, "spaces", SimpleNamespace(GPU=gpu))
    space = app.Space(Shelf(load_tiny), key=KEY, num_drafts=5)
    *_, last = space.generate(Order(PROMPT, KEY, max_new_tokens=16), "session")
    assert asked == [app.GPU_SECONDS] and text_of(last.answer) == plain_text(16)
    space.close()


def test_requirements_are_those_of_the_package():
    root = Path(__file__).parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = {*project["dependencies"], *extras["demo"], *extras["space"]}
    lines = (root / "space" / "requirements.txt").read_text().splitlines()
    listed = {line for line in lines if line and not line.startswith("#")}
    assert listed == {need for need in needed if not need.startswith("gradio")}
    front = (root / "space" / "README.md").read_text().split("---")[1]
    version = next(line.split()[-1] for line in front.splitlines() if line.startswith("sdk_version"))
    assert f"gradio=={version}" in (root / "constraints.txt").read_text(), "the version that is tested"
    for path in ("app_file: app.py", "sdk: gradio", "license: apache-2.0"):
        assert path in front
