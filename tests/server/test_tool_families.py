"""Tool calls and thoughts of families of models, through the official clients: there and back again.

The bundled model does not know these formats. A grammar with one choice makes it say the text of a family.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import engines
import pytest
from ollama import Client
from openai import OpenAI
from serving import Running, serving
from tool_cases import (
    ARGUMENTS,
    CALL,
    COMMAND_CALL,
    HARMONY_CALL,
    INVOKE,
    KIMI_SECTION,
    LFM_CALL,
    LFM_CALLS,
    PAIRS,
    PAIRS_ARGUMENTS,
    TOOLS,
    XML,
    XML_ARGUMENTS,
    wide,
)

from soothsay import LLM, SamplingParams, Tokenizer
from soothsay.server.tools.reasoning import ReasoningFormat
from soothsay.server.tools.tool_format import ChatGrammars, ToolFormat

QUESTION: Any = {"role": "user", "content": "Why?"}
OBJECT = {"type": "json_object"}
THOUGHTS = "<think>\nLet me see.\n</think>\n\n"

TEMPLATE = """{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.reasoning_content %}\
<think>{{ m.reasoning_content }}</think>{% endif %}{% for call in m.tool_calls or () %}\
{{ call.id }} {{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}{% endfor %}\
{{ tools | tojson if tools else '' }}\
{% if add_generation_prompt %}<|assistant|>{% if enable_thinking %}<think>\n{% endif %}{% endif %}"""


@dataclass(frozen=True)
class Family:
    """A family: what its templates have, an answer with calls, and these calls."""

    sign: str
    answer: str
    calls: tuple[tuple[str, str], ...]


FAMILIES = {
    "hermes": Family("<tool_call>", f"Wait. {CALL}", (("f", '{"x": "a < b"}'),)),
    "qwen coder": Family("<tool_call><parameter=", f"Wait.\n\n{XML}", (("f", XML_ARGUMENTS),)),
    "glm": Family("<tool_call><arg_key>", f"Wait.{PAIRS}", (("f", '{"x": "a < b", "n": 7}'),)),
    "mistral": Family("[TOOL_CALLS]", 'Wait.[TOOL_CALLS] [{"name": "g", "arguments": {}}]', (("g", "{}"),)),
    "mistral, newer": Family(
        "[TOOL_CALLS]",
        'Wait.[TOOL_CALLS]g[ARGS]{}[TOOL_CALLS]f[ARGS]{"x": 1}',
        (("g", "{}"), ("f", '{"x": 1}')),
    ),
    "kimi": Family(
        "<|tool_call_argument_begin|>", f"Wait.{KIMI_SECTION}", (("f", '{"x": "a"}'), ("g", "{}"))
    ),
    "deepseek": Family(
        wide("<|tool_sep|>"),
        wide(
            "Wait.<|tool_calls_begin|><|tool_call_begin|>g<|tool_sep|>{}<|tool_call_end|><|tool_calls_end|>"
        ),
        (("g", "{}"),),
    ),
    "gemma 4": Family(
        "<|tool_call>", 'Wait.<|tool_call>call:f{x:<|"|>a < b<|"|>}<tool_call|>', (("f", ARGUMENTS),)
    ),
    "lfm2": Family("<|tool_call_start|>", f"Wait.{LFM_CALL}", tuple(LFM_CALLS)),
    "granite": Family("<|tool_call|>", 'Wait.<|tool_call|>[{"name": "g", "arguments": {}}]', (("g", "{}"),)),
    "command": Family("<|START_ACTION|>", f"Wait.{COMMAND_CALL}", (("f", ARGUMENTS), ("g", "{}"))),
    "minimax": Family("<minimax:tool_call>", f"Wait.\n{INVOKE}", (("f", PAIRS_ARGUMENTS), ("g", "{}"))),
    "gpt-oss": Family("<|channel|>commentary", f"Wait.{HARMONY_CALL}", (("f", ARGUMENTS),)),
}


def tokenizer(llm: LLM, template: str) -> Tokenizer:
    assert llm.tokenizer is not None
    return Tokenizer(llm.tokenizer.backend, template, llm.tokenizer.special)


@pytest.fixture(scope="module")
def server(sibyl: LLM) -> Iterator[Running]:
    with serving(partial(engines.sibyl, tokenizer=tokenizer(sibyl, TEMPLATE))) as one:
        yield one


@pytest.fixture(scope="module")
def openai(server: Running) -> Iterator[OpenAI]:
    with server.client() as one:
        yield one


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, server: Running, sibyl: LLM) -> Family:
    """A family, which the server has detected from a template."""
    found = FAMILIES[request.param]
    shown = f"{{% if tools %}}{found.sign}{{% endif %}}"
    server.server.service.tools = ToolFormat.of(tokenizer(sibyl, shown))
    return found


@pytest.fixture(autouse=True)
def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a grammar of a request say all of the answer: its thoughts and calls too."""
    monkeypatch.setattr(ChatGrammars, "answer", lambda self, text, tools: text)


def saying(text: str, **more: Any) -> Any:
    """A request for the answer `text`."""
    own = {"model": "sibyl", "messages": [QUESTION], "temperature": 0, "max_tokens": 900}
    return {**own, "extra_body": {"structured_outputs": {"choice": [text]}}, **more}


def told(calls: Any) -> tuple[tuple[str, str], ...]:
    return tuple((call.function.name, call.function.arguments) for call in calls or ())


def test_calls_go_there_and_back(openai: OpenAI, family: Family, sibyl: LLM) -> None:
    asked = saying(family.answer, tools=TOOLS)
    choice = openai.chat.completions.create(**asked).choices[0]
    message = choice.message
    assert (message.content, told(message.tool_calls)) == ("Wait.", family.calls)
    assert choice.finish_reason == "tool_calls"
    chunks = [chunk.choices[0].delta for chunk in openai.chat.completions.create(**asked, stream=True)]
    streamed = [call for delta in chunks for call in delta.tool_calls or ()]
    assert told(streamed) == family.calls
    assert [call.index for call in streamed] == [*range(len(streamed))]
    assert "".join(delta.content or "" for delta in chunks) == "Wait."

    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "done"} for call in message.tool_calls or ()
    ]
    history = [QUESTION, message.model_dump(exclude_none=True), *results]
    again = openai.chat.completions.create(**{**saying("Done."), "messages": history})
    assert again.choices[0].message.content == "Done."
    shown = "".join(
        f"{call.id} {call.function.name} {call.function.arguments}" for call in message.tool_calls or ()
    )
    prompt = f"<|user|>Why?<|assistant|>Wait.{shown}{'<|tool|>done' * len(results)}<|assistant|>"
    assert sibyl.tokenizer is not None
    assert again.usage is not None
    assert again.usage.prompt_tokens == len(sibyl.tokenizer.encode(prompt, special=False))


