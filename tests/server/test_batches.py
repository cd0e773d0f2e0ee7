"""Batches: the answers are the server's, whatever else is in the file, and do not depend on the run."""

from __future__ import annotations

import asyncio
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import engines
import httpx
import pytest
from serving import Running, WarmEngine
from tool_cases import TOOL_TEMPLATE

from soothsay import LLM, RequestError
from soothsay.server.batch.batch_files import BatchInput, BatchOutput
from soothsay.server.batch.batch_run import BatchRun, run_batch, settle
from soothsay.server.fleet.engine_fleet import Fleet
from soothsay.tokenizer import Tokenizer

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ASKED = [{"role": "user", "content": "Name three colours."}]
PLAYS = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
PLAY = {"type": "function", "function": {"name": "play", "parameters": PLAYS}}
SAMPLED = {"temperature": 1.0, "seed": 5, "max_tokens": 12}

GOOD: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": ASKED, "max_tokens": 8, "temperature": 0, "seed": 1}),
    (CHAT, {"messages": ASKED, "n": 3, "logprobs": True, "top_logprobs": 2, **SAMPLED}),
    (CHAT, {"messages": ASKED, "tools": [PLAY], "tool_choice": "required", **SAMPLED, "max_tokens": 60}),
    (CHAT, {"messages": ASKED, "response_format": {"type": "json_object"}, "top_p": 0.5, **SAMPLED}),
    (CHAT, {"messages": ASKED, "structured_outputs": {"choice": ["yes", "no"]}, **SAMPLED}),
    (CHAT, {"messages": ASKED, "return_token_ids": True, "prompt_logprobs": 1, **SAMPLED}),
    (CHAT, {"messages": ASKED, "continue_final_message": True, "echo": True, **SAMPLED}),
    (CHAT, {"messages": ASKED, "speculation": {"drafter": "ngram"}, "some_other_field": 1, **SAMPLED}),
    (TEXT, {"prompt": "Once upon a time", "stop": [" the", "."], **SAMPLED}),
    (TEXT, {"prompt": [[17, 18], [19]], "n": 2, "best_of": 3, **SAMPLED}),
    (TEXT, {"prompt": "Once upon", "echo": True, "logprobs": 1, "logit_bias": {"17": 2.5}, **SAMPLED}),
    (
        TEXT,
        {
            "prompt": "caf\u00e9 \u2028 \U0001f600",
            "top_k": 5,
            "min_p": 0.1,
            "frequency_penalty": 1,
            **SAMPLED,
        },
    ),
    (RESPONSES, {"input": "Name a colour.", "temperature": 1.0, "seed": 5, "max_output_tokens": 12}),
    (
        RESPONSES,
        {"input": ASKED, "temperature": 0, "seed": 1, "max_output_tokens": 9, "metadata": {"a": "b"}},
    ),
]
BAD: list[tuple[str, Any]] = [
    (CHAT, {"messages": ASKED, "temperature": 5}),
    (CHAT, {"messages": ASKED, "model": "gpt-4o"}),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": ASKED, "temperatur": 1}),
    (CHAT, {"messages": ASKED, "max_tokens": "8"}),
    (CHAT, {"messages": [{"role": "user", "content": "word " * 4000}]}),
    (
        CHAT,
        {
            "messages": ASKED,
            "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}},
        },
    ),
    (
        CHAT,
        {"messages": ASKED, "tools": [PLAY], "tool_choice": {"type": "function", "function": {"name": "x"}}},
    ),
    (TEXT, {"prompt": "a", "logprobs": 100}),
    (TEXT, {"prompt": [-1]}),
    (TEXT, {"prompt": ""}),
    (TEXT, {"prompt": "a", "n": 100}),
    (TEXT, {"prompt": "a", "speculation": {"drafter": "nothing"}}),
    (TEXT, {"prompt": "x" * (4 << 20)}),
    (TEXT, {}),
    (TEXT, []),
    (TEXT, "text"),
    (TEXT, 5),
    (RESPONSES, {"input": "a", "background": True}),
    (RESPONSES, {"input": []}),
    ("/v1/embeddings", {"input": "a"}),
]


