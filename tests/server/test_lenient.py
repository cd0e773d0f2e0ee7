"""What bodies and headers may look like: each API's clients send what that API takes, in several forms."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from all_routes import BODIES
from pydantic import BaseModel
from serving import Running
from starlette.datastructures import Headers

from soothsay.server.apis.anthropic.anthropic_bodies import AnthropicRequest
from soothsay.server.apis.llamacpp.llama_bodies import LlamaCompletionRequest
from soothsay.server.apis.ollama.ollama_bodies import OllamaChatRequest
from soothsay.server.apis.openai.responses_bodies import ResponsesRequest
from soothsay.server.generation.request_bodies import ChatRequest, CompletionRequest
from soothsay.server.generation.request_parameters import sampling_params
from soothsay.server.http.api_errors import ApiError
from soothsay.server.http.bodies import _is_safe, parse
from soothsay.server.server_config import ServerConfig

HELLO: Any = [{"role": "user", "content": "Hi"}]
WHOLE: dict[str, Any] = {
    "model": "m",
    "messages": HELLO,
    "prompt": "x",
    "input": "x",
    "input_prefix": "",
    "input_suffix": "",
    "max_tokens": 4,
    "tokens": [1],
}
"""The fields that any body needs."""

CONFIG = ServerConfig(name="m")
KINDS = sorted({*BODIES.values()}, key=lambda kind: kind.__name__)


def read(kind: type[BaseModel], **fields: Any) -> Any:
    required = {name for name, field in kind.model_fields.items() if field.is_required()}
    needed = {name: value for name, value in WHOLE.items() if name in required}
    return parse(json.dumps({**needed, **fields}).encode(), kind)


def params(body: Any) -> Any:
    return sampling_params(body, CONFIG, {})


def takes(kind: type[BaseModel], **fields: Any) -> bool:
    try:
        read(kind, **fields)
    except ApiError:
        return False
    return True


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_whole_number_may_have_a_point(kind: type[BaseModel]) -> None:
    for name, field in kind.model_fields.items():
        said = field.alias or name
        if not takes(kind, **{said: 1}):
            continue
        value = getattr(read(kind, **{said: 1}), name)
        if type(value) is int:
            again = getattr(read(kind, **{said: 1.0}), name)
            assert (type(again), again) == (int, 1), name
            wrong = (1.5, "1") if field.annotation is not Any else ()
            assert not any(takes(kind, **{said: one}) for one in wrong), name


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_null_is_the_default_of_every_field_that_has_one(kind: type[BaseModel]) -> None:
    names = [field.alias or name for name, field in kind.model_fields.items() if not field.is_required()]
    assert read(kind, **dict.fromkeys(names)) == read(kind)


@pytest.mark.parametrize("ids", [[1.0, 2], [1, 2.0], [1.0, 2.0]], ids=str)
def test_token_ids_may_have_points(ids: list[float]) -> None:
    read_ids = [
        read(CompletionRequest, prompt=ids).prompt,
        read(CompletionRequest, prompt=[ids]).prompt[0],
        read(CompletionRequest, stop_token_ids=ids).stop_token_ids,
        read(ChatRequest, allowed_token_ids=ids).allowed_token_ids,
        read(BODIES["/detokenize"], tokens=ids).tokens,
    ]
    assert [[(type(one), one) for one in own] for own in read_ids] == [[(int, 1), (int, 2)]] * 5
    assert not takes(CompletionRequest, prompt=[1.5])


def test_an_empty_stop_string_stops_nothing() -> None:
    for stop, meant in (("", ()), ([""], ()), (["", "a"], ("a",)), (["a"] * 300, ("a",) * 300), (None, ())):
        assert tuple(params(read(ChatRequest, stop=stop)).stop) == meant
        assert (
            tuple(
                params(
                    read(OllamaChatRequest, messages=HELLO, options={"stop": stop}).chat(CONFIG, able=False)
                ).stop
            )
            == meant
        )
        own = read(LlamaCompletionRequest, stop=stop).completion([[1]])
        assert tuple(params(own).stop) == meant
    anthropic = read(AnthropicRequest, stop_sequences=["", "a"]).chat(able=False)
    assert tuple(params(anthropic).stop) == ("a",)


def test_small_differences_between_servers() -> None:
    assert params(read(ChatRequest, max_tokens=4, max_completion_tokens=3)).max_tokens == 3
    assert params(read(ChatRequest, logprobs=False, top_logprobs=0)).logprobs is None
    assert params(read(ChatRequest, logprobs=True)).logprobs == 0
    assert params(read(ChatRequest, seed=-5)).seed == 2**63 - 5
    assert params(read(ChatRequest, seed=-1)).seed is None
    kwargs = {"enable_thinking": None, "levels": [1, {"a": None}]}
    assert read(ChatRequest, chat_template_kwargs=kwargs).chat_template_kwargs == kwargs
    assert read(ResponsesRequest, model=None, n=None).chat().model is None


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"temperature": -1}, {"temperature": 0}),
        ({"top_k": -7}, {"top_k": -1}),
        ({"top_p": -1}, {"top_p": 1e-9}),
        ({"top_p": 2, "min_p": -1}, {"top_p": 1, "min_p": 0}),
    ],
    ids=str,
)
def test_ollama_and_llama_cpp_read_impossible_numbers(
    given: dict[str, float], meant: dict[str, float]
) -> None:
    theirs = read(OllamaChatRequest, messages=HELLO, options=given).chat(CONFIG, able=False)
    other = read(LlamaCompletionRequest, **given).completion([[1]])
    for body in (theirs, other):
        assert {name: getattr(params(body), name) for name in meant} == meant


def test_a_null_result_of_a_tool_is_empty() -> None:
    use = {"type": "tool_use", "id": "1", "name": "f", "input": None}
    result = {"type": "tool_result", "tool_use_id": "1", "content": None, "is_error": None}
    messages = [*HELLO, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    chat = read(AnthropicRequest, messages=messages).chat(able=False)
    assert [message.for_template()["content"] for message in chat.messages] == ["Hi", "", ""]
    assert chat.messages[1].for_template()["tool_calls"][0]["function"]["arguments"] == {}
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": None}
    output = {"type": "function_call_output", "call_id": "1", "output": None}
    asked = read(ResponsesRequest, input=[{"type": None, **HELLO[0]}, call, output]).chat()
    assert [message.for_template()["content"] for message in asked.messages] == ["Hi", "", ""]
    calls = [{"id": "1", "type": None, "function": {"name": "f", "arguments": None}}]
    said = {"role": "assistant", "content": None, "tool_calls": calls, "name": None}
    assert read(ChatRequest, messages=[*HELLO, said]).messages[1].tool_calls[0].function.arguments == "{}"


@pytest.mark.parametrize(
    ("name", "asked", "served"),
    [
        ("m", "m", True),
        ("m", "", True),
        ("m", None, True),
        ("m", "m:latest", True),
        ("m", "gpt-4", False),
        ("m", "m:7b", False),
        ("m.Q4_K_M.gguf", "m.Q4_K_M", True),
        ("m.Q4_K_M.gguf", "m.Q4_K_M:latest", True),
        ("m.Q4_K_M.gguf", "m", False),
        ("m-Q8_0-00001-of-00003.GGUF", "m-Q8_0", True),
        ("owner/m", "owner/m", True),
        ("owner/m:Q4_K_M", "owner/m:Q4_K_M", True),
        ("owner/m:Q4_K_M", "owner/m", False),
    ],
)
def test_names_of_the_model(name: str, asked: str | None, served: bool) -> None:
    assert ServerConfig(name=name).serves(asked) is served
    assert ServerConfig(name=name, any_model=True).serves(asked)


BY_SCRIPTS = [
    {"Origin": "http://evil"},
    {"Origin": "null"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Referer": "http://evil/"},
]
"""Headers of browsers: at least one of them comes with each request of a page of another site."""

SIMPLE = [None, "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/plain"]
"""Types that a page of another site may send without a question. None: a body without a type."""


def test_only_pages_of_this_site_and_programs_are_read() -> None:
    """The types of requests that need no question to the server, as the Fetch standard lists them."""
    for kind in ("application/json", "Application/JSON; charset=utf-8"):
        for headers in ({}, *BY_SCRIPTS):
            assert _is_safe(Headers({"Content-Type": kind, **headers}))
    for kind in (*SIMPLE, "application/octet-stream"):
        typed = {} if kind is None else {"Content-Type": kind}
        assert _is_safe(Headers(typed)) is (kind != "text/plain"), "old browsers send forms without an origin"
        assert not any(_is_safe(Headers({**typed, **headers})) for headers in BY_SCRIPTS)


def test_a_body_without_a_type_is_answered(running: Running) -> None:
    body = json.dumps({"model": "sibyl", "messages": HELLO, "options": {"num_predict": 1}, "stream": False})
    for headers, status in (
        ({}, 200),
        ({"Content-Type": "application/octet-stream"}, 200),
        ({"Origin": "null"}, 415),
    ):
        assert httpx.post(f"{running.url}/api/chat", content=body, headers=headers).status_code == status
