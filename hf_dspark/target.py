"""What a drafter borrows from its target: tapped hidden states, token embeddings, the LM head.

Contract: `TargetView` checks once that a drafter and a target fit, then lends the target's *live* modules. It holds
references for the length of one call and never copies, registers, moves or casts a target weight. It knows nothing
about caches or decoding.

Shape legend: M tapped layers, Dt target hidden, D drafter hidden, K draft positions, V target vocabulary, Vd draft
one.
"""

import hashlib
import json
import warnings
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from .modeling_drafter import Drafter


class TargetView:
    """
    The target as `drafter` sees it.

    Args:
        target ([`~transformers.PreTrainedModel`]): a decoder-only language model.
        drafter ([`Drafter`]): the drafter that reads it.

    Raises:
        ValueError: the two do not fit; the message names both values.
    """

    def __init__(self, target: PreTrainedModel, drafter: Drafter):
        self.target, self.drafter, self.device = target, drafter, target.device
        config, text_config = drafter.config, target.config.get_text_config()
        if config.target_hidden_size != text_config.hidden_size:
            raise ValueError(
                f"the drafter reads hidden states of width {config.target_hidden_size} (target_hidden_size), but "
                f"{type(target).__name__} has hidden_size={text_config.hidden_size}; use a drafter of this target"
            )
        if config.hidden_size != text_config.hidden_size:
            raise ValueError(
                f"the drafter's hidden_size={config.hidden_size} must equal the target's {text_config.hidden_size}: "
                "it uses the target's token embeddings"
            )
        config.check_target_layers(text_config.num_hidden_layers)
        check_draft_vocabulary(drafter.draft_token_ids(), self.vocab_size)
        self.embed_tokens = target.get_input_embeddings()
        self.lm_head = drafter.lm_head if drafter.has_own_vocabulary else target.get_output_embeddings()
        if self.lm_head is None:
            raise ValueError(f"{type(target).__name__} has no output embeddings; a language model is needed")
        rows = getattr(self.embed_tokens, "num_embeddings", None)
        if rows is not None and config.mask_token_id is not None and config.mask_token_id >= rows:
            raise ValueError(f"mask_token_id={config.mask_token_id} is outside the target's {rows} token embeddings")
        if config.target_fingerprint and config.target_fingerprint != target_fingerprint(target):
            warnings.warn(
                f"this drafter was trained for another target ({config.target_name_or_path or 'unknown'}, config "
                f"fingerprint {config.target_fingerprint}); the text stays right, but few drafts may be accepted",
                UserWarning,
                stacklevel=2,
            )

    @property
    def vocab_size(self) -> int:
        """Width of the target's logits (V)."""
        head = self.target.get_output_embeddings()
        return getattr(head, "out_features", None) or self.target.config.get_text_config().vocab_size

    @property
    def hidden_state_indices(self) -> list[int]:
        """Entries of `hidden_states` to capture: the output of layer i stands at i + 1 (0 is the embeddings)."""
        return [layer + 1 for layer in self.drafter.config.target_layer_ids or ()]

    def to_target(self, tensor: torch.Tensor) -> torch.Tensor:
        """Moves what the target is to read to its device. An offloaded target, on "meta", moves its inputs itself."""
        return tensor if self.device.type == "meta" else tensor.to(self.device)

    def context_features(self, hidden_states: Sequence[torch.Tensor]) -> torch.Tensor:
        """The target's `hidden_states` tuple -> `[..., M*Dt]` on the drafter's device, in its dtype (Eq. 2)."""
        device, dtype = self.drafter.fc.weight.device, self.drafter.dtype  # a quantised weight has a dtype of its own
        tapped = [hidden_states[index] for index in self.hidden_state_indices]
        return torch.cat([states.to(device=device, dtype=dtype) for states in tapped], dim=-1)

    def noise_embeds(self, token_ids: torch.LongTensor) -> torch.Tensor:
        """Embeds target token ids `[...]` with the target's own module -> `[..., D]` in the drafter's dtype."""
        device, dtype = self.drafter.fc.weight.device, self.drafter.dtype
        embeds = self.embed_tokens(self.to_target(token_ids)).to(device=device, dtype=dtype)
        scale = self.drafter.config.embedding_scale
        if scale is not None:  # other than what the target's module (Gemma's) multiplies its rows by
            scale /= float(getattr(self.embed_tokens, "scalar_embed_scale", 1.0))
        return embeds if scale is None or scale == 1 else embeds * scale

    def base_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states `[..., D]` -> logits `[..., Vd]` in float32: U_k (soft-capped), before any Markov bias."""
        if self.drafter.has_own_vocabulary:
            logits = self.lm_head(hidden).float()
        else:
            logits = self.lm_head(self.to_target(hidden.to(self.target.dtype)))
            logits = logits.to(device=hidden.device, dtype=torch.float32)
            # Padded vocabularies may differ by unused rows (151936 / 152064): what one side lacks cannot be drafted.
            logits = logits[..., : self.drafter.config.vocab_size]
        cap = self.drafter.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap


def check_draft_vocabulary(token_ids: torch.LongTensor | None, vocab_size: int) -> None:
    """Raises `ValueError` unless each entry of `token_ids [Vd]` is a target token of its own."""
    if token_ids is None:
        return
    if token_ids.unique().numel() < token_ids.numel():
        raise ValueError(
            "the drafter's d2t maps several draft ids to one target id, so its probabilities would be wrong; every "
            "draft id needs a token of its own"
        )
    if int(token_ids.max()) >= vocab_size:
        raise ValueError(
            f"the drafter's d2t names token {int(token_ids.max())}, but the target's logits have only {vocab_size} "
            "entries; use a drafter of this target"
        )


def target_fingerprint(target: PreTrainedModel) -> str:
    """Hash of the fields of the target's text config that a drafter depends on, 16 hex digits."""
    config = target.config.get_text_config()
    fields = (
        "model_type",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "vocab_size",
    )
    described = {name: getattr(config, name, None) for name in fields}
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]
