"""Who may use an engine: the threads of the process that built it."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
