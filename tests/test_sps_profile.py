"""Profiles: predictions are the hand-computed ones, files come back as they were, broken ones are refused by name."""

import json
import math
import re

import numpy as np
import pytest

from hf_dspark.sps_profile import DraftPoint, LoopPoint, SPSProfile, VerifyPoint

BLOCK = 3  # K: a row has up to 4 tokens


def verify(tokens, rows, context, *seconds):
    return VerifyPoint(tokens, rows, context, seconds)


def profile(*points, drafts=(), loops=(), **options):
    return SPSProfile(BLOCK, points, tuple(drafts), tuple(loops), **options)


SHORT = (verify(1, 1, 100, 1.0), verify(4, 1, 100, 2.5), verify(8, 2, 100, 3.0))


def test_a_point_is_its_lower_quartile_and_between_points_time_is_linear():
    times = profile(verify(1, 1, 0, 9.0, 1.0, 1.4), verify(4, 1, 0, 2.7))  # halfway from the least to the second
    assert times.verify_seconds(1) == 1.2
    assert times.verify_seconds(2) == pytest.approx(1.7)
    assert times.verify_seconds(4) == 2.7


def test_jags_stay():
    times = profile(verify(1, 1, 0, 1.0), verify(2, 1, 0, 5.0), verify(4, 1, 0, 3.0))
    assert [times.verify_seconds(tokens) for tokens in (1, 2, 3, 4)] == [1.0, 5.0, 4.0, 3.0]


def test_beyond_the_largest_point_time_goes_on_along_the_last_slope():
    assert profile(*SHORT).verify_seconds(16) == pytest.approx(3.0 + 8 * 0.5 / 4)


def test_beyond_the_largest_point_more_tokens_never_take_less():
    noisy = profile(*SHORT, verify(12, 3, 100, 2.9))
    times = noisy.verify_seconds(np.arange(12, 500))
    assert (np.diff(times) > 0).all() and times[0] == 2.9
    falling = profile(verify(1, 1, 0, 2.0), verify(4, 1, 0, 1.0))
    assert falling.verify_seconds(100) == 1.0


def test_plain_rounds_have_a_curve_of_their_own_and_others_lie_between():
    times = profile(*SHORT, verify(8, 8, 100, 6.0))
    assert times.verify_seconds(8) == times.verify_seconds(8, num_requests=2) == 3.0
    assert times.verify_seconds(8, num_requests=8) == 6.0
    assert times.verify_seconds(8, num_requests=5) == pytest.approx(4.5)
    # Between 1 and 8 the plain curve runs straight, though the other one bends at 4.
    assert times.verify_seconds(4, num_requests=4) == pytest.approx(1 + 5 * 3 / 7)
    assert times.verify_seconds(16, num_requests=16) == pytest.approx(4.0 + 3.0 * 16 / 8), "the gap grows with rows"


def test_context_costs_by_cached_token_and_by_queries_of_a_row():
    long = (verify(1, 1, 300, 1.2), verify(8, 2, 300, 3.0 + 400 * 0.005))
    times = profile(*SHORT, *long)
    assert times.contexts == (100, 300)
    assert times.verify_seconds(1, 300) == pytest.approx(1.2)
    assert times.verify_seconds(8, 300) == pytest.approx(5.0)
    assert times.verify_seconds(8, 200) == pytest.approx(4.0), "linear in between"
    assert times.verify_seconds(8, 500) == pytest.approx(7.0), "and beyond"
    assert times.verify_seconds(8, 50) == times.verify_seconds(8) == 3.0, "the smallest context is the least"
    # One query a row: 0.001 s a cached token, of which 8 rows have 1600 more.
    plain = times.verify_seconds(8, 300, num_requests=8) - times.verify_seconds(8, 100, num_requests=8)
    assert plain == pytest.approx(1600 * 0.001)
    between = times.verify_seconds(10, 300, num_requests=4) - times.verify_seconds(10, 100, num_requests=4)
    assert between == pytest.approx(800 * 0.003), "2.5 queries a row, halfway from 1 to 4"


