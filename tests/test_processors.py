"""Processes of one machine share its cores."""

from __future__ import annotations

import multiprocessing
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from soothsay import processors
from soothsay.files import locked
from soothsay.model.ops.linear import Dense
from soothsay.model.weights.checkpoint import open_checkpoint
from soothsay.model.weights.load import load_model
from soothsay.processors import claim_cores, num_threads, one_torch_thread, use_threads

SPAWN = multiprocessing.get_context("spawn")


def claim(folder: Path, count: int, pipe: Connection) -> None:
    pipe.send((claim_cores(count, folder), sorted(os.sched_getaffinity(0))))
    pipe.recv()


def start(
    folder: Path, count: int, pipes: list[Connection]
) -> tuple[multiprocessing.process.BaseProcess, list[int], list[int]]:
    ours, theirs = SPAWN.Pipe()
    pipes.append(ours)  # an open pipe keeps the process waiting
    process = SPAWN.Process(target=claim, args=(folder, count, theirs), daemon=True)
    process.start()
    claimed, affinity = ours.recv()
    return process, list(claimed), affinity


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc/self")
def test_each_process_has_cores_of_its_own_until_it_is_killed(tmp_path: Path) -> None:
    pipes: list[Connection] = []
    everything = sorted(os.sched_getaffinity(0))
    first, claimed, affinity = start(tmp_path, 1, pipes)
    assert claimed == affinity
    assert claimed
    all_cores, none, shared = start(tmp_path, len(everything), pipes)
    assert none == [], "one core is taken"
    assert shared == everything
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    first.join()
    again, reclaimed, _ = start(tmp_path, 1, pipes)
    assert reclaimed == claimed
    for process in (all_cores, again):
        process.kill()
        process.join()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs affinity")
def test_too_few_free_cores_are_left_to_others(tmp_path: Path) -> None:
    assert claim_cores(1 << 20, tmp_path) == ()
    locks = [*tmp_path.iterdir()]
    assert locks
    for path in locks:
        with locked(path):
            pass


def test_a_folder_of_another_user_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    assert claim_cores(1, tmp_path) == ()


@pytest.mark.parametrize(
    ("asked", "granted", "expected"), [(None, 1, 1), (None, 2, 2), (None, 8, 3), (1, 8, 1), (2, 8, 2)]
)
def test_a_quota_limits_the_threads_that_pytorch_chooses(
    asked: int | None, granted: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processors, "granted_processors", lambda: granted)
    before = torch.get_num_threads()
    torch.set_num_threads(3)  # what PyTorch chose
    try:
        use_threads(asked)
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)


def test_torch_computes_in_one_thread_while_weights_are_read() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with one_torch_thread():
            with suppress(ZeroDivisionError), one_torch_thread():
                assert (torch.get_num_threads(), num_threads()) == (1, 3)
                raise ZeroDivisionError
            assert (torch.get_num_threads(), num_threads()) == (1, 3)
            with ThreadPoolExecutor(1) as other:
                assert other.submit(torch.get_num_threads).result() == 3
        assert (torch.get_num_threads(), num_threads()) == (3, 3)
    finally:
        torch.set_num_threads(before)


def test_a_model_is_read_in_one_thread_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set[int]()
    load, before = Dense.load, torch.get_num_threads()
    monkeypatch.setattr(Dense, "load", lambda *given: (seen.add(torch.get_num_threads()), load(*given))[1])
    try:
        torch.set_num_threads(2)
        load_model(open_checkpoint("sibyl"), "int8")
        assert seen == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
