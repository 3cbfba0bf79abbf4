"""Slabs keep what is committed, forget what is rejected, and exchange their content with stock caches."""

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DummyLayer, StaticCache

from hf_dspark.slab import SlabCache
from tests.tiny import tiny_target


def states(num_tokens, num_heads=2, head_size=4):
    return torch.randn(1, num_heads, num_tokens, head_size)


def extend(slab, query_lengths, layer=0, head_sizes=(4, 4)):
    """Writes random states for every row, commits them, and returns them per row `[H, q, D]`."""
    num_tokens = sum(query_lengths)
    keys, values = (states(num_tokens, head_size=size) for size in head_sizes)
    slab.update(keys, values, layer, layout=slab.layout(query_lengths))
    for row, length in enumerate(query_lengths):
        slab.lengths[row] += length
    return [part[0] for part in keys.split(list(query_lengths), dim=2)]


def row_keys(slab, row, layer=0):
    return slab.layers[layer].slabs[0][row, :, : slab.lengths[row]]


def test_nothing_is_allocated_before_the_first_write():
    slab = SlabCache(3)
    slab.layout([1, 2, 0])
    assert slab.layers == []


def test_every_row_holds_its_tokens_in_order():
    slab, written = SlabCache(3), [[], [], []]
    for query_lengths in ([3, 1, 2], [1, 1, 1], [0, 4, 1], [2]):
        for row, part in enumerate(extend(slab, query_lengths)):
            written[row].append(part)
    for row in range(3):
        assert torch.equal(row_keys(slab, row), torch.cat(written[row], dim=1))


def test_rejected_slots_are_overwritten():
    slab = SlabCache(2)
    first = extend(slab, [2, 2])
    slab.lengths = [1, 2]  # the second token of row 0 is rejected
    second = extend(slab, [1, 1])
    assert torch.equal(row_keys(slab, 0), torch.cat([first[0][:, :1], second[0]], dim=1))


def test_capacity_doubles_and_keeps_its_content():
    slab, written, capacities = SlabCache(2), [], []
    for _ in range(70):
        written.append(extend(slab, [1, 0])[0])
        capacities.append(slab.layers[0].slabs[0].shape[2])
    assert sorted(set(capacities)) == [16, 32, 64, 128]
    assert torch.equal(row_keys(slab, 0), torch.cat(written, dim=1))


def test_capacity_does_not_follow_the_longest_position_the_model_knows():
    target = tiny_target("qwen3", max_position_embeddings=1_000_000)
    cache = DynamicCache(config=target.config)
    with torch.no_grad():
        target(torch.ones(2, 10, dtype=torch.long), cache=cache, use_cache=True)
    slab = SlabCache(2)
    slab.import_dense(cache)
    assert all(part.shape[2] == 16 for layer in slab.layers for part in layer.slabs)


def test_only_active_rows_are_returned_and_as_views():
    slab = SlabCache(3)
    extend(slab, [2, 2, 2])
    keys, values = slab.update(states(2), states(2), 0, layout=slab.layout([1, 1]))
    assert keys.shape == values.shape == (2, 2, 3, 4)
    assert keys.untyped_storage().data_ptr() == slab.layers[0].slabs[0].untyped_storage().data_ptr()


def test_keys_and_values_may_differ_in_size():
    slab = SlabCache(2)
    extend(slab, [1, 2], head_sizes=(4, 6))
    assert [part.shape[3] for part in slab.layers[0].slabs] == [4, 6]


def test_swapping_rows_exchanges_content_and_lengths():
    slab = SlabCache(3)
    written = extend(slab, [1, 3, 5])
    slab.swap_rows(0, 2)
    assert slab.lengths == [5, 3, 1]
    assert torch.equal(row_keys(slab, 0), written[2])
    assert torch.equal(row_keys(slab, 2), written[0])


def dense_cache(target, ids, mask):
    cache = DynamicCache(config=target.config)
    with torch.no_grad():
        target(ids, attention_mask=mask, cache=cache, use_cache=True)
    return cache