def test_longer_context_is_never_cheaper():
    times = profile(*SHORT, verify(8, 2, 300, 2.0), verify(8, 2, 600, 5.0))
    assert times.verify_seconds(8, 300) == times.verify_seconds(8, 100) == 3.0
    assert times.verify_seconds(8, 600) == pytest.approx(6.0), "what 300 more tokens added"


def test_a_round_is_verification_drafting_and_loop():
    drafts = [DraftPoint(1, 100, (0.2,)), DraftPoint(2, 100, (0.3,)), DraftPoint(2, 300, (0.7,))]
    loops = [LoopPoint(1, (0.0, 0.01, 0.5)), LoopPoint(5, (0.05,))]
    times = profile(*SHORT, drafts=drafts, loops=loops)
    assert times.draft_seconds(4) == pytest.approx(0.5)
    assert times.draft_seconds(4, 200) == pytest.approx(0.5 + 400 * 0.001)
    loop = 0.005 + (0.05 - 0.005) / 4
    assert times.loop_seconds(2) == pytest.approx(loop)
    assert times.round_seconds(8) == pytest.approx(3.0 + 0.3 + loop)
    assert times.round_seconds(8, drafted=False) == pytest.approx(3.0 + loop)
    assert times.steps_per_second(8) == pytest.approx(1 / (3.3 + loop))
    assert times.steps_per_second(8, 300) == pytest.approx(1 / (3.0 + 0.7 + loop))


def test_an_array_is_the_same_as_its_numbers():
    times = profile(
        *SHORT,
        verify(8, 8, 100, 6.0),
        verify(8, 2, 300, 5.0),
        drafts=[DraftPoint(1, 100, (0.2,)), DraftPoint(2, 100, (0.4,))],
        loops=[LoopPoint(1, (0.1,))],
    )
    tokens = np.array([[1, 2, 5], [8, 9, 40]])
    for arguments in ({}, {"context": 250.0}, {"context": 400, "num_requests": 1}):
        at_once = times.round_seconds(tokens, **arguments)
        assert at_once.shape == tokens.shape
        one_by_one = [times.round_seconds(int(count), **arguments) for count in tokens.flat]
        assert all(type(seconds) is float for seconds in one_by_one)
        assert at_once.ravel().tolist() == pytest.approx(one_by_one)
    with pytest.raises(ValueError, match="batch_tokens"):
        times.verify_seconds(np.array([1, 0]))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: profile(), "at least one verify point"),
        (lambda: profile(verify(0, 1, 0, 1.0)), r"verify_points\[0\].batch_tokens"),
        (lambda: profile(verify(1, 2, 0, 1.0)), "2 rows for 1 tokens"),
        (lambda: profile(verify(1, 1, -1, 1.0)), "context"),
        (lambda: profile(verify(1, 1, 0)), "at least one sample"),
        (lambda: profile(verify(1, 1, 0, 0.0)), "positive"),
        (lambda: profile(verify(1, 1, 0, math.nan)), "positive"),
        (lambda: profile(*SHORT, drafts=[LoopPoint(1, (1.0,))]), r"draft_points\[0\] must be a DraftPoint"),
        (lambda: SPSProfile(0, SHORT), "block_size"),
        (lambda: profile(*SHORT, max_batch_tokens=-1), "max_batch_tokens"),
    ],
)
def test_impossible_profiles_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def full_profile():
    return profile(
        *SHORT,
        drafts=[DraftPoint(1, 100, (0.2, 0.21))],
        loops=[LoopPoint(1, (0.0,))],
        max_batch_tokens=20,
        description={"threads": 2, "devices": ["a"]},
    )


def test_a_saved_profile_comes_back_with_its_raw_samples(tmp_path):
    saved = full_profile()
    saved.save(tmp_path / "profile.json")
    assert SPSProfile.load(tmp_path / "profile.json") == saved
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]


