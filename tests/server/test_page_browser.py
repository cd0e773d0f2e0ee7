"""The page in an installed Chromium, with a real server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import engines
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import Running, serving
from staging import streamed, whole
from watching import QUESTION, SEED, Watched

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

STORY = "Write a Python function that adds two numbers."  # goes on for ever at temperature 0


@pytest.fixture(scope="module")
def site(browser: Browser) -> Iterator[Running]:
    """A server whose drafter combines two drafters."""
    with serving(partial(engines.sibyl, drafter="suffix > mtp", dtype="float32")) as one:
        yield one


@pytest.fixture
def watched(browser: Browser, site: Running) -> Iterator[Watched]:
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.set_default_timeout(20_000)
    yield Watched(page, f"{site.url}/")
    page.close()


def shown(page: Page) -> str:
    return page.evaluate("document.querySelector('.answer .said').textContent")


def test_a_proxy_may_put_the_page_below_another_path(browser: Browser, site: Running) -> None:
    page = browser.new_page()
    watched = Watched(page, f"{site.url}/ai/")

    def forward(route: Route) -> None:
        path = route.request.url.removeprefix(site.url)
        if path.startswith("/ai/"):
            route.fulfill(response=route.fetch(url=f"{site.url}{path.removeprefix('/ai')}"))
        else:
            route.abort()

    page.route(f"{site.url}/**", forward)
    watched.open()
    watched.ask()
    assert shown(page)
    assert watched.said == []
    page.unroute_all(behavior="ignoreErrors")
    page.close()


def test_a_chat_streams_in_colours(watched: Watched, site: Running) -> None:
    page = watched.open()
    page.evaluate(
        """() => {
            window.lengths = new Set();
            const turns = document.getElementById("turns");
            const look = () => lengths.add(turns.querySelector(".said")?.textContent.length ?? 0);
            new MutationObserver(look).observe(turns, { childList: true, subtree: true });
        }"""
    )
    page.fill("#max-tokens", "300")
    page.fill("#temperature", "0")
    watched.ask(STORY)
    with site.client() as client:
        said = client.chat.completions.create(
            model="sibyl", messages=[{"role": "user", "content": STORY}], temperature=0, max_tokens=300
        )
    assert shown(page) == said.choices[0].message.content
    lengths = page.evaluate("[...lengths]")
    assert any(0 < length < len(shown(page)) for length in lengths)  # it was shown while it streamed
    tokens: list[list[str]] = page.evaluate(
        """[...document.querySelectorAll(".token")].map((token) => {
            const { author, drafter = "" } = token.dataset;
            return [author, drafter, getComputedStyle(token).textDecorationColor];
        })"""
    )
    colours = {(author, drafter) for author, drafter, _ in tokens}
    assert {author for author, _ in colours} == {"suffix", "mtp", "target"}
    assert len({drafter for _, drafter in colours}) == 3
    assert len({colour for _, _, colour in tokens}) == 3
    legend = page.locator(".legend li").all_inner_texts()
    counts = {name: int(number) for name, number in (entry.split() for entry in legend)}
    assert set(counts) == {"suffix", "mtp", "target"}
    assert sum(counts.values()) == said.usage.completion_tokens
    assert watched.said == []
    assert {url.removeprefix(watched.url).partition("/")[0] for url in watched.asked} <= {
        "",
        "site",
        "v1",
        "health",
        "metrics",
    }


def test_the_tree_is_that_of_the_step(watched: Watched) -> None:
    page = watched.open()
    watched.ask("Name five animals of the sea, and what they eat.")  # not asked before: more than one step
    slider = page.locator("#tree-slider")
    shown, last = slider.evaluate("slider => [Number(slider.value), Number(slider.max)]")
    assert shown == last > 1
    held = 0
    for step in range(1, last + 1):
        slider.fill(str(step))
        nodes = page.locator("#tree-drawing .node")
        path = page.locator("#tree-drawing :is(.accepted, .bonus).node text").all_text_contents()
        assert page.locator("#tree-drawing .root").count() == 1
        assert page.locator("#tree-drawing .edge").count() == nodes.count() - 1
        guesses = nodes.count() - 2
        caption = page.locator("#tree-caption").inner_text()
        assert caption.startswith(f"{len(path) - 1} of {guesses} " if guesses else "Nothing was drafted")
        marked = page.evaluate("[...document.querySelectorAll('.token.now')].map((t) => t.dataset.token)")
        if step < last:  # the last step may accept more tokens than max_tokens allows
            assert [text.strip("·↵") for text in marked] == [text.strip("·↵") for text in path]
        held += len(path) - 1
    assert held > 3
    page.locator(".token").first.click()
    assert slider.input_value() == "1"
    page.click("#tree-on")
    assert slider.input_value() == "2"


def test_replay_walks_to_the_end(watched: Watched) -> None:
    page = watched.open()
    page.clock.install()
    watched.page.fill("#max-tokens", "20")
    watched.page.fill("#message", "Name five rivers, and the seas they reach.")  # not asked before
    page.press("#message", "Enter")
    page.wait_for_selector("text=Compare with plain decoding")
    page.click("#tree-replay")
    assert page.locator("#tree-slider").input_value() == "1"
    assert page.locator("#tree-replay").inner_text() == "Pause"
    page.clock.run_for(60_000)
    assert page.locator("#tree-slider").input_value() == page.locator("#tree-slider").get_attribute("max")
    assert page.locator("#tree-replay").inner_text() == "Replay"


def test_plain_decoding_says_the_same(watched: Watched) -> None:
    page = watched.open()
    watched.ask()
    page.click("text=Compare with plain decoding")
    page.wait_for_selector(".good, .bad")
    assert "the same text" in page.locator(".good").inner_text()
    assert f"seed {SEED}" in page.locator(".good").inner_text()
    rates = page.locator(".rate").all_inner_texts()
    assert [rate.split()[0] for rate in rates] == ["speculative", "plain"]
    assert all("tokens/s" in rate for rate in rates)
    assert watched.said == []


def test_a_difference_is_shown(watched: Watched) -> None:
    page = watched.open()
    watched.ask()
    ours = shown(page)
    page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(**streamed(whole(ours[:5] + "?" + ours[6:])))
    )
    page.click("text=Compare with plain decoding")
    assert "differ from character 6" in page.locator(".bad").inner_text()
    assert page.locator(".good").count() == 0


def test_charts_move(watched: Watched) -> None:
    page = watched.open()
    watched.ask()
    drawn = """(title) => {
        const line = document.querySelector(`[data-chart="${title}"] .line`)?.getAttribute("d") ?? "";
        return new Set(line.match(/[\\d.]+(?=L|M|$)/g)).size > 1;
    }"""
    for title in ("Tokens a second", "Tokens a step", "First token after", "Accepted a second"):
        page.wait_for_function(drawn, arg=title) if title == "Tokens a second" else page.wait_for_selector(
            f'[data-chart="{title}"] .line[d^=M]', state="attached"
        )
    key = page.locator('[data-chart="Accepted a second"] .key').inner_text()
    assert "suffix" in key
    assert "mtp" in key


def test_prometheus_is_read_as_by_its_own_parser(watched: Watched) -> None:
    page = watched.open()
    watched.ask()
    text = page.evaluate("fetch('/metrics').then((answer) => answer.text())")
    text += 'odd{a="x\\\\\\"y\\n}",b=""} 3e2\n'
    read = page.evaluate(
        """async (text) => {
            const { parse } = await import("/site/metrics.js");
            return [...parse(text)].flatMap(
                ([name, samples]) => samples.map(({ labels, value }) => [name, labels, String(value)]));
        }""",
        text,
    )
    meant = [
        (sample.name.removeprefix("soothsay:"), sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]
    assert len(meant) > 50
    assert sorted((name, sorted(labels.items()), float(value)) for name, labels, value in read) == sorted(
        (name, sorted(labels.items()), value) for name, labels, value in meant
    )


def test_tokens_find_their_text(watched: Watched) -> None:
    page = watched.open()

    def spans(tokens: list[str], chunks: list[tuple[str, int]]) -> list[list[Any]]:
        return page.evaluate(
            """async ([tokens, chunks]) => {
                const { Aligner } = await import("/site/answer.js");
                const aligner = new Aligner();
                const made = tokens.map((text, at) => ({ text, at }));
                const spans = chunks.flatMap(([text, count]) => aligner.push(text, made.splice(0, count)));
                spans.push(...aligner.end());
                return spans.map(({ text, tokens }) => [text, tokens.map(({ at }) => at)]);
            }""",
            [tokens, chunks],
        )

    assert spans(["A", " man"], [("A man", 2)]) == [["A", [0]], [" man", [1]]]
    assert spans(["A", " man", " in"], [("A", 2), (" ma", 0), ("n in", 1)]) == [
        ["A", [0]],
        [" man", [1]],
        [" in", [2]],
    ]  # text that was held back
    assert spans([" A", " man"], [("A man", 2)]) == [["A", [0]], [" man", [1]]]
    assert spans(["a", "\ufffd", "\ufffd", "b"], [("a", 2), ("", 1), ("🐕b", 1)]) == [
        ["a", [0]],
        ["🐕", [1, 2]],
        ["b", [3]],
    ]
    assert spans(["a", "\ufffd", "\ufffd"], [("a", 2), ("🐕", 1)]) == [["a", [0]], ["🐕", [1, 2]]]
    assert spans(["a", "<|end|>", "b"], [("ab", 3)]) == [["a", [0]], ["b", [2]]]
    assert spans(["a", "<|end|>"], [("a", 2)]) == [["a", [0]]]


def test_thoughts_code_and_tables_are_shown_as_such(watched: Watched) -> None:
    page = watched.open()
    text = "So:\n```python\ndef f():\n    pass\n```\nand\n| a | b |\n|---|---|\ndone"
    pieces = re.findall(r"```|\n\|| ?\w+|\s+|.", text)
    tokens = ["<think>", "Let", " me", " see", "</think>", "\n\n", *pieces]
    deltas = [{"reasoning_content": "Let me see"}, {"content": ""}, *({"content": piece} for piece in pieces)]
    groups = [tokens[:4], tokens[4:6], *([token] for token in tokens[6:])]
    chunks = []
    for delta, group in zip(deltas, groups, strict=True):
        steps = [{"tokens": [], "parents": [], "drafters": [], "accepted": [], "bonus": one} for one in group]
        chunks.append({"choices": [{"index": 0, "delta": delta, "speculation": {"steps": steps}}]})
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    page.route("**/v1/chat/completions", lambda route: route.fulfill(**streamed(chunks)))
    page.fill("#message", "Why?")
    page.keyboard.press("Enter")
    page.wait_for_selector(".answer .said:not(.running)")
    assert page.locator(".thoughts").text_content() == "Let me see"
    assert shown(page) == f"Let me see{text}"
    code = "".join(page.locator(".tokens > code").all_text_contents())
    assert "def f():\n    pass\n```" in code
    assert "| a | b |\n|---|---|" in code
    assert "So" not in code
    assert "and" not in code
    assert "done" not in code


def test_the_keyboard_does_it_all(watched: Watched) -> None:
    page = watched.open()
    page.locator("#message").focus()
    page.keyboard.type("Hello!")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("How are you?")
    assert page.input_value("#message") == "Hello!\nHow are you?"
    page.keyboard.press("Enter")
    page.wait_for_selector("text=Compare with plain decoding")
    assert page.locator(".question p").inner_text() == "Hello!\nHow are you?"
    assert page.evaluate("document.activeElement.id") == "message"
    page.reload()
    page.wait_for_selector("#status[data-state=ok]")
    page.fill("#seed", "11")  # this seed gives an answer of several tokens
    watched.ask()
    page.locator(".skip").focus()
    reached = []
    for _ in range(60):
        where = page.evaluate(
            """() => {
                const at = document.activeElement;
                if (at === document.body) return null;
                const { outlineStyle, outlineWidth } = getComputedStyle(at);
                const visible = outlineStyle !== "none" && parseFloat(outlineWidth) >= 2;
                return [at.id || at.className || at.textContent, visible];
            }"""
        )
        if where is None:  # the focus is outside the page
            break
        reached.append(where)
        page.keyboard.press("Tab")
    assert all(visible for _, visible in reached), reached
    names = {name for name, _ in reached}
    assert names >= {"theme", "new", "turns", "tokens", "speculate", "drafter", "seed", "message", "send"}
    assert names >= {"tree-drawing", "tree-back", "tree-slider", "tree-replay"}
    page.locator(".tokens").focus()
    tokens = page.evaluate("[...document.querySelectorAll('.token')].map((token) => token.dataset.token)")
    for key, at in (("ArrowRight", 0), ("ArrowRight", 1), ("End", -1), ("ArrowLeft", -2), ("Home", 0)):
        page.keyboard.press(key)
        assert page.locator(".token.cursor").get_attribute("data-token") == tokens[at]
        assert page.locator("#tip").inner_text().startswith(tokens[at])
        assert page.locator("#announcer").inner_text().startswith(f"“{tokens[at]}”")
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()


def test_escape_stops(watched: Watched, site: Running) -> None:
    page = watched.open()
    page.uncheck("#speculate")
    page.fill("#temperature", "0")
    page.fill("#max-tokens", "1500")
    page.fill("#message", STORY)
    page.press("#message", "Enter")
    page.wait_for_function("() => document.querySelector('.said')?.textContent.length > 10")
    page.keyboard.press("Escape")
    page.wait_for_selector("#send:visible")
    assert "stopped" in page.locator(".numbers").inner_text()
    assert page.locator("text=Compare with plain decoding").is_hidden()
    site.wait_until(lambda: site.free)
    page.click("#new")
    assert page.locator(".turn").count() == 0
    assert page.locator("#welcome").is_visible()


def test_the_conversation_goes_on(watched: Watched) -> None:
    page = watched.open()
    page.click("text=System prompt")
    page.fill("#system", "Be kind.")
    bodies: list[dict[str, Any]] = []
    page.on("request", lambda request: "/chat/" in request.url and bodies.append(request.post_data_json))
    watched.ask("Hello!")
    first = shown(page)
    watched.ask("And now?")
    assert [message["content"] for message in bodies[1]["messages"]] == [
        "Be kind.",
        "Hello!",
        first,
        "And now?",
    ]
    assert [message["role"] for message in bodies[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert bodies[0]["speculation"]["trace"] is True
    page.uncheck("#speculate")
    watched.ask("Plainly?")
    assert bodies[2]["speculation"] is False
    assert page.locator("#drafter").is_disabled()
    page.check("#speculate")
    page.select_option("#drafter", "prompt-lookup")
    page.fill("#max-nodes", "2")
    watched.ask("Once more?")
    assert bodies[3]["speculation"] == {"drafter": "prompt-lookup", "max_nodes": 2, "trace": True}


def test_errors_say_what_to_do(watched: Watched) -> None:
    page = watched.open()
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            status=429,
            headers={"Retry-After": "2"},
            json={"error": {"message": "too many", "type": "x", "param": None, "code": "queue_full"}},
        ),
    )
    page.fill("#message", QUESTION)
    page.press("#message", "Enter")
    problem = page.locator(".problem")
    assert "Too many. Try again in 2 seconds." in problem.inner_text()
    assert problem.get_attribute("role") == "alert"
    page.unroute("**/v1/chat/completions")
    page.get_by_role("button", name="Try again").click()
    page.wait_for_selector("text=Compare with plain decoding")
    assert page.locator(".turn.question").count() == 1


def test_what_the_server_refuses_is_told(watched: Watched) -> None:
    page = watched.open()
    page.fill("#message", "word " * 5000)
    page.press("#message", "Enter")
    assert "Begin a new conversation" in page.locator(".problem").inner_text()
    for field, value in (("temperature", "-1"), ("max-tokens", "1000000")):
        page.fill(f"#{field}", value)
        page.fill("#message", "Not sent")
        page.press("#message", "Enter")
        assert page.evaluate("document.activeElement.id") == field
        page.fill(f"#{field}", "1")
    assert page.locator(".turn.question").count() == 1


def test_a_lost_connection_is_shown_and_found_again(watched: Watched) -> None:
    page = watched.open()
    page.context.set_offline(True)
    page.wait_for_selector("#status[data-state=lost]")
    page.fill("#message", QUESTION)
    page.press("#message", "Enter")
    assert "The server does not answer." in page.locator(".problem").inner_text()
    page.context.set_offline(False)
    page.wait_for_selector("#status[data-state=ok]")
    watched.ask()


def test_a_tab_that_nobody_sees_asks_nothing(watched: Watched) -> None:
    page = watched.page
    page.clock.install()
    watched.open()

    def asked_of(hidden: bool) -> int:
        page.evaluate(
            """(hidden) => {
                Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
                document.dispatchEvent(new Event("visibilitychange"));
            }""",
            hidden,
        )
        page.wait_for_load_state("networkidle")
        before = len(watched.asked)
        for _ in range(3):
            page.clock.run_for(1100)
            page.evaluate("fetch('/health').then((answer) => answer.text())")
        return len(watched.asked) - before

    assert asked_of(hidden=True) == 3  # the requests of this test
    assert asked_of(hidden=False) > 3


def test_a_broken_stream_is_told(watched: Watched) -> None:
    page = watched.open()
    reply = streamed(whole("Half of "))
    reply["body"] = reply["body"].removesuffix("data: [DONE]\n\n")
    page.route("**/v1/chat/completions", lambda route: route.fulfill(**reply))
    page.fill("#message", QUESTION)
    page.press("#message", "Enter")
    assert "The connection ended before the answer did." in page.locator(".problem").inner_text()
    assert shown(page) == "Half of "


def test_a_key_is_asked_for(watched: Watched) -> None:
    page = watched.page

    def guarded(route: Route) -> None:
        if route.request.headers.get("authorization") == "Bearer open sesame":
            route.continue_()
        else:
            error = {"message": "give a valid API key", "code": "invalid_api_key"}
            route.fulfill(status=401, json={"error": error})

    for path in ("/v1/**", "/metrics"):
        page.route(f"**{path}", guarded)
    page.goto(watched.url)
    page.wait_for_selector("#status[data-state=locked]")
    page.fill("#key", "open sesame")
    page.press("#key", "Enter")
    page.wait_for_selector("#status[data-state=ok]")
    assert page.locator("#key-form").is_hidden()
    assert page.input_value("#key") == ""
    watched.ask()
    assert (
        page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])").count(
            "open"
        )
        == 0
    )


def test_a_key_without_permissions_gets_answers(watched: Watched) -> None:
    page = watched.page
    traced: list[bool] = []
    error = {"message": "this key may not", "code": "not_allowed"}

    def guarded(route: Route) -> None:
        traced.append(json.loads(route.request.post_data or "{}")["speculation"]["trace"])
        if traced[-1]:
            route.fulfill(status=403, json={"error": error})
        else:
            route.continue_()

    page.route("**/v1/chat/completions", guarded)
    page.route("**/metrics", lambda route: route.fulfill(status=403, json={"error": error}))
    watched.open()
    first = shown(watched.ask())
    assert first
    assert page.locator(".problem").count() == 0
    watched.ask("Once more")
    assert traced == [True, False, False]  # the page remembers
    watched.said = [line for line in watched.said if "403" not in line]  # Chromium reports each


CONTROLS = {"button", "checkbox", "combobox", "slider", "spinbutton", "textbox", "switch", "link"}


def test_everything_has_a_name(watched: Watched) -> None:
    page = watched.open()
    watched.ask()
    page.locator("details").evaluate_all("(all) => all.forEach((one) => (one.open = true))")
    tree = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    roles: dict[str, list[str]] = {}
    for node in tree:
        if not node.get("ignored"):
            roles.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))
    for role in (CONTROLS | {"image", "region", "complementary", "figure"}) & set(roles):
        assert all(name.strip() for name in roles[role]), (role, roles[role])
    assert len(roles["main"]) == len(roles["banner"]) == len(roles["complementary"]) == 1
    assert len(roles["slider"]) == 1
    assert len(roles["spinbutton"]) == 5
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map((element) => element.id)")
    assert len(set(ids)) == len(ids)


CONTRASTS = """() => {
    const context = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
    const over = (colours) => {
        context.clearRect(0, 0, 1, 1);
        for (const colour of colours) { context.fillStyle = colour; context.fillRect(0, 0, 1, 1); }
        return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const luminance = (rgb) => rgb.map((part) => part / 255)
        .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
        .reduce((sum, part, at) => sum + part * [0.2126, 0.7152, 0.0722][at], 0);
    const found = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const element = walker.currentNode.parentElement;
        const text = walker.currentNode.data.trim();
        if (!text || !element.checkVisibility() || element.closest(":disabled, noscript, svg")) continue;
        const papers = [];
        for (let one = element; one; one = one.parentElement)
            papers.unshift(getComputedStyle(one).backgroundColor);
        const paper = luminance(over(papers));
        const ink = luminance(over([...papers, getComputedStyle(element).color]));
        found.push([(Math.max(paper, ink) + 0.05) / (Math.min(paper, ink) + 0.05), text]);
    }
    return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(watched: Watched, scheme: Any) -> None:
    page = watched.page
    page.emulate_media(color_scheme=scheme)
    watched.open()
    watched.ask()
    page.click("text=Compare with plain decoding")
    page.wait_for_selector(".good")
    assert page.locator("#theme").inner_text() == ("◐ Dark" if scheme == "light" else "◐ Light")
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 50
    assert [one for one in contrasts if one[0] < 4.5] == []
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before  # the choice is stored


def test_narrow_windows(watched: Watched) -> None:
    page = watched.open()
    page.set_viewport_size({"width": 360, "height": 740})
    watched.ask()
    assert page.evaluate("document.scrollingElement.scrollWidth") <= 360
    outside = page.evaluate(
        """[...document.querySelectorAll("button, input, select, textarea")]
            .filter((one) => one.checkVisibility())
            .map((one) => [one.id, one.getBoundingClientRect()])
            .filter(([, box]) => box.left < 0 || box.right > 360).map(([id]) => id)"""
    )
    assert outside == []
    widths = page.locator("#settings :is(select, input[type=number])").evaluate_all(
        "(all) => all.map((one) => one.getBoundingClientRect().width)"
    )
    assert min(widths) > 60
    page.reload()
    assert page.locator("#settings").is_hidden()  # there is no room for it beside the answers
