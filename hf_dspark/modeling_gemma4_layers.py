"""Draft layers in the manner of Gemma4, the second backbone of a `DSparkDrafter`.

Contract: a layer has the interface of `DSparkDecoderLayer` and transformers' parameter names. What differs from Qwen3:
norms on both sides of attention and MLP, a scalar on the layer's output, values that are normed (without a weight) and
may be the keys' raw projections, and scores that are not scaled. Embedding scale and soft cap are `target.py`'s.

Source: https://huggingface.co/papers/2607.05147, section 3.1; layers as in transformers' `gemma4`. Shape legend: B
batch, T tokens, D hidden, H key/value heads, Dh head size.
"""

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from .configuration_dspark import DSparkConfig
from .modeling_dspark import DSparkAttention, DSparkDecoderLayer, RotaryEmbeddings, rotate

__all__ = ["Gemma4DraftAttention", "Gemma4DraftLayer", "Gemma4RMSNorm"]


class Gemma4DraftAttention(DSparkAttention):
    """As [`DSparkAttention`], with normed values, which may be the keys' projections, and unscaled scores."""

    def __init__(self, config: DSparkConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.scaling = 1.0
        self.q_norm = Gemma4RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Gemma4RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.v_norm = Gemma4RMSNorm(self.head_dim, eps=config.rms_norm_eps, with_scale=False)
        if config.attention_k_eq_v:
            self.v_proj = None

    def keys_values(
        self, states: torch.Tensor, position_embeddings: RotaryEmbeddings
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (*states.shape[:-1], -1, self.head_dim)
        keys = self.k_proj(states).view(shape)
        values = keys if self.v_proj is None else self.v_proj(states).view(shape)
        return rotate(self.k_norm(keys).transpose(1, 2), position_embeddings), self.v_norm(values).transpose(1, 2)


class Gemma4DraftLayer(DSparkDecoderLayer):
    """A layer with norms before and after attention and MLP, and a scalar on its output."""

    def __init__(self, config: DSparkConfig, layer_idx: int):
        nn.Module.__init__(self)
        self.self_attn = Gemma4DraftAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            setattr(self, f"{name}_layernorm", Gemma4RMSNorm(config.hidden_size, eps=config.rms_norm_eps))
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(
        self,
        hidden_states: torch.Tensor,
        context: torch.Tensor | None,
        position_embeddings: RotaryEmbeddings,
        context_position_embeddings: RotaryEmbeddings | None,
        attention_mask: torch.Tensor | None,
        cache: Cache | None,
    ) -> torch.Tensor:
        context_kv = None
        if context is not None and context_position_embeddings is not None:
            context_kv = self.self_attn.keys_values(context, context_position_embeddings)
        attended = self.self_attn(
            self.input_layernorm(hidden_states), context_kv, position_embeddings, attention_mask, cache
        )
        hidden_states = hidden_states + self.post_attention_layernorm(attended)
        fed = self.mlp(self.pre_feedforward_layernorm(hidden_states))
        return (hidden_states + self.post_feedforward_layernorm(fed)) * self.layer_scalar
