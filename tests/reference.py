"""Slow, obvious re-implementations, and the enumeration that turns "lossless" into a statement that can fail.

`law_of(run)` runs a piece of real code once per branch of its randomness and adds up what comes out. With it, tests
compute the exact law of the committed tokens and compare it with the target's: no sampling, no tolerance for luck.
The toy target and drafter below have small vocabularies and arbitrary conditionals, so that every branch is visited.
"""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import numpy as np
import torch

from hf_dspark.policies import CausalGreedy, LaggedBudget, Lookahead, LookaheadCall
from hf_dspark.scheduling import CallSetting, RoundOutcome, Scheduler, ScheduleRequest
from hf_dspark.verification import RandomSource, verify_sampling

Law = dict[Hashable, float]


# --------------------------------------------------------------------------------------------------- enumeration


class BranchSource(RandomSource):
    """Answers every random question with the options of a script, first options beyond it, and multiplies up."""

    def __init__(self, script: Sequence[int]):
        super().__init__()
        self._script = list(script)
        self.choices: list[int] = []
        self.num_options: list[int] = []
        self.probability = 1.0

    def _choose(self, weights: Sequence[float]) -> int:
        options = [(index, weight) for index, weight in enumerate(weights) if weight > 0]
        position = len(self.choices)
        choice = self._script[position] if position < len(self._script) else 0
        self.choices.append(choice)
        self.num_options.append(len(options))
        index, weight = options[choice]
        self.probability *= weight / math.fsum(weights)
        return index

    def categorical(self, probs):
        return torch.tensor([self._choose(row) for row in probs.tolist()], dtype=torch.long)

    def accept(self, target_prob, draft_prob):
        verdicts = []
        for target, draft in zip(target_prob.flatten().tolist(), draft_prob.flatten().tolist(), strict=True):
            sure = target >= draft and target > 0
            acceptance = 1.0 if sure else target / draft if draft > 0 else 0.0
            verdicts.append(bool(self._choose([1 - acceptance, acceptance])))
        return torch.tensor(verdicts, dtype=torch.bool).view(target_prob.shape)


def law_of(run: Callable[[RandomSource], Hashable]) -> Law:
    """Exact law of `run(random_source)`, by running it once for every sequence of random decisions."""
    law: Law = defaultdict(float)
    script: list[int] | None = []
    while script is not None:
        source = BranchSource(script)
        law[run(source)] += source.probability
        script = _next_script(source)
    return dict(law)


def _next_script(source: BranchSource) -> list[int] | None:
    """The decisions of the next branch in depth-first order, `None` after the last."""
    for position in reversed(range(len(source.choices))):
        if source.choices[position] + 1 < source.num_options[position]:
            return [*source.choices[:position], source.choices[position] + 1]
    return None


def total_variation(law: Law, other: Law) -> float:
    """Half the sum of the absolute differences of two laws."""
    return sum(abs(law.get(key, 0.0) - other.get(key, 0.0)) for key in law.keys() | other.keys()) / 2


# --------------------------------------------------------------------------------------------------- toy models


class ToyTarget:
    """A language model with an arbitrary conditional distribution for every prefix."""

    def __init__(self, vocab_size: int, seed: int = 0, warp: Callable[[torch.Tensor], torch.Tensor] = lambda x: x):
        self.vocab_size = vocab_size
        self._seed = seed
        self._warp = warp

    def probs(self, prefix: Sequence[int]) -> torch.Tensor:
        """p_t(. | prefix), `[V]`."""
        number = self._seed + 1
        for token_id in prefix:
            number = (number * 31 + token_id + 1) % 2**31
        logits = 2 * torch.randn(self.vocab_size, generator=torch.Generator().manual_seed(number))
        return self._warp(logits[None]).softmax(-1)[0]

    def law(self, prefix: Sequence[int], num_tokens: int) -> Law:
        """Law of the next `num_tokens` tokens."""
        law = {(): 1.0}
        for _ in range(num_tokens):
            law = {
                (*tokens, token_id): probability * share
                for tokens, probability in law.items()
                for token_id, share in enumerate(self.probs([*prefix, *tokens]).tolist())
            }
        return law


