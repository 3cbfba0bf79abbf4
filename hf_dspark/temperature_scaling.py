"""Sequential temperature scaling: making a drafter's confidences mean what they say (section 3.2.1).

Contract: pure numpy. In go confidence logits and the number of accepted drafts of rounds that verified the *whole*
block; out come temperatures and figures. Knows nothing about models, decoding or files of ours.

What is calibrated is what schedulers use, the prefix survival `a_k = c_1 ... c_k` with
`c_k = sigmoid(logit_k / T_k + b_k)`: position k of a round survived if and only if at least k drafts were accepted.
Temperatures are fitted from left to right, each with the earlier ones fixed, by a grid search for the smallest
expected calibration error (ECE) of the product. The paper has temperatures alone (`b_k = 0`). They cannot help a head
that is too sure of itself by a constant, as one is that serves greedy decoding and sampling, which accept differently:
there `fit_scaling` adds an offset. Neither changes the order of the rounds at a position.

The ECE here is over bins of equal width on [0, 1], as in the paper: the mean distance between predicted and observed
survival of a bin, weighted by the rounds in it. It is never 0 over finitely many rounds: `ece_noise_floor` is what
perfect predictions would score, at most about `0.8 sqrt(bins * p(1 - p) / N)`: 1.2 % for 10 bins, p = 0.4 and
N = 10,000.

Source: https://huggingface.co/papers/2607.05147, section 3.2.1. Shape legend: N rounds, K draft positions.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import torch

    Numbers: TypeAlias = torch.Tensor | np.ndarray | Sequence

NUM_BINS = 10
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.2, 5.0
# What keeps the fit from following single rounds over the edges of bins, in multiples of the noise floor. Predictions
# whose ECE is within the first pass for calibrated (two standard deviations, if the rounds fill the bins evenly): they
# keep the temperature 1. Temperatures whose ECE differs by less than the second are equally good: 1 is preferred, then
# the best Brier score. That has no bins, and no temperature may worsen it.
CALIBRATED_FLOORS, EQUAL_FLOORS = 1.5, 0.1
COARSE_STEPS, FINE_STEPS = 33, 17
MAX_OFFSET, OFFSET_STEPS = 2.0, 41
SMALLEST_SHARE = 0.25  # of a position's scaling; one that has to give way further is left alone

Scaling: TypeAlias = tuple[float, float]
UNSCALED: Scaling = (1.0, 0.0)  # temperature and offset


def confidence_logits(confidence: "Numbers") -> np.ndarray:
    """Logits of float32 confidences (as float64); one that was rounded to 0 or 1 becomes the nearest that is not."""
    float32 = np.finfo(np.float32)
    values = np.asarray(confidence, dtype=np.float64).clip(float(float32.tiny), 1 - float(float32.eps) / 2)
    return np.log(values) - np.log1p(-values)


def prefix_survival(
    logits: "Numbers", temperatures: Sequence[float] | None = None, offsets: Sequence[float] | None = None
) -> np.ndarray:
    """
    Predicted survival of each prefix, the product of `sigmoid(logit / T + b)` up to each position (Eq. 7).

    Args:
        logits (`torch.Tensor` or array of shape `[N, K]`): Confidence logits, before any temperature.
        temperatures (`Sequence[float]` of length K, *optional*): 1 everywhere if `None`.
        offsets (`Sequence[float]` of length K, *optional*): 0 everywhere if `None`.

    Returns:
        `np.ndarray` of shape `[N, K]`, float64.

    Raises:
        ValueError: there are not K positive temperatures, or not K finite offsets.
    """
    logits = np.asarray(logits, dtype=np.float64)
    scale = np.ones(logits.shape[-1]) if temperatures is None else np.asarray(temperatures, dtype=np.float64)
    if scale.shape != logits.shape[-1:] or not (scale > 0).all():
        raise ValueError(f"{logits.shape[-1]} positive temperatures are needed, one a position, got {temperatures}")
    shift = np.zeros(logits.shape[-1]) if offsets is None else np.asarray(offsets, dtype=np.float64)
    if shift.shape != logits.shape[-1:] or not np.isfinite(shift).all():
        raise ValueError(f"{logits.shape[-1]} finite offsets are needed, one a position, got {offsets}")
    return _sigmoid(logits / scale + shift).cumprod(axis=-1)


def prefix_labels(num_accepted: "Numbers", num_drafts: int) -> np.ndarray:
    """Whether each prefix survived: `num_accepted [N]` -> `np.ndarray` of bool, `[N, K]`."""
    return np.asarray(num_accepted)[:, None] > np.arange(num_drafts)


def conditional_acceptance(num_accepted: "Numbers", num_drafts: int) -> tuple[float, ...]:
    """Share of the rounds that accepted all earlier drafts in which each was accepted too; `nan` over no round."""
    survivors = [int((np.asarray(num_accepted) >= count).sum()) for count in range(num_drafts + 1)]
    pairs = zip(survivors, survivors[1:], strict=False)
    return tuple(after / before if before else float("nan") for before, after in pairs)


def bin_totals(predicted: np.ndarray, survived: np.ndarray, num_bins: int) -> tuple[np.ndarray, ...]:
    """
    Sorts predictions into bins of equal width.

    Args:
        predicted (`np.ndarray` of shape `[N]`): Predicted survival, 0 to 1.
        survived (`np.ndarray` of shape `[N]`): Whether it came true.

    Returns:
        Three `np.ndarray` of shape `[num_bins]`: rounds in each bin, sum of their `predicted` and of their `survived`.
    """
    where = np.minimum((predicted * num_bins).astype(np.int64), num_bins - 1)
    counts = np.bincount(where, minlength=num_bins)
    return counts, np.bincount(where, predicted, num_bins), np.bincount(where, survived, num_bins)


def expected_calibration_error(predicted: np.ndarray, survived: np.ndarray, num_bins: int = NUM_BINS) -> float:
    """ECE of predictions `[N]` against what came true `[N]`; 0 is perfect."""
    _, predicted_sum, survived_sum = bin_totals(predicted, survived, num_bins)
    return float(np.abs(predicted_sum - survived_sum).sum() / len(predicted))


def ece_noise_floor(predicted: np.ndarray, num_bins: int = NUM_BINS) -> float:
    """ECE to expect of predictions `[N]` that are exactly right: what chance alone does to the bins."""
    _, _, variances = bin_totals(predicted, predicted * (1 - predicted), num_bins)
    # The survivors of a bin are about normal; the mean distance of a normal variable from its mean is sqrt(2 / pi) of
    # its standard deviation.
    return float(math.sqrt(2 / math.pi) * np.sqrt(variances).sum() / len(predicted))


def brier_score(predicted: np.ndarray, survived: np.ndarray) -> float:
    """Mean squared distance of predictions `[N]` from what came true `[N]`; 0 is perfect."""
    return float(np.square(predicted - survived).mean())


def area_under_curve(predicted: np.ndarray, survived: np.ndarray) -> float:
    """
    AUC: the chance that a round that survived was predicted higher than one that did not, ties counting half; 0.5 is
    guessing, `nan` if all or none survived.
    """
    num_survived = int(survived.sum())
    num_pairs = num_survived * (len(survived) - num_survived)
    if num_pairs == 0:
        return float("nan")
    _, where, counts = np.unique(predicted, return_inverse=True, return_counts=True)
    mean_ranks = counts.cumsum() - (counts - 1) / 2  # tied rounds share the mean of their ranks, which start at 1
    rank_sum = mean_ranks[where][survived.astype(bool)].sum()
    return float((rank_sum - num_survived * (num_survived + 1) / 2) / num_pairs)


def fit_temperatures(logits: "Numbers", num_accepted: "Numbers", *, num_bins: int = NUM_BINS) -> tuple[float, ...]:
    """
    Fits one temperature for each position, left to right (section 3.2.1).

    At no position is the ECE of the prefix survival on these rounds above that of the raw logits: where no temperature
    keeps that promise after earlier ones, the nearest earlier position keeps a half, then a quarter, then nothing of
    its scaling, and the fit starts again. Positions that pass for calibrated keep the temperature 1.

    Args:
        logits (`torch.Tensor` or array of shape `[N, K]`): Confidence logits, before any temperature.
        num_accepted (`torch.Tensor` or array of shape `[N]`): Accepted drafts of each round, 0 to K; every round must
            have verified the whole block.
        num_bins (`int`, *optional*, defaults to 10): Bins of the ECE.

    Returns:
        `tuple[float, ...]` of length K, each within 0.2 to 5.

    Raises:
        ValueError: Shapes or values do not fit; the message says which.
    """
    return _fit(logits, num_accepted, num_bins, with_offsets=False)[0]


def fit_scaling(
    logits: "Numbers", num_accepted: "Numbers", *, num_bins: int = NUM_BINS
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """
    Fits a temperature for each position, and an offset where no temperature makes it pass for calibrated.

    Arguments, promises and errors are those of [`fit_temperatures`].

    Returns:
        `tuple[tuple[float, ...], tuple[float, ...]]`: K temperatures, and K offsets from -2 to 2, mostly 0.
    """
    return _fit(logits, num_accepted, num_bins, with_offsets=True)


def _fit(
    logits: "Numbers", num_accepted: "Numbers", num_bins: int, *, with_offsets: bool
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    logits, survived = checked_rounds(logits, num_accepted)
    raw = prefix_survival(logits)
    limits = [expected_calibration_error(raw[:, k], survived[:, k], num_bins) for k in range(logits.shape[1])]
    shares = [1.0] * logits.shape[1]
    while True:
        found, failed = _fit_once(logits, survived, limits, shares, num_bins, with_offsets)
        if failed is None:
            return tuple(temperature for temperature, _ in found), tuple(offset for _, offset in found)
        # With all earlier positions left alone, so may this one be: it is the raw product then, and this ends.
        nearest = max(k for k in range(failed) if found[k] != UNSCALED)
        shares[nearest] = shares[nearest] / 2 if shares[nearest] > SMALLEST_SHARE else 0.0


def checked_rounds(logits: "Numbers", num_accepted: "Numbers") -> tuple[np.ndarray, np.ndarray]:
    """`logits [N, K]` and `num_accepted [N]` as float64 logits and bool labels `[N, K]`, or `ValueError`."""
    values = np.asarray(logits, dtype=np.float64)
    accepted: np.ndarray = np.asarray(num_accepted)
    if values.ndim != 2 or 0 in values.shape:
        raise ValueError(f"confidence logits must have the shape [rounds, positions], got {list(values.shape)}")
    if accepted.shape != values.shape[:1]:
        raise ValueError(f"num_accepted must hold one number a round ({len(values)}), got {list(accepted.shape)}")
    if np.isnan(values).any():
        raise ValueError(f"{int(np.isnan(values).any(axis=1).sum())} rounds have a confidence logit that is nan")
    if accepted.dtype.kind not in "iu":
        raise ValueError(f"num_accepted must hold integers, got {accepted.dtype}")
    num_drafts = values.shape[1]
    if accepted.min() < 0 or accepted.max() > num_drafts:
        raise ValueError(
            f"num_accepted goes from {accepted.min()} to {accepted.max()}, but the logits are for {num_drafts} drafts"
        )
    return values, prefix_labels(accepted, num_drafts)


def _fit_once(
    logits: np.ndarray,
    survived: np.ndarray,
    limits: Sequence[float],
    shares: Sequence[float],
    num_bins: int,
    with_offsets: bool,
) -> tuple[list[Scaling], int | None]:
    """
    Left to right, with so much of each position's best scaling; stops at the first position where nothing keeps within
    its limit and returns that too.
    """
    scalings: list[Scaling] = []
    earlier = np.ones(len(logits))
    for k, (limit, share) in enumerate(zip(limits, shares, strict=True)):
        search = _Search(earlier, logits[:, k], survived[:, k], num_bins)
        temperature, offset = search.best(limit, with_offsets) if share else UNSCALED
        found = (temperature**share, offset * share)
        if share < 1 and search.error(found) > limit:
            found = UNSCALED
        if search.error(found) > limit:
            return scalings, k
        scalings.append(found)
        earlier = search.predicted(found)
    return scalings, None


class _Search:
    """The grid search at one position: `earlier [N]` survival of the prefix before it, its logits and labels `[N]`."""

    def __init__(self, earlier: np.ndarray, logits: np.ndarray, survived: np.ndarray, num_bins: int):
        self.earlier, self.logits, self.survived, self.num_bins = earlier, logits, survived, num_bins
        self.errors: dict[Scaling, float] = {}

    def predicted(self, scaling: Scaling) -> np.ndarray:
        temperature, offset = scaling
        return self.earlier * _sigmoid(self.logits / temperature + offset)

    def error(self, scaling: Scaling) -> float:
        if scaling not in self.errors:
            predicted = self.predicted(scaling)
            self.errors[scaling] = expected_calibration_error(predicted, self.survived, self.num_bins)
        return self.errors[scaling]

    def brier(self, scaling: Scaling) -> float:
        return brier_score(self.predicted(scaling), self.survived)

    def best(self, limit: float, with_offsets: bool) -> Scaling:
        """Unscaled unless another is better beyond noise, then the steadiest of the best; no offset unless needed."""
        if self.passes(UNSCALED, limit):
            return UNSCALED
        coarse = [float(t) for t in np.geomspace(MIN_TEMPERATURE, MAX_TEMPERATURE, COARSE_STEPS)]
        middle = int(np.argmin([self.error((t, 0.0)) for t in coarse]))
        low, high = coarse[max(middle - 1, 0)], coarse[min(middle + 1, len(coarse) - 1)]
        grid = sorted({1.0, *coarse, *map(float, np.geomspace(low, high, FINE_STEPS))})
        found = self.best_of([(t, 0.0) for t in grid], limit)
        if with_offsets and not self.passes(found, limit):
            offsets = np.linspace(-MAX_OFFSET, MAX_OFFSET, OFFSET_STEPS)
            found = self.best_of([UNSCALED, *((t, float(b)) for t in [1.0, *coarse] for b in offsets)], limit)
        return found

    def best_of(self, scalings: Sequence[Scaling], limit: float) -> Scaling:
        """Above `limit` only if all are."""
        raw = self.brier(UNSCALED)
        candidates = [scaling for scaling in scalings if self.brier(scaling) <= raw]
        lowest = min(map(self.error, candidates))
        accepted = max(lowest, min(lowest + EQUAL_FLOORS * self.noise_floor(), limit))
        if self.error(UNSCALED) <= accepted:
            return UNSCALED
        return min((scaling for scaling in candidates if self.error(scaling) <= accepted), key=self.brier)

    def passes(self, scaling: Scaling, limit: float) -> bool:
        """Whether predictions pass for calibrated."""
        return self.error(scaling) <= min(limit, CALIBRATED_FLOORS * self.noise_floor())

    def noise_floor(self) -> float:
        return ece_noise_floor(self.predicted(UNSCALED), self.num_bins)


def _sigmoid(values: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * values))  # no overflow at either end
