"""Cost curves for the simulation, each an `SPSProfile`, so that policies see the very interface they decode with.

Contract: four curves that policies find hard or easy for different reasons, or one that was measured. The made-up ones
have no context in them; points stand wherever the curve bends.

Shape legend: B tokens of a verification, R rows, K drafts of a block.
"""

import json
from collections.abc import Callable
from pathlib import Path

from hf_dspark.sps_profile import DraftPoint, LoopPoint, SPSProfile, VerifyPoint

MOST_ROWS = 256  # of the made-up curves
MEASURED_ROWS = 32  # beyond, the profile goes on along its last slope


def curve(name: str, num_drafts: int) -> SPSProfile:
    """
    The curve of that name, or the profile in that file.

    Args:
        name (`str`):
            `"smooth"`: every token costs the same, on top of a fixed part. `"staircase"`: jumps at multiples of 16
            tokens. `"gpu"`: flat up to 64 tokens (waiting for memory), then linear (waiting for arithmetic).
            `"measured"`: the profile of the demo pair on this machine, measured now if it is not in the cache. Else a
            file that `python -m hf_dspark profile --output` or SGLang wrote.
        num_drafts (`int`): K.

    Raises:
        ValueError: there is no such curve and no such file, or the file is no profile.
    """
    if name == "measured":
        return _measured()
    if name in CURVES:
        return CURVES[name](num_drafts)
    if not Path(name).is_file():
        raise ValueError(f"there is no curve {name!r} and no such file; curves are {', '.join(CURVES)} and measured")
    try:
        table = json.loads(Path(name).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{name} is not a JSON file: {error}") from error
    if isinstance(table, dict) and "sample_batch_tokens" in table:
        return SPSProfile.from_sglang(name, block_size=num_drafts)
    return SPSProfile.load(name)


def _measured() -> SPSProfile:
    from hf_dspark.demo import load_demo_pair
    from hf_dspark.profiling import cached_profile

    target, _, drafter = load_demo_pair()
    profile = cached_profile(target, drafter, max_batch_tokens=MEASURED_ROWS * (1 + drafter.config.num_drafts))
    if profile is None:
        raise ValueError("the curve 'measured' has to be measured: unset HF_DSPARK_NO_PROFILE")
    return profile


def made_up(name: str, num_drafts: int, verify_seconds: Callable[[int], float], bends: list[int]) -> SPSProfile:
    """
    A profile with these seconds for B tokens, linear between `bends`; drafting costs a tenth of a one-token forward
    and a little more with every row, the loop a thirtieth.
    """
    single = verify_seconds(1)
    most_tokens = MOST_ROWS * (num_drafts + 1)
    tokens = sorted({1, *(bend for bend in bends if bend <= most_tokens), most_tokens})
    points = tuple(VerifyPoint(count, -(-count // (num_drafts + 1)), 0, (verify_seconds(count),)) for count in tokens)
    return SPSProfile(
        block_size=num_drafts,
        verify_points=points,
        draft_points=tuple(DraftPoint(rows, 0, (single / 10 * (1 + (rows - 1) / 64),)) for rows in (1, MOST_ROWS)),
        loop_points=(LoopPoint(1, (single / 30,)),),
        description={"curve": name},
    )


def smooth(num_drafts: int) -> SPSProfile:
    return made_up("smooth", num_drafts, lambda count: 0.010 + 0.0004 * count, [])


def staircase(num_drafts: int) -> SPSProfile:
    edges = range(16, MOST_ROWS * (num_drafts + 1) + 1, 16)
    bends = [bend for edge in edges for bend in (edge, edge + 1)]
    return made_up("staircase", num_drafts, lambda count: 0.010 + 0.006 * ((count - 1) // 16), bends)


def gpu(num_drafts: int) -> SPSProfile:
    return made_up("gpu", num_drafts, lambda count: 0.010 * (1 + max(0, count - 64) / 128), [64])


CURVES: dict[str, Callable[[int], SPSProfile]] = {"smooth": smooth, "staircase": staircase, "gpu": gpu}
