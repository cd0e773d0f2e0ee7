"""Calls of tools in what a model says: the same, however the text is cut into pieces."""

from __future__ import annotations

import itertools

import pytest

from soothsay.server.tools import Hermes, Llama3, Reader, ToolFormat
from soothsay.tokenizer import Tokenizer

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "a < b"}}\n</tool_call>'
ARGUMENTS = '{"x": "a < b"}'


def read(reader: Reader, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    said = [reader.push(piece) for piece in pieces] + [reader.end()]
    calls = [(call.name, call.arguments) for part in said for call in part.calls]
    return "".join(part.content for part in said), calls


HERMES = {
    "Hello": ("Hello", []),
    "a < b <tool": ("a < b <tool", []),
    CALL: ("", [("f", ARGUMENTS)]),
    f"Let me see.\n\n{CALL}\n{CALL}": ("Let me see.", [("f", ARGUMENTS)] * 2),
    f"A {CALL} \n B ": ("AB ", [("f", ARGUMENTS)]),
    CALL.removesuffix("</tool_call>"): ("", [("f", ARGUMENTS)]),  # ended instead of closing
    "<tool_call>{not json}</tool_call> and": ("<tool_call>{not json}</tool_call> and", []),
    '<tool_call>{"name": 3}</tool_call>': ('<tool_call>{"name": 3}</tool_call>', []),
    '<tool_call>{"name": "g"': ('<tool_call>{"name": "g"', []),  # cut by max_tokens
    f"<tool_call>[1]</tool_call>{CALL}": ("<tool_call>[1]</tool_call>", [("f", ARGUMENTS)]),
}


@pytest.mark.parametrize("text", HERMES, ids=range(len(HERMES)))
def test_hermes_calls_do_not_depend_on_pieces(text: str) -> None:
    assert read(Hermes(), [text]) == HERMES[text]
    assert read(Hermes(), list(text)) == HERMES[text]
    for cut in range(len(text)):
        assert read(Hermes(), [text[:cut], text[cut:]]) == HERMES[text]


def test_hermes_holds_back_no_more_than_may_be_a_call() -> None:
    reader = Hermes()
    assert reader.push("a <").content == "a"
    assert reader.push("b").content == " <b"
    assert reader.push(f"\n{CALL[:-1]}").calls == []
    assert len(reader.push(">").calls) == 1


LLAMA = {
    "Hello {you}": ("Hello {you}", []),
    '{"name": "f", "parameters": {"x": 1}}': ("", [("f", '{"x": 1}')]),
    '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"y": "};{"}}': (
        "",
        [("f", "{}"), ("g", '{"y": "};{"}')],
    ),
    '{"name": "f", "parameters": {}} and so': ('{"name": "f", "parameters": {}} and so', []),
    '{"name": "f"; }': ('{"name": "f"; }', []),
    '{"answer": 42}': ('{"answer": 42}', []),
}


@pytest.mark.parametrize("text", LLAMA, ids=range(len(LLAMA)))
def test_llama_calls_do_not_depend_on_pieces(text: str) -> None:
    assert read(Llama3(), [text]) == LLAMA[text]
    for cut, other in itertools.combinations(range(len(text)), 2):
        assert read(Llama3(), [text[:cut], text[cut:other], text[other:]]) == LLAMA[text]


@pytest.mark.parametrize(
    ("template", "known", "reader"),
    [
        ("{{ messages[0].content }}", False, None),
        ("{% for t in tools %}{{ t }}<tool_call>{% endfor %}", True, Hermes),
        ('{% if tools %}{"name": function name, "parameters": ...}{% endif %}', True, Llama3),
        ("{% for t in tools %}{{ t }}{% endfor %}", True, None),
        ("{{ raise_exception('no') }}", False, None),
    ],
)
def test_format_is_read_off_the_template(template: str, known: bool, reader: type | None, sibyl) -> None:
    found = ToolFormat.of(Tokenizer(sibyl.tokenizer.backend, template))
    assert found.known is known
    assert reader is None or found.reader is reader
    assert (found.forced([{"function": {"name": "f"}}]) is None) == (reader is None)
