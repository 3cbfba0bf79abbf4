"""A scheduler at work in a `generate` call or an engine: asked here, its answers checked, and told what came of them.

Contract: whoever decodes knows drafts, rows and clocks; a policy knows confidences, limits and costs. This is what
stands between them, for the packed engine and for transformers' own loop. The state of a call lives here.

Source: https://huggingface.co/papers/2607.05147, section 3.2. Shape legend: R active rows, K drafted positions.
"""

import operator
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from .auto import Auto
from .drafting import Drafts
from .modeling_dspark import DSparkDrafter
from .round_cost import RoundCost, shared_cost
from .scheduling import CallSetting, FixedLength, RoundOutcome, Scheduler, ScheduleRequest


class CallSchedule:
    """
    Args:
        drafter ([`DSparkDrafter`], *optional*): The drafter view; its options name the scheduler. `None`: no drafts.
        cost ([`RoundCost`], *optional*): What rounds take; see [`measured_cost`].
        do_sample (`bool`): Whether drafts are drawn; calibration differs.
        drains (`bool`, *optional*, defaults to `True`): See [`CallSetting`].

    Attributes:
        predicted_seconds (`float`, *optional*): What the last round was to take; `None` where costs are not known.

    Raises:
        ValueError: The scheduler needs confidences or costs that there are not.
    """

    def __init__(self, drafter: DSparkDrafter | None, cost: RoundCost | None, *, do_sample: bool, drains: bool = True):
        self.cost = cost
        self.predicted_seconds: float | None = None
        self._request: ScheduleRequest | None = None
        if drafter is None:
            self.draft_length = 0
            self.scheduler: Scheduler = FixedLength(0)
            return
        options, block = drafter.options, drafter.config.num_drafts
        policy = chosen_scheduler(drafter)
        if policy.requires_confidence and drafter.confidence_head is None:
            raise ValueError(
                f"{policy} needs a drafter with a confidence head, but this one has none; use FixedLength"
            )
        calibration = (drafter.config.confidence_calibration or {}).get("sampling" if do_sample else "greedy", {})
        acceptance = calibration.get("conditional_acceptance")
        self.draft_length = min(policy.draft_length(block), options.max_draft_tokens or block)
        expected = None if acceptance is None else tuple(acceptance)
        self.scheduler = policy.for_call(CallSetting(self.draft_length, cost, expected, drains))

    def wants_drafts(self, num_rows: int, context: float) -> bool:
        """Whether the coming round drafts."""
        self._request = None
        return self.draft_length > 0 and self.scheduler.wants_drafts(num_rows, context)

    def verify_lengths(
        self, drafts: Drafts, room: Sequence[int], *, rows: Sequence[int], step: int, context: float
    ) -> list[int]:
        """
        Verify lengths l_r, each within what was drafted and can be used.

        Args:
            drafts ([`Drafts`]): The round's drafts.
            room (`Sequence[int]` of length R): Drafts that each row can still use, known before the round.
            rows (`Sequence[int]` of length R), step (`int`), context (`float`): See [`ScheduleRequest`].

        Raises:
            ValueError: The scheduler's answer is not possible.
        """
        limits = [min(drafts.ids.shape[1], own) for own in room]
        usable = drafts.usable.tolist()
        if not any(limits):
            return limits
        confidence = None if drafts.confidence is None else drafts.confidence.float().cpu()
        if confidence is not None and min(usable) < confidence.shape[1]:
            # Nothing can be drafted there, which shows when the walk gets there and not before: so a confidence of 0.
            beyond = torch.arange(confidence.shape[1]) >= torch.tensor(usable)[:, None]
            confidence = confidence.masked_fill(beyond, 0.0)
        self._request = ScheduleRequest(confidence, limits, rows, step, context)
        answer = self.scheduler.verify_lengths(self._request)
        try:
            lengths = [operator.index(length) for length in answer]
        except TypeError:
            raise TypeError(
                f"{self.scheduler} returned verify lengths {answer!r}; one integer a row is needed"
            ) from None
        if len(lengths) != len(limits) or any(not 0 <= n <= limit for n, limit in zip(lengths, limits, strict=True)):
            raise ValueError(f"{self.scheduler} returned verify lengths {lengths}; allowed are 0 up to {limits}")
        return [min(own) for own in zip(lengths, usable, strict=True)]

    def observe(
        self,
        lengths: Sequence[int],
        accepted: Sequence[int],
        seconds: float,
        context: float,
        first_stands: Sequence[float] | None = None,
    ) -> None:
        """
        Closes the round.

        Args:
            lengths, accepted, first_stands (`Sequence` of length R): See [`RoundOutcome`].
            seconds (`float`): What the round took; `nan` if it did work that other rounds do not.
            context (`float`): Mean number of cached tokens of a row when the round began.
        """
        if self.cost is not None:
            drafted, verified = self._request is not None, sum(lengths)
            self.predicted_seconds = self.cost.predict(len(lengths), verified, context, drafted=drafted)
            self.cost.observe(len(lengths), verified, context, seconds, drafted=drafted)
        self.scheduler.observe(RoundOutcome(self._request, len(lengths), lengths, accepted, seconds, first_stands))


def chosen_scheduler(drafter: DSparkDrafter) -> Scheduler:
    """The policy that a drafter view names; [`Auto`] by default."""
    named = drafter.options.scheduler
    return Auto() if named is None or isinstance(named, str) else named


def measured_cost(
    target: PreTrainedModel, drafter: DSparkDrafter, num_rows: int, *, do_sample: bool = False
) -> RoundCost | None:
    """
    What rounds of the packed engine take: from the profile given in the view's options, or measured (once, a while).

    `None` if the scheduler has no use for it, or measuring is switched off (HF_DSPARK_NO_PROFILE).
    """
    if not chosen_scheduler(drafter).uses_cost:
        return None
    profile = drafter.options.sps_profile
    if profile is None:
        from .profiling import cached_profile  # it runs real rounds, so it imports the decoder, which imports this

        batch_tokens = num_rows * (1 + drafter.config.num_drafts)
        profile = cached_profile(target, drafter, max_batch_tokens=batch_tokens)
    return None if profile is None else shared_cost(target, profile, do_sample=do_sample)
