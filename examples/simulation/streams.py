"""Synthetic streams of drafts: confidences and acceptances like those of a large drafter, and calibrated exactly.

Contract: every anchor of a stream has confidences `c_1 ... c_K`, and its drafts stand one after another with exactly
these probabilities, whatever happened elsewhere; so a policy that trusts its confidences is right to. How easy a token
is to draft has three parts: the request (one draw), a slow drift along the text (hard passages are long) and the token
itself. The mean accepted length of live rounds that verify whole blocks is fitted to the paper's Table 1 (Qwen3-4B,
K = 7, temperature 1; https://huggingface.co/papers/2607.05147).

Shape legend: A answers, n anchors of an answer, K drafts of a block.
"""

import numpy as np

from .recording import Answer, Recording

PAPER_ACCEPTED_LENGTHS = {
    "gsm8k": 6.11,
    "math500": 5.70,
    "humaneval": 5.38,
    "mbpp": 5.13,
    "mt-bench": 3.64,
    "alpaca": 3.54,
    "arena-hard": 3.29,
}
HOSTILE_ACCEPTED_LENGTH = 1.05  # a drafter on text it knows nothing about
NUM_DRAFTS = 7

# Spreads of the logit of acceptance. With these, confidences tell good drafts from bad about as well as the paper's
# (area under the curve .81 to .91).
REQUEST_SPREAD, PASSAGE_SPREAD, TOKEN_SPREAD = 0.5, 1.2, 1.6
PASSAGE_MEMORY = 0.95  # of the drift, from one token to the next


def synthetic_recording(
    kind: str = "paper", *, num_answers: int = 16, num_tokens: int = 512, context: int = 256, seed: int = 0
) -> Recording:
    """
    Draws a recording.

    Args:
        kind (`str`): `"paper"`: all of its sets in turn; one of the sets; or `"hostile"`, where nothing is accepted.
        num_answers (`int`): Answers of each set.
        num_tokens (`int`): n, anchors of every answer.
        context (`int`): Mean prompt length, in tokens.
        seed (`int`): Seed of everything drawn.

    Raises:
        ValueError: `kind` is unknown.
    """
    known = PAPER_ACCEPTED_LENGTHS | {"hostile": HOSTILE_ACCEPTED_LENGTH}
    if kind != "paper" and kind not in known:
        raise ValueError(f"there is no synthetic stream {kind!r}; there are paper, {', '.join(known)}")
    generator = np.random.default_rng(seed)
    names = list(PAPER_ACCEPTED_LENGTHS) if kind == "paper" else [kind]
    answers = [_draw_set(generator, name, known[name], num_answers, num_tokens, context) for name in names]
    in_turn = tuple(answer for group in zip(*answers, strict=True) for answer in group)
    return Recording(in_turn, {"synthetic": kind, "seed": seed, "num_drafts": NUM_DRAFTS})


def _draw_set(
    generator: np.random.Generator, name: str, accepted_length: float, num_answers: int, num_tokens: int, context: int
) -> list[Answer]:
    ease = _ease(generator, num_answers, num_tokens + NUM_DRAFTS)  # of every token, over the mean of the set
    # Draft k of anchor p is token p + k: blocks that overlap find the same passages hard.
    ease = np.lib.stride_tricks.sliding_window_view(ease[:, 1:], NUM_DRAFTS, axis=1)[:, :num_tokens]
    uniform = generator.random(ease.shape)
    level = _level(ease, uniform, accepted_length)
    confidence = (1 / (1 + np.exp(-(ease + level)))).astype(np.float32)
    acceptable = _leading(uniform < confidence)
    room = np.minimum(NUM_DRAFTS, num_tokens - 1 - np.arange(num_tokens))
    contexts = generator.integers(context // 2, context * 3 // 2 + 1, size=num_answers)
    return [
        Answer(name, int(contexts[answer]), confidence[answer], acceptable[answer], room)
        for answer in range(num_answers)
    ]


def _ease(generator: np.random.Generator, num_answers: int, num_tokens: int) -> np.ndarray:
    """`[A, n]`: request, passage and token, each Gaussian; the passage is a stationary process of memory one."""
    drift = generator.standard_normal((num_answers, num_tokens))
    fresh = np.sqrt(1 - PASSAGE_MEMORY**2)
    for token in range(1, num_tokens):
        drift[:, token] = PASSAGE_MEMORY * drift[:, token - 1] + fresh * drift[:, token]
    request = REQUEST_SPREAD * generator.standard_normal((num_answers, 1))
    return request + PASSAGE_SPREAD * drift + TOKEN_SPREAD * generator.standard_normal(drift.shape)


def _level(ease: np.ndarray, uniform: np.ndarray, accepted_length: float) -> float:
    """The logit that gives live rounds of whole blocks the mean `accepted_length`; more ease never accepts less."""
    low, high = -20.0, 20.0
    for _ in range(30):
        middle = (low + high) / 2
        acceptable = _leading(uniform < 1 / (1 + np.exp(-(ease + middle))))
        if live_accepted_length(acceptable) < accepted_length:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def live_accepted_length(acceptable: np.ndarray) -> float:
    """Mean tokens a round of whole blocks, over `acceptable [A, n]`, bonus included; the ends of answers left out."""
    num_answers, num_tokens = acceptable.shape
    at, rounds, tokens = np.zeros(num_answers, dtype=int), 0, 0
    rows = np.arange(num_answers)
    while len(rows):
        gained = 1 + acceptable[rows, at[rows]]
        rounds, tokens = rounds + len(rows), tokens + int(gained.sum())
        at[rows] += gained
        rows = rows[at[rows] < num_tokens]
    return tokens / rounds


def _leading(stands: np.ndarray) -> np.ndarray:
    """How many leading entries of the last axis hold."""
    return np.cumprod(stands, axis=-1).sum(axis=-1)
