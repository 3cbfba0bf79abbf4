"""hf_dspark: DSpark speculative decoding for Hugging Face transformers.

Importing it installs the hook, so that `target.generate(**inputs, assistant_model=drafter)` decodes with a
[`DSparkDrafter`]. Method: https://huggingface.co/papers/2607.05147.
"""

from transformers import AutoConfig, AutoModel

from .auto import Auto
from .calibration import calibrate, evaluate_calibration
from .calibration_report import CalibrationReport
from .candidate_generator import DSparkCandidateGenerator
from .configuration_autoregressive import AutoregressiveConfig
from .configuration_dspark import DSparkConfig
from .engine import DSparkEngine, EngineStep
from .evaluation import Evaluation, evaluate
from .hook import install, uninstall
from .modeling_autoregressive import AutoregressiveDrafter
from .modeling_dspark import DSparkDrafter
from .outputs import DSparkGenerateOutput
from .parity import ParityReport, check_parity
from .policies import CausalGreedy, LaggedBudget, Lookahead
from .preparation import Sampling, prepare_data
from .profiling import profile_sps
from .prompt_sets import load_prompts
from .requests import EngineFull, Request, RequestCancelled
from .rounds import DecodingRound, DecodingStats
from .scheduling import (
    CallSetting,
    ConfidenceThreshold,
    FixedLength,
    RoundOutcome,
    Scheduler,
    ScheduleRequest,
)
from .sps_profile import SPSProfile

__version__ = "0.1.0"

__all__ = [
    "Auto",
    "AutoregressiveConfig",
    "AutoregressiveDrafter",
    "CalibrationReport",
    "CallSetting",
    "CausalGreedy",
    "ConfidenceThreshold",
    "DSparkCandidateGenerator",
    "DSparkConfig",
    "DSparkDrafter",
    "DSparkEngine",
    "DSparkGenerateOutput",
    "DecodingRound",
    "DecodingStats",
    "EngineFull",
    "EngineStep",
    "Evaluation",
    "FixedLength",
    "LaggedBudget",
    "Lookahead",
    "ParityReport",
    "Request",
    "RequestCancelled",
    "RoundOutcome",
    "SPSProfile",
    "Sampling",
    "ScheduleRequest",
    "Scheduler",
    "calibrate",
    "check_parity",
    "evaluate",
    "evaluate_calibration",
    "install",
    "load_prompts",
    "prepare_data",
    "profile_sps",
    "uninstall",
]

AutoConfig.register(DSparkConfig.model_type, DSparkConfig, exist_ok=True)
AutoModel.register(DSparkConfig, DSparkDrafter, exist_ok=True)
AutoConfig.register(AutoregressiveConfig.model_type, AutoregressiveConfig, exist_ok=True)
AutoModel.register(AutoregressiveConfig, AutoregressiveDrafter, exist_ok=True)
install()
