"""The format of tool calls is read off the chat template."""

from __future__ import annotations

import httpx
import pytest
from serving import Running
from tokenizers import Tokenizer as Backend

from soothsay import LLM, RequestError
from soothsay.server.harmony import HarmonyCalls
from soothsay.server.notation_readers import Gemma4Parser, Lfm2Parser
from soothsay.server.parameters import chosen_tools
from soothsay.server.protocol import ChatRequest
from soothsay.server.tagged_readers import GlmParser, MiniMaxParser, QwenCoderParser, SeedParser
from soothsay.server.tool_calls import ToolCallParser
from soothsay.server.tool_readers import (
    AprielParser,
    CommandParser,
    DeepSeekParser,
    GraniteParser,
    HermesParser,
    KimiParser,
    Llama3Parser,
    MistralParser,
)
from soothsay.server.tools import ToolFormat
from soothsay.tokenizer import Tokenizer

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
    assert (found.call_grammar([{"function": {"name": "f"}}]) is None) == (parser is None)
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
    assert form.call_grammar([TOOL] * 20) is not None
    with pytest.raises(RequestError, match="make it shorter"):
        form.call_grammar([TOOL] * 40)


def test_tools_that_are_too_large_to_force_are_refused(with_tools: Running) -> None:
    tools = [{**TOOL, "function": {**TOOL["function"], "name": f"f{i}"}} for i in range(40)]
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools, "tool_choice": "required"}
    reply = httpx.post(f"{with_tools.url}/v1/chat/completions", json=body, timeout=60)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, "invalid_value", "tools")
