"""The Space in a real browser: it streams, stops, shares its engine, shows errors, fits a phone, asks nobody else."""

import contextlib
import re
import shutil
import time
import weakref

import pytest

from shelf import Shelf
from tests.test_space_visit import KEY, PROMPT, load_tiny, plain_text, tiny_pair

pytest.importorskip("gradio", reason="needs pip install 'hf-dspark[space]'")
sync_api = pytest.importorskip("playwright.sync_api", reason="needs pip install 'hf-dspark[browser]'")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium: apt-get install chromium"),
    pytest.mark.filterwarnings("ignore:.*no_silent_downcasting"),  # gradio's, about its own use of pandas
]
expect = sync_api.expect

NUM_TOKENS, AUTO = 64, "auto: what pays here, now"
TEXT = "[...document.querySelectorAll('#answer .ds-text span')].map(s => s.textContent).join('')"


@pytest.fixture(scope="module")
def space():
    from app import Space

    space = Space(Shelf(load_tiny), key=KEY, num_drafts=5, most_new_tokens=512, new_tokens=NUM_TOKENS)
    with space.shelf.using(KEY, "auto"):
        pass
    _, space.url, _ = space.launch(prevent_thread_lock=True, quiet=True, server_name="127.0.0.1")
    yield space
    space.close()


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def tab(space, browser):
    """Opens tabs; in the end, nothing may have been asked of another host and no script may have failed."""
    with contextlib.ExitStack() as stack:
        asked, failed = [], []

        def new_tab(**options):
            context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | options)
            stack.callback(context.close)
            page = context.new_page()
            page.set_default_timeout(20_000)
            page.on("request", lambda request: asked.append(request.url))
            page.on("pageerror", lambda error: failed.append(str(error)))
            page.goto(space.url)
            page.locator("#run").wait_for()
            return page

        yield new_tab
        foreign = [url for url in asked if not url.startswith((space.url, "data:", "blob:"))]
        assert asked and not foreign and not failed


@pytest.fixture
def slow():
    """Makes steps of the target take long enough to watch."""
    plain_text(1)  # while it is still quick
    hook = tiny_pair().target.model.layers[0].register_forward_pre_hook(lambda *_: time.sleep(0.03))
    yield
    hook.remove()


def ask(*pages, prompt=PROMPT, num_tokens=NUM_TOKENS, scheduler=AUTO):
    for page in pages:
        choose(page, num_tokens, scheduler)
        page.locator("#prompt textarea").fill(prompt)
    run(*pages)


def run(*pages):
    """Runs, and waits until nothing of the answer before is left."""
    for page in pages:
        page.evaluate("document.querySelector('#answer .ds-question')?.classList.add('old')")
    for page in pages:
        page.locator("#run").click()
    for page in pages:
        page.locator("#answer .ds-question:not(.old)").wait_for()


CHOSEN = weakref.WeakKeyDictionary()  # what is set in a page, if it is not what it begins with


def choose(page, num_tokens, scheduler):
    before = CHOSEN.get(page, (NUM_TOKENS, AUTO))
    if before == (num_tokens, scheduler):
        return
    if not page.get_by_label("Scheduler").is_visible():
        page.locator("#settings button").first.click()
    if before[1] != scheduler:
        page.get_by_label("Scheduler").click()
        page.get_by_role("option", name=scheduler).click()
    if before[0] != num_tokens:
        page.get_by_label("number input for Tokens at most").fill(str(num_tokens))
        page.get_by_label("number input for Tokens at most").press("Tab")
    CHOSEN[page] = (num_tokens, scheduler)


def status(page, words):
    expect(page.locator("#answer .ds-status")).to_contain_text(words, timeout=20_000)


def test_a_prompt_streams_and_the_joined_spans_are_the_decoded_text(tab, slow):
    page = tab()
    ask(page, scheduler="fixed: 5 drafts a round")  # whatever steps take here, drafts are checked
    texts, num_rejected = set(), set()
    while "done" not in page.locator("#answer").inner_text():
        texts.add(page.evaluate(TEXT))
        num_rejected.add(page.locator("#answer s").count())
        time.sleep(0.1)
    assert len(texts) > 3, "it was written before the reader's eyes"
    assert max(num_rejected) > 0
    assert page.evaluate(TEXT) == plain_text(NUM_TOKENS)
    expect(page.locator("#summary")).to_contain_text(f"{NUM_TOKENS} tokens: the first came with reading the prompt")
    expect(page.locator("#charts svg")).to_have_count(4)
    accepted = page.locator("#answer span.a").first
    accepted.focus()
    said = accepted.evaluate("s => getComputedStyle(s, '::after').content")
    assert re.search(
        r"confidence \d\.\d\d in this one · survival \d\.\d\d, of all up to it · step \d+, \d drafts? checked", said
    )
    assert page.locator("#answer s").count() == 0


