"""What the server refuses, and the errors that clients get."""

from __future__ import annotations

import asyncio
import gzip
import re
import socket
from typing import Any

import engines
import httpx
import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from serving import Running, serving
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from soothsay.cli.serve_command import allowed_hosts
from soothsay.server.access.gate import Gate
from soothsay.server.http.api_route import ApiRoute
from soothsay.server.server_config import ServerConfig

MESSAGES: Any = [{"role": "user", "content": "Hi"}]
CHAT: dict[str, Any] = {"model": "sibyl", "messages": MESSAGES, "max_tokens": 1}
COMPLETION: dict[str, Any] = {"model": "sibyl", "prompt": "Hi", "max_tokens": 1}


def refused(running: Running, path: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = httpx.post(f"{running.url}{path}", json=body)
    assert reply.status_code == 400, reply.text
    assert reply.headers["x-request-id"]
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"max_tokns": 1}, "max_tokns", "unknown_parameter"),
        ({"temprature": 1}, "temprature", "unknown_parameter"),
        ({"frequency_penaltie": 1}, "frequency_penaltie", "unknown_parameter"),
        ({"speculation": {"drafter": "none", "depth": 3}}, "speculation", "unknown_parameter"),
        ({"functions": [{}]}, "functions", "unsupported"),
        ({"function_call": "auto"}, "function_call", "unsupported"),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "unsupported"),
        ({"documents": [{"text": "x"}]}, "documents", "unsupported"),
        ({"use_beam_search": True}, "use_beam_search", "unsupported"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "invalid_value"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type", "invalid_value"),
        ({"temperature": "hot"}, "temperature", "invalid_value"),
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"top_p": 1.5}, "top_p", "invalid_value"),
        ({"top_k": 40.5}, "top_k", "invalid_value"),
        ({"max_tokens": "4"}, "max_tokens", "invalid_value"),
        ({"max_tokens": True}, "max_tokens", "invalid_value"),
        ({"seed": 10**30}, "seed", "invalid_value"),
        ({"n": 17}, "n", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"max_tokens": -3}, "max_tokens", "invalid_value"),
        ({"min_tokens": 2}, "min_tokens", "invalid_value"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "invalid_value"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "invalid_value"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "invalid_value"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "invalid_value"),
        ({"allowed_token_ids": [10**9]}, "allowed_token_ids", "invalid_value"),
        ({"bad_words": ["x"] * 129}, "bad_words", "invalid_value"),
        ({"bad_words": ["x" * 1025]}, "bad_words", "invalid_value"),
        ({"bad_words": [""]}, "bad_words", "invalid_value"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "invalid_value"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue", "invalid_value"),
        ({"stop": ["x"] * 513}, "stop", "invalid_value"),
        ({"stop": "x" * 1025}, "stop", "invalid_value"),
        ({"stop": [None]}, "stop", "invalid_value"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"9999999": 1}}, "logit_bias", "invalid_value"),
        *(
            ({"logit_bias": {key: 1}}, "logit_bias", "invalid_value")
            for key in (" 5", "05", "1_0", "-0", "\u0663")
        ),
        ({"stop_token_ids": [9999999]}, "stop_token_ids", "invalid_value"),
        ({"answer_start": [1]}, "answer_start", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"speculation": {"drafter": "draft-model(model=/etc)"}}, "speculation.drafter", "invalid_value"),
        ({"speculation": {"drafter": "rest"}}, "speculation.drafter", "invalid_value"),
        ({"speculation": {"verifier": "hope"}}, "verifier", "invalid_value"),
        ({"speculation": {"max_nodes": -1}}, "speculation", "invalid_value"),
        ({"speculation": {"trace": True}}, "speculation.trace", "invalid_value"),
        ({"priority": "high"}, "priority", "invalid_value"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "invalid_value"),
        ({"guided_regex": "("}, None, "invalid_value"),
        ({"guided_choice": ["a"], "guided_regex": "b"}, "response_format", "invalid_value"),
        ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "user", "content": [{"type": 3}]}]}, None, "invalid_value"),
        ({"messages": [{"role": "user", "content": "word " * 3000}]}, None, "context_length_exceeded"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_chat_parameters(running: Running, change: dict[str, Any], param: str | None, code: str) -> None:
    error = refused(running, "/v1/chat/completions", {**CHAT, **change})
    assert error["code"] == code
    if param is not None:
        assert error["param"].startswith(param)
    assert not re.search(r"/work|soothsay/|Traceback|\.py", error["message"])
    assert running.free


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"temprature": 1}, "; did you mean temperature?"),
        ({"speculation": {"drafer": "none"}}, "speculation.drafer .*; did you mean speculation.drafter?"),
        ({"speculation": {"colour": 3}}, "speculation.colour .*; leave it out"),
        ({"speculation": {"drafter": "nonne"}}, ". Did you mean none?"),
    ],
)
def test_what_is_misspelt_names_what_is_meant(running: Running, change: dict[str, Any], words: str) -> None:
    message = refused(running, "/v1/chat/completions", {**CHAT, **change})["message"]
    assert re.search(words.replace("?", r"\?") + "$", message)


