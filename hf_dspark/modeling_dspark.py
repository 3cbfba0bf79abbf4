"""The drafter: a parallel Qwen3-style backbone over [context ; block], and its heads.

Contract: `DSparkDrafter` holds weights and options, nothing about any call. `forward` is the parallel stage (Eq. 2-3):
given embeddings of a block and the target's tapped hidden states, it returns the block's hidden states. Embeddings and
LM head are the target's and are lent by the caller (`hf_dspark.target`). Parameter names are DeepSpec's, so that
official folders load as they are.

Source: https://huggingface.co/papers/2607.05147, section 3.1. Shape legend: B batch, C context tokens, Q block slots,
K draft positions, D hidden, M tapped layers, Dt target hidden, V / Vd target / draft vocabulary, r Markov rank.
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel
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
from .heads import MARKOV_HEADS, ConfidenceHead

if TYPE_CHECKING:
    from .rounds import DecodingRound
    from .scheduling import Scheduler
    from .sps_profile import SPSProfile


@dataclasses.dataclass(frozen=True, slots=True)
class DecodingOptions:
    """What a drafter view decodes with; see [`DSparkDrafter.with_options`]."""

    scheduler: "Scheduler | str | None" = None
    sps_profile: "SPSProfile | None" = None
    max_draft_tokens: int | None = None
    on_round: "Callable[[DecodingRound], None] | None" = None
    generator: torch.Generator | None = None


RotaryEmbeddings = tuple[torch.Tensor, torch.Tensor]  # cos and sin, [B, T, Dh]


class DSparkAttention(Qwen3Attention):
    """Queries come from the block alone; keys and values from the context and from the block (Eq. 3)."""

    def __init__(self, config: DSparkConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.is_causal = False  # inside a block every slot sees every slot

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
        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, _ = attention(self, queries, keys, values, attention_mask, dropout=0.0, scaling=self.scaling)
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1))


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


class DSparkDrafter(PreTrainedModel):
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

    config: DSparkConfig
    config_class = DSparkConfig
    base_model_prefix = ""
    main_input_name = "noise_embeds"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DSparkDecoderLayer"]
    _supports_sdpa = True
    _supports_attention_backend = True
    # Frozen copies of the target's modules in published folders: the live target lends its own. Only a reduced
    # vocabulary has an lm_head here.
    _keys_to_ignore_on_load_unexpected = [r"^embed_tokens\.", r"^lm_head\."]
    is_dspark_drafter = True  # what the hook looks for: a remote-code copy of this class must work too

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        if not config.target_layer_ids or config.mask_token_id is None:
            raise ValueError(
                f"a drafter needs target_layer_ids and mask_token_id, got {config.target_layer_ids} and "
                f"{config.mask_token_id}; see DSparkConfig"
            )
        width = len(config.target_layer_ids) * config.target_hidden_size  # type: ignore[operator]  # set by the config
        self.fc = nn.Linear(width, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList([DSparkDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.markov_head = MARKOV_HEADS[config.markov_head_type](config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        if config.draft_vocab_size is not None:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
            # target_id = draft_id + d2t[draft_id]; t2d marks the target ids that can be drafted (speculators' names).
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
            self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)
        self.options = DecodingOptions()
        self.post_init()

    @property
    def has_own_vocabulary(self) -> bool:
        """Whether the drafter predicts a reduced vocabulary with its own head."""
        return self.config.draft_vocab_size is not None

    def draft_token_ids(self) -> torch.LongTensor | None:
        """`[Vd]` target id of each draft id, or `None` when they are the same."""
        if not self.has_own_vocabulary:
            return None
        return self.d2t + torch.arange(self.d2t.shape[0], device=self.d2t.device)

    def with_options(self, **options: Any) -> "DSparkDrafter":
        """
        A view of this drafter that decodes differently. It shares every weight, costs nothing, and never meets another
        view: options live on the view alone.

        Args:
            scheduler ([`Scheduler`] or `"auto"`, *optional*): how many drafts to verify; [`Auto`] when `None`.
            sps_profile ([`SPSProfile`], *optional*): what rounds cost on this machine; measured on first need and
                kept in the user's cache when `None`.
            max_draft_tokens (`int`, *optional*): upper limit of drafts a round, in tokens.
            on_round (`Callable[[DecodingRound], None]`, *optional*): called for each row of each round, as it happens.
            generator (`torch.Generator`, *optional*): source of randomness when sampling, else torch's global one.

        Raises:
            TypeError: an unknown option, or a value of the wrong type.
            ValueError: `max_draft_tokens` below 1, or a scheduler name other than "auto".
        """
        known = [field.name for field in dataclasses.fields(DecodingOptions)]
        if unknown := sorted(set(options) - set(known)):
            raise TypeError(f"unknown options {unknown}; allowed are {known}")
        merged = dataclasses.replace(self.options, **options)
        check_options(merged)
        view = copy.copy(self)  # nn.Module's __dict__ is copied one level deep: parameters and modules are shared
        view.options = merged
        return view

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
            attention_mask (`torch.Tensor` of shape `(B, 1, Q, C + Q)`, *optional*): additive; `None` sees all.
            cache ([`~transformers.Cache`], *optional*): keys and values of the context.

        Returns:
            `torch.Tensor` of shape `(B, Q, D)`: hidden states after the final norm.
        """
        context = context_embeddings = None
        if context_hidden_states is not None:
            context = self.combine_context(context_hidden_states)
            context_embeddings = self.rotary_emb(noise_embeds, context_position_ids)
        position_embeddings = self.rotary_emb(noise_embeds, position_ids)
        hidden_states = noise_embeds
        for layer in self.layers:
            hidden_states = layer(
                hidden_states, context, position_embeddings, context_embeddings, attention_mask, cache
            )
        return self.norm(hidden_states)

    def write_context(
        self, context_hidden_states: torch.Tensor, context_position_ids: torch.LongTensor, cache: Cache
    ) -> None:
        """Writes keys and values of `context_hidden_states [B, C, M*Dt]` into `cache`, at positions `[B, C]`."""
        context = self.combine_context(context_hidden_states)
        position_embeddings = self.rotary_emb(context, context_position_ids)
        for layer in self.layers:
            cache.update(*layer.self_attn.keys_values(context, position_embeddings), layer.self_attn.layer_idx)

    def teacher_forced(
        self, hidden: torch.Tensor, base_logits: torch.Tensor, previous_ids: torch.LongTensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        The sequential stage over known previous tokens (Eq. 4-7), for training and scoring.

        Args:
            hidden (`torch.Tensor` of shape `(..., K, D)`), base_logits (`torch.Tensor` of shape `(..., K, Vd)`),
            previous_ids (`torch.LongTensor` of shape `(..., K)`): target ids x_{k-1}.

        Returns:
            draft logits `(..., K, Vd)` and confidence logits `(..., K)` (or `None` without that head).
        """
        embeds = None
        if self.markov_head is not None:
            embeds = self.markov_head.embed(previous_ids)
            base_logits = base_logits + self.markov_head.bias(self.markov_head.scan(embeds, hidden))
        confidence = None if self.confidence_head is None else self.confidence_head(hidden, embeds)
        return base_logits, confidence


def check_options(options: DecodingOptions) -> None:
    """Raises `TypeError` / `ValueError` for options that could not be decoded with."""
    if isinstance(options.scheduler, str):
        if options.scheduler != "auto":
            raise ValueError(f'scheduler={options.scheduler!r}; the only name is "auto", all others are objects')
    elif options.scheduler is not None and (
        isinstance(options.scheduler, type) or not hasattr(options.scheduler, "verify_lengths")
    ):
        raise TypeError(f'scheduler must be "auto" or a Scheduler such as FixedLength(3), got {options.scheduler!r}')
    if options.sps_profile is not None and not hasattr(options.sps_profile, "round_seconds"):
        raise TypeError(f"sps_profile must be an SPSProfile or None, got {options.sps_profile!r}")
    if options.max_draft_tokens is not None:
        if not isinstance(options.max_draft_tokens, int) or isinstance(options.max_draft_tokens, bool):
            raise TypeError(f"max_draft_tokens must be an int or None, got {options.max_draft_tokens!r}")
        if options.max_draft_tokens < 1:
            raise ValueError(f"max_draft_tokens={options.max_draft_tokens} must be at least 1")
    if options.on_round is not None and not callable(options.on_round):
        raise TypeError(f"on_round must be callable with a DecodingRound, got {options.on_round!r}")
    if options.generator is not None and not isinstance(options.generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator or None, got {options.generator!r}")
