from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from openai import OpenAI
from serving import Running, serving

from soothsay import LLM


@pytest.fixture(scope="session")
def fresh_llm(sibyl: LLM) -> Callable[..., LLM]:
    """Makes an engine of its own for the bundled model; the weights are shared."""

    def make(**options: Any) -> LLM:
        chosen = {"drafter": "suffix", "kv_tokens": 8192, "tokenizer": sibyl.tokenizer, **options}
        llm = LLM(sibyl.model, **chosen)
        llm.eos_ids = sibyl.eos_ids
        return llm

    return make


@pytest.fixture(scope="session")
def running(fresh_llm: Callable[..., LLM]) -> Iterator[Running]:
    with serving(fresh_llm(max_requests=8)) as one:
        yield one


@pytest.fixture(scope="session")
def client(running: Running) -> Iterator[OpenAI]:
    with running.client() as one:
        yield one
