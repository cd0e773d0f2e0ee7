"""Attacks that once worked: each is refused soon, and the server serves on."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import engines
import httpx
import pytest
from attacks import ATTACKS
from openai import OpenAI
from serving import Running, serving

JSON = {"content-type": "application/json"}


HARMLESS = ("arguments in arguments",)
"""What is served: arguments that are no JSON are a text."""


@pytest.fixture(scope="module")
def attacked() -> Iterator[Running]:
    with serving(engines.sibyl) as running:
        yield running


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_refused_and_others_are_served(name: str, attacked: Running) -> None:
    path, body = ATTACKS[name]
    answer = httpx.post(f"{attacked.url}{path}", content=body, headers=JSON, timeout=20)
    assert answer.status_code < 500, answer.text
    if name not in HARMLESS:
        assert answer.status_code >= 400
        assert 0 < len(answer.json()["error"]["message"]) < 2000
    with attacked.client() as client:
        assert served(client)
        assert served(client, guided_regex="yes|no")
    assert httpx.get(f"{attacked.url}/health").json()["engine_restarts"] == 0
    attacked.wait_until(lambda: attacked.free)


def served(client: OpenAI, **fields: str) -> str:
    """The text of a short answer."""
    answer = client.completions.create(
        model="sibyl", prompt="Once upon a time", max_tokens=8, temperature=0, extra_body=fields
    )
    return answer.choices[0].text


def test_many_attacks_that_hang_up_at_once_keep_nobody_waiting(attacked: Running) -> None:
    path, body = ATTACKS["thousands of properties"]
    host, _, port = attacked.url.removeprefix("http://").partition(":")
    for number in range(12):
        another = body.replace(b'"p', f'"n{number}'.encode())
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        with socket.create_connection((host, int(port))) as client:
            client.sendall(head.encode() + b"Content-Length: %d\r\n\r\n%s" % (len(another), another))
    with attacked.client() as client:
        assert served(client, guided_regex="(yes|no)!")
    attacked.wait_until(lambda: attacked.free)
