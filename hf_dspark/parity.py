"""Does a model score the same text the same way when it is decoded plainly and when it is verified in packs?

Speculative decoding verifies several tokens of every request in one forward. In exact arithmetic that gives the logits
of token-by-token decoding; in floating point, kernels chosen by shape round differently, and where the two best
tokens are nearly tied the argmax may flip. [`check_parity`] measures this for one model on one machine: it is what to
run when a text with a drafter differs from the text without. It needs no drafter.

Shapes: R rows, S prompt length, V vocabulary, n new tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from .packed import SlabCache, packed_forward, supports_packed

# Tokens of each row scored at once "in blocks": an anchor and 7 drafts, the block of the paper's drafters.
_BLOCK_TOKENS = 8


@dataclass(frozen=True, slots=True)
class PathParity:
    """
    How far one way of scoring is from plain decoding.

    Attributes:
        max_logit_difference (`float`): Largest absolute difference of any logit.
        first_flip (`tuple[int, int]`, *optional*):
            Row and new token (from 0) of the earliest argmax that differs; `None` if none does.
        flip_margin (`float`, *optional*): Gap of plain decoding's two largest logits there.
    """

    max_logit_difference: float
    first_flip: tuple[int, int] | None
    flip_margin: float | None

    def __str__(self) -> str:
        difference = f"largest logit difference {self.max_logit_difference:.3g}"
        if self.first_flip is None:
            return f"same tokens, {difference}"
        row, token = self.first_flip
        return (
            f"first different at token {token} of row {row}, where plain decoding's two best logits are "
            f"{self.flip_margin:.3g} apart, {difference}"
        )


@dataclass(frozen=True, slots=True)
class ParityReport:
    """
    Result of [`check_parity`]; `print` it.

    Attributes:
        num_tokens (`int`): Scored tokens, all rows together.
        dtype (`str`): Precision of the target.
        step_by_step ([`PathParity`]): Packed, one token of every row at a time.
        in_blocks ([`PathParity`]): Packed, several tokens of every row at a time, as verification does.
    """

    num_tokens: int
    dtype: str
    step_by_step: PathParity
    in_blocks: PathParity

    @property
    def identical(self) -> bool:
        """Whether no argmax differs, so that greedy text with and without a drafter is the same."""
        return self.step_by_step.first_flip is None and self.in_blocks.first_flip is None

    def __str__(self) -> str:
        return (
            f"{'identical' if self.identical else 'not identical'} on {self.num_tokens} tokens in {self.dtype}\n"
            f"  packed, one token a row:  {self.step_by_step}\n"
            f"  packed, {_BLOCK_TOKENS} tokens a row: {self.in_blocks}"
        )


@torch.no_grad()
def check_parity(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    *,
    attention_mask: torch.Tensor | None = None,
    max_new_tokens: int = 64,
) -> ParityReport:
    """
    Compares plain greedy decoding of `target` with the packed forwards that verify drafts, on the same text.

    In float32 the tokens should be the same. In half precision a flip is expected now and then; it is rounding if the
    margin there and the largest logit difference are small, of the order of the precision times the logits (in
    bfloat16 some hundredths to tenths). A large difference is a bug: please report it.

    Args:
        target ([`~transformers.PreTrainedModel`]): The model to be decoded with a drafter.
        input_ids (`torch.LongTensor` of shape `[R, S]`): Prompts, left-padded.
        attention_mask (`torch.LongTensor` of shape `[R, S]`, *optional*): 0 at padding. Defaults to no padding.
        max_new_tokens (`int`, *optional*, defaults to 64):
            Tokens to generate per row, 2 or more: the first comes from the prompt's forward, which is the same either
            way, and is not compared. End-of-sequence does not end them.

    Returns:
        [`ParityReport`]

    Raises:
        ValueError: If `max_new_tokens` is below 2.
        NotImplementedError: If the target cannot run packed; the message says why. With a drafter it then runs
            through transformers' own assisted loop.

    Example:

    ```python
    >>> print(hf_dspark.check_parity(target, **tokenizer("The capital of France is", return_tensors="pt")))
    ```
    """
    if max_new_tokens < 2:
        raise ValueError(f"`max_new_tokens` must be 2 or more for anything to compare, but is {max_new_tokens}.")
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    supported, reason = supports_packed(
        target, {"attention_mask": attention_mask}, max_length=input_ids.shape[1] + max_new_tokens
    )
    if not supported:
        raise NotImplementedError(f"{type(target).__name__} cannot run packed: {reason}.")
    plain = target.generate(
        input_ids,
        attention_mask=attention_mask,
        max_new_tokens=max_new_tokens,
        min_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=1,
        return_dict_in_generate=True,
        output_logits=True,
    )
    new_ids = plain.sequences[:, input_ids.shape[1] :]
    paths = [
        _compare(plain.logits[1:], _packed_logits(target, input_ids, attention_mask, new_ids[:, :-1], block_tokens))
        for block_tokens in (1, _BLOCK_TOKENS)
    ]
    num_tokens = len(input_ids) * (max_new_tokens - 1)
    return ParityReport(num_tokens, str(target.dtype).removeprefix("torch."), *paths)


def _packed_logits(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    new_ids: torch.Tensor,
    block_tokens: int,
) -> Iterator[torch.Tensor]:
    """Feeds `new_ids` `[R, n]` packed, `block_tokens` of each row at a time; yields logits `[R, V]` after each."""
    num_rows, num_new = new_ids.shape
    positions = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
    prompt = target(input_ids, attention_mask=attention_mask, position_ids=positions, use_cache=True, logits_to_keep=1)
    cache = SlabCache(num_rows)
    cache.import_dense(prompt.cache, attention_mask)
    for start in range(0, num_new, block_tokens):
        block = new_ids[:, start : start + block_tokens]
        offsets = torch.arange(start, start + block.shape[1], device=positions.device)
        outputs = packed_forward(
            target,
            block.reshape(1, -1),
            (positions[:, -1:] + 1 + offsets).reshape(1, -1),
            cache=cache,
            layout=cache.layout([block.shape[1]] * num_rows),
        )
        cache.lengths = [length + block.shape[1] for length in cache.lengths]
        yield from outputs.logits[0].float().unflatten(0, (num_rows, -1)).unbind(1)


def _compare(plain_logits: tuple[torch.Tensor, ...], packed_logits: Iterator[torch.Tensor]) -> PathParity:
    """Compares logits `[R, V]` of the same tokens, which are the second and later new ones."""
    difference, first_flip, margin = 0.0, None, None
    for token, (plain, packed) in enumerate(zip(plain_logits, packed_logits, strict=True), start=1):
        packed = packed.to(plain.device)
        difference = max(difference, (plain - packed).abs().max().item())
        flipped = (plain.argmax(-1) != packed.argmax(-1)).nonzero()
        if first_flip is None and len(flipped) > 0:
            first_flip = (int(flipped[0]), token)
            best, second = plain[flipped[0]].topk(2).values[0].tolist()
            margin = best - second
    return PathParity(difference, first_flip, margin)