def test_a_profile_that_cannot_be_written_leaves_the_old_file(tmp_path):
    path = tmp_path / "profile.json"
    full_profile().save(path)
    before = path.read_text()
    with pytest.raises(TypeError):
        profile(*SHORT, description={"threads": object()}).save(path)
    assert path.read_text() == before and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda data: "[1]", "JSON object"),
        (lambda data: json.dumps(data)[:-20], "char"),
        (lambda data: json.dumps({**data, "version": 99}), "version"),
        (lambda data: json.dumps({**data, "verify_points": []}), "at least one verify point"),
        (lambda data: json.dumps({**data, "verify_points": {}}), "must be a list"),
        (lambda data: json.dumps({**data, "extra": 1}), "fields"),
        (lambda data: json.dumps({key: data[key] for key in data if key != "loop_points"}), "fields"),
        (lambda data: json.dumps({**data, "loop_points": [{"num_requests": 1}]}), r"loop_points\[0\]"),
        (lambda data: json.dumps({**data, "loop_points": [{"num_requests": 1, "seconds": ["x"]}]}), "seconds"),
        (lambda data: json.dumps({**data, "block_size": "3"}), "block_size"),
        (lambda data: json.dumps({**data, "description": []}), "description"),
    ],
)
def test_a_broken_file_is_refused_by_name(tmp_path, damage, message):
    path = tmp_path / "profile.json"
    full_profile().save(path)
    path.write_text(damage(json.loads(path.read_text())))
    with pytest.raises(ValueError, match=re.escape(str(path)) + ".*" + message):
        SPSProfile.load(path)


def test_sglang_gets_its_table_and_nothing_else(tmp_path):
    drafts = [DraftPoint(1, 100, (0.5,))]
    times = profile(verify(4, 1, 100, 2.0), verify(1, 1, 100, 1.5), verify(1, 1, 200, 4.0), drafts=drafts)
    table = times.to_sglang(tmp_path / "sps.json")
    assert table == {"sample_batch_tokens": [1, 4], "sample_steps_per_sec": [0.5, 0.4], "max_batch_tokens": 4}
    assert json.loads((tmp_path / "sps.json").read_text()) == table
    for source in (table, tmp_path / "sps.json", str(tmp_path / "sps.json")):
        back = SPSProfile.from_sglang(source, block_size=BLOCK)
        assert back.to_sglang() == table
        assert back.steps_per_second(2) == pytest.approx(1 / (2.0 + 0.5 / 3)), "between its points time is linear"
        assert back.draft_seconds(3) == back.loop_seconds(3) == 0
        assert back.verify_seconds(4, 5000) == 2.5, "the table knows one context"


@pytest.mark.parametrize(
    "change, message",
    [
        ({"sample_batch_tokens": [1]}, "1 sample_batch_tokens but 2 sample_steps_per_sec"),
        ({"sample_batch_tokens": [1, 0]}, r"sample_batch_tokens\[1\]"),
        ({"sample_batch_tokens": [1, 2.5]}, r"sample_batch_tokens\[1\]"),
        ({"sample_steps_per_sec": [1.0, 0]}, r"sample_steps_per_sec\[1\]"),
        ({"sample_steps_per_sec": [1.0, math.inf]}, r"sample_steps_per_sec\[1\]"),
        ({"sample_steps_per_sec": "12"}, "lists"),
        ({"sample_batch_tokens": [], "sample_steps_per_sec": []}, "at least one"),
        ({"max_batch_tokens": None}, "max_batch_tokens"),
        ({"max_batch_tokens": ...}, "lacks"),
    ],
)
def test_a_broken_sglang_table_is_refused_by_name(change, message):
    table = {"sample_batch_tokens": [1, 8], "sample_steps_per_sec": [10.0, 5.0], "max_batch_tokens": 8, **change}
    table = {key: value for key, value in table.items() if value is not ...}
    with pytest.raises(ValueError, match="the table is not an SPS table of SGLang.*" + message):
        SPSProfile.from_sglang(table, block_size=BLOCK)


def test_a_profile_can_be_looked_at(tmp_path):
    full_profile().plot(tmp_path / "profile.png")
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(tmp_path.iterdir())) == 1


def test_pictures_say_what_they_need(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"hf-dspark\[plot\]"):
        full_profile().plot(tmp_path / "profile.png")
    assert not list(tmp_path.iterdir())
