"""Temperatures that were put in are found again; no position gets worse; figures equal slow, obvious ones."""

import math

import numpy as np
import pytest
import torch

from hf_dspark.temperature_scaling import (
    area_under_curve,
    brier_score,
    conditional_acceptance,
    ece_noise_floor,
    expected_calibration_error,
    fit_scaling,
    fit_temperatures,
    prefix_labels,
    prefix_survival,
)


def synthetic_rounds(temperatures, num_rounds=20_000, seed=0, shift=0.0):
    """Logits `[N, K]` whose truth is `sigmoid(logit / T - shift)`, and accepted drafts `[N]` drawn from it."""
    generator = np.random.default_rng(seed)
    truth = generator.normal(0.8, 1.5, (num_rounds, len(temperatures)))
    accepted = generator.random(truth.shape) < 1 / (1 + np.exp(shift - truth))
    return truth * np.array(temperatures), accepted.cumprod(axis=1).sum(axis=1)


def errors(logits, num_accepted, *scaling):
    predicted, survived = prefix_survival(logits, *scaling), prefix_labels(num_accepted, logits.shape[1])
    return np.array([expected_calibration_error(predicted[:, k], survived[:, k]) for k in range(logits.shape[1])])


@pytest.mark.parametrize("temperatures", [(1.6, 0.6, 2.2, 1.4), (0.5, 3.0, 0.7, 2.0)])
def test_known_temperatures_are_recovered_and_the_error_falls_at_every_position(temperatures):
    logits, num_accepted = synthetic_rounds(temperatures)
    fitted = fit_temperatures(logits, num_accepted)
    assert fitted == pytest.approx(temperatures, rel=0.15)
    assert (errors(logits, num_accepted, fitted) < errors(logits, num_accepted)).all()
    fresh = synthetic_rounds(temperatures, seed=1)
    assert (errors(*fresh, fitted) < errors(*fresh)).all()
    assert errors(*fresh, fitted).mean() < 0.01


@pytest.mark.parametrize("seed", range(3))
def test_what_is_calibrated_already_is_left_alone(seed):
    assert fit_temperatures(*synthetic_rounds((1.0, 1.0, 1.0), seed=seed)) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_rounds", [5, 60, 1000])
def test_no_position_is_worse_than_raw_even_where_temperatures_cannot_help(seed, num_rounds):
    """A shift of the logits is nothing a temperature can undo, and few rounds mislead the fit."""
    logits, num_accepted = synthetic_rounds((1.5, 0.7, 1.0, 2.0, 0.6), num_rounds, seed, shift=0.8)
    fitted = fit_temperatures(logits, num_accepted)
    assert (errors(logits, num_accepted, fitted) <= errors(logits, num_accepted) + 1e-12).all()


def test_offsets_undo_what_temperatures_cannot_and_are_not_used_where_they_can():
    scales = (1.5, 0.7, 1.0, 2.0)
    fitted = fit_scaling(*synthetic_rounds(scales, shift=0.8))
    assert fitted[0] == pytest.approx(scales, rel=0.25) and fitted[1] == pytest.approx([-0.8] * 4, abs=0.25)
    fresh = synthetic_rounds(scales, seed=1, shift=0.8)
    alone = fit_temperatures(*synthetic_rounds(scales, shift=0.8))
    assert errors(*fresh, *fitted).mean() < 0.012 < errors(*fresh, alone).mean() < errors(*fresh).mean()
    even = synthetic_rounds((1.0, 2.0, 0.5))
    assert fit_scaling(*even)[1] == (0.0,) * 3
    assert fit_scaling(*even)[0] == fit_temperatures(*even)


@pytest.mark.parametrize("num_rounds", [5, 60, 1000])
def test_no_position_is_worse_than_raw_with_offsets_either(num_rounds):
    logits, num_accepted = synthetic_rounds((1.5, 0.7, 1.0), num_rounds, seed=2, shift=-0.9)
    fitted = fit_scaling(logits, num_accepted)
    assert (errors(logits, num_accepted, *fitted) <= errors(logits, num_accepted) + 1e-12).all()


