from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import engines
import pytest
from openai import OpenAI
from serving import Running, serving


@pytest.fixture(scope="session")
def running() -> Iterator[Running]:
    with serving(partial(engines.sibyl, max_requests=8)) as one:
        yield one


@pytest.fixture(scope="session")
def client(running: Running) -> Iterator[OpenAI]:
    with running.client() as one:
        yield one
