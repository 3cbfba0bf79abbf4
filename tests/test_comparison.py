"""Timed runs: what is counted is what was decoded, and the same law holds for both runs."""

import time

import pytest
import torch
from transformers.generation.streamers import BaseStreamer

from hf_dspark.comparison import Comparison, Run, timed_generate, warm_up
from tests.drafters import tiny_drafter
from tests.tiny import tiny_target

PROMPTS = {"input_ids": torch.tensor([[0, 5, 9], [7, 3, 4]]), "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]])}


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


@pytest.fixture(scope="module")
def drafter(target):
    return tiny_drafter(target)


def test_both_runs_decode_the_same_and_only_the_drafted_one_has_statistics(target, drafter):
    plain = timed_generate(target, PROMPTS, do_sample=False, max_new_tokens=9)
    drafted = timed_generate(target, PROMPTS, do_sample=False, max_new_tokens=9, assistant_model=drafter)
    assert Comparison("two prompts", plain, drafted).identical
    assert plain.stats is None and drafted.stats.num_rounds > 0
    assert plain.num_tokens == drafted.num_tokens == 18


def test_tokens_count_up_to_and_with_the_end_token_of_each_row(target):
    ids = timed_generate(target, PROMPTS, do_sample=False, max_new_tokens=9).new_ids
    end = next(token_id for token_id in ids[0] if token_id not in ids[1])
    with_end = tiny_target("llama", eos_token_id=[end, 63])
    run = timed_generate(with_end, PROMPTS, do_sample=False, max_new_tokens=9)
    assert run.new_ids[0] == ids[0][: ids[0].index(end) + 1]
    assert run.new_ids[1] == ids[1]
    assert run.num_tokens == len(run.new_ids[0]) + 9


def test_the_seed_decides_what_is_sampled(target):
    def sample(seed):
        return timed_generate(target, PROMPTS, seed=seed, do_sample=True, max_new_tokens=9).new_ids

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_speed_is_tokens_of_the_run_over_its_own_seconds():
    comparison = Comparison("", Run([[1, 2, 3], [4]], 2.0, None), Run([[1, 2, 3], [4]], 0.5, None))
    assert comparison.plain.tokens_per_second == 2.0
    assert comparison.drafted.tokens_per_second == 8.0
    assert comparison.speedup == 4.0


def test_the_clock_covers_the_whole_call(target):
    class SlowStreamer(BaseStreamer):
        def put(self, value):
            time.sleep(0.02)

        def end(self):
            time.sleep(0.02)

    one_prompt = {name: tensor[1:] for name, tensor in PROMPTS.items()}
    run = timed_generate(target, one_prompt, do_sample=False, max_new_tokens=5, streamer=SlowStreamer())
    assert run.seconds >= 7 * 0.02, "the prompt, five tokens and the end"


def test_warming_up_runs_both_kinds(target, drafter):
    rounds = []
    warm_up(target, PROMPTS, drafter.with_options(on_round=rounds.append))
    assert rounds
