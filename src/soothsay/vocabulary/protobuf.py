"""Reads messages of protocol buffers, field by field. No code is generated or run."""

from __future__ import annotations

from collections.abc import Iterator

MAX_VARINT = 10
"""Limit of a variable-length integer in bytes."""


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The number and the value of each field of a message, in order.

    A value is an integer for variable-length integers, else its bytes: 4, 8, or as many as the field says.

    Raises `ValueError` for bytes that are no message.
    """
    place, end = 0, len(message)
    while place < end:
        key, place = _varint(message, place)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, place = _varint(message, place)
            yield number, value
            continue
        if kind == 2:
            size, place = _varint(message, place)
        elif kind in _SIZES:
            size = _SIZES[kind]
        else:
            raise ValueError(f"a field of the unknown kind {kind}")
        if size > end - place:
            raise ValueError("a field ends after the message")
        yield number, message[place : place + size]
        place += size


_SIZES = {1: 8, 5: 4}
"""Bytes of fields of a fixed size, by kind."""


def _varint(message: bytes, place: int) -> tuple[int, int]:
    """An integer of seven bits a byte, lowest first, and the place after it."""
    value = 0
    for shift in range(0, 7 * MAX_VARINT, 7):
        if place >= len(message):
            break
        byte = message[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise ValueError("an integer without an end")
