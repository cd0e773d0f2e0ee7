"""What other people's clients send works, or is ignored where that does no harm."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai import OpenAI
from serving import Running

from soothsay import LLM, SamplingParams
from soothsay.server.generation.request_parameters import HEADER
from soothsay.server.tools.tool_calls import OneCall
from soothsay.server.tools.tool_readers import HermesParser

MESSAGES: Any = [{"role": "user", "content": "Can you explain why the sky is blue?"}]
PROMPT = "A man in a blue shirt is standing on a ladder"
GREEDY: dict[str, Any] = {"model": "sibyl", "temperature": 0, "max_tokens": 12}
CHAT: dict[str, Any] = {**GREEDY, "messages": MESSAGES}
COMPLETION: dict[str, Any] = {**GREEDY, "prompt": PROMPT}


def ask(running: Running, body: dict[str, Any], **changes: Any) -> httpx.Response:
    path = "chat/completions" if "messages" in {**body, **changes} else "completions"
    reply = httpx.post(f"{running.url}/v1/{path}", json={**body, **changes}, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply


def events(running: Running, body: dict[str, Any], **changes: Any) -> list[dict[str, Any]]:
    lines = ask(running, body, stream=True, **changes).text.split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


# fields without effect, and unknown ones


HARMLESS: list[dict[str, Any]] = [
    {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
    {"verbosity": "low", "reasoning_effort": "low", "request_id": "x", "cache_salt": "me"},
    {"kv_transfer_params": {"a": 1}, "vllm_xargs": {"b": 2}, "mm_processor_kwargs": {}},
    {"spaces_between_special_tokens": False, "skip_special_tokens": True, "functions": None, "suffix": ""},
    {"parallel_tool_calls": False, "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}},
    {"seed": -1, "logit_bias": {}, "bad_words": [], "use_beam_search": False, "audio": None},
]


@pytest.mark.parametrize("fields", HARMLESS, ids=lambda fields: next(iter(fields)))
def test_fields_without_effect(running: Running, fields: dict[str, Any]) -> None:
    reply = ask(running, CHAT, **fields)
    assert reply.json()["choices"][0]["message"] == ask(running, CHAT).json()["choices"][0]["message"]
    assert HEADER not in reply.headers


@pytest.mark.parametrize("stream", [False, True])
def test_unknown_fields_are_ignored_and_named(running: Running, stream: bool) -> None:
    reply = ask(running, CHAT, stream=stream, frobnicate=1, top_a=0.2, unset=None, **{"a\r\nb": 1})
    assert reply.headers[HEADER] == "frobnicate, top_a"
    lost = ask(running, CHAT, stream=stream, drafter="none").headers[HEADER]
    assert lost == "drafter (give speculation.drafter)"
    many = {f"field_number_{number}": number for number in range(1000)}
    assert len(ask(running, CHAT, stream=stream, **many).headers[HEADER].split(", ")) == 32


def test_messages_that_clients_send_back(running: Running, client: OpenAI, sibyl: LLM) -> None:
    said = client.chat.completions.create(**CHAT).choices[0].message
    more = {"role": "user", "content": [{"type": "text", "text": "Why?", "cache_control": {"type": "x"}}]}
    plain = [*MESSAGES, {"role": "assistant", "content": said.content}, {"role": "user", "content": "Why?"}]
    size = len(sibyl.chat_prompt(plain))
    dumped = {
        **said.model_dump(),
        "annotations": [],
        "audio": None,
        "function_call": None,
        "reasoning_content": None,
        "tool_calls": None,
        "provider_specific_fields": {"x": 1},
    }
    as_parts = {"role": "assistant", "content": [{"type": "refusal", "refusal": said.content}]}
    for message in (dumped, said.model_dump(exclude_none=True), as_parts):
        again = client.chat.completions.create(**{**CHAT, "messages": [*MESSAGES, message, more]})
        assert again.usage is not None
        assert again.usage.prompt_tokens == size


def test_schemas_may_be_strict_or_left_out(client: OpenAI) -> None:
    for schema in ({"name": "it", "strict": True}, {"schema": {"type": "object"}, "description": "x"}):
        form: Any = {"type": "json_schema", "json_schema": schema}
        asked = {**CHAT, "max_tokens": 300, "temperature": 1, "seed": 1}
        said = client.chat.completions.create(**asked, response_format=form).choices[0]
        assert said.finish_reason == "length" or isinstance(json.loads(said.message.content or ""), dict)
        assert (said.message.content or "").lstrip().startswith("{")


# what changes the answer


def test_allowed_tokens_and_bad_words(running: Running, sibyl: LLM) -> None:
    allowed = sibyl.tokenizer.encode(" dog cat bird", special=False)
    reply = ask(running, COMPLETION, temperature=1, allowed_token_ids=allowed, return_token_ids=True)
    assert set(reply.json()["choices"][0]["token_ids"]) <= set(allowed)
    text = ask(running, COMPLETION).json()["choices"][0]["text"]
    word = text.split()[1]
    assert word not in ask(running, COMPLETION, bad_words=[word]).json()["choices"][0]["text"]


def test_the_end_of_the_text(running: Running, sibyl: LLM) -> None:
    text = ask(running, COMPLETION).json()["choices"][0]["text"]
    kept = ask(running, COMPLETION, stop=text[5:8], include_stop_str_in_output=True).json()["choices"][0]
    assert (kept["text"], kept["finish_reason"]) == (text[:8], "stop")
    end = {"logit_bias": {str(sibyl.eos_ids[0]): 100}, "include_stop_str_in_output": True}
    shown = ask(running, COMPLETION, **end, skip_special_tokens=False).json()["choices"][0]["text"]
    assert shown == sibyl.tokenizer.decode([sibyl.eos_ids[0]], skip_special=False)


def test_prompts_are_cut_at_their_beginning(running: Running, sibyl: LLM) -> None:
    ids = sibyl.tokenizer.encode(PROMPT)
    cut = ask(running, COMPLETION, truncate_prompt_tokens=4).json()
    assert cut["usage"]["prompt_tokens"] == 4
    assert cut["choices"][0]["text"] == ask(running, COMPLETION, prompt=ids[-4:]).json()["choices"][0]["text"]
    whole = ask(running, COMPLETION, truncate_prompt_tokens=4000).json()
    assert whole["usage"]["prompt_tokens"] == len(ids)
    room = running.server.model.max_context
    long = ask(running, COMPLETION, prompt="word " * 2 * room, truncate_prompt_tokens=-1).json()
    assert long["usage"]["prompt_tokens"] == room - 12


def test_the_answer_continues_the_last_message(running: Running, sibyl: LLM) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "Because the light"}]
    prompt = sibyl.tokenizer.render(MESSAGES) + "Because the light"
    asked = {**CHAT, "messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    meant = sibyl.generate(sibyl.tokenizer.encode(prompt, special=False), SamplingParams(0, max_tokens=12))
    reply = ask(running, asked).json()
    assert reply["usage"]["prompt_tokens"] == len(meant.prompt_token_ids)
    assert reply["choices"][0]["message"]["content"] == meant.text
    echoed = ask(running, asked, echo=True).json()["choices"][0]["message"]["content"]
    assert echoed == "Because the light" + meant.text
    deltas = [choice["delta"] for event in events(running, asked, echo=True) for choice in event["choices"]]
    assert "".join(delta.get("content", "") for delta in deltas) == echoed


@pytest.mark.parametrize("begun", ["<", "end", "\n", "i", "Sure <"])
def test_a_begun_answer_may_look_like_the_end_of_a_turn(running: Running, sibyl: LLM, begun: str) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": begun}]
    expected = sibyl.tokenizer.render(MESSAGES) + begun
    asked = {"messages": messages, "continue_final_message": True}
    laid_out = httpx.post(f"{running.url}/apply-template", json=asked, timeout=60).json()
    assert laid_out["prompt"] == expected
    usage = ask(running, CHAT, **asked).json()["usage"]
    assert usage["prompt_tokens"] == len(sibyl.tokenizer.encode(expected, special=False))


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_line_that_changes_with_each_request_is_dropped(running: Running, sibyl: LLM, role: str) -> None:
    """Claude Code writes it, and its requests come through other APIs too."""
    billing = "x-anthropic-billing-header: cc_version=2.1.40.abc; cc_entrypoint=cli; cch=%s;"
    kind = {"role": "system", "content": "Be kind.\nAlways."}
    for text, system in (
        (f"{billing % 1}\nBe kind.\nAlways.", [kind]),
        (f"Be kind.\n{billing % 2}\nAlways.", [kind]),
        (billing % 3, []),
        (f"Not {billing % 4}", [{"role": "system", "content": f"Not {billing % 4}"}]),
    ):
        laid_out = httpx.post(
            f"{running.url}/apply-template",
            json={"messages": [{"role": role, "content": text}, *MESSAGES]},
            timeout=60,
        ).json()
        assert laid_out["prompt"] == sibyl.tokenizer.render([*system, *MESSAGES])
    said = {"role": "user", "content": billing % 5}
    laid_out = httpx.post(f"{running.url}/apply-template", json={"messages": [said]}, timeout=60).json()
    assert laid_out["prompt"] == sibyl.tokenizer.render([said])


def test_the_template_may_end_without_a_beginning_of_an_answer(running: Running, sibyl: LLM) -> None:
    bare = sibyl.tokenizer.render(MESSAGES, add_generation_prompt=False)
    for fields in (
        {"add_generation_prompt": False},
        {"chat_template_kwargs": {"add_generation_prompt": False}},
    ):
        reply = ask(running, CHAT, **fields).json()
        assert reply["usage"]["prompt_tokens"] == len(sibyl.tokenizer.encode(bare, special=False))


def test_the_best_of_many(running: Running) -> None:
    asked = {**COMPLETION, "temperature": 1, "seed": 3, "max_tokens": 6}
    all_five = ask(running, asked, n=5, logprobs=0, ignore_eos=True).json()["choices"]
    best = ask(running, asked, best_of=5, n=2, ignore_eos=True).json()
    means = {
        one["text"]: sum(one["logprobs"]["token_logprobs"]) / len(one["logprobs"]["token_logprobs"])
        for one in all_five
    }
    assert [one["text"] for one in best["choices"]] == sorted(means, key=lambda text: -means[text])[:2]
    assert [one["index"] for one in best["choices"]] == [0, 1]
    assert {one["logprobs"] for one in best["choices"]} == {None}
    assert best["usage"]["completion_tokens"] == 30
    echoing = {"best_of": 3, "n": 1, "echo": True, "logprobs": 1, "ignore_eos": True}
    two = ask(running, asked, prompt=[PROMPT, "Hello"], **echoing).json()["choices"]
    for one, prompt in zip(two, (PROMPT, "Hello"), strict=True):
        assert one["text"].startswith(prompt)
        assert len(one["logprobs"]["tokens"]) > 6


# log-probabilities of prompts, and token ids


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_echo_with_logprobs_lists_all_tokens(
    running: Running, sibyl: LLM, stream: bool, max_tokens: int
) -> None:
    asked = {**COMPLETION, "max_tokens": max_tokens, "echo": True, "logprobs": 2}
    if stream:
        told = [choice for event in events(running, asked) for choice in event["choices"]]
    else:
        told = ask(running, asked).json()["choices"]
    lists = [one["logprobs"] for one in told if one["logprobs"]]
    told_of = {name: [value for part in lists for value in part[name]] for name in lists[0]}
    params = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=2, prompt_logprobs=2)
    meant = sibyl.generate(PROMPT, params)
    assert meant.prompt_logprobs is not None
    known = [*meant.prompt_logprobs, *(meant.logprobs or [])]
    text = PROMPT + meant.text
    assert "".join(one["text"] for one in told) == "".join(told_of["tokens"]) == text
    assert told_of["token_logprobs"] == [None, *(one.logprob for one in known)]
    assert told_of["top_logprobs"][0] is None
    assert [list(top.values()) for top in told_of["top_logprobs"][1:]] == [
        list(one.top.values()) for one in known
    ]
    places = zip(told_of["text_offset"], told_of["tokens"], strict=True)
    assert all(text[at:].startswith(token) for at, token in places)
    assert told[-1]["finish_reason"] == "length"


def test_echo_with_logprobs_lists_the_end_token_too(running: Running, sibyl: LLM) -> None:
    """lm-eval cuts one token off the end of the lists, whether it has a text or not."""
    asked = {**COMPLETION, "max_tokens": 1, "echo": True, "logprobs": 1}
    asked["logit_bias"] = {str(sibyl.eos_ids[0]): 100}
    reply = ask(running, asked).json()
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "stop"
    usage = reply["usage"]
    assert len(choice["logprobs"]["token_logprobs"]) == usage["prompt_tokens"] + usage["completion_tokens"]


def test_the_cache_cuts_no_row_of_a_scored_prompt(running: Running) -> None:
    prompt = PROMPT * 8
    asked = {**COMPLETION, "prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 0}
    plain = [ask(running, COMPLETION, prompt=prompt).json() for _ in range(2)]
    assert plain[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    for _ in range(2):
        scored = ask(running, asked).json()
        assert scored["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert scored["usage"]["completion_tokens"] == 0
        assert len(scored["choices"][0]["logprobs"]["tokens"]) == scored["usage"]["prompt_tokens"]
    assert running.free


def test_prompt_logprobs_as_vllm_has_them(running: Running, sibyl: LLM) -> None:
    meant = sibyl.generate(sibyl.chat_prompt(MESSAGES), SamplingParams(0, max_tokens=1, prompt_logprobs=2))
    assert meant.prompt_logprobs is not None
    told = ask(running, CHAT, prompt_logprobs=2).json()["prompt_logprobs"]
    assert told[0] is None
    for entry, known in zip(told[1:], meant.prompt_logprobs, strict=True):
        assert entry[str(known.token)]["logprob"] == known.logprob
        assert {int(token): one["logprob"] for token, one in entry.items()} == {
            known.token: known.logprob,
            **known.top,
        }
        assert [entry[str(token)]["rank"] for token in known.top] == [1, 2]
        assert entry[str(known.token)]["decoded_token"]
    choices = ask(running, COMPLETION, prompt=[PROMPT, "Hello there"], prompt_logprobs=0, n=2).json()[
        "choices"
    ]
    assert [len(one["prompt_logprobs"]) for one in choices] == [
        len(sibyl.tokenizer.encode(prompt)) for prompt in (PROMPT, PROMPT, "Hello there", "Hello there")
    ]


def test_token_ids(running: Running, sibyl: LLM) -> None:
    meant = sibyl.generate(sibyl.chat_prompt(MESSAGES), SamplingParams(0, max_tokens=12))
    whole = ask(running, CHAT, return_token_ids=True).json()
    assert whole["prompt_token_ids"] == meant.prompt_token_ids
    assert whole["choices"][0]["token_ids"] == meant.token_ids
    parts = events(running, CHAT, return_token_ids=True)
    assert parts[0]["prompt_token_ids"] == meant.prompt_token_ids
    assert [
        token for part in parts for one in part["choices"] for token in one["token_ids"]
    ] == meant.token_ids

    meant = sibyl.generate(PROMPT, SamplingParams(0, max_tokens=12))
    whole = ask(running, COMPLETION, return_token_ids=True, n=2).json()
    for choice in whole["choices"]:
        assert (choice["prompt_token_ids"], choice["token_ids"]) == (meant.prompt_token_ids, meant.token_ids)
    parts = [one for part in events(running, COMPLETION, return_token_ids=True) for one in part["choices"]]
    assert parts[0]["prompt_token_ids"] == meant.prompt_token_ids
    assert [token for one in parts for token in one["token_ids"]] == meant.token_ids


def test_token_ids_in_place_of_texts(running: Running) -> None:
    asked = {"logprobs": 1, "return_tokens_as_token_ids": True, "return_token_ids": True}
    (choice,) = ask(running, COMPLETION, **asked).json()["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]


# streams and reports


def test_options_of_streams(running: Running) -> None:
    options = {"include_usage": True, "include_obfuscation": False, "continuous_usage_stats": True}
    parts = events(running, CHAT, stream_options=options)
    counts = [part["usage"]["completion_tokens"] for part in parts]
    assert counts == sorted(counts)
    assert counts[-1] == 12
    plain = events(running, CHAT, stream_options={"include_usage": True})
    assert [part["usage"] is None for part in plain] == [True] * (len(plain) - 1) + [False]


@pytest.mark.parametrize("body", [CHAT, COMPLETION], ids=["chat", "completion"])
@pytest.mark.parametrize("drafter", ["suffix", "none"])
def test_reports_at_the_root(running: Running, body: dict[str, Any], drafter: str) -> None:
    asked = {**body, "max_tokens": 60, "ignore_eos": True, "speculation": {"drafter": drafter}}
    with_usage = {"stream_options": {"include_usage": True}}
    streams = [events(running, asked), events(running, asked, **with_usage), events(running, asked, n=2)]
    for parts in streams:
        assert ["metrics" in part for part in parts] == [False] * (len(parts) - 1) + [True]
        assert parts[-1].keys() >= {"metrics", "timings"}
    for reply, n in (
        (ask(running, asked).json(), 1),
        (ask(running, asked, n=2).json(), 2),
        (streams[1][-1], 1),
    ):
        told, usage = reply["metrics"]["speculative_decoding"], reply["usage"]
        counts, speculation = told["acceptance_histogram"], usage["speculation"]
        assert sum(counts) == told["num_spec_steps"]
        assert sum(number * count for number, count in enumerate(counts)) == told["num_accepted_draft_tokens"]
        assert told["num_accepted_draft_tokens"] == speculation["accepted"]
        assert told["num_draft_tokens"] == speculation["drafted"]
        assert "num_spec_tokens" not in told
        if drafter == "none":
            assert (told["num_spec_steps"], told["mean_acceptance_length"]) == (0, 1.0)
        else:
            assert told["num_accepted_draft_tokens"] > 0
            share = told["num_accepted_draft_tokens"] / told["num_spec_steps"]
            assert told["mean_acceptance_length"] == 1 + share
        timings = reply["timings"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert (timings["cache_n"], timings["prompt_n"]) == (cached, usage["prompt_tokens"] - cached)
        assert timings["predicted_n"] == 60 * n
        assert timings["prompt_ms"] > 0
        assert timings["predicted_ms"] > 0
        assert ("draft_n" in timings) is (drafter != "none")
        assert timings.get("draft_n_accepted", 0) == speculation["accepted"]


# tools


def test_one_call_is_enough_if_calls_may_not_be_parallel() -> None:
    call = '<tool_call>{{"name": "{}", "arguments": {{}}}}</tool_call>'
    parser = OneCall(HermesParser())
    parts = [
        parser.push(f"So: {call.format('f')}{call.format('g')}"),
        parser.push(" "),
        parser.push(call.format("h")),
        parser.end(),
    ]
    assert [made.name for part in parts for made in part.calls] == ["f"]
    assert "".join(part.content for part in parts) == "So:"
    last = OneCall(HermesParser())
    last.push('<tool_call>{"name": "f", "arguments": {}}')
    assert [made.name for made in last.end().calls] == ["f"]
