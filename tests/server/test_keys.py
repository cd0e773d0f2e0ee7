"""API keys: which requests pass, what a key is charged, and the file of keys."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engines
import httpx
import pytest
from openai import AuthenticationError, RateLimitError
from serving import Running, serving
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from soothsay import LLM
from soothsay.server.access.accounts import Allowance
from soothsay.server.access.api_keys import KeyFileError, KeyRing, add_key, read_keys, remove_key
from soothsay.server.access.gate import Gate
from soothsay.server.http.api_route import ApiRoute
from soothsay.server.server_config import ServerConfig

COMPLETION: dict[str, Any] = {"model": "sibyl", "prompt": "Hi", "max_tokens": 1}
CHAT: dict[str, Any] = {
    "model": "sibyl",
    "messages": [{"role": "user", "content": "Can you explain why the sky is blue?"}],
    "max_tokens": 3,
}
PROMPTS = ["A man in a blue shirt", "Once upon a time there was a fox"]


@dataclass(frozen=True)
class Guarded:
    """A server that needs API keys, and the file that holds them."""

    running: Running
    ring: KeyRing
    file: Path

    def add(self, name: str, **limits: int) -> str:
        return add_key(self.file, name, **limits)

    def billed(self, name: str) -> tuple[str, Bill]:
        """A new key without limits, and the record of its charges."""
        key, bill = self.add(name), Bill()
        account = self.ring.find(key)
        assert account is not None
        account.tokens = bill
        return key, bill


class Bill(Allowance):
    """An allowance without a limit. It records the charges."""

    def __init__(self) -> None:
        super().__init__(None)
        self.charges: list[float] = []

    def charge(self, amount: float) -> None:
        self.charges.append(amount)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    add_key(file, "first")
    ring = KeyRing(file)
    with serving(engines.sibyl, ring) as running:
        yield Guarded(running, ring, file)


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        ("Bearer KEY", 200),
        ("bearer KEY", 200),  # RFC 9110: the case of a scheme does not matter
        ("BEARER   KEY", 200),
        (None, 401),
        ("", 401),
        ("Bearer", 401),
        ("Bearer ", 401),
        ("KEY", 401),
        (" KEY", 401),
        ("BearerKEY", 401),
        ("Bearer, KEY", 401),
        ("Bearer KEY KEY", 401),
        ("Bearer other", 401),
        ("Basic KEY", 401),
        ("Digest KEY", 401),
        ("Token KEY", 401),
        ("ApiKey KEY", 401),
        ("Bearers KEY", 401),
        ("X Bearer KEY", 401),
        ("KEY Bearer", 401),
    ],
)
def test_only_bearers_of_a_key_pass(authorization: str | None, status: int, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    key = add_key(file, "me")
    seen: list[str] = []

    async def whoami(http: Request) -> PlainTextResponse:
        seen.append(http.state.account.key.name)
        return PlainTextResponse("x")

    route = ApiRoute("/v1/models", whoami)
    gate = Gate(Starlette(routes=[route]), ServerConfig(name="x"), lambda *_: None, KeyRing(file), [route])
    given = {} if authorization is None else {"Authorization": authorization.replace("KEY", key)}

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(gate), base_url="http://x") as http:
            return await http.get(f"/v1/models?api_key={key}", headers={**given, "Api-Key": key})

    reply = asyncio.run(ask())
    assert (reply.status_code, seen) == (status, ["me"] if status == 200 else [])
    if status == 401:
        assert reply.json()["error"]["code"] == "invalid_api_key"
        assert reply.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_is_charged_for_prompt_and_answer(guarded: Guarded, sibyl: LLM, stream: bool) -> None:
    key, bill = guarded.billed(f"chat, {stream}")
    body = {**CHAT, "stream": stream, "ignore_eos": True}
    ask(guarded, "/v1/chat/completions", body, key)
    guarded.running.wait_until(lambda: guarded.running.free)
    prompt = len(sibyl.chat_prompt(CHAT["messages"]))
    assert (bill.charges[0], sum(bill.charges)) == (prompt, prompt + 3)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_charged_once_and_every_answer_to_it(guarded: Guarded, sibyl: LLM, stream: bool) -> None:
    key, bill = guarded.billed(f"completions, {stream}")
    body = {**COMPLETION, "prompt": PROMPTS, "n": 2, "max_tokens": 4, "ignore_eos": True, "stream": stream}
    ask(guarded, "/v1/completions", body, key)
    guarded.running.wait_until(lambda: guarded.running.free)
    assert sibyl.tokenizer is not None
    read = sum(len(sibyl.tokenizer.encode(prompt)) for prompt in PROMPTS)
    assert (bill.charges[0], sum(bill.charges)) == (read, read + 2 * 2 * 4)


def test_a_client_that_hangs_up_is_charged_for_what_was_said(guarded: Guarded, sibyl: LLM) -> None:
    key, bill = guarded.billed("hasty")
    prompt = len(sibyl.chat_prompt(CHAT["messages"]))
    with guarded.running.client(key) as client:
        asked = {**CHAT, "max_tokens": 2000, "stream": True, "extra_body": {"ignore_eos": True}}
        with client.chat.completions.create(**asked) as stream:
            next(chunk for chunk in stream if chunk.choices[0].delta.content)
    guarded.running.wait_until(lambda: guarded.running.free)
    assert prompt < sum(bill.charges) < prompt + 2000


def test_what_is_refused_is_not_charged(guarded: Guarded) -> None:
    key, bill = guarded.billed("wrong")
    headers = {"Authorization": f"Bearer {key}"}
    url = f"{guarded.running.url}/v1/completions"
    assert httpx.post(url, json={**COMPLETION, "max_tokens": -2}, headers=headers).status_code == 400
    assert httpx.post(url, json={**COMPLETION, "prompt": [10**9]}, headers=headers).status_code == 400
    assert sum(bill.charges) == 0


def test_a_long_prompt_uses_up_a_key(guarded: Guarded) -> None:
    key = guarded.add("wordy", tokens_per_minute=30)
    body = {**COMPLETION, "prompt": "word " * 100}  # the answer adds one token
    ask(guarded, "/v1/completions", body, key)
    with guarded.running.client(key) as client, pytest.raises(RateLimitError) as much:
        client.completions.create(**COMPLETION)
    assert int(much.value.response.headers["retry-after"]) > 60


def ask(guarded: Guarded, path: str, body: dict[str, Any], key: str) -> None:
    headers = {"Authorization": f"Bearer {key}"}
    reply = httpx.post(f"{guarded.running.url}{path}", json=body, headers=headers, timeout=60)
    assert reply.status_code == 200, reply.text


def test_keys(guarded: Guarded) -> None:
    running, file = guarded.running, guarded.file
    good = guarded.add("good")
    limited = guarded.add("limited", requests_per_minute=2)
    thrifty = guarded.add("thrifty", tokens_per_minute=10)
    assert good not in file.read_text()
    assert file.stat().st_mode & 0o077 == 0
    for key in ("none", "sk-", good[:-1], f"{good}x"):
        with running.client(key) as client, pytest.raises(AuthenticationError) as wrong:
            client.completions.create(**COMPLETION)
        assert wrong.value.code == "invalid_api_key"
    for path, status in (("/health", 200), ("/ready", 200), ("/metrics", 401), ("/v1/models", 401)):
        assert httpx.get(running.url + path).status_code == status
    with running.client(good) as client:
        for _ in range(4):
            client.completions.create(**COMPLETION)
    with running.client(limited) as client:
        client.completions.create(**COMPLETION)
        client.completions.create(**COMPLETION)
        with pytest.raises(RateLimitError) as much:
            client.completions.create(**COMPLETION)
        assert 1 <= int(much.value.response.headers["retry-after"]) <= 30
        assert client.models.list().data  # only POST requests count
    with running.client(thrifty) as client:
        client.completions.create(**{**COMPLETION, "max_tokens": 20, "extra_body": {"ignore_eos": True}})
        with pytest.raises(RateLimitError):
            client.completions.create(**COMPLETION)
    late = add_key(file, "late")
    remove_key(file, "good")
    with running.client(late) as client:
        client.completions.create(**COMPLETION)
    with running.client(good) as client, pytest.raises(AuthenticationError):
        client.completions.create(**COMPLETION)
    with running.client(limited) as client, pytest.raises(RateLimitError):  # its account stayed
        client.completions.create(**COMPLETION)


def test_key_files(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    add_key(file, "a", tokens_per_minute=5)
    with pytest.raises(KeyFileError, match="has a key named 'a'"):
        add_key(file, "a")
    with pytest.raises(KeyFileError, match="no key named 'b'"):
        remove_key(file, "b")
    assert [(key.name, key.tokens_per_minute) for key in read_keys(file)] == [("a", 5)]
    file.write_text(json.dumps({"keys": [{"name": "a"}]}))
    with pytest.raises(KeyFileError, match="is not a file of API keys"):
        KeyRing(file)
    with pytest.raises(KeyFileError, match="cannot be read"):
        KeyRing(tmp_path / "none.json")


def test_allowance() -> None:
    now = 0.0
    allowance = Allowance(60, clock=lambda: now)
    assert allowance.wait() == 0
    allowance.charge(60)
    assert allowance.wait() == pytest.approx(1)
    now = 1.0
    assert allowance.wait() == 0
    allowance.charge(31)  # into debt
    assert allowance.wait() == pytest.approx(31)
    now = 10_000.0
    allowance.charge(59)
    assert allowance.wait() == 0
    allowance.charge(1)
    assert allowance.wait() == pytest.approx(1)  # no more than a minute's worth was saved
    assert Allowance(None).wait() == 0


def test_an_allowance_refills_at_the_rate_of_the_time_that_has_passed() -> None:
    now = 0.0
    allowance = Allowance(60, clock=lambda: now)
    allowance.charge(70)
    now = 20.0
    allowance.limit(600)  # 20 s at 1 a second have passed: 10 are left, and 540 more with the new limit
    allowance.charge(550)
    assert allowance.wait() == pytest.approx(0.1)


STORY = " ".join(["The patient Jonathan was given nine grams of colchicine on Thursday."] * 3)


def cached_tokens(running: Running, key: str, **fields: Any) -> int:
    """How many tokens of a story's prompt the prefix cache had."""
    body = {**COMPLETION, "prompt": STORY, "extra_body": fields}
    with running.client(key) as client:
        usage = client.completions.create(**body).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    return usage.prompt_tokens_details.cached_tokens or 0


