"""Harmony, the format of gpt-oss: an answer is a row of messages, each in a channel.

`<|channel|>analysis<|message|>thoughts<|end|><|start|>assistant<|channel|>final<|message|>text<|return|>`.
A call is a message to a function: `<|channel|>commentary to=functions.F <|constrain|>json<|message|>{...}`.
The prompt ends with `<|start|>assistant`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

from soothsay.core.grammar import quoted, spelled
from soothsay.server.tools.tool_calls import (
    FramedParser,
    ParsedPart,
    ToolCall,
    ToolCallParser,
    as_calls,
    named_call,
    overlap,
    parsed_json,
)

CALL, MESSAGE, END = "<|channel|>commentary to=", "<|message|>", "<|call|>"
THOUGHTS = "<|channel|>analysis"
FINAL = "<|channel|>final"
NEXT = "<|start|>assistant"
CHANNEL = "<|channel|>"
"""The tag by which a chat template shows this format."""

MAX_HEADER = 1024
"""Limit of the characters before a message. More is text."""

SPACE = r"space: /[ \t\r\n]{1,16}/"
"""White space around thoughts. It is bounded, since an uncertain model could write it for ever."""

ANY = r"ANY: /(.|\n)*/"

_STARTS = ("<|start|>", "<|channel|>", "to=")
_ENDS = ("<|end|>", END, "<|return|>", "<|start|>", "<|channel|>")
_END = re.compile("|".join(map(re.escape, _ENDS)))
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class HarmonyCalls(FramedParser):
    """Finds `<|channel|>commentary to=functions.F<|message|>{...}<|call|>`."""

    frames, openings = ((CALL, END),), (CALL, " to=functions.")
    signs, forced = ("<|channel|>commentary",), (f"{CALL}functions{MESSAGE}", END)

    def read(self, inside: str, *, bare: bool, closed: bool) -> Sequence[ToolCall] | None:
        """See `FramedParser`."""
        header, tag, body = inside.partition(MESSAGE)
        name = re.split(r"[\s<]", header.strip()[:MAX_HEADER], maxsplit=1)[0].removeprefix("functions.")
        if name == "functions":  # forced by a grammar
            return as_calls(parsed_json(body.strip()))
        return named_call(name, body.strip() or "{}") if tag else None


@dataclass(frozen=True, slots=True)
class HarmonyFormat:
    """How gpt-oss writes its thoughts; see `ReasoningFormat`."""

    hidden: bool

    def is_open(self, prompt: str, continued: str = "") -> bool:
        """See `ReasoningFormat`."""
        _, tag, message = (prompt + continued).rpartition(THOUGHTS)
        return bool(tag) and MESSAGE in message and not any(end in message for end in _ENDS)

    def rules(self, special: Mapping[str, int], prompt: str, continued: str = "") -> str:
        """See `ReasoningFormat`. Each message of thoughts ends, and another message begins."""
        thought, after = spelled(f"{THOUGHTS}{MESSAGE}", special), spelled(NEXT, special)
        first = f"thoughts {after}" if self.is_open(prompt, continued) else ""
        more = "" if continued and not first else f"({thought} thoughts {after})*"
        return f"start: {first} {more} body\n{rules_up_to('<|end|>', special)}\n"

    def framed(self, text: str, special: Mapping[str, int]) -> str:
        """See `ReasoningFormat`."""
        final, form = spelled(FINAL, special), spelled(" <|constrain|>json", special)
        return f"({final} ({form})? {spelled(MESSAGE, special)})? {text}"

    def wrapped(self, parser: ToolCallParser, *, opened: bool) -> ToolCallParser:
        """See `ReasoningFormat`."""
        return HarmonyParser(parser, opened=opened)


class _In(Enum):
    HEADER = auto()
    THOUGHTS = auto()
    TEXT = auto()
    CALL = auto()
    PLAIN = auto()  # what follows is no message


class HarmonyParser(ToolCallParser):
    """Splits an answer into thoughts and the rest, which another parser reads without the messages' tags.

    A call goes to the other parser in the form that `HarmonyCalls` reads. What does not begin as a message
    is text. A blank line stands between two messages of thoughts, and between two of text.

    Args:
        parser: reads text and calls.
        opened: whether the prompt has opened a message of thoughts.
    """

    def __init__(self, parser: ToolCallParser, *, opened: bool):
        self._parser = parser
        self._held = ""
        self._in = _In.THOUGHTS if opened else _In.HEADER
        self._begun = False  # whether this message has said anything
        self._said = set[_In]()  # kinds of messages that have said anything

    def parse(self, text: str, *, final: bool = False) -> ParsedPart:
        """Return what is certain: thoughts, text and complete calls. A header that is cut off has no text."""
        self._held += text
        thoughts, rest = "", ""
        while True:
            if self._in is _In.HEADER:
                if (opening := self._read_header(final=final)) is None:
                    break
                rest += opening
                continue
            body, ended = self._read_body(final=final)
            if self._in is _In.THOUGHTS:
                thoughts += self._apart(body)
            else:
                rest += self._apart(body) if self._in is _In.TEXT else body
            if not ended:
                break
            rest += END if self._in is _In.CALL else ""
            self._in, self._begun = _In.HEADER, False
        return replace(self._parser.parse(rest, final=final), reasoning=thoughts)

    def _read_header(self, *, final: bool) -> str | None:
        """Read what stands before a message. Returns how a call begins, or ""; None: more has to come."""
        begun = self._held.lstrip()
        if not begun.startswith(_STARTS):
            if not final and any(tag.startswith(begun) for tag in _STARTS):
                return None
            self._in = _In.PLAIN
            return ""
        place = self._held.find(MESSAGE)
        if place > MAX_HEADER or (place < 0 and len(self._held) >= MAX_HEADER + len(MESSAGE)):
            self._in = _In.PLAIN
            return ""
        if place < 0:
            self._held = "" if final else self._held
            return None
        header, self._held = self._held[:place], self._held[place + len(MESSAGE) :]
        if recipient := _RECIPIENT.search(header):
            self._in = _In.CALL
            return f"{CALL}{recipient[1]}{MESSAGE}"
        self._in = _In.THOUGHTS if THOUGHTS in header else _In.TEXT
        return ""

    def _read_body(self, *, final: bool) -> tuple[str, bool]:
        """The part of a message that has come, and whether the message ends with it."""
        found = None if self._in is _In.PLAIN else _END.search(self._held)
        if found is not None:
            body = self._held[: found.start()]
            self._held = self._held[found.start() if found[0] in _STARTS else found.end() :]
            return body, True
        certain = len(self._held)
        if self._in is not _In.PLAIN and not final:
            certain -= max((overlap(self._held, tag) for tag in _ENDS), default=0)
        body, self._held = self._held[:certain], self._held[certain:]
        return body, False

    def _apart(self, body: str) -> str:
        """A part of a message, after a blank line if it is the first and another message came before."""
        if not body or self._begun:
            return body
        self._begun, before = True, self._in in self._said
        self._said.add(self._in)
        return f"\n\n{body}" if before else body


def rules_up_to(tag: str, special: Mapping[str, int]) -> str:
    """Rules of `thoughts`: any text up to a tag, and the tag. The text does not contain the tag.

    Args:
        tag: a special token, or text without any.
        special: ids of the model's special tokens.
    """
    if tag in special:
        return f"thoughts: INSIDE {spelled(tag, special)}\nINSIDE: ANY & ~(ANY {quoted(tag)} ANY)\n{ANY}"
    return f"thoughts[lazy]: ANY {quoted(tag)}\n{ANY}"
