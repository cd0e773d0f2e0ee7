"""JSON from strangers: what is refused, with which field, and that the time is linear."""

from __future__ import annotations

import json
import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soothsay.server.http.safe_json import MAX_DEPTH, MAX_ITEMS, MAX_MEMBERS, STRING, JsonError, read_json

SIMPLE = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    SIMPLE.filter(lambda value: value not in (float("inf"), float("-inf"))),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


@given(VALUES, st.booleans())
def test_other_json_is_read_as_it_is(value: object, ascii_only: bool) -> None:
    assert read_json(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@given(st.text(alphabet='"\\[{a\n\x00é'))
def test_brackets_within_strings_do_not_count(text: str) -> None:
    bare = STRING.sub(b"", json.dumps([text, {text: text}]).encode())
    assert bare == b"[, {: }]"


@given(st.text(alphabet='"\\[]{}:,1a '))
def test_nothing_but_json_errors_is_raised(text: str) -> None:
    told: object
    try:
        told = read_json(text.encode())
    except JsonError as error:
        told = None if error.valid else "not JSON"
    try:
        assert told in (json.loads(text), None)  # None: a field is given twice
    except json.JSONDecodeError:
        assert told == "not JSON"


@pytest.mark.parametrize(
    ("text", "field", "said"),
    [
        ('{"a": {"b": [1, 1e999]}}', "a.b.1", "too large"),
        ('{"a": -1e999}', "a", "too large"),
        ('{"a": NaN}', "a", "NaN"),
        ('{"a": [-Infinity]}', "a.0", "Infinity"),
        ('{"a": ' + "9" * 10_000 + "}", "a", "64 bits"),
        ('{"a": ' + "9" * 20 + "}", "a", "64 bits"),
        ('{"a": -9223372036854775809}', "a", "64 bits"),
        ('{"a": 1, "b": {"c": 1, "d": 2, "c": 1}}', "b.c", "twice"),
        ('{"a": 1, "\\u0061": 2}', "a", "twice"),
        ('{"a": {"b": "x\\ud800"}}', "a.b", "surrogate"),
        ('{"a": "\\udc00\\ud800"}', "a", "surrogate"),
        ('{"a": {"\\ud800": 1}}', "a", "surrogate"),
    ],
)
def test_values_that_are_not_possible_are_named(text: str, field: str, said: str) -> None:
    with pytest.raises(JsonError, match=said) as error:
        read_json(text.encode())
    assert (error.value.field, error.value.valid) == (field, True)


@pytest.mark.parametrize(
    "text",
    [
        "18446744073709551615",
        "-9223372036854775808",
        "0.12345678901234567890123",
        '"\\ud83d\\ude00"',
        "1e308",
    ],
)
def test_values_at_the_limits_are_possible(text: str) -> None:
    assert read_json(text.encode()) == json.loads(text)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[1,]",
        b"\xff",
        b"\xef\xbb\xbf{}",
        '{"a": 1}'.encode("utf-16"),
        b'"\x01"',
        b"'a'",
        b"]" * 99_999,
    ],
)
def test_what_is_not_json_is_refused(content: bytes) -> None:
    with pytest.raises(JsonError) as error:
        read_json(content)
    assert not error.value.valid


@pytest.mark.parametrize("around", ["[]", '{"a":}'])
def test_depth_is_limited(around: str) -> None:
    def nested(depth: int) -> bytes:
        return (around[:-1] * depth + "1" + around[-1] * depth).encode()

    read_json(nested(MAX_DEPTH))
    with pytest.raises(JsonError, match="nested deeper"):
        read_json(nested(MAX_DEPTH + 1))
    with pytest.raises(JsonError):
        read_json(around[:-1].encode() * 200_000)


@pytest.mark.parametrize("item", ["[]", "{}", '{"a":1}'])
def test_members_are_limited_and_items_are_not(item: str) -> None:
    members = 2 if "a" in item else 1
    most = (MAX_MEMBERS - 1) // members
    assert len(read_json(f"[{','.join([item] * most)}]".encode())) == most
    with pytest.raises(JsonError, match="more than"):
        read_json(f"[{','.join([item] * (most + 1))}]".encode())
    assert len(read_json(b"[" + b"1," * 500_000 + b"1]")) == 500_001


@pytest.mark.parametrize(
    "attack",
    [
        lambda n: b'"' + b'\\"' * n,  # an unterminated string: each quote could begin another search
        lambda n: b'"' + b"\\" * n,
        lambda n: b'["' + b"\\\\" * n + b'"]',
        lambda n: b'"' * n,
        lambda n: b'{"' + b"a" * n,
        lambda n: b"-" * n,
        lambda n: b"9" * n,
        lambda n: b"1." + b"9" * n,
        lambda n: b"[" * n,
        lambda n: b"{" + b'"k":1,' * (n // 100) + b'"k":1}',
    ],
    ids=range(10),
)
def test_attacks_take_linear_time(attack: object) -> None:
    def seconds(size: int) -> float:
        content = attack(size)  # type: ignore[operator]
        begin = time.process_time()
        with suppress(JsonError):
            read_json(content)
        return time.process_time() - begin

    short = min(seconds(10_000) for _ in range(3))
    assert seconds(160_000) < 100 * short + 0.5  # a quadratic time would be 256 times as long


def test_items_of_lists_are_counted_before_they_are_made() -> None:
    assert len(read_json(b"[" + b"1," * 1000 + b"1]")) == 1001
    with pytest.raises(JsonError, match="more than 1048576 items") as error:
        read_json(b"[" + b"1," * (MAX_ITEMS + 1) + b"x")  # it is not even JSON
    assert error.value.valid
    assert len(read_json(b'"' + b"," * (MAX_ITEMS + 2) + b'"')) == MAX_ITEMS + 2
