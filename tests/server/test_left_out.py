"""One part of a conversation, or one tool, that this server cannot read does not make the rest unusable."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from serving import Running

from soothsay.server.apis.anthropic.anthropic_bodies import AnthropicRequest
from soothsay.server.apis.openai.responses_bodies import ResponsesRequest
from soothsay.server.generation.request_bodies import ChatRequest
from soothsay.server.generation.request_parameters import ignored_fields

Json = dict[str, Any]

USER: Json = {"role": "user", "content": "Hi"}
FUNCTION: Json = {"name": "f", "parameters": {"type": "object"}}
TOOL: Json = {"type": "function", "function": FUNCTION}
HOSTED: list[Json] = [
    {"type": "web_search"},
    {"type": "web_search_preview", "search_context_size": "low"},
    {"type": "namespace", "name": "mcp__x", "description": "d", "tools": [{"type": "function", **FUNCTION}]},
    {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark"}},
    {"type": "local_shell"},
    {"type": "shell", "environment": {"type": "local"}},
    {"type": "mcp", "server_label": "x", "server_url": "https://example.com"},
    {"type": "file_search", "vector_store_ids": ["x"]},
    {"type": "computer_use_preview", "display_width": 1, "display_height": 1, "environment": "linux"},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "image_generation"},
    {"type": "tool_search"},
]
SERVER_TOOLS: list[Json] = [
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
    {"type": "web_fetch_20250910", "name": "web_fetch"},
    {"type": "code_execution_20250825", "name": "code_execution"},
    {"type": "bash_20250124", "name": "bash"},
    {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
    {"type": "computer_20250124", "name": "computer", "display_width_px": 1, "display_height_px": 1},
    {"type": "memory_20250818", "name": "memory"},
    {"type": "tool_search_tool_regex_20251119", "name": "tool_search"},
    {"type": "mcp_toolset", "mcp_server_name": "x"},
]


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [USER], **fields})


def respond(**fields: Any) -> ChatRequest:
    return ResponsesRequest.model_validate({"model": "m", "input": "Hi", **fields}).chat()


def message(**fields: Any) -> ChatRequest:
    body = {"model": "m", "max_tokens": 1, "messages": [USER], **fields}
    return AnthropicRequest.model_validate(body).chat(able=False)


def names(body: ChatRequest) -> list[str]:
    return [tool.function.name for tool in body.tools or ()]


@pytest.mark.parametrize("tool", HOSTED, ids=lambda tool: tool["type"])
def test_tools_that_are_no_functions_are_left_out_and_reported(tool: Json) -> None:
    for body in (chat(tools=[tool, TOOL]), respond(tools=[tool, {"type": "function", **FUNCTION}])):
        assert names(body) == ["f"]
        assert ignored_fields(body) == [f"tools.{tool['type']}"]
    assert names(chat(tools=[tool])) == names(respond(tools=[tool])) == []
    assert names(chat(tools=[tool, TOOL])) == ["f"]


@pytest.mark.parametrize("tool", SERVER_TOOLS, ids=lambda tool: tool["type"])
def test_tools_of_anthropic_that_have_no_schema_are_left_out(tool: Json) -> None:
    own: list[Json] = [{"name": name, "input_schema": {}, "type": kind} for name, kind in OWN]
    body = message(tools=[own[0], tool, own[1]])
    assert names(body) == ["f", "g"]
    assert ignored_fields(body) == [f"tools.{tool['type']}"]
    if "name" in tool:
        body = message(tools=[*own, tool], tool_choice={"type": "tool", "name": tool["name"]})
        assert body.tool_choice is None


OWN = (("f", None), ("g", "custom"))


def test_a_choice_of_a_tool_that_is_left_out_has_no_effect() -> None:
    custom = HOSTED[3]
    for choice in (
        {"type": "custom", "custom": {"name": "apply_patch"}},
        {"type": "custom", "name": "apply_patch"},
        {"type": "web_search"},
        {"type": "function", "function": {"name": "apply_patch"}},
    ):
        body = chat(tools=[custom, TOOL], tool_choice=choice)
        assert (body.tool_choice, names(body)) == (None, ["f"])
    for choice in ({"type": "mcp", "server_label": "x"}, {"type": "custom", "name": "apply_patch"}):
        body = respond(tools=[custom, {"type": "function", **FUNCTION}], tool_choice=choice)
        assert body.tool_choice is None
        assert ignored_fields(body) == ["tools.custom", f"tool_choice.{choice['type']}"]
    for choice in ("required", "auto", "none"):
        assert chat(tools=[custom], tool_choice=choice).tool_choice is None
        assert chat(tools=[custom, TOOL], tool_choice=choice).tool_choice == choice
        named_so = {"type": "custom", "name": choice}
        assert chat(tools=[named_so, TOOL], tool_choice=choice).tool_choice == choice


def test_some_of_the_tools_may_be_left_out() -> None:
    function = {"type": "function", "name": "f"}
    for tools, left in (([function, {"type": "web_search"}], ["f"]), ([{"type": "web_search"}], None)):
        choice = {"type": "allowed_tools", "mode": "required", "tools": tools}
        body = respond(tools=[{"type": "function", **FUNCTION}], tool_choice=choice)
        told = body.tool_choice if isinstance(body.tool_choice, str | None) else body.tool_choice.model_dump()
        if left is None:
            assert told == "none"
        else:
            inner = {"mode": "required", "tools": [{"type": "function", "function": {"name": "f"}}]}
            assert told == {"type": "allowed_tools", "allowed_tools": inner}
    echoed = ResponsesRequest.model_validate({"model": "m", "input": "Hi", "tool_choice": choice}).echo()
    assert echoed["tool_choice"] == choice


PARTS: list[tuple[Json, str]] = [
    ({"type": "image_url", "image_url": {"url": "data:"}}, "[image_url left out: this server reads text]"),
    ({"type": "input_image", "image_url": "data:"}, "[input_image left out: this server reads text]"),
    ({"type": "image", "source": {"type": "base64"}}, "[image left out: this server reads text]"),
    ({"type": "input_audio", "input_audio": {}}, "[input_audio left out: this server reads text]"),
    ({"type": "input_file", "filename": "a.pdf"}, "[input_file a.pdf left out: this server reads text]"),
    ({"type": "file", "file": {"file_data": "x"}}, "[file left out: this server reads text]"),
    ({"type": "video_url", "video_url": {}}, "[video_url left out: this server reads text]"),
    (
        {"type": "tool_reference", "tool_name": "Read"},
        "[tool_reference Read left out: this server reads text]",
    ),
    ({"type": "container_upload", "file_id": "x"}, "[container_upload left out: this server reads text]"),
    ({"type": "x" * 999, "name": "y" * 999}, f"[{'x' * 64} {'y' * 64} left out: this server reads text]"),
    ({"type": "summary_text", "text": "So."}, "So."),
    ({"type": "refusal", "refusal": "No."}, "No."),
    ({"type": "document", "source": {"type": "text", "data": "A text."}}, "A text."),
    ({"type": "document", "title": "T", "source": {"type": "content", "content": "A."}}, "T\nA."),
    (
        {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "A."}, 3]}},
        "A.",
    ),
    (
        {"type": "document", "source": {"type": "base64", "data": "JVBERi0="}},
        "[document left out: this server reads text]",
    ),
    ({"type": "search_result", "title": "T", "content": [{"type": "text", "text": "A."}]}, "T\nA."),
]


@pytest.mark.parametrize(("part", "text"), PARTS, ids=lambda value: str(value)[:40])
def test_a_text_stands_where_a_part_was(part: Json, text: str) -> None:
    parts = [{"type": "text", "text": "See: "}, part]
    for role in ("user", "assistant", "tool", "system"):
        (told,) = chat(messages=[{"role": role, "content": parts, "tool_call_id": "a"}]).messages
        assert told.for_template()["content"] == f"See: {text}"
    items: list[Json] = [
        {"role": "user", "content": parts},
        {"type": "function_call_output", "call_id": "a", "output": parts},
    ]
    assert [one.content for one in respond(input=items).messages] == [f"See: {text}"] * 2
    result = {"type": "tool_result", "tool_use_id": "a", "content": parts}
    body = message(messages=[{"role": "user", "content": parts}, {"role": "user", "content": [result]}])
    assert [one.content for one in body.messages] == [f"See: \n{text}"] * 2


@pytest.mark.parametrize(
    "kind",
    [
        "server_tool_use",
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "mcp_tool_use",
        "mcp_tool_result",
        "compaction",
        "anything",
    ],
)
def test_blocks_of_tools_that_the_server_does_not_run_are_named(kind: str) -> None:
    block = {
        "type": kind,
        "id": "srv",
        "name": "web_search",
        "input": {},
        "tool_use_id": "srv",
        "content": [{}],
    }
    said = [{"type": "text", "text": "I look."}, block, {"type": "text", "text": "Found."}]
    body = message(messages=[USER, {"role": "assistant", "content": said}, USER])
    left_out = f"[{kind} web_search left out: this server reads text]"
    assert body.messages[1].content == f"I look.\n{left_out}\nFound."


def test_thoughts_beside_texts_are_dropped() -> None:
    parts = [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "Yes."}]
    (told,) = chat(messages=[{"role": "assistant", "content": parts}]).messages
    assert told.for_template()["content"] == "Yes."


@pytest.mark.parametrize(
    ("call", "arguments", "name"),
    [
        (
            {"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin"},
            {"input": "*** Begin"},
            "apply_patch",
        ),
        (
            {"type": "local_shell_call", "action": {"command": ["ls"]}},
            {"action": {"command": ["ls"]}},
            "local_shell",
        ),
        ({"type": "shell_call", "action": {"commands": ["ls"]}}, {"action": {"commands": ["ls"]}}, "shell"),
        (
            {"type": "apply_patch_call", "operation": {"path": "a"}},
            {"operation": {"path": "a"}},
            "apply_patch",
        ),
        ({"type": "computer_call", "action": {"type": "click"}}, {"action": {"type": "click"}}, "computer"),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.parametrize(
    "output", ["done", [{"type": "input_text", "text": "done"}], {"stdout": "done"}, None]
)
def test_calls_of_other_tools_and_their_results_stay(
    call: Json, arguments: Json, name: str, output: Any
) -> None:
    result = {"type": f"{call['type']}_output", "call_id": "c", "output": output}
    body = respond(input=[USER, {**call, "id": "i", "call_id": "c", "status": "completed"}, result])
    called, told = (one.for_template() for one in body.messages[1:])
    (function,) = called["tool_calls"]
    assert (function["id"], function["function"]) == ("c", {"name": name, "arguments": arguments})
    assert (told["role"], told["tool_call_id"]) == ("tool", "c")
    assert told["content"] == {"done": "done", "{'stdout': 'done'}": '{"stdout":"done"}', "None": "null"}.get(
        str(output), "done"
    )


@pytest.mark.parametrize(
    "kind",
    ["web_search_call", "file_search_call", "mcp_list_tools", "mcp_approval_request", "compaction", "x"],
)
def test_other_items_are_left_out_and_reported(kind: str) -> None:
    body = respond(
        input=[USER, {"type": kind, "id": "i", "status": "completed"}, {"role": "assistant", "content": "A"}]
    )
    assert [one.role for one in body.messages] == ["user", "assistant"]
    assert ignored_fields(body) == [f"input.{kind}"]


def test_calls_of_custom_tools_in_chats() -> None:
    call = {"id": "c", "type": "custom", "custom": {"name": "apply_patch", "input": "x"}}
    body = chat(messages=[USER, {"role": "assistant", "content": None, "tool_calls": [call]}])
    (told,) = body.messages[1].for_template()["tool_calls"]
    assert told["function"] == {"name": "apply_patch", "arguments": {"input": "x"}}


def test_each_api_answers_and_names_what_it_left_out(with_tools: Running) -> None:
    image, text = {"type": "image", "source": {"type": "base64", "data": "AA"}}, {"type": "text", "text": "a"}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [image]}
    called = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    conversation = [
        USER,
        {"role": "assistant", "content": [text, called]},
        {"role": "user", "content": [result]},
    ]
    bodies: dict[str, Json] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": [text, image]}], "max_tokens": 2},
        "/v1/responses": {"input": [{"role": "user", "content": [text, image]}], "max_output_tokens": 2},
        "/v1/messages": {"messages": conversation, "max_tokens": 2},
        "/v1/messages/count_tokens": {"messages": conversation},
    }
    for path, body in bodies.items():
        tools = [{"type": "web_search", "name": "web_search"}]
        reply = httpx.post(
            f"{with_tools.url}{path}", json={"model": "sibyl", "tools": tools, **body}, timeout=60
        )
        assert reply.status_code == 200, reply.text
        if "count" not in path:
            assert reply.headers["X-Ignored-Fields"] == "tools.web_search"
