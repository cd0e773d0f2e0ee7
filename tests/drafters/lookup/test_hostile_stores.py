"""Damaged and hostile datastores: refused by `DrafterError`, or searched without harm."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import numpy as np
import pytest
from stores import tiny_store

from soothsay.drafters.lookup.text_store import _HEADER, _MAGIC, SORTED_BY, VERSION, Datastore
from soothsay.errors import DrafterError


def search(path: Path) -> bool:
    """Whether a store opens. One that does is searched; what it says are tokens of its vocabulary."""
    try:
        store = Datastore(path)
    except DrafterError as error:
        assert str(path) in str(error)  # noqa: PT017
        return False
    rng = np.random.default_rng(0)
    for most in (1, 3, 200):
        context = rng.integers(0, max(store.largest, 1) + 1, 20)
        matches = store.find(context, most)
        assert len(matches.lengths) <= most
        for tokens in store.continuations(matches, 5):
            assert all(0 <= token < store.vocab_size for token in tokens)
    return True


@pytest.mark.parametrize(
    ("vocabulary", "width", "size", "count"),
    [
        (2**16, 2, 10, 5),
        (2**32 - 1, 4, 10, 5),
        (2**32 - 1, 4, 2**32 - 1, 2**32 - 2),
        (10, 2, 2**63, 2**62),
        (10, 2, 10, 10),
        (10, 2, 10, 0),
        (10, 3, 10, 5),
        (10, 2**31, 10, 5),
        (0, 2, 10, 5),
    ],
)
def test_headers_that_promise_too_much(
    tmp_path: Path, vocabulary: int, width: int, size: int, count: int
) -> None:
    head = _HEADER.pack(_MAGIC, VERSION, vocabulary, width, SORTED_BY, size, count, bytes(16))
    path = tmp_path / "rest.store"
    for rest in (b"", bytes(100)):
        path.write_bytes(head + rest)
        assert not search(path)


@pytest.mark.parametrize("where", ["header", "text", "starts", "suffixes"])
def test_random_damage(tmp_path: Path, where: str) -> None:
    path, rng = tmp_path / "rest.store", random.Random(where)
    good = tiny_store().read_bytes()
    _, _, vocabulary, width, _, size, _, _ = _HEADER.unpack(good[: _HEADER.size])
    starts = -(-(_HEADER.size + width * size) // 8) * 8
    suffixes = -(-(starts + 4 * (vocabulary + 1)) // 8) * 8
    first, last = {
        "header": (0, _HEADER.size),
        "text": (_HEADER.size, starts),
        "starts": (starts, suffixes),
        "suffixes": (suffixes, len(good)),
    }[where]
    opened = 0
    for _ in range(100):
        damaged = bytearray(good)
        for _ in range(rng.choice([1, 4, 50])):
            at = rng.randrange(first, last - 4)
            damaged[at : at + 4] = rng.choice([rng.randbytes(4), b"\xff" * 4, struct.pack("<I", 2**31)])
        path.write_bytes(damaged[: rng.choice([len(good), len(good), rng.randrange(len(good))])])
        opened += search(path)
    assert opened < 100