def test_a_forced_call(
    server: Running, openai: OpenAI, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.server.service, "reasoning", None)
    tool = {"type": "function", "function": {"name": "only", "parameters": {"enum": [{"n": 1}]}}}
    said = openai.chat.completions.create(
        model="sibyl", messages=[QUESTION], tools=[tool], tool_choice="required", seed=0, max_tokens=120
    )
    assert told(said.choices[0].message.tool_calls) == (("only", '{"n": 1}'),)


@pytest.mark.parametrize("hidden", [True, False])
def test_special_tokens_are_text_where_calls_need_them(
    server: Running, openai: OpenAI, sibyl: LLM, hidden: bool
) -> None:
    form = ToolFormat.of(tokenizer(sibyl, "{% if tools %}<tool_call>{% endif %}"))
    server.server.service.tools = replace(form, hidden=hidden)
    assert sibyl.tokenizer is not None
    only = {"allowed_token_ids": [sibyl.tokenizer.backend.token_to_id("<|user|>")]}
    asked: Any = {"model": "sibyl", "messages": [QUESTION], "max_tokens": 2, "extra_body": only}
    with_tools = openai.chat.completions.create(**asked, tools=TOOLS).choices[0].message
    assert with_tools.content == ("<|user|><|user|>" if hidden else "")
    assert openai.chat.completions.create(**asked).choices[0].message.content == ""


