"""The scheduler simulation: a replay is what decoding would have done, and its bounds are bounds."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_dspark.scheduling import CallSetting, ConfidenceThreshold, FixedLength, RoundOutcome, Scheduler
from tests.drafters import left_padded, scripted, tiny_drafter
from tests.tiny import tiny_target

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
simulation = importlib.import_module("scheduler_simulation")
curves, recordings, replays, streams = (
    importlib.import_module(f"simulation.{name}") for name in ("curves", "recording", "replay", "streams")
)


class Watched(Scheduler):
    """A policy, and what each row had accepted, round by round."""

    def __init__(self, policy):
        self.policy = policy
        self.calls: list[dict[int, list[int]]] = []

    def for_call(self, setting: CallSetting):
        self.calls.append({})
        self.call = self.policy.for_call(setting)
        return self

    def draft_length(self, block_size: int) -> int:
        return self.call.draft_length(block_size)

    def verify_lengths(self, request):
        return self.call.verify_lengths(request)

    def observe(self, outcome: RoundOutcome) -> None:
        if outcome.request is not None:
            for row, accepted in zip(outcome.request.rows, outcome.num_accepted, strict=True):
                self.calls[-1].setdefault(row, []).append(accepted)
        self.call.observe(outcome)


@pytest.fixture(scope="module")
def tiny_pair():
    """A tiny target, prompts, and a drafter that is right for a number of tokens that only its anchor decides."""
    target, inputs = tiny_target("qwen3"), left_padded([3, 9, 5, 4])
    drafter = tiny_drafter(target)
    plain = target.generate(**inputs, max_new_tokens=64, do_sample=False).tolist()

    def script(row, prefix, num_drafts):
        following = (plain[row] + [0] * num_drafts)[len(prefix) :][:num_drafts]
        right = (7 * len(prefix) + 3 * row) % (drafter.config.num_drafts + 2)
        return [token if depth < right else (token + 1) % 64 for depth, token in enumerate(following)]

    return target, scripted(drafter, script), inputs


def decoded(target, drafter, inputs, length, **options):
    view = drafter.with_options(scheduler=FixedLength(length))
    options = {"max_new_tokens": 40, "do_sample": False, "return_dict_in_generate": True} | options
    return target.generate(**inputs, assistant_model=view, **options).rounds


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_replay_of_a_dense_recording_accepts_what_decoding_accepts(tiny_pair, length):
    target, drafter, inputs = tiny_pair
    answers = recordings.record(target, drafter, [("tiny", inputs)], max_new_tokens=40)
    replay = replays.Replay(recordings.Recording(tuple(answers), {}), curves.smooth(5))
    watched = Watched(FixedLength(length))
    served = replay.serve_batches(watched, num_rows=4)
    rounds = decoded(target, drafter, inputs, length)
    real: dict[int, list[int]] = {}
    for r in rounds:
        if r.draft_ids:
            real.setdefault(r.row, []).append(r.num_accepted)
    assert watched.calls == [real]
    assert max(max(row) for row in real.values()) == length, "some blocks stood whole"
    assert served.num_tokens == sum(len(r.committed_ids) for r in rounds) == 4 * 39
    assert served.num_row_rounds == len(rounds)
    assert served.num_rounds == 1 + max(r.step for r in rounds)
    assert served.num_verified == sum(r.verify_length for r in rounds)


def test_replay_ends_answers_at_their_last_token_like_decoding(tiny_pair):
    target, drafter, inputs = tiny_pair
    plain = target.generate(**inputs, max_new_tokens=40, do_sample=False)
    ends = [int(plain[0, inputs["input_ids"].shape[1] + 17]), int(plain[1, inputs["input_ids"].shape[1] + 11])]
    options = {"eos_token_id": ends, "pad_token_id": 0}
    target.generation_config.eos_token_id = ends
    try:
        answers = recordings.record(target, drafter, [("tiny", inputs)], max_new_tokens=40)
    finally:
        target.generation_config.eos_token_id = None
    assert min(len(answer) for answer in answers) < 18
    replay = replays.Replay(recordings.Recording(tuple(answers), {}), curves.smooth(5))
    served = replay.serve_batches(FixedLength(3), num_rows=4)
    rounds = decoded(target, drafter, inputs, 3, **options)
    assert served.num_tokens == sum(len(r.committed_ids) for r in rounds)
    assert served.num_row_rounds == len(rounds)
    assert served.num_rounds == 1 + max(r.step for r in rounds)


def slowly(recording, profile, policy, num_rows, num_tokens):
    """Tokens and seconds of a replay at constant concurrency, one row and one token after another."""
    rows = [[answer, 0] for answer in (recording.answers * num_rows)[:num_rows]]
    following, tokens, seconds = num_rows, 0, 0.0
    while tokens < num_tokens:
        context = sum(answer.context + place for answer, place in rows) / num_rows
        verified = 0
        for row in rows:
            answer, place = row
            length = policy(answer.confidence[place], int(answer.max_lengths[place]))
            verified += length
            committed = min(1 + min(length, int(answer.acceptable[place])), len(answer) - place)
            tokens += committed
            row[1] += committed
        seconds += profile.round_seconds(num_rows + verified, context=context, num_requests=num_rows, drafted=True)
        for row in rows:
            if row[1] == len(row[0]):
                row[:] = [recording.answers[following % len(recording.answers)], 0]
                following += 1
    return tokens, seconds


@pytest.mark.parametrize("num_rows", [1, 3, 20])
def test_replay_equals_a_slow_and_obvious_one(num_rows):
    recording = streams.synthetic_recording("mt-bench", num_answers=5, num_tokens=40)
    profile = curves.staircase(7)
    replay = replays.Replay(recording, profile)

    def whole(confidence, limit):
        return limit

    def confident(confidence, limit):
        length = 0
        while length < limit and confidence[length] >= 0.6:
            length += 1
        return length

    for policy, obvious in ((FixedLength(), whole), (ConfidenceThreshold(0.6), confident)):
        # No row may be at its last token in all rows: then nothing is drafted.
        served = replay.serve(policy, num_rows, 400)
        tokens, seconds = slowly(recording, profile, obvious, num_rows, 400)
        undrafted = served.num_undrafted * profile.draft_seconds(num_rows)
        assert served.num_tokens == tokens
        assert served.seconds + undrafted == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize("num_rows", [1, 16, 64])
def test_plain_decoding_makes_a_token_a_row_and_step(num_rows):
    profile = curves.gpu(7)
    replay = replays.Replay(streams.synthetic_recording("gsm8k", num_answers=3, num_tokens=50), profile)
    served = replay.serve(replays.Plain(), num_rows, 500)
    assert served.tokens_per_second == pytest.approx(
        num_rows / profile.round_seconds(num_rows, num_requests=num_rows, drafted=False)
    )


@pytest.mark.parametrize("kind", ["paper", "hostile"])
@pytest.mark.parametrize("name", list(curves.CURVES))
def test_no_policy_beats_the_oracle(name, kind):
    recording = streams.synthetic_recording(kind, num_answers=2, num_tokens=96)
    replay = replays.Replay(recording, curves.curve(name, 7))
    skipped = [f"FixedLength({length})" for length in (2, 4, 5, 6)]
    chosen = {name: policy for name, policy in simulation.policies(7).items() if name not in skipped}
    for num_rows, num_tokens in ((1, 200), (8, 600), (64, 1500)):
        served = replays.serve_all(replay, chosen, num_rows, num_tokens, lambda text: None)
        speeds = {policy: run.tokens_per_second for policy, run in served.items()}
        # Runs end within a round of each other, and rounds at the end are not all alike.
        assert max(speeds.values()) <= 1.02 * speeds["oracle"], speeds
        assert speeds["oracle"] >= speeds["plain"]
        assert speeds["plain"] <= speeds["confidence oracle"] <= 1.02 * speeds["oracle"]


def test_where_nothing_is_accepted_the_oracle_decodes_plainly():
    recording = streams.synthetic_recording("hostile", num_answers=2, num_tokens=64)
    for answer in recording.answers:
        answer.acceptable[:] = 0
    replay = replays.Replay(recording, curves.smooth(7))
    oracle = replay.serve_oracle(replays.Oracle, 4, 400)
    assert oracle.num_undrafted == oracle.num_rounds and oracle.num_verified == 0


def test_the_confidence_oracle_is_not_told_what_will_stand():
    recording = streams.synthetic_recording("paper", num_answers=2, num_tokens=64)
    oracle = replays.ConfidenceOracle(curves.smooth(7), 7, rate=1.0)
    confidence, limits = recording.answers[0].confidence[:4], np.array([7, 7, 3, 0])
    for acceptable in (np.zeros(4, dtype=int), np.full(4, 7)):
        oracle.foresee(acceptable, confidence, limits)
        np.testing.assert_allclose(oracle.survival[0], confidence[0].astype(float).cumprod())
        assert (oracle.survival[2, 3:] == -1).all() and (oracle.survival[3] == -1).all()


def test_synthetic_confidences_are_the_chance_to_stand():
    recording = streams.synthetic_recording("paper", num_answers=12)
    confidence = np.concatenate([answer.confidence for answer in recording.answers])
    acceptable = np.concatenate([answer.acceptable for answer in recording.answers])
    for position in range(streams.NUM_DRAFTS):
        reached = acceptable >= position
        chance, stood = confidence[reached, position], acceptable[reached] > position
        bins = np.digitize(chance, np.linspace(0, 1, 11)[1:-1])
        for bin_ in range(10):
            inside = bins == bin_
            error = chance[inside].mean() - stood[inside].mean()
            assert abs(error) < 4 * 0.5 / np.sqrt(inside.sum()), (position, bin_)
    assert np.quantile(confidence, 0.1) < 0.6 < 0.95 < np.quantile(confidence, 0.6), "there is something to schedule"


def test_synthetic_streams_accept_as_much_as_the_papers():
    recording = streams.synthetic_recording("paper", num_answers=12, seed=3)
    for name, accepted_length in streams.PAPER_ACCEPTED_LENGTHS.items():
        acceptable = np.stack([answer.acceptable for answer in recording.answers if answer.name == name])
        assert streams.live_accepted_length(acceptable) == pytest.approx(accepted_length, abs=0.05)
    again = streams.synthetic_recording("paper", num_answers=12, seed=3)
    assert all(
        np.array_equal(a.acceptable, b.acceptable) for a, b in zip(recording.answers, again.answers, strict=True)
    )


def test_recording_survives_the_disk(tmp_path):
    recording = streams.synthetic_recording("alpaca", num_answers=3, num_tokens=20)
    recording.save(tmp_path / "recording.npz")
    loaded = recordings.Recording.load(tmp_path / "recording.npz")
    assert loaded.description == recording.description
    for before, after in zip(recording.answers, loaded.answers, strict=True):
        assert (before.name, before.context) == (after.name, after.context)
        for name in ("confidence", "acceptable", "max_lengths"):
            assert np.array_equal(getattr(before, name), getattr(after, name))
    assert [path.name for path in tmp_path.iterdir()] == ["recording.npz"]


@pytest.mark.parametrize("content", [b"", b"not a recording", b"PK\x03\x04 broken"])
def test_what_is_no_recording_is_refused_by_name(tmp_path, content):
    path = tmp_path / "other.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="other.npz is not a recording"):
        recordings.Recording.load(path)


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["scheduler_simulation.py", *map(str, arguments)])
    simulation.main()


def test_replay_command_reports_every_policy_at_every_batch(monkeypatch, capsys):
    arguments = ["--synthetic", "math500", "--curve", "gpu", "staircase", "--batch", 2, 16, "--tokens", 600]
    run(monkeypatch, "replay", *arguments, "--json", "--noise", 0.1)
    report = json.loads(capsys.readouterr().out)
    assert [(r["curve"], r["batch"]) for r in report["results"]] == [
        ("gpu", 2), ("gpu", 16), ("staircase", 2), ("staircase", 16),
    ]  # fmt: skip
    for result in report["results"]:
        lines = {line["policy"]: line for line in result["policies"]}
        assert set(lines) == {"plain", "confidence oracle", "oracle", *simulation.policies(7)}
        assert lines["plain"]["to_plain"] == lines["oracle"]["to_oracle"] == 1
        assert max(line["to_best_fixed"] for name, line in lines.items() if name.startswith("Fixed")) == 1
        assert lines["plain"]["mean_verify_length"] == 0 < lines["FixedLength(7)"]["mean_verify_length"]


def test_batches_decoded_to_the_end_wait_for_their_last_answer(monkeypatch, capsys):
    arguments = ["--synthetic", "gsm8k", "--curve", "smooth", "--batch", 4, "--policies", "FixedLength(7)", "--json"]
    speeds = []
    for mode in ([], ["--to-the-end"]):
        run(monkeypatch, "replay", *arguments, *mode)
        lines = json.loads(capsys.readouterr().out)["results"][0]["policies"]
        speeds.append({line["policy"]: line["tokens_per_second"] for line in lines})
    assert speeds[1]["plain"] == speeds[0]["plain"]  # all of its answers are equally long, and so are its rounds
    assert speeds[1]["FixedLength(7)"] < speeds[0]["FixedLength(7)"]
    assert "oracle" not in speeds[1]


def test_replay_command_takes_a_recording_and_a_profile(monkeypatch, capsys, tmp_path):
    streams.synthetic_recording("mbpp", num_answers=2, num_tokens=50).save(tmp_path / "recording.npz")
    curves.smooth(7).save(tmp_path / "profile.json")
    arguments = ["--curve", tmp_path / "profile.json", "--batch", 4, "--tokens", 300, "--policies", "Auto"]
    run(monkeypatch, "replay", tmp_path / "recording.npz", *arguments)
    table = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("| Auto |") for line in table) == 1
    curves.smooth(7).to_sglang(tmp_path / "profile.json")
    run(monkeypatch, "replay", tmp_path / "recording.npz", *arguments)
    assert "| Auto |" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["replay", "--synthetic", "poetry"], "there is no synthetic stream 'poetry'"),
        (["replay", "--synthetic", "paper", "--curve", "steep"], "there is no curve 'steep'"),
        (["replay"], "give either a recording or --synthetic"),
        (["replay", "nowhere.npz"], "nowhere.npz"),
    ],
)
def test_replay_command_says_what_is_wrong(monkeypatch, arguments, message):
    with pytest.raises(SystemExit, match=message):
        run(monkeypatch, *arguments)


def test_record_command_writes_what_replay_reads(monkeypatch, capsys, tmp_path):
    # A line separator within a prompt is no end of line.
    prompts = [{"turns": [f"What is {n} + 4?\N{LINE SEPARATOR}Think."]} for n in range(11)]
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(p, ensure_ascii=False) + "\n" for p in prompts), encoding="utf-8")
    run(monkeypatch, "record", path, "--output", tmp_path / "sums.npz", "--max-new-tokens", 10, "--threads", 1)
    recording = recordings.Recording.load(tmp_path / "sums.npz")
    assert recording.description["sets"] == {"sums": 2} and len(recording.answers) == 2
    assert all(0 < answer.confidence[0].min() <= answer.confidence[0].max() < 1 for answer in recording.answers)
    run(monkeypatch, "replay", tmp_path / "sums.npz", "--batch", 2, "--tokens", 10, "--policies", "FixedLength(2)")
    assert "| FixedLength(2) |" in capsys.readouterr().out


def test_figure_is_drawn_whole(monkeypatch, tmp_path):
    monkeypatch.setattr(simulation, "FIGURE_BATCHES", [1, 16])
    run(monkeypatch, "replay", "--synthetic", "humaneval", "--batch", 1, "--tokens", 100, "--plot", tmp_path / "f.png")
    content = (tmp_path / "f.png").read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) > 20000
    assert [path.name for path in tmp_path.iterdir()] == ["f.png"]


def test_count_acceptable_stops_at_the_first_difference_and_at_the_end():
    drafts = [[5, 6, 9], [6, 7, 8], [7, 8], [9]]
    assert recordings.count_acceptable(drafts, [4, 5, 6, 7, 8], 3).tolist() == [2, 3, 2, 0]
    assert recordings.count_acceptable([[8, 0, 0]], [7, 8], 3).tolist() == [1]


def test_dense_recording_needs_no_confidence_head(tiny_pair):
    target, drafter, inputs = tiny_pair
    bare = scripted(tiny_drafter(target, enable_confidence_head=False), drafter.script)
    answers = recordings.record(target, bare, [("tiny", inputs)], max_new_tokens=12)
    assert [len(answer) for answer in answers] == [11] * 4
    with_head = recordings.record(target, drafter, [("tiny", inputs)], max_new_tokens=12)
    for one, other in zip(answers, with_head, strict=True):
        assert np.array_equal(one.acceptable, other.acceptable) and not one.confidence.any()
    assert torch.is_tensor(replays.Replay(recordings.Recording(tuple(answers), {}), curves.gpu(5)).confidence)
