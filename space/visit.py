"""One visitor's run: from a prompt to the frames of the page, until it is written, stopped, refused or failed.

Contract: `frames` is a generator of plain data ([`Frame`], strings only, so that it can be pickled and sent between
processes). It never raises for what a visitor did or what a model does: the last frame says it in words. It yields at
most `1 / PAUSE_SECONDS` frames a second, however fast the rounds come; when it is closed (the visitor has gone), the
request is cancelled by its visit. The plain run for comparison comes after the one with drafts, not beside it: each is
measured with the machine to itself.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import logging

from board import board_of
from hf_dspark import EngineFull
from hf_dspark.chats import prompt_ids
from orders import MOST_NEW_TOKENS, MOST_PROMPT_TOKENS, Order, Visit
from pairs import PairError
from shelf import PLAIN, Service, Shelf, Taking
from summary import Measured, comparison, run_summary
from view import AnswerView, message_html, panel_html, question_html

logger = logging.get_logger(__name__)

PAUSE_SECONDS = 0.1
CHARTS_EVERY_SECONDS = 0.5
HINT = "Point at a word, or tap it, to see where it came from and how sure the drafter was."


@dataclass(frozen=True, slots=True)
class Frame:
    """The page at one moment: HTML of the answer, of the plain answer, of the summary and of the charts."""

    answer: str = ""
    plain: str = ""
    summary: str = ""
    charts: str = ""


class Run:
    """One answer being written: its request, its text, and what is said about it."""

    def __init__(self, title: str, service: Service, visit: Visit, order: Order, input_ids: list[int]):
        self.title, self.service = title, service
        self.view = AnswerView(service.pair.tokenizer)
        self.num_pushed, self.ended = 0, False
        options: dict[str, Any] = {"max_new_tokens": order.max_new_tokens, "do_sample": order.temperature > 0}
        if order.temperature > 0:
            generator = torch.Generator(service.pair.target.device).manual_seed(order.seed)
            options |= {"temperature": order.temperature, "generator": generator}
        ids = torch.tensor([input_ids], device=service.pair.target.device)
        self.request = service.engine.submit(ids, on_round=service.ledger.add_round, **options)
        visit.request = self.request
        if visit.stopped.is_set():  # while it was being submitted
            self.request.cancel()

    def follow(self) -> Iterator[None]:
        """Takes what has come, again and again until nothing will."""
        while True:
            self.ended, now = self.request.done, time.perf_counter()  # before the rounds, so that none is missed
            rounds = self.request.rounds[self.num_pushed :]
            for decoding_round in rounds:
                self.view.push(decoding_round, now)
            self.num_pushed += len(rounds)
            if self.ended:
                self.view.finish(self.request.new_ids, now)
            yield
            if self.ended:
                return
            time.sleep(PAUSE_SECONDS)

    @property
    def measured(self) -> Measured:
        """Tokens and seconds so far."""
        request = self.request
        end = request.finished_at or time.perf_counter()
        return Measured(tuple(request.new_ids), end - (request.started_at or end))

    @property
    def status(self) -> str:
        """How far it is, in a few words."""
        state, measured = self.request.state, self.measured
        tokens = f"{len(measured.new_ids)} token{'' if len(measured.new_ids) == 1 else 's'}"
        if state == "waiting":
            return f"all seats are taken, {self.service.engine.num_waiting} waiting"
        if state == "prefilling":
            return "reading the prompt"
        rate = f"{tokens} · {measured.tokens_per_second:.1f} tokens/s"
        return {"running": rate, "finished": f"done · {rate}", "cancelled": f"stopped after {tokens}"}.get(
            state, f"failed after {tokens}"
        )

    def html(self, *, hint: str = "") -> str:
        """The panel."""
        body = self.view.html(time.perf_counter(), finished=self.ended)
        return panel_html(self.title, body, status=self.status, live=not self.ended, hint=hint)


def frames(shelf: Shelf, order: Order, visit: Visit, *, most_new_tokens: int = MOST_NEW_TOKENS) -> Iterator[Frame]:
    """
    Serves one order.

    Args:
        shelf ([`~shelf.Shelf`]): Where the engines are.
        order ([`Order`]): What is asked for.
        visit ([`Visit`]): Stops it.
        most_new_tokens (`int`, *optional*): Limit of an answer.
    """
    page = _Page(order, most_rows=shelf.answers_at_once)
    try:
        order.check(most_new_tokens=most_new_tokens)
        with Taking(shelf, order.key, order.scheduler) as taking:
            for words in taking.words(PAUSE_SECONDS):
                if visit.stopped.is_set():
                    break
                yield page.frame(message=words)
            if visit.stopped.is_set():
                yield page.frame(message="Stopped.")
                return
            service = taking.service()
            ids = _encoded(service, order.prompt)
            page.run = Run("With drafts", service, visit, order, ids)
            yield from page.followed(page.run, shelf)
        if not order.compare or visit.stopped.is_set() or page.run.request.state != "finished":
            return
        with Taking(shelf, order.key, PLAIN) as taking:
            for words in taking.words(PAUSE_SECONDS):
                if visit.stopped.is_set():
                    break
                yield page.frame(plain=message_html(words))
            if visit.stopped.is_set():
                yield page.frame(plain="")
                return
            page.plain_run = Run("Plain decoding", taking.service(), visit, order, ids)
            yield from page.followed(page.plain_run, shelf)
    except EngineFull:
        yield page.frame(message="All seats and the waiting room are taken just now. Please try again in a minute.")
    except (ValueError, PairError) as error:
        yield page.frame(message=str(error), kind="error")
    except Exception as error:  # a defect of ours or a model's: said in place, and the next prompt works
        logger.exception("a run failed")
        yield page.frame(message=f"This did not work: {type(error).__name__}: {error}", kind="error")


class _Page:
    """What the visitor sees, put together."""

    def __init__(self, order: Order, *, most_rows: int):
        self._order, self._most_rows = order, most_rows
        self.run: Run | None = None
        self.plain_run: Run | None = None
        self._charts, self._charts_at = "", -CHARTS_EVERY_SECONDS
        self._others = False

    def followed(self, run: Run, shelf: Shelf) -> Iterator[Frame]:
        """Frames of a run, up to and with its last."""
        for _ in run.follow():
            self._others |= shelf.num_running() > 1
            yield self.frame()

    def frame(self, *, message: str = "", kind: str = "note", plain: str | None = None) -> Frame:
        """The page now; a `message` stands after whatever there is of the answer."""
        question = question_html(self._order.prompt) if self._order.prompt.strip() else ""
        answer = self.run.html(hint=HINT) if self.run is not None else ""
        if self.run is not None and self.run.request.error is not None and self.run.request.state == "failed":
            message, kind = _failed(self.run.request.error), "error"
        if plain is None:
            plain = self.plain_run.html() if self.plain_run is not None else self._plain_to_come()
        told = message_html(message, kind=kind) if message else ""
        beside = question + plain if plain else ""
        return Frame(question + answer + told, beside, self._summary(), self._board())

    def _plain_to_come(self) -> str:
        if not self._order.compare or self.run is None or self.run.request.state in ("cancelled", "failed"):
            return ""
        return panel_html("Plain decoding", message_html("Begins when the answer with drafts is complete."))

    def _summary(self) -> str:
        run, plain = self.run, self.plain_run
        if run is None or not run.ended or run.request.state == "failed":
            return ""
        sentences = [run_summary(run.measured, run.request.rounds)]
        if plain is not None and plain.request.state == "finished":
            sampling = self._order.temperature > 0
            sentences.append(comparison(run.measured, plain.measured, sampling=sampling, others=self._others))
        elif plain is not None and plain.request.state == "failed":
            sentences.append(_failed(plain.request.error))
        if run.service.pair.warning:
            sentences.append(f"Note: {run.service.pair.warning}.")
        return message_html(" ".join(sentences), kind="summary")

    def _board(self) -> str:
        if self.run is None:
            return ""
        now, ended = time.perf_counter(), self.run.ended
        if ended or now - self._charts_at >= CHARTS_EVERY_SECONDS:
            self._charts_at = now
            request = self.run.request
            context = len(request.prompt_ids) + len(request.new_ids)
            self._charts = board_of(self.run.service, request.rounds, context=context, most_rows=self._most_rows)
        return self._charts


def _encoded(service: Service, prompt: str) -> list[int]:
    ids = prompt_ids(service.pair.tokenizer, [{"role": "user", "content": prompt}])
    if len(ids) > MOST_PROMPT_TOKENS:
        raise ValueError(f"The prompt has {len(ids)} tokens; up to {MOST_PROMPT_TOKENS} are taken. Shorten it.")
    return ids


def _failed(error: BaseException | None) -> str:
    return f"The generation failed: {type(error).__name__}: {error}. The next prompt works as usual."
