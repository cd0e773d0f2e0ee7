"""Conversations: the forms in which messages are given, and how a model's chat templates lay them out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from secrets import token_hex
from typing import Any, Literal, get_args

from soothsay.chat_template import ChatTemplate
from soothsay.errors import ModelError, RequestError, shown, type_of
from soothsay.files import read_json_object, read_model_text

Message = Mapping[str, Any]

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Kinds of parts of a message that are text, and the field that has it."""

Role = Literal["system", "developer", "user", "assistant", "tool"]
"""Who speaks in a message."""

EXPECTED = "give messages such as {'role': 'user', 'content': 'Hello!'}, or text for one of a user"
SEVERAL = "for several conversations, give generate a list with llm.chat_prompt(messages) of each"


def text_part(part: Any) -> Any:
    """A part of a message as `{"type": "text", "text": ...}`. What is no part comes back as it is.

    Raises `RequestError` for a part that is not text, such as an image.
    """
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        return part
    if kind not in TEXT_PARTS:
        raise RequestError(f"{kind[:40]} parts are not supported: this model reads text")
    return {"type": "text", "text": part.get(TEXT_PARTS[kind])}


def conversation(messages: object) -> list[Message]:
    """Messages as chat templates read them. A text is one message of a user.

    The content of a message may be a text or a list of text parts, and arguments of calls may be JSON text,
    as in OpenAI's API. The role `developer` is `system`, as in the server.

    Raises `TypeError` for what is no message, and `RequestError` if there are none, or one has no known role,
    or a part that is not text.
    """
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if not isinstance(messages, Iterable) or isinstance(messages, Mapping | bytes):
        raise TypeError(f"messages must be a list, not {type_of(messages)}: {EXPECTED}")
    given = list(messages)
    if not given:
        raise RequestError(f"a conversation needs at least one message: {EXPECTED}")
    return [_for_template(message, f"message {number}") for number, message in enumerate(given, start=1)]


def _for_template(message: Any, place: str) -> Message:
    if isinstance(message, list | tuple):
        raise TypeError(f"{place} is {type_of(message)}: {SEVERAL}")
    if not isinstance(message, Mapping):
        raise TypeError(f"{place} is {type_of(message)}: {EXPECTED}")
    if not isinstance(message.get("role"), str):
        raise RequestError(f"{place} has no role: {EXPECTED}")
    if message["role"] not in get_args(Role):
        known = ", ".join(get_args(Role))
        raise RequestError(f"{place} has the role {shown(message['role'], 40)}; the roles are {known}")
    changed: dict[str, Any] = {"role": "system"} if message["role"] == "developer" else {}
    content = message.get("content")
    if isinstance(calls := message.get("tool_calls"), list):
        changed["tool_calls"] = [_call(call) for call in calls]
    if isinstance(content, list | tuple):
        changed["content"] = "".join(_text_of(part, place) for part in content)
    elif not isinstance(content, str | None):
        raise TypeError(f"the content of {place} is {type_of(content)}: give text, or text parts")
    elif content is None and message["role"] in ("user", "system", "developer"):
        raise RequestError(f"{place} has no content: {EXPECTED}")
    return {**message, **changed}


def _call(call: Any) -> Any:
    """A call of a tool with its arguments as a value, if they are JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):  # an earlier answer of a model
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _text_of(part: Any, place: str) -> str:
    try:
        text = text_part(part)["text"]
    except (TypeError, KeyError):
        text = None
    if not isinstance(text, str):
        raise TypeError(
            f"{place} has {shown(part, 60)}, which is no part: give {{'type': 'text', 'text': ...}}"
        )
    return text


TEMPLATE_NAMES = ("default", "tool_use")
"""Names of chat templates that are read. The second is for conversations with tools, if a model has it."""

TEMPLATES = "additional_chat_templates"
"""The folder of a model's templates with names."""

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Fields of a message that may have the model's thoughts. Templates read one of the first two."""

QUESTION, ANSWER, NEXT = (
    {"role": role, "content": f"The {word} message."}
    for role, word in (("user", "first"), ("assistant", "second"), ("user", "third"))
)
"""A conversation that shows what a template writes between two messages."""


