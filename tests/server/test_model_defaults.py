"""Where a request leaves a sampling parameter out, the model's default holds, on every route."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import engines
import pytest
from ollama import Client
from openai import OpenAI
from serving import Running, command, serving

from soothsay import LLM, SamplingParams

CONFIG = '{"temperature": 0.9, "top_k": 4, "top_p": 0.9, "repetition_penalty": 1.2}'
DEFAULTS: dict[str, Any] = {"temperature": 0.9, "top_k": 4, "top_p": 0.9, "repetition_penalty": 1.2}
PROMPT = "A man in a blue shirt"
MESSAGES: Any = [{"role": "user", "content": "Can you explain why the sky is blue?"}]
FEW: dict[str, Any] = {"seed": 5, "max_tokens": 16}
CHANGES: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"top_p": 0.5}, {"temperature": 1.5, "top_k": 0}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("defaults")
    (folder / "generation_config.json").write_text(CONFIG)
    return folder


@pytest.fixture(scope="module")
def own(folder: Path) -> Iterator[Running]:
    """A server whose model has defaults."""
    with serving(partial(engines.sibyl, generation_config=str(folder))) as one:
        yield one


@pytest.fixture(scope="module")
def openai(own: Running) -> Iterator[OpenAI]:
    with own.client() as one:
        yield one


def meant(llm: LLM, prompt: Any, changes: dict[str, Any]) -> str:
    """What the engine says with the defaults and the changes."""
    return llm.generate(prompt, SamplingParams(**{**DEFAULTS, **FEW, **changes})).text


@pytest.mark.parametrize("changes", CHANGES)
class TestRoutes:
    def test_chats(self, openai: OpenAI, sibyl: LLM, changes: dict[str, Any]) -> None:
        said = openai.chat.completions.create(model="sibyl", messages=MESSAGES, extra_body={**FEW, **changes})
        assert said.choices[0].message.content == meant(sibyl, sibyl.chat_prompt(MESSAGES), changes)

    def test_completions(self, openai: OpenAI, sibyl: LLM, changes: dict[str, Any]) -> None:
        said = openai.completions.create(model="sibyl", prompt=PROMPT, extra_body={**FEW, **changes})
        assert said.choices[0].text == meant(sibyl, PROMPT, changes)

    def test_responses(self, openai: OpenAI, sibyl: LLM, changes: dict[str, Any]) -> None:
        body = {"seed": 5, "max_output_tokens": 16, **changes}
        said = openai.responses.create(model="sibyl", input=MESSAGES, extra_body=body)
        assert said.output_text == meant(sibyl, sibyl.chat_prompt(MESSAGES), changes)
        assert said.temperature == changes.get("temperature", 0.9)

    def test_ollama(self, own: Running, sibyl: LLM, changes: dict[str, Any]) -> None:
        options = {"seed": 5, "num_predict": 16, **changes}
        question = sibyl.chat_prompt([{"role": "user", "content": PROMPT}])
        with Client(own.url) as client:
            said = client.chat("sibyl", MESSAGES, options=options)
            told = [client.generate("sibyl", PROMPT, raw=raw, options=options) for raw in (True, False)]
        assert said.message.content == meant(sibyl, sibyl.chat_prompt(MESSAGES), changes)
        assert [one.response for one in told] == [meant(sibyl, p, changes) for p in (PROMPT, question)]


def test_the_defaults_differ_from_each_other(sibyl: LLM) -> None:
    """So that the tests above can fail."""
    texts = {meant(sibyl, PROMPT, changes) for changes in CHANGES}
    assert len(texts) == len(CHANGES)
    plain = SamplingParams(**FEW)
    assert sibyl.generate(PROMPT, plain).text not in texts


def test_the_server_says_at_start_what_it_took(folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    line = '"sampling": "temperature 0.9, top_k 4, top_p 0.9, repetition_penalty 1.2, by default"'
    with command(log, "--drafter", "none", "--generation-config", str(folder)):
        assert line in log.read_text()
