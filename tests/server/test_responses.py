"""OpenAI's official client gets its own types from `/v1/responses`, and the same answers as from chats."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Literal

import httpx
import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from serving import Running
from test_chat_streams import CASES, cuts, reason_told, said_in
from tool_cases import Told

from soothsay import LLM, FinishReason, SamplingParams
from soothsay.core.answer import TokenLogprobs
from soothsay.server.apis.openai.responses_bodies import MAX_ECHO, ResponsesRequest
from soothsay.server.apis.openai.responses_replies import ResponsesFormat
from soothsay.server.engines.engine_messages import AnswerUpdate
from soothsay.server.fleet.jobs import AnswerProgress
from soothsay.server.generation.reply_format import TokenTexts, list_logprobs
from soothsay.server.http.api_errors import ApiError
from soothsay.server.http.bodies import Json
from soothsay.server.http.json_streams import NAMED_EVENTS, EventStream
from soothsay.server.tools.reasoning import ReasoningFormat
from soothsay.server.tools.tool_calls import PlainParser, ToolCallParser
from soothsay.server.tools.tool_readers import HermesParser

QUESTION = "Can you explain why the sky is blue?"
ASKED: dict[str, Any] = {"model": "sibyl", "input": QUESTION, "max_output_tokens": 12}
SEED: dict[str, Any] = {"extra_body": {"seed": 5}}
PARAMETERS: Json = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2]}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "name": name, "description": "", "parameters": PARAMETERS, "strict": True}
    for name in ("first", "second")
]


@pytest.fixture(scope="module")
def tooled(with_tools: Running) -> Iterator[OpenAI]:
    with with_tools.client() as client:
        yield client


def checked(response: Json) -> Response:
    """A response, if it has all that the client's type requires."""
    if response["usage"]:  # what another service bills
        details = {**response["usage"]["input_tokens_details"], "cache_write_tokens": 0}
        response = {**response, "usage": {**response["usage"], "input_tokens_details": details}}
    return Response.model_validate(response)


def contents(items: Sequence[Any]) -> list[Any]:
    """What items say, without their ids, which are random."""
    said = []
    for item in items:
        if item.type == "message":
            (part,) = item.content
            said.append((item.status, part.text, [one.token for one in part.logprobs or ()]))
        else:
            said.append((item.status, item.name, item.arguments))
    return said


