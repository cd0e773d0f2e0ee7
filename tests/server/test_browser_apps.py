"""A server for pages of other origins: CORS, keys of --api-key, several names, and what is logged."""

from __future__ import annotations

import json
import logging
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import engines
import httpx
import pytest
from places import ROOT
from serving import Running, command, serving
from typer.testing import CliRunner

from soothsay.cli.app import app
from soothsay.server.access.api_keys import KeyFileError, KeyRing, add_key

APP, KEY = "https://app.example.com", "key-of-the-app"
ASKED = {"model": "second", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
PREFLIGHT = {
    "Origin": APP,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with two keys of --api-key and one of a file, which is at `running.server.keys`."""
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    add_key(file, "operator", operator=True)
    ring = KeyRing(file, (KEY, "another-key"))
    options = {"aliases": ("second",), "cors_origins": (APP,)}
    with serving(engines.sibyl, ring, "first", **options) as one:
        yield one


def chat(running: Running, key: str = KEY, origin: str = APP) -> httpx.Response:
    """A request as a page's script sends it."""
    headers = {"Origin": origin, "Authorization": f"Bearer {key}"}
    return httpx.post(f"{running.url}/v1/chat/completions", json=ASKED, headers=headers, timeout=60)


def test_a_page_of_an_allowed_origin_asks_and_reads(running: Running) -> None:
    asked = httpx.options(f"{running.url}/v1/chat/completions", headers=PREFLIGHT)
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == APP
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert asked.headers["access-control-allow-headers"] == "authorization,content-type"
    said = chat(running)
    assert said.status_code == 200
    assert said.headers["access-control-allow-origin"] == APP
    read = said.headers["access-control-expose-headers"].split(", ")
    assert {"X-Request-Id", "Retry-After", "X-Ignored-Fields"} <= {*read}
    refused = chat(running, "wrong-key")
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, APP)


def test_a_public_page_of_an_allowed_origin_reaches_a_private_network(running: Running) -> None:
    asked, allowed = "Access-Control-Request-Private-Network", "access-control-allow-private-network"
    for origin, status, told in ((APP, 200, "true"), ("https://evil.example.com", 400, None)):
        headers = {**PREFLIGHT, "Origin": origin, asked: "true"}
        reply = httpx.options(f"{running.url}/v1/chat/completions", headers=headers)
        assert reply.status_code == status
        assert "access-control-allow-origin" in reply.headers or told is None
        assert told is None or reply.headers[allowed] == told


def test_a_page_of_another_origin_reads_nothing(running: Running) -> None:
    evil = {**PREFLIGHT, "Origin": "https://evil.example.com"}
    asked = httpx.options(f"{running.url}/v1/chat/completions", headers=evil)
    assert asked.status_code == 400
    assert "access-control-allow-origin" not in asked.headers
    assert "access-control-allow-origin" not in chat(running, origin="https://evil.example.com").headers


def test_the_keys_of_options_and_of_the_file_work_side_by_side(running: Running) -> None:
    assert {chat(running, key).status_code for key in (KEY, "another-key")} == {200}
    assert httpx.get(f"{running.url}/metrics", headers={"X-Api-Key": KEY}).status_code == 403
    assert httpx.get(f"{running.url}/v1/models").status_code == 401


def test_all_names_are_served_and_replies_have_the_first(running: Running) -> None:
    assert chat(running).json()["model"] == "first"
    headers = {"X-Api-Key": KEY}
    listed = httpx.get(f"{running.url}/v1/models", headers=headers).json()["data"]
    assert [model["id"] for model in listed] == ["first", "second"]
    tags = httpx.get(f"{running.url}/api/tags", headers=headers).json()["models"]
    assert [model["name"] for model in tags] == ["first:latest", "second:latest"]
    third = httpx.post(
        f"{running.url}/v1/chat/completions", json={**ASKED, "model": "third"}, headers=headers
    )
    assert third.status_code == 404


def test_polls_are_logged_for_debugging_only(running: Running, caplog: pytest.LogCaptureFixture) -> None:

    def levels() -> dict[str, str]:
        told = [vars(one) for one in caplog.records if one.message == "request"]
        return {one["path"]: one["levelname"] for one in told}

    logger = logging.getLogger("soothsay.server")
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.DEBUG, "soothsay.server"):
            for path in ("/health", "/ready", "/", "/metrics"):
                httpx.get(running.url + path, headers={"X-Api-Key": KEY})
            chat(running)
            running.wait_until(lambda: len(levels()) == 5)
    finally:
        logger.removeHandler(caplog.handler)
    refused = {"/metrics": "INFO", "/v1/chat/completions": "INFO"}  # the key may not read the metrics
    assert levels() == {"/health": "DEBUG", "/ready": "DEBUG", "/": "DEBUG", **refused}


