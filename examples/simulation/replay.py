"""Replays policies on a recording: the scheduler's side of decoding, with times from a profile instead of models.

Contract: the real policy objects are driven through the interface of `hf_dspark.scheduling` exactly as decoding drives
them. Only what they cause is looked up: the acceptances in a recording, the seconds of a round in an `SPSProfile`. By
default concurrency is constant (an answer that ends is replaced at once by the next, going round the recording) until
`num_tokens` tokens are out; `serve_batches` decodes groups of answers to their ends, as `generate` does.

Shape legend: R rows, K drafts of a block, N anchors of all answers.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hf_dspark.round_cost import RoundCost
from hf_dspark.scheduling import CallSetting, RoundOutcome, Scheduler, ScheduleRequest
from hf_dspark.sps_profile import SPSProfile

from .recording import Recording


@dataclass(frozen=True, slots=True)
class Served:
    """
    What a replay came to.

    Attributes:
        num_tokens (`int`): Tokens committed.
        num_rounds (`int`): Rounds, all rows together.
        num_row_rounds (`int`): Rounds of single rows.
        num_verified (`int`): Drafts verified.
        num_accepted (`int`): Drafts that stood.
        num_undrafted (`int`): Rounds that drafted nothing.
        seconds (`float`): What all rounds took, by the profile.
        policy_seconds (`float`): What the policy itself took to decide, measured; not in `seconds`.
    """

    num_tokens: int
    num_rounds: int
    num_row_rounds: int
    num_verified: int
    num_accepted: int
    num_undrafted: int
    seconds: float
    policy_seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def mean_verify_length(self) -> float:
        return self.num_verified / self.num_row_rounds

    @property
    def accepted_length(self) -> float:
        return self.num_tokens / self.num_row_rounds


class Plain(Scheduler):
    """Never drafts: plain decoding."""

    def wants_drafts(self, num_rows: int, context: float) -> bool:
        return False

    def verify_lengths(self, request: ScheduleRequest) -> list[int]:
        return [0] * len(request.max_lengths)


class Oracle(Scheduler):
    """
    Knows before each round how many drafts of every row would stand, and verifies no more: a bound, not a policy.

    Of the accepted drafts it takes as many as pay at `rate`, the tokens per second that decoding makes in the long
    run; it does not draft where that pays better. [`Replay.serve_oracle`] finds the rate.

    Args:
        profile ([`SPSProfile`]): What rounds take.
        num_drafts (`int`): K.
        rate (`float`): Tokens that a second is worth.
    """

    def __init__(self, profile: SPSProfile, num_drafts: int, rate: float):
        self.cost, self.num_drafts, self.rate = RoundCost(profile, refine=False), num_drafts, rate
        self.survival = np.zeros((0, num_drafts))  # -1 where a row may not go

    def foresee(self, acceptable: np.ndarray, confidence: np.ndarray, limits: np.ndarray) -> None:
        """Told by the replay before a round: what would stand `[R]`, confidences `[R, K]`, the most drafts `[R]`."""
        self._set((np.arange(self.num_drafts) < acceptable[:, None]).astype(float), limits)

    def _set(self, survival: np.ndarray, limits: np.ndarray) -> None:
        self.survival = np.where(np.arange(self.num_drafts) < limits[:, None], survival, -1.0)

    def best(self, num_rows: int, context: float) -> tuple[int, float]:
        """How many drafts to take, most likely ones first, and by how many tokens that is better than not drafting."""
        survival = np.sort(self.survival[self.survival >= 0])[::-1]
        seconds = self.cost.seconds(num_rows, self.num_drafts, context)[: len(survival) + 1]
        # Where a larger round is faster (measured curves are jagged), this fills it up with drafts that fail.
        worth = np.concatenate([[0.0], survival.cumsum()]) - self.rate * seconds
        count = int(worth.argmax())
        return count, float(worth[count] + self.rate * self.cost.plain_seconds(num_rows, context))

    def wants_drafts(self, num_rows: int, context: float) -> bool:
        return self.best(num_rows, context)[1] > 0

    def verify_lengths(self, request: ScheduleRequest) -> list[int]:
        count, _ = self.best(len(request.rows), request.context)
        order = np.argsort(-self.survival.T, axis=None, kind="stable")  # among equals, depth 1 of every row first
        return np.bincount(order[:count] % len(request.rows), minlength=len(request.rows)).tolist()


class ConfidenceOracle(Oracle):
    """
    Knows all confidences of a round before it, but not what will stand: what is left between it and the [`Oracle`],
    no policy that goes by confidences can have.
    """

    def foresee(self, acceptable: np.ndarray, confidence: np.ndarray, limits: np.ndarray) -> None:
        self._set(np.nan_to_num(confidence.astype(float)).cumprod(axis=1), limits)


class Replay:
    """
    A recording laid out for replaying, and a profile to charge rounds by.

    Args:
        recording ([`Recording`]): Answers.
        profile ([`SPSProfile`]): What rounds take.
        noise (`float`, *optional*, defaults to 0): Spread of a factor on each round's seconds (log-normal, mean 1).
        seed (`int`, *optional*, defaults to 0): Seed of the noise.
    """

    def __init__(self, recording: Recording, profile: SPSProfile, *, noise: float = 0.0, seed: int = 0):
        answers = recording.answers
        self.profile, self.noise, self.seed, self.num_drafts = profile, noise, seed, recording.num_drafts
        self.confidence = torch.from_numpy(np.concatenate([answer.confidence for answer in answers]))
        self.acceptable = np.concatenate([answer.acceptable for answer in answers]).astype(int)
        self.max_lengths = np.concatenate([answer.max_lengths for answer in answers]).astype(int)
        self.ends = np.cumsum([len(answer) for answer in answers])
        self.starts = self.ends - [len(answer) for answer in answers]
        self.contexts = np.array([answer.context for answer in answers])

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Conditional acceptance at each position over the recording, as calibration would have found it."""
        reached = [(self.acceptable >= position).sum() for position in range(self.num_drafts + 1)]
        return tuple(passed / max(before, 1) for before, passed in zip(reached[:-1], reached[1:], strict=True))

    def serve(self, policy: Scheduler, num_rows: int, num_tokens: int) -> Served:
        """`num_rows` rows at all times, until `num_tokens` tokens are out."""
        run = _Run(self, policy, drains=False)
        run.admit(np.arange(num_rows) % len(self.ends))
        following = num_rows
        while run.num_tokens < num_tokens:
            done = run.round()
            if len(done):
                run.replace(done, (following + np.arange(len(done))) % len(self.ends))
                following += len(done)
        return run.result()

    def serve_batches(self, policy: Scheduler, num_rows: int) -> Served:
        """All answers once, `num_rows` at a time in their order; each group is a `generate` call of its own."""
        results = []
        for first in range(0, len(self.ends), num_rows):
            run = _Run(self, policy, drains=True)
            run.admit(np.arange(first, min(first + num_rows, len(self.ends))))
            while len(run.at):
                run.retire(run.round())
            results.append(run.result())
        names = Served.__dataclass_fields__
        return Served(**{name: sum(getattr(result, name) for result in results) for name in names})

    def serve_oracle(self, kind: type[Oracle], num_rows: int, num_tokens: int) -> Served:
        """What an [`Oracle`] makes, its rate iterated to its fixed point."""
        best = self.serve(Plain(), num_rows, num_tokens)
        for _ in range(8):
            oracle = kind(self.profile, self.num_drafts, best.tokens_per_second)
            served = self.serve(oracle, num_rows, num_tokens)
            grown = served.tokens_per_second / best.tokens_per_second
            best = max(best, served, key=lambda result: result.tokens_per_second)
            if grown < 1.0005:
                break
        return best

    def round_seconds(self, batch_tokens: int, num_rows: int, context: float, drafted: bool) -> float:
        return float(self.profile.round_seconds(batch_tokens, context=context, num_requests=num_rows, drafted=drafted))