def test_keys_and_salts_share_no_prefixes(guarded: Guarded) -> None:
    alice, bob = guarded.add("alice apart"), guarded.add("bob apart")
    known = [cached_tokens(guarded.running, alice) for _ in range(2)]
    assert known[0] == 0 < known[1]
    assert cached_tokens(guarded.running, bob) == 0
    assert cached_tokens(guarded.running, alice, cache_salt="x") == 0
    assert cached_tokens(guarded.running, alice, cache_salt="x") == known[1]
    assert cached_tokens(guarded.running, bob, cache_salt="x") == 0


def test_a_name_that_is_given_to_another_key_inherits_nothing(guarded: Guarded) -> None:
    before = guarded.add("lent")
    cached_tokens(guarded.running, before)
    remove_key(guarded.file, "lent")
    after = guarded.add("lent")
    assert cached_tokens(guarded.running, after) == 0
    key = next(key for key in read_keys(guarded.file) if key.name == "lent")
    others = [own.model_dump() for own in read_keys(guarded.file) if own != key]
    renamed = {**key.model_dump(), "name": "renamed"}
    guarded.file.write_text(json.dumps({"keys": [*others, renamed]}))
    assert cached_tokens(guarded.running, after) > 0, "the key is the same"


def test_an_operator_may_let_keys_share(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    alice, bob = add_key(file, "alice"), add_key(file, "bob")
    with serving(engines.sibyl, KeyRing(file), share_between_keys=True) as running:
        assert cached_tokens(running, alice) == 0
        assert cached_tokens(running, bob) > 0
        assert cached_tokens(running, bob, cache_salt="x") == 0


def test_other_apis_need_a_key_too(guarded: Guarded) -> None:
    url, key = guarded.running.url, guarded.add("of other APIs")
    bodies = {
        "/v1/responses": {"model": "sibyl", "input": "Hi", "max_output_tokens": 1},
        "/api/chat": {"model": "sibyl", "messages": CHAT["messages"], "options": {"num_predict": 1}},
        "/api/generate": {"model": "sibyl", "prompt": "Hi", "options": {"num_predict": 1}},
        "/api/show": {"model": "sibyl"},
    }
    for path in (*bodies, "/api/tags", "/api/ps", "/api/version", "/version"):
        method = "POST" if path in bodies else "GET"
        refused = httpx.request(method, f"{url}{path}", json=bodies.get(path))
        assert refused.status_code == 401
        assert isinstance(refused.json()["error"], str if path.startswith("/api/") else dict)
        headers = {"Authorization": f"Bearer {key}"}
        assert httpx.request(method, f"{url}{path}", json=bodies.get(path), headers=headers).is_success
    told = guarded.running.server.metrics.text().decode()
    for path in bodies:
        assert f'path="{path}",status="200"' in told
    assert httpx.get(f"{url}/ping").json().keys() == httpx.post(f"{url}/ping").json().keys()
    assert httpx.get(f"{url}/ping").status_code == httpx.head(url).status_code == 200
