"""Conversations as callers of `LLM.chat` give them."""

from __future__ import annotations

from typing import Any

import pytest

from soothsay import LLM, RequestError, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, seed=0)
HELLO = [{"role": "user", "content": "Hello!"}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


def of_user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    "messages",
    [
        "Hello!",
        tuple(HELLO),
        iter(HELLO),
        of_user([{"type": "text", "text": "Hello!"}]),
        of_user([{"type": "text", "text": "Hel"}, {"type": "input_text", "text": "lo"}, "!"]),
        of_user(({"type": "refusal", "refusal": "Hello!"},)),
    ],
    ids=["text", "tuple", "iterator", "one part", "three parts", "refusal"],
)
def test_all_forms_of_a_message_mean_the_same(sibyl: LLM, messages: Any) -> None:
    assert sibyl.chat(messages, GREEDY) == sibyl.chat(HELLO, GREEDY)


def test_a_developer_is_the_system(sibyl: LLM) -> None:
    prompts = [
        sibyl.chat_prompt([{"role": role, "content": "Be brief."}, *HELLO])
        for role in ("developer", "system")
    ]
    assert prompts[0] == prompts[1]


def test_an_answer_may_have_calls_and_no_content() -> None:
    from soothsay.chat_layout import conversation

    answers = [{"role": "assistant", "content": None, "tool_calls": []}, {"role": "assistant"}]
    assert conversation(answers) == answers


@pytest.mark.parametrize(
    ("messages", "error", "match"),
    [
        ([], RequestError, "at least one message"),
        (None, TypeError, "a list, not None: "),
        (HELLO[0], TypeError, "a list, not a dict"),
        (b"Hello!", TypeError, "a list, not a bytes"),
        (["Hello!"], TypeError, "message 1 is a str"),
        ([HELLO], TypeError, r"message 1 is a list: .* generate a list with llm\.chat_prompt"),
        ([{"role": "user"}], RequestError, "^message 1 has no content: give"),
        ([*HELLO, {"role": "system", "content": None}], RequestError, "^message 2 has no content"),
        ([*HELLO, {"content": "Hello!"}], RequestError, "message 2 has no role"),
        ([{"role": "usr", "content": "Hello!"}], RequestError, "^message 1 has the role 'usr'; .* user,"),
        (of_user(5), TypeError, "content of message 1 is an int"),
        (of_user([{"type": "text"}]), TypeError, r"message 1 has \{'type': 'text'\}, which is no part"),
        (of_user([5]), TypeError, "message 1 has 5, which is no part"),
        (of_user([{"text": 5}]), TypeError, "no part"),
        (of_user([IMAGE]), RequestError, "image_url parts are not supported: this model reads text"),
    ],
)
def test_what_is_no_conversation(sibyl: LLM, messages: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        sibyl.chat(messages, GREEDY)
