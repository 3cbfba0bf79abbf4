"""The schedulers that a visitor can choose from, as words: a short list, so that visitors meet on few engines.

Contract: a word is what `python -m hf_dspark demo --scheduler` takes; a label is what people read.
"""

from hf_dspark.cli.arguments import parse_scheduler
from hf_dspark.scheduling import Scheduler

DEFAULT = "auto"
THRESHOLDS = (0.3, 0.5, 0.7, 0.9)


def choices(num_drafts: int, *, confidence: bool = True) -> list[tuple[str, str]]:
    """
    `(label, word)` of every scheduler.

    Args:
        num_drafts (`int`): K of the drafter.
        confidence (`bool`, *optional*): Whether it has a confidence head.
    """
    listed = [("auto: what pays here, now", DEFAULT)]
    listed += [("fixed: no drafts (plain decoding)", "fixed:0")]
    listed += [(f"fixed: {k} draft{'s' * (k > 1)} a round", f"fixed:{k}") for k in range(1, num_drafts + 1)]
    if confidence:
        listed += [(f"while the drafter is at least {t:.0%} sure", f"threshold:{t}") for t in THRESHOLDS]
        listed += [("causal greedy: the paper’s Algorithm 1", "greedy")]
    return listed


def scheduler_of(word: str, num_drafts: int, *, confidence: bool = True) -> Scheduler:
    """
    The scheduler of a word.

    Raises:
        ValueError: It is none of [`choices`].
    """
    words = [each for _, each in choices(num_drafts, confidence=confidence)]
    if word not in words:
        raise ValueError(f"The scheduler {word!r} is none of those that this pair of models allows: {words}.")
    return parse_scheduler(word)