def test_stop_works_and_the_next_prompt_too(tab, slow):
    page = tab()
    ask(page, num_tokens=512)
    page.locator("#answer .ds-text span").first.wait_for()
    page.locator("#stop").click()
    status(page, "stopped after")
    text = page.evaluate(TEXT)
    assert text and plain_text(512).startswith(text) and len(text) < len(plain_text(512))
    ask(page, prompt="the end")
    status(page, "tokens/s")


def test_two_tabs_share_the_engine(tab, slow):
    pages = [tab(), tab()]
    ask(*pages)
    for page in pages:
        status(page, f"done · {NUM_TOKENS} tokens")
        assert page.evaluate(TEXT) == plain_text(NUM_TOKENS)
    charts = [page.locator("#charts svg").nth(1).get_attribute("aria-label") for page in pages]
    assert any("2 at once" in words for words in charts)


def test_an_error_is_shown_in_place_and_the_next_prompt_works(tab):
    page, calls = tab(), []

    def fail(*_):
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("something broke <here>")

    hook = tiny_pair().target.model.layers[0].register_forward_pre_hook(fail)
    try:
        ask(page)
        expect(page.locator("#answer [role=alert]")).to_contain_text("RuntimeError: something broke <here>")
    finally:
        hook.remove()
    ask(page, prompt="<script>document.title = 'hacked'</script>")
    status(page, "done")
    expect(page.locator("#answer [role=alert]")).to_have_count(0)
    assert page.title() != "hacked"


def test_side_by_side_and_an_example(tab):
    from app import EXAMPLES

    page = tab()
    page.get_by_text("Chat", exact=True).click()
    expect(page.locator("#prompt textarea")).to_have_value(EXAMPLES["Chat"])
    page.locator("#compare input").check()
    run(page)
    expect(page.locator("#summary")).to_contain_text("the same text, token for token")
    assert page.locator("#plain .ds-text").inner_text() == page.locator("#answer .ds-text").inner_text()


def test_models_that_cannot_be_loaded_are_refused_and_the_old_ones_stay(tab):
    page = tab()
    page.locator("#models button").first.click()
    page.get_by_label("Target").fill("nobody/target")
    page.get_by_label("Drafter").fill("nobody/drafter")
    page.locator("#load").click()
    expect(page.locator("#loading [role=alert]")).to_contain_text("cannot be reached")
    ask(page)
    status(page, f"done · {NUM_TOKENS} tokens")


def test_a_phone_needs_no_scrolling_sideways(tab, slow):
    page = tab(viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True)
    wide = "[document.documentElement.scrollWidth, document.body.scrollWidth]"
    assert max(page.evaluate(wide)) <= 390
    page.locator("#compare input").check()
    ask(page)
    page.locator("#answer .ds-text span").first.wait_for()
    assert max(page.evaluate(wide)) <= 390
    expect(page.locator("#summary")).to_contain_text("token for token", timeout=20_000)
    assert max(page.evaluate(wide)) <= 390
    boxes = [box.bounding_box() for box in page.locator("#answer .ds-panel, #plain .ds-panel, #charts svg").all()]
    assert len(boxes) == 6 and all(box["x"] >= 0 and box["x"] + box["width"] <= 390 for box in boxes)


CONTRAST = """
() => {
  const parse = c => { const n = c.match(/[\\d.]+/g).map(Number); return c.startsWith('color(srgb')
    ? [n[0] * 255, n[1] * 255, n[2] * 255, n[3] ?? 1] : [n[0], n[1], n[2], n[3] ?? 1]; };
  const over = (top, below) => top.slice(0, 3).map((v, i) => v * top[3] + below[i] * (1 - top[3]));
  const linear = v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = c => { const [r, g, b] = c.map(v => linear(v / 255)); return .2126 * r + .7152 * g + .0722 * b; };
  const behind = e => e ? over(parse(getComputedStyle(e).backgroundColor), behind(e.parentElement)) : [255, 255, 255];
  const names = '.ds-intro p, .ds-legend li, .ds-legend s, .ds-question, .ds-text span, .ds-status, .ds-hint, ' +
    '.ds-message, figcaption, .ds-chart h4, .ds-note';
  return [...document.querySelectorAll(names)].map(e => {
    const back = behind(e), [x, y] = [light(over(parse(getComputedStyle(e).color), back)), light(back)];
    return [e.className || e.tagName, (Math.max(x, y) + .05) / (Math.min(x, y) + .05)];
  });
}
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_is_readable_in_light_and_dark(tab, scheme):
    page = tab(color_scheme=scheme)
    ask(page)
    status(page, "done")
    background = page.evaluate("getComputedStyle(document.querySelector('#answer .ds-panel')).backgroundColor")
    assert (max(map(int, re.findall(r"\d+", background)[:3])) < 60) == (scheme == "dark")
    contrasts = page.evaluate(CONTRAST)
    assert len(contrasts) > 30
    assert min(contrasts, key=lambda pair: pair[1])[1] >= 4.5, sorted(contrasts, key=lambda pair: pair[1])[:3]
