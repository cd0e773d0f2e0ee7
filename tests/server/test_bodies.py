"""Bodies of requests: memory and time of wrong ones, and how many are read at once."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from soothsay.server.apis.llamacpp.token_routes import DetokenizeRequest, TokenizeRequest
from soothsay.server.generation.message_bodies import ChatMessage, Tool
from soothsay.server.generation.request_bodies import ChatRequest, CompletionRequest, StructuredOutputs
from soothsay.server.http import bodies
from soothsay.server.http.api_errors import ApiError
from soothsay.server.http.bodies import SMALL, BodyReader, parse
from soothsay.server.http.json_streams import DisconnectedError

KINDS = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
NESTED = (ChatMessage, Tool, StructuredOutputs)
MANY = 30_000
WRONG: dict[str, Any] = {
    "lists of objects": [{} for _ in range(MANY)],
    "lists of numbers": [0.5] * MANY,
    "lists of null": [None] * MANY,
    "lists of lists": [[] for _ in range(MANY)],
    "a list of wrong lists": [[0.5] * 50 for _ in range(MANY // 50)],
    "lists of mixed texts": ["a"] * MANY + [1],
    "lists of mixed numbers": [1] * MANY + ["a"],
    "objects": {f"k{index}": [] for index in range(MANY)},
    "objects of objects": {"a": {f"k{index}": None for index in range(MANY)}},
    "lists of roles": [{"role": "user", "content": [{}] * 3} for _ in range(MANY // 10)],
}


@pytest.mark.parametrize("kind", [*KINDS, *NESTED])
def test_no_field_makes_many_errors(kind: type[BaseModel]) -> None:
    for (name, field), (what, wrong) in product(kind.model_fields.items(), WRONG.items()):
        assert errors(kind, {field.alias or name: wrong}) < 50, f"{name}: {what}"


def errors(kind: type[BaseModel], body: dict[str, Any]) -> int:
    """The number of errors in a body."""
    try:
        kind.model_validate(body)
    except ValidationError as error:
        return error.error_count()
    except ApiError:
        return 1
    return 0


def lists(schema: Any) -> Iterator[dict[str, Any]]:
    """The schemas of all lists within a schema."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            yield schema
        for part in schema.values():
            yield from lists(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from lists(part)


@pytest.mark.parametrize("kind", KINDS)
def test_every_list_ends_at_its_first_error(kind: type[BaseModel]) -> None:
    found = list(lists(kind.__pydantic_core_schema__))
    assert found
    assert all(schema.get("fail_fast") for schema in found if schema.get("items_schema") is not None)


@pytest.mark.parametrize("item", ["{}", "null", '""', "[0.5]", "0.5"])
def test_the_largest_wrong_prompt_takes_little_memory(item: str) -> None:
    code = f"""
import resource
from soothsay.server.http.api_errors import ApiError
from soothsay.server.http.bodies import parse
from soothsay.server.generation.request_bodies import CompletionRequest
body = b'{{"model":"x","prompt":[' + b'{item},' * ((4 << 20) // {len(item) + 1}) + b'1]}}'
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    parse(body, CompletionRequest)
except ApiError as error:
    print(error.status, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    status, kilobytes = map(int, done.stdout.split())
    assert status == 400
    assert kilobytes < 500_000


def same(body: CompletionRequest) -> Any:
    return body


def reading(
    reader: BodyReader,
    parts: list[bytes],
    *,
    lost: bool = False,
    work: Callable[[CompletionRequest], Any] = same,
    content_type: bytes = b"application/json",
) -> Any:
    """Read a body that comes in parts. `lost`: the client disconnects after them."""
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages.append({"type": "http.disconnect"} if lost else {"type": "http.request", "body": b""})
    queue = iter(messages)

    async def receive() -> Any:
        return next(queue)

    scope = {"type": "http", "method": "POST", "headers": [(b"content-type", content_type)]}
    return reader.read(Request(scope, receive), CompletionRequest, work)


SHORT = json.dumps({"model": "x", "prompt": "Hi"}).encode()
LONG = json.dumps({"model": "x", "prompt": "a" * SMALL}).encode()


@pytest.mark.parametrize("content", [SHORT, LONG], ids=["small", "large"])
def test_nothing_is_done_with_a_body_on_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    threads: list[threading.Thread] = []

    def watched(content: bytes, kind: Any) -> Any:
        threads.append(threading.current_thread())
        return parse(content, kind)

    def work(body: CompletionRequest) -> str | None:
        threads.append(threading.current_thread())
        return body.model

    monkeypatch.setattr(bodies, "parse", watched)
    assert asyncio.run(reading(BodyReader(1 << 30), [content[:9], content[9:]], work=work)) == "x"
    assert len(threads) == 2
    assert threads[0] is threads[1] is not threading.main_thread()


def test_large_bodies_wait_for_each_other_and_not_small_ones() -> None:
    async def run() -> tuple[int, str]:
        reader, lock, go, now = BodyReader(1 << 30), threading.Lock(), threading.Event(), [0, 0]

        def large(_: CompletionRequest) -> None:
            with lock:
                now[0] += 1
                now[1] = max(now)
            go.wait(20)
            with lock:
                now[0] -= 1

        waiting = [asyncio.create_task(reading(reader, [LONG], work=large)) for _ in range(20)]
        await asyncio.sleep(0.05)
        small = await asyncio.wait_for(reading(reader, [SHORT], work=lambda _: "small"), 20)
        go.set()
        await asyncio.gather(*waiting)
        return now[1], small

    assert asyncio.run(run()) == (1, "small")


@pytest.mark.parametrize(
    ("content_type", "is_json"),
    [
        (b"application/json; charset=utf-8", True),
        (b"Application/JSON ;x", True),
        (b"text/plain; application/json", False),  # a form of a page of another site may send this unasked
        (b" Text/Plain", False),
        (b"application/octet-stream", True),
        (b"", True),
    ],
)
def test_only_what_no_form_can_send_is_read(content_type: bytes, is_json: bool) -> None:
    read = reading(BodyReader(1 << 30), [SHORT], content_type=content_type)
    if is_json:
        assert asyncio.run(read).prompt == "Hi"
        return
    with pytest.raises(ApiError) as refused:
        asyncio.run(read)
    assert refused.value.status == 415


def test_a_body_is_dropped_before_its_answer() -> None:
    kept: list[weakref.ref[CompletionRequest]] = []

    def work(body: CompletionRequest) -> int:
        kept.append(weakref.ref(body))
        return len(kept)

    for content in (SHORT, LONG):
        asyncio.run(reading(BodyReader(1 << 30), [content], work=work))
    assert [body() for body in kept] == [None, None]


def test_all_bodies_together_are_limited() -> None:
    async def run() -> None:
        reader = BodyReader(2 * len(LONG))
        started, go = asyncio.Event(), asyncio.Event()

        async def slow() -> Any:
            parts = iter([LONG[:-1], LONG[-1:]])

            async def receive() -> Any:
                part = next(parts)
                if part == LONG[-1:]:
                    started.set()
                    await go.wait()
                return {"type": "http.request", "body": part, "more_body": part != LONG[-1:]}

            scope = {"type": "http", "method": "POST", "headers": [(b"content-type", b"application/json")]}
            return await reader.read(Request(scope, receive), CompletionRequest, same)

        first, second = asyncio.create_task(slow()), asyncio.create_task(slow())
        await started.wait()
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as full:
            await reading(reader, [LONG])
        assert (full.value.status, full.value.code) == (503, "overloaded")
        assert (await reading(reader, [SHORT])).prompt == "Hi"  # small ones pass
        go.set()
        assert (await first).model == (await second).model == "x"
        assert (await reading(reader, [LONG])).model == "x"  # there is room again

    asyncio.run(run())


def test_clients_that_disconnect_leave_no_bytes_behind() -> None:
    async def run() -> None:
        reader = BodyReader(len(LONG))
        for _ in range(3):
            with pytest.raises(DisconnectedError):
                await reading(reader, [LONG[:-9]], lost=True)
        assert (await reading(reader, [LONG])).model == "x"

    asyncio.run(run())
