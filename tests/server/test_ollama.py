"""Ollama's official client works here, and gets the same answers as from OpenAI's API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import ollama
import pytest
from openai import OpenAI
from serving import Running
from test_chat_streams import CASES, cuts, said_in
from test_responses import Replayed
from tool_cases import Told

from soothsay import FinishReason
from soothsay.server.apis.ollama.ollama_routes import OllamaChatFormat
from soothsay.server.generation.reply_format import MakeParser, TokenTexts
from soothsay.server.http.api_errors import ApiError
from soothsay.server.http.bodies import Json
from soothsay.server.http.json_streams import EVENTS, LINES
from soothsay.server.tools.reasoning import ReasoningFormat
from soothsay.server.tools.tool_calls import PlainParser, ToolCallParser
from soothsay.server.tools.tool_readers import HermesParser

MESSAGES: Any = [{"role": "user", "content": "Can you explain why the sky is blue?"}]
PROMPT = "A man in a blue shirt"
FEW: dict[str, Any] = {"temperature": 0, "num_predict": 12}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "first",
            "description": "",
            "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}},
        },
    }
]


@pytest.fixture(scope="module")
def llama(running: Running) -> Iterator[ollama.Client]:
    with ollama.Client(running.url) as one:
        yield one


def chatted(client: OpenAI, messages: Any = MESSAGES, **options: Any) -> Any:
    asked = {"temperature": 0, "max_tokens": 12, **options}
    return client.chat.completions.create(model="sibyl", messages=messages, **asked)


@pytest.mark.parametrize("model", ["sibyl", "sibyl:latest"])
def test_a_chat(llama: ollama.Client, client: OpenAI, model: str) -> None:
    said = llama.chat(model, MESSAGES, options=FEW)
    meant = chatted(client)
    assert (said.message.role, said.message.content) == ("assistant", meant.choices[0].message.content)
    assert (said.model, said.done, said.done_reason) == (model, True, "length")
    assert (said.prompt_eval_count, said.eval_count) == (meant.usage.prompt_tokens, 12)
    assert said.prompt_eval_duration > 0


def test_a_stream_adds_up(llama: ollama.Client, client: OpenAI) -> None:
    options = {"seed": 3, "num_predict": 30, "stop": ["."], "temperature": 1.0}
    whole = llama.chat("sibyl", MESSAGES, options=options, logprobs=True, top_logprobs=1)
    parts = list(llama.chat("sibyl", MESSAGES, options=options, logprobs=True, top_logprobs=1, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == whole.eval_count
    assert parts[-1].done_reason == whole.done_reason
    told = [one.token for part in parts for one in part.logprobs or ()]
    assert told == [one.token for one in whole.logprobs]
    assert all(len(one.top_logprobs) == 1 for one in whole.logprobs)
    meant = chatted(client, seed=3, max_tokens=30, stop=["."], temperature=1)
    assert meant.choices[0].message.content == whole.message.content


def test_a_stream_is_the_default(running: Running) -> None:
    body = {"model": "sibyl", "prompt": PROMPT, "options": FEW}
    reply = httpx.post(f"{running.url}/api/generate", json=body)
    assert reply.headers["content-type"] == "application/x-ndjson"
    assert reply.headers["x-accel-buffering"] == "no"
    lines = [json.loads(line) for line in reply.text.splitlines()]
    assert lines[-1]["done"] is True
    whole = httpx.post(f"{running.url}/api/generate", json={**body, "stream": False}).json()
    assert "".join(line["response"] for line in lines) == whole["response"]
    assert "context" not in whole


OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0.7, "seed": 4}, {"temperature": 0.7, "seed": 4}),
    ({"top_p": 0.6, "seed": 4}, {"top_p": 0.6, "seed": 4}),
    ({"top_k": 5.0, "seed": 4}, {"extra_body": {"top_k": 5}, "seed": 4}),
    ({"top_k": -1, "seed": 4}, {"seed": 4}),
    ({"min_p": 0.2, "seed": 4}, {"extra_body": {"min_p": 0.2}, "seed": 4}),
    (
        {"repeat_penalty": 1.5, "temperature": 0},
        {"extra_body": {"repetition_penalty": 1.5}, "temperature": 0},
    ),
    ({"presence_penalty": 1.5, "temperature": 0}, {"presence_penalty": 1.5, "temperature": 0}),
    ({"frequency_penalty": 1.5, "temperature": 0}, {"frequency_penalty": 1.5, "temperature": 0}),
    ({"stop": ["sky", "sun"], "temperature": 0}, {"stop": ["sky", "sun"], "temperature": 0}),
    ({"temperature": 0, "num_ctx": 64, "mirostat": 2, "seed": -1}, {"temperature": 0}),
    ({"temperature": -1, "presence_penalty": -0.5}, {"temperature": 0, "presence_penalty": -0.5}),
    ({"temperature": 1, "top_p": 0, "stop": ["", "sky"]}, {"temperature": 0, "stop": ["sky"]}),
    ({"top_p": 1.5, "min_p": -1, "top_k": 5.7, "seed": 4.0}, {"extra_body": {"top_k": 5}, "seed": 4}),
    ({"temperature": 9, "seed": 4}, {"temperature": 2, "seed": 4}),
    ({"temperature": 0, "repeat_penalty": 0}, {"temperature": 0, "extra_body": {"repetition_penalty": 0.1}}),
    ({"temperature": 0, "presence_penalty": 7.0, "stop": None}, {"temperature": 0, "presence_penalty": 2}),
]


@pytest.mark.parametrize(("options", "meant"), OPTIONS, ids=lambda one: next(iter(one)))
def test_options_reach_the_engine(
    llama: ollama.Client, client: OpenAI, options: dict[str, Any], meant: dict[str, Any]
) -> None:
    said = llama.chat("sibyl", MESSAGES, options={"num_predict": 12, **options}, keep_alive="5m", think=False)
    told = client.chat.completions.create(model="sibyl", messages=MESSAGES, max_tokens=12, **meant)
    assert said.message.content == told.choices[0].message.content


def test_without_a_limit_an_answer_ends_by_itself(llama: ollama.Client, client: OpenAI) -> None:
    for options in ({"temperature": 0}, {"temperature": 0, "num_predict": -1}):
        said = llama.chat("sibyl", [{"role": "user", "content": "Hi"}], options=options)
        assert (said.done_reason, said.eval_count > 1) == ("stop", True)
    raw = llama.generate("sibyl", PROMPT, raw=True, options={"temperature": 0, "stop": ["?"]})
    plain = client.completions.create(model="sibyl", prompt=PROMPT, temperature=0, stop="?", max_tokens=500)
    assert raw.eval_count > 16  # OpenAI's default
    assert raw.response == plain.choices[0].text


def test_generate(llama: ollama.Client, client: OpenAI) -> None:
    said = llama.generate("sibyl", PROMPT, system="Be kind.", options=FEW)
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": PROMPT}]
    assert said.response == chatted(client, messages).choices[0].message.content
    raw = llama.generate("sibyl", PROMPT, raw=True, options=FEW, logprobs=True)
    plain = client.completions.create(
        model="sibyl", prompt=PROMPT, temperature=0, max_tokens=12, logprobs=0
    ).choices[0]
    assert raw.response == plain.text
    assert [one.logprob for one in raw.logprobs] == plain.logprobs.token_logprobs


@pytest.mark.parametrize("path", ["chat", "generate"])
def test_forms(llama: ollama.Client, path: str) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    schema["additionalProperties"] = False
    for form in (schema, "json"):
        options = {"seed": 1, "num_predict": 60}
        if path == "chat":
            text = llama.chat("sibyl", MESSAGES, format=form, options=options).message.content
        else:
            text = llama.generate("sibyl", PROMPT, format=form, options=options).response
        assert text.startswith("{")
        if form == schema:
            assert json.loads(text)["n"] in (1, 2)
    assert llama.generate("sibyl", PROMPT, format="", options=FEW).response


def test_tools_reach_the_template(with_tools: Running) -> None:
    history: list[Any] = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "first", "arguments": {"n": 7}}}],
        },
        {"role": "tool", "content": "done", "tool_name": "first"},
    ]
    with ollama.Client(with_tools.url) as llama:
        said = llama.chat("sibyl", history, tools=TOOLS, options=FEW)
        assert llama.show("sibyl").capabilities == ["completion", "tools"]
    call = {"name": "first", "arguments": '{"n": 7}'}
    meant: list[Any] = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": call}]},
        {"role": "tool", "content": "done", "tool_call_id": "c"},
    ]
    with with_tools.client() as client:
        plain = chatted(client, meant, tools=TOOLS)
        bare = chatted(client, meant)
    assert said.message.content == plain.choices[0].message.content
    assert said.prompt_eval_count == plain.usage.prompt_tokens > bare.usage.prompt_tokens


def written(reply: Json) -> Json:
    """A reply as a client reads it."""
    read: Json = json.loads("".join(LINES.frame(reply)))
    return read


def replied(text: str, pieces: list[str], parser: MakeParser) -> tuple[list[Json], Json]:
    """The stream of an answer, and the whole reply."""

    async def follow() -> tuple[list[Json], Json]:
        updates = [replace(update, logprobs=None) for update in said_in(pieces, FinishReason.STOP)]
        jobs: list[Any] = [Replayed(updates), Replayed(updates)]
        forms = [OllamaChatFormat("it", TokenTexts(None), parser) for _ in jobs]
        lines = [written(line) async for line in forms[0].stream(jobs[0])]
        return lines, written(await forms[1].collect(jobs[1]))

    return asyncio.run(follow())


@pytest.mark.parametrize(("parser", "text", "told"), CASES)
def test_calls_have_objects_and_do_not_depend_on_cuts(
    parser: type[ToolCallParser], text: str, told: Told
) -> None:
    for pieces in cuts(text):
        lines, whole = replied(text, pieces, parser)
        messages = [ollama.ChatResponse(**line).message for line in lines]
        assert "".join(message.content for message in messages) == whole["message"]["content"] == told[0]
        calls = [call.function for message in messages for call in message.tool_calls or ()]
        meant = [(name, json.loads(arguments)) for name, arguments in told[1]]
        assert [(call.name, call.arguments) for call in calls] == meant
        listed = [call["function"] for call in whole["message"].get("tool_calls", ())]
        assert [(call["name"], call["arguments"]) for call in listed] == meant
        assert whole["done_reason"] == "stop"


def test_thoughts_have_a_field_of_their_own() -> None:
    text = "<think>I see.</think>Fine."
    form = ReasoningFormat("<think>", "</think>")
    for pieces in cuts(text):
        lines, whole = replied(text, pieces, lambda: form.wrapped(PlainParser(), opened=False))
        messages = [ollama.ChatResponse(**line).message for line in lines]
        assert "".join(message.thinking or "" for message in messages) == "I see."
        assert "".join(message.content or "" for message in messages) == "Fine."
        assert (whole["message"]["thinking"], whole["message"]["content"]) == ("I see.", "Fine.")


HALF = "\ud800"  # half of a surrogate pair, which UTF-8 cannot spell


@pytest.mark.parametrize("value", ["x", [1], '{"a": 1', {"a": HALF}, '{"a": "\\ud800"}'], ids=ascii)
def test_odd_arguments_are_sent(value: Any) -> None:
    call = json.dumps({"name": f"f{HALF}", "arguments": value})
    text = f"<tool_call>{call}</tool_call>"
    _, whole = replied(text, [text], HermesParser)
    (call,) = whole["message"]["tool_calls"]
    assert call["function"]["name"] == "f?"
    assert isinstance(call["function"]["arguments"], dict)


def test_arguments_of_a_text_are_an_object() -> None:
    text = '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>'
    _, whole = replied(text, [text], HermesParser)
    assert whole["message"]["tool_calls"][0]["function"]["arguments"] == {"a": 1}


@pytest.mark.parametrize("framing", [LINES, EVENTS])
def test_no_character_ends_a_line_early(framing: Any) -> None:
    value = {"text": "".join(map(chr, range(0x3000)))}
    (line,) = "".join(framing.frame(value)).strip("\n").splitlines()
    assert json.loads(line.removeprefix("data: ")) == value


def test_durations_are_nanoseconds() -> None:
    job: Any = Replayed(said_in(["a", "b"], FinishReason.STOP))
    for update, at in zip(said_in(["a", "b"], FinishReason.STOP), (1.5, 3.5), strict=True):
        job.answers[0].take(update, at)
    whole = asyncio.run(OllamaChatFormat("it", TokenTexts(None), HermesParser).collect(job))
    names = ("load_duration", "prompt_eval_duration", "eval_duration", "total_duration")
    assert [whole[name] for name in names] == [0, 1_500_000_000, 2_000_000_000, 3_500_000_000]
    assert (whole["prompt_eval_count"], whole["eval_count"]) == (4, 2)


def test_a_failure_is_a_line() -> None:
    failure = OllamaChatFormat("it", TokenTexts(None), HermesParser).failure(ApiError(500, "broken", "x"))
    assert failure == {"error": "broken"}


def test_what_clients_ask_at_the_start(running: Running, llama: ollama.Client) -> None:
    (model,) = llama.list().models
    assert model.model == "sibyl:latest"
    assert len(model.digest or "") == 64
    (loaded,) = llama.ps().models
    assert (loaded.name, loaded.context_length) == ("sibyl:latest", running.server.model.max_context)
    for name in ("sibyl", "sibyl:latest"):
        shown = llama.show(name)
        assert shown.capabilities == ["completion"]
        family = shown.modelinfo["general.architecture"]
        assert shown.modelinfo[f"{family}.context_length"] == running.server.model.max_context
    assert httpx.post(f"{running.url}/api/show", json={"name": "sibyl"}).status_code == 200
    version = httpx.get(f"{running.url}/api/version").json()["version"]
    assert [int(part) for part in version.split(".")] >= [0, 5, 0]
    assert httpx.head(running.url).status_code == httpx.get(running.url).status_code == 200
    for reply in (llama.chat("sibyl", []), llama.generate("sibyl")):
        assert (reply.done, reply.done_reason) == (True, "load")


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("chat", {"model": "llama3", "messages": MESSAGES}, 404, "'llama3'"),
        ("chat", {"model": "sibyl:7b", "messages": MESSAGES}, 404, "'sibyl:7b'"),
        ("chat", {"model": "llama3"}, 404, "'llama3'"),
        ("show", {"model": "llama3"}, 404, "'llama3'"),
        ("chat", {"messages": MESSAGES}, 400, "model"),
        ("chat", {"model": "sibyl", "messages": [{"role": "wizard"}]}, 400, "role"),
        ("chat", {"model": "sibyl", "messages": [3] * 100_000}, 400, "messages"),
        (
            "chat",
            {"model": "sibyl", "messages": [{**MESSAGES[0], "images": ["aGk="]}]},
            400,
            "images are not",
        ),
        ("chat", {"model": "sibyl", "messages": MESSAGES, "tools": TOOLS}, 400, "no tools"),
        ("chat", {"model": "sibyl", "messages": MESSAGES, "think": True}, 400, "does not support thinking"),
        ("chat", {"model": "sibyl", "messages": MESSAGES, "think": "high"}, 400, "thinking"),
        ("chat", {"model": "sibyl", "messages": MESSAGES, "options": {"top_k": "40"}}, 400, "top_k"),
        ("chat", {"model": "sibyl", "messages": MESSAGES, "options": {"temperature": "hot"}}, 400, "options"),
        ("chat", {"model": "sibyl", "messages": MESSAGES, "format": "xml"}, 400, "format"),
        ("generate", {"model": "sibyl", "prompt": "x", "images": ["aGk="]}, 400, "images are not"),
        ("generate", {"model": "sibyl", "prompt": "x", "template": "{{ .Prompt }}"}, 400, "template"),
        ("generate", {"model": "sibyl", "prompt": "x", "suffix": "y"}, 400, "suffix"),
        ("generate", {"model": "sibyl", "prompt": "x", "context": [1]}, 400, "context"),
        ("generate", {"model": "sibyl", "prompt": "word " * 3000}, 400, "the context of"),
        ("embed", {"model": "sibyl", "input": "x"}, 404, "no embeddings"),
        ("embeddings", {"model": "sibyl", "prompt": "x"}, 404, "no embeddings"),
        ("pull", {"model": "sibyl"}, 404, "has one model"),
    ],
    ids=str,
)
def test_errors_have_ollamas_form(
    running: Running, path: str, body: dict[str, Any], status: int, words: str
) -> None:
    reply = httpx.post(f"{running.url}/api/{path}", json=body)
    assert reply.status_code == status
    assert list(reply.json()) == ["error"]
    assert words in reply.json()["error"]
    assert len(reply.text) < 400
    assert running.free


def test_errors_have_the_clients_class(llama: ollama.Client, running: Running) -> None:
    with pytest.raises(ollama.ResponseError, match="no model 'x'") as error:
        list(llama.chat("x", MESSAGES, stream=True))
    assert error.value.status_code == 404
    for reply, status in (
        (httpx.get(f"{running.url}/api/chat"), 405),
        (httpx.post(f"{running.url}/api/chat", content=b"{}", headers={"Origin": "http://x"}), 415),
    ):
        assert reply.status_code == status
        assert isinstance(reply.json()["error"], str)
