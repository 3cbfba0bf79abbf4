"""hf_dspark: DSpark speculative decoding for Hugging Face transformers.

Importing it installs the hook, so that `target.generate(**inputs, assistant_model=drafter)` decodes with a
[`DSparkDrafter`]. Method: https://huggingface.co/papers/2607.05147.
"""

from transformers import AutoConfig, AutoModel

from .auto import Auto
from .calibration import calibrate, evaluate_calibration
from .calibration_report import CalibrationReport
from .candidate_generator import DSparkCandidateGenerator
from .configuration_dspark import DSparkConfig
from .hook import install, uninstall
from .modeling_dspark import DSparkDrafter
from .outputs import DSparkGenerateOutput
from .parity import ParityReport, check_parity
from .policies import CausalGreedy, LaggedBudget, Lookahead
from .profiling import profile_sps
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
    "CalibrationReport",
    "CallSetting",
    "CausalGreedy",
    "ConfidenceThreshold",
    "DSparkCandidateGenerator",
    "DSparkConfig",
    "DSparkDrafter",
    "DSparkGenerateOutput",
    "DecodingRound",
    "DecodingStats",
    "FixedLength",
    "LaggedBudget",
    "Lookahead",
    "ParityReport",
    "RoundOutcome",
    "SPSProfile",
    "ScheduleRequest",
    "Scheduler",
    "calibrate",
    "check_parity",
    "evaluate_calibration",
    "install",
    "profile_sps",
    "uninstall",
]

AutoConfig.register(DSparkConfig.model_type, DSparkConfig, exist_ok=True)
AutoModel.register(DSparkConfig, DSparkDrafter, exist_ok=True)
install()
