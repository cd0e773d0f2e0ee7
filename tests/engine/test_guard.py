"""Who may use an engine: the threads of the process that built it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch

from soothsay import LLM, FinishReason, SamplingParams
from soothsay.engine.guard import Guard

FORK = """
import os, sys, warnings
import torch
from soothsay import LLM, SamplingParams

torch.set_num_threads(2)
llm = LLM("sibyl", dtype="float32", drafter="none", kv_tokens=4096)
params = SamplingParams(temperature=0, max_tokens=4)
expected = llm.generate("Hello", params).token_ids
stream = llm.stream("Hello", params)
warnings.simplefilter("ignore")
with llm.engine.lock:  # as if another thread were in a step
    child = os.fork()
    if child == 0:
        calls = {
            "generate": lambda: llm.generate("Hello", params),
            "list": lambda: llm.generate(["Hello", "Hello"], params, drafter="mtp"),
            "stream": lambda: list(stream),
            "load": lambda: llm.engine.load,
        }
        for name, call in calls.items():
            try:
                print(name, call())
            except RuntimeError as error:
                print(name, error)
        sys.stdout.flush()
        os._exit(0)
os.waitpid(child, 0)
assert llm.generate("Hello", params).token_ids == expected
print("the parent goes on")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_forked_child_is_told_to_load_the_model_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60, check=False
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 5, done.stderr
    for line, call in zip(lines, ("generate", "list", "stream", "load"), strict=False):
        assert line.startswith(f"{call} this LLM was loaded before the process forked"), line
        assert "load it in the child" in line
        assert '"spawn"' in line
    assert lines[-1] == "the parent goes on"


def test_all_threads_that_wait_for_a_lock_are_told_when_it_closes() -> None:
    checked, told = threading.Semaphore(0), list[str]()

    class Watched(Guard):
        def check(self) -> None:
            super().check()
            checked.release()

    def enter(guard: Guard) -> None:
        try:
            with guard:
                pass
        except RuntimeError as error:
            told.append(str(error))

    guard = Watched()
    threads = [threading.Thread(target=enter, args=(guard,), daemon=True) for _ in range(2)]
    with guard:
        for thread in threads:
            thread.start()
        for _ in ("this thread", *threads):
            assert checked.acquire(timeout=10)
        guard.closed = True
    for thread in threads:
        thread.join(10)
    assert len(told) == 2
    assert all("closed" in one for one in told)


@pytest.fixture
def on_time() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Sets what happens on SIGALRM."""
    before = signal.getsignal(signal.SIGALRM)
    yield lambda act: signal.signal(signal.SIGALRM, lambda *_: act()) and None
    signal.signal(signal.SIGALRM, before)


needs_alarms = pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="the system has no alarms")


@needs_alarms
@pytest.mark.parametrize("part", ["_propose", "_forward", "_verify", "_commit", "_observe"])
def test_a_time_limit_that_passes_within_a_step_comes_after_it(
    part: str, monkeypatch: pytest.MonkeyPatch, on_time: Callable[[Callable[[], None]], None]
) -> None:
    llm = LLM("sibyl", drafter="prompt-lookup", kv_tokens=1024)
    params = SamplingParams(temperature=0, seed=0, max_tokens=24)
    expected = llm.generate("Once upon a time", params)
    own = getattr(llm.engine, part)

    def interrupted(*given: Any) -> Any:
        signal.raise_signal(signal.SIGALRM)
        return own(*given)

    def late() -> None:
        raise TimeoutError

    on_time(late)
    stream = llm.stream("Once upon a time", params)
    next(stream)
    with monkeypatch.context() as patched:
        patched.setattr(llm.engine, part, interrupted)
        with pytest.raises(TimeoutError):
            list(stream)
    assert stream.result == expected  # with the same counts of steps
    monkeypatch.setattr(llm.engine, part, interrupted)
    with pytest.raises(TimeoutError):
        llm.generate(["Once upon a time", "Hello"], params)
    assert not llm.engine.has_work


@needs_alarms
def test_a_handler_that_cancels_does_so_between_steps(
    monkeypatch: pytest.MonkeyPatch, on_time: Callable[[Callable[[], None]], None]
) -> None:
    llm = LLM("sibyl", drafter="none", kv_tokens=1024)
    forward = llm.engine._forward

    def interrupted(*given: Any) -> Any:
        signal.raise_signal(signal.SIGALRM)
        return forward(*given)

    stream = llm.stream("Once upon a time", SamplingParams(temperature=0, max_tokens=24))
    on_time(stream.cancel)
    next(stream)
    monkeypatch.setattr(llm.engine, "_forward", interrupted)
    assert len(stream.choice.token_ids) == 2
    assert stream.choice.finish_reason is FinishReason.CANCELLED


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("changed", [lambda: torch.device("meta"), lambda: default_dtype(torch.bfloat16)])
def test_other_defaults_of_torch_are_refused(changed: Callable[[], AbstractContextManager[Any]]) -> None:
    llm = LLM("sibyl", drafter="none", kv_tokens=256)
    told = r"torch makes new tensors of torch\.\w+ on \w+ here, and an LLM needs float32 on the CPU"
    with changed():
        for use in (lambda: LLM("sibyl"), lambda: llm.generate("Hello"), lambda: llm.stream("Hello")):
            with pytest.raises(RuntimeError, match=told):
                use()
    assert llm.generate("Hello", SamplingParams(max_tokens=2)).token_ids