class ChatLayout:
    """The chat templates of a model.

    One that cannot be read or compiled is as good as none, since the model can still complete texts.

    Args:
        given: the Jinja templates by name (`TEMPLATE_NAMES`), as they stand in the model's files; or the file
            of one, either Jinja or JSON with a `chat_template`.
        special: the text of special tokens by name, such as `eos_token`; variables of the templates.
    """

    def __init__(self, given: Mapping[str, Any], special: Mapping[str, str]):
        self.sources: dict[str, str] = {}
        """The texts of the templates by name."""
        self.problem: str | None = None
        """What is wrong with the last one that cannot be used."""
        self.special, self.compiled = special, dict[str, ChatTemplate]()
        for name, source in given.items():
            try:
                self.sources[name] = _text(source)
                self.compiled[name] = ChatTemplate(self.sources[name])
            except ModelError as error:
                self.problem = str(error)

    def render(
        self, messages: Sequence[Message], *, continue_final_message: bool = False, **variables: object
    ) -> str:
        """See `Tokenizer.render`."""
        given = {"add_generation_prompt": True, "tools": None, "documents": None, **self.special, **variables}
        name = "default" if given["tools"] is None or "tool_use" not in self.compiled else "tool_use"
        if name not in self.compiled:
            problem = self.problem or "this model has no chat template"
            raise RequestError(f"{problem}; give a plain text prompt instead of messages")
        layout = self.compiled[name].render
        if not continue_final_message:
            return layout(**given, messages=[*map(_with_reasoning, messages)])
        given["add_generation_prompt"], mark = False, f"{token_hex(8)} "
        return _before(layout(**given, messages=[*map(_with_reasoning, _marked(messages, mark))]), mark)

    def after_answer(self) -> tuple[str, str]:
        """What stands after an answer: at the end of a conversation, and before the user's next message."""
        try:
            last, between = (
                self.render(messages, add_generation_prompt=False).rpartition(ANSWER["content"])[2]
                for messages in ((QUESTION, ANSWER), (QUESTION, ANSWER, NEXT))
            )
        except RequestError:
            return "", ""
        return last, between.partition(NEXT["content"])[0]


def templates_in(directory: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The chat templates of a model's directory, as `ChatLayout` takes them.

    Files of their own replace those in the settings, and these the one in `chat_template.json`, where models
    that also see images may have it.

    Args:
        directory: the model's.
        settings: its tokenizer_config.json.
    """
    files = {name: directory / TEMPLATES / f"{name}.jinja" for name in TEMPLATE_NAMES}
    files["default"] = directory / "chat_template.jinja"
    own = {name: file for name, file in files.items() if file.is_file()}
    value, processor = settings.get("chat_template"), directory / "chat_template.json"
    if not own and not value and processor.is_file():
        value = processor
    entries = value if isinstance(value, list) else [{"name": "default", "template": value}]
    known = [one for one in entries if isinstance(one, dict) and one.get("name") in TEMPLATE_NAMES]
    return own or {one["name"]: one["template"] for one in known if one.get("template") is not None}


def _text(source: Any) -> str:
    """The text of a template. Raises `ModelError` if it is none, or its file cannot be read."""
    if isinstance(source, Path):
        json = source.suffix == ".json"
        source = read_json_object(source).get("chat_template") if json else read_model_text(source)
    if not isinstance(source, str) or not source.strip():
        raise ModelError(f"the chat template is {source!r:.80}, and should be a text")
    return source


def _marked(messages: Sequence[Message], mark: str) -> list[Message]:
    """Messages with a mark at the end of the last one's text. Raises `RequestError` if it has no text."""
    if not messages or not isinstance(content := messages[-1].get("content") or "", str):
        raise RequestError("an answer continues the last message, so its content must be a text")
    return [*messages[:-1], {**messages[-1], "content": content + mark}]


def _before(text: str, mark: str) -> str:
    """A text up to where `mark` last stands. Raises `RequestError` if it is not there.

    The mark ends with a space. A template that drops it drops space at the ends of messages, so the space
    before the mark goes too. The message's own text is no sign: the end of a turn may have the same text.
    """
    place = text.rfind(mark.strip())
    if place < 0:
        raise RequestError("the chat template leaves out the last message, so no answer can continue it")
    return text[:place] if text.startswith(mark, place) else text[:place].rstrip()


def _with_reasoning(message: Message) -> Message:
    """A message that has the model's thoughts, if any, under the names by which templates read them."""
    if not isinstance(message, Mapping):
        return message  # the template refuses it, or not
    thoughts = next((message[name] for name in REASONING_FIELDS if message.get(name) is not None), None)
    return message if thoughts is None else {"thinking": thoughts, **message, "reasoning_content": thoughts}
