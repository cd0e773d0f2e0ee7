"""Damaged and hostile datastores: refused by `DrafterError`, or searched without harm."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

import numpy as np
import pytest
from stores import tiny_store

from soothsay.drafters.lookup.text_store import Datastore
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


@pytest.mark.parametrize("promised", [2**20, 2**40, 2**62])
@pytest.mark.parametrize("name", ["tokens", "lengths", "index.starts", "index.suffixes"])
def test_headers_that_promise_too_much(tmp_path: Path, name: str, promised: int) -> None:
    good = tiny_store().read_bytes()
    size = int.from_bytes(good[:8], "little")
    header = json.loads(good[8 : 8 + size])
    begin = header[name]["data_offsets"][0]
    width = 8 if name == "lengths" else 4
    header[name] |= {"shape": [promised], "data_offsets": [begin, begin + width * promised]}
    changed = json.dumps(header).encode()
    path = tmp_path / "rest.store"
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + good[8 + size :])
    assert not search(path)


@pytest.mark.parametrize("where", ["header", "lengths", "tokens", "index.starts", "index.suffixes"])
def test_random_damage(tmp_path: Path, where: str) -> None:
    path, rng = tmp_path / "rest.store", random.Random(where)
    good = tiny_store().read_bytes()
    data = 8 + int.from_bytes(good[:8], "little")
    first, last = 0, data
    if where != "header":
        first, last = (data + at for at in json.loads(good[8:data])[where]["data_offsets"])
    opened = 0
    for _ in range(100):
        damaged = bytearray(good)
        for _ in range(rng.choice([1, 4, 50])):
            at = rng.randrange(first, last - 4)
            damaged[at : at + 4] = rng.choice([rng.randbytes(4), b"\xff" * 4, struct.pack("<I", 2**31)])
        path.write_bytes(damaged[: rng.choice([len(good), len(good), rng.randrange(len(good))])])
        opened += search(path)
    assert opened < 100
