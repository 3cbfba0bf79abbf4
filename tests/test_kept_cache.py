"""Caches: what is in them after every round, and what a later turn makes of a cache that was kept."""

import copy
import pickle

import pytest
import torch
from transformers import DynamicCache

from hf_dspark.decoding import Decoder
from tests.drafters import (
    AUTOREGRESSIVE,
    anti_oracle,
    assert_drafted,
    generate,
    k_oracle,
    left_padded,
    oracle,
    tiny_drafter,
)
from tests.tiny import PAD_ID, tiny_target

# ---------------------------------------------------------------------------------------------- during one call


@pytest.mark.parametrize("guesses", ["right", "wrong"])
def test_after_every_round_both_caches_hold_all_tokens_but_the_newest(guesses, monkeypatch):
    target, inputs = tiny_target("llama"), left_padded([3, 9])
    num_new_tokens = {"right": 20 * 6, "wrong": 21}[guesses]
    plain = generate(target, inputs, max_new_tokens=num_new_tokens).sequences
    drafter = (oracle if guesses == "right" else anti_oracle)(tiny_drafter(target), plain)
    play_round, num_checks = Decoder.round, []

    def checked_round(self):
        play_round(self)
        for entry, row in enumerate(self.rows):
            num_tokens = [3, 9][row.index] + len(row.new_ids)
            assert self.cache.lengths[entry] == num_tokens - 1
            queued = sum(len(positions) for _, positions, _ in self.session._pending[entry])
            assert self.session.cache.lengths[entry] + queued == num_tokens - 1
            num_checks.append(row.index)

    monkeypatch.setattr(Decoder, "round", checked_round)
    output = generate(target, inputs, drafter, max_new_tokens=num_new_tokens)
    assert torch.equal(output.sequences, plain)
    assert_drafted(output.rounds)
    assert len(num_checks) >= 2 * 20


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3"])
@pytest.mark.parametrize("prompt_lengths", [[5], [5, 20, 8]], ids=["one row", "three rows"])
def test_a_window_of_8_forgets_what_plain_generate_forgets(family, prompt_lengths):
    target, inputs = tiny_target(family), left_padded(prompt_lengths)
    plain = generate(target, inputs, max_new_tokens=30).sequences
    for right in (0, 1, 3):
        view = k_oracle(tiny_drafter(target, block_size=3), plain, right=right)
        output = generate(target, inputs, view, max_new_tokens=30)
        assert torch.equal(output.sequences, plain)
        assert_drafted(output.rounds)


def test_a_recurrent_target_is_refused_before_any_forward():
    target = tiny_target("qwen3_5")
    calls = []
    handle = target.register_forward_pre_hook(lambda *args: calls.append(args))
    try:
        with pytest.raises(ValueError, match=r"recurrent state.*such as Llama, Qwen3, Mistral"):
            generate(target, left_padded([5]), tiny_drafter(target), max_new_tokens=4)
    finally:
        handle.remove()
    assert calls == []


def test_use_cache_false_is_refused_with_one_clear_message():
    target = tiny_target("llama")
    with pytest.raises(ValueError, match="use_cache=False: speculative decoding verifies drafts against"):
        generate(target, left_padded([5]), tiny_drafter(target), max_new_tokens=4, use_cache=False)


@pytest.mark.parametrize("prompt_lengths", [[5], [5, 3]], ids=["one row", "two rows"])
@pytest.mark.parametrize("family", ["llama", "mistral"], ids=["croppable", "not croppable"])
def test_a_static_cache_gives_the_same_text(family, prompt_lengths):
    target, inputs = tiny_target(family), left_padded(prompt_lengths)
    options = {"max_new_tokens": 12, "return_dict_in_generate": False, "cache_implementation": "static"}
    plain = generate(target, inputs, **options)
    assert torch.equal(generate(target, inputs, tiny_drafter(target), **options), plain)


# -------------------------------------------------------------------------------------------------- several turns


def next_turn(sequences, num_tokens=6, seed=9):
    """The conversation so far and a new message for every row, no padding in between."""
    message = left_padded([num_tokens] * len(sequences), seed=seed)["input_ids"]
    return {"input_ids": torch.cat([sequences, message], dim=1)}


def with_mask(inputs, first_mask):
    """Adds a mask that hides the first prompt's padding and nothing else."""
    mask = torch.ones_like(inputs["input_ids"])
    mask[:, : first_mask.shape[1]] = first_mask
    return inputs | {"attention_mask": mask}


