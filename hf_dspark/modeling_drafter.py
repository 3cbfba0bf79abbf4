"""What every drafter is: a module that reads a target's tapped states, its heads, a vocabulary, decoding options.

Contract: a `Drafter` holds weights and options, nothing about any call. Where the hidden states of a block come from
is left to its kinds: `modeling_dspark.py` (one parallel pass) and `modeling_autoregressive.py` (a pass a token).
Embeddings and LM head are the target's and are lent by the caller (`hf_dspark.target`).

Source: https://huggingface.co/papers/2607.05147, section 3.1. Shape legend: K draft positions, D hidden, M tapped
layers, Dt target hidden, V / Vd target / draft vocabulary, r Markov rank.
"""

import copy
import dataclasses
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import nn
from transformers import PreTrainedModel

from .configuration_dspark import DSparkConfig
from .heads import MARKOV_HEADS, ConfidenceHead

if TYPE_CHECKING:
    from .memory_report import MemoryReport
    from .model_card import CardFigures
    from .rounds import DecodingRound
    from .scheduling import Scheduler
    from .sps_profile import SPSProfile


@dataclasses.dataclass(frozen=True, slots=True)
class DecodingOptions:
    """What a drafter view decodes with; see [`Drafter.with_options`]."""

    scheduler: "Scheduler | str | None" = None
    sps_profile: "SPSProfile | None" = None
    max_draft_tokens: int | None = None
    on_round: "Callable[[DecodingRound], None] | None" = None
    generator: torch.Generator | None = None


class Drafter(PreTrainedModel):
    """
    The part that kinds of drafters share; build a [`DSparkDrafter`] or an [`AutoregressiveDrafter`].

    A kind makes its layers after `super().__init__`, then calls `add_heads`.

    Args:
        config ([`DSparkConfig`]): The configuration; also decides which heads exist.
    """

    config: DSparkConfig
    base_model_prefix = ""
    _supports_sdpa = True
    _supports_attention_backend = True
    # Frozen copies of the target's modules in published folders: the live target lends its own. Only a reduced
    # vocabulary has an lm_head here.
    _keys_to_ignore_on_load_unexpected = [r"^embed_tokens\.", r"^lm_head\."]
    _keep_in_fp32_modules = ["confidence_head"]  # computed in float32 anyway; and quantisers leave it alone
    is_dspark_drafter = True  # what the hook looks for: a remote-code copy of this class must work too
    is_autoregressive: ClassVar[bool]  # whether a draft has to be known before the next one's hidden state can be

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        taps, width = config.target_layer_ids or (), config.target_hidden_size or config.hidden_size
        self.fc = nn.Linear(len(taps) * width, config.hidden_size, bias=False)
        self.options = DecodingOptions()

    def add_heads(self) -> None:
        """Makes what comes after the layers."""
        config = self.config
        self.markov_head = MARKOV_HEADS[config.markov_head_type](config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        if config.draft_vocab_size is not None:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
            # target_id = draft_id + d2t[draft_id]; t2d marks the target ids that can be drafted (speculators' names).
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
            self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)
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

    def with_options(self, **options: Any) -> Self:
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

    def memory_report(self, target: PreTrainedModel) -> "MemoryReport":
        """
        What this drafter and `target` take in memory, in bytes: weights, caches, and what sharing the target's
        embeddings and LM head saves. Print it for a table. The models may be on any device, "meta" included.

        Raises:
            ValueError: the two do not fit.
        """
        from .memory_report import memory_report

        return memory_report(self, target)

    def save_pretrained(
        self, save_directory: str | os.PathLike, *args: Any, model_card: str | None = None, **kwargs: Any
    ) -> None:
        """
        Saves config and tensors, the drafter's own only; as in [`~transformers.PreTrainedModel.save_pretrained`].

        Args:
            model_card (`str`, *optional*): Written as README.md; see [`~hf_dspark.model_card.model_card`].
        """
        super().save_pretrained(save_directory, *args, **kwargs)
        if model_card is not None and kwargs.get("is_main_process", True):
            Path(save_directory, "README.md").write_text(model_card, encoding="utf-8")

    def push_to_hub(
        self,
        repo_id: str,
        *,
        figures: "CardFigures | None" = None,
        model_card: str | None = None,
        max_shard_size: int | str | None = "50GB",
        tags: Sequence[str] | None = None,
        **options: Any,
    ) -> str:
        """
        Publishes the drafter with a card, in one commit or not at all. A README.md that is there is replaced.

        Args:
            repo_id (`str`): `owner/name`, or `name` for the token's owner.
            figures ([`~hf_dspark.model_card.CardFigures`], *optional*): What the card tells besides the config.
            model_card (`str`, *optional*): The card, in place of a generated one.
            max_shard_size (`int` or `str`, *optional*), tags (`Sequence[str]`, *optional*): As ever.
            options: `private`, `token`, `revision`, `create_pr`, `commit_message`, `commit_description`; see
                [`~hf_dspark.hub.publish`].

        Returns:
            `str`: URL of the commit.

        Raises:
            PublishError: offline, no token or no right to write; the message says which.
        """
        from .hub import publish
        from .model_card import model_card as make_card

        card = model_card or make_card(self.config, repo_id, figures, tags=tags or ())
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, model_card=card, max_shard_size=max_shard_size)
            return publish(folder, repo_id, **options)

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