class TestThoughts:
    def test_they_are_a_field(self, openai: OpenAI) -> None:
        asked = saying(f"{THOUGHTS}Because.")
        message = openai.chat.completions.create(**asked).choices[0].message
        assert (message.content, message.model_extra["reasoning_content"]) == ("Because.", "Let me see.")
        long = " ".join(["Let me see."] * 40)  # short steps share a chunk
        asked = saying(f"<think>\n{long}\n</think>\n\nBecause.")
        deltas = [chunk.choices[0].delta for chunk in openai.chat.completions.create(**asked, stream=True)]
        streamed = [(delta.model_extra or {}).get("reasoning_content", "") for delta in deltas]
        assert "".join(streamed) == long
        assert len([*filter(None, streamed)]) > 1
        assert "".join(delta.content or "" for delta in deltas) == "Because."

    def test_a_request_can_leave_them_in_the_text(self, openai: OpenAI) -> None:
        asked = saying(f"{THOUGHTS}Because.")
        asked["extra_body"]["separate_reasoning"] = False
        message = openai.chat.completions.create(**asked).choices[0].message
        assert message.content == f"{THOUGHTS}Because."
        assert "reasoning_content" not in (message.model_extra or {})

    def test_they_come_before_calls(self, server: Running, openai: OpenAI, sibyl: LLM) -> None:
        server.server.service.tools = ToolFormat.of(tokenizer(sibyl, "{% if tools %}<tool_call>{% endif %}"))
        message = openai.chat.completions.create(**saying(THOUGHTS + CALL, tools=TOOLS)).choices[0].message
        assert message.content is None
        assert message.model_extra["reasoning_content"] == "Let me see."
        assert told(message.tool_calls) == (("f", '{"x": "a < b"}'),)

    @pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
    def test_they_go_back_into_the_template(self, openai: OpenAI, sibyl: LLM, field: str) -> None:
        history = [QUESTION, {"role": "assistant", "content": "Yes.", field: "Hm."}, QUESTION]
        said = openai.chat.completions.create(**{**saying("Done."), "messages": history})
        prompt = "<|user|>Why?<|assistant|>Yes.<think>Hm.</think><|user|>Why?<|assistant|>"
        if field == "thinking":  # which only Ollama's API has
            prompt = prompt.replace("<think>Hm.</think>", "")
        assert sibyl.tokenizer is not None
        assert said.usage is not None
        assert said.usage.prompt_tokens == len(sibyl.tokenizer.encode(prompt, special=False))

    def test_a_prompt_that_opens_them(
        self, openai: OpenAI, sibyl: LLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: Any = {"model": "sibyl", "messages": [QUESTION], "temperature": 0, "max_tokens": 12}
        thinking = {"chat_template_kwargs": {"enable_thinking": True}}
        message = openai.chat.completions.create(**asked, extra_body=thinking).choices[0].message
        ids = tokenizer(sibyl, TEMPLATE).encode_chat([QUESTION], enable_thinking=True)
        meant = sibyl.generate(ids, SamplingParams(temperature=0, max_tokens=12)).text
        assert (message.content, message.model_extra["reasoning_content"]) == ("", meant.strip())
        monkeypatch.undo()
        for grammar in ({"structured_outputs": {"choice": ["yes"]}}, {"response_format": OBJECT}):
            said = openai.chat.completions.create(**asked, extra_body={**thinking, **grammar})
            assert said.choices[0].message.model_extra == message.model_extra  # grammars begin after them
        free, forced = (
            openai.chat.completions.create(**asked, tools=TOOLS, tool_choice=choice, extra_body=thinking)
            for choice in ("auto", "required")
        )
        assert forced.choices[0].message.model_extra == free.choices[0].message.model_extra

    def test_channels_of_gpt_oss(self, server: Running, openai: OpenAI, sibyl: LLM) -> None:
        template = "{% if tools %}<|channel|>commentary{% endif %}{{ m }}"
        service, form = server.server.service, ReasoningFormat.of(tokenizer(sibyl, template))
        before, service.reasoning = service.reasoning, form
        service.tools = ToolFormat.of(tokenizer(sibyl, template))
        thought = "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant"
        try:
            said = openai.chat.completions.create(**saying(f"{thought}{HARMONY_CALL}", tools=TOOLS))
            answer = f"{thought}<|channel|>final<|message|>Because."
            plain = [*openai.chat.completions.create(**saying(answer), stream=True)]
        finally:
            service.reasoning = before
        message = said.choices[0].message
        assert (message.content, told(message.tool_calls)) == (None, (("f", ARGUMENTS),))
        assert message.model_extra["reasoning_content"] == "Let me see."
        deltas = [chunk.choices[0].delta for chunk in plain]
        assert "".join(delta.content or "" for delta in deltas) == "Because."
        streamed = [(delta.model_extra or {}).get("reasoning_content", "") for delta in deltas]
        assert "".join(streamed) == "Let me see."

    def test_responses_have_an_item_of_them(self, openai: OpenAI, sibyl: LLM) -> None:
        asked: Any = {"model": "sibyl", "input": "Why?", "temperature": 0, "max_output_tokens": 100}
        asked["extra_body"] = saying(f"{THOUGHTS}Because.")["extra_body"]
        said = openai.responses.create(**asked)
        thoughts, message = said.output
        assert (thoughts.type, thoughts.content[0].text) == ("reasoning", "Let me see.")
        assert (message.type, said.output_text) == ("message", "Because.")
        events = [*openai.responses.create(**asked, stream=True)]
        for kind, text in (("reasoning_text", "Let me see."), ("output_text", "Because.")):
            deltas = [event for event in events if event.type == f"response.{kind}.delta"]
            assert "".join(event.delta for event in deltas) == text
            assert {event.output_index for event in deltas} == {int(kind == "output_text")}
        done = [event.item.id for event in events if event.type == "response.output_item.done"]
        assert done == [item.id for item in events[-1].response.output]
        history = [{"role": "user", "content": "Why?"}, *said.output, {"role": "user", "content": "Why?"}]
        again = openai.responses.create(**{**asked, "input": history})
        prompt = "<|user|>Why?<|assistant|>Because.<think>Let me see.</think><|user|>Why?<|assistant|>"
        assert sibyl.tokenizer is not None
        assert again.usage.input_tokens == len(sibyl.tokenizer.encode(prompt, special=False))

    def test_ollama(self, server: Running, sibyl: LLM) -> None:
        form = {"type": "string", "const": "x"}
        few = {"temperature": 0, "num_predict": 12}
        with Client(server.url) as client:
            assert "thinking" in client.show("sibyl").capabilities
            said = client.chat("sibyl", [QUESTION], think=True, options=few)
            generated = client.generate("sibyl", "Why?", think=True, options=few)
            plain = client.chat("sibyl", [QUESTION], think=False, options=few)
            assert client.chat("sibyl", [QUESTION], think=False, format=form).message.content == '"x"'
            back = [QUESTION, {"role": "assistant", "content": "Yes.", "thinking": "Hm."}, QUESTION]
            assert client.chat("sibyl", back, options=few).prompt_eval_count == len(
                tokenizer(sibyl, TEMPLATE).encode_chat([QUESTION, {**back[1], "reasoning": "Hm."}, QUESTION])
            )
        params = SamplingParams(temperature=0, max_tokens=12)
        ids = tokenizer(sibyl, TEMPLATE).encode_chat([QUESTION], enable_thinking=True)
        assert said.message.thinking == generated.thinking == sibyl.generate(ids, params).text.strip()
        assert (said.message.content, generated.response) == ("", "")
        ids = tokenizer(sibyl, TEMPLATE).encode_chat([QUESTION])
        assert plain.message.content == sibyl.generate(ids, params).text

    def test_they_stay_in_the_text_if_the_server_shall_not_split(self, sibyl: LLM) -> None:
        factory = partial(engines.sibyl, tokenizer=tokenizer(sibyl, TEMPLATE))
        with serving(factory, split_reasoning=False) as one, one.client() as client:
            text = f"{THOUGHTS}Because."
            message = client.chat.completions.create(**saying(text)).choices[0].message
            assert message.content == text
            assert "reasoning_content" not in (message.model_extra or {})
