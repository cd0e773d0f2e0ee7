"""What travels between stages comes back as it was, and nothing else is taken for it."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import numpy as np
import pytest
import torch

from soothsay.core.batch import Rows
from soothsay.core.cache import Move
from soothsay.core.tree import DraftTree
from soothsay.model.pipeline import frames
from soothsay.model.pipeline.frames import (
    MAX_HEADER,
    MAX_TENSORS,
    Frame,
    FrameError,
    read_moves,
    read_rows,
    receive,
    send,
    written_moves,
    written_rows,
)

BLOCKS = 4
"""Blocks of the pool."""


def tree() -> DraftTree:
    made = DraftTree(7)
    made.extend([8, 9])
    made.extend([10])
    return made


def rows(**changes: object) -> Rows:
    given = {"first": 1, "first_key": 2, "state": 1, "marks": ((4, 2), (8, 3)), **changes}
    return Rows(np.arange(3), 5, np.array([0, BLOCKS - 1]), tree(), **given)  # type: ignore[arg-type]


def test_rows_come_back() -> None:
    given = [rows(), Rows(np.arange(1, 4), 0), Rows(np.array([5]), 6, np.array([2]), first_key=6)]
    for before, after in zip(given, read_rows(written_rows(given), BLOCKS), strict=True):
        assert np.array_equal(before.tokens, after.tokens)
        assert (before.table is None) == (after.table is None)
        assert before.table is None or np.array_equal(before.table, after.table)
        for name in ("start", "first", "first_key", "state", "marks"):
            assert getattr(before, name) == getattr(after, name), name
        assert (before.tree is None) == (after.tree is None)
        if before.tree is not None and after.tree is not None:
            assert (before.tree.tokens, before.tree.parents) == (after.tree.tokens, after.tree.parents)


def test_moves_come_back() -> None:
    given = [Move(np.array([3, 0]), [4, 7], 4, 1, ((8, 2),)), Move(np.array([1]), [], 0)]
    for before, after in zip(given, read_moves(written_moves(given), BLOCKS), strict=True):
        assert np.array_equal(before.table, after.table)
        for name in ("sources", "start", "state", "marks"):
            assert getattr(before, name) == getattr(after, name), name


@pytest.mark.parametrize(
    "wrong",
    [
        Rows(np.arange(3), 0, np.array([BLOCKS])),
        Rows(np.arange(3), 0, np.array([-1])),
        rows(first=0),
        rows(first_key=6),
        rows(first_key=-1),
        Rows(np.arange(0), 5, np.array([0])),
    ],
)
def test_rows_that_no_request_has_are_refused(wrong: Rows) -> None:
    with pytest.raises(FrameError):
        read_rows(written_rows([rows(), wrong]), BLOCKS)


def test_blocks_without_a_pool_are_refused() -> None:
    with pytest.raises(FrameError, match="does not have"):
        read_rows(written_rows([rows()]), None)


@pytest.mark.parametrize("parents", [[0, 0], [-1, 1], [-1, -1], [-1, 2], [-1, 5]])
def test_a_node_comes_after_its_parent(parents: list[int]) -> None:
    plan = written_rows([Rows(np.arange(3), 0, None, tree())])
    assert plan[-4:].tolist() == [-1, 0, 1, 0]
    plan[-4 : -4 + len(parents)] = torch.tensor(parents)
    with pytest.raises(FrameError, match="before its parent"):
        read_rows(plan, None)


@pytest.mark.parametrize(("sources", "table"), [([3], [0]), ([-1], [0]), ([4], [BLOCKS]), ([4], [-1])])
def test_moves_from_elsewhere_are_refused(sources: list[int], table: list[int]) -> None:
    with pytest.raises(FrameError):
        read_moves(written_moves([Move(np.array(table), sources, 4)]), BLOCKS)


@pytest.mark.parametrize(("place", "count"), [(3, 2), (4, 4)], ids=["blocks", "nodes"])
def test_counts_below_zero_are_refused(place: int, count: int) -> None:
    plan = written_rows([rows()])
    assert plan[place] == count
    plan[place] = -2
    with pytest.raises(FrameError, match="too short"):
        read_rows(plan, BLOCKS)


def test_plans_of_another_length_or_type_are_refused() -> None:
    for plan, read in ((written_rows([rows()]), read_rows), (written_moves([]), read_moves)):
        read(plan, BLOCKS)
        longer = torch.cat([plan, torch.zeros(1, dtype=torch.int64)])
        for wrong in (longer, plan[:-1], plan.float(), plan[None], -plan - 1):
            with pytest.raises(FrameError):
                read(wrong, BLOCKS)


@contextmanager
def pipe() -> Iterator[tuple[Connection, Connection]]:
    ours, theirs = Pipe()
    with ours, theirs:
        yield ours, theirs


def test_frames_come_back() -> None:
    tensors = [torch.randn(3, 4), torch.arange(5), torch.empty(0, 7), torch.randn(6, 2)[:, 1]]
    with pipe() as (ours, theirs):
        send(ours, Frame("run", {"a": [1, None], "b": "\u00e9"}, tensors))
        found = receive(theirs)
    assert (found.kind, found.fields) == ("run", {"a": [1, None], "b": "\u00e9"})
    assert len(found.tensors) == len(tensors)
    assert all(map(torch.equal, found.tensors, tensors))


def framed(header: object, body: bytes = b"", size: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<I", len(text) if size is None else size) + text + body


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0\0",
        framed(b"{"),
        framed(["run", {}]),
        framed([1, {}, []]),
        framed(["run", [], []]),
        framed(["run", {}, [["float32", [2]]]], b"\0" * 7),
        framed(["run", {}, [["float32", [2]]]], b"\0" * 9),
        framed(["run", {}, []], b"\0"),
        framed(["run", {}, [["float64", [1]]]], b"\0" * 8),
        framed(["run", {}, [["float32", [1, 1, 1, 1]]]], b"\0" * 4),
        framed(["run", {}, [["float32", [-1, -1]]]], b"\0" * 4),
        framed(["run", {}, [["float32", [True]]]], b"\0" * 4),
        framed(["run", {}, [["float32", [1 << 62]]]], b"\0" * 4),
        framed(["run", {}, [["float32", [0, 1 << 62, 1 << 62]]]]),
        framed(["run", {}, [["float32", [0]]] * (MAX_TENSORS + 1)]),
        framed(b'["run", {}, []]' + b" " * MAX_HEADER),
        framed(b"[" * 50_000),
    ],
    ids=lambda data: f"{len(data)}-{data[4:40]!r}",
)
def test_what_is_no_frame_is_refused(data: bytes) -> None:
    with pipe() as (ours, theirs):
        ours.send_bytes(data)
        with pytest.raises((FrameError, EOFError)):
            receive(theirs)


def test_a_frame_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = framed(["run", {}, [["int64", [4]]]], b"\0" * 32)
    for limit in (len(data), len(data) - 1):
        monkeypatch.setattr(frames, "MAX_FRAME", limit)
        with pipe() as (ours, theirs):
            ours.send_bytes(data)
            if limit == len(data):
                assert receive(theirs).tensors[0].tolist() == [0] * 4
            else:
                with pytest.raises(OSError, match="bad message length"):
                    receive(theirs)
