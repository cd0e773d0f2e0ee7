"""Token ids of the prompts that a body has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from soothsay.server.parameters import truncated
from soothsay.server.prompts import PromptReader
from soothsay.server.protocol import ChatRequest, CompletionRequest
from soothsay.server.replies import Echo


def chat_ids(
    reader: PromptReader, body: ChatRequest, variables: Mapping[str, Any], room: int
) -> tuple[list[int], str]:
    """Token ids of a conversation, and its text.

    Args:
        reader: of the model's prompts.
        body: the conversation, and how to lay it out.
        variables: of the template.
        room: tokens of the context.

    Raises `ApiError` if the model has no template, or the template refuses the messages.
    """
    messages = [message.for_template() for message in body.messages]
    own = {"reasoning_effort": body.reasoning_effort, "add_generation_prompt": body.add_generation_prompt}
    given = {**{name: value for name, value in own.items() if value is not None}, **variables}
    if body.continue_final_message:
        given["add_generation_prompt"] = False
    text = reader.render(messages, given)
    if body.continue_final_message:
        text = _cut_after(text, continued_text(body))
    cut = body.truncate_prompt_tokens is not None
    ids = reader.encode(text, special=bool(body.add_special_tokens), field="messages", cut=cut)
    return truncated(ids, body, room), text


def continued_text(body: ChatRequest) -> str:
    """The text of the last message, if the answer continues it. Otherwise nothing."""
    return str(body.messages[-1].for_template()["content"]) if body.continue_final_message else ""


def completion_ids(
    reader: PromptReader, body: CompletionRequest, prompts: list[str | list[int]], room: int
) -> tuple[list[list[int]], list[Echo]]:
    """Token ids of prompts, and what each answer begins with: nothing, or its prompt.

    Args:
        reader: of the model's prompts.
        body: how to encode them.
        prompts: texts or token ids.
        room: tokens of the context.
    """
    special, cut = body.add_special_tokens is not False, body.truncate_prompt_tokens is not None
    ids, echoed = list[list[int]](), list[Echo]()
    for prompt in prompts:
        known = reader.encode(prompt, special=special, cut=cut) if isinstance(prompt, str) else prompt
        ids.append(reader.check_prompt(truncated(known, body, room)))
        if body.echo:
            whole = isinstance(prompt, str) and len(known) == len(ids[-1])
            text = str(prompt) if whole else reader.decode(ids[-1])
            echoed += [Echo(text, ids[-1])] * (body.n or 1)
    return ids, echoed


def _cut_after(text: str, end: str) -> str:
    """A text up to where `end` last stands. Templates may have removed the space around it."""
    found = next((one for one in (end, end.strip()) if one in text), "")
    return text[: text.rfind(found) + len(found)] if found else text
