"""Whether prompts are text at all: random tokens make acceptance figures that say nothing.

Contract: a prompt is random if the target predicts its tokens no better than chance. The bound is not a matter of
taste: tokens drawn uniformly from V cost *every* model at least ln V nats each on average (Gibbs' inequality), while
a language model pays a fraction of that for text of any kind, code and mathematics included. So prompts are refused
above 0.9 ln V, measured with the target on the first tokens of what the user wrote, without the chat template around
it. (SmolLM2-135M on every tenth prompt of eight public sets and on their shortest: at most 0.61 ln V; on uniform
tokens: 1.19 ln V at least.) A target that is no language model, such as one with random weights, finds everything
random.
"""

import math

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .prompt_sets import PromptSet, user_turns

CHANCE_SHARE = 0.9  # of ln V
JUDGED_TOKENS = 64
MIN_TOKENS = 8  # a shorter prompt is not judged


@torch.no_grad()
def surprise(target: PreTrainedModel, token_ids: list[int]) -> float:
    """Mean negative log-likelihood of tokens 2 to 64, as a share of ln V; `nan` for a single token."""
    ids = torch.tensor([token_ids[:JUDGED_TOKENS]], device=target.device)
    logits = target(ids).logits[0, :-1].float()
    costs = -logits.log_softmax(dim=-1).gather(-1, ids[0, 1:, None])
    return float(costs.mean()) / math.log(logits.shape[-1])


def refuse_random_prompts(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: PromptSet) -> None:
    """
    Raises `ValueError`, naming the rows, if any conversation of `prompts` begins with random tokens.

    The first message of the user is judged, if it has 8 tokens or more.
    """
    random = []
    for index, conversation in zip(prompts.indices, prompts.conversations, strict=True):
        ids = tokenizer(conversation[user_turns(conversation)[0]]["content"])["input_ids"]
        if len(ids) >= MIN_TOKENS and surprise(target, ids) > CHANCE_SHARE:
            random.append(index)
    if random:
        shown = ", ".join(map(str, random[:5])) + (", ..." if len(random) > 5 else "")
        raise ValueError(
            f"{prompts.name}: {len(random)} of {len(prompts)} prompts (rows {shown}) look like random tokens: the "
            "target predicts them no better than chance. Acceptance on them says nothing about text; give prompts "
            "that are text, or allow_random=True (--allow-random)"
        )
