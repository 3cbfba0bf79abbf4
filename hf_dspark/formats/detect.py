"""Which layout a published drafter has, told from its config and its tensors' names alone.

Contract: rules in a fixed order, each with its reason. What no rule knows, and what two rules claim, is refused; the
message says what was found, what is read, and where a refused drafter does run. Acceptance falls to a few percent,
without any error, where a layout is guessed wrong; so nothing is guessed.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

NATIVE_MODEL_TYPE, AUTOREGRESSIVE_MODEL_TYPE = "dspark", "dspark_autoregressive"
OWN_FAMILIES = {NATIVE_MODEL_TYPE: "native", AUTOREGRESSIVE_MODEL_TYPE: "autoregressive"}
DEEPSPEC_BACKBONES = {"Qwen3DSparkModel": "qwen3", "Gemma4DSparkModel": "gemma4"}
FAMILIES = {
    "native": "hf_dspark",
    "autoregressive": "hf_dspark, autoregressive",
    "deepspec": "DeepSpec flat (DeepSpec, NeMo Automodel)",
    "speculators": "speculators",
    "specforge": "SpecForge",
    "model_optimizer": "Model-Optimizer",
    "zlab": "DFlash as z-lab publishes it",
}
READ = (
    "hf_dspark folders (model_type 'dspark'); DeepSpec and NeMo (architectures Qwen3DSparkModel, Gemma4DSparkModel); "
    "speculators (speculators_model_type 'dspark' or 'dflash'); SpecForge and Model-Optimizer (dflash_config with "
    "projector_type 'dspark'); DFlash (dflash_config without projector_type)"
)
_BUNDLED = ("dspark_target_layer_ids", "dspark_noise_token_id", "dspark_block_size")
_SHOWN = ("model_type", "architectures", "speculators_model_type", "dflash_config")


class UnknownLayout(ValueError):
    """A config that is no drafter layout read here, or contradicts itself."""


@dataclasses.dataclass(frozen=True, slots=True)
class Detected:
    """
    Attributes:
        family (`str`): A key of `FAMILIES`.
        reason (`str`): What in the config says so.
    """

    family: str
    reason: str

    @property
    def name(self) -> str:
        """The family as people call it."""
        return FAMILIES[self.family]


def detect(config: Mapping[str, Any], tensor_names: Collection[str] = ()) -> Detected:
    """
    The layout of a drafter folder.

    Args:
        config (`Mapping`): Its config.json.
        tensor_names (`Collection[str]`, *optional*): Names of its tensors, where they are known.

    Raises:
        UnknownLayout: The config is of no layout that is read, or of two; a `ValueError`.
    """
    model_type, architectures = config.get("model_type"), _architectures(config)
    if isinstance(model_type, str) and model_type in OWN_FAMILIES:
        return Detected(OWN_FAMILIES[model_type], f"model_type is {model_type!r}")
    _refuse_known_others(config, architectures, tensor_names)
    claims = [*_speculators(config), *_dflash_config(config, architectures, tensor_names)]
    claims += _deepspec(architectures, claims)
    if len(claims) > 1:
        reasons = " but ".join(claim.reason for claim in claims)
        raise UnknownLayout(f"this drafter's config contradicts itself: {reasons}. Remove what does not belong to it")
    if not claims:
        raise UnknownLayout(f"not a drafter layout that this version reads: {found_in(config)}. Read are {READ}")
    return claims[0]


def refuse_autoregressive(detected: Detected) -> None:
    """Raises `UnknownLayout` for a drafter that a [`DSparkDrafter`] cannot be."""
    if detected.family == "autoregressive":
        raise UnknownLayout(f"{detected.reason}: load it with hf_dspark.AutoregressiveDrafter")


def found_in(config: Mapping[str, Any]) -> str:
    """What a config says about its layout, for messages."""
    return str({key: config[key] for key in _SHOWN if key in config} or "no model_type and no architectures")


def _architectures(config: Mapping[str, Any]) -> list[str]:
    return list(config.get("architectures") or [])


def _speculators(config: Mapping[str, Any]) -> list[Detected]:
    if "speculators_model_type" not in config:
        return []
    kind = config["speculators_model_type"]
    if kind not in ("dspark", "dflash"):
        raise UnknownLayout(
            f"speculators_model_type is {kind!r}: not a DSpark or DFlash draft. Serve it with vLLM, which reads every "
            "speculators folder (`vllm serve FOLDER`)"
        )
    return [Detected("speculators", f"speculators_model_type is {kind!r}")]


def _dflash_config(
    config: Mapping[str, Any], architectures: list[str], tensor_names: Collection[str]
) -> list[Detected]:
    if "dflash_config" not in config:
        return []
    dflash = config["dflash_config"]
    if not isinstance(dflash, Mapping):
        raise UnknownLayout(f"dflash_config must be an object, got {dflash!r}")
    projector = dflash.get("projector_type")
    if projector == "dspark":
        marks = [key for key in ("shift_label", "use_confidence_head") if key in dflash]
        if marks or "markov_w1.weight" in tensor_names:
            mark = f"dflash_config has {marks[0]!r}" if marks else "its heads' tensors have no prefix"
            return [Detected("model_optimizer", f"dflash_config.projector_type is 'dspark' and {mark}")]
        return [Detected("specforge", "dflash_config.projector_type is 'dspark'")]
    if projector not in (None, "dflash"):
        raise UnknownLayout(
            f"dflash_config.projector_type is {projector!r}: not a DSpark or DFlash draft. Read are 'dspark' and none"
        )
    return [Detected("zlab", "dflash_config has no projector_type")]


def _deepspec(architectures: list[str], claims: list[Detected]) -> list[Detected]:
    names = [name for name in architectures if name in DEEPSPEC_BACKBONES]
    # Some SpecForge folders carry this architecture to be served by vLLM: their dflash_config still says all.
    if not names or [claim.family for claim in claims] == ["specforge"]:
        return []
    return [Detected("deepspec", f"architectures has {names[0]!r}")]


def _refuse_known_others(
    config: Mapping[str, Any], architectures: list[str], tensor_names: Collection[str]
) -> NoReturn | None:
    """Refuses, with the reason and where it runs, what is known and not read."""
    model_type = config.get("model_type")
    bundled = [key for key in _BUNDLED if key in config]
    bundled += [name for name in tensor_names if name.startswith("mtp.")][:1]
    if bundled:
        raise UnknownLayout(
            f"a drafter bundled with its DeepSeek-V4 target (found {bundled[0]!r}): its layers are DeepSeek-V4's own "
            "(hyper-connections, latent attention, experts), which are not built here. Serve target and drafter with "
            "SGLang: --speculative-algorithm DSPARK"
        )
    for name in architectures:
        if name.endswith("DSparkModel") and name not in DEEPSPEC_BACKBONES:
            raise UnknownLayout(
                f"architectures has {name!r}: a DSpark drafter whose layers are not built here; built are "
                f"{sorted(DEEPSPEC_BACKBONES)}. Serve it with vLLM (--speculative-config method dspark) or SGLang"
            )
        if "eagle" in name.lower():
            raise UnknownLayout(f"architectures has {name!r}: an EAGLE draft, not DSpark or DFlash. vLLM serves it")
        if name.endswith("ForCausalLM") or name.endswith("ForConditionalGeneration"):
            raise UnknownLayout(
                f"not a drafter layout: architectures has {name!r}, a language model. Load it with transformers, as "
                "the target"
            )
    if str(model_type).endswith("_assistant"):
        raise UnknownLayout(f"model_type is {model_type!r}: load it with transformers' own class (AutoModel)")
    return None
