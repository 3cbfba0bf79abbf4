"""Which exceptions are about what was asked for, and the one line that is shown in place of their traceback.

Contract: decides by the kind of an exception and where it was raised; knows nothing about commands.
`HF_DSPARK_TRACEBACK=1` in the environment shows every traceback.
"""

import os
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

TRACEBACK_VARIABLE = "HF_DSPARK_TRACEBACK"
_PACKAGE = Path(__file__).resolve().parent.parent


def is_mistake(error: Exception) -> bool:
    """Whether `error` says what is wrong with the arguments, with files, with the Hub or with a device."""
    if os.environ.get(TRACEBACK_VARIABLE) == "1":
        return False
    if isinstance(error, OSError | ValueError | SafetensorError | StrictDataclassError):  # the Hub's are OSErrors
        return True
    if isinstance(error, TypeError | ImportError):  # our own checks; any other is a defect
        return _raised_by_us(error)
    return isinstance(error, RuntimeError | AssertionError) and _about_a_device(str(error))


def one_line(error: BaseException) -> str:
    """The message of `error`, without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__


def _raised_by_us(error: Exception) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and _PACKAGE in Path(trace.tb_frame.f_code.co_filename).resolve().parents


def _about_a_device(message: str) -> bool:
    words = (
        "not compiled with CUDA",
        "No CUDA GPUs",
        "Found no NVIDIA driver",
        "device type at start of device string",
    )
    return any(word in message for word in words)