class FixedTarget(ToyTarget):
    """The same distribution after every prefix."""

    def __init__(self, probs: Sequence[float]):
        super().__init__(len(probs))
        self._probs = torch.tensor(probs)

    def probs(self, prefix):
        return self._probs


class ToyDrafter:
    """
    Semi-autoregressive like the real one: base logits per position from the context, a bias from the token before,
    and a confidence that sees the context and the token before, never the draft itself.
    """

    def __init__(
        self,
        vocab_size: int,
        block_size: int,
        seed: int = 0,
        warp: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
        token_ids: Sequence[int] | None = None,
    ):
        self.block_size = block_size
        self._vocab_size = vocab_size
        self._seed = seed
        self._warp = warp
        self.token_ids = None if token_ids is None else torch.tensor(token_ids)

    def _noise(self, *key: int, size: int) -> torch.Tensor:
        number = self._seed + 7
        for part in key:
            number = (number * 37 + part + 1) % 2**31
        return 2 * torch.randn(size, generator=torch.Generator().manual_seed(number))

    def logits(self, prefix: Sequence[int], position: int, previous_id: int) -> torch.Tensor:
        """Logits of the draft at `position`, `[Vd]`, before the warp."""
        return self._noise(1, position, *prefix, size=self._vocab_size) + self._noise(
            2, previous_id, size=self._vocab_size
        )

    def probs(self, prefix: Sequence[int], position: int, previous_id: int) -> torch.Tensor:
        """p_d, `[Vd]`."""
        return self._warp(self.logits(prefix, position, previous_id)[None]).softmax(-1)[0]

    def confidence(self, prefix: Sequence[int], position: int, previous_id: int) -> float:
        """Some function of what is known before the draft at `position` is drawn, in (0, 1)."""
        return torch.sigmoid(self._noise(3, position, previous_id, *prefix, size=1)).item()


Toy = TypeVar("Toy", ToyTarget, ToyDrafter)


def remembering(toy: Toy) -> Toy:
    """The same toy, which computes everything once: enumerations ask the same questions over and over."""
    for name in ("probs", "confidence"):
        if hasattr(toy, name):
            answer = functools.cache(getattr(toy, name))
            setattr(toy, name, lambda prefix, *key, answer=answer: answer(tuple(prefix), *key))
    return toy


# ------------------------------------------------------------------------------------------------------ rounds


def toy_round(
    target: ToyTarget,
    drafter: ToyDrafter,
    scheduler: Scheduler,
    prefixes: Sequence[Sequence[int]],
    source: RandomSource,
    *,
    claimed_probs: Callable[[Sequence[int], int, int], torch.Tensor] | None = None,
    rows: Sequence[int] | None = None,
    room: Sequence[int] | None = None,
    step: int = 0,
) -> tuple[tuple[int, ...], ...]:
    """
    One round of several rows: draft, schedule and verify with the package's own code; the committed tokens per row.

    Args:
        scheduler: A policy without a state, or what a policy's `for_call` returned; it is told about the round.
        claimed_probs: Replaces what the verification is told about the drafts (for controls that must fail).
        rows: Batch row of every prefix.
        room: Drafts that each row can use.
        step: Number of the round.
    """
    num_rows = len(prefixes)
    room = [drafter.block_size] * num_rows if room is None else room
    drafting = max(room) > 0 and scheduler.wants_drafts(num_rows, 0.0)
    block_size = min(scheduler.draft_length(drafter.block_size), max(room)) if drafting else 0
    claimed_probs = claimed_probs or drafter.probs
    drafts: list[list[int]] = [[] for _ in prefixes]
    claims: list[list[torch.Tensor]] = [[] for _ in prefixes]
    confidence = torch.zeros(num_rows, block_size)
    for position in range(block_size):
        previous = [[*prefix, *draft][-1] for prefix, draft in zip(prefixes, drafts, strict=True)]
        probs = [drafter.probs(prefixes[row], position, previous[row]) for row in range(num_rows)]
        columns = source.categorical(torch.stack(probs))
        token_ids = columns if drafter.token_ids is None else drafter.token_ids[columns]
        for row, token_id in enumerate(token_ids.tolist()):
            confidence[row, position] = drafter.confidence(prefixes[row], position, previous[row])
            claims[row].append(claimed_probs(prefixes[row], position, previous[row]))
            drafts[row].append(token_id)

    rows = list(range(num_rows)) if rows is None else rows
    limits = [min(block_size, own) for own in room]
    request = ScheduleRequest(confidence, limits, rows, step) if block_size else None
    lengths = limits if request is None else scheduler.verify_lengths(request)
    assert all(0 <= length <= limit for length, limit in zip(lengths, limits, strict=True))
    packed = [
        target.probs([*prefix, *draft[:count]])
        for prefix, draft, length in zip(prefixes, drafts, lengths, strict=True)
        for count in range(length + 1)
    ]
    draft_probs = torch.stack([torch.stack(row) for row in claims]) if block_size else torch.zeros(num_rows, 0, 1)
    verdict = verify_sampling(
        torch.tensor(drafts, dtype=torch.long).view(num_rows, block_size),
        torch.stack(packed),
        draft_probs=draft_probs,
        verify_lengths=lengths,
        random_source=source,
        draft_token_ids=drafter.token_ids,
    )
    num_accepted = verdict.num_accepted.tolist()
    scheduler.observe(RoundOutcome(request, num_rows, lengths, num_accepted, seconds=1.0))
    outcome = zip(drafts, num_accepted, verdict.next_ids.tolist(), strict=True)
    return tuple((*draft[:accepted], next_id) for draft, accepted, next_id in outcome)