def bodies(kinds: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """The same, with the model's name."""
    return [(url, {"model": "sibyl", **body} if isinstance(body, dict) else body) for url, body in kinds]


def write(path: Path, kinds: list[tuple[str, Any]]) -> Path:
    lines = [
        {"custom_id": f"id {index}", "method": "POST", "url": url, "body": body}
        for index, (url, body) in enumerate(bodies(kinds))
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def answers(path: Path) -> dict[str, dict[str, Any]]:
    """The lines of an output by their ids."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


def without_drafters(error: Any) -> Any:
    """An error without the drafters to choose from: servers of tests offer those without files too."""
    return json.loads(re.sub(r'(?<=choose from )[^"]*', "", json.dumps(error)))


def test_answers_are_those_of_the_server(with_tools: Running, sibyl: LLM, tmp_path: Path) -> None:
    kinds = bodies(GOOD + BAD)
    tokenizer = Tokenizer(sibyl.tokenizer.backend, TOOL_TEMPLATE, sibyl.tokenizer.special)
    requests = BatchInput(write(tmp_path / "in.jsonl", GOOD + BAD))
    factory = partial(engines.sibyl, tokenizer=tokenizer, max_requests=3)
    with Fleet(partial(WarmEngine, factory)) as fleet, BatchOutput(tmp_path / "out.jsonl") as output:
        asyncio.run(BatchRun(fleet, requests, output, "sibyl").run({}))
    found = answers(tmp_path / "out.jsonl")
    assert len(found) == len(kinds)
    for index, (url, body) in enumerate(kinds):
        line = found[f"id {index}"]
        reply = httpx.post(with_tools.url + url, json=body, timeout=60)
        response = line["response"]
        assert line["error"] is None
        assert response["status_code"] == reply.status_code, body
        good = index < len(GOOD)
        assert (reply.status_code == 200) == good, reply.text
        key = line["id"].removeprefix("batch_req_")
        meant = settle(reply.json(), key) if good else without_drafters(reply.json())
        assert (response["body"] if good else without_drafters(response["body"])) == meant
    calls = found["id 2"]["response"]["body"]["choices"][0]["message"]["tool_calls"]
    assert calls[0]["function"]["name"] == "play"
    assert calls[0]["id"].startswith("call_")


def test_a_line_without_a_seed_has_its_own(tmp_path: Path) -> None:
    body = {"prompt": "Once upon a time", "temperature": 1.0, "max_tokens": 12}
    kinds: list[tuple[str, Any]] = [
        (TEXT, body),
        (TEXT, body),
        (TEXT, {**body, "seed": -1}),
        (TEXT, {**body, "seed": 7}),
    ]
    path = write(tmp_path / "in.jsonl", kinds)

    def texts(output: Path) -> list[str]:
        found = answers(output)
        return [found[f"id {index}"]["response"]["body"]["choices"][0]["text"] for index in range(4)]

    def run(name: str, seed: int) -> list[str]:
        factory = partial(engines.sibyl, drafter="none")
        with Fleet(partial(WarmEngine, factory)) as fleet, BatchOutput(tmp_path / name) as output:
            asyncio.run(BatchRun(fleet, BatchInput(path), output, "sibyl", seed).run({}))
        return texts(tmp_path / name)

    first, again = run("first", 0), run("again", 0)
    run_batch("sibyl", path, tmp_path / "other", seed=1, dtype="int8", drafter="none", kv_tokens=4096)
    other = texts(tmp_path / "other")
    assert again == first
    assert len(set(first)) == 4
    assert [one == two for one, two in zip(first, other, strict=True)] == [False, False, False, True]


def test_a_batch_that_is_run_again_gives_the_same_answers(tmp_path: Path) -> None:
    """Lines without a seed, and with -1 for any, have one that follows from the batch's own and their id."""
    kinds: list[tuple[str, Any]] = [
        *((TEXT, {"prompt": "Once", "max_tokens": 6, **own}) for own in ({}, {"seed": None}, {"seed": -1})),
        (CHAT, {"messages": ASKED, "max_tokens": 6, "seed": -1}),
        (RESPONSES, {"input": "Hi", "max_output_tokens": 6, "seed": -1}),
    ]
    requests = BatchInput(write(tmp_path / "in.jsonl", kinds))
    told = []
    for number in range(2):
        path = tmp_path / f"{number}.jsonl"
        with Fleet(partial(WarmEngine, engines.sibyl)) as fleet, BatchOutput(path) as output:
            asyncio.run(BatchRun(fleet, requests, output, "sibyl").run({}))
        bodies = [answers(path)[f"id {index}"]["response"]["body"] for index in range(len(kinds))]
        told.append([one.get("choices") or one["output"] for one in bodies])
    assert told[0] == told[1]


@pytest.mark.slow
def test_only_the_line_that_kills_the_engine_fails(tmp_path: Path) -> None:
    kinds: list[tuple[str, Any]] = [
        (TEXT, {"prompt": [number], "max_tokens": 24}) for number in range(10, 22)
    ]
    kinds[5] = TEXT, {"prompt": [engines.KILL], "max_tokens": 8}
    requests = BatchInput(write(tmp_path / "in.jsonl", kinds))
    with (
        Fleet(partial(WarmEngine, engines.fragile)) as fleet,
        BatchOutput(tmp_path / "out.jsonl") as output,
    ):
        asyncio.run(BatchRun(fleet, requests, output, "sibyl").run({}))
    found = {one: line["response"]["status_code"] for one, line in answers(tmp_path / "out.jsonl").items()}
    assert found == {f"id {index}": 503 if index == 5 else 200 for index in range(12)}


def test_another_model_behind_the_same_name_is_noticed(tmp_path: Path) -> None:
    """Nothing that the command was told has changed, but what the loaded model computes has."""
    requests = BatchInput(write(tmp_path / "in.jsonl", [(TEXT, {"prompt": "a"}), (TEXT, {"prompt": "b"})]))

    def run(factory: Any) -> None:
        with Fleet(partial(WarmEngine, factory)) as fleet, BatchOutput(tmp_path / "out.jsonl") as output:
            asyncio.run(BatchRun(fleet, requests, output, "sibyl").run({"seed": 0}))

    run(engines.sibyl)
    path = tmp_path / "out.jsonl"
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    with pytest.raises(
        RequestError, match=r"begun with another numeric mode \(weights, dtype or processor\)"
    ):
        run(partial(engines.sibyl, dtype="float32"))
    with pytest.raises(RequestError, match=r"another room for a request, .*: 2048, and now it is 1024"):
        run(partial(engines.sibyl, kv_tokens=1024))
    assert len(path.read_text().splitlines()) == 1
