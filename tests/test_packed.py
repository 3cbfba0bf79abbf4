"""A packed forward gives every request what it would get alone, or an error; nobody else notices it runs."""

import copy
import random
import threading

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from hf_dspark.packed import (
    SlabCache,
    install_packed_attention,
    packed_attention,
    packed_forward,
    packed_scope,
    packs,
    uninstall_packed_attention,
)
from tests.drafters import tiny_drafter
from tests.tiny import FAMILIES, PAD_ID, VOCAB_SIZE, tiny_target


def left_padded(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.full((len(lengths), max(lengths)), PAD_ID)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, -length:] = torch.randint(3, VOCAB_SIZE, (length,), generator=generator)
        mask[row, -length:] = 1
    return ids, mask


def plain_tokens(target, ids, mask, num_tokens, **kwargs):
    output = target.generate(
        ids, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False, pad_token_id=PAD_ID, **kwargs
    )
    return output[:, ids.shape[1] :]


@torch.no_grad()
def prefill(target, ids, mask, cache):
    """A dense forward; returns the slab and the first token of every row."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = target(ids, attention_mask=mask, position_ids=positions, cache=cache, use_cache=True).logits
    slab = SlabCache(len(ids))
    slab.import_dense(cache, mask)
    return slab, logits[:, -1].argmax(-1).tolist()


def forward(target, slab, tokens, **kwargs):
    """Packs `tokens[r]` behind the committed slots of row r; returns the model's output, and logits by row."""
    positions = [slab.lengths[row] + depth for row, part in enumerate(tokens) for depth in range(len(part))]
    output = packed_forward(
        target,
        torch.tensor([sum(tokens, [])]),
        torch.tensor([positions]),
        cache=slab,
        layout=slab.layout([len(part) for part in tokens]),
        **kwargs,
    )
    return output, output.logits[0].split([len(part) for part in tokens])


def speculate(target, slab, first, right, num_tokens, seed=0):
    """
    Greedy decoding by guessing: every row guesses 0 to 4 tokens, some of `right`, then wrong ones; the slab rolls back
    by its lengths, and rows that finish are swapped behind the others.

    Returns the tokens, how many guesses failed, and which batch row each slab row holds in the end.
    """
    choose, order, text, num_failed = random.Random(seed), list(range(len(first))), [[token] for token in first], 0
    num_active = len(order)
    while True:
        for entry in reversed(range(num_active)):
            if len(text[order[entry]]) >= num_tokens:
                num_active -= 1
                slab.swap_rows(entry, num_active)
                order[entry], order[num_active] = order[num_active], order[entry]
        if num_active == 0:
            return torch.tensor(text), num_failed, order
        guesses = []
        for row in order[:num_active]:
            done = len(text[row])
            guess = right[row, done : min(done + choose.randrange(5), num_tokens - 1)].tolist()
            num_right = choose.randrange(len(guess) + 1)
            guesses.append(
                [(t + (i >= num_right) * choose.randrange(1, 60)) % VOCAB_SIZE for i, t in enumerate(guess)]
            )
        logits = forward(target, slab, [[text[r][-1], *g] for r, g in zip(order, guesses, strict=False)])[1]
        for entry, guess in enumerate(guesses):
            told = logits[entry].argmax(-1).tolist()
            num_right = next((i for i, token in enumerate(guess) if token != told[i]), len(guess))
            num_failed += len(guess) - num_right
            slab.lengths[entry] += num_right + 1
            text[order[entry]] += told[: num_right + 1]


WINDOWED = ["mistral", "gemma2", "gemma3", "gpt_oss", "gemma4"]


@pytest.mark.parametrize(("family", "knows_windows"), [(f, True) for f in FAMILIES] + [(f, False) for f in WINDOWED])
def test_speculation_on_a_ragged_batch_equals_plain_generate(family, knows_windows):
    target, (ids, mask) = tiny_target(family), left_padded([1, 3, 9, 17])
    right = plain_tokens(target, ids, mask, 32)
    slab, first = prefill(target, ids, mask, DynamicCache(config=target.config if knows_windows else None))
    text, num_failed, _ = speculate(target, slab, first, right, 32)
    assert torch.equal(text, right)
    assert num_failed > 5


