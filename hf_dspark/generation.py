"""What `generate(assistant_model=drafter)` calls: chooses the packed engine, the stock loop, or plain decoding.

Contract: `decode` has the signature of transformers' decoding methods. It refuses what cannot work before any forward,
says once what it cannot speed up, and runs everything else in the packed engine.

Shape legend: R batch rows, S prompt width.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.utils import logging

from .decoding import Decoder
from .fallback import decode_by_rows, decode_plainly, reason_to_decode_plainly
from .modeling_dspark import DSparkDrafter
from .packed import packs
from .streaming import check_streamer
from .target import TargetView

logger = logging.get_logger(__name__)


def decode(
    target: PreTrainedModel,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    assistant_model: DSparkDrafter,
    stock_loop: Callable[..., Any],
    synced_gpus: bool = False,
    streamer: Any = None,
    inputs_tensor: torch.Tensor | None = None,
    tokenizer: Any = None,
    assistant_tokenizer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """
    Decodes `input_ids [R, S]` with a drafter; the arguments are those of `GenerationMixin._assisted_decoding`.

    Args:
        stock_loop (`Callable`): transformers' own assisted loop, for targets that cannot be packed.

    Returns:
        `torch.LongTensor` of shape `(R, S + new tokens)`, or a [`DSparkGenerateOutput`].

    Raises:
        ValueError: Arguments, target and drafter do not fit; the message says how to go on.
    """
    check_arguments(target, input_ids, generation_config, streamer, model_kwargs)
    view = TargetView(target, assistant_model)  # a drafter that does not fit is refused before the first forward
    arguments = {
        "input_ids": input_ids,
        "logits_processor": logits_processor,
        "stopping_criteria": stopping_criteria,
        "generation_config": generation_config,
        "streamer": streamer,
    }
    if reason := reason_to_decode_plainly(logits_processor, synced_gpus):
        return decode_plainly(target, reason, synced_gpus=synced_gpus, **arguments, **model_kwargs)
    packable, reason = packs(
        target, model_kwargs, view.to_target(input_ids).device, max_length=generation_config.max_length
    )
    if packable:
        return Decoder(target, assistant_model, model_kwargs=model_kwargs, **arguments).run()
    return decode_by_rows(
        target, assistant_model, reason, stock_loop=stock_loop, model_kwargs=model_kwargs, **arguments
    )


def check_arguments(
    target: PreTrainedModel,
    input_ids: torch.LongTensor,
    generation_config: GenerationConfig,
    streamer: Any,
    model_kwargs: dict[str, Any],
) -> None:
    """Raises `ValueError` for a call that no way of decoding here can serve."""
    if target.config.is_encoder_decoder:
        raise ValueError(f"{type(target).__name__} is an encoder-decoder; DSpark drafts for decoder-only models")
    if model_kwargs.get("use_cache") is False or model_kwargs.get("cache") is None:
        raise ValueError(
            "use_cache=False: speculative decoding verifies drafts against cached keys and values. Leave use_cache at "
            "True, or call generate without assistant_model"
        )
    if generation_config.return_dict_in_generate and generation_config.output_attentions:
        raise ValueError(
            "output_attentions=True is not available with a DSpark drafter: attention runs packed, without weights. "
            "Call generate without assistant_model to get them"
        )
    if generation_config.assistant_ensemble_weight is not None:
        logger.warning_once(
            "`assistant_ensemble_weight` is ignored: a DSpark drafter does not change the target's text."
        )
    check_streamer(streamer, len(input_ids))