class _Run:
    """The rows of one replay and its counters."""

    def __init__(self, replay: Replay, policy: Scheduler, *, drains: bool):
        cost = RoundCost(replay.profile, refine=False)
        setting = CallSetting(replay.num_drafts, cost=cost, acceptance=replay.acceptance, drains=drains)
        self.replay, self.policy = replay, policy.for_call(setting)
        self.draft_length = min(self.policy.draft_length(replay.num_drafts), replay.num_drafts)
        self.random = np.random.default_rng(replay.seed)
        self.step = self.num_tokens = self.row_rounds = self.verified = self.accepted = self.undrafted = 0
        self.seconds = self.policy_seconds = 0.0
        self.at = self.end = self.offset = self.ids = np.zeros(0, dtype=int)
        self.next_id = 0

    def admit(self, answers: np.ndarray) -> None:
        """Starts these answers, in rows of their own; offset: cached tokens of a row less its place `at`."""
        self.at, self.end = self.replay.starts[answers], self.replay.ends[answers]
        self.offset = self.replay.contexts[answers] - self.at
        self.ids = self._new_ids(len(answers))

    def replace(self, entries: np.ndarray, answers: np.ndarray) -> None:
        """Starts these answers in place of ended ones. To the policy they are new rows."""
        self.at[entries], self.end[entries] = self.replay.starts[answers], self.replay.ends[answers]
        self.offset[entries] = self.replay.contexts[answers] - self.at[entries]
        self.ids[entries] = self._new_ids(len(entries))

    def retire(self, entries: np.ndarray) -> None:
        self.at, self.end, self.offset, self.ids = (
            np.delete(values, entries) for values in (self.at, self.end, self.offset, self.ids)
        )

    def round(self) -> np.ndarray:
        """One round; returns the entries of the rows that ended."""
        num_rows, context = len(self.at), float((self.at + self.offset).mean())
        acceptable = self.replay.acceptable[self.at]
        if isinstance(self.policy, Oracle):
            confidence = self.replay.confidence[torch.from_numpy(self.at)].numpy()
            self.policy.foresee(acceptable, confidence, self.replay.max_lengths[self.at])
        began = time.perf_counter()
        request, lengths = self._schedule(num_rows, context)
        self.policy_seconds += time.perf_counter() - began
        num_verified = sum(lengths)
        drafted = request is not None
        seconds = self.replay.round_seconds(num_rows + num_verified, num_rows, context, drafted)
        if self.replay.noise:
            spread = self.replay.noise
            seconds *= float(np.exp(spread * self.random.standard_normal() - spread**2 / 2))
        accepted = np.minimum(lengths, acceptable)
        began = time.perf_counter()
        first_stands = (acceptable > 0).astype(float).tolist() if drafted else None
        self.policy.observe(RoundOutcome(request, num_rows, lengths, accepted.tolist(), seconds, first_stands))
        self.policy_seconds += time.perf_counter() - began
        committed = np.minimum(1 + accepted, self.end - self.at)
        self.at = self.at + committed
        self.step += 1
        self.seconds += seconds
        self.num_tokens += int(committed.sum())
        self.row_rounds += num_rows
        self.verified += num_verified
        self.accepted += int(accepted.sum())
        self.undrafted += not drafted
        return np.flatnonzero(self.at >= self.end)

    def _schedule(self, num_rows: int, context: float) -> tuple[ScheduleRequest | None, Sequence[int]]:
        limits = np.minimum(self.replay.max_lengths[self.at], self.draft_length)
        num_drafts = int(limits.max())
        if num_drafts == 0 or not self.policy.wants_drafts(num_rows, context):
            return None, [0] * num_rows
        confidence = self.replay.confidence[torch.from_numpy(self.at), :num_drafts]
        request = ScheduleRequest(confidence, limits.tolist(), self.ids.tolist(), self.step, context)
        lengths = list(self.policy.verify_lengths(request))
        assert len(lengths) == num_rows and all(0 <= n <= limit for n, limit in zip(lengths, limits, strict=True))
        return request, lengths

    def _new_ids(self, count: int) -> np.ndarray:
        self.next_id += count
        return np.arange(self.next_id - count, self.next_id)

    def result(self) -> Served:
        return Served(
            self.num_tokens,
            self.step,
            self.row_rounds,
            self.verified,
            self.accepted,
            self.undrafted,
            self.seconds,
            self.policy_seconds,
        )


def serve_all(
    replay: Replay,
    policies: dict[str, Scheduler],
    num_rows: int,
    num_tokens: int | None,
    say: Callable[[str], None],
) -> dict[str, Served]:
    """
    Every policy at one concurrency, plain decoding first and the oracles last.

    Without `num_tokens`, groups of answers are decoded to their ends, without oracles: there the last row of a group
    counts most, and more tokens a second now may mean fewer in the end.
    """
    served = {}
    for name, policy in ({"plain": Plain()} | policies).items():
        say(f"{num_rows} at a time: {name}")
        if num_tokens is None:
            served[name] = replay.serve_batches(policy, num_rows)
        else:
            served[name] = replay.serve(policy, num_rows, num_tokens)
    if num_tokens is not None:
        served["confidence oracle"] = replay.serve_oracle(ConfidenceOracle, num_rows, num_tokens)
        served["oracle"] = replay.serve_oracle(Oracle, num_rows, num_tokens)
    return served
