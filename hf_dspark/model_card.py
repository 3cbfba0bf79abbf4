"""The model card of a drafter: what it is, what it is worth, what it costs, and how it is run.

Contract: pure; a config and figures come in, Markdown with the Hub's metadata goes out. What was not measured or told
is said to be missing, never made up. Tables are those of `evaluation_report`. Knows nothing about files or the Hub.
"""

import dataclasses
import math
import re
from collections.abc import Sequence

from huggingface_hub import ModelCardData

from .configuration_dspark import DSparkConfig
from .evaluation import Evaluation
from .evaluation_figures import SetFigures
from .evaluation_report import accepted_length_table, positions_table
from .formats.description import kind
from .formats.serve_readme import SPS_FILE, serving
from .memory_report import MemoryReport
from .sps_profile import SPSProfile

LIBRARY = "hf_dspark"
TAGS = ("dspark", "speculative-decoding", "assistant-model")
PACKAGE = "hf-dspark"  # what to install
SPS_PICTURE = "sps.png"
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")


@dataclasses.dataclass(frozen=True, slots=True)
class CardFigures:
    """
    What a card tells besides the config; everything may be left out.

    Attributes:
        evaluation ([`Evaluation`], *optional*): Acceptance, and calibration errors on those sets.
        drafter_name (`str`, *optional*): Which drafter of the evaluation this is; needed if there are several.
        sps_profile ([`SPSProfile`], *optional*): Step times, of this drafter and its target.
        has_sps_files (`bool`): Whether `sps.png` and `dspark_sps.json` lie beside the card.
        memory ([`MemoryReport`], *optional*): From [`Drafter.memory_report`].
        data (`str`, *optional*): What it was trained on, in words.
        recipe (`str`, *optional*): The recipe's YAML.
        license (`str`, *optional*): The Hub's word for it, such as "apache-2.0".
    """

    evaluation: Evaluation | None = None
    drafter_name: str | None = None
    sps_profile: SPSProfile | None = None
    has_sps_files: bool = False
    memory: MemoryReport | None = None
    data: str | None = None
    recipe: str | None = None
    license: str | None = None

    def results(self) -> list[SetFigures]:
        """
        The evaluation's results of this drafter.

        Raises:
            ValueError: The evaluation is of several drafters, or of another one; the message names them.
        """
        if self.evaluation is None:
            return []
        names = list(dict.fromkeys(result.drafter for result in self.evaluation.results))
        if self.drafter_name is None and len(names) > 1:
            raise ValueError(f"the evaluation is of several drafters, {names}; say which one this is")
        name = self.drafter_name or (names[0] if names else None)
        if name not in names:
            raise ValueError(f"the evaluation has no drafter {name!r}; it is of {names}")
        return [result for result in self.evaluation.results if result.drafter == name]


def model_card(
    config: DSparkConfig, repo_id: str, figures: CardFigures | None = None, *, tags: Sequence[str] = ()
) -> str:
    """
    The README.md of a drafter's repository.

    Args:
        config ([`DSparkConfig`]): The drafter's.
        repo_id (`str`): `owner/name` on the Hub, or the folder it lies in.
        figures ([`CardFigures`], *optional*): What was measured.
        tags (`Sequence[str]`, *optional*): Further tags.

    Raises:
        ValueError: The evaluation is not of this drafter.
    """
    figures = figures or CardFigures()
    results = figures.results()
    target = config.target_name_or_path or "an unnamed target"
    name = kind(config).partition(",")[0]
    commands = serving(config, "native", folder=repo_id)
    parts = [
        f"---\n{metadata(config, figures, tags).to_yaml()}\n---",
        f"# {name[0].upper()}{name[1:]} drafter for {target}",
        f"A small model that makes `{target}` decode several tokens a step, with its text unchanged: greedy text is "
        f"the same, sampled text follows the same distribution. Made with {LIBRARY} "
        "([method](https://huggingface.co/papers/2607.05147)).",
        f"## Use\n\n```bash\npip install {PACKAGE}\n```\n\n{commands.pop('transformers')}",
        f"## Drafter\n\n{_facts(config)}",
        f"## Thinking mode\n\n{_thinking(config, figures.evaluation)}",
        f"## Data and recipe\n\n{figures.data or 'The data was not stated.'}"
        + (f"\n\n```yaml\n{figures.recipe.strip()}\n```" if figures.recipe else ""),
        f"## Acceptance\n\n{_acceptance(config, figures.evaluation, results)}",
        f"## Calibration of the confidences\n\n{_calibration(config, results)}",
        f"## Step times\n\n{_step_times(figures)}",
        "## Memory\n\n" + (f"```text\n{figures.memory}\n```" if figures.memory else "Not measured."),
        "## Other servers",
        *(f"### {name}\n\n{text}" for name, text in commands.items()),
        f"## Limits\n\n{_limits(config)}",
    ]
    return "\n\n".join(parts) + "\n"


def metadata(config: DSparkConfig, figures: CardFigures, tags: Sequence[str] = ()) -> ModelCardData:
    """What the Hub reads: `base_model` only if the target has a name there."""
    target = config.target_name_or_path or ""
    return ModelCardData(
        base_model=target if _HUB_NAME.fullmatch(target) else None,
        library_name=LIBRARY,
        license=figures.license,
        pipeline_tag="text-generation",
        tags=list(dict.fromkeys((*TAGS, *tags))),
    )


