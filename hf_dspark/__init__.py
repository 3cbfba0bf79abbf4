"""hf_dspark: DSpark speculative decoding for Hugging Face transformers.

Importing it installs the hook, so that `target.generate(**inputs, assistant_model=drafter)` decodes with a
[`DSparkDrafter`]. Method: https://huggingface.co/papers/2607.05147.
"""

from transformers import AutoConfig, AutoModel

from .candidate_generator import DSparkCandidateGenerator
from .configuration_dspark import DSparkConfig
from .hook import install, uninstall
from .modeling_dspark import DSparkDrafter
from .outputs import DSparkGenerateOutput
from .parity import ParityReport, check_parity
from .rounds import DecodingRound, DecodingStats
from .scheduling import ConfidenceThreshold, FixedLength, Scheduler, ScheduleRequest

__version__ = "0.1.0"

__all__ = [
    "ConfidenceThreshold",
    "DSparkCandidateGenerator",
    "DSparkConfig",
    "DSparkDrafter",
    "DSparkGenerateOutput",
    "DecodingRound",
    "DecodingStats",
    "FixedLength",
    "ParityReport",
    "ScheduleRequest",
    "Scheduler",
    "check_parity",
    "install",
    "uninstall",
]

AutoConfig.register(DSparkConfig.model_type, DSparkConfig, exist_ok=True)
AutoModel.register(DSparkConfig, DSparkDrafter, exist_ok=True)
install()
