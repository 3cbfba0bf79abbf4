"""The autoregressive drafter: one causal layer, a pass a token, its own state fed back (EAGLE-3, MTP-1).

Contract: a baseline for [`DSparkDrafter`], served by the same decoder and trained by the same trainer. An *entry* is a
token and the state of the token before it: the target's tapped states, fused by `fc`, where the target has verified
that token, else what this layer itself put out for it. The layer attends from an entry to all earlier ones; what it
puts out predicts the token after the entry's. Entries made of own states serve one round and are then replaced.

Written from the description in https://huggingface.co/papers/2503.01840, section 3. Differs from it: queries and keys
are normalised (as in Qwen3), and the vocabulary is only reduced if asked for. Shape legend: B batch, Q entries, T
tokens of a sequence, A anchors, K drafts of a round, D hidden, M tapped layers, Dt target hidden, Vd draft vocabulary.
"""

from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding

from .configuration_autoregressive import AutoregressiveConfig
from .modeling_drafter import Drafter
from .modeling_dspark import DSparkAttention, RotaryEmbeddings

if TYPE_CHECKING:
    from .target import TargetView
    from .training.teacher import TeacherFeatures


class EntryAttention(DSparkAttention):
    """Attention whose queries, keys and values read an entry, twice as wide as the state it adds to."""

    def __init__(self, config: AutoregressiveConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        width, bias = 2 * config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(width, config.num_attention_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * self.head_dim, bias=bias)

    @property
    def implementation(self) -> str | None:
        """As configured, but sdpa for flex attention: that is for the block masks of a parallel drafter's training."""
        configured = super().implementation
        return "sdpa" if configured == "flex_attention" else configured


class EntryLayer(nn.Module):
    """A pre-norm layer over entries: token and state are normalised apart, the residual is the state."""

    def __init__(self, config: AutoregressiveConfig, layer_idx: int = 0):
        super().__init__()
        self.self_attn = EntryAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def entries(self, token_embeds: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Tokens and the states before them, `[B, Q, D]` each -> `[B, Q, 2 * D]`."""
        return torch.cat([self.input_layernorm(token_embeds), self.hidden_norm(states)], dim=-1)

    def forward(
        self,
        token_embeds: torch.Tensor,
        states: torch.Tensor,
        position_embeddings: RotaryEmbeddings,
        attention_mask: torch.Tensor | None,
        cache: Cache | None,
    ) -> torch.Tensor:
        entries = self.entries(token_embeds, states)
        states = states + self.self_attn(entries, None, position_embeddings, attention_mask, cache)
        return states + self.mlp(self.post_attention_layernorm(states))


class AutoregressiveDrafter(Drafter):
    r"""
    A drafter in the manner of EAGLE-3, or of MTP with `block_size=1`. Use it as `assistant_model`, like a
    [`DSparkDrafter`]:

    ```python
    >>> from hf_dspark.baselines import new_autoregressive_drafter
    >>> drafter = new_autoregressive_drafter(target, block_size=7)  # untrained
    >>> output = target.generate(**inputs, assistant_model=drafter, max_new_tokens=128)
    ```

    Args:
        config ([`AutoregressiveConfig`]): The configuration; also decides which heads exist.

    Source: https://huggingface.co/papers/2503.01840.
    """

    config: AutoregressiveConfig
    config_class = AutoregressiveConfig
    main_input_name = "token_embeds"
    _no_split_modules = ["EntryLayer"]
    is_autoregressive = True

    def __init__(self, config: AutoregressiveConfig):
        if not config.target_layer_ids:
            raise ValueError(f"a drafter needs target_layer_ids, got {config.target_layer_ids}; see DSparkConfig")
        super().__init__(config)
        self.layer = EntryLayer(config)
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.add_heads()

    def fuse(self, context_hidden_states: torch.Tensor) -> torch.Tensor:
        """Tapped target states `[..., M*Dt]` -> states `[..., D]`, in the place of this layer's own."""
        return self.fc(context_hidden_states)

    def forward(
        self,
        token_embeds: torch.Tensor,
        states: torch.Tensor,
        position_ids: torch.LongTensor,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
    ) -> torch.Tensor:
        """
        One step of drafting.

        Args:
            token_embeds (`torch.Tensor` of shape `(B, Q, D)`): Embeddings of the entries' tokens.
            states (`torch.Tensor` of shape `(B, Q, D)`): States of the tokens before them; see `fuse`.
            position_ids (`torch.LongTensor` of shape `(B, Q)`): Positions of the entries' tokens.
            attention_mask (`torch.Tensor` of shape `(B, 1, Q, entries in the cache + Q)`, *optional*): Additive.
            cache ([`~transformers.Cache`], *optional*): Keys and values of earlier entries; takes in these.

        Returns:
            `torch.Tensor` of shape `(B, Q, D)`: states of the entries' tokens; `norm` of them predicts the next ones.
        """
        return self.layer(token_embeds, states, self.rotary_emb(states, position_ids), attention_mask, cache)

    def write_context(
        self, token_embeds: torch.Tensor, states: torch.Tensor, position_ids: torch.LongTensor, cache: Cache
    ) -> None:
        """Writes keys and values of verified entries into `cache`; arguments as in `forward`."""
        entries, position_embeddings = self.layer.entries(token_embeds, states), self.rotary_emb(states, position_ids)
        cache.update(*self.layer.self_attn.keys_values(entries, position_embeddings), 0)

    def draft_training_hidden(
        self,
        view: "TargetView",
        features: "TeacherFeatures",
        input_ids: torch.LongTensor,
        anchors: torch.LongTensor,
    ) -> torch.Tensor:
        """
        The training-time test: K steps from every anchor, fed true tokens and own states, as in decoding.

        Args:
            view ([`TargetView`]): This drafter and its target.
            features ([`TeacherFeatures`]): Of the sequence; read is `context [T, M*Dt]`.
            input_ids (`torch.LongTensor` of shape `[T]`): The sequence.
            anchors (`torch.LongTensor` of shape `[A]`): Positions of the tokens to draft after.

        Returns:
            `torch.Tensor` of shape `[A, K, D]`: what the heads read.
        """
        length = len(input_ids)
        positions = torch.arange(length, device=anchors.device)
        fused = self.fuse(features.context.to(self.fc.weight.dtype))
        before = nn.functional.pad(fused[:-1], (0, 0, 1, 0))  # nothing is before the first token
        cache = DynamicCache()
        self.write_context(view.noise_embeds(input_ids)[None], before[None], positions[None], cache)
        # An anchor is an entry of its own, the same as the verified one at its place: that one is hidden from it.
        unseen_keys = [positions[None] >= anchors[:, None]]
        others = ~torch.eye(len(anchors), dtype=torch.bool, device=anchors.device)
        states, steps = before[anchors], []
        for step in range(self.config.num_drafts):
            unseen_keys.append(others)
            unseen = torch.cat(unseen_keys, dim=1)
            mask = states.new_zeros(unseen.shape).masked_fill_(unseen, torch.finfo(states.dtype).min)
            tokens = view.noise_embeds(input_ids[(anchors + step).clamp_max(length - 1)])
            states = self(tokens[None], states[None], (anchors + step)[None], mask[None, None], cache)[0]
            steps.append(self.norm(states))
        return torch.stack(steps, dim=1)
