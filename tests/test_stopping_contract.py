"""`generate` with a drafter ends exactly where plain `generate` ends, wherever in a block that is."""

import pytest
import torch
from transformers import StoppingCriteria

from tests.drafters import assert_drafted, generate, k_oracle, left_padded, oracle, tiny_drafter
from tests.tiny import PAD_ID, tiny_target
from tests.tokens import byte_tokenizer, only

BLOCK = 7


# No token twice, so that a token stands for a place.
DISTINCT = {"no_repeat_ngram_size": 1}


def distinct_text(num_rows=1):
    """A target, prompts of four tokens, and their plain continuations."""
    target, inputs = tiny_target("llama"), left_padded([4] * num_rows)
    texts = generate(target, inputs, max_new_tokens=20, **DISTINCT).sequences[:, 4:]
    return target, inputs, texts


def check_equal_to_plain(target, inputs, num_drafts=BLOCK, right=None, expect_drafts=True, **options):
    """Runs plain `generate` and ours with the same options; the sequences are equal. Returns our output."""
    options |= DISTINCT
    whole = generate(target, inputs, **options | {"eos_token_id": None}).sequences
    plain = generate(target, inputs, **options).sequences
    drafter = tiny_drafter(target, block_size=num_drafts)
    view = k_oracle(drafter, whole, right) if right is not None else oracle(drafter, whole)
    output = generate(target, inputs, view, **options)
    assert torch.equal(output.sequences, plain)
    if expect_drafts:
        assert_drafted(output.rounds)
    committed = [len(inputs["input_ids"][0]) + 1] * len(plain)
    for r in output.rounds:
        assert len(r.committed_ids) <= r.num_accepted + 1
        committed[r.row] += len(r.committed_ids)
    assert max(committed) == plain.shape[1]
    return output


# ------------------------------------------------------------------------------------------------- end of sequence


def test_the_fifth_token_as_end_of_sequence_ends_the_text_there():
    target, inputs, texts = distinct_text()
    output = check_equal_to_plain(target, inputs, max_new_tokens=20, eos_token_id=int(texts[0, 4]))
    assert output.sequences.shape[1] == 4 + 5
    (only_round,) = output.rounds
    assert only_round.num_accepted == BLOCK and len(only_round.committed_ids) == 4


PLACES = {
    "the prefill's token": 0,
    "first draft": 1,
    "middle draft": 4,
    "last draft": BLOCK,
    "bonus": BLOCK + 1,
    "first draft of the second round": BLOCK + 2,
}


@pytest.mark.parametrize("index", PLACES.values(), ids=PLACES.keys())
def test_an_end_of_sequence_ends_the_text_in_every_place_of_a_block(index):
    target, inputs, texts = distinct_text()
    options = {"max_new_tokens": 20, "eos_token_id": int(texts[0, index])}
    output = check_equal_to_plain(target, inputs, expect_drafts=index > 0, **options)
    assert output.sequences.shape[1] == 4 + index + 1


@pytest.mark.parametrize("right", [0, 2])
def test_a_correction_may_be_the_end_of_sequence(right):
    target, inputs, texts = distinct_text()
    options = {"max_new_tokens": 20, "eos_token_id": int(texts[0, 1 + right])}
    output = check_equal_to_plain(target, inputs, right=right, **options)
    assert output.rounds[-1].next_id == options["eos_token_id"] == output.rounds[-1].committed_ids[-1]


def test_a_wrong_end_of_sequence_draft_ends_nothing():
    target, inputs, texts = distinct_text()
    # After two right tokens the 2-oracle drafts the successor of the right one.
    eos = next(int(text) + 1 for text in texts[0, 3::3] if text + 1 not in texts[0])
    output = check_equal_to_plain(target, inputs, right=2, max_new_tokens=20, eos_token_id=eos)
    assert any(eos in r.draft_ids for r in output.rounds)
    assert output.sequences.shape[1] == 4 + 20


def test_rows_of_a_batch_end_on_either_of_two_tokens_at_their_own_time():
    target, inputs, texts = distinct_text(num_rows=4)
    eos = [int(texts[0, 2]), int(texts[2, 9])]
    output = check_equal_to_plain(target, inputs, max_new_tokens=20, eos_token_id=eos, pad_token_id=PAD_ID)
    assert (output.sequences[0, 4 + 3 :] == PAD_ID).all()


def test_without_a_padding_token_finished_rows_are_padded_as_plain_generate_pads_them():
    target, inputs, texts = distinct_text(num_rows=3)
    config = target.generation_config
    assert config.pad_token_id == PAD_ID
    config.pad_token_id = None
    try:
        check_equal_to_plain(target, inputs, max_new_tokens=20, eos_token_id=[int(texts[0, 2]), int(texts[1, 9])])
    finally:
        config.pad_token_id = PAD_ID


# ---------------------------------------------------------------------------------------------------- stop strings