def talk(target, drafter, turns=3, prompt_lengths=(7,), only_new=False, **options):
    """A conversation on one cache: the outputs of all turns."""
    cache, inputs, outputs = DynamicCache(config=target.config), left_padded(prompt_lengths), []
    mask = inputs["attention_mask"]
    for turn in range(turns):
        fed = dict(inputs)
        if only_new and turn:
            fed["input_ids"] = inputs["input_ids"][:, cache.get_seq_length() :]
        output = generate(target, fed, drafter, cache=cache, max_new_tokens=20, **options)
        if only_new and turn:
            known = inputs["input_ids"][:, : -fed["input_ids"].shape[1]]
            output.sequences = torch.cat([known, output.sequences], dim=1)
        outputs.append(output)
        assert output.cache is cache
        assert cache.get_seq_length() == output.sequences.shape[1] - 1
        inputs = with_mask(next_turn(output.sequences, seed=turn), mask)
    return outputs


FAMILIES = ["llama", "mistral", "gemma3", "gpt_neox", "deepseek_v3"]
of_both_kinds = pytest.mark.parametrize("kind", [{}, AUTOREGRESSIVE], ids=["parallel", "autoregressive"])


@pytest.mark.parametrize("prompt_lengths", [(7,), (2, 7)], ids=["one row", "two rows"])
@pytest.mark.parametrize("family", FAMILIES)
def test_turns_on_a_kept_cache_equal_plain_generates(family, prompt_lengths):
    target = tiny_target(family)
    expected = talk(target, None, prompt_lengths=prompt_lengths)
    turns = talk(target, tiny_drafter(target), prompt_lengths=prompt_lengths)
    for turn, plain in zip(turns, expected, strict=True):
        assert torch.equal(turn.sequences, plain.sequences)
        assert_drafted(turn.rounds)


def test_turns_that_pass_only_their_new_tokens_equal_plain_generates():
    target = tiny_target("llama")
    expected = talk(target, None, only_new=True)
    turns = talk(target, tiny_drafter(target), only_new=True)
    for turn, plain in zip(turns, expected, strict=True):
        assert torch.equal(turn.sequences, plain.sequences)
        assert_drafted(turn.rounds)


def drafted(rounds):
    return [(r.row, r.anchor_id, r.draft_ids, r.num_accepted) for r in rounds]


@of_both_kinds
@pytest.mark.parametrize("only_new", [False, True], ids=["whole conversation", "only new tokens"])
@pytest.mark.parametrize("prompt_lengths", [(7,), (2, 7)], ids=["one row", "two rows"])
def test_a_later_turn_drafts_exactly_as_a_fresh_run_on_the_conversation(prompt_lengths, only_new, kind):
    target = tiny_target("llama")
    drafter, first_mask = tiny_drafter(target, **kind), left_padded(prompt_lengths)["attention_mask"]
    turns = talk(target, drafter, prompt_lengths=prompt_lengths, only_new=only_new)
    for turn in range(1, len(turns)):
        conversation = with_mask(next_turn(turns[turn - 1].sequences, seed=turn - 1), first_mask)
        fresh = generate(target, conversation, drafter, max_new_tokens=20)
        assert torch.equal(fresh.sequences, turns[turn].sequences)
        assert drafted(turns[turn].rounds) == drafted(fresh.rounds)


def test_a_later_turn_computes_no_earlier_token_again():
    target = tiny_target("llama")
    widths = []
    handle = target.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        talk(target, tiny_drafter(target), turns=2)
    finally:
        handle.remove()
    # Prompts of 7 tokens, and of the newest token (not in the cache yet) and 6 more; the rest are verifications.
    assert [width for width in widths if width > 6] == [7, 7]


def test_plain_generate_goes_on_where_a_drafter_stopped_and_the_other_way_round():
    target = tiny_target("llama")
    expected = talk(target, None)
    for drafters in ([tiny_drafter(target), None, tiny_drafter(target)], [None, tiny_drafter(target), None]):
        cache, inputs = DynamicCache(config=target.config), left_padded([7])
        for turn, drafter in enumerate(drafters):
            output = generate(target, inputs, drafter, cache=cache, max_new_tokens=20)
            assert torch.equal(output.sequences, expected[turn].sequences)
            if drafter is not None:
                fresh = generate(target, inputs, drafter, max_new_tokens=20)
                assert drafted(output.rounds) == drafted(fresh.rounds)
            inputs = next_turn(output.sequences, seed=turn)


@of_both_kinds
def test_the_context_of_a_plain_turn_is_read_off_the_target(kind):
    target = tiny_target("llama")
    drafter, cache = tiny_drafter(target, **kind), DynamicCache(config=target.config)
    first = generate(target, left_padded([7]), cache=cache, max_new_tokens=20)
    conversation = next_turn(first.sequences)
    fresh = generate(target, conversation, drafter, max_new_tokens=20)
    kept = generate(target, conversation, drafter, cache=cache, max_new_tokens=20)
    assert drafted(kept.rounds) == drafted(fresh.rounds)


