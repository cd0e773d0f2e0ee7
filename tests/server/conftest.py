from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import engines
import fleets
import pytest
from openai import OpenAI
from serving import Running, serving
from tool_cases import TOOL_TEMPLATE
from watching import open_browser

from soothsay import LLM
from soothsay.tokenizer import Tokenizer

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(params=["asyncio", "uvloop"])
def each_loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fleets of fake engines run on the loop that uvicorn chooses: uvloop if it is installed."""
    if request.param == "uvloop":
        uvloop = pytest.importorskip("uvloop", reason="no uvloop: the package is not installed")
        monkeypatch.setattr(fleets, "LOOP", uvloop.new_event_loop)


@pytest.fixture(scope="session")
def sibyl() -> LLM:
    """The bundled model in int8, as the servers of these tests have it."""
    return LLM("sibyl", dtype="int8", drafter="none", kv_tokens=16_384)


@pytest.fixture(scope="session")
def running() -> Iterator[Running]:
    with serving(partial(engines.sibyl, max_requests=8)) as one:
        yield one


@pytest.fixture(scope="session")
def client(running: Running) -> Iterator[OpenAI]:
    with running.client() as one:
        yield one


@pytest.fixture(scope="session")
def with_tools(sibyl: LLM) -> Iterator[Running]:
    """A server whose chat template knows tools."""
    tokenizer = Tokenizer(sibyl.tokenizer.backend, TOOL_TEMPLATE, sibyl.tokenizer.special)
    with serving(partial(engines.sibyl, tokenizer=tokenizer)) as one:
        yield one


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser. While it is open, this thread has an event loop that runs."""
    with open_browser() as one:
        yield one