def _facts(config: DSparkConfig) -> str:
    head = f"{config.markov_head_type}, rank {config.markov_rank}" if config.markov_rank else "none"
    vocabulary = f"{config.draft_vocab_size:,} of {config.vocab_size:,}" if config.draft_vocab_size else "the target's"
    rows = {
        "kind": kind(config),
        "target": config.target_name_or_path or "not stated",
        "hash of the target's config": config.target_fingerprint or "not stated",
        "drafts a round": f"{config.num_drafts}",
        "draft layers": f"{config.num_hidden_layers} ({config.backbone})",
        "tapped target layers": ", ".join(map(str, config.target_layer_ids or ())),
        "sequential head": head,
        "confidence head": "yes" if config.enable_confidence_head else "no",
        "draft vocabulary": vocabulary,
        "longest text learned from": f"{config.training_length:,} tokens" if config.training_length else "not stated",
    }
    return _table(["", ""], [[name, value] for name, value in rows.items()])


def _thinking(config: DSparkConfig, evaluation: Evaluation | None) -> str:
    words = {
        True: "It learned from answers that were written with thinking; without, fewer drafts may be accepted.",
        False: "It learned from answers that were written without thinking; with it, fewer drafts may be accepted.",
        None: "Not stated, mixed, or the target has no such choice.",
    }
    measured = None if evaluation is None else evaluation.settings.get("thinking")
    said = "" if measured is None else f" Measured {'with' if measured else 'without'} thinking."
    return words[config.thinking] + said


def _acceptance(config: DSparkConfig, evaluation: Evaluation | None, results: Sequence[SetFigures]) -> str:
    if evaluation is not None and results:
        known = evaluation.settings
        return "\n\n".join(
            [
                f"Whole blocks verified; {known.get('dtype', 'dtype not stated')} on "
                f"{known.get('device', 'a device not stated')}, up to {known.get('max_new_tokens', '?')} new tokens. "
                "Accepted length: mean tokens a round, the target's own included.",
                accepted_length_table(results, lambda r: r.accepted_length, lambda r: r.accepted_length_error),
                "Conditional acceptance: share of the rounds whose earlier drafts all stood in which this one stood.",
                positions_table(results, lambda r: r.conditional_acceptance),
            ]
        )
    rows = [
        [kept["dataset"], f"{kept['temperature']:g}", *(f"{share:.2f}" for share in kept["conditional_acceptance"])]
        for kept in (config.confidence_calibration or {}).values()
    ]
    if not rows:
        return "Not measured."
    heads = ["calibration set", "T", *(f"draft {k}" for k in range(1, config.num_drafts + 1))]
    return "Conditional acceptance, on the prompts it was calibrated with:\n\n" + _table(heads, rows)


def _calibration(config: DSparkConfig, results: Sequence[SetFigures]) -> str:
    if not config.enable_confidence_head:
        return "There is no confidence head."
    rows = [
        [r.dataset, f"{r.temperature:g}", f"{r.reliability.num_rounds:,}"]
        + [_mean_percent(r.reliability.ece_before), _mean_percent(r.reliability.ece_after)]
        for r in results
        if r.reliability is not None
    ]
    for kept in (config.confidence_calibration or {}).values():
        name = f"{kept['dataset']} (fitted on)"
        errors = [_mean_percent(kept["ece_before"]), _mean_percent(kept["ece_after"])]
        rows.append([name, f"{kept['temperature']:g}", f"{kept['num_rounds']:,}", *errors])
    if not rows:
        return "Not calibrated, and not measured."
    heads = ["set", "T", "rounds", "ECE before, %", "ECE after, %"]
    return "Calibration error of the predicted survival, mean over the drafts:\n\n" + _table(heads, rows)


def _step_times(figures: CardFigures) -> str:
    profile = figures.sps_profile
    if profile is None:
        return "Not measured. They belong to a machine: `hf-dspark profile` measures yours."
    known = profile.description
    devices = ", ".join(dict.fromkeys((known.get("target_devices") or {}).values())) or "a device not stated"
    threads = f", {known['threads']} CPU thread{'s'[: known['threads'] != 1]}" if known.get("threads") else ""
    text = (
        f"On {devices}{threads}, {known.get('target_dtype', 'dtype not stated')}, {profile.contexts[0]:,} cached "
        "tokens a row; lower quartiles. A round drafts and verifies, with as few rows as can hold its tokens."
    )
    rows = []
    for size in profile.to_sglang()["sample_batch_tokens"]:
        verify, whole = profile.verify_seconds(size), profile.round_seconds(size)
        rows.append([f"{size}", f"{1000 * verify:.1f}", f"{1000 * whole:.1f}", f"{1 / whole:.1f}"])
    text += "\n\n" + _table(["tokens verified", "ms, target's forward", "ms, whole round", "rounds/s"], rows)
    if figures.has_sps_files:
        text += f"\n\n![Step times]({SPS_PICTURE})\n\n`{SPS_FILE}` holds the rounds/s as SGLang reads them."
    return text


def _limits(config: DSparkConfig) -> str:
    target = config.target_name_or_path or "the target it was trained for"
    limits = [
        f"Drafts for {target} alone. With another model, or one that was fine-tuned far away from it, text stays "
        "right but few drafts are accepted.",
        "Half precision: greedy text is plain generate's up to near-ties.",
        "Where drafting does not pay (busy devices, text it cannot foresee), it decodes plainly, at best as fast.",
    ]
    if config.training_length:
        limits.append(f"Past {config.training_length:,} tokens, fewer drafts may be accepted.")
    return "\n".join(f"- {limit}" for limit in limits)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def _mean_percent(values: Sequence[float]) -> str:
    known = [value for value in values if not math.isnan(value)]
    return f"{100 * sum(known) / len(known):.2f}" if known else "–"
