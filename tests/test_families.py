"""Whatever the family of the target, the text is plain generate's; only the way there differs."""

import pytest
import torch
from transformers import FalconConfig, FalconForCausalLM

from tests.drafters import assert_drafted, generate, k_oracle, left_padded, oracle, tiny_drafter
from tests.tiny import FAMILIES, PAD_ID, VOCAB_SIZE, tiny_target

PROMPT_LENGTHS = [1, 3, 9, 17]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_of_any_family_is_greedy_equal_to_plain_generate(family):
    target, inputs = tiny_target(family), left_padded(PROMPT_LENGTHS)
    drafter = tiny_drafter(target)
    plain = generate(target, inputs, max_new_tokens=24).sequences
    for view in (drafter, k_oracle(drafter, plain, right=lambda row: row), oracle(drafter, plain)):
        output = generate(target, inputs, view, max_new_tokens=24)
        assert torch.equal(output.sequences, plain)
        assert_drafted(output.rounds)


def falcon_with_alibi():
    config = FalconConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        alibi=True,
        new_decoder_architecture=False,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=PAD_ID,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return FalconForCausalLM(config).eval()


@pytest.fixture(scope="module", params=["bloom", "falcon with ALiBi"])
def unpackable(request):
    return tiny_target("bloom") if request.param == "bloom" else falcon_with_alibi()


@pytest.mark.parametrize("prompt_lengths", [[5], [1, 3, 9]], ids=["one row", "three rows"])
def test_attention_that_cannot_be_packed_falls_back_to_rows_in_the_stock_loop(unpackable, prompt_lengths):
    inputs, rounds = left_padded(prompt_lengths), []
    drafter = tiny_drafter(unpackable).with_options(on_round=rounds.append)
    plain = generate(unpackable, inputs, max_new_tokens=24).sequences
    for view, most in ((drafter, 24), (oracle(drafter, plain), 5)):
        rounds.clear()
        output = generate(unpackable, inputs, view, max_new_tokens=24, return_dict_in_generate=False)
        assert torch.equal(output, plain)
        assert_drafted(rounds)
        assert {r.row for r in rounds} == set(range(len(prompt_lengths)))
        assert max(r.step for r in rounds) < most  # the oracle's rounds are long ones


def test_the_fallback_pads_rows_that_end_early_like_plain_generate(unpackable):
    inputs = left_padded([3, 9, 4])
    text = generate(unpackable, inputs, max_new_tokens=16).sequences
    options = {"max_new_tokens": 16, "eos_token_id": [int(text[0, 9 + 4]), int(text[2, 9 + 8])], "pad_token_id": 7}
    plain = generate(unpackable, inputs, **options).sequences
    drafter = oracle(tiny_drafter(unpackable), plain)
    assert torch.equal(generate(unpackable, inputs, drafter, return_dict_in_generate=False, **options), plain)


def test_the_fallback_fills_the_same_dictionary(unpackable):
    inputs = left_padded([5])
    wanted = {"max_new_tokens": 12, "output_scores": True, "output_logits": True}
    plain = generate(unpackable, inputs, **wanted)
    output = generate(unpackable, inputs, oracle(tiny_drafter(unpackable), plain.sequences), **wanted)
    assert torch.equal(output.sequences, plain.sequences)
    torch.testing.assert_close(output.scores, plain.scores, atol=1e-4, rtol=0)
    torch.testing.assert_close(output.logits, plain.logits, atol=1e-4, rtol=0)
    assert_drafted(output.rounds)
    assert output.stats.verify_rate == 1
    assert sum(len(r.committed_ids) for r in output.rounds) == 11


def test_what_the_fallback_cannot_do_is_decoded_plainly_with_no_rounds(unpackable):
    inputs = left_padded([5, 3])
    plain = generate(unpackable, inputs, max_new_tokens=6)
    output = generate(unpackable, inputs, tiny_drafter(unpackable), max_new_tokens=6)
    assert torch.equal(output.sequences, plain.sequences)
    assert output.rounds == [] and output.stats.num_rounds == 0
