"""What a request decodes by: `generate`'s own arguments, checked and prepared by transformers itself.

Contract: [`prepare_request`] hands a request's arguments to the target's `generate`, up to the point where the
decoding loop would begin, and keeps what it prepared: processors, stopping criteria, configuration. So every setting
means what it means there, and is refused with transformers' own message where it is wrong. What an engine cannot serve
is refused here, with what to do instead. No model is run.

Shape legend: S prompt width, C real tokens of it, V vocabulary.
"""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerationMode
from transformers.generation.stopping_criteria import StopStringCriteria

from .choosing import Choice, PlaceNoise
from .packed import packs
from .prefill import real_tokens
from .processors import RowProcessors, stateful_reason
from .stopping import StopChecker
from .verification import RandomSource

_NOT_HERE = {
    "assistant_model": "the engine has a drafter of its own; give that to DSparkEngine",
    "custom_generate": "the engine is the decoding loop; call model.generate",
    "inputs_embeds": "the engine takes ids; call model.generate for embeddings",
    "inputs": "give the prompt as `input_ids`",
    "cache": "a request has a cache of its own; call model.generate to go on with one, or submit the whole text",
    "past_key_values": "a request has a cache of its own; call model.generate to go on with one",
    "cache_implementation": "the engine keeps keys and values in slabs of its own; leave it out",
    "synced_gpus": "the number of forwards differs between devices; call model.generate",
    "negative_prompt_ids": "classifier-free guidance runs a cache of its own; call model.generate",
}
_BESIDE_IDS = ("attention_mask", "position_ids", "token_type_ids")
_SEED_BITS = 62


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RequestSettings:
    """
    Attributes:
        prompt (`torch.LongTensor` of shape `[S]`): The ids, padding included, where the engine keeps ids.
        token_ids (`list[int]` of length C), positions (`list[int]` of length C): The real tokens, and their places.
        choice ([`Choice`]), stops ([`StopChecker`]): How tokens are chosen, and when the text ends.
        allows_nan (`bool`): Whether processors take care of nan in the target's logits.
        streamer (*optional*): Gets tokens as they come.
    """

    prompt: torch.LongTensor
    token_ids: list[int]
    positions: list[int]
    choice: Choice
    stops: StopChecker
    allows_nan: bool
    streamer: Any


def prepare_request(
    target: PreTrainedModel,
    input_ids: Any,
    generate_kwargs: dict[str, Any],
    *,
    device: torch.device,
    generator: torch.Generator | None,
    shared_generator: torch.Generator | None,
) -> RequestSettings:
    """
    Checks and prepares a request.

    Args:
        target ([`~transformers.PreTrainedModel`]): The target.
        input_ids (`torch.LongTensor` of shape `[S]` or `[1, S]`, or a mapping with `input_ids`): The prompt. Lists do
            as well, such as a tokenizer returns.
        generate_kwargs (`dict`): The arguments of `generate`.
        device (`torch.device`): Where the engine keeps ids.
        generator (`torch.Generator`, *optional*): The request's own randomness: one number is drawn from it, the seed
            of [`PlaceNoise`].
        shared_generator (`torch.Generator`, *optional*): Where draws come from otherwise; `None`: torch's global one.

    Raises:
        ValueError, TypeError: What cannot be served, and what `generate` itself refuses.
    """
    prompt, kwargs = _prompt(target, input_ids, generate_kwargs)
    for name, advice in _NOT_HERE.items():
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise ValueError(f"an engine cannot serve `{name}`: {advice}")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator or None, got {generator!r}")
    _align(kwargs, prompt, device)
    _lift_stop_strings(target, kwargs)
    kwargs.pop("tokenizer", None)  # a callable is not handed one; stop strings are what it is for
    found = type(target).generate(target, prompt.to(device), custom_generate=_capture, **kwargs)
    if not isinstance(found, _Prepared):
        raise ValueError(f"{type(target).__name__}.generate does not prepare arguments as transformers' does")
    _check(target, found, device)
    config, processors = found.generation_config, RowProcessors(found.logits_processor, 1)
    noise = None
    if config.do_sample and generator is not None:
        seed = torch.randint(1 << _SEED_BITS, (), generator=generator, device=generator.device)
        noise = PlaceNoise(int(seed), device)
    mask, positions = real_tokens(found.input_ids, found.model_kwargs, found.input_ids.shape[1])
    return RequestSettings(
        prompt=found.input_ids[0],
        token_ids=found.input_ids[mask].tolist(),
        positions=positions.to(device)[mask].tolist(),
        choice=Choice(processors, bool(config.do_sample), RandomSource(shared_generator), noise),
        stops=StopChecker(found.stopping_criteria),
        allows_nan=bool(config.remove_invalid_values),
        streamer=kwargs.get("streamer"),
    )


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
    """What `generate` hands to a decoding loop."""

    input_ids: torch.LongTensor
    logits_processor: Any
    stopping_criteria: Any
    generation_config: GenerationConfig
    model_kwargs: dict[str, Any]


