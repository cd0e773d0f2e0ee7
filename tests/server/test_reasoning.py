"""Thoughts are split from the answer, however it is cut into pieces."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tool_cases import CALL

from soothsay import LLM, Tokenizer
from soothsay.server.reasoning import TAGS, ReasoningFormat, ReasoningParser
from soothsay.server.tool_calls import PlainParser
from soothsay.server.tool_readers import HermesParser

THINK = ReasoningFormat(*TAGS[0])

CLOSED: dict[str, tuple[str, str, int]] = {
    "Hello": ("", "Hello", 0),
    " \n Hello <think>": ("", " \n Hello <think>", 0),
    "<thi": ("", "<thi", 0),
    "<think>": ("", "", 0),
    "<think>\nI see. \n\n Yes.\n</think>\n\nFine. \n": ("I see. \n\n Yes.", "Fine. \n", 0),
    "  <think></think> A </think>": ("", "A </think>", 0),
    "<think> a <think> b </thin": ("a <think> b </thin", "", 0),
    f"<think>{CALL}</think>B {CALL}": (CALL, "B", 1),
    f"<think>a</think>\n{CALL}\n": ("a", "", 1),
}
"""Thoughts, text and the number of calls."""

OPENED: dict[str, tuple[str, str, int]] = {
    "I see.\n</think>\n\nFine.": ("I see.", "Fine.", 0),
    "\n</think>Fine.": ("", "Fine.", 0),
    "It goes on \n": ("It goes on", "", 0),
    "a</think>b</think>c": ("a", "b</think>c", 0),
    "": ("", "", 0),
}
"""The same where the prompt has opened the thoughts."""


def read(pieces: list[str], *, opened: bool) -> tuple[str, str, int]:
    reader = ReasoningParser(HermesParser(), THINK, opened=opened)
    parts = [reader.push(piece) for piece in pieces] + [reader.end()]
    thoughts, content = ("".join(getattr(part, name) for part in parts) for name in ("reasoning", "content"))
    return thoughts, content, sum(len(part.calls) for part in parts)


@pytest.mark.parametrize(
    ("text", "told", "opened"),
    [
        *(pytest.param(text, told, False, id=f"closed-{i}") for i, (text, told) in enumerate(CLOSED.items())),
        *(pytest.param(text, told, True, id=f"opened-{i}") for i, (text, told) in enumerate(OPENED.items())),
    ],
)
def test_thoughts_do_not_depend_on_pieces(text: str, told: tuple[str, str, int], opened: bool) -> None:
    assert read([text], opened=opened) == told
    assert read([*text], opened=opened) == told
    for first in range(len(text)):
        for second in range(first, len(text)):
            assert read([text[:first], text[first:second], text[second:]], opened=opened) == told


def test_thoughts_stream() -> None:
    reader = ReasoningParser(PlainParser(), THINK, opened=False)
    said = [
        reader.push(piece) for piece in ("<think>\nI", " see", ". \n", "</", "b</think>", "\n", "Yes", "!")
    ]
    assert [part.reasoning for part in said] == ["I", " see", ".", "", " \n</b", "", "", ""]
    assert [part.content for part in said] == ["", "", "", "", "", "", "Yes", "!"]


@pytest.mark.parametrize(
    ("template", "tags"),
    [
        ("{{ messages[0].content }}", None),
        ("{% if enable_thinking %}<think>\n{% else %}<think></think>{% endif %}", TAGS[0]),
        ("{{ messages[0].content.split('</think>')[-1] }}", TAGS[0]),
        ("[THINK]{{ messages[0].thinking }}[/THINK]", TAGS[1]),
        ("<seed:think>{{ messages[0].thinking }}</seed:think>", TAGS[2]),
    ],
)
def test_the_format_is_read_off_the_template(sibyl: LLM, template: str, tags: tuple[str, str] | None) -> None:
    assert sibyl.tokenizer is not None
    found = ReasoningFormat.of(Tokenizer(sibyl.tokenizer.backend, template))
    assert found == (None if tags is None else ReasoningFormat(*tags))
    assert ReasoningFormat.of(None) is None


@pytest.mark.parametrize("special", [True, False])
def test_tags_may_be_special_tokens(sibyl: LLM, special: bool) -> None:
    assert sibyl.tokenizer is not None
    backend = Backend.from_str(sibyl.tokenizer.backend.to_str())
    tag = AddedToken("[/THINK]", special=special)
    _ = backend.add_special_tokens([tag]) if special else backend.add_tokens([tag])
    found = ReasoningFormat.of(Tokenizer(backend, "[/THINK]"))
    assert found is not None
    assert found.hidden is special


@pytest.mark.parametrize(
    ("prompt", "continued", "is_open"),
    [
        ("<|user|>Hi<|assistant|>", "", False),
        ("<|assistant|><think>\n", "", True),
        ("<|assistant|><think>\n\n</think>\n\n", "", False),
        ("<|user|>What is <think>?<|assistant|>", "", False),
        ("<|assistant|><think>I am", "<think>I am", True),
        ("<|assistant|><think>I</think> am", "<think>I</think> am", False),
    ],
)
def test_whether_an_answer_begins_in_thoughts(prompt: str, continued: str, is_open: bool) -> None:
    assert THINK.is_open(prompt, continued) is is_open
