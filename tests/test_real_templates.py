"""Published chat templates render as in transformers. Their texts have licences, so they are not kept here.

`SOOTHSAY_TEMPLATES` names a folder of `.jinja` files. Without it, `data/templates` in the shared folder
is tried.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from chat_styles import CALL, CONVERSATIONS, QUESTION, RESULT, SYSTEM, TOOLS
from places import ROOT, find_shared
from transformers.utils.chat_template_utils import render_jinja_template

from soothsay import LLM, ModelError, RequestError, Tokenizer
from soothsay.server.tools.tool_format import ToolFormat

FOLDER = os.environ.get("SOOTHSAY_TEMPLATES")
SHARED = find_shared(ROOT, os.environ.get("SOOTHSAY_SHARED"))
FILES = sorted((Path(FOLDER) if FOLDER else (SHARED or ROOT) / "data" / "templates").glob("*.jinja"))
THOUGHT = {"role": "assistant", "content": "Yes.", "reasoning_content": "Let me see.\nIs it?"}
ARGUMENTS: dict[str, Any] = {
    "place": 'Zürich\n "x" <b>',
    "days": 3,
    "deep": {"a": [1, None, "y"]},
    "sure": True,
    "list": [1, "2"],
    "size": 2.5,
}
KINDS = ("string", "integer", "object", "boolean", "array", "number")
TYPED: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather",
            "parameters": {
                "type": "object",
                "properties": {
                    name: {"type": kind, "description": ""}
                    for name, kind in zip(ARGUMENTS, KINDS, strict=True)
                },
                "required": [],
            },
        },
    },
    TOOLS[1],
]
ENDS = ("</s>", "<|eot_id|>", "<|eot|>", "<|im_end|>", "<|end|>", "<seed:eos>")
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
CHATS: dict[str, list[dict[str, Any]]] = {
    **CONVERSATIONS,
    "thoughts": [SYSTEM, QUESTION, THOUGHT, QUESTION],
    "thoughts of an older name": [QUESTION, {**THOUGHT, "reasoning": "Hm."}, QUESTION],
    "thoughts and tools": [SYSTEM, QUESTION, {**CALL, "reasoning_content": "Hm."}, RESULT],
    "a call and text": [QUESTION, {**CALL, "content": "I look."}, RESULT, THOUGHT, QUESTION],
    "a last answer": [QUESTION, THOUGHT],
    "two results": [QUESTION, {**CALL, "tool_calls": CALL["tool_calls"] * 2}, RESULT, RESULT],
}


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES or [None], ids=lambda file: file.stem if file else "none")
def test_a_published_template_renders_as_in_transformers(file: Path | None, sibyl: LLM) -> None:
    if file is None:
        pytest.skip("no published templates: SOOTHSAY_TEMPLATES names no folder of .jinja files")
    assert sibyl.tokenizer is not None
    source = file.read_text()
    try:
        tokenizer = Tokenizer(sibyl.tokenizer.backend, source, SPECIAL)
    except ModelError:
        assert theirs(source, [QUESTION], None) is None
        return
    for messages in CHATS.values():
        for tools in (None, TOOLS):
            for flag in (True, False):
                variables = {"add_generation_prompt": flag, "enable_thinking": flag}
                given = variables if tools is None else {**variables, "tools": tools}
                assert ours(tokenizer, messages, given) == theirs(source, messages, tools, **variables)


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES or [None], ids=lambda file: file.stem if file else "none")
def test_calls_that_a_published_template_writes_are_read(file: Path | None, sibyl: LLM) -> None:
    if file is None:
        pytest.skip("no published templates: SOOTHSAY_TEMPLATES names no folder of .jinja files")
    assert sibyl.tokenizer is not None
    try:
        tokenizer = Tokenizer(sibyl.tokenizer.backend, file.read_text(), SPECIAL)
    except ModelError:
        return
    form = ToolFormat.of(tokenizer)
    for count in (1, 2) if form.frame is not None else ():
        calls = [
            {"id": f"abcdefgh{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate([("get_weather", ARGUMENTS), ("noop", {})][:count])
        ]
        answer = {"role": "assistant", "content": "", "tool_calls": calls}
        whole = ours(tokenizer, [QUESTION, answer], {"tools": TYPED, "add_generation_prompt": False})
        prompt = ours(tokenizer, [QUESTION], {"tools": TYPED})
        text = answer_in(whole or "", prompt or "")
        if "get_weather" not in text or "<|python_start|>" in text:  # Llama 4's are not read
            continue
        reader = form.parser(TYPED)
        parts = [reader.push(text), reader.end()]
        found = [(call.name, json.loads(call.arguments)) for part in parts for call in part.calls]
        assert found == [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def answer_in(whole: str, prompt: str) -> str:
    """The answer at the end of a conversation, as the model would write it, without an end token."""
    common = next(
        (i for i, pair in enumerate(zip(whole, prompt, strict=False)) if len({*pair}) > 1), len(prompt)
    )
    tag = whole.rfind("<", 0, common)
    if tag >= 0 and ">" not in whole[tag:common]:  # the prompt goes on with another tag
        common = tag
    text = whole[common:].rstrip()
    return next((text.removesuffix(end) for end in ENDS if text.endswith(end)), text)


def ours(tokenizer: Tokenizer, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str | None:
    """What we render; None if the template refuses the messages."""
    try:
        return tokenizer.render(messages, **variables)
    except RequestError:
        return None


def theirs(source: str, messages: list[dict[str, Any]], tools: Any, **variables: Any) -> str | None:
    """What transformers renders; None if it fails."""
    try:
        given = {**SPECIAL, **variables}
        rendered, _ = render_jinja_template([messages], tools=tools, chat_template=source, **given)
    except Exception:  # a template can raise nearly anything
        return None
    return str(rendered[0])
