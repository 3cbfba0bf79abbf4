"""The Space: a small model answers, and every token shows where it came from.

Contract: lays out the page, passes what visitors do to `visit.py` and what it yields to the page. Runs locally
(`make space`) and on a Space, also on ZeroGPU, where the generating function gets a GPU for as long as it runs and
everything that goes in or out of it is plain data. The page asks no other host for anything.
"""

import argparse
import contextlib
import os
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")

try:
    import spaces  # present on a Space; it must come before anything that touches a GPU
except ImportError:
    spaces = None

import gradio as gr

from hf_dspark import DSparkConfig
from hf_dspark.demo import DRAFTER_FOLDER
from orders import MOST_NEW_TOKENS, MOST_PROMPT_CHARACTERS, MOST_PROMPT_TOKENS, MOST_TEMPERATURE, Order, Visits
from pairs import EMBEDDED, Key, PairError
from schedules import DEFAULT, choices
from shelf import Shelf, Taking
from view import legend_html, message_html
from visit import Frame, frames

ZERO_GPU = os.environ.get("SPACES_ZERO_GPU", "").lower() in ("1", "t", "true")
GPU_SECONDS = 60

EXAMPLES = {
    "Maths": "A train travels 180 km at 60 km/h. How long does the trip take?",
    "Code": "Write a Python function that checks whether a word is a palindrome, and show how to use it.",
    "Chat": "Explain to a ten-year-old why the sky is blue.",
    "Chinese": "请用三句话介绍一下北京。",
}
INTRO = """<div class="ds-intro"><h1>Speculative decoding, token by token</h1>
<p>A big language model writes a token (a word, or a part of one) per step, and steps are slow. Here a small
<b>drafter</b> guesses the next few tokens, and the big model checks these drafts in a single step: it keeps them up to
the first that it would not have written itself, and then adds one token of its own. The text is exactly the big
model’s, in fewer steps. In the answer, <b>a step is some green tokens and the one after them</b>:</p>"""


