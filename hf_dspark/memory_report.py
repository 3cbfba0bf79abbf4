"""What a pair takes in memory: weights, caches, and what lending the target's embeddings and head saves.

Contract: counts from shapes and dtypes alone; nothing is computed or moved, and models on the meta device or offloaded
ones are counted in full. Cache sizes are those of decoding here: every layer keeps the keys and values of the whole
text, sliding ones too, and capacity is a power of two, of which 1,024 tokens is one. Activations, the allocator's
slack and what a quantised kernel unpacks for a moment are not counted.

Shape legend: D hidden, V target vocabulary.
"""

import copy
import dataclasses

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from .modeling_drafter import Drafter
from .target import TargetView

TOKENS = 1024
_MIB = 2**20


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryReport:
    """
    Bytes of a target and its drafter; printed as a table.

    Attributes:
        target_weight_bytes, drafter_weight_bytes (`int`): Parameters and buffers, tied ones once, quantised ones as
            they are stored, with their scales.
        target_cache_bytes_per_1k_tokens, drafter_cache_bytes_per_1k_tokens (`int`): Keys and values of 1,024 tokens of
            one row.
        shared_embedding_bytes (`int`): What a copy of the target's token embeddings would take in the drafter's dtype,
            if the target did not lend its own.
        shared_head_bytes (`int`): The same for its LM head; 0 if that is the embeddings again, or if the drafter has a
            head of its own.
    """

    target_weight_bytes: int
    drafter_weight_bytes: int
    target_cache_bytes_per_1k_tokens: int
    drafter_cache_bytes_per_1k_tokens: int
    shared_embedding_bytes: int
    shared_head_bytes: int

    @property
    def saved_bytes(self) -> int:
        """What sharing embeddings and head saves."""
        return self.shared_embedding_bytes + self.shared_head_bytes

    def __str__(self) -> str:
        rows = [
            ("", "target", "drafter"),
            ("weights", _mib(self.target_weight_bytes), _mib(self.drafter_weight_bytes)),
            (
                "cache, 1k tokens of a row",
                _mib(self.target_cache_bytes_per_1k_tokens),
                _mib(self.drafter_cache_bytes_per_1k_tokens),
            ),
            ("saved by sharing embeddings", "", _mib(self.shared_embedding_bytes)),
            ("saved by sharing the LM head", "", _mib(self.shared_head_bytes)),
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            f"{name.ljust(widths[0])}  {target.rjust(widths[1])}  {drafter.rjust(widths[2])}"
            for name, target, drafter in rows
        )


def memory_report(drafter: Drafter, target: PreTrainedModel) -> MemoryReport:
    """
    Counts what a pair takes.

    Args:
        drafter ([`Drafter`]), target ([`~transformers.PreTrainedModel`]): The pair, on whatever devices.

    Returns:
        [`MemoryReport`]

    Raises:
        ValueError: The two do not fit.
    """
    view = TargetView(target, drafter)
    config = drafter.config
    embeddings, head = view.embed_tokens, target.get_output_embeddings()
    element_bytes = drafter.dtype.itemsize
    table = embeddings.num_embeddings * embeddings.embedding_dim * element_bytes
    is_tied = getattr(embeddings, "weight", None) is getattr(head, "weight", None)
    own_head = drafter.has_own_vocabulary or is_tied
    drafter_elements = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return MemoryReport(
        target_weight_bytes=weight_bytes(target),
        drafter_weight_bytes=weight_bytes(drafter),
        target_cache_bytes_per_1k_tokens=TOKENS * cache_elements(target) * target.dtype.itemsize,
        drafter_cache_bytes_per_1k_tokens=TOKENS * drafter_elements * element_bytes,
        shared_embedding_bytes=table,
        shared_head_bytes=0 if own_head else view.vocab_size * config.hidden_size * element_bytes,
    )


def weight_bytes(model: nn.Module) -> int:
    """Bytes of parameters and buffers, tied ones once."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.numel() * tensor.element_size() + _scale_bytes(tensor) for tensor in tensors.values())


def cache_elements(target: PreTrainedModel) -> int:
    """Keys and values that one token leaves in the caches of all layers; asked of a copy without weights."""
    config = copy.deepcopy(target.config)
    if hasattr(config, "quantization_config"):  # it changes how weights are stored, not what is cached
        del config.quantization_config
    config._attn_implementation = "eager"
    config.get_text_config(
        decoder=True
    ).pad_token_id = None  # else some models look for padding among ids without values
    cache = DynamicCache()
    with torch.device("meta"), torch.no_grad(), torch.random.fork_rng(devices=[]):
        # Half precision throughout: kernels of experts take nothing else there, and only shapes are asked for.
        shell = type(target)(config).to(torch.bfloat16).eval()
        token = torch.zeros(1, 1, dtype=torch.long)
        shell(input_ids=token, position_ids=token, cache=cache, use_cache=True)
    states = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return sum(tensor.numel() for tensor in states if tensor is not None)


def _scale_bytes(tensor: torch.Tensor) -> int:
    """Scales that bitsandbytes keeps beside a quantised weight."""
    state, count = getattr(tensor, "quant_state", None), 0
    while state is not None:  # scales that are quantised themselves have a state of their own
        for name in ("absmax", "code", "offset"):
            if isinstance(part := getattr(state, name, None), torch.Tensor):
                count += part.numel() * part.element_size()
        state = getattr(state, "state2", None)
    if isinstance(scales := getattr(tensor, "SCB", None), torch.Tensor):
        count += scales.numel() * scales.element_size()
    return count


def _mib(count: int) -> str:
    return f"{count / _MIB:,.2f} MiB"