def test_a_response_says_what_the_engine_says(client: OpenAI, sibyl: LLM) -> None:
    said = client.responses.create(**ASKED, temperature=0, instructions="Be brief.", metadata={"a": "b"})
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    meant = sibyl.generate(sibyl.chat_prompt(messages), SamplingParams(temperature=0, max_tokens=12))
    assert said.output_text == meant.text
    assert (said.status, said.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert contents(said.output) == [("incomplete", meant.text, [])]
    assert (said.usage.input_tokens, said.usage.output_tokens) == (len(meant.prompt_token_ids), 12)
    assert said.usage.total_tokens == said.usage.input_tokens + 12
    assert said.usage.output_tokens_details.reasoning_tokens == 0
    assert said.usage.input_tokens_details.cached_tokens >= 0
    assert (said.instructions, said.metadata, said.temperature) == ("Be brief.", {"a": "b"}, 0)
    assert said.store is False
    again = client.responses.create(**ASKED, temperature=0, instructions="Be brief.")
    assert again.usage.input_tokens_details.cached_tokens > 0
    assert again.id != said.id


def test_every_field_that_the_client_requires_is_there(running: Running) -> None:
    reply = httpx.post(f"{running.url}/v1/responses", json={**ASKED, "stream": False}).json()
    assert checked(reply).output_text
    body = {**ASKED, "stream": True, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    kind: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    text = httpx.post(f"{running.url}/v1/responses", json=body)
    assert text.headers["content-type"].startswith("text/event-stream")
    for part in text.text.strip().split("\n\n"):
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if "response" in event:
            checked(event.pop("response"))
            event["response"] = reply | {"usage": None}
        kind.validate_python(event)


def test_a_part_of_a_character_has_a_list_of_bytes() -> None:
    """The client requires one."""
    texts: Any = {0: "\ufffd", 1: "a"}.__getitem__
    [told] = list_logprobs(texts, [TokenLogprobs(0, -1.0, {0: -1.0, 1: -2.0})], no_bytes=[])
    assert told["bytes"] == []
    assert [top["bytes"] for top in told["top_logprobs"]] == [[], [97]]


def test_a_stream_adds_up_to_the_whole_response(client: OpenAI) -> None:
    logprobs: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = client.responses.create(**ASKED, **SEED, **logprobs)
    events = list(client.responses.create(**ASKED, **SEED, **logprobs, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    rest = [event.type.removeprefix("response.") for event in events if event not in deltas]
    assert rest == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    assert events[4 : 4 + len(deltas)] == deltas
    assert "".join(event.delta for event in deltas) == whole.output_text == events[-1].response.output_text
    assert contents(events[-1].response.output) == contents(whole.output)
    told = [one.token for event in deltas for one in event.logprobs]
    assert told == [one.token for one in whole.output[0].content[0].logprobs]
    assert len(told) == 12
    items = {getattr(event, "item_id", None) or event.item.id for event in events[2:-1]}
    assert items == {events[-1].response.output[0].id}
    assert len({event.response.id for event in (events[0], events[1], events[-1])}) == 1
    chat = client.chat.completions.create(
        model="sibyl",
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=12,
        seed=5,
        logprobs=True,
        top_logprobs=2,
    )
    assert chat.choices[0].message.content == whole.output_text
    listed = [one.model_dump() for one in chat.choices[0].logprobs.content]
    assert listed == [one.model_dump() for one in whole.output[0].content[0].logprobs]


def test_the_clients_own_stream(client: OpenAI) -> None:
    ended: Any = {**ASKED, "extra_body": {"seed": 5, "stop": ["."]}, "max_output_tokens": 200}
    with client.responses.stream(**ended) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.status == "completed"
    assert snapshots[-1] == final.output_text == client.responses.create(**ended).output_text


class Number(BaseModel):
    n: Literal[1, 2]


def test_a_schema_is_followed_and_parsed(client: OpenAI) -> None:
    said = client.responses.parse(**{**ASKED, "max_output_tokens": 40}, text_format=Number, **SEED)
    assert said.output_parsed in (Number(n=1), Number(n=2))
    assert said.status == "completed"
    assert said.text.format.type == "json_schema"
    loose = client.responses.create(
        **{**ASKED, "max_output_tokens": 100}, text={"format": {"type": "json_object"}}, **SEED
    )
    assert loose.output_text.startswith("{")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "second"}], ids=str)
def test_a_forced_call(tooled: OpenAI, choice: Any) -> None:
    asked: Any = {**ASKED, "tools": TOOLS, "tool_choice": choice, "max_output_tokens": 80, **SEED}
    said = tooled.responses.create(**asked)
    (call,) = said.output
    assert (call.type, call.status, said.status) == ("function_call", "completed", "completed")
    assert call.name in (["first", "second"] if choice == "required" else ["second"])
    assert json.loads(call.arguments)["n"] in (1, 2)
    assert [tool.name for tool in said.tools] == ["first", "second"]
    events = list(tooled.responses.create(**asked, stream=True))
    assert [event.type.removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert events[3].delta == events[4].arguments == call.arguments
    assert events[2].item.arguments == ""
    assert contents(events[-1].response.output) == contents(said.output)
    with tooled.responses.stream(**asked) as stream:
        (parsed,) = stream.get_final_response().output
    assert parsed.parsed_arguments == json.loads(call.arguments)


def test_a_conversation_is_that_of_chats(tooled: OpenAI) -> None:
    said = tooled.responses.create(
        **{**ASKED, "max_output_tokens": 80}, tools=TOOLS, tool_choice="required", **SEED
    )
    (call,) = said.output
    history: list[Any] = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Let me", "annotations": [], "logprobs": []}],
        },
        call.model_dump(),
        {"type": "function_call", "call_id": "call_2", "name": "second", "arguments": '{"n": 2}'},
        {"type": "function_call_output", "call_id": call.call_id, "output": "done"},
        {
            "type": "function_call_output",
            "call_id": "call_2",
            "output": [{"type": "input_text", "text": "too"}],
        },
    ]

    def of_chats(name: str, arguments: str, number: str) -> Json:
        return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}

    messages: Any = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": QUESTION},
        {
            "role": "assistant",
            "content": "Let me",
            "tool_calls": [
                of_chats(call.name, call.arguments, call.call_id),
                of_chats("second", '{"n": 2}', "call_2"),
            ],
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": "done"},
        {"role": "tool", "tool_call_id": "call_2", "content": "too"},
    ]
    body = ResponsesRequest(model="sibyl", input=history)
    chat = [message.model_dump(exclude_none=True) for message in body.chat().messages]
    assert chat == messages
    again = tooled.responses.create(model="sibyl", input=history, temperature=0, max_output_tokens=6)
    plain = tooled.chat.completions.create(model="sibyl", messages=messages, temperature=0, max_tokens=6)
    assert again.output_text == plain.choices[0].message.content
    assert again.usage.input_tokens == plain.usage.prompt_tokens


