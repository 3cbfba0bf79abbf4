"""A tiny byte-level tokenizer, and a way to make any target say a given text."""

from collections.abc import Callable

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tiny import PAD_ID

TEXT = "Héllo wörld, 你好世界 and 😀👍🏽 too.\n\nNew paragraph:\n naïve café\n\nEnd"
_SPECIAL = ["<pad>", "<bos>", "<mask>", "<eos>"]
EOS_ID = 3


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for every byte of `TEXT`, so that most of its characters are split over several tokens."""
    ((symbols, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(TEXT)
    tokens = [*_SPECIAL, *sorted(set(symbols))]
    inner = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def only(*texts: list[int], prompt_width: int) -> Callable[[int, torch.Tensor], list[int]]:
    """A `prefix_allowed_tokens_fn` that leaves batch row r no choice but to write `texts[r]`, then padding."""

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        written = len(ids) - prompt_width
        return [texts[row][written]] if written < len(texts[row]) else [PAD_ID]

    return allowed


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """The byte tokenizer with a chat template that knows thinking; use letters of `TEXT`."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}<bos>{{ message['content'] }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}:"
        "{% if enable_thinking is defined and not enable_thinking %},{% endif %}{% endif %}"
    )
    return tokenizer
