"""From a recipe to what it names: target, tokenizer, examples, drafter, trainer; or, on a dry run, to its price.

Contract: `assemble` loads, `plan` only counts: it reads configurations, the tokenizer and the data, never the target's
weights. Whatever is wrong with the data is said before a weight is read.
"""

import dataclasses
import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..demo import load_demo_target
from ..formats.loading import load_drafter as load_any
from ..modeling_drafter import Drafter
from .data import load_examples
from .examples import TrainingExample, frequent_token_ids, usable
from .feature_cache import DTYPES, estimate_bytes
from .initialization import new_drafter
from .recipe import DEMO, LORA_TARGETS, PairArguments, Recipe
from .trainer import DSparkTrainer, check_token_ids


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingPlan:
    """
    What a run would do, in numbers.

    Attributes:
        num_examples, num_skipped, num_eval_examples (`int`): To learn from; too short; to measure on.
        num_tokens, num_supervised (`int`): Tokens of the former, and those to learn.
        coverage (`float`): Share of the supervised tokens that can be drafted.
        num_parameters, num_trained (`int`): Of the drafter.
        num_steps (`int`): Optimiser steps.
        cache_bytes (`int`): Of a feature cache on disk, for examples of both kinds.
        checkpoint_bytes (`int`): Of one checkpoint: weights and two moments of those trained.
    """

    num_examples: int
    num_skipped: int
    num_eval_examples: int
    num_tokens: int
    num_supervised: int
    coverage: float
    num_parameters: int
    num_trained: int
    num_steps: int
    cache_bytes: int
    checkpoint_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class RecipeData:
    """The tokenizer and the examples of a recipe, cut to its length; `thinking`, if all answers agree in it."""

    tokenizer: PreTrainedTokenizerBase
    train: list[TrainingExample]
    evaluation: list[TrainingExample]
    num_skipped: int
    thinking: bool | None


def load_data(recipe: Recipe) -> RecipeData:
    """
    Reads the examples of a recipe.

    Raises:
        ValueError: A bad row, or nothing to learn.
    """
    pair, data = recipe.pair, recipe.data
    data.check_files()
    tokenizer = load_demo_target()[1] if pair.target == DEMO else AutoTokenizer.from_pretrained(pair.target)
    split = load_examples(data.train_files, tokenizer, hold_out=data.hold_out, limit=data.max_examples)
    others = load_examples(data.eval_files, tokenizer, limit=data.max_examples).train
    if not split.train:
        raise ValueError(
            f"no row is left to learn from: hold_out={data.hold_out} keeps {len(split.evaluation)} for evaluation, "
            f"max_examples is {data.max_examples}; the files are {', '.join(map(str, data.train_files))}"
        )
    train = usable(split.train, recipe.training.max_length)
    if not train:
        raise ValueError(f"none of the {len(split.train)} examples has two supervised tokens in a row")
    evaluation = usable([*split.evaluation, *others], recipe.training.max_length)
    thinking = next(iter(split.thinking)) if len(split.thinking) == 1 else None
    return RecipeData(tokenizer, train, evaluation, len(split.train) - len(train), thinking)


def load_target(recipe: Recipe) -> PreTrainedModel:
    """The target of a recipe, where the trainer runs."""
    pair, device = recipe.pair, recipe.training.device
    if pair.target == DEMO and not pair.target_quantization:
        dtype = torch.float32 if pair.target_dtype == "auto" else getattr(torch, pair.target_dtype)
        return load_demo_target(dtype=dtype)[0].to(device)
    options: dict[str, Any] = {"dtype": pair.target_dtype}
    if pair.target_quantization:
        from transformers import BitsAndBytesConfig

        options["quantization_config"] = BitsAndBytesConfig(**{f"load_in_{pair.target_quantization}": True})
        options["device_map"] = {"": device}
    source = load_demo_target()[0].name_or_path if pair.target == DEMO else pair.target
    target = AutoModelForCausalLM.from_pretrained(source, **options).eval()
    return target if pair.target_quantization else target.to(device)


def load_drafter(pair: PairArguments, target: PreTrainedModel, data: RecipeData, seed: int) -> Drafter:
    """
    The drafter to go on with, or a new one, in float32.

    Raises:
        ValueError: The data, or the recipe's fields, do not fit the target; or the drafter's folder is damaged.
    """
    check_token_ids([*data.train, *data.evaluation], target.get_input_embeddings().num_embeddings)
    if pair.drafter:
        return _existing_drafter(pair.drafter)
    size = target.config.get_text_config().vocab_size
    if pair.draft_vocab_size is not None and pair.draft_vocab_size > size:
        raise ValueError(f"draft_vocab_size={pair.draft_vocab_size} is more than the target's {size} tokens")
    fields, tokenizer = dict(pair.drafter_config), data.tokenizer
    if pair.mask_token is not None:
        fields["mask_token_id"] = tokenizer.convert_tokens_to_ids(pair.mask_token)
        if fields["mask_token_id"] in (None, tokenizer.unk_token_id) and pair.mask_token != tokenizer.unk_token:
            raise ValueError(f"mask_token={pair.mask_token!r} is no token of the target")
    torch.manual_seed(seed)
    if pair.drafter_kind == "autoregressive":
        from ..baselines import new_autoregressive_drafter

        return new_autoregressive_drafter(target, draft_token_ids=_kept_ids(pair, data), **fields)
    return new_drafter(target, draft_token_ids=_kept_ids(pair, data), **fields)