def test_another_drafter_does_not_take_over_what_the_first_one_remembered():
    target = tiny_target("llama")
    cache = DynamicCache(config=target.config)
    first = generate(
        target, left_padded([7]), tiny_drafter(target, num_hidden_layers=1), cache=cache, max_new_tokens=20
    )
    other = tiny_drafter(target, seed=1)
    conversation = next_turn(first.sequences)
    fresh = generate(target, conversation, other, max_new_tokens=20)
    kept = generate(target, conversation, other, cache=cache, max_new_tokens=20)
    assert torch.equal(kept.sequences, fresh.sequences)
    assert drafted(kept.rounds) == drafted(fresh.rounds)


def test_a_drafter_that_is_gone_leaves_nothing_that_fits_a_new_one():
    target = tiny_target("llama")
    cache, inputs = DynamicCache(config=target.config), left_padded([7])
    for layers in (1, 2, 1, 2):  # a new drafter may be built where the old one was in memory
        drafter = tiny_drafter(target, num_hidden_layers=layers)
        output = generate(target, inputs, drafter, cache=cache, max_new_tokens=8)
        inputs = next_turn(output.sequences)
    plain, kept = (generate(target, inputs, cache=c, max_new_tokens=8).sequences for c in (None, cache))
    assert torch.equal(kept, plain)


def test_a_view_of_a_drafter_remembers_what_another_view_drafted():
    target = tiny_target("llama")
    drafter, cache, widths = tiny_drafter(target), DynamicCache(config=target.config), []
    options = {"cache": cache, "max_new_tokens": 8}
    first = generate(target, left_padded([7]), drafter.with_options(max_draft_tokens=2), **options)
    handle = target.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        generate(target, next_turn(first.sequences), drafter.with_options(max_draft_tokens=3), **options)
    finally:
        handle.remove()
    assert max(widths) == 7  # the new message, not the conversation


@of_both_kinds
def test_a_copy_of_a_cache_branches_the_conversation(kind):
    target = tiny_target("llama")
    drafter, cache = tiny_drafter(target, **kind), DynamicCache(config=target.config)
    first = generate(target, left_padded([7]), drafter, cache=cache, max_new_tokens=20)
    for seed in (1, 2):
        conversation = next_turn(first.sequences, seed=seed)
        branch = copy.deepcopy(cache)
        kept = generate(target, conversation, drafter, cache=branch, max_new_tokens=20)
        fresh = generate(target, conversation, drafter, max_new_tokens=20)
        assert torch.equal(kept.sequences, fresh.sequences)
        assert drafted(kept.rounds) == drafted(fresh.rounds)


@of_both_kinds
def test_a_turn_in_inference_mode_can_be_followed_by_one_outside_of_it(kind):
    target = tiny_target("llama")
    drafter, cache = tiny_drafter(target, **kind), DynamicCache(config=target.config)
    with torch.inference_mode():
        first = generate(target, left_padded([7]), drafter, cache=cache, max_new_tokens=20)
    conversation = next_turn(first.sequences.clone())
    fresh = generate(target, conversation, drafter, max_new_tokens=20)
    kept = generate(target, conversation, drafter, cache=cache, max_new_tokens=20)
    assert torch.equal(kept.sequences, fresh.sequences)
    assert drafted(kept.rounds) == drafted(fresh.rounds)


@of_both_kinds
def test_a_cropped_cache_takes_another_turn(kind):
    target = tiny_target("llama")
    drafter, cache = tiny_drafter(target, **kind), DynamicCache(config=target.config)
    first = generate(target, left_padded([7]), drafter, cache=cache, max_new_tokens=20)
    cache.crop(-10)
    conversation = next_turn(first.sequences[:, :17], seed=3)
    fresh = generate(target, conversation, drafter, max_new_tokens=20)
    kept = generate(target, conversation, drafter, cache=cache, max_new_tokens=20)
    assert torch.equal(kept.sequences, fresh.sequences)
    assert drafted(kept.rounds) == drafted(fresh.rounds)


@of_both_kinds
def test_a_cropped_cache_that_went_another_way_is_not_taken_for_what_it_was(kind):
    target = tiny_target("llama")
    drafter, cache = tiny_drafter(target, **kind), DynamicCache(config=target.config)
    first = generate(target, left_padded([7]), drafter, cache=cache, max_new_tokens=20)
    cache.crop(-10)
    other = generate(target, next_turn(first.sequences[:, :17], seed=3), cache=cache, max_new_tokens=20)
    conversation = next_turn(other.sequences, seed=4)
    fresh = generate(target, conversation, drafter, max_new_tokens=20)
    kept = generate(target, conversation, drafter, cache=cache, max_new_tokens=20)
    assert torch.equal(kept.sequences, fresh.sequences)
    assert drafted(kept.rounds) == drafted(fresh.rounds)


