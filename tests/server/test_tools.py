"""The format of tool calls is read off the chat template."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tool_cases import (
    BARE_CALL,
    CALL,
    COMMAND_CALL,
    HARMONY_CALL,
    INVOKE,
    KIMI_SECTION,
    LFM_CALL,
    PAIRS,
    TOOLS,
    XML,
    wide,
)

from soothsay import LLM, RequestError
from soothsay.core.constraint import Grammars
from soothsay.core.grammar import Grammar
from soothsay.server.generation.request_bodies import ChatRequest
from soothsay.server.generation.request_parameters import chosen_tools
from soothsay.server.http.api_errors import ApiError
from soothsay.server.tools.harmony import HarmonyCalls
from soothsay.server.tools.notation_readers import (
    Gemma4Parser,
    GlmParser,
    Lfm2Parser,
    MiniMaxParser,
    QwenCoderParser,
    SeedParser,
)
from soothsay.server.tools.tool_calls import ParsedPart, ToolCallParser
from soothsay.server.tools.tool_format import LLAMA3, PARSERS, ChatGrammars, ToolFormat
from soothsay.server.tools.tool_readers import (
    AprielParser,
    CommandParser,
    DeepSeekParser,
    GraniteParser,
    HermesParser,
    KimiParser,
    Llama3Parser,
    MistralParser,
)
from soothsay.tokenizer import Tokenizer

Json = dict[str, Any]
FORMS = [ToolFormat.by(parser) for parser in PARSERS] + [LLAMA3]

WRITTEN = (
    "{{% for t in tools %}}{{{{ t }}}}{{% endfor %}}{{% for m in messages %}}"
    "{{% for c in m.tool_calls or () %}}{}{{% endfor %}}{{% endfor %}}"
)


@pytest.mark.parametrize(
    ("template", "known", "parser"),
    [
        ("{{ messages[0].content }}", False, None),
        ("{% for t in tools %}{{ t }}<tool_call>{% endfor %}", True, HermesParser),
        ("{{ tools[0].function.name }}<tool_call>", True, HermesParser),  # it fails without tools
        ('{% if tools %}{"name": function name, "parameters": ...}{% endif %}', True, Llama3Parser),
        ("{% if tools %}<tool_call><function=f><parameter=p>{% endif %}", True, QwenCoderParser),
        (
            "{% if tools %}<seed:tool_call><function=f><parameter=p></seed:tool_call>{% endif %}",
            True,
            SeedParser,
        ),
        ("{% if tools %}<tool_call>f<arg_key>{% endif %}", True, GlmParser),
        ("{% if tools %}<tool_calls>[]</tool_calls>{% endif %}", True, AprielParser),
        (WRITTEN.format("[TOOL_CALLS] {{ m.tool_calls }}"), True, MistralParser),
        (WRITTEN.format("[TOOL_CALLS]{{ c.function.name }}[ARGS]"), True, MistralParser),
        (WRITTEN.format("<|tool_call_argument_begin|>"), True, KimiParser),
        (WRITTEN.format("<|tool_call_argument_begin|>{{ raise_exception('no') }}"), True, KimiParser),
        (WRITTEN.format('<|tool_call>call:{{ c.function.name }}{<|"|>}<tool_call|>'), True, Gemma4Parser),
        (WRITTEN.format("<|tool_call_start|>[{{ c.function.name }}()]<|tool_call_end|>"), True, Lfm2Parser),
        ("{% if tools %}<|tool_list_start|>{% endif %}", True, Lfm2Parser),
        ("{% if tools %}respond only with <|tool_call|> and a list{% endif %}", True, GraniteParser),
        ("{% if tools %}<|tool|>{{ tools }}<|/tool|>{% endif %}", True, GraniteParser),
        ("{% if tools %}<|START_ACTION|>{% endif %}", True, CommandParser),
        ('{% if tools %}<minimax:tool_call><parameter name="x">{% endif %}', True, MiniMaxParser),
        (WRITTEN.format(" to={{ c.function.name }}<|channel|>commentary json"), True, HarmonyCalls),
        (WRITTEN.format("<\uff5ctool\u2581sep\uff5c>"), True, DeepSeekParser),
        ("{% for t in tools %}{{ t }}{% endfor %}", True, None),
        ("{{ raise_exception('no') }}", False, None),
    ],
)
def test_format_is_read_off_the_template(
    template: str, known: bool, parser: type[ToolCallParser] | None, sibyl: LLM
) -> None:
    assert sibyl.tokenizer is not None
    found = ToolFormat.of(Tokenizer(sibyl.tokenizer.backend, template))
    assert found.supported is known
    assert parser is None or type(found.parser([])) is parser
    one: list[dict[str, Any]] = [{"function": {"name": "f"}}]
    for calls in (found.forced_call(one), found.free_calls(one, {})):
        assert (calls is None) == (parser is None)
    assert not found.hidden


def test_a_tag_may_be_a_special_token(sibyl: LLM) -> None:
    assert sibyl.tokenizer is not None
    backend = Backend.from_str(sibyl.tokenizer.backend.to_str())
    backend.add_special_tokens(["[TOOL_CALLS]"])
    template = WRITTEN.format("[TOOL_CALLS] {{ m.tool_calls }}")
    assert ToolFormat.of(Tokenizer(backend, template)).hidden
    assert not ToolFormat.of(Tokenizer(backend, "{% if tools %}<tool_call>{% endif %}")).hidden


TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "description": "x" * 9000}},
}


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_a_tool_that_is_allowed_many_times_is_one_tool(mode: str) -> None:
    named = [{"type": "function", "function": {"name": "f"}}] * 4000
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
    body = ChatRequest.model_validate(
        {"messages": [{"role": "user", "content": "Hi"}], "tools": [TOOL], "tool_choice": choice}
    )
    assert chosen_tools(body) == ([TOOL], mode == "required")


def test_a_grammar_of_calls_is_written_up_to_the_limit() -> None:
    form = ToolFormat(supported=True, frame=("", ""))
    assert form.forced_call([TOOL] * 20) is not None
    with pytest.raises(RequestError, match="make it shorter"):
        form.forced_call([TOOL] * 40)


def test_tools_that_are_too_large_to_force_are_refused() -> None:
    tools = [{**TOOL, "function": {**TOOL["function"], "name": f"f{i}"}} for i in range(40)]
    grammars = ChatGrammars(ToolFormat(supported=True, frame=("", "")), None, {}, "", "")
    with pytest.raises(ApiError, match="make it shorter") as refused:
        grammars.forced_call(tools)
    assert (refused.value.status, refused.value.param) == (400, "tools")


def compiled(llm: LLM, grammar: Grammar, special: Sequence[str] = ()) -> Callable[[str], bool]:
    """Whether a grammar accepts a text, for a model with some more special tokens."""
    tokenizer = with_special(llm, special)
    matcher = Grammars(tokenizer, len(tokenizer)).fresh(grammar)
    assert not matcher.is_error(), matcher.get_error()

    def accepts(text: str) -> bool:
        one, ids = matcher.deep_copy(), tokenizer.encode(text, special=False)
        return bool(one.try_consume_tokens(ids) == len(ids) and one.is_accepting())

    return accepts


def with_special(llm: LLM, special: Sequence[str]) -> Tokenizer:
    assert llm.tokenizer is not None
    backend = Backend.from_str(llm.tokenizer.backend.to_str())
    backend.add_special_tokens(list(special))
    return Tokenizer(backend, "")


ANSWER = Grammar.json_schema(
    {"type": "object", "properties": {"answer": {"type": "string"}}, "additionalProperties": False}
)
JSON = '{"answer": "x"}'
FREE = [
    (HermesParser, CALL, True),
    (HermesParser, f"{CALL}\n{CALL}", True),
    (HermesParser, BARE_CALL, True),
    (HermesParser, f"{BARE_CALL}\n{BARE_CALL}", False),
    (HermesParser, '```json\n{\n  "name": "f",\n  "arguments": {}\n}\n```', True),
    (HermesParser, '{"name": "h", "arguments": {}}', False),  # no such tool
    (HermesParser, f"Wait. {CALL}", False),
    (Llama3Parser, '{"name": "f", "parameters": {"x": 1}}', True),
    (Llama3Parser, '<|python_tag|>{"name": "f", "parameters": {"x": 1}}', True),
    (QwenCoderParser, XML, True),
    (GlmParser, PAIRS.strip(), True),
    (MistralParser, '[TOOL_CALLS]g[ARGS]{}[TOOL_CALLS]f[ARGS]{"x": 1}', True),
    (KimiParser, KIMI_SECTION, True),
    (DeepSeekParser, wide("<|tool_calls_begin|><|tool_call_begin|>g<|tool_sep|>{}<|tool_call_end|>"), True),
    (Gemma4Parser, '<|tool_call>call:f{x:<|"|>a < b<|"|>}<tool_call|>', True),
    (Lfm2Parser, LFM_CALL, True),
    (GraniteParser, '<|tool_call|>[{"name": "g", "arguments": {}}]', True),
    (CommandParser, COMMAND_CALL, True),
    (MiniMaxParser, INVOKE, True),
    (HarmonyCalls, HARMONY_CALL, True),
    (HarmonyCalls, " to=functions.f<|channel|>commentary json<|message|>{}", True),
]
"""Answers with calls, as models write them, and whether they may come in place of a text with a schema."""


@pytest.mark.parametrize(("parser", "text", "may_come"), FREE)
@pytest.mark.parametrize("hidden", [False, True])
def test_calls_may_come_where_the_text_has_a_schema(
    sibyl: LLM, parser: type[ToolCallParser], text: str, may_come: bool, hidden: bool
) -> None:
    special = sorted({*re.findall(r"<\|?[a-z_A-Z]+\|>|\[TOOL_CALLS\]", text)}) if hidden else []
    form = next(form for form in FORMS if form.parser is parser)
    calls = form.free_calls(TOOLS, with_special(sibyl, special).special_ids)
    assert calls is not None
    accepts = compiled(sibyl, Grammar.joined("start: @text | @calls", text=ANSWER, calls=calls), special)
    assert accepts(text) is may_come
    assert accepts(JSON)
    assert not accepts("Hello")


def test_a_schema_of_a_tool_that_cannot_be_enforced_is_not_refused(
    sibyl: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    odd: list[Json] = [
        {"type": "object", "properties": {"n": {"type": "array", "uniqueItems": True}}},
        {"type": "object", "properties": {"n": {"type": "string", "format": "phone"}}},
        {"type": "object", "properties": {"n": {"not": {"type": "string"}}}},
        {"type": "object", "properties": {"n": {"type": "string", "pattern": "^(?!a)"}}},
        {"type": "object", "properties": {"n": {"$ref": "https://example.com/schema"}}},
        {"type": "object", "properties": {"n": {"type": "date"}}},
        {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}},
    ]
    form = ToolFormat(supported=True, frame=("", ""))
    for schema in odd:
        caplog.clear()
        call = form.forced_call([{"type": "function", "function": {"name": "f", "parameters": schema}}])
        assert call is not None
        assert compiled(sibyl, call)('{"name": "f", "arguments": {}}')
        assert [record.message for record in caplog.records] == ["a part of a schema is not enforced"]


def test_json_that_names_no_tool_is_the_answer() -> None:
    text = '{"name": "Bob", "age": 3}'
    parser = Llama3Parser(TOOLS)
    assert (parser.push(text).content, parser.end()) == ("", ParsedPart(text))