@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3"])
def test_speculation_on_one_row_equals_plain_generate(family):
    target, (ids, mask) = tiny_target(family), left_padded([7])
    right = plain_tokens(target, ids, mask, 32)
    slab, first = prefill(target, ids, mask, DynamicCache())
    assert torch.equal(speculate(target, slab, first, right, 32)[0], right)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_packed_from_the_start_score_as_they_do_alone(family):
    target, prompts = tiny_target(family), [[5], [7, 8, 9], list(range(3, 23))]
    logits = forward(target, SlabCache(3), prompts)[1]
    for prompt, row_logits in zip(prompts, logits, strict=True):
        with torch.no_grad():
            alone = target(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(row_logits, alone, rtol=1e-4, atol=1e-4)


def test_a_row_does_not_depend_on_the_others():
    target, rows = tiny_target("gemma3"), [[4, 5, 6, 7], [9, 8]]
    alone = forward(target, SlabCache(3), [rows[0]])[1][0]
    for other in ([3], [20, 21, 22, 23, 24, 25, 26, 27, 28], []):
        beside = forward(target, SlabCache(3), [rows[0], other, rows[1]])[1][0]
        torch.testing.assert_close(beside, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gpt_oss", "deepseek_v3"])
def test_rejected_slots_are_never_visible(family):
    target, prompts = tiny_target(family), [[4, 5, 6, 7, 8], [9]]
    clean, dirty = SlabCache(2), SlabCache(2)
    for slab in (clean, dirty):
        forward(target, slab, prompts)
        slab.lengths = [5, 1]
    forward(target, dirty, [[10, 11, 12], [13, 14, 15, 16, 17]])  # nothing of it is committed
    for tokens in ([[3, 20], [21]], [[22], [23]]):
        expected, logits = (forward(target, slab, tokens)[1] for slab in (clean, dirty))
        for a, b in zip(expected, logits, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        for slab in (clean, dirty):
            slab.lengths = [length + len(part) for length, part in zip(slab.lengths, tokens, strict=True)]


def test_a_sliding_window_ends_where_the_model_says():
    torch.manual_seed(0)
    slab, window, start = SlabCache(1), 8, 20
    slab.lengths = [start]
    query = torch.randn(1, 4, 1, 8)

    def output(changed=None):
        torch.manual_seed(1)
        keys, values = slab.update(torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8), 0, layout=slab.layout([1]))
        values = values.clone()
        values[:, :, :start] = 1.0
        if changed is not None:
            values[:, :, changed] += 1
        layout = slab.layout([1])
        return packed_attention(None, query, keys, values, sliding_window=window, layout=layout)[0]

    assert torch.equal(output(changed=start - window), output())
    assert not torch.equal(output(changed=start - window + 1), output())


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma3", "gemma4", "deepseek_v3"])
def test_plain_generate_goes_on_with_an_exported_cache(family):
    target, (ids, mask) = tiny_target(family), left_padded([1, 3, 9, 17])
    right = plain_tokens(target, ids, mask, 32)
    cache = DynamicCache(config=target.config)
    slab, first = prefill(target, ids, mask, cache)
    text, _, order = speculate(target, slab, first, right, 16)
    for row in range(4):  # each batch row back to its place
        found = order.index(row)
        slab.swap_rows(row, found)
        order[row], order[found] = order[found], order[row]
    ids = torch.cat([ids, text[:, :16]], dim=1)
    mask = torch.cat([mask, torch.ones_like(text[:, :16])], dim=1)
    slab.lengths = [int(row.sum()) - 1 for row in mask]  # the newest token is not in the cache yet
    slab.export_dense(cache, [row.nonzero().flatten()[:-1] for row in mask])
    assert torch.equal(plain_tokens(target, ids, mask, 16, cache=cache), right[:, 16:])


def test_masked_columns_inside_a_kept_cache_are_skipped():
    target, (ids, mask) = tiny_target("llama"), left_padded([6, 9])
    mask[0, 5], mask[1, 3:5] = 0, 0
    right = plain_tokens(target, ids, mask, 20)
    slab, first = prefill(target, ids, mask, DynamicCache())
    assert torch.equal(speculate(target, slab, first, right, 20)[0], right)


def test_plain_generate_in_another_thread_does_not_notice():
    target, (ids, mask) = copy.deepcopy(tiny_target("mistral")), left_padded([3, 9])
    right = plain_tokens(target, ids, mask, 24)
    slab, first = prefill(target, ids, mask, DynamicCache())
    meeting, met, texts = threading.Barrier(2), threading.local(), []

    def meet(*_):  # the first forwards of both threads are under way at the same time
        if not hasattr(met, "already"):
            met.already = True
            meeting.wait(timeout=60)

    target.model.layers[1].register_forward_pre_hook(meet)
    threads = [
        threading.Thread(target=lambda: texts.append(plain_tokens(target, ids, mask, 24))),
        threading.Thread(target=lambda: texts.append(speculate(target, slab, first, right, 24)[0])),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 2 and all(torch.equal(text, right) for text in texts)


def test_model_and_config_stay_as_they_are():
    target = tiny_target("qwen3")
    before, implementation = copy.deepcopy(target.config.to_dict()), target.config._attn_implementation
    forward(target, SlabCache(1), [[4, 5]])
    assert target.config.to_dict() == before
    assert target.config._attn_implementation == implementation
    assert ALL_ATTENTION_FUNCTIONS.get_interface("eager", None) is not packed_attention


def test_no_graph_grows_through_the_slab():
    target, slab = tiny_target("qwen3"), SlabCache(1)
    output, _ = forward(target, slab, [[4, 5]])
    assert not output.logits.requires_grad
    assert not any(part.requires_grad for layer in slab.layers for part in layer.slabs)


def test_only_the_hidden_states_asked_for_are_returned():
    target = tiny_target("qwen3")
    output, _ = forward(target, SlabCache(2), [[4, 5], [6]], output_hidden_states=[1, 3])
    assert [states is not None for states in output.hidden_states] == [False, True, False, True]
    assert output.hidden_states[1].shape == (1, 3, 32)


def reference_attention(query, key, value, scaling, softcap, sinks, hidden):
    """One row, one head at a time, in float64."""
    groups = query.shape[0] // key.shape[0]
    outputs = []
    for head in range(query.shape[0]):
        scores = query[head].double() @ key[head // groups].double().T * scaling
        if softcap is not None:
            scores = (scores / softcap).tanh() * softcap
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks[head].double().expand(len(scores), 1)], dim=1)
        probs = scores.softmax(-1)[:, : key.shape[1]]
        outputs.append(probs @ value[head // groups].double())
    return torch.stack(outputs, dim=1).float()


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("query_lengths", [[3], [1, 1], [2, 1, 4]])
def test_packed_attention_is_attention_of_every_row(query_lengths, window, with_sinks, softcap):
    torch.manual_seed(0)
    num_rows, num_tokens = len(query_lengths), sum(query_lengths)
    slab = SlabCache(num_rows)
    past = [2, 7, 5][:num_rows]
    slab.update(torch.randn(1, 2, sum(past), 8), torch.randn(1, 2, sum(past), 6), 0, layout=slab.layout(past))
    slab.lengths = past
    layout, query = slab.layout(query_lengths), torch.randn(1, 6, num_tokens, 8)
    sinks = torch.randn(6) if with_sinks else None
    keys, values = slab.update(torch.randn(1, 2, num_tokens, 8), torch.randn(1, 2, num_tokens, 6), 0, layout=layout)
    kwargs = {"scaling": 0.7, "sliding_window": window, "softcap": softcap, "s_aux": sinks, "layout": layout}
    output, weights = packed_attention(None, query, keys, values, None, **kwargs)
    assert output.shape == (1, num_tokens, 6, 6) and weights is None
    for row, part in enumerate(output[0].split(query_lengths)):
        end = past[row] + query_lengths[row]
        slots, own = torch.arange(end), torch.arange(past[row], end)[:, None]
        hidden = (slots > own) | (slots <= own - (window or 100))
        queries = query[0].split(query_lengths, dim=1)[row]
        expected = reference_attention(queries, keys[row, :, :end], values[row, :, :end], 0.7, softcap, sinks, hidden)
        torch.testing.assert_close(part, expected, rtol=1e-4, atol=1e-5)


def tiny(model_type, **kwargs):
    common = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**common, **kwargs)).eval()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (lambda: tiny("gpt2", reorder_and_upcast_attn=True, attn_implementation="eager"), "attention interface"),
        (lambda: tiny("doge", intermediate_size=48, num_key_value_heads=2), "attention interface"),
        (
            lambda: tiny("phimoe", intermediate_size=48, num_key_value_heads=2, num_local_experts=2, sliding_window=8),
            "sliding window",
        ),
    ],
    ids=["attention of its own", "mask of its own", "window of its own"],
)
def test_a_model_that_goes_around_the_interface_raises(target, message):
    with pytest.raises(RuntimeError, match=message):
        forward(target(), SlabCache(1), [[4, 5, 6]])


