"""What strangers learn from the server: that it is there. Errors of its own say nothing about its inside."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engines
import httpx
import pytest
import typer
from serving import Running, serving
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from soothsay import __version__
from soothsay.cli.serve_command import trusted_proxies
from soothsay.server.access.api_keys import KeyRing, add_key
from soothsay.server.apis.openai.openai_replies import ChatFormat
from soothsay.server.fleet.watch import Watch
from soothsay.server.runner import make_runner
from soothsay.server.server_config import ServerConfig

SECRET = "/secret/path"
USER = {"role": "user", "content": "Hello"}
POSTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"messages": [USER], "max_tokens": 4},
    "/completion": {"prompt": "Hello"},
    "/api/chat": {"messages": [USER]},
    "/api/generate": {"prompt": "Hello"},
}
"""A body for each API."""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.json"


@pytest.fixture(scope="module")
def keys(file: Path) -> dict[str, dict[str, str]]:
    """Headers with keys, by the kind of key."""
    secrets = {"user": add_key(file, "user"), "operator": add_key(file, "operator", operator=True)}
    named = {name: {"Authorization": f"Bearer {secret}"} for name, secret in secrets.items()}
    return {**named, "none": {}, "wrong": {"X-Api-Key": "sk-wrong"}}


@pytest.fixture(scope="module")
def guarded(file: Path, keys: dict[str, dict[str, str]]) -> Iterator[Running]:
    with serving(engines.sibyl, KeyRing(file), max_failed_keys=3) as running:
        yield running


@pytest.mark.parametrize("kind", ["none", "wrong", "user"])
@pytest.mark.parametrize("path", ["/health", "/v1/health", "/ping", "/ready"])
def test_health_is_a_word_for_all_but_operators(
    guarded: Running, keys: dict[str, dict[str, str]], path: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = httpx.get(guarded.url + path, headers=keys[kind])
    assert (reply.status_code, list(reply.json())) == (200, ["status"])
    for what in ("problem", "status"):
        monkeypatch.setattr(Watch, what, property(lambda _: "engine failing"))
    reply = httpx.get(guarded.url + path, headers=keys[kind])
    assert (reply.status_code, list(reply.json())) == (503, ["status"])


def test_operators_learn_more(
    guarded: Running, keys: dict[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert httpx.get(f"{guarded.url}/health", headers=keys["operator"]).json()["engine_pid"]
    monkeypatch.setattr(Watch, "problem", property(lambda _: "too many requests are waiting"))
    reply = httpx.get(f"{guarded.url}/ready", headers=keys["operator"])
    assert (reply.status_code, reply.json()["reason"]) == (503, "too many requests are waiting")


def test_strangers_see_the_page_and_nothing_else(guarded: Running) -> None:
    folder = resources.files("soothsay.server") / "site"
    public = [file.read_bytes() for file in folder.iterdir()]
    public += [b'{"status":"ok"}', b'{"status":"ready"}']
    paths = guarded.server.app._routes  # type: ignore[attr-defined]
    with httpx.Client(base_url=guarded.url) as http:
        for path in (*paths, "/no/such/path", "/docs", "/%2e%2e/etc/passwd"):
            reply = http.get(path)
            assert reply.content in public or reply.status_code == 401, path
            told = f"{reply.headers}".lower()
            assert not [word for word in ("uvicorn", "python", "soothsay", __version__) if word in told]


def test_wrong_keys_are_counted_by_who_connects_and_not_by_a_header(guarded: Running) -> None:
    transport = httpx.HTTPTransport(local_address="127.0.0.9")
    with httpx.Client(base_url=guarded.url, transport=transport) as http:
        statuses = [
            http.get("/v1/models", headers={"X-Api-Key": "x", "X-Forwarded-For": f"10.0.0.{n}"}).status_code
            for n in range(5)
        ]
    assert statuses == [401, 401, 401, 429, 429]


@pytest.mark.parametrize(
    ("trusted", "peer", "forwarded", "seen"),
    [
        ([], "127.0.0.1", "1.2.3.4", "127.0.0.1"),
        (["127.0.0.1"], "127.0.0.1", "1.2.3.4", "1.2.3.4"),
        (["127.0.0.1"], "127.0.0.1", "6.6.6.6, 1.2.3.4", "1.2.3.4"),
        (["127.0.0.1"], "127.0.0.2", "1.2.3.4", "127.0.0.2"),
        (["10.0.0.0/8", "::1"], "10.1.2.3", "6.6.6.6, 1.2.3.4, 10.9.9.9", "1.2.3.4"),
        (["10.0.0.0/8", "::1"], "::1", "2001:db8::1", "2001:db8::1"),
        (["10.0.0.0/8", "::1"], "11.0.0.1", "1.2.3.4", "11.0.0.1"),
    ],
)
def test_only_a_trusted_proxy_says_where_a_request_comes_from(
    trusted: list[str], peer: str, forwarded: str, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse(scope["client"][0])(scope, receive, send)

    server: Any = SimpleNamespace(app=app, config=ServerConfig("x", trusted_proxies=trusted_proxies(trusted)))
    config = make_runner(server, "127.0.0.1", 0).config
    config.load()
    transport = httpx.ASGITransport(config.loaded_app, client=(peer, 1))

    async def ask() -> str:
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            return (await http.get("/", headers={"X-Forwarded-For": forwarded})).text

    assert asyncio.run(ask()) == seen


@pytest.mark.parametrize("given", ["*", "proxy.example", "10.0.0.1/8", ""])
def test_a_proxy_is_an_address_or_a_network(given: str) -> None:
    with pytest.raises(typer.BadParameter, match="--trusted-proxy"):
        trusted_proxies([given])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", POSTS)
def test_a_failure_of_the_server_is_told_without_its_text(
    running: Running, path: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any) -> None:
        raise RuntimeError(SECRET)

    monkeypatch.setattr(running.server.loop, "submit", fail)
    reply = httpx.post(running.url + path, json={"model": "sibyl", "stream": stream, **POSTS[path]})
    assert reply.status_code == 500
    assert "see its log" in reply.text
    assert SECRET not in reply.text + str(reply.headers)


def test_so_is_a_failure_without_an_answer(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError(SECRET)

    monkeypatch.setattr("soothsay.server.generation.request_prompts.PromptReader.encode", fail)
    monkeypatch.setattr(running.server.metrics, "text", fail)
    for reply in (
        httpx.post(f"{running.url}/tokenize", json={"prompt": "Hello"}),
        httpx.get(f"{running.url}/metrics"),
    ):
        assert reply.status_code == 500
        assert SECRET not in reply.text


def test_a_failure_within_a_stream_is_told_without_its_text(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError(SECRET)

    monkeypatch.setattr(ChatFormat, "update", fail)
    body = {"messages": [USER], "stream": True, "max_tokens": 4}
    told = b""
    url = f"{running.url}/v1/chat/completions"
    with suppress(httpx.RemoteProtocolError), httpx.stream("POST", url, json=body) as reply:
        for part in reply.iter_bytes():
            told += part
    assert told
    assert b"[DONE]" not in told
    assert SECRET.encode() not in told
    running.wait_until(lambda: running.free)


def test_drafters_are_named_without_folders() -> None:
    folder = resources.files("soothsay") / "bundled" / "sibyl" / "drafters"
    spec = f"suffix | medusa(model={folder / 'medusa'})"
    with serving(partial(engines.sibyl, drafter=spec)) as running:
        shown = httpx.get(f"{running.url}/v1/models").text
        url, asked = f"{running.url}/v1/chat/completions", {"messages": [USER], "max_tokens": 3}
        wrong, answer = (
            httpx.post(url, json={**asked, "speculation": {"drafter": name}}, timeout=60)
            for name in ("eagle9", "suffix | medusa(model=medusa)")
        )
    assert answer.status_code == 200
    assert "choose from suffix | medusa(model=medusa), none" in wrong.json()["error"]["message"]
    assert str(folder) not in shown + wrong.text + answer.text