def toy_decode(
    target: ToyTarget,
    drafter: ToyDrafter,
    scheduler: Scheduler,
    prefixes: Sequence[Sequence[int]],
    num_tokens: int,
    source: RandomSource,
) -> tuple[tuple[int, ...], ...]:
    """Rounds until every row has `num_tokens` new tokens; rows that have them are gone from the batch."""
    tokens: list[tuple[int, ...]] = [() for _ in prefixes]
    for step in itertools.count():
        rows = [row for row in range(len(prefixes)) if len(tokens[row]) < num_tokens]
        if not rows:
            return tuple(tokens)
        current = [(*prefixes[row], *tokens[row]) for row in rows]
        room = [num_tokens - len(tokens[row]) - 1 for row in rows]
        committed = toy_round(target, drafter, scheduler, current, source, rows=rows, room=room, step=step)
        for row, new in zip(rows, committed, strict=True):
            tokens[row] += new
    raise AssertionError


def completed_law(committed: Law, target: ToyTarget, prefixes: Sequence[Sequence[int]], num_tokens: int) -> Law:
    """
    Law of `num_tokens` tokens per row if the target itself continues after what a round committed.

    It equals the target's law for every round iff it does for any number of rounds: the step of an induction.
    """
    law: Law = defaultdict(float)
    for tokens_per_row, probability in committed.items():
        continuations = [
            [
                ((*tokens, *rest)[:num_tokens], share)
                for rest, share in target.law([*prefix, *tokens], max(0, num_tokens - len(tokens))).items()
            ]
            for prefix, tokens in zip(prefixes, tokens_per_row, strict=True)
        ]
        for rows in itertools.product(*continuations):
            law[tuple(tokens for tokens, _ in rows)] += probability * math.prod(share for _, share in rows)
    return dict(law)


def independent_law(target: ToyTarget, prefixes: Sequence[Sequence[int]], num_tokens: int) -> Law:
    """Law of `num_tokens` tokens per row under plain decoding."""
    laws = [target.law(prefix, num_tokens).items() for prefix in prefixes]
    return {
        tuple(tokens for tokens, _ in rows): math.prod(share for _, share in rows) for rows in itertools.product(*laws)
    }


# --------------------------------------------------------------------------------------- policies, good and bad


