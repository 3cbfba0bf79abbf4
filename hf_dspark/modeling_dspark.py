"""The DSpark drafter: a parallel backbone over [context ; block]; its heads are in `modeling_drafter.py`.

Contract: `forward` is the parallel stage (Eq. 2-3): given embeddings of a block and the target's tapped hidden states,
it returns the block's hidden states. Parameter names are DeepSpec's, so that official folders load as they are. DFlash
is this model too, without a Markov head (`markov_rank=0`) and, as published, with `sample_from_anchor=False`. Layers
here are Qwen3's; those of Gemma4 are in `modeling_gemma4_layers.py`.

Source: https://huggingface.co/papers/2607.05147, section 3.1. Shape legend: B batch, C context tokens, Q block slots,
K draft positions, D hidden, M tapped layers, Dt target hidden, V / Vd target / draft vocabulary, r Markov rank.
"""

import os
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from .configuration_dspark import DSparkConfig
from .layout import BlockWindow
from .modeling_drafter import Drafter

RotaryEmbeddings = tuple[torch.Tensor, torch.Tensor]  # cos and sin, [B, T, Dh]


class DSparkAttention(Qwen3Attention):
    """Queries come from the block alone; keys and values from the context and from the block (Eq. 3)."""

    def __init__(self, config: DSparkConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.is_causal = False  # inside a block every slot sees every slot
        self.block_window = block_window(config) if config.layer_types[layer_idx] == "sliding_attention" else None

    @property
    def implementation(self) -> str | None:
        """Name of the attention function, where no packed forward says otherwise."""
        return self.config._attn_implementation

    def keys_values(
        self, states: torch.Tensor, position_embeddings: RotaryEmbeddings
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`states [B, T, D]` -> keys (normed, rotated) and values, `[B, H, T, Dh]` each."""
        shape = (*states.shape[:-1], -1, self.head_dim)
        keys = self.k_norm(self.k_proj(states).view(shape)).transpose(1, 2)
        return rotate(keys, position_embeddings), self.v_proj(states).view(shape).transpose(1, 2)

    def forward(
        self,
        hidden_states: torch.Tensor,
        context_keys_values: tuple[torch.Tensor, torch.Tensor] | None,
        position_embeddings: RotaryEmbeddings,
        attention_mask: torch.Tensor | None,
        cache: Cache | None,
    ) -> torch.Tensor:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        queries = rotate(self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2), position_embeddings)
        keys, values = self.keys_values(hidden_states, position_embeddings)
        if context_keys_values is not None:
            keys = torch.cat([context_keys_values[0], keys], dim=2)
            values = torch.cat([context_keys_values[1], values], dim=2)
        if cache is not None:
            keys, values = cache.update(keys, values, self.layer_idx)
        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(self.implementation, eager_attention_forward)
        # A packed forward makes the layer's mask by `block_window`; elsewhere `attention_mask` has it.
        window = {} if self.block_window is None else {"block_window": self.block_window}
        output, _ = attention(self, queries, keys, values, attention_mask, dropout=0.0, scaling=self.scaling, **window)
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1))


def block_window(config: DSparkConfig) -> BlockWindow | None:
    """The window of the config's sliding layers."""
    if config.sliding_window is None:
        return None
    return BlockWindow(config.sliding_window, config.sliding_block_causal, config.sliding_window_origin == "anchor")


def rotate(states: torch.Tensor, position_embeddings: RotaryEmbeddings) -> torch.Tensor:
    """RoPE on one tensor `[B, H, T, Dh]`."""
    return apply_rotary_pos_emb(states, states[:, :0], *position_embeddings)[0]


class DSparkDecoderLayer(GradientCheckpointingLayer):
    """A pre-norm layer whose input norm and residual the context bypasses."""

    def __init__(self, config: DSparkConfig, layer_idx: int):
        super().__init__()
        self.self_attn = DSparkAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

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
        hidden_states = hidden_states + self.self_attn(
            self.input_layernorm(hidden_states), context_kv, position_embeddings, attention_mask, cache
        )
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class DSparkDrafter(Drafter):
    r"""
    A DSpark drafter. Use it as `assistant_model`:

    ```python
    >>> import hf_dspark
    >>> drafter = hf_dspark.DSparkDrafter.from_pretrained("my-org/my-drafter")
    >>> output = target.generate(**inputs, assistant_model=drafter, max_new_tokens=128)
    ```

    Args:
        config ([`DSparkConfig`]): The configuration; also decides which heads exist.

    Source: https://huggingface.co/papers/2607.05147.
    """

    config_class = DSparkConfig
    main_input_name = "noise_embeds"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DSparkDecoderLayer", "Gemma4DraftLayer"]
    is_autoregressive = False

    def __init__(self, config: DSparkConfig):
        if not config.target_layer_ids or config.mask_token_id is None:
            raise ValueError(
                f"a drafter needs target_layer_ids and mask_token_id, got {config.target_layer_ids} and "
                f"{config.mask_token_id}; see DSparkConfig"
            )
        super().__init__(config)
        layer_class, norm_class = layer_classes(config)
        self.hidden_norm = norm_class(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList([layer_class(config, i) for i in range(config.num_hidden_layers)])
        self.norm = norm_class(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.add_heads()

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike | None, *model_args: Any, **kwargs: Any
    ) -> Self:
        """
        Loads a drafter of any layout that is read here: a folder or a Hub repository of hf_dspark, DeepSpec, NeMo,
        speculators, SpecForge, Model-Optimizer, or of z-lab's DFlash. The layout is told from its config.

        Args:
            kwargs: As in [`~transformers.PreTrainedModel.from_pretrained`]: `revision`, `subfolder`, `dtype`,
                `device_map` ... and fields of [`DSparkConfig`] to replace.

        Raises:
            ValueError: the layout is not read here, or config and tensors contradict each other; the message says
                what was found.
        """
        if pretrained_model_name_or_path is not None and kwargs.get("config") is None:
            from .formats.loading import foreign_arguments

            if (foreign := foreign_arguments(pretrained_model_name_or_path, kwargs)) is not None:
                loaded = super().from_pretrained(None, *model_args, **foreign)
                drafter = loaded[0] if isinstance(loaded, tuple) else loaded  # with `output_loading_info`
                drafter.name_or_path = drafter.config.name_or_path = str(pretrained_model_name_or_path)
                return loaded
        return super().from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)

    def combine_context(self, context_hidden_states: torch.Tensor) -> torch.Tensor:
        """Eq. 2: tapped target states `[..., M*Dt]` -> the context that every layer reads, `[..., D]`."""
        return self.hidden_norm(self.fc(context_hidden_states))

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        context_position_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
    ) -> torch.Tensor:
        """
        The parallel stage (Eq. 3): one bidirectional pass over [context ; block].

        Args:
            noise_embeds (`torch.Tensor` of shape `(B, Q, D)`): embeddings of [anchor, mask, ..., mask].
            context_hidden_states (`torch.Tensor` of shape `(B, C, M*Dt)`, *optional*): tapped target states. Omit
                it when `cache` already holds the context (see `write_context`).
            position_ids (`torch.LongTensor` of shape `(B, Q)`): absolute positions of the slots.
            context_position_ids (`torch.LongTensor` of shape `(B, C)`, *optional*): those of the context.
            attention_mask (`torch.Tensor` of shape `(B, 1, Q, C + Q)`, *optional*): additive, or bool (`True` is
                visible); `None` sees all. Sliding layers narrow it themselves, Q being a number of whole blocks.
            cache ([`~transformers.Cache`], *optional*): keys and values of the context.

        Returns:
            `torch.Tensor` of shape `(B, Q, D)`: hidden states after the final norm.
        """
        context = context_embeddings = None
        if context_hidden_states is not None:
            context = self.combine_context(context_hidden_states)
            context_embeddings = self.rotary_emb(noise_embeds, context_position_ids)
        position_embeddings = self.rotary_emb(noise_embeds, position_ids)
        hidden_states, sliding_mask = noise_embeds, attention_mask
        if cache is None and self.config.sliding_window is not None:
            sliding_mask = self.sliding_mask(attention_mask, position_ids, context_position_ids, noise_embeds.dtype)
        for layer in self.layers:
            mask = attention_mask if layer.self_attn.block_window is None else sliding_mask
            hidden_states = layer(hidden_states, context, position_embeddings, context_embeddings, mask, cache)
        return self.norm(hidden_states)

    def sliding_mask(
        self,
        attention_mask: torch.Tensor | None,
        position_ids: torch.LongTensor,
        context_position_ids: torch.LongTensor | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """`attention_mask`, of the same kind or additive, without what sliding layers do not see."""
        window, size = block_window(self.config), self.config.block_size
        if window is None or position_ids.shape[-1] % size:
            raise ValueError(f"sliding layers need whole blocks of {size} slots, got {position_ids.shape[-1]} slots")
        if attention_mask is not None and not isinstance(attention_mask, torch.Tensor):
            raise NotImplementedError(
                "sliding draft layers need a dense attention mask; set the drafter's attn_implementation to 'sdpa'"
            )
        anchors = position_ids[..., ::size].repeat_interleave(size, dim=-1)
        keys = position_ids if context_position_ids is None else torch.cat([context_position_ids, position_ids], -1)
        hidden = window.hides(position_ids[..., None], keys[..., None, :], anchors[..., None])[:, None]
        if attention_mask is None:
            attention_mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        if attention_mask.dtype == torch.bool:
            return attention_mask & ~hidden
        return attention_mask.masked_fill(hidden, torch.finfo(attention_mask.dtype).min)

    def write_context(
        self, context_hidden_states: torch.Tensor, context_position_ids: torch.LongTensor, cache: Cache
    ) -> None:
        """Writes keys and values of `context_hidden_states [B, C, M*Dt]` into `cache`, at positions `[B, C]`."""
        context = self.combine_context(context_hidden_states)
        position_embeddings = self.rotary_emb(context, context_position_ids)
        for layer in self.layers:
            cache.update(*layer.self_attn.keys_values(context, position_embeddings), layer.self_attn.layer_idx)


def layer_classes(config: DSparkConfig) -> tuple[type[nn.Module], type[nn.Module]]:
    """Layers and norms of the config's backbone."""
    if config.backbone == "gemma4":
        from .modeling_gemma4_layers import Gemma4DraftLayer, Gemma4RMSNorm

        return Gemma4DraftLayer, Gemma4RMSNorm
    return DSparkDecoderLayer, Qwen3RMSNorm
