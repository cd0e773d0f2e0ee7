"""Anthropic's Messages API: its forms of messages, events and errors, and the same answers as from chats."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from engines import sibyl as sibyl_engine
from openai import OpenAI
from serving import Running, serving
from test_chat_streams import CASES, cuts, said_in
from test_responses import Replayed
from tool_cases import Told

from soothsay import LLM, FinishReason, SamplingParams
from soothsay.server.access.api_keys import KeyRing, add_key
from soothsay.server.apis.anthropic.anthropic_bodies import AnthropicRequest
from soothsay.server.apis.anthropic.anthropic_routes import AnthropicFormat
from soothsay.server.generation.reply_format import TokenTexts
from soothsay.server.http.api_errors import ApiError
from soothsay.server.http.bodies import Json
from soothsay.server.tools.reasoning import ReasoningFormat
from soothsay.server.tools.tool_calls import PlainParser, ToolCallParser

QUESTION = [{"role": "user", "content": "Can you explain why the sky is blue?"}]
ASKED: Json = {"model": "sibyl", "messages": QUESTION, "max_tokens": 12, "seed": 5}
SCHEMA: Json = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2]}},
    "required": ["n"],
    "additionalProperties": False,
}
CALL: Json = {"type": "tool_use", "id": "a", "name": "first", "input": {"n": 1}}
RESULT: Json = {"type": "tool_result", "tool_use_id": "a"}
TOOLS: list[Json] = [{"name": name, "input_schema": SCHEMA} for name in ("first", "second")]


def ask(running: Running, path: str = "", **fields: Any) -> Json:
    reply = httpx.post(f"{running.url}/v1/messages{path}", json={**ASKED, **fields}, timeout=60)
    assert reply.status_code == 200, reply.text
    answer: Json = reply.json()
    return answer


def events(running: Running, **fields: Any) -> list[Json]:
    body = {**ASKED, **fields, "stream": True}
    reply = httpx.post(f"{running.url}/v1/messages", json=body, timeout=60)
    assert reply.headers["content-type"].startswith("text/event-stream")
    found = []
    for part in reply.text.strip().split("\n\n"):
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def built(told: Sequence[Json]) -> Json:
    """The message that events build up, as clients do it."""
    first, *rest = told
    message: Json = first["message"]
    assert message["content"] == []
    inputs: dict[int, str] = {}
    open_block = None
    for event in rest:
        match event["type"]:
            case "content_block_start":
                assert (open_block, event["index"]) == (None, len(message["content"]))
                open_block = event["index"]
                message["content"].append(event["content_block"])
            case "content_block_delta":
                assert event["index"] == open_block
                block, delta = message["content"][open_block], event["delta"]
                match delta["type"]:
                    case "text_delta":
                        block["text"] += delta["text"]
                    case "thinking_delta":
                        block["thinking"] += delta["thinking"]
                    case "input_json_delta":
                        inputs[open_block] = inputs.get(open_block, "") + delta["partial_json"]
            case "content_block_stop":
                assert event["index"] == open_block
                open_block = None
            case "message_delta":
                assert open_block is None
                message |= {**event["delta"], "usage": event["usage"]}
    assert [event["type"] for event in told[-2:]] == ["message_delta", "message_stop"]
    for index, text in inputs.items():
        assert message["content"][index]["input"] == {}
        message["content"][index]["input"] = json.loads(text)
    return message


def said(message: Json) -> tuple[Any, ...]:
    """What a message says, without what differs between two runs."""
    blocks = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return blocks, message["stop_reason"], message["stop_sequence"], message["usage"]["output_tokens"]


def test_a_message_says_what_the_engine_says(running: Running, sibyl: LLM) -> None:
    system = [
        {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in ("Be", "brief")
    ]
    told = ask(running, system=system, temperature=0)
    messages = [{"role": "system", "content": "Be\nbrief"}, *QUESTION]
    meant = sibyl.generate(sibyl.chat_prompt(messages), SamplingParams(temperature=0, max_tokens=12))
    assert told["content"] == [{"type": "text", "text": meant.text}]
    assert (told["type"], told["role"], told["model"]) == ("message", "assistant", "sibyl")
    assert (told["stop_reason"], told["stop_sequence"]) == ("max_tokens", None)
    usage = told["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(meant.prompt_token_ids)
    assert (usage["output_tokens"], usage["cache_creation_input_tokens"]) == (12, 0)
    again = ask(running, system=system, temperature=0)
    assert again["usage"]["cache_read_input_tokens"] > 0
    assert again["id"] != told["id"]


def test_a_stream_adds_up_to_the_message(running: Running) -> None:
    told = events(running)
    kinds = [event["type"] for event in told]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert (told[0]["message"]["stop_reason"], told[0]["message"]["usage"]["output_tokens"]) == (None, 0)
    assert said(built(told)) == said(ask(running))


def test_a_stop_sequence_is_named(running: Running) -> None:
    text = ask(running, temperature=0, max_tokens=40)["content"][0]["text"]
    first, second = text[4:7], text[10:14]
    stopped = ask(running, temperature=0, max_tokens=40, stop_sequences=["\x00", second, first])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", first)
    assert stopped["content"][0]["text"] == text[: text.index(first)]
    ended = ask(running, messages=[{"role": "user", "content": "Hi"}], temperature=0, max_tokens=900)
    assert (ended["stop_reason"], ended["stop_sequence"]) == ("end_turn", None)


def test_a_full_context_is_not_the_limit_of_the_request(running: Running) -> None:
    room = running.server.model.max_context
    words = [{"role": "user", "content": "word " * (room - 40)}]
    fields: Json = {"messages": words, "temperature": 0, "ignore_eos": True}
    full = ask(running, **fields, max_tokens=room)
    assert full["stop_reason"] == "model_context_window_exceeded"
    exact = ask(running, **fields, max_tokens=full["usage"]["output_tokens"])
    assert (exact["content"], exact["stop_reason"]) == (full["content"], "max_tokens")
    assert ask(running, **fields, max_tokens=2)["stop_reason"] == "max_tokens"


def test_an_answer_goes_on_where_the_last_message_ends(running: Running, client: OpenAI) -> None:
    begun = [*QUESTION, {"role": "assistant", "content": [{"type": "text", "text": "The sky is"}]}]
    told = ask(running, messages=begun, temperature=0)
    meant = client.chat.completions.create(
        model="sibyl",
        messages=[*QUESTION, {"role": "assistant", "content": "The sky is"}],  # type: ignore[arg-type]
        temperature=0,
        max_tokens=12,
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )
    assert told["content"][0]["text"] == meant.choices[0].message.content
    usage = told["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == meant.usage.prompt_tokens


def test_requests_of_claude_code_share_their_prefix(running: Running) -> None:
    """The first block of its system message has a hash of the request."""

    def cached(number: int, question: str) -> int:
        billing = f"x-anthropic-billing-header: cc_version=2.1.40.abc; cc_entrypoint=cli; cch={number:05x};"
        rules = "\n".join(f"Rule {i}: keep line {i} short." for i in range(30))
        blocks = [{"type": "text", "text": text} for text in (billing, "You are a coding agent.", rules)]
        usage = ask(running, system=blocks, messages=[{"role": "user", "content": question}], max_tokens=1)[
            "usage"
        ]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] > 200
        return int(usage["cache_read_input_tokens"])

    cached(1, "Hello!")
    assert cached(2, "And now?") > 200


def test_nothing_is_said_for_no_tokens(running: Running) -> None:
    """Clients fill the prefix cache in this way."""
    told = ask(running, max_tokens=0)
    assert (told["content"], told["stop_reason"], told["usage"]["output_tokens"]) == ([], "max_tokens", 0)


def test_a_schema_is_followed(running: Running) -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    told = ask(running, output_config={"format": form, "effort": "high"}, max_tokens=40)
    assert json.loads(told["content"][0]["text"])["n"] in (1, 2)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "second"}], ids=str)
def test_a_forced_call(with_tools: Running, choice: Json) -> None:
    told = ask(with_tools, tools=TOOLS, tool_choice=choice, max_tokens=80)
    (call,) = told["content"]
    assert (call["type"], told["stop_reason"]) == ("tool_use", "tool_use")
    assert call["name"] in (["first", "second"] if choice["type"] == "any" else ["second"])
    assert call["input"]["n"] in (1, 2)
    streamed = events(with_tools, tools=TOOLS, tool_choice=choice, max_tokens=80)
    assert said(built(streamed)) == said(told)


def test_a_conversation_is_that_of_chats() -> None:
    history: list[Json] = [
        {"role": "system", "content": "Be kind."},
        *QUESTION,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Let me", "citations": None},
                {"type": "tool_use", "id": "a", "name": "first", "input": {"n": 1}, "caller": None},
                {"type": "tool_use", "id": "b", "name": "second", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": "done", "is_error": False},
                {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "too"}]},
                {"type": "text", "text": "Go on."},
                {"type": "text", "text": "Now."},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "b"}]},
    ]
    asked = {"model": "m", "max_tokens": 1, "messages": history, "system": "Be brief.", "tools": TOOLS}
    chosen = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    body = AnthropicRequest.model_validate({**asked, **chosen, "metadata": {"user_id": "me"}}).chat(
        able=False
    )

    def call(number: str, name: str, arguments: str) -> Json:
        return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}

    assert [message.model_dump(exclude_none=True) for message in body.messages] == [
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "Be kind."},
        *QUESTION,
        {
            "role": "assistant",
            "content": "Let me",
            "reasoning_content": "Hm.",
            "tool_calls": [call("a", "first", '{"n":1}'), call("b", "second", "{}")],
        },
        {"role": "tool", "content": "done", "tool_call_id": "a"},
        {"role": "tool", "content": "too", "tool_call_id": "b"},
        {"role": "user", "content": "Go on.\nNow."},
        {"role": "tool", "content": "", "tool_call_id": "b"},
    ]
    assert body.parallel_tool_calls is False
    assert [tool.function.parameters for tool in body.tools or ()] == [SCHEMA, SCHEMA]
    assert (body.model_extra or {})["user"] == "me"


@pytest.mark.parametrize(
    ("thinking", "able", "variables"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, True, {"enable_thinking": True, "thinking": True}),
        ({"type": "disabled"}, True, {"enable_thinking": False, "thinking": False}),
        ({"type": "adaptive"}, False, None),
        (None, True, None),
    ],
)
def test_the_template_decides_about_thoughts(thinking: Json | None, able: bool, variables: Any) -> None:
    effort = {"effort": "low"}
    body = AnthropicRequest.model_validate({**ASKED, "thinking": thinking, "output_config": effort})
    chat = body.chat(able=able)
    assert chat.chat_template_kwargs == variables
    assert chat.reasoning_effort == ("low" if able else None)


def test_tokens_are_counted(with_tools: Running) -> None:
    def count(**fields: Any) -> int:
        body = {"model": "sibyl", "messages": QUESTION, **fields}
        reply = httpx.post(f"{with_tools.url}/v1/messages/count_tokens", json=body)
        assert reply.json().keys() == {"input_tokens"}, reply.text
        return int(reply.json()["input_tokens"])

    without: Json = {"tools": TOOLS, "tool_choice": {"type": "none"}}
    for fields in ({}, {"system": "Be brief."}, {"tools": TOOLS}, without):
        usage = ask(with_tools, **fields, max_tokens=1)["usage"]
        assert count(**fields) == usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert count(tools=TOOLS) > count(**without) == count()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_tokens": None}, "max_tokens: "),
        ({"max_tokens": -1}, "max_tokens: "),
        ({"messages": []}, "messages: "),
        ({"messages": [3]}, "messages.0: "),
        ({"messages": [{"role": "user"}]}, "messages.0.content: "),
        ({"messages": [{"role": "user", "content": [{"type": 3}]}]}, "messages.0.content.0"),
        (
            {"messages": [{"role": "user", "content": [{**RESULT, "content": 3}]}]},
            "messages.0.content.0.content: ",
        ),
        ({"messages": [*QUESTION, {"role": "assistant", "content": " "}]}, "empty; leave it out"),
        (
            {"messages": [{"role": "assistant", "content": [CALL]}]},
            "tool_result",
        ),
        ({"system": 3}, "system: "),
        ({"tools": [{"type": 3, "name": "web_search"}]}, "tools.0"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name: "),
        ({"tools": [{"name": "a"}]}, "tools.0.input_schema: "),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type: "),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "name of a tool"),
        ({"tools": TOOLS}, "no tools"),
        ({"stop_sequences": "x"}, "stop_sequences: "),
        ({"stop_sequences": ["x"] * 999}, "stop_sequences is limited"),
        ({"stop": "x"}, "use stop_sequences"),
        ({"n": 2}, "n is not a parameter"),
        ({"max_tokns": 2}, "did you mean max_tokens"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers: "),
        ({"temperature": 9}, "temperature is 9"),
        ({"speculation": {"trace": True}, "stream": True}, "chats only"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, "context"),
    ],
    ids=str,
)
def test_errors_have_their_form_and_say_what_is_wrong(running: Running, change: Json, words: str) -> None:
    reply = httpx.post(f"{running.url}/v1/messages", json={**ASKED, **change})
    answer = reply.json()
    assert (reply.status_code, answer["type"]) == (400, "error")
    assert answer["error"]["type"] == "invalid_request_error"
    assert re.search(words, answer["error"]["message"])
    assert running.free


def test_what_has_no_effect_is_accepted(running: Running) -> None:
    body = {
        **ASKED,
        "cache_control": {"type": "ephemeral"},
        "context_management": {"edits": []},
        "mcp_servers": [],
        "metadata": {"user_id": "me"},
        "service_tier": "auto",
        "speculation": {"drafter": "prompt-lookup"},
        "thinking": {"type": "adaptive"},
    }
    reply = httpx.post(f"{running.url}/v1/messages?beta=true", json=body, headers={"Anthropic-Version": "x"})
    assert said(reply.json()) == said(ask(running))
    assert "X-Ignored-Fields" not in reply.headers


def test_other_errors_have_types_of_their_own(running: Running) -> None:
    wrong = httpx.post(f"{running.url}/v1/messages", json={**ASKED, "model": "x"})
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (404, "not_found_error")
    missing = httpx.post(f"{running.url}/v1/messages/batches", json=ASKED)
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    text = httpx.post(f"{running.url}/v1/messages", content="{}", headers={"Content-Type": "text/plain"})
    assert (text.status_code, text.json()["error"]["type"]) == (415, "invalid_request_error")
    assert ApiError(500, "x", "x").anthropic_body["error"]["type"] == "api_error"
    assert ApiError(503, "x", "x").anthropic_body["error"]["type"] == "overloaded_error"


def test_models_are_listed_for_its_clients(running: Running) -> None:
    listed = httpx.get(f"{running.url}/v1/models").json()
    (card,) = listed["data"]
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "sibyl", "sibyl")
    assert (card["id"], card["type"], card["display_name"]) == ("sibyl", "model", "sibyl")
    assert card["created_at"].endswith("Z")


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, str]]:
    path: Path = tmp_path_factory.mktemp("keys") / "keys.json"
    secret = add_key(path, "alice")
    with serving(partial(sibyl_engine), KeyRing(path)) as one:
        yield one, secret


def test_a_key_may_come_in_a_header_of_its_own(keyed: tuple[Running, str]) -> None:
    running, secret = keyed

    def status(**headers: str) -> int:
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        return httpx.post(f"{running.url}/v1/messages", json=ASKED, headers=headers).status_code

    assert status(X_Api_Key=secret) == 200
    assert status(Authorization=f"Bearer {secret}") == 200
    assert status(Authorization="Basic x", X_Api_Key=secret) == 200
    assert status(Authorization="Bearer x", X_Api_Key=secret) == 401
    assert status(X_Api_Key="x") == status() == 401
    refused = httpx.post(f"{running.url}/v1/messages", json=ASKED).json()
    assert refused["error"]["type"] == "authentication_error"
    assert "X-Api-Key" in refused["error"]["message"]


def formatted(parser: Any) -> AnthropicFormat:
    return AnthropicFormat("it", TokenTexts(None), parser, 100)


def streamed(job: Any, form: AnthropicFormat) -> list[Json]:
    async def all_events() -> list[Json]:
        return [event async for event in form.stream(job)]

    return asyncio.run(all_events())


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
@pytest.mark.parametrize(("parser", "text", "told"), CASES)
def test_blocks_do_not_depend_on_how_the_answer_was_cut(
    parser: type[ToolCallParser], text: str, told: Told, reason: FinishReason
) -> None:
    content, calls = told
    blocks: list[Json] = [{"type": "text", "text": content}] if content else []
    for name, arguments in calls:
        values = json.loads(arguments)
        values = values if isinstance(values, dict) else {"value": values}
        blocks.append({"type": "tool_use", "name": name, "input": values})
    why = "max_tokens" if reason is FinishReason.LENGTH else "tool_use" if calls else "end_turn"
    for pieces in cuts(text):
        message = built(streamed(Replayed(said_in(pieces, reason)), formatted(parser)))
        assert said(message)[:3] == (blocks, why, None)
        collected = formatted(parser).collect(Replayed(said_in(pieces, reason)))  # type: ignore[arg-type]
        assert said(asyncio.run(collected)) == said(message)


@pytest.mark.parametrize("pieces", cuts("<think>Hm.</think>Yes.")[:3])
def test_thoughts_are_a_block_of_their_own(pieces: list[str]) -> None:
    form = ReasoningFormat("<think>", "</think>")
    parser = partial(form.wrapped, PlainParser(), opened=False)
    message = built(streamed(Replayed(said_in(pieces, FinishReason.STOP)), formatted(parser)))
    thoughts = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    assert said(message)[:2] == ([thoughts, {"type": "text", "text": "Yes."}], "end_turn")


def test_a_failure_is_the_last_event() -> None:
    form = formatted(PlainParser)
    job: Any = Replayed(said_in(["Hello", ""], FinishReason.STOP)[:1], ApiError(503, "gone", "x"))
    with pytest.raises(ApiError) as caught:
        streamed(job, form)
    error = {"type": "overloaded_error", "message": "gone"}
    assert form.failure(caught.value) == {"type": "error", "error": error}
