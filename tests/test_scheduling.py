"""Verify-length policies: causal, within their limits, and strict about what they are given."""

import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dspark.scheduling import ConfidenceThreshold, FixedLength, Scheduler, ScheduleRequest
from tests.reference import BestInHindsight, FirstDrop, TopSurvivals

STAIRCASE_SECONDS = [1, 1.6, 1.7, 2.5, 2.6, 2.7]


def request(confidence, max_lengths=None):
    table = None if confidence is None else torch.tensor(confidence, dtype=torch.float32)
    if max_lengths is None:
        max_lengths = [table.shape[1]] * table.shape[0]
    return ScheduleRequest(table, max_lengths, rows=list(range(len(max_lengths))), step=0)


tables = st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(0, 2**31))


def changed_after(confidence, row, position, generator):
    """The same table with other confidences of `row` after `position`: other drafts from `position` on."""
    other = confidence.clone()
    other[row, position + 1 :] = torch.rand(confidence.shape[1] - position - 1, generator=generator)
    return other


def looks_ahead(scheduler, drawn) -> bool:
    """Whether verifying some position depends on confidences that are known only after its draft was drawn."""
    num_rows, num_drafts, seed = drawn
    generator = torch.Generator().manual_seed(seed)
    confidence = torch.rand(num_rows, num_drafts, generator=generator)
    lengths = scheduler.verify_lengths(request(confidence.tolist()))
    for row in range(num_rows):
        for position in range(num_drafts):
            other = changed_after(confidence, row, position, generator)
            other_lengths = scheduler.verify_lengths(request(other.tolist()))
            if (lengths[row] > position) != (other_lengths[row] > position):
                return True
    return False


@pytest.mark.parametrize(
    "scheduler",
    [
        FixedLength(),
        FixedLength(2),
        ConfidenceThreshold(0.4),
        TopSurvivals(4),
        FirstDrop([1, 1.6, 1.7, 2.5, 2.6, 2.7]),
    ],
    ids=lambda s: repr(s) if isinstance(s, (FixedLength, ConfidenceThreshold)) else type(s).__name__,
)
def test_whether_a_position_is_verified_does_not_depend_on_its_draft(scheduler):
    @settings(max_examples=60, deadline=None)
    @given(tables)
    def holds(drawn):
        assert not looks_ahead(scheduler, drawn)

    holds()


def test_choosing_the_best_length_in_hindsight_looks_ahead():
    scheduler = BestInHindsight(STAIRCASE_SECONDS)
    assert any(looks_ahead(scheduler, (2, 5, seed)) for seed in range(20))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.floats(0, 1, width=32), min_size=4, max_size=4), min_size=1, max_size=4),
    st.floats(-0.5, 1, width=32),
    st.data(),
)
def test_the_threshold_stops_before_the_first_confidence_below_it(confidence, threshold, data):
    max_lengths = data.draw(st.lists(st.integers(0, 4), min_size=len(confidence), max_size=len(confidence)))
    lengths = ConfidenceThreshold(threshold).verify_lengths(request(confidence, max_lengths))
    for row, length in enumerate(lengths):
        expected = 0
        while expected < max_lengths[row] and confidence[row][expected] >= threshold:
            expected += 1
        assert length == expected


def test_a_confidence_equal_to_the_threshold_is_verified():
    assert ConfidenceThreshold(0.9).verify_lengths(request([[0.9, 0.9, 0.8999]])) == [2]


def test_a_confidence_that_is_not_a_number_is_not_verified():
    assert ConfidenceThreshold(0.5).verify_lengths(request([[0.9, math.nan, 0.9]])) == [1]


@pytest.mark.parametrize("threshold", [0, 0.0, -1])
def test_a_threshold_of_zero_or_less_verifies_everything_without_confidences(threshold):
    scheduler = ConfidenceThreshold(threshold)
    assert not scheduler.requires_confidence
    assert scheduler.verify_lengths(request(None, [3, 0, 7])) == [3, 0, 7]


def test_a_threshold_without_confidences_is_an_error_that_names_the_way_out():
    scheduler = ConfidenceThreshold(0.5)
    assert scheduler.requires_confidence
    with pytest.raises(ValueError, match="confidence head.*FixedLength"):
        scheduler.verify_lengths(request(None, [3]))


@pytest.mark.parametrize(("length", "expected"), [(None, [7, 2, 0]), (3, [3, 2, 0]), (9, [7, 2, 0]), (0, [0, 0, 0])])
def test_a_fixed_length_ends_at_the_limit_of_each_row(length, expected):
    scheduler = FixedLength(length)
    assert not scheduler.requires_confidence
    assert scheduler.verify_lengths(request(None, [7, 2, 0])) == expected


def test_no_more_is_drafted_than_can_be_verified():
    assert [FixedLength(length).draft_length(7) for length in (None, 0, 3, 9)] == [7, 0, 3, 7]
    assert ConfidenceThreshold(0.5).draft_length(7) == 7


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: FixedLength(-1), ValueError),
        (lambda: FixedLength(2.0), TypeError),
        (lambda: FixedLength(True), TypeError),
        (lambda: ConfidenceThreshold(1.01), ValueError),
        (lambda: ConfidenceThreshold(math.nan), ValueError),
        (lambda: ConfidenceThreshold("0.5"), TypeError),
        (lambda: ConfidenceThreshold(True), TypeError),
        (Scheduler, TypeError),
    ],
)
def test_policies_refuse_what_they_cannot_mean(make, error):
    with pytest.raises(error):
        make()


def test_policies_are_values():
    assert FixedLength(3) == FixedLength(3) != FixedLength(2)
    assert len({FixedLength(), FixedLength(None), ConfidenceThreshold(0.5), ConfidenceThreshold(0.5)}) == 2
    assert pickle.loads(pickle.dumps(ConfidenceThreshold(0.5))) == ConfidenceThreshold(0.5)
    with pytest.raises(AttributeError):
        FixedLength(3).length = 4
