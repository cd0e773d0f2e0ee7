"""The streaming client against a server of known delays, on a clock that jumps."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from virtual import BETWEEN, FIRST, Fake, run

from soothsay.bench.chat_client import TEXTS, ChatClient, ChatError, TimedReply
from soothsay.errors import SoothsayError

BODY = {"messages": [{"role": "user", "content": "Hello, wörld!"}], "max_tokens": 4}


def ask(fake: Fake, times: int = 1, **options: Any) -> tuple[list[TimedReply], ChatClient]:
    async def main() -> tuple[list[TimedReply], ChatClient]:
        async with await fake.start():
            client = ChatClient(fake.url, "m", **options)
            return [await client.ask(BODY) for _ in range(times)], client

    return run(main())


@pytest.mark.parametrize("framing", ["chunked", "until the end"])
def test_pieces_are_timed_and_usage_is_told(framing: str) -> None:
    fake = Fake(framing=framing, usage={"completion_tokens": 9, "prompt_tokens": 3})
    (reply,), _ = ask(fake, key="secret")
    since = [when - reply.begin for when in reply.pieces]
    assert since == pytest.approx([FIRST + i * BETWEEN for i in range(4)])
    assert reply.end - reply.begin == pytest.approx(FIRST + 3 * BETWEEN)
    assert (reply.text, reply.finish_reason, reply.tokens, reply.counts) == (
        "Hello there!",
        "length",
        9,
        True,
    )
    assert fake.bodies == [{**BODY, "model": "m", "stream": True, "stream_options": {"include_usage": True}}]
    assert fake.keys == ["bearer secret"]


def test_pieces_are_counted_where_the_server_does_not() -> None:
    (reply,), _ = ask(Fake())
    assert (reply.tokens, reply.counts) == (4, False)


@pytest.mark.parametrize(
    ("usage", "tokens"),
    [
        ({"completion_tokens": 9.0, "speculation": "on"}, 9),
        ({"completion_tokens": None}, 4),
        ({"completion_tokens": "9"}, 4),
        ({"completion_tokens": -1}, 4),
        ("none", 4),
        ([9], 4),
    ],
)
def test_odd_usage_tells_what_it_can(usage: Any, tokens: int) -> None:
    (reply,), _ = ask(Fake(usage=usage))
    assert (reply.tokens, reply.counts) == (tokens, tokens == 9)
    assert reply.told("speculation", "mean_accepted") is None


@pytest.mark.parametrize("name", TEXTS[1:])
def test_thoughts_are_timed_and_not_sent_back_and_an_error_of_null_is_none(name: str) -> None:
    thought = json.dumps({"choices": [{"delta": {name: " Hm."}}], "error": None})
    (reply,), _ = ask(Fake(fail=lambda _: thought))
    assert reply.text == "Hello there!"
    assert len(reply.pieces) == 5


def test_data_without_content_says_nothing() -> None:
    (reply,), _ = ask(Fake(fail=lambda _: " "))
    assert (reply.text, len(reply.pieces)) == ("Hello there!", 4)


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost:99999/v1",
        "http://localhost:eight/v1",
        "http://localhost:8000,stream/v1",
        "http://localhost:0/v1",
        "http://[::1",
        "http://\u2603.net/v1",
        "http:///v1",
        "ftp://localhost/v1",
    ],
)
def test_what_is_no_address_is_refused_at_once(url: str) -> None:
    with pytest.raises(SoothsayError, match="is not the address of a server"):
        ChatClient(url, "m")


@pytest.mark.parametrize(
    ("refuses", "kept"),
    [
        (set(), ["ignore_eos", "stream_options"]),
        ({"ignore_eos"}, ["stream_options"]),
        ({"stream_options"}, ["ignore_eos"]),
        ({"ignore_eos", "stream_options"}, []),
    ],
)
def test_what_is_refused_is_left_out_from_then_on(refuses: set[str], kept: list[str]) -> None:
    fake = Fake(refuses=refuses)
    _, client = ask(fake, times=2, optional={"ignore_eos": True})
    assert sorted(client.optional) == kept
    assert {*client.refused} == refuses
    assert [sorted(body.keys() & {"ignore_eos", "stream_options"}) for body in fake.bodies[-2:]] == [kept] * 2


def test_a_refusal_of_something_else_is_told_once_it_is_known_what_is_taken() -> None:
    fake = Fake(fail=lambda number: "400 Bad Request" if number else None)
    with pytest.raises(ChatError, match=r"answered 400 Bad Request: .*because") as caught:
        ask(fake, times=2)
    assert caught.value.kind == "400"
    assert len(fake.bodies) == 2


@pytest.mark.parametrize(
    ("fail", "kind"),
    [
        ("429 Too Many Requests", "429"),
        ("400 Bad Request", "400"),
        ("hang up", "broke off"),
        ("stop early", "broke off"),
        ("nonsense", "broke off"),
        ("[1]", "broke off"),
        ('{"error": {"message": "out of memory"}}', "error in stream"),
        ("silent", "timeout"),
    ],
)
@pytest.mark.parametrize("framing", ["chunked", "until the end"])
def test_failures_have_kinds(fail: str, kind: str, framing: str) -> None:
    with pytest.raises(ChatError, match=r"m at 127\.0\.0\.1:") as caught:
        ask(Fake(framing=framing, fail=lambda _: fail), timeout=1.0)
    assert caught.value.kind == kind


def test_only_silence_is_a_timeout() -> None:
    (reply,), _ = ask(Fake(pieces=["x"] * 50), timeout=0.3)
    assert reply.end - reply.begin == pytest.approx(FIRST + 49 * BETWEEN)  # 6 seconds


def test_nobody_there_and_models() -> None:
    async def main() -> None:
        fake = Fake(models=["a", "b"])
        async with await fake.start():
            assert await ChatClient(fake.url, "").models() == ["a", "b"]
            fake.models = None
            with pytest.raises(ChatError, match=r"^127\.0\.0\.1:\d+ answered 404") as caught:
                await ChatClient(fake.url, "").models()
            assert caught.value.kind == "404"
            fake.models = []
            with pytest.raises(SoothsayError, match="it lists no models"):
                await ChatClient(fake.url, "").choose_model("it")
        await asyncio.sleep(1)
        with pytest.raises(ChatError, match="cannot be reached") as caught:
            await ChatClient(fake.url, "m").ask(BODY)
        assert caught.value.kind == "unreachable"

    run(main())
