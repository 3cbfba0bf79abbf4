"""Random tokens are told from text by what the target pays for them."""

import math

import pytest
import torch

from hf_dspark.chance import CHANCE_SHARE, refuse_random_prompts, surprise
from hf_dspark.demo import DEMO_PROMPTS, load_demo_target
from hf_dspark.prompt_sets import PromptSet
from tests.tiny import VOCAB_SIZE, tiny_target


def prompt_set(texts):
    return PromptSet("mixed", tuple([{"role": "user", "content": text}] for text in texts), tuple(range(len(texts))))


@pytest.fixture(scope="module")
def pair():
    return load_demo_target()


def random_texts(tokenizer, count, length):
    generator = torch.Generator().manual_seed(0)
    return [
        tokenizer.decode(torch.randint(3, len(tokenizer), (length,), generator=generator).tolist())
        for _ in range(count)
    ]


def test_uniform_tokens_cost_every_model_at_least_the_logarithm_of_the_vocabulary():
    generator = torch.Generator().manual_seed(0)
    for seed in range(3):
        ids = torch.randint(0, VOCAB_SIZE, (64,), generator=generator).tolist()
        assert surprise(tiny_target("qwen3" if seed else "llama"), ids) > 1


def test_text_is_taken_and_random_tokens_are_refused_by_row(pair):
    target, tokenizer = pair
    code = "def add(a, b):\n    return a + b\n\nassert add(1, 2) == 3"
    refuse_random_prompts(target, tokenizer, prompt_set([*DEMO_PROMPTS[:2], code]))
    noise = random_texts(tokenizer, 2, 24)
    with pytest.raises(ValueError, match=r"mixed: 2 of 3 prompts \(rows 0, 2\) look like random tokens"):
        refuse_random_prompts(target, tokenizer, prompt_set([noise[0], DEMO_PROMPTS[0], noise[1]]))


def test_the_bound_lies_far_from_both(pair):
    target, tokenizer = pair
    text = surprise(target, tokenizer(DEMO_PROMPTS[3])["input_ids"])
    noise = surprise(target, tokenizer(random_texts(tokenizer, 1, 32)[0])["input_ids"])
    assert text < CHANCE_SHARE - 0.3 and noise > CHANCE_SHARE + 0.1


def test_a_prompt_of_a_few_tokens_is_not_judged(pair):
    target, tokenizer = pair
    refuse_random_prompts(target, tokenizer, prompt_set(["Hi!", "x"]))
    assert math.isnan(surprise(target, [5]))
