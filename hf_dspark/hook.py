"""The hook: how `generate(assistant_model=drafter)` reaches this library.

Contract: `install()` wraps four methods of transformers' `GenerationMixin` once; each looks at the assistant, and
anything but a DSpark drafter passes through untouched. `uninstall()` puts the originals back. Nothing is stored on a
model.

Assistants are told by the class attribute `is_dspark_drafter`, not by type, so that remote-code copies work too.
"""

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

from transformers import GenerationMixin
from transformers.cache_utils import DynamicCache

from .candidate_generator import DSparkCandidateGenerator
from .generation import decode
from .narrow_linear import uninstall_narrow_linear
from .packed import install_packed_attention, uninstall_packed_attention
from .streaming import check_streamer, failures_reach_the_reader


def is_drafter(assistant: Any) -> bool:
    """Whether an `assistant_model` is a DSpark drafter."""
    return getattr(type(assistant), "is_dspark_drafter", False) is True


def _generate(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = kwargs | signature.bind_partial(self, *args).arguments
        streamer = given.get("streamer")
        if streamer is None or not is_drafter(given.get("assistant_model")):
            return original(self, *args, **kwargs)
        with failures_reach_the_reader(streamer):
            prompts = [given.get(name) for name in ("inputs", "input_ids", "inputs_embeds")]
            check_streamer(streamer, max((len(prompt) for prompt in prompts if prompt is not None), default=1))
            return original(self, *args, **kwargs)

    return wrapper


def _assisted_decoding(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)  # generate() reads the signature for `inputs_tensor`
    def wrapper(self: Any, input_ids: Any, *args: Any, assistant_model: Any = None, **kwargs: Any) -> Any:
        if not is_drafter(assistant_model):
            return original(self, input_ids, *args, assistant_model=assistant_model, **kwargs)
        return decode(self, input_ids, *args, assistant_model=assistant_model, stock_loop=original, **kwargs)

    return wrapper


def _validate_generation_mode(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(self: Any, generation_mode: Any, generation_config: Any, generation_mode_kwargs: Any) -> Any:
        if not is_drafter(generation_mode_kwargs.get("assistant_model")):
            return original(self, generation_mode, generation_config, generation_mode_kwargs)
        # Stock refuses several return sequences and differing vocabulary sizes; both are fine here.
        single = copy.copy(generation_config)
        single.num_return_sequences = 1
        rest = {name: value for name, value in generation_mode_kwargs.items() if name != "assistant_model"}
        refuse_recurrent(self)
        return original(self, generation_mode, single, rest)

    return wrapper


def _get_candidate_generator(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, assistant_model: Any = None, **kwargs: Any) -> Any:
        if not is_drafter(assistant_model):
            return original(self, *args, assistant_model=assistant_model, **kwargs)
        return DSparkCandidateGenerator(self, assistant_model, **kwargs)

    return wrapper


def refuse_recurrent(target: Any) -> None:
    """Raises `ValueError` for targets whose state cannot be rolled back after a rejection."""
    config = target.config.get_text_config(decoder=True)
    recurrent = getattr(target, "_is_stateful", False) or any(DynamicCache(config=config).is_linear)
    if recurrent:
        raise ValueError(
            f"{type(target).__name__} keeps a recurrent state, which cannot be rolled back when a draft is rejected. "
            "Speculative decoding works with attention-only decoders, such as Llama, Qwen3, Mistral, Gemma, Phi3, "
            "GPT-NeoX, DeepSeek-V3; call generate without assistant_model for this one"
        )


_WRAPPERS = {
    "generate": _generate,
    "_assisted_decoding": _assisted_decoding,
    "_validate_generation_mode": _validate_generation_mode,
    "_get_candidate_generator": _get_candidate_generator,
}


def install() -> None:
    """
    Makes `generate` decode with DSpark drafters. `import hf_dspark` does it; calling it again changes nothing.
    """
    for name, wrap in _WRAPPERS.items():
        original = getattr(GenerationMixin, name)
        if not hasattr(original, "_dspark_original"):
            wrapper: Any = wrap(original)
            wrapper._dspark_original = original
            setattr(GenerationMixin, name, wrapper)
    install_packed_attention()


def uninstall() -> None:
    """Undoes [`install`]: `generate` no longer knows DSpark drafters."""
    for name in _WRAPPERS:
        original = getattr(getattr(GenerationMixin, name), "_dspark_original", None)
        if original is not None:
            setattr(GenerationMixin, name, original)
    uninstall_packed_attention()
    uninstall_narrow_linear()
