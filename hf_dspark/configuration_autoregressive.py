"""The configuration of the autoregressive drafter.

Contract: a [`DSparkConfig`] with other defaults and narrower limits, so that whatever reads a drafter's config
(decoding, scheduling, calibration) reads this one too. It knows nothing about weights or about decoding.

Shape legend: K drafts a round.
"""

from huggingface_hub.dataclasses import strict

from .configuration_dspark import DSparkConfig


@strict
class AutoregressiveConfig(DSparkConfig):
    r"""
    Configuration of an [`AutoregressiveDrafter`]. Fields mean what they do in [`DSparkConfig`], but:

    Args:
        block_size (`int`, *optional*, defaults to 7):
            Tokens drafted one after another in a round (K), and steps of the training-time test. 1 is a drafter of
            the multi-token-prediction kind with a single token (MTP-1).
        num_hidden_layers (`int`, *optional*, defaults to 1):
            Always 1: what a draft's state is made of (a token and the state before it) is all that a later step reads.
        markov_rank (`int`, *optional*, defaults to 0):
            Always 0: every step sees the token before it, so there is nothing to correct afterwards.
        enable_confidence_head (`bool`, *optional*, defaults to `True`):
            Whether a head on the hidden state predicts the survival of each draft, for schedulers that want it.
        mask_token_id: Not used; there are no slots to fill.

    Raises:
        ValueError: a field contradicts another one; the message says which and what is allowed.
    """

    model_type = "dspark_autoregressive"

    num_hidden_layers: int = 1
    markov_rank: int = 0

    def check_consistency(self) -> None:
        possible = {
            "num_hidden_layers": 1,
            "markov_rank": 0,
            "sample_from_anchor": True,
            "backbone": "qwen3",
            "layer_types": ["full_attention"],
        }
        for name, only in possible.items():
            if getattr(self, name) != only:
                raise ValueError(
                    f"{name}={getattr(self, name)} is not possible for an autoregressive drafter, only {only} is; "
                    "DSparkConfig has it"
                )
        super().check_consistency()
