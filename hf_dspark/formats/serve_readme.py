"""The README of a converted drafter: the exact commands that serve it, and what each server does not do.

Contract: text out of a config; commands name the folder as given. Of a path to a target only the last part is told:
where it lies on the machine that wrote this is of no use elsewhere. Knows nothing about files.
"""

import json
import os
import shlex
from collections.abc import Sequence
from pathlib import PurePath

from ..configuration_autoregressive import AutoregressiveConfig
from ..configuration_dspark import DSparkConfig
from .checkpoint import looks_local

SPS_FILE = "dspark_sps.json"


def sts_file(mode: str) -> str:
    """Name of the temperatures of a mode, `"greedy"` or `"sampling"`."""
    return f"dspark_sts_{mode}.json"


def readme(config: DSparkConfig, layout: str, *, folder: str, source: str, tables: Sequence[str]) -> str:
    """
    Markdown for a folder in `layout`.

    Args:
        config ([`DSparkConfig`]): The drafter's.
        layout (`str`): `"native"`, `"deepspec"` or `"speculators"`.
        folder, source (`str`): Where it lies, and what it was made from.
        tables (`Sequence[str]`): Files for SGLang that lie beside it.
    """
    target = _target(config)
    drafts, slots = config.num_drafts, config.block_size
    kind = "DSpark" if config.markov_rank else "DFlash"
    parts = [
        f"# {kind} drafter for {target}",
        f"Written by `hf-dspark convert --to {layout}` from `{source}`. {drafts} drafts a round "
        f"({slots} slots, the anchor {'predicts too' if config.sample_from_anchor else 'does not predict'}), "
        f"target layers {config.target_layer_ids}. {_lent(config)}"
        + ("" if config.target_name_or_path else " TARGET stands for the model it was trained for."),
        *(f"## {name}\n{body}" for name, body in serving(config, layout, folder=folder, tables=tables).items()),
    ]
    return "\n\n".join(parts) + "\n"


def serving(config: DSparkConfig, layout: str, *, folder: str, tables: Sequence[str] = ()) -> dict[str, str]:
    """For each server, the commands in Markdown; the arguments are those of [`readme`]."""
    target = _target(config)
    if isinstance(config, AutoregressiveConfig):
        code = _transformers(target, folder, "AutoregressiveDrafter")
        servers = ("vLLM", "SGLang", "llama.cpp")
        return {"transformers": code} | dict.fromkeys(servers, "Does not read this kind of drafter (autoregressive).")
    return {
        "transformers": _transformers(target, folder),
        "vLLM": _vllm(config, layout, target, folder),
        "SGLang": _sglang(config, layout, target, folder, tables),
        "llama.cpp": _llama_cpp(config, layout, target, folder),
    }


def public_name(source: str) -> str:
    """A name on the Hub as it is; of a path its last part."""
    return PurePath(os.path.abspath(source)).name if looks_local(source) else source


def _target(config: DSparkConfig) -> str:
    return public_name(config.target_name_or_path) if config.target_name_or_path else "TARGET"


def _lent(config: DSparkConfig) -> str:
    """What the target lends."""
    if config.draft_vocab_size is None:
        return "Embeddings and LM head are the target's."
    return (
        f"Embeddings are the target's; the LM head, over {config.draft_vocab_size} of {config.vocab_size} tokens, is "
        "the drafter's own."
    )


def _code(text: str, language: str = "bash") -> str:
    return f"```{language}\n{text}\n```"


def _elsewhere(folder: str, layout: str) -> str:
    return f"Not from this layout. Convert it: `hf-dspark convert {shlex.quote(folder)} OUT --to {layout}`."


def _transformers(target: str, folder: str, drafter: str = "DSparkDrafter") -> str:
    return _code(
        "import hf_dspark\nfrom transformers import AutoModelForCausalLM\n\n"
        f"target = AutoModelForCausalLM.from_pretrained({target!r})\n"
        f"drafter = hf_dspark.{drafter}.from_pretrained({folder!r}, dtype=target.dtype)\n"
        "output = target.generate(**inputs, assistant_model=drafter, max_new_tokens=128)",
        "python",
    )


def _vllm(config: DSparkConfig, layout: str, target: str, folder: str) -> str:
    if layout == "native":
        return _elsewhere(folder, "deepspec")
    if config.markov_rank and config.markov_head_type != "vanilla":
        return f"vLLM reads only vanilla Markov heads; this one is {config.markov_head_type}."
    method = "dspark" if config.markov_rank or config.sample_from_anchor else "dflash"
    speculative = {"method": method, "model": folder, "num_speculative_tokens": config.num_drafts}
    text = _code(f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(json.dumps(speculative))}")
    return text + _warnings(config, layout)


def _warnings(config: DSparkConfig, layout: str) -> str:
    said = []
    if layout == "deepspec" and not config.sample_from_anchor:
        said.append(
            "The anchor slot does not predict here (`sample_from_anchor: false`). A server that does not read that "
            "key drafts one token off, and accepts almost nothing: check the acceptance it reports."
        )
    if layout == "deepspec" and config.sliding_window is not None:
        said.append(
            "The draft has sliding layers, for which this layout has no word of its own: check the acceptance."
        )
    return "".join(f"\n\n{text}" for text in said)


def _sglang(config: DSparkConfig, layout: str, target: str, folder: str, tables: Sequence[str]) -> str:
    if layout != "deepspec":
        return _elsewhere(folder, "deepspec")
    if not config.markov_rank:
        return "SGLang's DSPARK needs a Markov head, which this drafter (DFlash) does not have."
    if not config.sample_from_anchor or config.draft_vocab_size is not None or config.sliding_window is not None:
        return "Not known to work: it reads drafts from the anchor, over the full vocabulary, that attend fully."
    path = folder.rstrip("/")
    options = [
        f"python -m sglang.launch_server --model-path {shlex.quote(target)}",
        "--speculative-algorithm DSPARK",
        f"--speculative-draft-model-path {shlex.quote(folder)}",
        f"--speculative-dspark-block-size {config.block_size}",
    ]
    if SPS_FILE in tables:
        options.append(f"--speculative-dspark-sps-table-path {shlex.quote(f'{path}/{SPS_FILE}')}")
    if calibrated := [name for name in tables if name != SPS_FILE]:
        options.append(f"--speculative-dspark-confidence-sts-path {shlex.quote(f'{path}/{calibrated[0]}')}")
    text = _code(" \\\n  ".join(options))
    if len(calibrated) > 1:
        text += f"\n\nThe temperatures are of greedy text; for sampled text name `{calibrated[1]}`."
    if SPS_FILE not in tables:
        text += "\n\nConfidence scheduling needs step times of the serving machine (`hf-dspark convert --sps`)."
    return text


def _llama_cpp(config: DSparkConfig, layout: str, target: str, folder: str) -> str:
    if layout != "deepspec":
        return _elsewhere(folder, "deepspec")
    if not config.sample_from_anchor:
        return "Its converter reads drafts from the anchor only; this one is not."
    return (
        _code(
            f"python convert_hf_to_gguf.py {shlex.quote(folder)} --target-model-dir TARGET_DIR --outtype bf16 "
            "--outfile draft.gguf\n"
            "llama-server -m target.gguf -md draft.gguf --spec-type draft-dspark "
            f"--spec-draft-n-max {config.num_drafts}"
        )
        + "\n\nTARGET_DIR is a local folder of the target, whose tokenizer the draft takes. Keep the draft in bf16."
    )
