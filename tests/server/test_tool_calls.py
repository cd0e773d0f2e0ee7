"""Tool calls are found in a text, however it is cut into pieces."""

from __future__ import annotations

import itertools

import pytest
from tool_cases import CALL, HERMES, LLAMA

from soothsay.server.tools import HermesParser, Llama3Parser, ToolCallParser, ToolFormat
from soothsay.tokenizer import Tokenizer


def read(reader: ToolCallParser, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    said = [reader.push(piece) for piece in pieces] + [reader.end()]
    calls = [(call.name, call.arguments) for part in said for call in part.calls]
    return "".join(part.content for part in said), calls


@pytest.mark.parametrize("text", HERMES, ids=range(len(HERMES)))
def test_hermes_calls_do_not_depend_on_pieces(text: str) -> None:
    assert read(HermesParser(), [text]) == HERMES[text]
    assert read(HermesParser(), list(text)) == HERMES[text]
    for cut in range(len(text)):
        assert read(HermesParser(), [text[:cut], text[cut:]]) == HERMES[text]


def test_hermes_holds_back_no_more_than_may_be_a_call() -> None:
    reader = HermesParser()
    assert reader.push("a <").content == "a"
    assert reader.push("b").content == " <b"
    assert reader.push(f"\n{CALL[:-1]}").calls == []
    assert len(reader.push(">").calls) == 1


@pytest.mark.parametrize("text", LLAMA, ids=range(len(LLAMA)))
def test_llama_calls_do_not_depend_on_pieces(text: str) -> None:
    assert read(Llama3Parser(), [text]) == LLAMA[text]
    for cut, other in itertools.combinations(range(len(text)), 2):
        assert read(Llama3Parser(), [text[:cut], text[cut:other], text[other:]]) == LLAMA[text]


@pytest.mark.parametrize(
    ("template", "known", "parser"),
    [
        ("{{ messages[0].content }}", False, None),
        ("{% for t in tools %}{{ t }}<tool_call>{% endfor %}", True, HermesParser),
        ('{% if tools %}{"name": function name, "parameters": ...}{% endif %}', True, Llama3Parser),
        ("{% for t in tools %}{{ t }}{% endfor %}", True, None),
        ("{{ raise_exception('no') }}", False, None),
    ],
)
def test_format_is_read_off_the_template(template: str, known: bool, parser: type | None, sibyl) -> None:
    found = ToolFormat.of(Tokenizer(sibyl.tokenizer.backend, template))
    assert found.supported is known
    assert parser is None or found.parser is parser
    assert (found.call_grammar([{"function": {"name": "f"}}]) is None) == (parser is None)
