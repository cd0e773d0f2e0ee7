"""The page shows Markdown as it is meant, safely, and while it streams."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from slow import mostly_slow
from staging import Stage, whole

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

OUTLINE = """(node) => {
    const outline = (node) => {
        if (node.nodeType === 3) return node.data;
        const inside = [...node.childNodes].map(outline).join("");
        const names = { BUTTON: "", FIGCAPTION: "" };
        if (node.tagName in names) return "";
        const kind = [...node.classList].find((one) => one.startsWith("code-"));
        if (node.tagName === "SPAN") return kind ? `${kind[5].toUpperCase()}:${inside}` : inside;
        const name = node.tagName.toLowerCase();
        return `<${name}${node.href ? ` ${node.href}` : ""}>${inside}</>`;
    };
    return [...node.childNodes].map(outline).join("");
}"""
"""The elements of a node as text: `<em>`...`</>`, and `K:`... for a keyword. No buttons, no captions."""

DRAW = f"""async ([text, cuts]) => {{
    const {{ Markdown }} = await import("/site/markdown.js");
    const markdown = new Markdown();
    for (const cut of cuts) markdown.update(text.slice(0, cut));
    markdown.update(text, true);
    return ({OUTLINE})(markdown.element);
}}"""


@pytest.fixture(scope="module")
def stage(browser: Browser) -> Iterator[Stage]:
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.set_default_timeout(20_000)
    stage = Stage(page)
    stage.open()
    yield stage
    page.close()


def drawn(page: Page, text: str, cuts: list[int] | None = None) -> str:
    """What a text becomes that arrives in parts, which end at `cuts`."""
    return page.evaluate(DRAW, [text, cuts or []])


@pytest.mark.parametrize(
    ("text", "outline"),
    [
        ("# One\n### Three #\ntext", "<h4>One</><h6>Three</><p>text</>"),
        (
            "a *b* **c** ***d*** ~~e~~ `f*g*`",
            "<p>a <em>b</> <strong>c</> <em><strong>d</></> <del>e</> <code>f*g*</></>",
        ),
        (
            "**a *b* c** _d_ snake_case_name 2 * 3 * 4",
            "<p><strong>a <em>b</> c</> <em>d</> snake_case_name 2 * 3 * 4</>",
        ),
        ("**bold*** and *open", "<p><strong>bold</>* and *open</>"),
        (r"\*not\* \`code\` `` a`b ``", "<p>*not* `code` <code>a`b</></>"),
        ("one\ntwo\n\nthree<br>four", "<p>one\ntwo</><p>three<br></>four</>"),
        ("- a\n- b\n  - c\n\n  more\n* d", "<ul><li>a</><li>b<ul><li>c</></><p>more</></><li>d</></>"),
        (
            "3. a\n   ```\n   x\n   ```\n4) b\n\nend",
            "<ol><li>a<figure><pre><code>x\n</></></></><li>b</></><p>end</>",
        ),
        ("- [x] done\n- [ ] open", "<ul><li>☑ done</><li>☐ open</></>"),
        ("> a\n> > b\n\n---", "<blockquote><p>a</><blockquote><p>b</></></><hr></>"),
        (
            "| a | b |\n|:-:|--:|\n| `x` | y \\| z |\n| only |\nend",
            "<div><table><thead><tr><th>a</><th>b</></></><tbody><tr><td><code>x</></><td>y | z</></>"
            "<tr><td>only</><td></></></></></><p>end</>",
        ),
        ("```py\na = 1\n\n```\nend", "<figure><pre><code>a = N:1\n\n</></></><p>end</>"),
        ("~~~\n```\n~~~", "<figure><pre><code>```\n</></></>"),
        ("```\nnever *ended*", "<figure><pre><code>never *ended*</></></>"),
        (
            "[a](https://b.c/d_(e)) <mailto:a@b.c>",
            "<p><a https://b.c/d_(e)>a</> <a mailto:a@b.c>mailto:a@b.c</></>",
        ),
        ("see **https://a.b/c?d=1**.", "<p>see <strong><a https://a.b/c?d=1>https://a.b/c?d=1</></>.</>"),
        ("![cat](https://a.b/c.png)", "<p><a https://a.b/c.png>cat</></>"),
        ("", ""),
    ],
)
def test_markdown_is_shown_as_meant(stage: Stage, text: str, outline: str) -> None:
    assert drawn(stage.page, text) == outline


@pytest.mark.parametrize(
    ("text", "outline"),
    [
        ("[a](javascript:alert(1))", "<p>a</>"),
        ("[a](JaVaScRiPt:alert`1`) [b](data:text/html,x) [c](/v1/models) [d](//e.f)", "<p>a b c d</>"),
        ("<javascript:alert(1)>", "<p><javascript:alert(1)></>"),
        ("<img src=x onerror=alert(1)><script>alert(1)</script>", None),
        ("&lt;b&gt; &#60;", None),
        ("![x](x 'onerror=alert(1)')", None),
        (
            "[x]: https://a.b\n[[1]](javascript:alert(1))",
            "<p>[x]: <a https://a.b/>https://a.b</>\n[[1]](javascript:alert(1))</>",
        ),
    ],
)
def test_hostile_markdown_is_text(stage: Stage, text: str, outline: str | None) -> None:
    assert drawn(stage.page, text) == (f"<p>{text}</>" if outline is None else outline)


def test_links_lead_out_of_the_page(stage: Stage) -> None:
    stage.reply = "[a](https://elsewhere.example/x?y=z) https://other.example"
    stage.ask("Links?")
    links = stage.page.locator(".prose a").evaluate_all(
        "(all) => all.map((a) => [a.target, a.rel, a.title === a.href])"
    )
    assert links == [["_blank", "noopener noreferrer nofollow", True]] * 2
    assert all(url.startswith(stage.url) for url in stage.asked)


LONG = {
    "letters": "a" * 1_000_000,
    "emphases in a line": "*a " * 300_000,
    "emphases in lines": "\n".join(["*a **b _c `d [e ~~f " * 50] * 100),
    "emphases in one another": "*a " * 1500 + "a* " * 1500,
    "quotes in a line": ">" * 100_000,
    "quotes in lines": "\n".join([">" * 2000 + " a"] * 50),
    "lists in lists": "\n".join(" " * (2 * n) + "- a" for n in range(600)),
    "lists in a line": "- " * 3000 + "\n" + "1. " * 3000,
    "empty lines": "\n" * 500_000,
    "empty lines after an item": "- a\n" + "\n" * 100_000 + "b",
    "links": "[" * 9000 + "\n\n" + "[a](" * 2000 + "\n\n" + "![a](b " * 1000,
    "backticks": "\n\n".join("`" * n for n in range(1, 130)) + "`a" * 4000,
    "columns": "|" * 9000 + "\n" + "|-" * 4500 + "\n" + "|" * 9000,
    "code": "```js\n" + '"\\' * 900 + "\n" + "/*" * 900 + "\n" + "`" * 999,
    "marks": "# " * 4000 + "#" * 900 + "x\n" + "```" + " " * 9000 + "`\n" + "- " * 4000 + "x",
    "addresses": "https://a" + ")" * 9000 + "x" + "." * 900,
}


@pytest.mark.parametrize("text", mostly_slow(LONG.values(), 4), ids=LONG)
def test_no_text_is_too_long_or_nested_too_deep(stage: Stage, text: str) -> None:
    """Quadratic work would end in the timeout of the browser's driver, and a deep tree in its crash."""
    cuts = [len(text) * n // 20 for n in range(1, 20)]
    deepest = """(text) => {
        const depth = (node) => 1 + Math.max(0, ...[...node.children].map(depth));
        return depth(document.querySelector("#probe"));
    }"""
    stage.page.evaluate(
        """async (given) => {
            const { Markdown } = await import("/site/markdown.js");
            const markdown = new Markdown();
            for (const cut of given[1]) markdown.update(given[0].slice(0, cut));
            markdown.update(given[0], true);
            markdown.element.id = "probe";
            document.querySelector("#probe")?.remove();
            document.getElementById("turns").append(markdown.element);
        }""",
        [text, cuts],
    )
    assert stage.page.evaluate(deepest, text) < 40
    fits = "(all) => all.scrollWidth <= all.clientWidth"
    assert stage.page.locator("#turns").evaluate(fits)
    stage.page.evaluate("document.querySelector('#probe').remove()")


PARTS = [
    *(
        "# Title",
        "Some *text* that `goes` on.",
        "two lines\nof **text**",
        "- item",
        "  - inner\n- next",
        "---",
    ),
    *(
        "1. one",
        "2. two",
        "> quote\n> *more*",
        "| a | b |\n|---|---|\n| c | d |",
        "    deep",
        "~~~",
        "```\nopen",
    ),
    '```py\nx = """a\nb"""\n```',
]


def test_a_stream_becomes_what_the_whole_text_does(stage: Stage) -> None:
    for seed in range(60):
        chosen = random.Random(seed)
        text = "".join(chosen.choice(PARTS) + chosen.choice(["\n", "\n\n", "\n\n\n"]) for _ in range(8))
        cuts = sorted(chosen.sample(range(len(text)), min(len(text), 30)))
        assert drawn(stage.page, text, cuts) == drawn(stage.page, text), (seed, text)


def test_only_the_last_block_is_drawn_again(stage: Stage) -> None:
    """The nodes of earlier blocks, and the complete lines of code, stay the same ones."""
    kept = """async (text) => {
        const { Markdown } = await import("/site/markdown.js");
        const markdown = new Markdown();
        const seen = new Map();
        let drawn = 0;
        const watch = () => {
            for (const node of markdown.element.querySelectorAll("p, span[class^=code-]")) {
                if (!seen.has(node)) drawn += 1;
                seen.set(node, true);
            }
        };
        for (let end = 1; end <= text.length; end += 1) {
            markdown.update(text.slice(0, end));
            watch();
        }
        return drawn;
    }"""
    paragraphs = "".join(f"some text {n}\n\n" for n in range(30))
    assert stage.page.evaluate(kept, paragraphs) < len(paragraphs) * 3  # else, some ten times as many
    code = "```py\n" + "x = 12345\n" * 60
    assert stage.page.evaluate(kept, code) < len(code)  # else, thirty times as many


@pytest.mark.parametrize(
    ("language", "code", "outline"),
    [
        ("python", 'def f(x): # a "b"', 'K:def f(x): C:# a "b"'),
        ("py", "a = '''b\n# c''' + 1", "a = S:'''b\nS:# c''' + N:1"),
        ("js", "let a = `b\n${c}` // d", "K:let a = S:`b\nS:${c}` C:// d"),
        ("C++", "#include <a> /* b\nint */ 0xFF", "K:#include <a> C:/* b\nC:int */ N:0xFF"),
        ("sh", 'echo "$#" # x', 'K:echo S:"$#" C:# x'),
        ("SQL", "select 'a' -- c", "K:select S:'a' C:-- c"),
        ("html", '<a href="b" /> <!-- c\n--> </p>', 'K:<a href=S:"b" K:/> C:<!-- c\nC:--> K:</pK:>'),
        ("rust", "fn f<'a>(x: &'a str)", "K:fn f<'a>(x: &'a str)"),
        ("json", '{"a": [1.5, true]}', '{S:"a": [N:1.5, K:true]}'),
        ("nonsense", "def 1 'a'", "def 1 'a'"),
        ("", "def 1 'a'", "def 1 'a'"),
    ],
)
def test_code_is_coloured(stage: Stage, language: str, code: str, outline: str) -> None:
    got = drawn(stage.page, f"```{language}\n{code}\n```")
    assert got == f"<figure><pre><code>{outline}\n</></></>"


def test_thoughts_are_shown_apart(stage: Stage) -> None:
    first: dict[str, Any] = {"choices": [{"index": 0, "delta": {"reasoning_content": "Let *me* see"}}]}
    stage.reply = [first, *whole("So **this**.")]
    page = stage.ask("Why?")
    answer = page.locator(".answer").last
    assert answer.locator(".thoughts").inner_text() == "Let *me* see"
    assert answer.locator(".prose strong").inner_text() == "this"


def test_one_click_shows_the_draft_view(stage: Stage) -> None:
    step = {
        "tokens": ["?", "So"],
        "parents": [-1, 0],
        "drafters": [None, "suffix"],
        "accepted": [1],
        "bonus": " *it*",
    }
    choice = {
        "index": 0,
        "delta": {"content": "So *it*"},
        "finish_reason": "stop",
        "speculation": {"steps": [step]},
    }
    stage.reply = [{"choices": [choice]}]
    page = stage.ask("Once")
    answer = page.locator(".answer").last
    assert answer.locator(".prose").inner_text() == "So it"
    toggle = answer.get_by_role("button", name="Draft view")
    assert toggle.get_attribute("aria-pressed") == "false"
    toggle.click()
    assert answer.locator(".token").all_text_contents() == ["So", "*it*"]
    assert answer.locator(".prose").count() == 0
    assert toggle.get_attribute("aria-pressed") == "true"
    stage.ask("Again")  # the choice stays
    again = page.locator(".answer").last
    assert again.locator(".token").count() == 2
    again.get_by_role("button", name="Draft view").click()
    assert again.locator(".prose").inner_text() == "So it"
    assert stage.said == []