class Space:
    """
    The page and what stands behind it.

    Args:
        shelf ([`~shelf.Shelf`], *optional*): Where the engines are.
        key (`tuple[str, str]`, *optional*): The pair that visitors begin with.
        num_drafts (`int`, *optional*): K of that pair; that of the embedded one by default.
        most_new_tokens (`int`, *optional*): Limit of an answer.
        new_tokens (`int`, *optional*): The limit that the slider begins with.
    """

    def __init__(
        self,
        shelf: Shelf | None = None,
        *,
        key: Key = EMBEDDED,
        num_drafts: int | None = None,
        most_new_tokens: int = MOST_NEW_TOKENS,
        new_tokens: int = 128,
    ):
        self.shelf, self.visits = shelf or Shelf(), Visits()
        self.most_new_tokens, self.new_tokens = most_new_tokens, new_tokens
        self.generate = spaces.GPU(duration=GPU_SECONDS)(self._generate) if spaces is not None else self._generate
        self.page = self._laid_out(key, num_drafts or DSparkConfig.from_pretrained(DRAFTER_FOLDER).num_drafts)

    def launch(self, **options: Any) -> Any:
        """Serves the page; `options` as in gradio's `launch`."""
        theme = gr.themes.Default(
            font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"], primary_hue="emerald"
        )
        self.page.queue(max_size=2 * self._most_visitors)
        looks = {"theme": theme, "css_paths": Path(__file__).with_name("style.css"), "footer_links": []}
        settings = {"max_threads": 2 * self._most_visitors, "ssr_mode": False, "run_history": False}
        return self.page.launch(**{**looks, **settings, **options})

    def close(self) -> None:
        """Ends the engines and the server."""
        self.shelf.close()
        self.page.close()

    @property
    def _most_visitors(self) -> int:
        return self.shelf.answers_at_once + self.shelf.most_waiting + 2  # those beyond are told that it is full

    def _generate(self, order: Order, session: str) -> Generator[Frame, None, None]:
        with self.visits.one(session) as visit:
            yield from frames(self.shelf, order, visit, most_new_tokens=self.most_new_tokens)

    def _answer(
        self,
        prompt: str,
        key: Key,
        scheduler: str,
        temperature: float,
        max_new_tokens: float,
        seed: float,
        compare: bool,
        request: gr.Request,
    ) -> Iterator[tuple[str, str, str, str]]:
        order = Order(
            prompt, (key[0], key[1]), scheduler, float(temperature), int(max_new_tokens), int(seed or 0), bool(compare)
        )
        with contextlib.closing(self.generate(order, str(request.session_hash))) as shown:
            for frame in shown:
                yield frame.answer, frame.plain, frame.summary, frame.charts

    def _stop(self, request: gr.Request) -> None:
        self.visits.stop(str(request.session_hash))

    def _change_models(self, target: str, drafter: str, key: Key) -> Iterator[tuple[str, Key, Any]]:
        wanted = (target.strip(), drafter.strip())
        schedulers: Any = gr.skip()
        with Taking(self.shelf, wanted, DEFAULT) as taking:
            for words in taking.words(0.2):
                yield message_html(words), key, schedulers
            try:
                pair = taking.service().pair
            except (PairError, ValueError) as error:
                yield message_html(f"{error} The models you had are still there.", kind="error"), key, schedulers
                return
        schedulers = gr.Dropdown(choices(pair.num_drafts, confidence=pair.has_confidence), value=DEFAULT)
        yield message_html(f"Ready: {pair.name}. {pair.warning}".strip()), wanted, schedulers

    def _laid_out(self, key: Key, num_drafts: int) -> gr.Blocks:
        with gr.Blocks(analytics_enabled=False, title="DSpark, token by token") as page:
            chosen = gr.State(key)
            gr.HTML(INTRO + legend_html() + "</div>")
            prompt = gr.Textbox(
                lines=2,
                max_lines=8,
                max_length=MOST_PROMPT_CHARACTERS,
                show_label=False,
                container=False,
                label="Prompt",
                placeholder="Ask something, or choose an example",
                elem_id="prompt",
            )
            with gr.Row(elem_id="actions"):
                run = gr.Button("Run", variant="primary", elem_id="run", min_width=96, scale=0)
                stop = gr.Button("Stop", elem_id="stop", min_width=96, scale=0)
                compare = gr.Checkbox(
                    label="Side by side with plain decoding, the big model alone (afterwards, so each is timed alone)",
                    elem_id="compare",
                    container=False,
                )
            gr.Examples([[text] for text in EXAMPLES.values()], [prompt], example_labels=list(EXAMPLES), label="Try")
            scheduler, temperature, length, seed = self._settings(num_drafts)
            with gr.Row(elem_id="stage"):
                answer = gr.HTML(elem_id="answer")
                plain = gr.HTML(elem_id="plain")
            summary = gr.HTML(elem_id="summary")
            figures = gr.HTML(elem_id="charts")
            self._models(chosen, scheduler)
            gr.HTML(
                f'<div class="ds-note">All visitors share one machine: up to {self.shelf.answers_at_once} answers are '
                f"written at once and {self.shelf.most_waiting} wait; prompts have up to {MOST_PROMPT_TOKENS} tokens, "
                f"answers up to {self.most_new_tokens}. Every prompt starts a new conversation. Nothing is kept.</div>"
            )
            answering = gr.on(
                [run.click, prompt.submit],
                self._answer,
                [prompt, chosen, scheduler, temperature, length, seed, compare],
                [answer, plain, summary, figures],
                concurrency_limit=self._most_visitors,
                show_progress="hidden",
                trigger_mode="once",
                api_name="generate",
            )
            stop.click(self._stop, None, None, queue=False, cancels=[answering] if ZERO_GPU else None, api_name="stop")
            page.unload(self._stop)
        return page

    def _settings(self, num_drafts: int) -> tuple[gr.Dropdown, gr.Slider, gr.Slider, gr.Number]:
        with gr.Accordion("Settings", open=False, elem_id="settings"), gr.Row():
            scheduler = gr.Dropdown(
                choices(num_drafts), value=DEFAULT, label="Scheduler", info="how many drafts are checked each step"
            )
            temperature = gr.Slider(
                0, MOST_TEMPERATURE, value=0, step=0.1, label="Temperature", info="0: the likeliest token, always"
            )
            length = gr.Slider(1, self.most_new_tokens, value=self.new_tokens, step=1, label="Tokens at most")
            seed = gr.Number(0, label="Seed", precision=0, info="for temperatures above 0")
        return scheduler, temperature, length, seed

    def _models(self, chosen: gr.State, scheduler: gr.Dropdown) -> None:
        with gr.Accordion("Models", open=False, elem_id="models"):
            with gr.Row():
                target = gr.Textbox(label="Target", placeholder="Hub id; empty: the embedded SmolLM2-135M-Instruct")
                drafter = gr.Textbox(label="Drafter", placeholder="Hub id; empty: the embedded drafter")
            change = gr.Button("Load", elem_id="load")
            told = gr.HTML(elem_id="loading")
            change.click(
                self._change_models,
                [target, drafter, chosen],
                [told, chosen, scheduler],
                show_progress="hidden",
                concurrency_limit=1,
                api_name="load",
            )


def main() -> None:
    """Serves the Space; the embedded pair is made ready meanwhile."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", default="0.0.0.0" if "SPACE_ID" in os.environ else "127.0.0.1")
    parser.add_argument("--port", type=int, help="default: the first free one from 7860 on")
    args = parser.parse_args()
    space = Space()
    if not ZERO_GPU:  # there engines live in the process that has the GPU
        threading.Thread(target=_make_ready, args=(space.shelf,), daemon=True).start()
    try:
        space.launch(server_name=args.host, server_port=args.port)
    finally:
        space.close()


def _make_ready(shelf: Shelf) -> None:
    with contextlib.suppress(PairError), shelf.using(EMBEDDED, DEFAULT, lambda words: print(words, flush=True)):
        print("ready", flush=True)


if __name__ == "__main__":
    main()