class FirstDrop(Scheduler):
    """Algorithm 1 of the paper for one row: lengthen while expected throughput grows, stop at the first drop."""

    def __init__(self, step_seconds: Sequence[float]):
        self._step_seconds = step_seconds

    def throughputs(self, confidence: torch.Tensor) -> list[float]:
        """Expected tokens per second of every length 0..K, from the confidences `[K]` of one row."""
        survival = confidence.double().cumprod(0)
        return [(1 + survival[:n].sum().item()) / self._step_seconds[n] for n in range(len(confidence) + 1)]

    def verify_lengths(self, request):
        return [self._choose(self.throughputs(row)) for row in request.confidence]

    def _choose(self, throughputs: list[float]) -> int:
        length = 0
        while length + 1 < len(throughputs) and throughputs[length + 1] > throughputs[length]:
            length += 1
        return length


class BestInHindsight(FirstDrop):
    """The same objective, maximised over all lengths: looks at confidences after the draft it decides about."""

    def _choose(self, throughputs):
        return max(range(len(throughputs)), key=throughputs.__getitem__)


class TableProfile:
    """Stands in for an `SPSProfile`: any seconds for 1, 2, 3, ... tokens of a round (the last one for all beyond)."""

    def __init__(self, seconds: Sequence[float], draft_seconds: float = 0.0):
        self._seconds, self._draft_seconds = np.asarray(seconds, dtype=np.float64), draft_seconds

    def round_seconds(self, batch_tokens, *, context=None, num_requests=None, drafted=True):
        """Seconds of a round; a float for a number, an array for an array."""
        entries = np.minimum(np.asarray(batch_tokens), len(self._seconds)) - 1
        seconds = self._seconds[entries] + self._draft_seconds * drafted
        return seconds if isinstance(batch_tokens, np.ndarray) else float(seconds)

    def draft_seconds(self, num_requests, context=None):
        """Seconds of drafting, the same for any number of rows."""
        return self._draft_seconds


class Recorded(Scheduler):
    """
    Another policy, and what it chose in any of its calls: for every number of the round the set of limits with verify
    lengths, and the set of answers to whether to draft.
    """

    def __init__(self, policy: Scheduler):
        self._policy = policy
        self.lengths: dict[int, set[tuple]] = defaultdict(set)
        self.drafted: dict[int, set[bool]] = defaultdict(set)

    @property
    def uses_cost(self):
        return self._policy.uses_cost

    def for_call(self, setting):
        return _RecordedCall(self, self._policy.for_call(setting))

    def verify_lengths(self, request):
        raise NotImplementedError

    def most_choices(self) -> int:
        """How many different answers one round of a number got, at most, where rows had the same room."""
        choices = defaultdict(set)
        for step, answers in self.lengths.items():
            for limits, lengths in answers:
                choices[step, limits].add(lengths)
        return max(map(len, choices.values()), default=0)

    def both_drafted_and_not(self) -> bool:
        """Whether some round was drafted in one branch, and one of the same number not in another."""
        return any(len(answers) > 1 for answers in self.drafted.values())


class _RecordedCall(Scheduler):
    def __init__(self, record: Recorded, call: Scheduler):
        self._record, self._call, self._step = record, call, 0

    def draft_length(self, block_size):
        return self._call.draft_length(block_size)

    def wants_drafts(self, num_rows, context):
        wanted = self._call.wants_drafts(num_rows, context)
        self._record.drafted[self._step].add(wanted)
        return wanted

    def verify_lengths(self, request):
        lengths = self._call.verify_lengths(request)
        self._record.lengths[request.step].add((tuple(request.max_lengths), tuple(lengths)))
        return lengths

    def observe(self, outcome):
        self._step += 1
        self._call.observe(outcome)


class BestBatchInHindsight(CausalGreedy):
    """The best lengths of all rows for the confidences of the very round, whatever has to be looked at for it."""

    def for_call(self, setting):
        return _HindsightCall(setting)


class _HindsightCall(Scheduler):
    def __init__(self, setting: CallSetting):
        self._setting = setting

    def verify_lengths(self, request):
        seconds = self._setting.cost.seconds(len(request.rows), self._setting.num_drafts, request.context)
        survival = request.confidence.double().cumprod(1).tolist()

        def throughput(lengths):
            tokens = sum(1 + sum(row[:length]) for row, length in zip(survival, lengths, strict=True))
            return tokens / seconds[sum(lengths)]

        return list(max(itertools.product(*(range(limit + 1) for limit in request.max_lengths)), key=throughput))


