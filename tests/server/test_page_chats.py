"""Conversations of the page: kept, opened, deleted, changed and copied. Settings stay."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from staging import URL, Stage, whole

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


def echo(body: dict[str, Any]) -> str:
    """Say which request this is, and what it asks."""
    return f"**{len(body['messages'])}** {body['messages'][-1]['content']}"


@pytest.fixture
def stage(browser: Browser) -> Iterator[Stage]:
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    context.set_default_timeout(20_000)
    context.grant_permissions(["clipboard-read", "clipboard-write"], origin=URL)
    stage = Stage(context.new_page(), echo)
    stage.open()
    yield stage
    assert stage.said == []
    context.close()


def titles(page: Page) -> list[str]:
    return page.locator("#chats li button:first-child").all_text_contents()


def shown(page: Page) -> list[str]:
    return page.locator(".question p, .prose").all_inner_texts()


def clipboard(page: Page) -> str:
    return page.evaluate("navigator.clipboard.readText()")


def again(stage: Stage) -> Page:
    """Load the page once more, in the same browser."""
    stage.page.reload()
    return stage.open()


def test_a_conversation_is_there_after_a_reload(stage: Stage) -> None:
    stage.ask("one <b>")
    stage.ask("two")
    before = shown(stage.page)
    assert "**3** two" in stage.page.evaluate("JSON.stringify(localStorage)")
    page = again(stage)
    assert page.locator("#welcome").is_visible()
    page.click("text=Conversations")
    assert titles(page) == ["one <b>"]
    page.click("#chats button:first-child")
    assert shown(page) == before == ["one <b>", "1 one <b>", "two", "3 two"]
    assert page.locator(".answer h3").all_inner_texts() == ["fake"] * 2
    assert "9 tokens" in page.locator(".numbers").last.inner_text()
    assert page.get_by_role("button", name="Draft view").count() == 0  # its steps are not kept
    stage.ask("three")
    said = [message["content"] for message in stage.bodies[-1]["messages"]]
    assert said == ["one <b>", "**1** one <b>", "two", "**3** two", "three"]


def test_conversations_are_opened_and_deleted(stage: Stage) -> None:
    page = stage.page
    stage.ask("first " + "word " * 100)
    page.click("#new")
    assert page.locator(".turn").count() == 0
    stage.ask("second")
    page.click("text=Conversations")
    assert [title[:12] for title in titles(page)] == ["second", "first word w"]
    assert max(map(len, titles(page))) <= 60
    page.locator("#chats button:first-child").last.click()
    assert shown(page)[0].startswith("first word")
    assert page.locator("#chats [aria-current=true]").all_text_contents() == [titles(page)[1]]
    page.get_by_role("button", name="Delete “second”").click()
    assert len(titles(page)) == 1
    assert page.evaluate("document.activeElement.tagName") == "SUMMARY"  # the button is gone
    page.locator("#chats button:last-child").click()
    assert page.locator("#welcome").is_visible()
    assert titles(page) == []
    assert page.evaluate("Object.keys(localStorage).filter((key) => key.includes('chat'))") == []


@pytest.mark.slow
def test_all_conversations_are_deleted_at_once(stage: Stage) -> None:
    page = stage.page
    for text in ("one", "two"):
        stage.ask(text)
        page.click("#new")
    page.click("text=Conversations")
    page.once("dialog", lambda dialog: dialog.dismiss())
    page.click("text=Delete all")
    assert titles(page) == ["two", "one"]
    page.once("dialog", lambda dialog: dialog.accept())
    page.click("text=Delete all")
    assert titles(page) == []
    assert page.locator("#chat-empty").is_visible()
    assert titles(again(stage)) == []


@pytest.mark.slow
def test_an_answer_of_this_visit_keeps_its_draft_view(stage: Stage) -> None:
    step = {
        "tokens": ["?", "So"],
        "parents": [-1, 0],
        "drafters": [None, "suffix"],
        "accepted": [1],
        "bonus": "!",
    }
    choice = {
        "index": 0,
        "delta": {"content": "So!"},
        "finish_reason": "stop",
        "speculation": {"steps": [step]},
    }
    stage.reply = [{"choices": [choice]}]
    stage.ask("one")
    page = stage.page
    page.click("#new")
    stage.ask("two")
    page.click("text=Conversations")
    page.locator("#chats button:first-child").last.click()
    page.get_by_role("button", name="Draft view").click()
    assert page.locator(".token").all_text_contents() == ["So", "!"]
    assert page.locator("#tree-drawing .node").count() == 3


def test_a_changed_message_begins_anew_from_there(stage: Stage) -> None:
    page = stage.page
    for text in ("one", "two", "three"):
        stage.ask(text)
    page.get_by_role("button", name="Edit").nth(1).click()
    box = page.get_by_role("textbox", name="Edited message")
    assert box.input_value() == "two"
    box.fill("something else")
    box.press("Escape")
    assert shown(page)[2] == "two"
    page.get_by_role("button", name="Edit").nth(1).click()
    box.fill("2\nlines")
    box.press("Enter")
    page.wait_for_function("() => document.querySelectorAll('.turn').length === 4")
    assert shown(page) == ["one", "1 one", "2\nlines", "3 2\nlines"]
    assert page.evaluate("document.activeElement.id") == "message"
    page = again(stage)
    page.click("text=Conversations")
    page.click("#chats button:first-child")
    assert shown(page) == ["one", "1 one", "2\nlines", "3 2\nlines"]


def test_the_last_answer_can_be_had_again(stage: Stage) -> None:
    page = stage.page
    stage.ask("one")
    stage.ask("two")
    buttons = page.get_by_role("button", name="Regenerate")
    assert buttons.count() == 1
    stage.reply = "another"
    buttons.click()
    page.wait_for_function(
        "() => document.querySelector('#turns > :last-child .prose')?.textContent === 'another'"
    )
    assert shown(page) == ["one", "1 one", "two", "another"]
    assert [message["content"] for message in stage.bodies[-1]["messages"]] == ["one", "**1** one", "two"]
    seeds = {body["seed"] for body in stage.bodies}
    assert len(seeds) == 3


def test_answers_and_code_are_copied(stage: Stage) -> None:
    text = "Do **this**:\n```sh\nls  # all\n\ncd ..\n```\nand *that*."
    stage.reply = text
    page = stage.ask("How?")
    page.get_by_role("button", name="Copy the answer").click()
    page.wait_for_selector("text=Copied")
    assert clipboard(page) == text
    assert page.locator("#announcer").inner_text() == "Copied the answer"
    page.get_by_role("button", name="Copy the sh").click()
    page.wait_for_function("() => document.getElementById('announcer').textContent === 'Copied the sh'")
    assert clipboard(page) == "ls  # all\n\ncd .."


@pytest.mark.slow
def test_a_browser_without_a_clipboard_copies_too(stage: Stage) -> None:
    page = stage.ask("one")
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    page.evaluate("document.addEventListener('copy', ({ target }) => (window.copied = target.value))")
    page.get_by_role("button", name="Copy the answer").click()
    page.wait_for_selector("text=Copied")
    assert page.locator("textarea.unseen").count() == 0
    assert page.evaluate("window.copied") == "**1** one"


def test_settings_stay(stage: Stage) -> None:
    page = stage.page
    page.click("text=System prompt")
    page.fill("#system", "Be kind.")
    page.fill("#temperature", "0.2")
    page.fill("#max-tokens", "77")
    page.select_option("#drafter", "suffix")
    page.fill("#max-nodes", "3")
    page = again(stage)
    assert page.locator("#system-short").inner_text() == "Be kind."
    stage.ask("one")
    body = stage.bodies[-1]
    assert body["messages"][0] == {"role": "system", "content": "Be kind."}
    assert (body["temperature"], body["max_tokens"]) == (0.2, 77)
    assert body["speculation"] == {"drafter": "suffix", "max_nodes": 3, "trace": True}
    page.uncheck("#speculate")
    stage.card["drafters"] = ["auto", "none", "mtp"]  # a server without the drafter that was chosen
    page = again(stage)
    assert page.locator("#drafter").is_disabled()
    assert page.locator("#drafter option").all_text_contents() == ["auto", "mtp"]
    page.check("#speculate")
    stage.ask("two")
    assert stage.bodies[-1]["speculation"]["drafter"] is None


def test_the_context_limits_the_tokens(stage: Stage) -> None:
    page = stage.page
    assert page.locator("#max-tokens").get_attribute("placeholder") == "≤ 512"
    stage.ask("one")
    assert stage.bodies[-1]["max_tokens"] is None
    page.fill("#max-tokens", "513")
    page.fill("#message", "two")
    page.press("#message", "Enter")
    assert page.evaluate("document.activeElement.id") == "max-tokens"
    page.fill("#max-tokens", "512")
    stage.ask("two")
    assert stage.bodies[-1]["max_tokens"] == 512


KEEP = """async (sizes) => {
    const { Chats } = await import("/site/chats.js");
    const el = (tag) => document.createElement(tag);
    const parts = { list: el("ul"), title: el("p"), empty: el("p"), clear: el("p") };
    const chats = new Chats(parts, {});
    const clock = Date.now;
    const said = sizes.map((size, at) => {
        Date.now = () => at;
        const answer = { name: "", text: "z".repeat(size), thoughts: "", facts: [] };
        chats.keep(String(at), [{ text: String(at), answer }]);
        return parts.title.textContent;
    });
    Date.now = clock;
    return [said, [...parts.list.children].map((one) => one.firstChild.textContent)];
}"""
"""Keep conversations whose answers have these sizes. Returns what was said, and the list at the end."""


def test_old_conversations_make_room(stage: Stage) -> None:
    page = stage.page
    _, listed = page.evaluate(KEEP, [1] * 52)
    assert listed == [str(at) for at in range(51, 1, -1)]
    page.evaluate("localStorage.clear()")
    _, listed = page.evaluate(KEEP, [900_000] * 6)
    assert listed == ["5", "4", "3", "2"]
    assert titles(again(stage)) == listed
    page.evaluate("localStorage.clear(); localStorage.setItem('another', 'y'.repeat(3_000_000))")
    _, listed = page.evaluate(KEEP, [900_000] * 3)  # the browser has room for five million letters in all
    assert listed == ["2", "1"]
    assert page.evaluate("localStorage.getItem('another').length") == 3_000_000


def test_what_finds_no_room_is_shown_as_such(stage: Stage) -> None:
    page = stage.page
    said, listed = page.evaluate(KEEP, [1, 4_100_000])
    assert said == ["0", "not kept: the browser has no room for it"]
    assert listed == ["0"]
    page.evaluate("Storage.prototype.setItem = () => { throw new Error('full'); }; null")
    stage.ask("nothing fits")
    assert page.locator("#chat-title").inner_text() == said[1]
    assert shown(page) == ["nothing fits", "1 nothing fits"]


@pytest.mark.slow
def test_a_browser_that_keeps_nothing_will_do(browser: Browser) -> None:
    page = browser.new_page()
    page.set_default_timeout(20_000)
    page.add_init_script(
        "Object.defineProperty(window, 'localStorage', { get() { throw new DOMException('no'); } })"
    )
    stage = Stage(page)
    stage.open()
    stage.ask("one")
    page.click("#theme")
    page.fill("#temperature", "0.1")
    assert shown(page) == ["one", "Hello."]
    assert stage.said == []
    page.close()


BAD = [
    "{",
    "null",
    "[]",
    '{"at": 1}',
    '{"at": 1, "turns": []}',
    '{"at": "1", "turns": [{"text": "a", "answer": {"name": "", "text": "", "thoughts": "", "facts": []}}]}',
    '{"at": 1, "turns": [{"text": {}, "answer": {"name": "", "text": "", "thoughts": "", "facts": []}}]}',
    '{"at": 1, "turns": [{"text": "a", "answer": {"name": "", "text": "", "thoughts": "", "facts": [{}]}}]}',
    '{"at": 1, "turns": [{"text": "a"}]}',
]


def test_odd_values_in_the_browser_are_left_out(stage: Stage) -> None:
    page = stage.page
    evil = "<img src=x onerror='window.hit = 1'>"
    good = {"text": evil, "answer": {"name": evil, "text": evil, "thoughts": evil, "facts": [evil]}}
    for name, text in {
        **{f"chat.{at}": text for at, text in enumerate(BAD)},
        "chat.good": json.dumps({"at": 5, "turns": [good]}),
        "settings": '{"temperature": {}, "speculate": "x", "drafter": 3, "seed": "x"}',
        "system": "[1]",
        "theme": '"purple"',
        "draft view": '"yes"',
    }.items():
        page.evaluate("([name, text]) => localStorage.setItem(`soothsay.${name}`, text)", [name, text])
    page = again(stage)
    assert titles(page) == [evil]
    assert page.input_value("#temperature") == "0.7"
    assert page.is_checked("#speculate")
    page.click("text=Conversations")
    page.click("#chats button:first-child")
    assert shown(page) == [evil, evil]
    assert page.locator(".thoughts").inner_text() == evil
    assert page.evaluate("window.hit") is None
    assert page.locator("#turns img").count() == 0


def test_a_stopped_answer_is_kept(stage: Stage) -> None:
    """A message is kept when it is sent: the server may be gone before it answers."""
    page = stage.page
    stage.reply = lambda body: None
    page.fill("#message", "two")
    page.press("#message", "Enter")
    page.wait_for_selector("#stop:visible")
    assert titles(page) == ["two"]
    page.click("#new")  # stops the answer
    error = {"error": {"message": "the engine has stopped", "code": "engine_stopped"}}
    stage.reply = {"status": 503, "json": error}
    stage.ask("one")
    assert page.get_by_role("button", name="Try again").count() == 1
    assert page.get_by_role("button", name="Regenerate").count() == 0
    page = again(stage)
    page.click("text=Conversations")
    assert titles(page) == ["one", "two"]
    page.click("#chats button:first-child")
    assert shown(page) == ["one", ""]
    stage.reply = "now"
    page.get_by_role("button", name="Regenerate").click()
    page.wait_for_function("() => document.querySelector('.prose').textContent === 'now'")
    stage.said = [line for line in stage.said if "503" not in line]  # Chromium reports it


@pytest.mark.slow
def test_two_tabs_share_conversations(stage: Stage) -> None:
    stage.ask("here")
    other = Stage(stage.page.context.new_page(), echo)
    page = other.open()
    assert titles(page) == ["here"]
    other.ask("there")
    stage.page.wait_for_function("() => document.querySelectorAll('#chats li').length === 2")
    page.click("text=Conversations")
    page.get_by_role("button", name="Delete “here”").click()
    stage.page.wait_for_function("() => document.querySelectorAll('#chats li').length === 1")
    assert shown(stage.page) == ["here", "1 here"]


def test_reading_long_answers_on_a_phone(stage: Stage) -> None:
    page = stage.page
    page.set_viewport_size({"width": 390, "height": 844})
    page = again(stage)
    table = "| a | b |\n|---|---|\n" + "| long cell with words | " + "x" * 200 + " |\n"
    stage.reply = f"```python\n{'print(1); ' * 60}\n```\n{table}" + "text\n\n" * 60 + "W" * 500
    stage.ask("long " * 60)
    assert page.evaluate("document.scrollingElement.scrollWidth") <= 390
    assert page.locator("#turns").evaluate("(turns) => turns.scrollWidth <= turns.clientWidth")
    assert page.locator(".code pre").evaluate("(pre) => pre.scrollWidth > pre.clientWidth")
    page.locator("#send").click(trial=True)  # the message's field stays in view
    at_end = "(turns) => turns.scrollHeight - turns.scrollTop - turns.clientHeight < 2"
    assert page.locator("#turns").evaluate(at_end)
    page.click("text=Conversations")
    outside = """[...document.querySelectorAll("button, summary, textarea")]
        .filter((one) => one.checkVisibility() && !one.closest(".code"))
        .map((one) => [one.textContent, one.getBoundingClientRect()])
        .filter(([, box]) => box.left < 0 || box.right > 390).map(([text]) => text)"""
    assert page.evaluate(outside) == []


def test_new_controls_have_names_and_take_the_focus(stage: Stage) -> None:
    stage.reply = whole("```py\nx\n```\n| a | b |\n|--|--|\n| 1 | 2 |\n\n[a](https://b.example)")
    page = stage.ask("one")
    page.click("text=Conversations")
    page.locator("#bar summary").focus()
    reached: list[tuple[str, bool]] = []
    for _ in range(40):
        where = """() => {
            const at = document.activeElement;
            const { outlineStyle, outlineWidth } = getComputedStyle(at);
            const name = at.getAttribute("aria-label") ?? at.textContent;
            return [name, outlineStyle !== "none" && parseFloat(outlineWidth) >= 2];
        }"""
        reached.append(tuple(page.evaluate(where)))
        page.keyboard.press("Tab")
    names = [name for name, _ in reached]
    wanted = [
        "one",
        "Delete “one”",
        "Delete all",
        "New conversation",
        "Edit",
        "Draft view",
        "Copy the py",
        "Code",
    ]
    wanted += ["Table", "a", "Copy the answer", "Regenerate", "Compare with plain decoding"]
    assert [name for name in names if name in wanted][: len(wanted)] == wanted
    assert all(visible for name, visible in reached if name in wanted), reached