def test_a_trial_finds_such_a_model_out_before_generation_starts():
    doge = tiny("doge", intermediate_size=48, num_key_value_heads=2)
    packable, reason = packs(doge, {}, torch.device("cpu"), max_length=20)
    assert not packable and "attention interface" in reason
    drafter, inputs = tiny_drafter(doge), torch.tensor([[4, 5, 6], [7, 8, 9]])
    plain = doge.generate(inputs, max_new_tokens=8, do_sample=False)
    assert torch.equal(doge.generate(inputs, max_new_tokens=8, do_sample=False, assistant_model=drafter), plain)


def test_the_trial_is_made_once_for_each_model(monkeypatch):
    target, calls = tiny_target("llama", num_hidden_layers=2), []
    monkeypatch.setattr("hf_dspark.packed.packed_forward", lambda *args, **kwargs: calls.append(args))
    for _ in range(3):
        assert packs(target, {}, torch.device("cpu"), max_length=20) == (True, "")
    assert len(calls) == 1


def test_installing_is_idempotent_and_can_be_undone():
    uninstall_packed_attention()
    original = AttentionInterface.get_interface
    install_packed_attention()
    installed = AttentionInterface.get_interface
    install_packed_attention()
    assert AttentionInterface.get_interface is installed is not original
    uninstall_packed_attention()
    uninstall_packed_attention()
    assert AttentionInterface.get_interface is original
    install_packed_attention()


def test_wrong_use_is_refused():
    slab, token = SlabCache(1), torch.tensor([[4, 5]])
    with pytest.raises(ValueError, match="one entry per token"):
        packed_forward(tiny_target("qwen3"), token, token, cache=slab, layout=slab.layout([1]))
    states = torch.randn(1, 2, 1, 8)
    with pytest.raises(RuntimeError, match="packed_scope"):
        packed_attention(None, states, states, states)
    with packed_scope(slab, slab.layout([1])), pytest.raises(NotImplementedError, match="position bias"):
        packed_attention(None, states, states, states, position_bias=states)
