"""The official client gets the engine's answers in OpenAI's formats."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from serving import Running

from soothsay import LLM, SamplingParams
from soothsay.tokenizer import Tokenizer

MESSAGES: Any = [{"role": "user", "content": "Can you explain why the sky is blue?"}]
PROMPT = "A man in a blue shirt"
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "",
            "parameters": {
                "type": "object",
                "properties": {"n": {"enum": [1, 2]}},
                "required": ["n"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("first", "second")
]


def expected(llm: LLM, prompt: Any = PROMPT, **params: Any) -> Any:
    ids = prompt if isinstance(prompt, str) else llm.chat_prompt(prompt)
    return llm.generate(ids, SamplingParams(**{"temperature": 0, "max_tokens": 12, **params}))


def test_chat_says_what_the_engine_says(client: OpenAI, sibyl: LLM) -> None:
    said = client.chat.completions.create(model="sibyl", messages=MESSAGES, temperature=0, max_tokens=12)
    meant = expected(sibyl, MESSAGES)
    (choice,) = said.choices
    assert (choice.message.content, choice.message.role) == (meant.text, "assistant")
    assert choice.finish_reason == "length"
    assert said.object == "chat.completion"
    assert (said.usage.prompt_tokens, said.usage.completion_tokens) == (len(meant.prompt_token_ids), 12)
    assert said.usage.total_tokens == said.usage.prompt_tokens + 12
    speculation = said.usage.model_extra["speculation"]
    details = said.usage.completion_tokens_details
    assert details.accepted_prediction_tokens == speculation["accepted"]
    assert details.rejected_prediction_tokens == speculation["drafted"] - speculation["accepted"]
    assert speculation["lossless"] is True


def test_usage_counts_guesses(client: OpenAI) -> None:
    def speculation(**options: Any) -> dict[str, Any]:
        said = client.chat.completions.create(
            model="sibyl", messages=MESSAGES, temperature=0, max_tokens=40, extra_body=options
        )
        return said.usage.model_extra["speculation"]

    guessed = speculation(speculation={"drafter": "prompt-lookup"})
    assert guessed["drafted"] >= guessed["accepted"] > 0
    assert guessed["mean_accepted"] > 1
    assert guessed["accepted_by"] == {"prompt-lookup": guessed["accepted"]}
    for off in (False, {"drafter": "none"}):
        assert speculation(speculation=off) == {
            "drafted": 0,
            "accepted": 0,
            "accepted_by": {},
            "mean_accepted": 1.0,
            "lossless": True,
        }
    assert speculation(speculation=True)["drafted"] >= 0


def test_verifier_of_a_request(client: OpenAI) -> None:
    said = client.completions.create(
        model="sibyl", prompt=PROMPT, seed=3, extra_body={"speculation": {"verifier": "typical"}}
    )
    assert said.usage.model_extra["speculation"]["lossless"] is False


def traced(client: OpenAI, drafter: str, **options: Any) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """Text, steps and usage of an answer."""
    text, steps, usage = "", [], {}
    for chunk in client.chat.completions.create(
        model="sibyl",
        messages=MESSAGES,
        temperature=0,
        max_tokens=60,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True, "speculation": {"drafter": drafter, "trace": True, **options}},
    ):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            steps += (choice.model_extra or {}).get("speculation", {"steps": []})["steps"]
        if chunk.usage is not None:
            usage = chunk.usage.model_extra["speculation"]
    return text, steps, usage


def test_a_trace_tells_every_step(client: OpenAI, sibyl: LLM) -> None:
    text, steps, usage = traced(client, "suffix")
    accepted: Counter[str] = Counter()
    said = ""
    for step in steps:
        tokens, parents, drafters, path = (
            step[name] for name in ("tokens", "parents", "drafters", "accepted")
        )
        assert len(tokens) == len(parents) == len(drafters)
        assert (parents[0], drafters[0]) == (-1, None)
        assert all(0 <= parent < node for node, parent in enumerate(parents[1:], start=1))
        assert [parents[node] for node in path] == [0, *path[:-1]][: len(path)]
        assert set(drafters[1:]) <= {"suffix"}
        accepted.update(drafters[node] for node in path)
        said += "".join(tokens[node] for node in path) + step["bonus"]
    assert said.startswith(text)
    assert text == expected(sibyl, MESSAGES, max_tokens=60, ignore_eos=True).text
    assert max(len(step["accepted"]) for step in steps) > 1
    assert usage["drafted"] == sum(len(step["tokens"]) - 1 for step in steps)
    assert usage["accepted_by"] == accepted
    assert usage["accepted"] == accepted["suffix"] > 0


def test_a_bound_on_guesses(client: OpenAI) -> None:
    free, steps, _ = traced(client, "suffix")
    assert max(len(step["tokens"]) for step in steps) > 3
    for most in (0, 2):
        text, steps, _ = traced(client, "suffix", max_nodes=most)
        assert text == free
        assert max(len(step["tokens"]) for step in steps) == most + 1


@pytest.mark.parametrize("n", [1, 3])
def test_chat_stream_is_the_whole_answer_in_parts(client: OpenAI, n: int) -> None:
    asked: Any = {"model": "sibyl", "messages": MESSAGES, "seed": 5, "max_tokens": 10, "n": n}
    whole = client.chat.completions.create(**asked)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    texts, reasons = [""] * n, [None] * n
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert [chunk.choices[0].delta.role for chunk in chunks[:n]] == ["assistant"] * n
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1
    assert len(set(texts)) == n


def test_completions_of_many_prompts(client: OpenAI, sibyl: LLM) -> None:
    prompts = [PROMPT, "Once upon a time"]
    said = client.completions.create(model="sibyl", prompt=prompts, seed=9, max_tokens=8, n=2, echo=True)
    asked = {**sibyl.sampling_defaults, "seed": 9, "max_tokens": 8, "n": 2}
    meant = [expected(sibyl, prompt, **asked) for prompt in prompts]
    assert [choice.text for choice in said.choices] == [
        prompt + choice.text
        for prompt, result in zip(prompts, meant, strict=True)
        for choice in result.choices
    ]
    assert [choice.index for choice in said.choices] == [0, 1, 2, 3]
    assert said.usage.prompt_tokens == sum(len(result.prompt_token_ids) for result in meant)
    ids = sibyl.tokenizer.encode(PROMPT)
    by_ids = client.completions.create(model="sibyl", prompt=ids, temperature=0)
    assert by_ids.choices[0].text == expected(sibyl, max_tokens=16).text


def test_completion_stream(client: OpenAI, sibyl: LLM) -> None:
    chunks = client.completions.create(
        model="sibyl", prompt=PROMPT, temperature=0, max_tokens=12, stream=True, echo=True
    )
    assert "".join(c.text for chunk in chunks for c in chunk.choices) == PROMPT + expected(sibyl).text


PARAMETERS: list[dict[str, Any]] = [
    {"temperature": 0.7, "top_p": 0.9},
    {"top_k": 5},
    {"min_p": 0.1},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.3},
    {"stop_token_ids": list(range(300, 310))},
    {"min_tokens": 12, "ignore_eos": True},
]


@pytest.mark.parametrize("parameters", PARAMETERS, ids=lambda p: next(iter(p)))
def test_sampling_parameters_reach_the_engine(client: OpenAI, sibyl: LLM, parameters: dict[str, Any]) -> None:
    extra = {"max_tokens": 12, "seed": 1, **parameters}
    said = client.completions.create(model="sibyl", prompt=PROMPT, extra_body=extra)
    meant = expected(sibyl, **{**sibyl.sampling_defaults, "seed": 1, **parameters})
    assert said.choices[0].text == meant.text
    assert said.choices[0].finish_reason == meant.finish_reason


def test_logit_bias_and_stop(client: OpenAI, sibyl: LLM) -> None:
    token = sibyl.tokenizer.encode(" dog")[0]
    said = client.completions.create(model="sibyl", prompt=PROMPT, logit_bias={str(token): 100}, max_tokens=3)
    assert said.choices[0].text == sibyl.tokenizer.decode([token] * 3)
    text = expected(sibyl, max_tokens=30).text
    stop = text[10:14]
    said = client.completions.create(model="sibyl", prompt=PROMPT, temperature=0, max_tokens=30, stop=[stop])
    assert said.choices[0].text == text[: text.index(stop)]
    assert said.choices[0].finish_reason == "stop"


def test_seed_is_told_and_says_the_same_again(client: OpenAI) -> None:
    first = client.completions.create(model="sibyl", prompt=PROMPT)
    seed = first.choices[0].model_extra["seed"]
    again = client.completions.create(model="sibyl", prompt=PROMPT, seed=seed)
    assert again.choices[0].text == first.choices[0].text


def test_same_seed_same_text_alone_and_among_others(running: Running, client: OpenAI) -> None:
    drafters = ["none", "suffix", "prompt-lookup", "ngram", "recycling", "lookahead", "layer-skip", "auto"]

    def ask(seed: int, drafter: str, max_tokens: int = 12) -> str:
        said = client.chat.completions.create(
            model="sibyl",
            messages=MESSAGES,
            seed=seed,
            max_tokens=max_tokens,
            extra_body={"speculation": {"drafter": drafter}},
        )
        return said.choices[0].message.content

    alone = [ask(seed, "none") for seed in range(4)]
    with ThreadPoolExecutor(16) as pool:
        among = list(pool.map(ask, [i % 4 for i in range(16)], drafters * 2))
    assert among == alone * 4
    assert running.free


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(client: OpenAI, sibyl: LLM, stream: bool) -> None:
    asked: Any = {
        "model": "sibyl",
        "messages": MESSAGES,
        "temperature": 0,
        "max_tokens": 6,
        "logprobs": True,
        "top_logprobs": 2,
    }
    meant = expected(sibyl, MESSAGES, max_tokens=6, logprobs=2)
    if stream:
        told = [
            token
            for chunk in client.chat.completions.create(**asked, stream=True)
            if chunk.choices[0].logprobs
            for token in chunk.choices[0].logprobs.content
        ]
    else:
        told = client.chat.completions.create(**asked).choices[0].logprobs.content
    assert "".join(token.token for token in told) == meant.text
    assert b"".join(bytes(token.bytes) for token in told) == meant.text.encode()
    assert [token.logprob for token in told] == [known.logprob for known in meant.logprobs]
    assert [[top.logprob for top in token.top_logprobs] for token in told] == [
        list(known.top.values()) for known in meant.logprobs
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_completion_logprobs(client: OpenAI, sibyl: LLM, stream: bool) -> None:
    asked: Any = {"model": "sibyl", "prompt": PROMPT, "temperature": 0, "max_tokens": 6, "logprobs": 1}
    meant = expected(sibyl, max_tokens=6, logprobs=1)
    said = (
        list(client.completions.create(**asked, stream=True))
        if stream
        else [client.completions.create(**asked)]
    )
    told = [chunk.choices[0].logprobs for chunk in said]
    tokens = [token for part in told for token in part.tokens]
    assert "".join(tokens) == meant.text
    assert [value for part in told for value in part.token_logprobs] == [k.logprob for k in meant.logprobs]
    offsets = [offset for part in told for offset in part.text_offset]
    assert all(meant.text[at:].startswith(token) for at, token in zip(offsets, tokens, strict=True))
    assert [top for part in told for top in part.top_logprobs] == [
        {token: known.logprob} for token, known in zip(tokens, meant.logprobs, strict=True)
    ]


def test_response_format(client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}, "n": {"type": "boolean"}},
        "required": ["colour", "n"],
        "additionalProperties": False,
    }
    said = client.chat.completions.create(
        model="sibyl",
        messages=MESSAGES,
        seed=1,
        max_tokens=400,
        response_format={"type": "json_schema", "json_schema": {"name": "it", "schema": schema}},
    )
    answer = json.loads(said.choices[0].message.content)
    assert answer["colour"] in ("red", "blue")
    assert isinstance(answer["n"], bool)
    assert said.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "form",
    [
        {"guided_choice": ["yes", "no"]},
        {"guided_regex": "yes|no"},
        {"guided_grammar": 'start: "yes" | "no"'},
        {"structured_outputs": {"choice": ["yes", "no"]}},
    ],
)
def test_forms_of_vllm(client: OpenAI, form: dict[str, Any]) -> None:
    said = client.completions.create(model="sibyl", prompt=PROMPT, seed=2, extra_body=form)
    assert said.choices[0].text in ("yes", "no")


@pytest.fixture(scope="module")
def tooled(with_tools: Running) -> Iterator[tuple[OpenAI, Tokenizer]]:
    """A client of a server whose chat template knows tools, and its tokenizer."""
    with with_tools.client() as client:
        yield client, with_tools.server.model.tokenizer


def test_tools(tooled: tuple[OpenAI, Tokenizer], sibyl: LLM) -> None:
    client, tokenizer = tooled
    asked: Any = {"model": "sibyl", "messages": MESSAGES, "tools": TOOLS, "seed": 0, "max_tokens": 80}
    said = client.chat.completions.create(**asked, tool_choice="required").choices[0]
    (call,) = said.message.tool_calls
    assert said.finish_reason == "tool_calls"
    assert said.message.content is None
    assert call.function.name in ("first", "second")
    assert json.loads(call.function.arguments)["n"] in (1, 2)

    second: Any = {"type": "function", "function": {"name": "second"}}
    chunks = list(client.chat.completions.create(**asked, tool_choice=second, stream=True))
    deltas = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
    assert [(part.index, part.function.name) for part in deltas] == [(0, "second")]
    assert not any(chunk.choices[0].delta.content for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"

    # the conversation continues with the call and its result
    history = [
        *MESSAGES,
        said.message.model_dump(include={"role", "content", "tool_calls"}),
        {"role": "tool", "tool_call_id": call.id, "content": "done"},
    ]
    plain = client.chat.completions.create(
        model="sibyl", messages=history, tools=TOOLS, temperature=0, max_tokens=4
    )
    messages = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"arguments": json.loads(call.function.arguments)}}],
        },
        {"role": "tool", "content": "done"},
    ]
    meant = sibyl.generate(
        tokenizer.encode_chat(messages, tools=TOOLS), SamplingParams(temperature=0, max_tokens=4)
    )
    assert plain.usage.prompt_tokens == len(meant.prompt_token_ids)
    assert plain.choices[0].message.content == meant.text

    third: Any = {"type": "function", "function": {"name": "third"}}
    with pytest.raises(BadRequestError, match="no such tool"):
        client.chat.completions.create(**asked, tool_choice=third)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_some_of_the_tools(tooled: tuple[OpenAI, Tokenizer], mode: str) -> None:
    client, tokenizer = tooled
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    named = [{"type": "function", "function": {"name": "second"}}]
    choice: Any = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
    asked: Any = {"model": "sibyl", "messages": MESSAGES, "tools": strict, "seed": 0, "max_tokens": 80}
    said = client.chat.completions.create(**asked, tool_choice=choice, parallel_tool_calls=False)
    names = [call.function.name for call in said.choices[0].message.tool_calls or ()]
    assert names == (["second"] if mode == "required" else [])
    prompt = tokenizer.encode_chat(MESSAGES, tools=TOOLS[1:])  # `strict` is no news for the model
    assert said.usage is not None
    assert said.usage.prompt_tokens == len(prompt)


@pytest.mark.parametrize(
    ("choice", "max_tokens", "reason"),
    [("required", 80, "tool_calls"), ("required", 12, "length"), ("auto", 12, "length")],
)
def test_a_stream_of_an_answer_with_tools_is_the_whole_answer(
    tooled: tuple[OpenAI, Tokenizer], choice: str, max_tokens: int, reason: str
) -> None:
    client, _ = tooled
    asked: Any = {"model": "sibyl", "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "seed": 0}
    asked["max_tokens"] = max_tokens
    whole = client.chat.completions.create(**asked).choices[0]
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    calls = [part.function for chunk in chunks for part in chunk.delta.tool_calls or ()]
    meant = [call.function for call in whole.message.tool_calls or ()]
    assert [(call.name, call.arguments) for call in calls] == [(call.name, call.arguments) for call in meant]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == (whole.message.content or "")
    assert bool(calls) is (reason == "tool_calls")
    assert bool(whole.message.content) is (reason == "length")
    if choice == "required" and reason == "length":
        assert (
            "<tool_call>" in whole.message.content
        )  # the beginning of a call, which was held back until the end
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == [reason]
    assert whole.finish_reason == reason


def test_tools_are_refused_where_the_template_has_none(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="no tools"):
        client.chat.completions.create(model="sibyl", messages=MESSAGES, tools=TOOLS)
    said = client.chat.completions.create(
        model="sibyl", messages=MESSAGES, tools=TOOLS, tool_choice="none", max_tokens=1
    )
    assert said.choices[0].message.tool_calls is None


def test_models(client: OpenAI) -> None:
    (model,) = client.models.list()
    assert model.id == "sibyl"
    assert "suffix" in model.model_extra["drafters"]
    assert client.models.retrieve("sibyl").id == "sibyl"
    with pytest.raises(NotFoundError):
        client.models.retrieve("gpt")


def test_tokenize_and_back(running: Running, sibyl: LLM) -> None:
    told = httpx.post(f"{running.url}/tokenize", json={"prompt": PROMPT}).json()
    assert told["tokens"] == sibyl.tokenizer.encode(PROMPT)
    assert told["count"] == len(told["tokens"])
    back = httpx.post(f"{running.url}/detokenize", json={"tokens": told["tokens"]}).json()
    assert back["prompt"] == PROMPT
    chat = httpx.post(f"{running.url}/tokenize", json={"messages": MESSAGES}).json()
    assert chat["tokens"] == sibyl.chat_prompt(MESSAGES)


def test_content_in_parts_and_developers(client: OpenAI, sibyl: LLM) -> None:
    parts: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Why"}, {"type": "text", "text": " so?"}]},
    ]
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why so?"}]
    said = client.chat.completions.create(model="sibyl", messages=parts, temperature=0, max_tokens=4)
    assert said.usage.prompt_tokens == len(sibyl.chat_prompt(plain))
    assert said.choices[0].message.content == expected(sibyl, plain, max_tokens=4).text
