"""What keys allow: priorities, traces, metrics, answers at once; and wrong keys."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import engines
import httpx
import pytest
from serving import Running, serving

from soothsay.server import http_server
from soothsay.server.access.accounts import Account, Charge, FailedKeys, Key
from soothsay.server.access.api_keys import KeyRing, add_key
from soothsay.server.http.api_errors import ApiError
from soothsay.server.server_config import network

BODY: dict[str, Any] = {"model": "sibyl", "prompt": "A man", "temperature": 0, "max_tokens": 2}
TRACED = {**BODY, "stream": True, "speculation": {"trace": True}}
LOWEST = -(2**31)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    add_key(path, "first")
    return path


@pytest.fixture(scope="module")
def guarded(file: Path) -> Iterator[Running]:
    with serving(engines.fragile, KeyRing(file), max_failed_keys=3) as running:
        yield running


def post(running: Running, key: str | None, body: dict[str, Any]) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{running.url}/v1/completions", json=body, headers=headers, timeout=60)


def refusal(reply: httpx.Response) -> tuple[int, str, str | None]:
    error = reply.json()["error"]
    return reply.status_code, error["code"], error["param"]


@pytest.mark.parametrize(
    ("granted", "asked", "allowed"),
    [
        (0, 0, True),
        (0, 2**31 - 1, True),
        (0, -1, False),
        (0, LOWEST, False),
        (-5, -5, True),
        (-5, -6, False),
        (LOWEST, LOWEST, True),
        (3, 3, True),
        (3, 2, False),
        (3, None, True),  # the default is 0, or what the key allows
    ],
)
def test_a_key_grants_priorities(
    guarded: Running, file: Path, granted: int, asked: int | None, allowed: bool
) -> None:
    key = add_key(file, f"priority {granted} {asked}", priority=granted)
    reply = post(guarded, key, {**BODY, "priority": asked})
    if allowed:
        assert reply.status_code == 200, reply.text
    else:
        assert refusal(reply) == (403, "not_allowed", "priority")
        assert str(granted) in reply.json()["error"]["message"]


@pytest.mark.parametrize("priority", [2**31, -(2**31) - 1])
def test_priorities_are_bounded(guarded: Running, file: Path, priority: int) -> None:
    key = add_key(file, f"bounded {priority}", priority=LOWEST)
    assert refusal(post(guarded, key, {**BODY, "priority": priority})) == (400, "invalid_value", "priority")


def test_a_server_without_keys_grants_priorities_too(running: Running) -> None:
    assert post(running, None, {**BODY, "priority": 5}).status_code == 200
    assert refusal(post(running, None, {**BODY, "priority": -1})) == (403, "not_allowed", "priority")
    assert post(running, None, TRACED).status_code == 200


def test_a_key_grants_traces(guarded: Running, file: Path) -> None:
    without, granted = add_key(file, "no traces"), add_key(file, "traces", trace=True)
    assert refusal(post(guarded, without, TRACED)) == (403, "not_allowed", "speculation.trace")
    untraced = {**TRACED, "speculation": {"trace": False}}
    assert '"steps"' not in post(guarded, without, untraced).text
    assert '"steps"' in post(guarded, granted, TRACED).text


def test_metrics_are_for_operators(guarded: Running, file: Path) -> None:
    usual, operator = add_key(file, "usual"), add_key(file, "operator", operator=True)
    for key, status in ((usual, 403), (operator, 200)):
        headers = {"Authorization": f"Bearer {key}"}
        assert httpx.get(f"{guarded.url}/metrics", headers=headers).status_code == status
        assert httpx.get(f"{guarded.url}/v1/models", headers=headers).status_code == 200
    assert httpx.get(f"{guarded.url}/metrics").status_code == 401


def test_a_key_has_a_limit_of_answers_at_once(guarded: Running, file: Path) -> None:
    key = add_key(file, "few", running=2)
    endless = {**BODY, "prompt": [engines.SLOW, 17], "max_tokens": 2000, "ignore_eos": True, "stream": True}
    headers = {"Authorization": f"Bearer {key}"}
    assert post(guarded, key, {**BODY, "n": 3}).status_code == 429
    with httpx.stream("POST", f"{guarded.url}/v1/completions", json=endless, headers=headers) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert post(guarded, key, BODY).status_code == 200
        reply = post(guarded, key, {**BODY, "n": 2})
        assert refusal(reply)[:2] == (429, "rate_limit_exceeded")
        assert reply.headers["retry-after"] == "1"
    guarded.wait_until(lambda: guarded.free)
    for change in ({"max_tokens": -2}, {"prompt": [10**9]}, {"prompt": ""}, {"guided_regex": "("}):
        assert post(guarded, key, {**BODY, **change}).status_code == 400
    assert post(guarded, key, {**BODY, "n": 2}).status_code == 200  # no answer is counted any more


def test_who_asks_for_one_answer_does_not_wait_for_the_many_of_another(guarded: Running, file: Path) -> None:
    greedy, other = add_key(file, "greedy"), add_key(file, "modest")
    many = {**BODY, "prompt": [[engines.SLOW, 17]] * 16, "n": 16, "temperature": 1, "max_tokens": 2000}
    body, headers = {**many, "ignore_eos": True, "stream": True}, {"Authorization": f"Bearer {greedy}"}
    with httpx.stream("POST", f"{guarded.url}/v1/completions", json=body, headers=headers) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert post(guarded, other, BODY).status_code == 200
        assert "[DONE]" not in next(lines), "the many go on"
    guarded.wait_until(lambda: guarded.free)


def test_parallel_requests_share_a_limit_of_tokens(guarded: Running, file: Path) -> None:
    key = add_key(file, "parallel", tokens_per_minute=100)
    body = {**BODY, "prompt": [50] * 40, "max_tokens": 1}
    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda _: post(guarded, key, body), range(16)))
    served = [reply for reply in replies if reply.status_code == 200]
    assert 1 <= len(served) <= 4  # each takes 41 of 100 tokens; a few more may have refilled
    assert {reply.status_code for reply in replies} == {200, 429}


def test_a_refused_prompt_is_given_back() -> None:
    account = Account(Key(name="a", sha256="0" * 64, tokens_per_minute=100, running=1))
    account.tokens._clock = lambda: 0.0
    account.tokens._at = 0.0
    first = account.admit(1, 90)
    with pytest.raises(ApiError, match="answers at once"):
        account.admit(1, 1)
    first.end(refund=True)
    second = account.admit(1, 90)
    second.grow(0, 5)
    second.grow(0, 30)
    second.end(refund=True)  # it has answered, so nothing is given back
    second.end(refund=True)
    assert account.running == 0
    assert account.tokens.wait() == pytest.approx((1 + 90 + 30 - 100) * 60 / 100)
    with pytest.raises(ApiError, match="this minute") as over:
        account.admit(1, 1)
    assert over.value.headers["Retry-After"] == "13"
    Charge(None, 3, 5).end()


def test_refusals_for_a_quota_do_not_read_the_body(guarded: Running, file: Path) -> None:
    key = add_key(file, "spent", requests_per_minute=1)
    assert post(guarded, key, BODY).status_code == 200
    assert post(guarded, key, {"not": "checked"}).status_code == 429
    account = Account(Key(name="a", sha256="0" * 64, running=1, requests_per_minute=2))
    answer = account.admit(1, 1)
    account.charge_request(with_answers=False)
    with pytest.raises(ApiError, match="answers at once"):
        account.charge_request(with_answers=True)
    answer.end()
    account.charge_request(with_answers=True)
    account = Account(Key(name="a", sha256="0" * 64, tokens_per_minute=1))
    account.admit(1, 5).end()
    with pytest.raises(ApiError, match="this minute"):
        account.charge_request(with_answers=False)


def test_the_address_that_failed_first_is_forgotten_first() -> None:
    failed = FailedKeys(1, clock=lambda: 0.0)
    failed.MAX_ADDRESSES = 2
    for address in ("1.1.1.1", "2.2.2.2", "3.3.3.3"):
        failed.count(address)
    for address in ("3.3.3.3", "2.2.2.2"):
        with pytest.raises(ApiError):
            failed.count(address)
    failed.count("1.1.1.1")
    with pytest.raises(ApiError):
        failed.count("2.2.2.2")
    failed.count("3.3.3.3")


def test_wrong_keys_are_limited_by_address(guarded: Running, file: Path) -> None:
    key = add_key(file, "neighbour")
    other = {"Authorization": "Basic eDp5"}  # this tries no key
    replies = [httpx.post(f"{guarded.url}/v1/completions", json=BODY, headers=other) for _ in range(5)]
    assert [reply.status_code for reply in replies] == [401] * 5
    statuses = [post(guarded, f"wrong {n}", BODY) for n in range(5)]
    assert [reply.status_code for reply in statuses] == [401, 401, 401, 429, 429]
    assert 1 <= int(statuses[-1].headers["retry-after"]) <= 20
    assert post(guarded, key, BODY).status_code == 200  # an address may be that of a proxy


def test_failures_are_counted_for_each_network() -> None:
    now = 0.0
    failed = FailedKeys(2, clock=lambda: now)
    for address in ("1.2.3.4", "1.2.3.5", "2001:db8::1", ""):
        failed.count(address)
        failed.count(address)
        with pytest.raises(ApiError) as much:
            failed.count(address)
        assert (much.value.status, much.value.headers) == (429, {"Retry-After": "30"})
    with pytest.raises(ApiError):
        failed.count("2001:db8::ffff")
    failed.count("2001:db8:0:1::1")
    now = 30.0
    failed.count("1.2.3.4")
    failed.MAX_ADDRESSES = 100
    for number in range(1000):
        failed.count(f"9.9.{number // 250}.{number % 250}")
    assert len(failed._left) <= 100


@pytest.mark.parametrize(
    ("address", "counts_as"),
    [
        ("1.2.3.4", "1.2.3.4"),
        ("::ffff:1.2.3.4", "1.2.3.4"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("fe80::1%eth0", "fe80::"),
        ("unix", ""),
        ("1.2.3.4, " + "x" * 30_000, ""),
    ],
)
def test_networks(address: str, counts_as: str) -> None:
    assert network(address) == counts_as


def test_requests_that_cost_something_count(guarded: Running, file: Path) -> None:
    for method, path in (("GET", "/props"), ("GET", "/openapi.json"), ("POST", "/tokenize")):
        key = add_key(file, f"one {path}", requests_per_minute=1)
        headers = {"Authorization": f"Bearer {key}"}
        body = {"prompt": "Hi"} if method == "POST" else None
        statuses = [
            httpx.request(method, f"{guarded.url}{path}", json=body, headers=headers).status_code
            for _ in range(3)
        ]
        assert statuses == [200, 429, 429]


def test_what_monitors_and_clients_poll_does_not_count(guarded: Running, file: Path) -> None:
    key = add_key(file, "monitor", operator=True, requests_per_minute=1)
    headers = {"Authorization": f"Bearer {key}"}
    for path in ("/metrics", "/slots", "/replicas", "/v1/models", "/v1/models", "/openapi.json"):
        assert httpx.get(f"{guarded.url}{path}", headers=headers).status_code == 200


def test_the_description_of_the_routes_is_made_once(
    guarded: Running, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers = {"Authorization": f"Bearer {add_key(file, 'reader')}"}
    first = httpx.get(f"{guarded.url}/openapi.json", headers=headers)
    monkeypatch.setattr(http_server, "describe", None)
    again = httpx.get(f"{guarded.url}/openapi.json", headers=headers)
    assert first.status_code == again.status_code == 200
    assert first.json() == again.json()
