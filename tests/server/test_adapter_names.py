"""Requests name a LoRA adapter as their model, in every API, in batches and on the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import engines
import httpx
import pytest
from adapters import adapter_of
from serving import Running, serving
from typer.testing import CliRunner

from soothsay import LLM, SamplingParams, SoothsayError
from soothsay.cli.app import app
from soothsay.model.weights.hub import bundled_path
from soothsay.server.batch.batch_run import run_batch

PROMPT, CHAT = "A man in a blue shirt", [{"role": "user", "content": "Why is the sky blue?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
FEW = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder, sibyl = tmp_path_factory.mktemp("adapters"), bundled_path("sibyl")
    each = enumerate(("formal", "short"))
    return {name: str(adapter_of(sibyl, folder / name, size=0.3, seed=seed)) for seed, name in each}


@pytest.fixture(scope="module")
def running(paths: dict[str, str]) -> Iterator[Running]:
    with serving(partial(engines.sibyl, adapters=paths)) as server:
        yield server


@pytest.fixture(scope="module")
def llm(paths: dict[str, str]) -> LLM:
    return engines.sibyl(adapters=paths)


def post(running: Running, path: str, body: dict[str, Any]) -> Any:
    reply = httpx.post(f"{running.url}{path}", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize("name", ["formal", "short", "sibyl"])
def test_answers_by_the_named_adapter(name: str, running: Running, llm: LLM) -> None:
    adapter = None if name == "sibyl" else name
    said = llm.generate(PROMPT, GREEDY, adapter=adapter).text
    replied = llm.chat(CHAT, GREEDY, adapter=adapter).text
    completion = post(running, "/v1/completions", {"model": name, "prompt": PROMPT, **FEW})
    assert (completion["model"], completion["choices"][0]["text"]) == (name, said)
    chat = post(running, "/v1/chat/completions", {"model": name, "messages": CHAT, **FEW})
    assert (chat["model"], chat["choices"][0]["message"]["content"]) == (name, replied)
    input_ = {"model": name, "input": CHAT, "temperature": 0, "max_output_tokens": 12}
    response = post(running, "/v1/responses", input_)
    assert (response["model"], response["output"][0]["content"][0]["text"]) == (name, replied)
    message = post(running, "/v1/messages", {"model": name, "messages": CHAT, **FEW})
    assert (message["model"], message["content"][0]["text"]) == (name, replied)
    options = {"temperature": 0, "num_predict": 12}
    body = {"model": f"{name}:latest", "messages": CHAT, "stream": False, "options": options}
    assert post(running, "/api/chat", body)["message"]["content"] == replied
    llama = post(running, "/completion", {"model": name, "prompt": PROMPT, "n_predict": 12, "temperature": 0})
    assert (llama["model"], llama["content"]) == (name, said)


def test_the_three_answer_differently(llm: LLM) -> None:
    assert len({llm.generate(PROMPT, GREEDY, adapter=own).text for own in (None, *llm.adapters)}) == 3


def test_lists_them_as_models(running: Running) -> None:
    cards = httpx.get(f"{running.url}/v1/models").json()["data"]
    assert [(card["id"], card.get("parent")) for card in cards] == [
        ("sibyl", None),
        ("formal", "sibyl"),
        ("short", "sibyl"),
    ]
    assert httpx.get(f"{running.url}/v1/models/short").json() == cards[2]
    tags = httpx.get(f"{running.url}/api/tags").json()["models"]
    assert [one["name"] for one in tags] == ["sibyl:latest", "formal:latest", "short:latest"]
    metrics = httpx.get(f"{running.url}/metrics").text
    assert 'max_lora="2",model_name="sibyl",running_lora_adapters="formal,short"' in metrics


def test_refuses_names_of_no_model(running: Running) -> None:
    reply = httpx.post(f"{running.url}/v1/completions", json={"model": "other", "prompt": PROMPT})
    assert reply.status_code == 404
    assert "the model is 'sibyl', with adapters formal, short" in reply.text


def test_an_adapter_may_not_have_the_name_of_the_model(paths: dict[str, str]) -> None:
    factory = partial(engines.sibyl, adapters={"sibyl": paths["short"]})
    with pytest.raises(SoothsayError, match="'sibyl' is the model's own name"), serving(factory):
        pass


def test_lines_of_a_batch(paths: dict[str, str], llm: LLM, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    names = ("sibyl", "short", "formal")
    bodies = [{"model": name, "prompt": PROMPT, **FEW} for name in names]
    lines = [
        {"custom_id": body["model"], "method": "POST", "url": "/v1/completions", "body": body}
        for body in bodies
    ]
    source.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    options: Any = {"dtype": "int8", "drafter": "suffix", "kv_tokens": 8192}
    lora = [f"{name}={path}" for name, path in paths.items()]
    assert run_batch("sibyl", str(source), str(output), lora=lora, **options).failed == 0
    answers = {one["custom_id"]: one for one in map(json.loads, output.read_text().splitlines())}
    for name in names:
        adapter = None if name == "sibyl" else name
        text = answers[name]["response"]["body"]["choices"][0]["text"]
        assert text == llm.generate(PROMPT, GREEDY, adapter=adapter).text


def invoke(*arguments: str) -> Any:
    common = ("--dtype", "int8", "--threads", "1", "--max-tokens", "12", "--temperature", "0")
    return CliRunner().invoke(app, [*arguments, *common])


def test_commands_answer_with_one_adapter(paths: dict[str, str], llm: LLM) -> None:
    given = [f"--lora={name}={path}" for name, path in paths.items()]
    raw = "generate", "--raw", "--model", "sibyl", "--drafter", "suffix", PROMPT
    assert invoke(*raw, given[1]).stdout == llm.generate(PROMPT, GREEDY, adapter="short").text
    for wrong, problem in (
        (given, "one adapter answers here, and --lora gives formal, short"),
        ([given[0], given[0]], "give NAME=PATH, with a name of its own"),
        (["--lora=path"], "--lora path: give NAME=PATH"),
    ):
        result = invoke(*raw, *wrong)
        assert result.exit_code == 2
        assert problem in result.stderr.replace("\n", " ")


def test_verify_decodes_each_prompt_with_each_adapter(paths: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("Hello!\n")
    given = [f"--lora={name}={path}" for name, path in paths.items()]
    result = invoke("verify", "sibyl", "-p", str(tmp_path / "prompts.txt"), "-d", "prompt-lookup", *given)
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines() if "prompt-lookup" in line]
    assert rows[0][1] == "3"