def test_an_unknown_field_without_a_value_asks_for_nothing(running: Running) -> None:
    body = {**CHAT, "speculation": {"drafter": "none", "drafer": None}}
    assert httpx.post(f"{running.url}/v1/chat/completions", json=body).status_code == 200


def test_the_limit_of_a_seed_is_told_exactly(running: Running) -> None:
    assert refused(running, "/v1/chat/completions", {**CHAT, "seed": 2**63})["message"] == (
        "seed: it must be at most 9223372036854775807"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": []},
        {"prompt": ""},
        {"prompt": [10**9]},
        {"prompt": ["x"] * 65},
        {"prompt": ["x", 3]},
        {"best_of": 17},
        {"best_of": 1, "n": 2},
        {"best_of": 2, "stream": True},
        {"suffix": "end"},
        {"prompt_embeds": "x"},
        {"echo": True, "logprobs": 21},
        {"logprobs": 21},
    ],
    ids=str,
)
def test_completion_parameters(running: Running, change: dict[str, Any]) -> None:
    refused(running, "/v1/completions", {**COMPLETION, **change})
    assert running.free


def calling(arguments: str) -> dict[str, Any]:
    """A chat whose history has a call with some arguments."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {**CHAT, "messages": [*MESSAGES, {"role": "assistant", "tool_calls": [call]}, *MESSAGES]}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {**COMPLETION, "prompt": [-1], "echo": True}, "prompt"),
        ("/v1/completions", {**COMPLETION, "prompt": [10**9], "echo": True}, "prompt"),
        ("/v1/completions", {**COMPLETION, "prompt": [2**70], "echo": True}, "prompt.0"),
        ("/v1/completions", {**COMPLETION, "top_k": 10**30}, "top_k"),
        ("/v1/completions", {**COMPLETION, "guided_choice": ["a"] * 20_000}, "guided_choice"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{}]}, "messages.0.role"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**63]}, "tokens"),
    ],
    ids=range(9),
)
def test_errors_of_clients_are_not_the_servers(
    running: Running, path: str, body: dict[str, Any], param: str
) -> None:
    assert refused(running, path, body)["param"] == param
    assert running.free


@pytest.mark.parametrize("arguments", ["[" * 100_000, "[" * 900 + "]" * 900, "{", "1e999", "", '"\\ud800"'])
def test_calls_with_strange_arguments_are_texts(running: Running, arguments: str) -> None:
    reply = httpx.post(f"{running.url}/v1/chat/completions", json=calling(arguments))
    assert reply.status_code == 200, reply.text


def test_messages_of_errors_are_short(running: Running) -> None:
    for change in ({"model": "x" * 100_000}, {"speculation": {"drafter": "x" * 100_000}}, {"x" * 100_000: 1}):
        reply = httpx.post(f"{running.url}/v1/chat/completions", json={**CHAT, **change})
        assert reply.status_code in (200, 400, 404)  # an unknown field is ignored
        assert len(reply.content) < 5000
        assert len(reply.headers.get("x-ignored-fields", "")) < 5000


def test_what_changes_no_answer_is_ignored(client: OpenAI) -> None:
    said = client.chat.completions.create(**CHAT, user="me", metadata={"a": "b"}, store=False, seed=1)
    assert said.choices[0].message.content == (
        client.chat.completions.create(**CHAT, seed=1).choices[0].message.content
    )


def test_null_means_the_default(running: Running) -> None:
    from soothsay.server.generation.request_bodies import ChatRequest

    nothing = dict.fromkeys(set(ChatRequest.model_fields) - set(CHAT))
    told = [
        httpx.post(f"{running.url}/v1/chat/completions", json={**CHAT, **change, "seed": 4}).json()
        for change in ({}, nothing)
    ]
    assert told[0]["choices"] == told[1]["choices"]


def test_errors_have_the_clients_classes(client: OpenAI) -> None:
    with pytest.raises(NotFoundError) as error:
        client.chat.completions.create(**{**CHAT, "model": "gpt-5"})
    assert error.value.code == "model_not_found"
    with pytest.raises(BadRequestError) as refusal:
        client.chat.completions.create(**{**CHAT, "n": 99})
    assert refusal.value.param == "n"


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"{", 400),
        (b"[" * 100_000, 400),
        (b"\xff\xfe", 400),
        (b'{"model": "sibyl", "prompt": "\\ud800"}', 400),
        (b'{"model": "sibyl", "prompt": "x", "temperature": NaN}', 400),
        (b'{"model": "sibyl", "prompt": "x", "logit_bias": {"1": 1e999}}', 400),
        (b"x" * ((4 << 20) + 1), 413),
    ],
    ids=range(7),
)
def test_malformed_bodies(running: Running, content: bytes, status: int) -> None:
    url, headers = f"{running.url}/v1/completions", {"Content-Type": "application/json"}
    reply = httpx.post(url, content=content, headers=headers)
    assert reply.status_code == status
    assert "error" in reply.json()


def test_huge_body_without_a_length(running: Running) -> None:
    parts = (b" " * (1 << 20) for _ in range(8))
    headers = {"Content-Type": "application/json"}
    with httpx.Client() as http:
        try:
            reply = http.post(f"{running.url}/v1/completions", content=parts, headers=headers)
            assert reply.status_code == 413
        except httpx.TransportError:
            pass  # the server closed the connection before the whole body was sent
    assert httpx.get(f"{running.url}/health").status_code == 200


def test_what_is_not_there(running: Running) -> None:
    for reply, status in (
        (httpx.get(f"{running.url}/v1/nothing"), 404),
        (httpx.get(f"{running.url}/v1/completions"), 405),
        (httpx.post(f"{running.url}/v1/completions", content=b"{}", headers={"Origin": "null"}), 415),
    ):
        assert reply.status_code == status
        assert reply.json()["error"]["message"]
        assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("POST", "/v1/v1/chat/completions", 404, "no path /v1/v1/chat/completions here"),
        ("GET", f"/{'x' * 1000}", 404, f"no path /{'x' * 127} here"),
        ("GET", "/v1/chat/completions", 405, 'this path takes POST"'),
        ("DELETE", "/v1/models/sibyl", 405, 'this path takes GET"'),
        ("POST", "/rerank", 404, "no reranking"),
        ("POST", "/embedding", 404, "no embeddings"),
        ("GET", "/v1/batches", 404, "soothsay batch"),
        ("DELETE", "/api/delete", 404, "one model"),
    ],
)
def test_what_is_not_there_is_said_to_be_missing(
    running: Running, method: str, path: str, status: int, words: str
) -> None:
    reply = httpx.request(method, f"{running.url}{path}")
    assert reply.status_code == status
    assert words in reply.text
    assert len(reply.text) < 400


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ([1], None, "give a JSON object"),
        ({"prompt": {"a": 1}}, "prompt", "it must be a string or a list"),
        ({"prompt": ["a", 1]}, "prompt.1", "prompt.1: it must be a string"),
        ({"prompt": "a", "stop": 3}, "stop", "it must be a string or a list"),
        ({"prompt": "a", "speculation": 3}, "speculation", "it must be an object or true or false"),
        ({"prompt": "a", "stop": ["b", 3]}, "stop.1", "stop.1: it must be a string"),
        ({"prompt": "a", "n": 0}, "n", "n=0 is not possible: it must be between 1 and 16"),
        ({"prompt": "a", "n": 10_000}, "n", "n=10000 is not possible: it must be between 1 and 16"),
        ({}, "prompt", "prompt: it is missing"),
        ({"prompt": "a", "speculation": {"x": 1}}, "speculation.x", "speculation.x is not a parameter"),
    ],
    ids=str,
)
def test_errors_name_no_class_and_no_alternative(
    running: Running, body: Any, param: str | None, words: str
) -> None:
    reply = httpx.post(f"{running.url}/v1/completions", json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert words in error["message"]


def test_a_list_that_is_too_short(running: Running) -> None:
    error = httpx.post(f"{running.url}/v1/chat/completions", json={"messages": []}).json()["error"]
    assert error["message"] == "messages: it must have at least 1 item, not 0"


def test_a_compressed_body_is_refused(running: Running) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    reply = httpx.post(f"{running.url}/v1/completions", content=gzip.compress(b"{}"), headers=headers)
    assert (reply.status_code, "gzip" in reply.text) == (415, True)
    headers["Content-Encoding"] = "identity"
    assert httpx.post(f"{running.url}/v1/completions", content=b"{}", headers=headers).status_code == 400


def test_slow_clients_are_hung_up_on() -> None:
    with serving(engines.sibyl, client_timeout=0.2) as running:
        address = ("127.0.0.1", int(running.url.rpartition(":")[2]))
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        for sent, status in (
            (b"", b""),
            (b"GET / HT", b""),
            (head + b"Content-Length: 100\r\n\r\n{", b"HTTP/1.1 408"),
        ):
            with socket.create_connection(address, timeout=10) as slow:
                slow.sendall(sent)
                said = b"".join(iter(lambda: slow.recv(4096), b""))
            assert said.startswith(status)
            assert bool(said) == bool(status)
        with socket.create_connection(address, timeout=10) as slow:  # slow only in its second request
            slow.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert slow.recv(4096).startswith(b"HTTP/1.1 200")
            slow.sendall(b"GET /heal")
            while slow.recv(4096):
                pass


@pytest.mark.parametrize(
    ("host", "allowed", "keyless", "called", "status"),
    [
        ("127.0.0.1", [], True, "127.0.0.1:8000", 200),
        ("127.0.0.1", [], True, "LocalHost", 200),
        ("::1", [], True, "[::1]:8000", 200),
        ("localhost", [], True, "evil.example", 403),
        ("localhost", [], True, "evil.example:8000", 403),
        ("localhost", [], True, "localhost.evil.example", 403),
        ("localhost", [], True, "", 403),
        ("localhost", ["My.host"], True, "my.host:8000", 200),
        ("localhost", [], False, "my.host", 200),
        ("0.0.0.0", [], True, "my.host", 200),
        ("0.0.0.0", ["my.host"], False, "other.host", 403),
    ],
)
def test_names_that_the_server_answers_to(
    host: str, allowed: list[str], keyless: bool, called: str, status: int
) -> None:
    async def health(_: Request) -> PlainTextResponse:
        return PlainTextResponse("x")

    route = ApiRoute("/health", health, keyless=True)
    config = ServerConfig(name="x", hosts=allowed_hosts(host, allowed, keyless=keyless))
    gate = Gate(Starlette(routes=[route]), config, lambda *_: None, None, [route])

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(gate), base_url="http://x") as http:
            return await http.get("/health", headers={"Host": called})

    reply = asyncio.run(ask())
    assert reply.status_code == status
    if status == 403:
        assert reply.json()["error"]["code"] == "host_not_allowed"