@of_both_kinds
def test_a_turn_that_failed_leaves_a_cache_that_can_be_cropped_and_used_again(kind):
    target = tiny_target("llama")
    drafter, cache = tiny_drafter(target, **kind), DynamicCache(config=target.config)
    first = generate(target, left_padded([7, 7]), drafter, cache=cache, max_new_tokens=20)
    length = cache.get_seq_length()
    failing = next_turn(first.sequences, 12, seed=5)

    def stop_first_row(ids, scores):
        return torch.tensor([row[:7] == failing["input_ids"][0, :7].tolist() for row in ids.tolist()])

    def fail(r):
        assert r.row == 1  # by now the rows have changed places
        if r.step == 4:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        view = drafter.with_options(on_round=fail)
        generate(target, failing, view, cache=cache, max_new_tokens=20, stopping_criteria=[stop_first_row])
    cache.crop(length - cache.get_seq_length())
    conversation = next_turn(first.sequences, seed=6)
    fresh = generate(target, conversation, drafter, max_new_tokens=20)
    kept = generate(target, conversation, drafter, cache=cache, max_new_tokens=20)
    assert torch.equal(kept.sequences, fresh.sequences)
    assert drafted(kept.rounds) == drafted(fresh.rounds)


@of_both_kinds
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_rows_that_ended_early_go_on_in_the_next_turn(family, kind):
    target, inputs = tiny_target(family), left_padded([3, 7])
    text = generate(target, inputs, max_new_tokens=20).sequences
    options = {"eos_token_id": int(text[0, 7 + 6]), "pad_token_id": PAD_ID, "max_new_tokens": 20}
    outputs = []
    for drafter in (None, tiny_drafter(target, **kind)):
        cache = DynamicCache(config=target.config)
        first = generate(target, inputs, drafter, cache=cache, **options)
        conversation = next_turn(first.sequences)
        mask = torch.ones_like(conversation["input_ids"])
        mask[:, :7] = inputs["attention_mask"]
        mask[0, 7 + 7 : first.sequences.shape[1]] = 0  # padding after the end of row 0
        second = generate(target, conversation | {"attention_mask": mask}, drafter, cache=cache, **options)
        outputs.append((first, second))
    for plain, ours in zip(*outputs, strict=True):
        assert torch.equal(ours.sequences, plain.sequences)
        if family == "llama" or ours is outputs[1][0]:  # a window counts padding too: the second turn is not packed
            assert_drafted(ours.rounds)


@pytest.mark.parametrize("family", ["gemma3", "deepseek_v3"])
def test_the_returned_cache_holds_what_plain_generates_holds(family):
    target, inputs = tiny_target(family), left_padded([9, 9])
    plain = generate(target, inputs, max_new_tokens=20)
    output = generate(target, inputs, oracle(tiny_drafter(target), plain.sequences), max_new_tokens=20)
    assert output.cache.get_seq_length() == plain.cache.get_seq_length()
    for ours, stock in zip(output.cache.layers, plain.cache.layers, strict=True):
        assert type(ours) is type(stock)
        torch.testing.assert_close(ours.keys, stock.keys, atol=1e-4, rtol=0)
        torch.testing.assert_close(ours.values, stock.values, atol=1e-4, rtol=0)


@of_both_kinds
def test_a_kept_cache_can_be_pickled(kind):
    target = tiny_target("llama")
    cache = DynamicCache(config=target.config)
    first = generate(target, left_padded([7]), tiny_drafter(target, **kind), cache=cache, max_new_tokens=20)
    loaded = pickle.loads(pickle.dumps(cache))
    conversation = next_turn(first.sequences)
    fresh = generate(target, conversation, tiny_drafter(target, **kind), max_new_tokens=20)
    kept = generate(target, conversation, tiny_drafter(target, **kind), cache=loaded, max_new_tokens=20)
    assert torch.equal(kept.sequences, fresh.sequences)
    assert drafted(kept.rounds) == drafted(fresh.rounds)


def test_a_sampled_turn_can_follow():
    target = tiny_target("llama")
    drafter, cache = tiny_drafter(target), DynamicCache(config=target.config)
    first = generate(target, left_padded([7]), drafter, cache=cache, max_new_tokens=20)
    conversation, texts = next_turn(first.sequences), []
    for given in (cache, None):
        torch.manual_seed(0)
        output = generate(target, conversation, drafter, cache=given, do_sample=True, max_new_tokens=20)
        texts.append(output.sequences)
        assert_drafted(output.rounds)
    assert torch.equal(*texts)
