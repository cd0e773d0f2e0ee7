"""The kernels' own threads: they finish under load, after a fork, and for several callers at once."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from kernels import STOCK
from torch import Tensor

from soothsay.model.native.native_kernels import NativeKernels, load_native
from soothsay.model.native.program import Operation

native = load_native()
pytestmark = pytest.mark.skipif(native is None, reason="the kernels are not compiled")


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(native, "_granted", 2)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def gate(kernels: NativeKernels, x: Tensor) -> Tensor:
    return kernels.gated(x, "silu")


def test_concurrent_callers_get_the_same_bits(two_threads: None) -> None:
    assert native is not None
    inputs = [torch.randn(64, 2048) for _ in range(4)]
    expected = [gate(native, x) for x in inputs]
    wrong = []

    def call(i: int) -> None:
        for _ in range(300):
            if not torch.equal(gate(native, inputs[i]), expected[i]):
                wrong.append(i)

    callers = [threading.Thread(target=call, args=(i,)) for i in range(len(inputs))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


@pytest.mark.parametrize("rows", [13, 27, 64, 67])
def test_threads_write_each_row_and_nothing_after_the_last(two_threads: None, rows: int) -> None:
    """A loop is cut into pieces of 8 rows, and the last one is shorter."""
    assert native is not None
    n = 1024
    x = torch.randn(rows + 8, 2 * n)
    out = torch.full((rows + 8, n), torch.nan)
    native._emit(Operation("gated", (x[:rows], out[:rows]), numbers=(0,)))
    assert out[rows:].isnan().all()
    torch.testing.assert_close(out[:rows], STOCK.gated(x[:rows], "silu"))


FORK = """
import os, signal, torch
from soothsay.model.native.native_kernels import load_native
torch.set_num_threads(2)
native, x = load_native(), torch.ones(64, 2048)
native._granted = 2  # on any machine
expected = native.gated(x, "silu")
child = os.fork()
if child == 0:
    signal.alarm(20)  # a hang ends the child with a signal
    same = native.gated(x, "silu").tolist() == expected.tolist()
    os._exit(0 if same else 1)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_forked_child_computes_and_the_process_ends() -> None:
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=60)


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="needs Linux's list of threads")
def test_workers_follow_torch() -> None:
    code = """
import os, torch
from soothsay.model.native.native_kernels import load_native
native, x = load_native(), torch.ones(64, 2048)
torch.set_num_threads(1)
counts = []
for threads, native._granted in (1, 2), (3, 2), (3, 3):  # a later loop takes in one more
    torch.set_num_threads(threads)
    before = len(os.listdir("/proc/self/task"))
    native.gated(x, "silu")
    counts.append(len(os.listdir("/proc/self/task")) - before)
assert counts == [0, 1, 1], counts
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