class BudgetOfThisRound(LaggedBudget):
    """[`LaggedBudget`] without the lag: the budget is found with the confidences of the round that it is spent in."""

    def for_call(self, setting):
        call = LaggedBudget(1).for_call(setting)
        honest = call.verify_lengths

        def peeking(request):
            call._earlier.append(request)
            return honest(request)

        call.verify_lengths = peeking
        return call


class LookaheadTakingBack(Lookahead):
    """[`Lookahead`] that returns to the best point of its walk instead of verifying what it has walked."""

    def for_call(self, setting):
        return _TakingBackCall(self, setting)


class _TakingBackCall(LookaheadCall):
    def verify_lengths(self, request):
        walked = sum(super().verify_lengths(request))
        survival = request.confidence.double().cumprod(1)
        ranked = sorted(
            (-survival[row, position].item(), row, position)
            for row, limit in enumerate(request.max_lengths)
            for position in range(limit)
        )[:walked]
        seconds, lengths = self.seconds(request), [0] * len(request.rows)
        tokens = np.cumsum([len(request.rows), *(-negative for negative, _, _ in ranked)])
        for _, row, _ in ranked[: int((tokens / seconds[: len(tokens)]).argmax())]:
            lengths[row] += 1
        return lengths


class TopSurvivals(Scheduler):
    """A number of drafts fixed beforehand, given to the highest prefix survivals of all rows."""

    def __init__(self, budget: int):
        self._budget = budget

    def verify_lengths(self, request):
        survival = request.confidence.double().cumprod(1)
        ranked = sorted(
            (-survival[row, position].item(), row, position)
            for row, limit in enumerate(request.max_lengths)
            for position in range(limit)
        )
        lengths = [0] * len(request.rows)
        for _, row, _ in ranked[: self._budget]:
            lengths[row] += 1
        return lengths


# --------------------------------------------------------------------------------------------- schedules, slowly


def most_tokens(survival: Sequence[Sequence[float]], limits: Sequence[int]) -> list[float]:
    """The most tokens to expect for every total verify length, over *all* ways to share it between the rows."""
    best = [0.0]
    for row, limit in zip(survival, limits, strict=True):
        own = [1 + sum(row[:length]) for length in range(limit + 1)]
        best = [
            max(best[total - length] + own[length] for length in range(limit + 1) if 0 <= total - length < len(best))
            for total in range(len(best) + limit)
        ]
    return best


def slow_lower_envelope(seconds: Sequence[float]) -> list[float]:
    """Height of the lowest chord over every point: the largest convex function that is nowhere above `seconds`."""

    def chord(left, point, right):
        if left == right:
            return seconds[left]
        return seconds[left] + (seconds[right] - seconds[left]) * (point - left) / (right - left)

    last = len(seconds)
    return [
        min(chord(left, point, right) for left in range(point + 1) for right in range(point, last))
        for point in range(last)
    ]


# ------------------------------------------------------------------------------------------- verification, slowly


def slow_verify_greedy(draft_ids: Sequence[int], target_ids: Sequence[int], verify_length: int) -> tuple[int, int]:
    """Accepted drafts and next token of one row; `target_ids` are the `1 + verify_length` argmaxes of the row."""
    num_accepted = 0
    while num_accepted < verify_length and draft_ids[num_accepted] == target_ids[num_accepted]:
        num_accepted += 1
    return num_accepted, target_ids[num_accepted]


def slow_verify_sampling(
    draft_ids: Sequence[int],
    target_probs: Sequence[Sequence[float]],
    draft_probs: Sequence[Sequence[float]],
    verify_length: int,
    uniforms: Sequence[float],
) -> tuple[int, list[float]]:
    """Accepted drafts of one row and the distribution its next token is drawn from, over one vocabulary."""
    for position in range(verify_length):
        token_id = draft_ids[position]
        target, draft = target_probs[position], draft_probs[position]
        if not uniforms[position] * draft[token_id] < target[token_id]:
            residual = [max(t - d, 0.0) for t, d in zip(target, draft, strict=True)]
            mass = sum(residual)
            return position, [r / mass for r in residual] if mass > 0 else list(target)
    return verify_length, list(target_probs[verify_length])
