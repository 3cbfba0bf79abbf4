"""A block of new tokens is cut where plain `generate`, looking after every token, would have stopped."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from hf_dspark.stopping import StopChecker


class StopAfter(StoppingCriteria):
    """A user's own: stops when the last tokens are the given ones, and keeps the shapes it saw."""

    def __init__(self, *token_ids):
        self._token_ids = list(token_ids)
        self.shapes = []

    def __call__(self, input_ids, scores, **kwargs):
        assert scores is None
        self.shapes.append(tuple(input_ids.shape))
        return torch.tensor([row[-len(self._token_ids) :] == self._token_ids for row in input_ids.tolist()])


class AnyEos(EosTokenCriteria):
    """Stops at every token, whatever its parent would say."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.ones(len(input_ids), dtype=torch.bool)


def cut(criteria, prefix, new_ids):
    """What `StopChecker` keeps, given a list as prefix."""
    return StopChecker(criteria).kept(new_ids, width=len(prefix), prefix=lambda: torch.tensor(prefix))


def plain_kept(criteria, prefix, new_ids):
    """What the token-by-token loop of `generate` keeps."""
    for count in range(1, len(new_ids) + 1):
        ids = torch.tensor([[*prefix, *new_ids[:count]]])
        if criteria(ids, None).all():
            return count, True
    return len(new_ids), False


@settings(max_examples=150, deadline=None)
@given(
    prefix=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    new_ids=st.lists(st.integers(0, 4), min_size=0, max_size=8),
    eos_ids=st.lists(st.integers(0, 4), max_size=2),
    max_length=st.none() | st.integers(1, 14),
    own=st.lists(st.integers(0, 4), max_size=2),
)
def test_a_block_is_cut_where_the_token_by_token_loop_stops(prefix, new_ids, eos_ids, max_length, own):
    criteria = StoppingCriteriaList()
    if max_length is not None:
        criteria.append(MaxLengthCriteria(max_length))
    if eos_ids:
        criteria.append(EosTokenCriteria(eos_ids))
    if own:
        criteria.append(StopAfter(*own))
    assert cut(criteria, prefix, new_ids) == plain_kept(criteria, prefix, new_ids)


@pytest.mark.parametrize(("new_ids", "expected"), [([9, 1, 2], 1), ([1, 9, 2], 2), ([1, 2, 8], 3), ([1, 2, 3], None)])
def test_the_first_end_of_sequence_ends_the_row_wherever_it_is(new_ids, expected):
    criteria = StoppingCriteriaList([EosTokenCriteria([8, 9])])
    assert cut(criteria, [9, 8], new_ids) == (expected or 3, expected is not None)


def test_a_stop_token_beyond_the_maximum_length_does_not_count():
    criteria = StoppingCriteriaList([MaxLengthCriteria(4), EosTokenCriteria(9)])
    assert StopChecker(criteria).max_length == 4
    assert cut(criteria, [1, 1], [3, 3, 9]) == (2, True)
    assert cut(criteria, [1, 1], [9, 3, 3]) == (1, True)


def test_ids_are_not_gathered_for_criteria_that_do_not_look_at_them():
    def prefix():
        raise AssertionError("no criterion looks at ids")

    checker = StopChecker([MaxLengthCriteria(4), EosTokenCriteria(9)])
    assert checker.kept([3, 9, 3], width=1, prefix=prefix) == (2, True)


def test_the_smallest_maximum_length_holds():
    assert StopChecker([MaxLengthCriteria(9), MaxLengthCriteria(5)]).max_length == 5
    assert StopChecker([EosTokenCriteria(3)]).max_length is None


def test_the_tokens_that_end_a_row_are_known():
    assert StopChecker([EosTokenCriteria([3, 4]), EosTokenCriteria(7), AnyEos(9)]).eos_ids == {3, 4, 7}
    assert StopChecker([MaxLengthCriteria(5)]).eos_ids == set()


def test_without_criteria_everything_is_kept():
    assert cut([], [1], [2, 3]) == (2, False)


def test_own_criteria_see_one_row_growing_by_one_token_until_they_stop():
    criterion = StopAfter(7)
    assert cut([criterion], [1, 2], [3, 7, 7]) == (2, True)
    assert criterion.shapes == [(1, 3), (1, 4)]


def test_a_subclass_of_a_known_criterion_decides_for_itself():
    assert cut([AnyEos(9)], [1], [2, 9]) == (1, True)


def test_criteria_that_answer_with_a_plain_bool_are_understood():
    assert cut([lambda ids, scores: ids[0, -1].item() == 5], [1], [2, 5, 3]) == (2, True)


def test_time_that_has_run_out_ends_the_row_after_one_token():
    assert cut([MaxTimeCriteria(0.0, initial_timestamp=0.0)], [1], [2, 3]) == (1, True)
    assert cut([MaxTimeCriteria(3600.0)], [1], [2, 3]) == (2, False)


def test_criteria_are_not_changed():
    eos = EosTokenCriteria([3, 4])
    before = eos.eos_token_id
    cut([eos], [1], [2])
    assert eos.eos_token_id is before


TOKENS = ["<pad>", *"abcdefxy\n", "\n\n", "x\n", "\ny"]


@pytest.fixture(scope="module")
def tokenizer():
    merges = [tuple(token) for token in TOKENS if len(token) == 2]
    inner = Tokenizer(models.BPE({token: index for index, token in enumerate(TOKENS)}, merges))
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>")


def ids_of(*tokens):
    return [TOKENS.index(token) for token in tokens]


@pytest.mark.parametrize(
    ("prefix", "new_ids", "kept"),
    [
        (["a"], ["b", "\n", "\n", "c"], 3),
        (["a", "\n"], ["\n", "b"], 1),
        (["a", "x\n"], ["\ny", "b", "b"], 1),
        (["a"], ["\n\n", "b"], 1),
        (["\n\n", "a"], ["b", "\n", "b"], None),
    ],
    ids=["inside the block", "begun before it", "inside tokens", "one token", "in the past or by half"],
)
def test_stop_strings_end_with_the_completing_token(tokenizer, prefix, new_ids, kept):
    criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, ["\n\n"]), MaxLengthCriteria(50)])
    prefix, new_ids = ids_of(*prefix), ids_of(*new_ids)
    expected = (kept or len(new_ids), kept is not None)
    assert cut(criteria, prefix, new_ids) == expected
    assert plain_kept(criteria, prefix, new_ids) == expected


class RowLimits(StoppingCriteria):
    """A limit for each batch row."""

    def __init__(self, limits):
        self.limits = torch.tensor(limits)

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] >= self.limits


def test_a_criterion_bound_to_the_batch_is_asked_for_its_own_row():
    checker = StopChecker([RowLimits([4, 6])], batch_size=2)
    kept = [checker.kept([7, 7, 7, 7], width=2, prefix=lambda: torch.tensor([1, 1]), row=row) for row in range(2)]
    assert kept == [(2, True), (4, True)]
