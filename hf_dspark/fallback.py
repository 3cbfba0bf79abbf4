"""Decoding without the packed engine: row by row in transformers' assisted loop, or not speculating at all.

Contract: the text is right in every case; each limit is said once. The stock loop takes one row at a time and looks at
stopping criteria other than end-of-sequence and length only once a block, so calls that need more decode plainly.

Shape legend: R batch rows, S prompt width.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import DynamicCache
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.utils import logging

from .modeling_dspark import DSparkDrafter
from .outputs import DSparkGenerateOutput
from .processors import RowProcessors, stateful_reason
from .rounds import DecodingRound, DecodingStats

logger = logging.get_logger(__name__)


def reason_to_decode_plainly(logits_processor: LogitsProcessorList, synced_gpus: bool) -> str | None:
    """Why a call cannot be speculated on at all, or `None`."""
    if synced_gpus:
        return "synced_gpus (FSDP / DeepSpeed ZeRO-3 generation) needs the same number of forwards on every device"
    return stateful_reason(logits_processor)


def decode_plainly(
    target: PreTrainedModel,
    reason: str,
    *,
    input_ids: torch.LongTensor,
    synced_gpus: bool = False,
    **arguments: Any,
) -> torch.LongTensor | DSparkGenerateOutput:
    """Runs transformers' plain loop, and says once why nothing is drafted."""
    logger.warning_once(f"Decoding without drafting: {reason}.")
    output = type(target)._sample(target, input_ids, synced_gpus=synced_gpus, **arguments)
    if isinstance(output, torch.Tensor):
        return output
    return DSparkGenerateOutput(**output, rounds=[], stats=DecodingStats([]))


def decode_by_rows(
    target: PreTrainedModel,
    drafter: DSparkDrafter,
    reason: str,
    *,
    stock_loop: Callable[..., Any],
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer: Any,
    model_kwargs: dict[str, Any],
) -> torch.LongTensor | DSparkGenerateOutput:
    """
    Decodes the rows of `input_ids [R, S]` one after another in transformers' own assisted loop.

    Args:
        reason (`str`): What packing does not support; told once.
        stock_loop (`Callable`): `GenerationMixin._assisted_decoding` as transformers defines it.
    """
    shared = {"stopping_criteria": stopping_criteria, "generation_config": generation_config, "streamer": streamer}
    if beyond := _beyond_stock_loop(input_ids, stopping_criteria, generation_config, model_kwargs):
        reason = f"packing does not support {reason}, and the stock loop does not support {beyond}"
        shared["logits_processor"] = logits_processor
        return decode_plainly(target, reason, input_ids=input_ids, **shared, **model_kwargs)
    logger.warning_once(f"Rows are decoded one after another: packing does not support {reason}.")
    processors = RowProcessors(logits_processor, len(input_ids))
    rounds: list[DecodingRound] = []
    outputs = []
    for row in range(len(input_ids)):

        def report(decoding_round: DecodingRound, row: int = row) -> None:
            rounds.append(dataclasses.replace(decoding_round, row=row))
            if drafter.options.on_round is not None:
                drafter.options.on_round(rounds[-1])

        outputs.append(
            stock_loop(
                target,
                input_ids[row : row + 1],
                assistant_model=drafter.with_options(on_round=report),
                logits_processor=processors.of_row(row),
                **shared,
                **_row_kwargs(target, model_kwargs, row, len(input_ids)),
            )
        )
    if generation_config.return_dict_in_generate:
        (output,) = outputs
        return DSparkGenerateOutput(**output, rounds=rounds, stats=DecodingStats(rounds))
    return _padded(outputs, generation_config)


def _beyond_stock_loop(
    input_ids: torch.LongTensor,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> str | None:
    """What of this call the stock loop would get wrong."""
    for criterion in stopping_criteria:
        if type(criterion) not in (EosTokenCriteria, MaxLengthCriteria):
            return f"{type(criterion).__name__} (it is looked at once a block)"
    if model_kwargs["cache"].get_seq_length() > 0:
        return "a cache with content"
    if not model_kwargs["cache"].is_croppable:
        return f"a {type(model_kwargs['cache']).__name__} that cannot be cropped"
    if len(input_ids) > 1 and generation_config.return_dict_in_generate:
        return "return_dict_in_generate for a batch"
    if generation_config.return_dict_in_generate and generation_config.output_hidden_states:
        return "output_hidden_states"
    return None


def _row_kwargs(target: PreTrainedModel, model_kwargs: dict[str, Any], row: int, num_rows: int) -> dict[str, Any]:
    """Model arguments of one row, with a cache of its own (the given one, if the batch is that row)."""
    if num_rows == 1:
        return dict(model_kwargs)
    kwargs = {
        name: value[row : row + 1] if isinstance(value, torch.Tensor) and len(value) == num_rows else value
        for name, value in model_kwargs.items()
    }
    return kwargs | {"cache": DynamicCache(config=target.config.get_text_config(decoder=True))}


def _padded(sequences: list[torch.LongTensor], generation_config: GenerationConfig) -> torch.LongTensor:
    """Rows `[1, W_r]` as one batch `[R, max W]`, padded on the right like plain `generate`'s."""
    pad = getattr(generation_config, "_pad_token_tensor", None)
    width = max(sequence.shape[1] for sequence in sequences)
    padded = sequences[0].new_full((len(sequences), width), 0 if pad is None else int(pad))
    for row, sequence in enumerate(sequences):
        padded[row, : sequence.shape[1]] = sequence[0]
    return padded