def _capture(
    model: PreTrainedModel,
    input_ids: torch.LongTensor,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    generation_config: Any = None,
    **model_kwargs: Any,
) -> _Prepared:
    """In place of a decoding loop."""
    return _Prepared(input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)


def _prompt(
    target: PreTrainedModel, input_ids: Any, generate_kwargs: dict[str, Any]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The prompt `[1, S]`, and the other arguments."""
    kwargs = dict(generate_kwargs)
    if isinstance(input_ids, Mapping):
        if "input_ids" not in input_ids:
            raise ValueError(f"a mapping must have `input_ids`, got {sorted(input_ids)}")
        kwargs = {name: value for name, value in input_ids.items() if name != "input_ids"} | kwargs
        input_ids = input_ids["input_ids"]
    ids = torch.as_tensor(input_ids)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"input_ids must be integers, got {ids.dtype}; tokenize the text first")
    ids = ids.long()[None] if ids.ndim == 1 else ids.long()
    if ids.ndim != 2 or ids.shape[0] != 1:
        raise ValueError(
            f"input_ids must be one prompt, [S] or [1, S], got {list(ids.shape)}; submit each row of a batch by "
            "itself, or use generate_batch"
        )
    if ids.shape[1] == 0:
        raise ValueError("input_ids is empty; a prompt needs one token at least, such as the bos token")
    rows = getattr(target.get_input_embeddings(), "num_embeddings", None)
    if rows is not None and not 0 <= int(ids.min()) <= int(ids.max()) < rows:
        raise ValueError(f"input_ids must be within 0..{rows - 1} (the target's embeddings), got {ids.tolist()}")
    return ids, kwargs


def _align(kwargs: dict[str, Any], prompt: torch.Tensor, device: torch.device) -> None:
    """Makes what goes with a prompt `[1, S]` a tensor of its form: it may come as `[S]`, and as lists."""
    for name in _BESIDE_IDS:
        if kwargs.get(name) is not None:
            value = torch.as_tensor(kwargs[name], device=device)
            kwargs[name] = value[None] if value.ndim == 1 else value
    mask = kwargs.get("attention_mask")
    if mask is None or mask.ndim != 2:
        return
    if mask.shape != prompt.shape:
        raise ValueError(
            f"attention_mask must have the form of input_ids, {list(prompt.shape)}, got {list(mask.shape)}"
        )
    if not mask.any():
        raise ValueError(
            "attention_mask is zero everywhere, which leaves nothing of the prompt; it must be 1 for one token at "
            "least (give the bos token for an empty prompt)"
        )


def _lift_stop_strings(target: PreTrainedModel, kwargs: dict[str, Any]) -> None:
    """
    Makes stop strings a criterion in `kwargs`: `generate` hands no tokenizer to a callable, and then refuses them.
    """
    given: GenerationConfig | None = kwargs.get("generation_config")
    places = [kwargs.get("stop_strings"), getattr(given, "stop_strings", None), target.generation_config.stop_strings]
    strings = next((found for found in places if found is not None), None)
    tokenizer = kwargs.get("tokenizer")
    if strings is None or tokenizer is None:
        return
    criterion = StopStringCriteria(stop_strings=strings, tokenizer=tokenizer)
    kwargs["stopping_criteria"] = StoppingCriteriaList([criterion, *(kwargs.get("stopping_criteria") or [])])
    if given is not None:
        kwargs["generation_config"] = copy.deepcopy(given)
        kwargs["generation_config"].stop_strings = None
    if given is None or target.generation_config.stop_strings is not None:
        kwargs["stop_strings"] = None
    else:
        kwargs.pop("stop_strings", None)


def _check(target: PreTrainedModel, found: _Prepared, device: torch.device) -> None:
    """Raises `ValueError` for prepared arguments that an engine cannot serve."""
    config = found.generation_config
    if (config.num_return_sequences or 1) > 1:
        raise ValueError(
            f"num_return_sequences={config.num_return_sequences}: a request is one text; submit it as many times, "
            "each with a generator of its own if it is to be repeatable"
        )
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(
            f"an engine decodes greedily or by sampling, not by {mode.value.replace('_', ' ')}; call model.generate"
        )
    if config.return_dict_in_generate:
        raise ValueError(
            "return_dict_in_generate=True: result() gives ids, request.rounds what became of every draft; call "
            "model.generate for scores, logits, hidden states or the cache"
        )
    if found.model_kwargs.get("use_cache") is False or found.model_kwargs.get("cache") is None:
        raise ValueError("use_cache=False: an engine decodes on cached keys and values; leave use_cache at True")
    if reason := stateful_reason(found.logits_processor):
        raise ValueError(
            f"an engine asks processors about tokens that may be rejected, but {reason}; call model.generate"
        )
    packable, reason = packs(target, found.model_kwargs, device, max_length=config.max_length)
    if not packable:
        raise ValueError(f"packing does not support {reason}; call model.generate for this request")
