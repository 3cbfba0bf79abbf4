"""Drafters for tests: tiny random ones, and scripted ones whose every draft is known in advance.

A scripted drafter runs the whole drafting path of its tiny drafter (context, backbone, heads, confidence) and then
proposes what its script says. So a test knows exactly how long each round must be, and everything around the draft is
the real code. The script is carried by the drafter view; `conftest.py` makes drafting sessions listen to it.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from hf_dspark import DecodingRound, DSparkDrafter
from hf_dspark.drafting import Drafts, DraftSession
from hf_dspark.modeling_autoregressive import AutoregressiveDrafter
from hf_dspark.modeling_drafter import Drafter
from tests.tiny import PAD_ID, VOCAB_SIZE

Script = Callable[[int, list[int], int], list[int]]
"""(batch row, ids up to the anchor, number of drafts) -> drafts."""

MASK_ID = 2

AUTOREGRESSIVE = {"kind": AutoregressiveDrafter, "num_hidden_layers": 1, "markov_rank": 0, "mask_token_id": None}
"""Makes `tiny_drafter` an autoregressive one."""


def tiny_drafter(
    target: PreTrainedModel, *, seed: int = 0, kind: type[Drafter] = DSparkDrafter, **overrides
) -> DSparkDrafter:
    """A small random drafter for `target`; a reduced draft vocabulary is spread evenly over the whole."""
    text_config = target.config.get_text_config()
    settings = {
        "vocab_size": text_config.vocab_size,
        "hidden_size": text_config.hidden_size,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "block_size": 5,
        "mask_token_id": min(MASK_ID, text_config.vocab_size - 1),
        "target_layer_ids": [0, text_config.num_hidden_layers - 2],
        "num_target_layers": text_config.num_hidden_layers,
        "markov_rank": 8,
        "initializer_range": 0.2,
        "pad_token_id": text_config.pad_token_id,
        "bos_token_id": text_config.bos_token_id,
        "eos_token_id": text_config.eos_token_id,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        drafter = kind(kind.config_class(**settings | overrides)).eval()
    if drafter.has_own_vocabulary:
        draft_ids = torch.arange(drafter.config.draft_vocab_size)
        shared_vocab_size = min(drafter.config.vocab_size, text_config.vocab_size)
        own_ids = (draft_ids + 1) * shared_vocab_size // len(draft_ids) - 1
        drafter.d2t.copy_(own_ids - draft_ids)
        drafter.t2d.zero_()[own_ids] = True
    return drafter.to(target.dtype)


def k_oracle(drafter: DSparkDrafter, plain: torch.Tensor, right: Callable[[int], int] | int) -> DSparkDrafter:
    """
    A view of `drafter` that drafts `right` (of the row) tokens of the plain continuation, then wrong ones.

    Args:
        plain (`torch.LongTensor` of shape `[R, W]`): What plain `generate` returned, prompts included.
    """
    sequences, vocab_size = plain.tolist(), drafter.config.vocab_size

    def script(row: int, prefix: list[int], num_drafts: int) -> list[int]:
        # The stock loop has every row alone, as row 0.
        sequence = next((s for s in (sequences[row], *sequences) if prefix == s[: len(prefix)]), None)
        assert sequence is not None, f"row {row} left the plain text: {prefix}, not {sequences[row]}"
        drafts = (sequence[len(prefix) :] + [PAD_ID] * num_drafts)[:num_drafts]
        num_right = right if isinstance(right, int) else right(row)
        return [token if depth < num_right else (token + 1) % vocab_size for depth, token in enumerate(drafts)]

    return scripted(drafter, script)


def oracle(drafter: DSparkDrafter, plain: torch.Tensor) -> DSparkDrafter:
    """Always right."""
    return k_oracle(drafter, plain, right=drafter.config.num_drafts)


def anti_oracle(drafter: DSparkDrafter, plain: torch.Tensor) -> DSparkDrafter:
    """Always wrong."""
    return k_oracle(drafter, plain, right=0)


def scripted(drafter: DSparkDrafter, script: Script) -> DSparkDrafter:
    """A view of `drafter` that proposes what `script` says."""
    view = drafter.with_options()
    view.script = script
    return view


def listening_propose(propose: Callable[..., Drafts]) -> Callable[..., Drafts]:
    """`DraftSession.propose` that follows the script of its drafter, if there is one."""

    def wrapper(self: DraftSession, anchor_ids: Sequence[int], *args, rows, prefix, **kwargs) -> Drafts:
        drafts = propose(self, anchor_ids, *args, rows=rows, prefix=prefix, **kwargs)
        script = getattr(self.view.drafter, "script", None)
        if script is None:
            return drafts
        length = drafts.ids.shape[1]
        ids = torch.tensor([script(row, prefix(entry, []).tolist(), length) for entry, row in enumerate(rows)])
        probs = torch.nn.functional.one_hot(ids, self.view.vocab_size).float() if self.do_sample else None
        usable = torch.full((len(rows),), length)
        return dataclasses.replace(drafts, ids=ids, probs=probs, token_ids=None, usable=usable)

    return wrapper


class BigramPair:
    """
    A target whose next token depends on the newest one alone, and a drafter that knows its distribution exactly.

    The target's attention writes nothing; the drafter's backbone neither, and its Markov head holds the target's final
    hidden states and LM head: the very product that makes the target's logits.
    """

    def __init__(self, target: PreTrainedModel, **overrides):
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.data.zero_()
        states = target.model(torch.arange(target.config.vocab_size)[:, None]).last_hidden_state[:, 0].detach()
        self.target = target
        self.drafter = tiny_drafter(target, markov_rank=target.config.hidden_size, **overrides)
        self.drafter.norm.weight.data.zero_()
        self.drafter.markov_head.markov_w1.weight.data.copy_(states)
        self.drafter.markov_head.markov_w2.weight.data.copy_(target.lm_head.weight.data)


def left_padded(lengths: Sequence[int], *, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> dict[str, torch.Tensor]:
    """Random prompts of the given lengths as `generate` takes them: `input_ids` and `attention_mask`, `[R, S]`."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.full((len(lengths), max(lengths)), PAD_ID)
    mask = torch.zeros_like(input_ids)
    for row, length in enumerate(lengths):
        first = max(lengths) - length
        input_ids[row, first:] = torch.randint(min(3, vocab_size - 1), vocab_size, (length,), generator=generator)
        mask[row, first:] = 1
    return {"input_ids": input_ids, "attention_mask": mask}


def generate(target: PreTrainedModel, inputs: dict, drafter: DSparkDrafter | None = None, **options):
    """Greedy `generate` with a dictionary as output, unless `options` say otherwise."""
    defaults = {"do_sample": False, "return_dict_in_generate": True}
    return target.generate(**inputs, assistant_model=drafter, **defaults | options)


def assert_drafted(rounds: Sequence[DecodingRound]) -> None:
    """The target verified more than one draft a round on average: the test saw speculation, not plain decoding."""
    lengths = [r.verify_length for r in rounds]
    assert lengths and sum(lengths) / len(lengths) > 1, f"verify lengths {lengths}"