def _existing_drafter(source: str) -> Drafter:
    """A drafter of the kind that its config says."""
    try:
        return load_any(source, dtype=torch.float32)
    except SafetensorError as error:
        raise ValueError(f"{source}: the weights cannot be read ({error})") from None


def with_adapters(drafter: Drafter, pair: PairArguments) -> nn.Module:
    """
    A PEFT model with LoRA adapters on `drafter`; the other weights stay as they are.

    Raises:
        ValueError: A name in `lora_targets` or `lora_modules_to_save` is no module of the drafter.
    """
    from peft import LoraConfig, get_peft_model

    present = {name.rpartition(".")[2] for name, module in drafter.named_modules()}
    linear = [name for name, module in drafter.named_modules() if isinstance(module, nn.Linear)]
    every = [name for name, _ in drafter.named_modules()]
    if tuple(pair.lora_targets) != LORA_TARGETS:  # those suit every backbone, and not all of them are in each
        _check_names("lora_targets", pair.lora_targets, linear)
    if pair.lora_modules_to_save != PairArguments(mask_token="?").lora_modules_to_save:
        _check_names("lora_modules_to_save", pair.lora_modules_to_save, every)
    config = LoraConfig(
        r=pair.lora_rank,
        lora_alpha=2 * pair.lora_rank if pair.lora_alpha is None else pair.lora_alpha,
        target_modules=list(pair.lora_targets),
        modules_to_save=[name for name in pair.lora_modules_to_save if name in present],
    )
    with warnings.catch_warnings():  # PEFT 0.21 still asks for a property by the name that transformers 5.24 retires
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        return get_peft_model(drafter, config)


def assemble(recipe: Recipe) -> DSparkTrainer:
    """
    The trainer of a recipe, ready to `train()`.

    Raises:
        ValueError: The data, or target and drafter, do not fit.
    """
    data = load_data(recipe)
    target = load_target(recipe)
    drafter = load_drafter(recipe.pair, target, data, recipe.training.seed)
    drafter.config.thinking = data.thinking
    return DSparkTrainer(
        with_adapters(drafter, recipe.pair) if recipe.pair.lora_rank else drafter,
        recipe.training,
        target=target,
        train_dataset=data.train,
        eval_dataset=data.evaluation or None,
    )


def plan(recipe: Recipe) -> TrainingPlan:
    """What a run of the recipe would do, without the target's weights."""
    data, args = load_data(recipe), recipe.training
    name = recipe.pair.target
    config = load_demo_target()[0].config if name == DEMO else AutoConfig.from_pretrained(name)
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(config)
    with torch.device("cpu" if recipe.pair.drafter else "meta"):
        drafter = load_drafter(recipe.pair, target, data, args.seed)
        num_parameters = drafter.num_parameters()  # before adapters add theirs
        trained = with_adapters(drafter, recipe.pair) if recipe.pair.lora_rank else drafter
    num_trained = sum(parameter.numel() for parameter in trained.parameters() if parameter.requires_grad)
    num_saved = num_trained if recipe.pair.lora_rank else num_parameters
    supervised = [t for e in data.train for t, keep in zip(e.input_ids, e.loss_mask, strict=True) if keep]
    kept = _own_ids(drafter) if recipe.pair.drafter else _kept_ids(recipe.pair, data)
    draftable = set(supervised if kept is None else kept)
    batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    num_steps = math.ceil(math.ceil(len(data.train) / batch) * args.num_train_epochs)
    return TrainingPlan(
        num_examples=len(data.train),
        num_skipped=data.num_skipped,
        num_eval_examples=len(data.evaluation),
        num_tokens=sum(len(example.input_ids) for example in data.train),
        num_supervised=len(supervised),
        coverage=sum(token in draftable for token in supervised) / len(supervised),
        num_parameters=num_parameters,
        num_trained=num_trained,
        num_steps=args.max_steps if args.max_steps > 0 else num_steps,
        cache_bytes=estimate_bytes(
            [*data.train, *data.evaluation],
            num_layers=len(drafter.config.target_layer_ids or ()),
            hidden_size=target.config.get_text_config().hidden_size,
            dtype=DTYPES[args.feature_cache_dtype],
        ),
        checkpoint_bytes=4 * (num_saved + 2 * num_trained),
    )


def _kept_ids(pair: PairArguments, data: RecipeData) -> list[int] | None:
    """The reduced draft vocabulary that a recipe asks for."""
    if pair.draft_vocab_size is None:
        return None
    return frequent_token_ids(data.train, pair.draft_vocab_size, always=data.tokenizer.all_special_ids)


def _check_names(key: str, names: Sequence[str], modules: Sequence[str]) -> None:
    """Raises `ValueError` for the first of `names` that no module ends with."""
    for name in names:
        if not any(module == name or module.endswith(f".{name}") for module in modules):
            known = ", ".join(sorted({module.rpartition(".")[2] for module in modules} - {""}))
            raise ValueError(f"{key}: the drafter has no {name!r}; it has {known}")


def _own_ids(drafter: Drafter) -> list[int] | None:
    """The reduced draft vocabulary of a drafter that exists."""
    kept = drafter.draft_token_ids()
    return None if kept is None else kept.tolist()
