"""The drafter's configuration.

Contract: `DSparkConfig` is a Qwen3 backbone config plus what makes it a DSpark drafter: the block, the tapped target
layers, the Markov head, the confidence head, the draft vocabulary. It validates itself, so a config that exists can be
built. It knows nothing about weights or about decoding, and leaves to `formats` how others spell such configs.

Source: https://huggingface.co/papers/2607.05147, section 3.1. Shape legend: K drafts a block, V target vocabulary,
Vd draft vocabulary, D hidden size, M tapped layers, r Markov rank.
"""

import math
import os
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import Qwen3Config

from .formats.reading import config_fields

BACKBONES = ("qwen3", "gemma4")
WINDOW_ORIGINS = ("anchor", "slot")
HEAD_TYPES = ("vanilla", "gated", "rnn")
CALIBRATED_MODES = ("greedy", "sampling")
CALIBRATION_FIELDS = ("dataset", "num_rounds", "temperature", "conditional_acceptance", "ece_before", "ece_after")


@strict
class DSparkConfig(Qwen3Config):
    r"""
    Configuration of a [`DSparkDrafter`]. Every field of [`~transformers.Qwen3Config`] describes the draft layers;
    `hidden_size` must be the target's, since the token embeddings are the target's own.

    Args:
        block_size (`int`, *optional*, defaults to 7):
            Slots of one draft block (the paper's gamma): the anchor and `block_size - 1` masks.
        sample_from_anchor (`bool`, *optional*, defaults to `True`):
            `True`: layout A, the anchor slot predicts too, so a block drafts K = `block_size` tokens (DeepSpec).
            `False`: layout B, the anchor slot's output is dropped, K = `block_size - 1` (DFlash).
        mask_token_id (`int`, *optional*):
            Token id in the slots that are to be predicted.
        target_layer_ids (`list[int]`):
            0-based target layers whose *outputs* are tapped (-1 = the embeddings), in concatenation order.
        num_target_layers (`int`, *optional*):
            Decoder layers of the target; bounds `target_layer_ids`.
        target_hidden_size (`int`, *optional*):
            Width of the tapped hidden states; defaults to `hidden_size`.
        markov_rank (`int`, *optional*, defaults to 256):
            Rank r of the sequential head; 0 switches it off (a DFlash drafter).
        markov_head_type (`str`, *optional*, defaults to `"vanilla"`):
            `"vanilla"`, `"gated"` or `"rnn"` (Eq. 4-6).
        enable_confidence_head (`bool`, *optional*, defaults to `True`):
            Whether the drafter predicts the survival of its drafts (Eq. 7).
        confidence_head_with_markov (`bool`, *optional*):
            Whether the confidence head also reads the Markov embedding; defaults to `markov_rank > 0`.
        draft_vocab_size (`int`, *optional*):
            Size Vd of a reduced draft vocabulary. The drafter then owns an `lm_head` of Vd rows and the maps
            `d2t` / `t2d`. `None` (or the full `vocab_size`) drafts over the target's vocabulary with its head.
        draft_top_k (`int`, *optional*):
            Restrict each draft position to the `draft_top_k` largest base logits; the Markov bias is computed for
            those only. Lossless: tokens outside have draft probability 0.
        backbone (`str`, *optional*, defaults to `"qwen3"`):
            The family of the draft layers: `"qwen3"` or `"gemma4"` (sandwich norms, layer scalars, normed values,
            attention scale 1).
        attention_k_eq_v (`bool`, *optional*, defaults to `False`):
            Gemma4 only: values are the keys' raw projections; there is no `v_proj`.
        final_logit_softcapping (`float`, *optional*):
            Soft cap on the base logits, before the Markov bias is added.
        embedding_scale (`float`, *optional*):
            Factor on the rows of the target's embedding table. `None`: what the target's own module gives (a Gemma
            target's scales by itself).
        layer_types (`list[str]`, *optional*):
            `"full_attention"` or `"sliding_attention"` for each draft layer; the latter need `sliding_window`, and
            see a window of the context as the next two say. Full layers see everything.
        sliding_window_origin (`str`, *optional*, defaults to `"anchor"`):
            `"anchor"`: every slot sees the `sliding_window` context tokens before the anchor (speculators).
            `"slot"`: the window moves with the slot, which counts as one of its tokens (SpecForge).
        sliding_block_causal (`bool`, *optional*, defaults to `True`):
            Whether in sliding layers a slot of the block sees only those before it and itself.
        confidence_temperatures (`dict[str, list[float]]`, *optional*):
            Per-position divisors of the confidence logits, `{"greedy": [K floats], "sampling": [K floats]}`.
        confidence_offsets (`dict[str, list[float]]`, *optional*):
            What is added to them after that, likewise; 0 where there is none.
        confidence_calibration (`dict[str, dict]`, *optional*):
            Where those come from, for each of the two modes: `dataset` (its name), `num_rounds` (measured),
            `temperature` (of the text; 0 is greedy), and K numbers each of `conditional_acceptance` (share of the
            rounds that accepted all earlier drafts in which each was accepted; 0 over no round), `ece_before` and
            `ece_after` (calibration error of the prefix survival). See [`calibrate`].
        target_name_or_path (`str`, *optional*):
            The target this drafter was trained for (information only).
        target_fingerprint (`str`, *optional*):
            Hash of that target's config; a different target draws a warning.
        training_length (`int`, *optional*):
            Tokens of the longest text that the drafter learned from (information only).
        thinking (`bool`, *optional*):
            Whether the answers it learned from were written with thinking; `None` if unknown, mixed, or there is no
            such choice (information only).

    Raises:
        ValueError: a field contradicts another one; the message says which and what is allowed.
    """

    model_type = "dspark"

    block_size: int = 7
    sample_from_anchor: bool = True
    mask_token_id: int | None = None
    target_layer_ids: list[int] | None = None
    num_target_layers: int | None = None
    target_hidden_size: int | None = None
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool | None = None
    draft_vocab_size: int | None = None
    draft_top_k: int | None = None
    backbone: str = "qwen3"
    attention_k_eq_v: bool = False
    final_logit_softcapping: float | None = None
    embedding_scale: float | None = None
    sliding_window: int | None = None
    sliding_window_origin: str = "anchor"
    sliding_block_causal: bool = True
    confidence_temperatures: dict[str, list[float]] | None = None
    confidence_offsets: dict[str, list[float]] | None = None
    confidence_calibration: dict[str, dict[str, Any]] | None = None
    target_name_or_path: str | None = None
    target_fingerprint: str | None = None
    training_length: int | None = None
    thinking: bool | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        # Qwen3Config drops the window of a config that does not say twice that it has one.
        self.use_sliding_window = self.layer_types is not None and "sliding_attention" in self.layer_types
        super().__post_init__(**kwargs)
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        if self.target_layer_ids is None:
            self.target_layer_ids = []
        if self.confidence_head_with_markov is None:
            self.confidence_head_with_markov = self.markov_rank > 0
        if self.draft_vocab_size == self.vocab_size:
            self.draft_vocab_size = None  # some exporters write the full size: that is no reduction
        self.check_consistency()

    @property
    def num_drafts(self) -> int:
        """Tokens that one block proposes (K)."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    def check_consistency(self) -> None:
        """Raises `ValueError` for the first pair of fields that contradict each other."""
        if self.num_drafts < 1:
            slots = "sample_from_anchor=True" if self.sample_from_anchor else "sample_from_anchor=False"
            raise ValueError(f"block_size={self.block_size} with {slots} drafts no token; raise block_size")
        self._check_heads()
        self._check_vocabulary()
        self._check_backbone()
        self.check_target_layers(self.num_target_layers)
        self._check_calibration()

    def check_target_layers(self, num_layers: int | None) -> None:
        """Raises `ValueError` unless every tapped layer exists in a target of `num_layers` and is not its last."""
        for layer in self.target_layer_ids or ():
            if layer < -1 or (num_layers is not None and layer >= num_layers):
                limit = "" if num_layers is None else f" and below the target's {num_layers} layers"
                raise ValueError(f"target_layer_ids={self.target_layer_ids}: {layer} must be at least -1{limit}")
            if num_layers is not None and layer == num_layers - 1:
                raise ValueError(
                    f"target_layer_ids={self.target_layer_ids} taps the target's last layer {layer}: its entry in "
                    f"`hidden_states` is taken after the final norm; use layers up to {num_layers - 2}"
                )

    def _check_backbone(self) -> None:
        if self.backbone not in BACKBONES:
            raise ValueError(f"backbone={self.backbone!r} must be one of {BACKBONES}")
        if self.attention_k_eq_v and self.backbone != "gemma4":
            raise ValueError(f"attention_k_eq_v=True needs backbone='gemma4', got {self.backbone!r}")
        kinds = self.layer_types or []
        if len(kinds) != self.num_hidden_layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
            raise ValueError(
                f"layer_types={self.layer_types} must name 'full_attention' or 'sliding_attention' for each of the "
                f"{self.num_hidden_layers} draft layers"
            )
        if "sliding_attention" in kinds and (self.sliding_window is None or self.sliding_window < 1):
            raise ValueError(f"sliding layers need a sliding_window of at least 1 token, got {self.sliding_window}")
        if self.sliding_window_origin not in WINDOW_ORIGINS:
            raise ValueError(f"sliding_window_origin={self.sliding_window_origin!r} must be one of {WINDOW_ORIGINS}")
        for name in ("final_logit_softcapping", "embedding_scale"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}={value} must be positive, or None")

    def _check_heads(self) -> None:
        if self.markov_rank < 0:
            raise ValueError(f"markov_rank={self.markov_rank} must be 0 (no sequential head) or positive")
        if self.markov_head_type not in HEAD_TYPES:
            raise ValueError(f"markov_head_type={self.markov_head_type!r} must be one of {HEAD_TYPES}")
        if self.enable_confidence_head and self.confidence_head_with_markov and self.markov_rank == 0:
            raise ValueError(
                "confidence_head_with_markov=True needs a Markov embedding, but markov_rank=0; set "
                "confidence_head_with_markov=False or a positive markov_rank"
            )
        if self.markov_rank and self.markov_head_type == "rnn" and not self.sample_from_anchor:
            raise ValueError(
                "markov_head_type='rnn' has no defined decoding with sample_from_anchor=False (layout B); use "
                "'vanilla' or 'gated', or layout A"
            )

    def confidence_scaling(self, mode: str) -> tuple[list[float], list[float]]:
        """K temperatures and K offsets of the confidence logits in a mode, `"greedy"` or `"sampling"`."""
        temperatures = (self.confidence_temperatures or {}).get(mode) or [1.0] * self.num_drafts
        return temperatures, (self.confidence_offsets or {}).get(mode) or [0.0] * self.num_drafts

    def _check_vocabulary(self) -> None:
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"mask_token_id={self.mask_token_id} is not a row of a vocabulary of {self.vocab_size}")
        if self.draft_vocab_size is not None and not 0 < self.draft_vocab_size < self.vocab_size:
            raise ValueError(
                f"draft_vocab_size={self.draft_vocab_size} must be between 1 and vocab_size={self.vocab_size}"
            )
        if self.draft_top_k is not None and self.draft_top_k < 1:
            raise ValueError(f"draft_top_k={self.draft_top_k} must be at least 1, or None for no restriction")

    def _check_calibration(self) -> None:
        for name in ("confidence_temperatures", "confidence_offsets", "confidence_calibration"):
            if unknown := set(getattr(self, name) or {}) - set(CALIBRATED_MODES):
                raise ValueError(f"{name} has the key {unknown.pop()!r}; allowed are 'greedy' and 'sampling'")
        for mode, temperatures in (self.confidence_temperatures or {}).items():
            if len(temperatures) != self.num_drafts or any(not 0 < t < math.inf for t in temperatures):
                raise ValueError(
                    f"confidence_temperatures[{mode!r}] must hold {self.num_drafts} positive numbers, one for each "
                    f"draft position, got {temperatures}"
                )
        for mode, offsets in (self.confidence_offsets or {}).items():
            if len(offsets) != self.num_drafts or not all(map(math.isfinite, offsets)):
                raise ValueError(
                    f"confidence_offsets[{mode!r}] must hold {self.num_drafts} finite numbers, one for each draft "
                    f"position, got {offsets}"
                )
        for mode, calibration in (self.confidence_calibration or {}).items():
            if missing := set(CALIBRATION_FIELDS) - set(calibration):
                raise ValueError(
                    f"confidence_calibration[{mode!r}] lacks {sorted(missing)}; it holds {sorted(calibration)}"
                )
            for name in ("conditional_acceptance", "ece_before", "ece_after"):
                values = calibration[name]
                numbers = [v for v in values or () if isinstance(v, (int, float)) and 0 <= v <= 1]
                if values is None or not len(numbers) == len(values) == self.num_drafts:
                    raise ValueError(
                        f"confidence_calibration[{mode!r}][{name!r}] must hold {self.num_drafts} numbers from 0 "
                        f"to 1, one for each draft position, got {values}"
                    )

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        config_dict, unused = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        own = config_dict.get("model_type") == cls.model_type
        return config_dict if own else config_fields(config_dict), unused