def test_thoughts_belong_to_the_message_or_call_after_them() -> None:
    def thinks(text: str) -> Json:
        return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    def call(number: str) -> Json:
        return {"type": "function_call", "call_id": number, "name": "first", "arguments": "{}"}

    def result(number: str) -> Json:
        return {"type": "function_call_output", "call_id": number, "output": "done"}

    history: list[Any] = [
        {"role": "user", "content": QUESTION},
        *(thinks("one"), call("a"), call("b"), thinks("two"), call("c")),
        *map(result, "abc"),
        *(thinks("three"), call("d"), result("d")),
        *(thinks("four"), {"role": "user", "content": "Go on."}, {"role": "assistant", "content": "Fine."}),
        *(thinks("five"), {"role": "assistant", "content": "So it is."}),
    ]
    messages = ResponsesRequest(model="sibyl", input=history).chat().messages
    told = [
        (message.reasoning_content, message.content, [one.id for one in message.tool_calls or ()])
        for message in messages
        if message.role == "assistant"
    ]
    assert {message.reasoning_content for message in messages if message.role != "assistant"} == {None}
    assert told == [
        ("one", "", ["a", "b"]),
        ("two", "", ["c"]),
        ("three", "", ["d"]),
        (None, "Fine.", []),
        ("five", "So it is.", []),
    ]