@pytest.mark.parametrize(
    ("text", "stop", "kept"),
    [
        ("Hell\n\nd and more", "\n\n", "Hell\n\n"),
        ("Hello wo\n\n and more", "\n\n", "Hello wo\n\n"),
        ("Hello w\n\nd and more", "\n\n", "Hello w\n\n"),
        ("\n\nd and more of it", "\n\n", "\n\n"),
        ("n\nd 世 世界 and more", "世界", "n\nd 世 世界"),
    ],
    ids=["inside a block", "over two blocks", "as a bonus", "begun by the prefill", "over many tokens"],
)
def test_a_stop_string_ends_the_text_with_the_token_that_completes_it(text, stop, kept):
    tokenizer, target = byte_tokenizer(), tiny_target("llama")
    inputs = left_padded([4])
    options = {
        "max_new_tokens": 40,
        "prefix_allowed_tokens_fn": only(tokenizer(text)["input_ids"], prompt_width=4),
        "stop_strings": [stop],
        "tokenizer": tokenizer,
    }
    uncut = options | {"stop_strings": None, "tokenizer": None}
    whole = generate(target, inputs, **uncut).sequences
    plain = generate(target, inputs, **options).sequences
    output = generate(target, inputs, oracle(tiny_drafter(target, block_size=BLOCK), whole), **options)
    assert torch.equal(output.sequences, plain)
    assert tokenizer.decode(output.sequences[0, 4:]) == kept
    assert_drafted(output.rounds)


def test_rows_of_a_batch_meet_their_stop_strings_at_their_own_time():
    tokenizer, target = byte_tokenizer(), tiny_target("llama")
    texts = [tokenizer(text)["input_ids"] for text in ("Hell\n\nand more", "and more\n\nd", "no stop in all this end")]
    inputs = left_padded([4, 2, 3])
    options = {
        "max_new_tokens": 20,
        "prefix_allowed_tokens_fn": only(*texts, prompt_width=4),
        "stop_strings": ["\n\n", "!"],
        "tokenizer": tokenizer,
        "eos_token_id": tokenizer.eos_token_id,
    }
    plain = generate(target, inputs, **options).sequences
    whole = generate(target, inputs, **options | {"stop_strings": None}).sequences
    output = generate(target, inputs, oracle(tiny_drafter(target, block_size=BLOCK), whole), **options)
    assert torch.equal(output.sequences, plain)
    assert_drafted(output.rounds)
    assert len({tuple(row.tolist()).index(PAD_ID, 4) if PAD_ID in row[4:] else 24 for row in plain}) == 3


# ------------------------------------------------------------------------------------------------ other criteria


class StopAtWidth(StoppingCriteria):
    """A user's own: stops at a number of tokens, and has seen every width on the way."""

    def __init__(self, width):
        self.width, self.widths = width, []

    def __call__(self, input_ids, scores, **kwargs):
        self.widths.append(input_ids.shape[1])
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.width)


def test_a_criterion_at_the_third_token_beats_six_accepted_drafts_and_a_limit_of_five():
    target, inputs, texts = distinct_text()
    whole = torch.cat([inputs["input_ids"], texts], dim=1)
    criterion = StopAtWidth(4 + 3)
    drafter = oracle(tiny_drafter(target, block_size=6), whole)
    output = generate(target, inputs, drafter, max_new_tokens=5, stopping_criteria=[criterion], **DISTINCT)
    assert torch.equal(output.sequences, whole[:, : 4 + 3])
    assert criterion.widths == [5, 6, 7]
    assert_drafted(output.rounds)


def test_time_that_has_run_out_ends_the_text_after_one_token():
    target, inputs, _ = distinct_text()
    output = generate(target, inputs, tiny_drafter(target), max_new_tokens=20, max_time=0.0)
    assert output.sequences.shape[1] == 4 + 1
    assert output.rounds == []


@pytest.mark.parametrize("num_new_tokens", [1, 2, 3, BLOCK, BLOCK + 1, BLOCK + 2, BLOCK + 3])
def test_the_maximum_length_is_met_exactly(num_new_tokens):
    target, inputs, _ = distinct_text(num_rows=2)
    output = check_equal_to_plain(target, inputs, max_new_tokens=num_new_tokens, expect_drafts=num_new_tokens > 3)
    assert output.sequences.shape[1] == 4 + num_new_tokens
    assert all(len(r.committed_ids) == r.num_accepted + 1 for r in output.rounds)  # nothing was verified in vain


def test_one_new_token_needs_no_round():
    target, inputs, texts = distinct_text()
    output = generate(target, inputs, tiny_drafter(target), max_new_tokens=1, **DISTINCT)
    assert output.sequences[0].tolist() == [*inputs["input_ids"][0].tolist(), int(texts[0, 0])]
    assert output.rounds == [] and output.stats.num_rounds == 0


def test_max_length_counts_the_prompt():
    target, inputs, _ = distinct_text()
    output = check_equal_to_plain(target, inputs, max_length=16)
    assert output.sequences.shape[1] == 16


def test_a_target_of_64_positions_is_filled_to_the_last_one():
    target, inputs = tiny_target("gpt2"), left_padded([60])
    assert target.config.n_positions == 64
    output = check_equal_to_plain(target, inputs, max_new_tokens=4)
    assert output.sequences.shape[1] == 64


def test_scores_end_where_the_text_ends():
    target, inputs, texts = distinct_text()
    wanted = {"output_scores": True, "output_logits": True, "output_hidden_states": True}
    output = check_equal_to_plain(target, inputs, max_new_tokens=20, eos_token_id=int(texts[0, 4]), **wanted)
    assert len(output.scores) == len(output.logits) == len(output.hidden_states) == 5
