"""A nan counts where plain `generate` would meet it: not after a draft that falls, and not in another text's slot."""

import math

import pytest
import torch

from hf_dspark import DSparkEngine, FixedLength, Scheduler
from tests.drafters import scripted, tiny_drafter
from tests.engines import equal, plain, prompts
from tests.test_engine_failures import poisoned
from tests.test_engine_sampling import seeded, slow_text
from tests.tiny import PAD_ID, VOCAB_SIZE, tiny_target

NUM_TOKENS = 16
LENGTHS = (5, 9, 4)


def luring(drafter, texts, bad):
    """A view of `drafter` that drafts two right tokens of the text the row is at, then the spoilt one."""
    sequences = [text[0].tolist() for text in texts]

    def script(request, prefix, num_drafts):
        text = next((s for s in sequences if s[: len(prefix)] == prefix), prefix)
        right = text[len(prefix) : len(prefix) + 2]
        return (right + [bad] * num_drafts)[:num_drafts]

    return scripted(drafter, script)


def absent(texts):
    """A token that is in none of the texts."""
    return next(token for token in range(3, VOCAB_SIZE) if not any((text == token).any() for text in texts))


@pytest.mark.parametrize("allowed", [False, True], ids=["nan is an error", "nan is removed"])
@pytest.mark.parametrize("max_batch_size", [1, 3])
def test_a_nan_after_a_draft_that_falls_changes_nothing(allowed, max_batch_size):
    target, batch = tiny_target("llama"), prompts(LENGTHS)
    expected = [plain(target, prompt) for prompt in batch]
    seed = int(torch.randint(1 << 62, (), generator=seeded(2)))
    expected.append(slow_text(target, batch[0], seed, NUM_TOKENS))
    bad = absent(expected)
    with poisoned(target, bad):
        view = luring(tiny_drafter(target), expected, bad)
        serving = DSparkEngine(target, view, max_batch_size=max_batch_size, scheduler=FixedLength())
        options = {"max_new_tokens": NUM_TOKENS, "remove_invalid_values": allowed}
        requests = [serving.submit(prompt, do_sample=False, **options) for prompt in batch]
        requests.append(serving.submit(batch[0], do_sample=True, top_k=0, generator=seeded(2), **options))
        serving.run()
        rounds = [r for request in requests for r in request.rounds]
        assert equal([request.result() for request in requests], expected)
        assert any(bad in r.draft_ids for r in rounds)
        assert all(bad not in r.draft_ids[: r.verify_length] for r in rounds), "it was taken back"


@pytest.mark.parametrize("allowed", [False, True], ids=["nan is an error", "nan is removed"])
def test_so_it_is_in_a_generate_call_over_a_batch(allowed):
    target, batch = tiny_target("llama"), prompts((6, 6, 6))
    expected = [plain(target, prompt) for prompt in batch]
    bad = absent(expected)
    with poisoned(target, bad):
        view = luring(tiny_drafter(target), expected, bad).with_options(scheduler=FixedLength())
        output = target.generate(
            torch.stack(batch), assistant_model=view, do_sample=False, max_new_tokens=NUM_TOKENS,
            remove_invalid_values=allowed, return_dict_in_generate=True,
        )  # fmt: skip
    assert torch.equal(output.sequences, torch.cat(expected))
    assert any(bad in r.draft_ids for r in output.rounds) and any(r.num_accepted for r in output.rounds)


def test_rows_that_draw_fail_rather_than_take_back_a_draft_for_what_it_is():
    target, (prompt,) = tiny_target("llama"), prompts((6,))
    text = plain(target, prompt)
    bad = absent([text])
    with poisoned(target, bad):
        serving = DSparkEngine(target, luring(tiny_drafter(target), [text], bad), scheduler=FixedLength())
        request = serving.submit(prompt, do_sample=True, top_k=1, max_new_tokens=NUM_TOKENS)
        serving.run()
    with pytest.raises(ValueError, match="nan in round"):
        request.result()


class MostOfTheFirst(Scheduler):
    """Whole blocks of row 0, and single drafts of the others."""

    def verify_lengths(self, request):
        return [min(limit, 1 if row else 5) for row, limit in zip(request.rows, request.max_lengths, strict=True)]


def test_a_row_that_ends_in_nan_leaves_none_of_it_to_the_one_that_takes_its_place():
    """In a batch of one call: the first row is nan from its prompt on, and the last, a short one, follows it."""
    target, (first, second, third) = tiny_target("llama"), prompts((6, 30, 6))
    clean = [plain(target, prompt, max_new_tokens=24) for prompt in (second, third)]
    bad = absent([*clean, first[None]])
    first[2] = bad
    ids = torch.full((3, 30), PAD_ID)
    for row, prompt in enumerate((first, second, third)):
        ids[row, 30 - len(prompt) :] = prompt
    options = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": PAD_ID, "remove_invalid_values": True}
    options |= {"attention_mask": (ids != PAD_ID).long(), "return_dict_in_generate": True}
    ending = [lambda ids, scores: torch.tensor([ids.shape[1] >= 34, False, False])]
    with poisoned(target, bad):
        view = tiny_drafter(target).with_options(scheduler=MostOfTheFirst())
        output = target.generate(ids, assistant_model=view, stopping_criteria=ending, **options)
    assert output.sequences[1].tolist() == clean[0][0].tolist()
    assert output.sequences[2, 24:].tolist() == clean[1][0].tolist()
    assert {r.row for r in output.rounds} == {0, 1, 2}
    assert all(math.isfinite(c) for r in output.rounds if r.row > 0 for c in r.confidence)
