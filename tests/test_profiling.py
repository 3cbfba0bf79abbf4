"""Measuring: points are what a machine takes for them, nothing else notices, and it is done once."""

import copy
import dataclasses
import os
import threading
import time
from contextlib import contextmanager

import pytest
import torch
from transformers.utils import logging

from hf_dspark import profile_cache, profiling
from hf_dspark.decoding import Decoder
from hf_dspark.machine import describe
from hf_dspark.profiling import cached_profile, profile_sps, token_counts
from hf_dspark.sps_profile import SPSProfile, VerifyPoint
from tests.drafters import generate, left_padded, tiny_drafter
from tests.tiny import FAMILIES, tiny_target

QUICK = dict(max_batch_tokens=20, contexts=(10, 50), repeats=3, progress=False)


@contextmanager
def forward_hook(model, hook):
    handle = model.register_forward_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@pytest.fixture
def home(monkeypatch, tmp_path):
    """A cache of one's own, in which measuring is allowed."""
    monkeypatch.setenv("HF_DSPARK_CACHE", str(tmp_path))
    monkeypatch.delenv("HF_DSPARK_NO_PROFILE", raising=False)
    monkeypatch.setattr(profile_cache, "_KEPT", {})
    return tmp_path / "profiles"


@pytest.fixture
def measured(monkeypatch):
    """Makes measuring quick; lists the sizes it was done for."""
    sizes = []

    def quick(target, drafter, *, max_batch_tokens):
        sizes.append(max_batch_tokens)
        profile = profile_sps(target, drafter, max_batch_tokens=1, contexts=(4,), repeats=1, progress=False)
        return dataclasses.replace(profile, max_batch_tokens=max_batch_tokens)

    monkeypatch.setattr(profiling, "profile_sps", quick)
    return sizes


def pair(family="qwen3", **overrides):
    target = tiny_target(family)
    return target, tiny_drafter(target, **overrides)


@pytest.mark.parametrize(
    "largest, counts",
    [(1, [1]), (5, [1, 2, 3, 4, 5]), (64, [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64])],
)
def test_token_counts_double_with_a_step_halfway(largest, counts):
    assert token_counts(largest) == counts