def test_survival_with_impossible_offsets_is_refused():
    for offsets in ([0.0], [0.0, float("nan")]):
        with pytest.raises(ValueError, match="2 finite offsets"):
            prefix_survival(np.zeros((3, 2)), None, offsets)


def test_an_earlier_position_gives_way_to_a_later_one():
    # At position 1 all logits want a high temperature (half of the rounds survive at a logit of 2); position 2 never
    # rejects at a logit so high that no temperature moves it, and its raw product, too, is best with the rest at 1:
    # the survivors at 2 are exactly as many as the raw product of position 1 says.
    num_rounds = 1000
    logits = np.full((num_rounds, 2), 2.0)
    logits[:, 1] = 400.0
    num_accepted = np.zeros(num_rounds, dtype=int)
    num_accepted[: round(num_rounds / (1 + math.exp(-2)))] = 2
    assert fit_temperatures(logits, num_accepted) == (1.0, 1.0)
    num_accepted[:] = 0
    num_accepted[: num_rounds // 2] = 1
    first, second = fit_temperatures(logits, num_accepted)
    assert first == 5.0 and second == 1.0


def test_an_earlier_position_gives_way_no_further_than_it_must():
    # Only the first confidences are off. All of their scaling would leave a later position, whose raw figures are good
    # by chance, a little worse; half of it does not, and is worth having.
    generator = np.random.default_rng(29)
    logits = generator.normal(0.3, 1.2, (2000, 4))
    accepted = generator.random(logits.shape) < 1 / (1 + np.exp(-logits))
    logits[:, 0] += 0.6
    num_accepted = accepted.cumprod(axis=1).sum(axis=1)
    alone = fit_scaling(logits[:, :1], num_accepted.clip(max=1))
    temperatures, offsets = fit_scaling(logits, num_accepted)
    assert alone == ((1.0,), (-0.5,)) and (temperatures[0], offsets[0]) == (1.0, -0.25)
    before, after = errors(logits, num_accepted), errors(logits, num_accepted, temperatures, offsets)
    assert (after <= before + 1e-12).all() and after[0] < 0.6 * before[0]


def test_scaling_keeps_the_order_of_confidences_at_each_position():
    logits, num_accepted = synthetic_rounds((1.6, 0.6, 2.2), 2000)
    fitted = np.array(fit_temperatures(logits, num_accepted))
    assert (fitted > 0).all()
    assert np.array_equal(np.argsort(logits, axis=0), np.argsort(logits / fitted, axis=0))
    survival = prefix_survival(logits, fitted)
    assert (np.diff(survival, axis=1) <= 0).all()


def test_tensors_and_arrays_give_the_same():
    logits, num_accepted = synthetic_rounds((1.6, 0.6), 500)
    assert fit_temperatures(torch.tensor(logits), torch.tensor(num_accepted)) == fit_temperatures(logits, num_accepted)


@pytest.mark.parametrize("accepted", [0, 3])
@pytest.mark.parametrize("num_rounds", [1, 7, 300])
def test_all_or_nothing_accepted_and_tiny_sets_have_temperatures(accepted, num_rounds):
    logits = np.random.default_rng(0).normal(0, 2, (num_rounds, 3))
    num_accepted = np.full(num_rounds, accepted)
    fitted = fit_temperatures(logits, num_accepted)
    assert all(0.2 - 1e-9 <= t <= 5 + 1e-9 for t in fitted)
    assert (errors(logits, num_accepted, fitted) <= errors(logits, num_accepted)).all()


def test_enormous_logits_neither_overflow_nor_warn():
    with np.errstate(all="raise", under="ignore"):
        survival = prefix_survival(np.array([[1e4, -1e4], [800.0, 0.0]]), (0.2, 0.2))
    assert survival.tolist() == [[1.0, 0.0], [1.0, 0.5]]


@pytest.mark.parametrize(
    "logits, num_accepted, said",
    [
        ([[0.0, math.nan]], [1], "1 rounds have a confidence logit that is nan"),
        ([0.0, 1.0], [1, 0], r"shape \[rounds, positions\], got \[2\]"),
        (np.zeros((0, 3)), np.zeros(0, int), r"got \[0, 3\]"),
        (np.zeros((4, 3)), np.zeros(5, int), r"one number a round \(4\), got \[5\]"),
        (np.zeros((2, 3)), [0, 4], "from 0 to 4, but the logits are for 3 drafts"),
        (np.zeros((2, 3)), [-1, 1], "from -1 to 1"),
        (np.zeros((2, 3)), [0.5, 1.0], "integers, got float64"),
    ],
)
def test_rounds_that_are_none_are_refused(logits, num_accepted, said):
    with pytest.raises(ValueError, match=said):
        fit_temperatures(logits, num_accepted)


@pytest.mark.parametrize("temperatures", [(1.0,), (1.0, 0.0), (1.0, -1.0), (1.0, math.nan)])
def test_temperatures_that_are_none_are_refused(temperatures):
    with pytest.raises(ValueError, match="2 positive temperatures"):
        prefix_survival(np.zeros((3, 2)), temperatures)


def predictions(seed, num_rounds=200):
    generator = np.random.default_rng(seed)
    predicted = generator.random(num_rounds).round(2)  # with ties, 0 and 1 among them
    predicted[:2] = 0.0, 1.0
    return predicted, generator.random(num_rounds) < predicted**2


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_bins", [1, 10, 15])
def test_the_calibration_error_is_the_weighted_gap_of_each_bin(seed, num_bins):
    predicted, survived = predictions(seed)
    total = 0.0
    for index in range(num_bins):
        inside = [
            i for i, p in enumerate(predicted) if min(int(p * num_bins), num_bins - 1) == index
        ]  # the last bin has both its ends
        if inside:
            confidence = sum(predicted[i] for i in inside) / len(inside)
            accuracy = sum(bool(survived[i]) for i in inside) / len(inside)
            total += len(inside) / len(predicted) * abs(confidence - accuracy)
    assert expected_calibration_error(predicted, survived, num_bins) == pytest.approx(total, abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_the_area_under_the_curve_counts_pairs_in_the_right_order(seed):
    predicted, survived = predictions(seed)
    pairs = [(p, q) for p in predicted[survived] for q in predicted[~survived]]
    score = sum(1.0 if p > q else 0.5 if p == q else 0.0 for p, q in pairs) / len(pairs)
    assert area_under_curve(predicted, survived) == pytest.approx(score, abs=1e-12)


def test_the_area_under_the_curve_of_one_kind_is_nan():
    assert math.isnan(area_under_curve(np.array([0.2, 0.9]), np.array([True, True])))
    assert math.isnan(area_under_curve(np.array([0.2, 0.9]), np.array([False, False])))


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_the_noise_floor_is_what_perfect_predictions_score_on_average(scale):
    generator = np.random.default_rng(0)
    predicted = scale * generator.random(500)
    drawn = [expected_calibration_error(predicted, generator.random(500) < predicted) for _ in range(300)]
    assert ece_noise_floor(predicted) == pytest.approx(np.mean(drawn), rel=0.05)


def test_the_brier_score_is_the_mean_squared_error():
    predicted, survived = predictions(0)
    expected = sum((p - bool(up)) ** 2 for p, up in zip(predicted, survived, strict=True)) / len(predicted)
    assert brier_score(predicted, survived) == pytest.approx(expected)


def test_a_prefix_survives_if_that_many_drafts_were_accepted():
    assert prefix_labels([0, 2, 3], 3).tolist() == [[False] * 3, [True, True, False], [True] * 3]


def test_conditional_acceptance_is_over_the_rounds_that_got_there():
    values = conditional_acceptance([0, 1, 2, 2], 4)
    assert values[:3] == (0.75, pytest.approx(2 / 3), 0.0)
    assert math.isnan(values[3])