def test_what_has_no_effect_is_accepted(client: OpenAI) -> None:
    plain = client.responses.create(**ASKED, **SEED)
    told = client.responses.create(
        **ASKED,
        **SEED,
        include=["reasoning.encrypted_content"],
        metadata={},
        parallel_tool_calls=True,
        previous_response_id=None,
        prompt_cache_key="k",
        reasoning={"effort": "low"},
        safety_identifier="me",
        service_tier="auto",
        store=True,
        text={"verbosity": "low"},
        tool_choice="auto",
        tools=[],
        top_logprobs=0,
        truncation="auto",
        user="me",
    )
    assert told.output_text == plain.output_text
    assert (told.user, told.store, told.truncation) == ("me", False, "disabled")
    speculating = {"seed": 5, "speculation": {"drafter": "prompt-lookup"}, "cache_salt": "mine"}
    assert client.responses.create(**ASKED, extra_body=speculating).output_text == plain.output_text


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"input": None}, "input", ""),
        ({"input": []}, "input", "at least 1"),
        ({"input": [3]}, "input.0", ""),
        ({"input": [{"role": "user"}]}, "input.0.content", "it is missing"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input.0.role", "'system'"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0", "stores nothing"),
        ({"input": [{"type": "web_search_call"}]}, "input", "at least 1"),
        ({"input": [{"role": "user", "content": [{"type": 3}]}]}, "input.0.content.0", ""),
        ({"tools": [{"type": 3}]}, "tools.0", ""),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0", "pattern"),
        ({"tool_choice": {"type": 3}}, "tool_choice", ""),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "third"}}, "tool", ""),
        ({"tool_choice": "any"}, "tool_choice", "'required'"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "stores nothing"),
        ({"conversation": "c"}, "conversation", "stores nothing"),
        ({"background": True}, "background", "leave it out, and the reply has the answer"),
        ({"prompt": {"id": "p"}}, "prompt", "input"),
        ({"messages": []}, "messages", "use input"),
        ({"n": 2}, "n", ""),
        ({"max_output_tokens": 0}, "max_output_tokens", ""),
        ({"temperature": -1}, "temperature", ""),
        ({"temperature": "hot"}, "temperature", ""),
        ({"seed": "x"}, "seed", ""),
        ({"top_logprobs": 21}, "top_logprobs", "20"),
        ({"stream": True, "speculation": {"trace": True}}, "speculation.trace", "chats"),
        ({"input": [[]] * 10_000}, "input.0", ""),
    ],
    ids=str,
)
def test_errors_name_the_part_that_is_wrong(
    running: Running, change: dict[str, Any], param: str, words: str
) -> None:
    reply = httpx.post(f"{running.url}/v1/responses", json={**ASKED, **change})
    error = reply.json()["error"]
    assert (reply.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["param"].startswith(param)
    assert words in error["message"]
    assert len(error["message"]) < 300
    assert running.free


def test_errors_have_the_clients_classes(client: OpenAI) -> None:
    with pytest.raises(NotFoundError, match="no model"):
        client.responses.create(**{**ASKED, "model": "gpt"})
    with pytest.raises(BadRequestError, match="no tools"):
        client.responses.create(**ASKED, tools=TOOLS)
    with pytest.raises(NotFoundError):
        client.responses.retrieve("resp_1")
    with pytest.raises(NotFoundError, match="offers no embeddings"):
        client.embeddings.create(model="sibyl", input="x")


class Replayed:
    """A job whose updates are known, and which then fails, if there is a `failure`."""

    params = SamplingParams()

    def __init__(self, updates: Sequence[AnswerUpdate], failure: ApiError | None = None):
        self._updates, self._failure = updates, failure
        self.arrived_at = 0.0
        self.answers = [AnswerProgress(4, 0.0)]
        self.reports: dict[str, Json] = {}

    async def __aiter__(self) -> AsyncIterator[AnswerUpdate]:
        for update in self._updates:
            yield update
        if self._failure is not None:
            raise self._failure


def formatted(parser: type[ToolCallParser]) -> ResponsesFormat:
    echo = ResponsesRequest(model="it", input="x").echo()
    return ResponsesFormat("it", TokenTexts(None), parser, echo)


def streamed(job: Any, form: ResponsesFormat) -> list[Json]:
    async def all_events() -> list[Json]:
        return [event async for event in form.stream(job)]

    return asyncio.run(all_events())


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
@pytest.mark.parametrize(("parser", "text", "told"), CASES)
def test_items_do_not_depend_on_how_the_answer_was_cut(
    parser: type[ToolCallParser], text: str, told: Told, reason: FinishReason
) -> None:
    content, calls = told
    status = "completed" if reason_told(("", []), reason) == "stop" else "incomplete"
    meant: list[Any] = [("completed", *call) for call in calls]
    for pieces in cuts(text):
        events = streamed(Replayed(said_in(pieces, reason)), formatted(parser))
        tokens = [f"token_id:{number}" for number in range(len(pieces))]
        message = [(status, content, tokens)] if content or not calls else []
        response = checked(events[-1]["response"])
        assert (response.status, contents(response.output)) == (status, [*message, *meant])
        deltas = [event for event in events if event["type"].endswith("output_text.delta")]
        assert "".join(event["delta"] for event in deltas) == content
        heard = [one["token"] for event in deltas for one in event["logprobs"]]
        assert heard == (tokens if message else [])
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert done == events[-1]["response"]["output"]
        for kind in ("added", "done"):
            places = [e["output_index"] for e in events if e["type"] == f"response.output_item.{kind}"]
            assert places == list(range(len(done)))


@pytest.mark.parametrize(
    ("text", "statuses"),
    [
        ("<think>I see", [("reasoning", "incomplete")]),
        ("<think>I see.</think>Fine", [("reasoning", "completed"), ("message", "incomplete")]),
    ],
)
def test_what_an_answer_ends_in_is_incomplete(text: str, statuses: list[tuple[str, str]]) -> None:
    thinking = ReasoningFormat("<think>", "</think>").wrapped(PlainParser(), opened=False)
    form = ResponsesFormat("it", TokenTexts(None), lambda: thinking, {})
    events = streamed(Replayed(said_in([*text], FinishReason.LENGTH)), form)
    items = events[-1]["response"]["output"]
    assert [(item["type"], item["status"]) for item in items] == statuses
    assert [e["item"] for e in events if e["type"] == "response.output_item.done"] == items


def test_the_reply_says_whether_calls_were_allowed_in_parallel() -> None:
    for given, told in ((None, True), (True, True), (False, False)):
        body = ResponsesRequest(model="it", input="x", parallel_tool_calls=given)
        assert body.echo()["parallel_tool_calls"] is told


def test_a_failure_is_the_last_event() -> None:
    form = formatted(HermesParser)
    updates = said_in(["Hello", " you", "!"], FinishReason.STOP)[:2]

    async def follow() -> list[Json]:
        seen = []
        try:
            async for event in form.stream(Replayed(updates, ApiError(500, "broken", "x"))):  # type: ignore[arg-type]
                seen.append(event)
        except ApiError as error:
            seen.append(form.failure(error))
        return seen

    events = asyncio.run(follow())
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.failed"
    failed = checked(events[-1]["response"])
    assert failed.status == "failed"
    assert failed.error is not None
    assert (failed.error.code, failed.error.message) == ("server_error", "broken")


def test_a_failure_is_sent_and_the_job_settled() -> None:
    form, sent = formatted(PlainParser), []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def receive() -> Any:
        await asyncio.Event().wait()

    job: Any = Replayed(said_in(["Hello", ""], FinishReason.STOP)[:1], ApiError(503, "gone", "x"))
    stream = EventStream(form.stream(job), lambda: sent.append(b"settled"), NAMED_EVENTS, form.failure)
    scope: Any = {"type": "http", "state": SimpleNamespace()}
    asyncio.run(stream(scope, receive, send))
    assert sent[-1] == b"settled"
    assert sent[-3].startswith(b"event: response.failed\ndata: {")
    assert sent[-2] == b""


def test_what_a_reply_repeats_is_limited(running: Running) -> None:
    for more in (
        {"metadata": {"a": "b" * MAX_ECHO}},
        {"user": "b" * MAX_ECHO},
        {"text": {"format": {"type": "json_object", "description": "b" * MAX_ECHO}}},
    ):
        reply = httpx.post(f"{running.url}/v1/responses", json={**ASKED, **more}, timeout=60)
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["param"]) == (400, "invalid_value", "metadata")