@pytest.mark.parametrize("family", FAMILIES)
def test_every_packed_family_is_measured(family):
    target, drafter = pair(family)
    profile = profile_sps(target, drafter, **QUICK)
    block = drafter.config.num_drafts
    assert profile.block_size == block == 5
    assert profile.max_batch_tokens == 20
    shapes = {(point.batch_tokens, point.num_requests, point.context) for point in profile.verify_points}
    assert {(count, -(-count // 6), 10) for count in token_counts(20)} < shapes
    assert {(2, 2, 10), (4, 4, 10), (1, 1, 50), (8, 2, 50)} < shapes
    assert {(point.num_requests, point.context) for point in profile.draft_points} >= {(1, 10), (4, 10), (1, 50)}
    assert [point.num_requests for point in profile.loop_points] == [1, 4]
    for point in (*profile.verify_points, *profile.draft_points, *profile.loop_points):
        assert len(point.seconds) == 3
    assert profile.description["points_left_out"] == 0


def test_what_is_slow_shows_where_it_is_slow():
    target, drafter = pair()

    def slow(module, args, kwargs, output):
        if kwargs["input_ids"].shape[1] >= 16:
            time.sleep(0.05)

    with forward_hook(target, slow):
        profile = profile_sps(target, drafter, max_batch_tokens=24, contexts=(10,), repeats=3, progress=False)
    assert profile.verify_seconds(12) < 0.03
    assert profile.verify_seconds(16) > 0.05
    assert profile.verify_seconds(16) - profile.verify_seconds(12) == pytest.approx(0.05, abs=0.02)
    assert profile.draft_seconds(4) < 0.05, "drafting is not the target's forward"


def test_a_slow_drafter_and_a_slow_loop_show_as_such(monkeypatch):
    target, drafter = pair()
    layer = drafter.layers[0]
    with forward_hook(layer, lambda *args: time.sleep(0.02)):
        profile = profile_sps(target, drafter, **QUICK)
    assert profile.draft_seconds(1) > 0.02 > max(profile.verify_seconds(8), profile.loop_seconds(1))

    commit = Decoder._commit
    monkeypatch.setattr(Decoder, "_commit", lambda *args: (time.sleep(0.02), commit(*args))[1])
    profile = profile_sps(target, drafter, **QUICK)
    assert profile.loop_seconds(1) > 0.02 > max(profile.verify_seconds(8), profile.draft_seconds(1))
    assert profile.loop_seconds(4) > 0.08, "it commits row by row"


def test_without_a_drafter_only_the_target_is_measured():
    profile = profile_sps(tiny_target("llama"), max_batch_tokens=8, contexts=(4,), repeats=1, progress=False)
    assert profile.block_size == 7
    assert profile.draft_points == profile.loop_points == ()
    assert profile.draft_seconds(3) == 0 < profile.verify_seconds(3)


@pytest.mark.parametrize("training", [False, True])
def test_measuring_leaves_no_trace(training):
    target, drafter = pair("mistral")
    target.train(training)
    try:
        inputs, config = left_padded([3, 5]), target.config.to_dict()
        names = {name: set(vars(module)) for model in (target, drafter) for name, module in model.named_modules()}
        expected = generate(target, inputs, max_new_tokens=6).sequences
        torch.manual_seed(5)
        state = torch.get_rng_state()
        profile_sps(target, drafter, **QUICK)
        assert torch.equal(torch.get_rng_state(), state)
        assert target.training is training and target.config.to_dict() == config
        now = {name: set(vars(module)) for model in (target, drafter) for name, module in model.named_modules()}
        assert now == names
        assert not any(parameter.grad is not None for parameter in target.parameters())
        assert torch.equal(generate(target, inputs, max_new_tokens=6).sequences, expected)
    finally:
        target.eval()


def test_measuring_that_fails_leaves_no_trace(home):
    target, drafter = pair()
    inputs = left_padded([3, 5])
    expected = generate(target, inputs, max_new_tokens=6).sequences

    def fail(module, args, kwargs, output):
        if kwargs["input_ids"].shape[1] >= 8:
            raise MemoryError("too large")

    with forward_hook(target, fail), pytest.raises(MemoryError):
        cached_profile(target, drafter, max_batch_tokens=12)
    assert not list(home.glob("*.json"))
    assert torch.equal(generate(target, inputs, max_new_tokens=6).sequences, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_measured(dtype):
    target = copy.deepcopy(tiny_target("qwen3")).to(dtype)
    profile = profile_sps(target, tiny_drafter(target), **QUICK)
    assert profile.description["target_dtype"] == str(dtype).removeprefix("torch.")


def test_contexts_stay_within_the_models_positions():
    target, drafter = pair("gpt2")  # 64 learned positions
    profile = profile_sps(target, drafter, max_batch_tokens=6, contexts=(30, 1000), repeats=1, progress=False)
    assert profile.contexts == (30, 64 - 6)


def test_shapes_that_need_a_large_cache_are_left_to_prediction(monkeypatch):
    monkeypatch.setattr(profiling, "MAX_CACHED_TOKENS", 4 * 64)
    target, drafter = pair()
    profile = profile_sps(target, drafter, max_batch_tokens=48, contexts=(40, 200), repeats=1, progress=False)
    assert max(point.num_requests for point in profile.verify_points if point.context == 40) == 4
    assert {point.num_requests for point in profile.verify_points if point.context == 200} == {1}
    assert profile.verify_seconds(48) > 0


def test_a_machine_too_slow_for_all_points_measures_the_first_ones(monkeypatch):
    monkeypatch.setattr(profiling, "BUDGET_SECONDS", 0.0)
    target, drafter = pair()
    profile = profile_sps(target, drafter, max_batch_tokens=48, contexts=(10, 50), progress=False)
    assert [point.batch_tokens for point in profile.verify_points] == [1, 2]
    assert {point.num_requests for point in profile.draft_points} == {1}
    assert all(len(point.seconds) == 3 for point in (*profile.verify_points, *profile.draft_points))
    assert profile.description["points_left_out"] > 10


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(max_batch_tokens=0), "max_batch_tokens=0"),
        (dict(repeats=0), "repeats=0"),
        (dict(contexts=()), r"contexts=\[\]"),
        (dict(contexts=(-1,)), r"contexts=\[-1\]"),
        (dict(block_size=4), "block_size=4.*its own .5."),
    ],
)
def test_impossible_measurements_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        profile_sps(*pair(), **arguments)


@pytest.mark.parametrize("family", ["bloom", "qwen3_5"])
def test_a_target_that_cannot_be_packed_is_refused_with_the_reason(family):
    with pytest.raises(ValueError, match="cannot be profiled.*cannot be packed: "):
        profile_sps(tiny_target(family), progress=False)


class Bar:
    """A progress bar that remembers."""

    def __init__(self, **options):
        self.steps, self.total, self.open = 0, None, True

    def update(self):
        self.steps += 1

    def refresh(self):
        pass

    def close(self):
        self.open = False


@pytest.mark.parametrize("bars", [False, True])
def test_it_is_said_what_is_measured_and_how_to_avoid_it(monkeypatch, capsys, bars):
    made = []
    monkeypatch.setattr(logging, "tqdm", lambda **options: made.append(Bar(**options)) or made[-1])
    monkeypatch.setattr(logging, "is_progress_bar_enabled", lambda: bars)
    profile_sps(*pair(), **{**QUICK, "progress": None})
    told = capsys.readouterr().err
    assert "HF_DSPARK_NO_PROFILE=1" in told and "sps_profile=" in told
    assert len(made) == bars
    assert all(bar.steps == bar.total > 50 and not bar.open for bar in made)
    profile_sps(*pair(), **QUICK)
    assert capsys.readouterr().err == "" and len(made) == bars


def count_forwards(target, counts):
    return forward_hook(target, lambda module, args, kwargs, output: counts.append(1))


def test_it_is_measured_once(home, measured):
    target, drafter = pair()
    first = cached_profile(target, drafter, max_batch_tokens=12)
    assert measured == [64], "with room for larger batches"
    (file,) = home.glob("*.json")
    assert SPSProfile.load(file) == first
    forwards = []
    with count_forwards(target, forwards):
        assert cached_profile(target, drafter, max_batch_tokens=64) is first
        profile_cache._KEPT.clear()  # as in another process
        assert cached_profile(target, drafter, max_batch_tokens=64) == first
        view = drafter.with_options(max_draft_tokens=2)
        assert cached_profile(target, view, max_batch_tokens=1) == first
    assert not forwards and measured == [64]


def test_larger_batches_are_measured_when_they_come(home, measured):
    target, drafter = pair()
    cached_profile(target, drafter, max_batch_tokens=64)
    larger = cached_profile(target, drafter, max_batch_tokens=65)
    assert larger.max_batch_tokens == 128
    assert cached_profile(target, drafter, max_batch_tokens=7) is larger
    assert measured == [64, 128]
    assert len(list(home.glob("*.json"))) == 1


def test_what_times_depend_on_is_told_apart(home, measured):
    target, drafter = pair()
    cached_profile(target, drafter, max_batch_tokens=8)
    cached_profile(target, tiny_drafter(target, block_size=3), max_batch_tokens=8)
    cached_profile(tiny_target("llama"), drafter, max_batch_tokens=8)
    cached_profile(target, None, max_batch_tokens=8)
    assert len(measured) == len(list(home.glob("*.json"))) == 4
    drafter.config.confidence_temperatures = {"greedy": [2.0] * 5}
    drafter.config.target_name_or_path = "elsewhere"
    cached_profile(target, drafter, max_batch_tokens=8)
    assert len(measured) == 4, "calibration takes no time"
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert describe(target, drafter)["threads"] == threads + 1
        cached_profile(target, drafter, max_batch_tokens=8)
    finally:
        torch.set_num_threads(threads)
    assert len(measured) == 5


@pytest.mark.parametrize("value, off", [("1", True), ("yes", True), ("", False), ("0", False)])
def test_the_environment_switches_it_off(home, measured, monkeypatch, value, off):
    monkeypatch.setenv("HF_DSPARK_NO_PROFILE", value)
    profile = cached_profile(*pair(), max_batch_tokens=4)
    assert (profile is None) is off
    assert (not measured) is off


@pytest.fixture
def warnings_seen(monkeypatch):
    seen = []
    monkeypatch.setattr(profile_cache.logger, "warning", seen.append)
    monkeypatch.setattr(profile_cache.logger, "warning_once", seen.append)
    return seen


@pytest.mark.parametrize("content", ["", "{}", '{"format": "hf_dspark.sps_profile", "version": 1}', "\x00"])
def test_a_damaged_file_is_measured_anew(home, measured, warnings_seen, content):
    target, drafter = pair()
    cached_profile(target, drafter, max_batch_tokens=4)
    (file,) = home.glob("*.json")
    file.write_text(content)
    profile_cache._KEPT.clear()
    profile = cached_profile(target, drafter, max_batch_tokens=4)
    assert measured == [64, 64]
    assert SPSProfile.load(file) == profile
    assert len(warnings_seen) == 1 and str(file) in warnings_seen[0]


def test_a_folder_that_cannot_be_written_costs_only_the_keeping(home, measured, warnings_seen):
    home.parent.mkdir(exist_ok=True)
    home.write_text("a file where the folder should be")
    target, drafter = pair()
    profile = cached_profile(target, drafter, max_batch_tokens=4)
    assert cached_profile(target, drafter, max_batch_tokens=4) is profile
    assert measured == [64]
    assert len(warnings_seen) == 1 and "HF_DSPARK_CACHE" in warnings_seen[0]


def test_threads_that_ask_at_once_measure_once(home, measured):
    target, drafter = pair()
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(cached_profile(target, drafter, max_batch_tokens=4)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert measured == [64]
    assert len(results) == 4 and all(result is results[0] for result in results)


def test_a_process_waits_for_one_that_measures(home, measured):
    """What another process wrote while this one waited for its lock is read, not measured again."""
    target, drafter = pair()
    made = profile_sps(target, drafter, **QUICK)
    description = describe(target, drafter)
    path = profile_cache._path(profile_cache._key(description))
    results = []
    with profile_cache._locked(path):
        thread = threading.Thread(target=lambda: results.append(cached_profile(target, drafter, max_batch_tokens=4)))
        thread.start()
        time.sleep(0.3)
        assert not results and not measured
        made.save(path)
    thread.join()
    assert results == [made] and not measured


def test_a_profile_put_there_is_used(home, measured):
    target, drafter = pair()
    before = cached_profile(target, drafter, max_batch_tokens=4)
    own = SPSProfile(5, (VerifyPoint(1, 1, 0, (1.0,)),), max_batch_tokens=512)
    path = profile_cache.keep(describe(target, drafter), own)
    assert path.parent == home and os.path.exists(path)
    assert cached_profile(target, drafter, max_batch_tokens=512) == own != before
    assert measured == [64]