def test_import_drops_masked_columns_wherever_they_are():
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 0, 1, 0, 1], [1, 1, 1, 1, 1, 1]])
    cache = dense_cache(tiny_target("qwen3"), torch.randint(3, 64, (3, 6)), mask)
    slab = SlabCache(3)
    slab.import_dense(cache, mask)
    assert slab.lengths == [4, 4, 6]
    for layer in range(3):
        for row in range(3):
            assert torch.equal(row_keys(slab, row, layer), cache.layers[layer].keys[row][:, mask[row].bool()])


@pytest.mark.parametrize("family", ["mistral", "gemma3", "gemma4", "deepseek_v3"])
def test_export_after_import_restores_the_stock_cache(family):
    target = tiny_target(family)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :6] = 0
    ids = torch.randint(3, 64, (2, 20))
    cache, again = dense_cache(target, ids, mask), DynamicCache(config=target.config)
    slab = SlabCache(2)
    slab.import_dense(cache, mask)
    slab.export_dense(again, [row.nonzero().flatten() for row in mask])
    assert again.get_seq_length() == 20
    for old, new in zip(cache.layers, again.layers, strict=True):
        assert type(new) is type(old)
        if type(old) is not DummyLayer:  # a layer that shares the keys of another holds none
            assert new.get_seq_length() == old.get_seq_length()
            kept = mask[:, -old.keys.shape[2] :].bool()
            for a, b in ((old.keys, new.keys), (old.values, new.values)):
                assert a.shape == b.shape
                assert torch.equal(a.transpose(1, 2)[kept], b.transpose(1, 2)[kept])
                assert not b.transpose(1, 2)[~kept].any()


def test_export_fills_a_cache_that_has_no_layers_yet():
    slab, cache = SlabCache(2), DynamicCache()
    for layer in range(2):
        slab.lengths = [0, 0]
        extend(slab, [1, 3], layer=layer)
    slab.export_dense(cache, [torch.tensor([4]), torch.tensor([1, 2, 4])])
    assert [layer.keys.shape[2] for layer in cache.layers] == [5, 5]
    assert torch.equal(cache.layers[1].keys[1][:, [1, 2, 4]], row_keys(slab, 1, 1))


def test_holes_within_a_sliding_window_cannot_be_packed():
    target, mask = tiny_target("mistral"), torch.ones(1, 12, dtype=torch.long)
    mask[0, 6] = 0
    cache = dense_cache(target, torch.randint(3, 64, (1, 12)), mask)
    with pytest.raises(ValueError, match="sliding window of 8"):
        SlabCache(1).import_dense(cache, mask)
    mask[0, 6], mask[0, 3] = 1, 0  # outside the window, nobody sees the hole
    SlabCache(1).import_dense(cache, mask)


@pytest.mark.parametrize("query_lengths", [[], [0, 0], [1, 1, 1], [1, -1]])
def test_a_layout_needs_tokens_and_rows_that_exist(query_lengths):
    with pytest.raises(ValueError, match="query_lengths"):
        SlabCache(2).layout(query_lengths)


def test_wrong_use_is_refused():
    slab, target = SlabCache(2), tiny_target("qwen3")
    with pytest.raises(ValueError, match="num_rows"):
        SlabCache(0)
    with pytest.raises(RuntimeError, match="packed_scope"):
        slab.update(states(1), states(1), 0)
    with pytest.raises(TypeError, match="StaticLayer"):
        SlabCache(1).import_dense(StaticCache(config=target.config, max_cache_len=8), torch.ones(1, 0))
    with pytest.raises(ValueError, match="attention_mask"):
        slab.import_dense(dense_cache(target, torch.ones(2, 4, dtype=torch.long), None), torch.ones(2, 5))
    extend(slab, [1, 2])
    with pytest.raises(ValueError, match="columns"):
        slab.export_dense(DynamicCache(), [torch.tensor([0]), torch.tensor([0])])
