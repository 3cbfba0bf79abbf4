"""The decoding loop of an engine: rows come and go between rounds, and what one brings along hurts no other.

Contract: the rounds of `decoding.py`, over as many slots as the engine has. A row that ends leaves its slot to the
last active one; the next row to come gets the first free slot, and nothing of those before it. An error of one row (in
its processors, criteria, streamer or callback, or a nan in its logits) ends that row alone.

Shape legend: R active rows, V vocabulary.
"""

from types import TracebackType

import torch
from transformers import LogitsProcessorList, PreTrainedModel

from .admission import Admission
from .call_schedule import CallSchedule
from .choosing import place_tokens
from .decoding import DecodingLoop, Row
from .drafting import Drafts, DraftSession
from .judging import NOTHING_LEFT
from .packed import SlabCache
from .processors import RowProcessors
from .requests import Request
from .target import TargetView
from .verification import RandomSource


class BareTarget(TargetView):
    """A target that nobody drafts for: nothing of it is tapped."""

    def __init__(self, target: PreTrainedModel):
        self.target, self.device = target, target.device

    @property
    def hidden_state_indices(self) -> list[int]:
        return []


class EngineLoop(DecodingLoop):
    """
    Args:
        view ([`TargetView`]): Target and drafter, or a [`BareTarget`].
        plan ([`CallSchedule`]): Decides what is drafted and verified; outlives the loop.
        device (`torch.device`): Where ids live and processors work.
        num_slots (`int`): The most rows at a time.

    Attributes:
        lengths (`list[int]`): Verify lengths of the last round.
        tracebacks (`list[TracebackType | None]`): Where rows failed, for whoever clears up after a round. Those who
            read an error add their own calls to its traceback, but not to what is noted here before they see it.
    """

    def __init__(self, view: TargetView, plan: CallSchedule, device: torch.device, num_slots: int):
        super().__init__(view, plan, device)
        self.cache = SlabCache(num_slots)
        if plan.draft_length > 0:
            nothing = RowProcessors(LogitsProcessorList(), 1)
            self.session = DraftSession(
                view, num_slots, do_sample=False, processors=nothing, random_source=RandomSource(), device=device
            )
        else:
            self.captured = False
        self.lengths: list[int] = []
        self.tracebacks: list[TracebackType | None] = []
        self._requests: dict[int, Request] = {}

    @property
    def requests(self) -> list[Request]:
        """Those it has to do with, in the order in which they came."""
        return list(self._requests.values())

    def admit(self, admission: Admission) -> None:
        """Takes in a request whose prompt is read: its first token, and a slot if it goes on after it."""
        request, row, stopped = admission.request, admission.row(), True
        self._requests[row.index] = request
        with self._minding([row]):
            token = self._first_token(row, admission.logits)
            kept, stopped = self._commit(row, [token])
            request.add_first(kept)
            if not stopped:
                self._take_in(row, admission)
        if stopped or row.error is not None:
            self._let_go(row)

    def drop_ended(self) -> None:
        """Frees the slots of rows whose request has ended without them."""
        ended = [self._requests[row.index].done for row in self.active]
        if any(ended):
            self._retire(ended)

    def schedule(self, drafts: Drafts, context: float) -> list[int]:
        self.lengths = super().schedule(drafts, context)
        return self.lengths

    def _first_token(self, row: Row, logits: torch.Tensor | None) -> int:
        """Chosen from the prefill's logits `[1, V]`."""
        assert logits is not None
        self._check_logits(logits, [row], "the prefill")
        if row.error is not None:
            raise row.error
        choice = row.choice
        scores = choice.processors.apply(logits, rows=[row.index], prefix=lambda _: row.ids())
        if not choice.do_sample:
            return int(scores.argmax(-1))
        if choice.noise is None:
            return int(choice.random_source.categorical(scores.softmax(-1)))
        ids, possible = place_tokens(scores.softmax(-1), choice.noise, 0)
        if not possible.all():
            raise ValueError(NOTHING_LEFT)
        return int(ids)

    def _take_in(self, row: Row, admission: Admission) -> None:
        entry = self.num_active
        self.cache.take_row(entry, admission.cache)
        if self.session is not None:
            self.session.empty_row(entry)
            for part in admission.context:
                self.session.add_context(entry, *part)
        self.rows.append(row)
        self.num_active += 1

    def _retire(self, stopped: list[bool]) -> None:
        """Lets stopped rows go, and leaves nothing of them in their slots that another row could meet."""
        leaving = [row for row, stop in zip(self.rows, stopped, strict=True) if stop]
        for entry, row in enumerate(self.rows):
            if stopped[entry] and (row.error is not None or row.allows_nan):
                self._blank(entry, whole=True)
        super()._retire(stopped)
        for entry in range(self.num_active, len(self.rows)):
            self.cache.lengths[entry] = 0
            if self.session is not None:
                self.session.empty_row(entry)
        del self.rows[self.num_active :]
        for row in leaving:
            self._let_go(row)

    def _let_go(self, row: Row) -> None:
        self._requests.pop(row.index).finish(row.error)

    def _fail(self, row: Row, error: BaseException) -> None:
        self.tracebacks.append(error.__traceback__)
        if row.error is None:
            row.error = error