def test_given_keys_are_valid_while_the_file_is_broken(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    secret = add_key(file, "me")
    ring = KeyRing(file, [KEY])
    file.write_text("{")
    found = ring.find(KEY)
    assert found is not None
    assert (found.key.name, found.key.operator, found.key.tokens_per_minute) == ("--api-key 1", False, None)
    for other in (secret, "wrong-key"):
        with pytest.raises(KeyFileError, match="is not a file of API keys"):
            ring.find(other)


def test_keys_without_a_file_need_none() -> None:
    ring = KeyRing(None, [KEY])
    ring.check()
    assert ring.find(KEY) is not None
    assert ring.find("wrong-key") is None
    assert ring.find("") is None


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--api-key", "short"], "key 1 of --api-key has 5 characters: a key has 8 to 256 printable ones"),
        (["--api-key", KEY, "--api-key", "with a space"], "key 2 of --api-key has 12 characters"),
        (["--api-key", __file__], "key 1 of --api-key names a file; a file of keys is given with --api-keys"),
        (["--cors-origin", "foo"], "--cors-origin foo: give scheme and host"),
        (["--cors-origin", "https://a.example/"], "without a path"),
        (["--cors-origin", "https://*.example"], "--cors-origin https://*.example: give scheme"),
        (["--cors-origin", "https://user@a.example"], "--cors-origin https://user@a.example: give scheme"),
        (["--kv-memory", "5X"], "--kv-memory: '5X' is no size of memory"),
        (["--kv-memory", "-1"], "--kv-memory: '-1' is no size of memory"),
        (["--kv-memory", "200%"], "--kv-memory: '200%' is no size of memory"),
        (["--kv-memory", "900TiB"], "--kv-memory 900TiB: of "),
        (["--kv-memory", "50%", "--kv-tokens", "64"], "give --kv-memory or --kv-tokens"),
        (["--threads", "0"], "--threads"),
        (["--threads", "100000"], "--threads 100000 is more than the "),
        (["--threads", "1", "--replicas", "2"], "--threads is for one engine"),
        (["--threads", "1", "--replicas", "1:2"], "--threads is for one engine"),
        (["--threads", "1", "--replica-cores", "1"], "--threads is for one engine"),
        (["--replica-cores", "100000"], "--replica-cores 100000 needs 100000 physical cores"),
        (["--replica-cores", "1", "--replicas", "1:1000"], "needs 1000 physical cores, and this process"),
        (["--log-level", "loud"], "--log-level"),
    ],
)
def test_bad_values_are_refused_before_a_model_is_loaded(options: list[str], problem: str) -> None:
    result = CliRunner().invoke(app, ["serve", "no-such-model", "--port", "0", *options])
    assert result.exit_code == 2
    assert problem in " ".join(result.stderr.split())
    assert "no model at" not in result.stderr


def test_the_example_of_the_docs_serves_a_page(tmp_path: Path) -> None:
    """Everything after the model's file in the example of docs/deploy.md, with a free port."""
    text = (ROOT / "docs" / "deploy.md").read_text()
    found = re.search(r"^soothsay serve \S+\.gguf (.+)$", text, re.MULTILINE)
    assert found is not None
    options = shlex.split(found[1])
    assert options == ["--api-key", KEY, "--kv-memory", "4GiB", "--cors-origin", APP]
    options[3] = "64MiB"  # machines of tests may have less
    with command(tmp_path / "log", *options, "--threads", "1") as url:
        assert httpx.options(f"{url}/v1/chat/completions", headers=PREFLIGHT).status_code == 200
        body = {key: value for key, value in ASKED.items() if key != "model"}
        headers = {"Origin": APP, "Authorization": f"Bearer {KEY}"}
        said = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60)
        assert (said.status_code, said.headers["access-control-allow-origin"]) == (200, APP)
        assert httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).status_code == 401
    # a request is logged after its answer, so the lines are complete once the server has ended
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    loaded = next(line for line in lines if line["event"] == "loaded")
    assert loaded["threads"] == "1"
    assert loaded["kv_cache"].startswith("0.06 GiB for ")
    assert [line["path"] for line in lines if line["event"] == "request"] == ["/v1/chat/completions"] * 2
