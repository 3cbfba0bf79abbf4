"""A layout hides exactly what a row may not see, and padding loses no query."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dspark.layout import BlockWindow, PackedLayout

SPANS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), min_size=1, max_size=4).filter(
    lambda spans: any(length for _, length in spans)
)


def build(spans, bidirectional=False):
    return PackedLayout.build([start for start, _ in spans], [length for _, length in spans], bidirectional)


def visible_slots(spans, bidirectional, window):
    """The definition, query by query: the set of slots each packed token sees."""
    sees = []
    for start, length in spans:
        for slot in range(start, start + length):
            newest = start + length - 1 if bidirectional else slot
            sees.append({key for key in range(newest + 1) if window is None or key > slot - window})
    return sees


@settings(max_examples=300, deadline=None)
@given(SPANS, st.booleans(), st.sampled_from([None, 1, 2, 3, 8, 100]), st.sampled_from([1, 3]))
def test_a_query_sees_exactly_the_slots_of_the_definition(spans, bidirectional, window, groups):
    layout = build(spans, bidirectional)
    first, mask = layout.mask(window, groups=groups, dtype=torch.float32)
    longest = max(length for _, length in spans)
    if mask is None:
        mask = torch.zeros(len(spans), 1, groups * longest, layout.num_slots - first)
    assert mask.shape == (len(spans), 1, groups * longest, layout.num_slots - first)
    expected = iter(visible_slots(spans, bidirectional, window))
    for row, (_, length) in enumerate(spans):
        for query in range(length):
            slots = next(expected)
            for group in range(groups):
                open_slots = (mask[row, 0, group * longest + query] == 0).nonzero().flatten() + first
                assert set(open_slots.tolist()) == slots


@settings(max_examples=100, deadline=None)
@given(SPANS, st.sampled_from([(1, 1), (2, 1), (2, 3)]))
def test_unfolding_undoes_folding(spans, heads):
    num_heads, groups = heads
    layout = build(spans)
    num_tokens = sum(length for _, length in spans)
    query = torch.randn(1, num_tokens, num_heads * groups, 5)
    folded = layout.fold(query.transpose(1, 2), num_heads)
    assert folded.shape == (len(spans), num_heads, groups * max(length for _, length in spans), 5)
    assert torch.equal(layout.unfold(folded, groups), query)


@pytest.mark.parametrize("spans", [[(5, 1)], [(5, 1), (5, 1)], [(0, 1), (7, 0)]])
def test_no_mask_is_made_where_everything_is_visible(spans):
    assert build(spans).mask(None, groups=2, dtype=torch.float32) == (0, None)


def test_slots_before_every_window_are_not_even_read():
    first, mask = build([(50, 2), (60, 1)]).mask(8, groups=1, dtype=torch.float32)
    assert first == 43
    assert mask.shape[-1] == 61 - 43


def test_a_mask_is_built_once_per_kind_of_layer():
    layout = build([(5, 3)])
    one = layout.mask(8, groups=2, dtype=torch.float32)[1]
    assert layout.mask(8, groups=2, dtype=torch.float32)[1] is one
    assert layout.mask(None, groups=2, dtype=torch.float32)[1] is not one


def test_tokens_lie_behind_the_committed_slots_of_their_row():
    layout = build([(4, 2), (9, 0), (0, 3)])
    assert layout.rows.tolist() == [0, 0, 2, 2, 2]
    assert layout.slots.tolist() == [4, 5, 0, 1, 2]
    assert layout.num_slots == 6


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("from_anchor", [True, False])
@pytest.mark.parametrize("size", [1, 3, 5, 50])
def test_a_block_window_hides_what_its_rule_says_in_a_ragged_batch(size, from_anchor, causal, groups):
    starts, block = (7, 0, 12, 2), 4
    layout = PackedLayout.build(starts, [block] * len(starts), bidirectional=True)
    first, mask = layout.mask(BlockWindow(size, causal, from_anchor), groups=groups, dtype=torch.float32)
    for row, start in enumerate(starts):
        for slot in range(block):
            query = start + slot
            oldest = start - size if from_anchor else query - size + 1
            newest = query if causal else start + block - 1
            expected = [oldest <= key <= newest for key in range(layout.num_slots)]
            assert not any(expected[:first])
            for group in range(groups):
                seen = [True] * (layout.num_slots - first)
                if mask is not None:
                    seen = (mask[row, 0, group * block + slot] == 0).tolist()
                assert seen == expected[first:]
