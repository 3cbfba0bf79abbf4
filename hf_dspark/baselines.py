"""Untrained baselines for a target: what DSpark is compared with, in the same trainer and the same decoding loop.

Contract: shapes follow the target's config unless told otherwise, as in [`~training.new_drafter`]. DFlash needs
nothing of its own: it is `new_drafter(target, mask_token_id, sample_from_anchor=False, markov_rank=0)`, where a block
of `block_size` slots drafts one token less; with `sample_from_anchor=True` it is DSpark without the sequential head.
Nor do DSpark's other shapes: `markov_head_type`, `num_hidden_layers` and `block_size` are fields of its config.
"""

from collections.abc import Sequence

from transformers import PreTrainedModel

from .configuration_autoregressive import AutoregressiveConfig
from .modeling_autoregressive import AutoregressiveDrafter
from .training.initialization import default_target_layers, fitting_config, new_drafter

# What says of a config that it is another one's.
_IDENTITY = ("model_type", "architectures", "transformers_version", "dtype", "layer_types")


def new_autoregressive_drafter(
    target: PreTrainedModel, *, draft_token_ids: Sequence[int] | None = None, **config: object
) -> AutoregressiveDrafter:
    """
    An untrained float32 drafter in the manner of EAGLE-3; with `block_size=1`, of MTP with a single token.

    Args:
        target ([`~transformers.PreTrainedModel`]): The model to draft for.
        draft_token_ids (`Sequence[int]`, *optional*): A reduced draft vocabulary, as target ids; see [`new_drafter`].
        config: Fields of [`AutoregressiveConfig`]. The default taps are three layers of the target, a low, a middle
            and a high one.

    Source: https://huggingface.co/papers/2503.01840, section 3.

    Raises:
        ValueError: As for [`new_drafter`].
    """
    plain = {"num_hidden_layers": 1, "markov_rank": 0, "enable_confidence_head": False}
    fitting = new_drafter(target, 0, draft_token_ids=draft_token_ids, **plain)
    fields = {name: value for name, value in fitting.config.to_dict().items() if name not in _IDENTITY}
    fields |= {
        "mask_token_id": None,
        "enable_confidence_head": True,
        "target_layer_ids": default_target_layers(target.config.get_text_config().num_hidden_layers, 3),
    }
    drafter = AutoregressiveDrafter(fitting_config(AutoregressiveConfig, fields, config))
    if drafter.has_own_vocabulary and draft_token_ids is not None:
        drafter.lm_head = fitting.lm_head
        drafter.d2t.copy_(fitting.d2t)
        drafter.t2d.copy_(fitting.t2d)
    return drafter
