"""How a model calls tools: which parser reads its calls, and grammars of answers with calls.

A model writes tool calls as text, in the format of its family. The chat template shows which format: it adds
instructions to the prompt when there are tools, and writes earlier calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from soothsay.core.grammar import WHITESPACE, Grammar, bounded_json, quoted, spelled
from soothsay.errors import RequestError
from soothsay.server.http.api_errors import invalid, unsupported
from soothsay.server.tools import notation_readers as notations
from soothsay.server.tools import tool_readers as readers
from soothsay.server.tools.harmony import HarmonyCalls
from soothsay.server.tools.reasoning import Thoughts
from soothsay.server.tools.tool_calls import FramedParser, PlainParser, ToolCallParser, Tools
from soothsay.tokenizer import Message, Tokenizer

SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Spacing of JSON in a forced call, in llguidance's terms. Chat templates write calls with it."""

PROBE = {
    "type": "function",
    "function": {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}},
}
QUESTION: Message = {"role": "user", "content": "?"}
CALLED: tuple[Message, ...] = (
    QUESTION,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "abcdefghi", "type": "function", "function": {"name": "probe", "arguments": {"a": "b"}}}
        ],
    },
    {"role": "tool", "content": "?", "tool_call_id": "abcdefghi"},
)
"""A conversation with a call. Mistral's templates want an id of nine letters and digits."""

PARSERS: Sequence[type[FramedParser]] = (
    *(readers.KimiParser, HarmonyCalls, notations.Gemma4Parser, notations.Lfm2Parser, readers.CommandParser),
    *(notations.MiniMaxParser, readers.DeepSeekParser, readers.MistralParser, notations.SeedParser),
    *(notations.QwenCoderParser, notations.GlmParser, readers.AprielParser, readers.GraniteParser),
    readers.HermesParser,
)
"""The parsers of calls. The first one with a sign in the prompts of a family is used."""

HERMES_BARE = (("", ""), (f"{readers.FENCE}\n", "\n```"))
LLAMA3_BARE = (("", ""), (readers.PYTHON_TAG, ""))
"""See `ToolFormat.bare`."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model calls tools."""

    supported: bool
    """Whether the chat template describes tools to the model."""

    parser: Callable[[Tools], ToolCallParser] = lambda _: PlainParser()
    """Makes the parser of one answer, from the tools of the request."""

    arguments: str = "arguments"
    """Name of the field of a call that has the arguments."""

    frame: tuple[str, str] | None = None
    """Text before and after a forced call; None: the format is unknown."""

    openings: tuple[str, ...] = ()
    """Texts with which the model begins a call by itself."""

    bare: tuple[tuple[str, str], ...] = ()
    """Texts before and after a call without tags, for each way to write one."""

    hidden: bool = False
    """Whether a tag of calls is a special token, which has a text only without `skip_special_tokens`."""

    def forced_call(self, tools: Tools) -> Grammar | None:
        """A grammar for one call of one of the tools. None: the format is unknown.

        Keywords of the tools' schemas that cannot be enforced have no effect. If a schema cannot be compiled,
        the arguments may be any object.

        Raises `RequestError` if it would be too large.
        """
        if self.frame is None:
            return None
        before, after = (quoted(text) if text else "" for text in self.frame)
        first = f"start: {before} call {after}\ncall: %json "
        strict, loose = (self._calls(tools, SPACING, loose=loose) for loose in (False, True))
        return Grammar.lark(first + strict).or_else(Grammar.lark(first + loose))

    def free_calls(self, tools: Tools, special: Mapping[str, int]) -> Grammar | None:
        """A grammar for answers with calls, as the model writes them. None: the format is unknown.

        What follows the text that opens a call is free. Without such a text there is one call, in JSON: after
        it, weak models would repeat it until the answer is cut.

        Args:
            tools: that may be called.
            special: ids of the model's special tokens.
        """
        forms = [f"{spelled(opening, special)} rest" for opening in self.openings]
        one = f" | <[{','.join(map(str, sorted(special.values())))}]>" if special else ""
        rules = [f"rest: (CHARS{one})*", r"CHARS: /(.|\n)+/"]
        forms += [f"{spelled(before, special)} call {spelled(after, special)}" for before, after in self.bare]
        if self.bare:
            spacing = {"whitespace_pattern": WHITESPACE}
            rules.append(f"call: %json {self._calls(tools, spacing, loose=True)}")
        return Grammar.lark("\n".join([f"start: {' | '.join(forms)}", *rules])) if forms else None

    def _calls(self, tools: Tools, spacing: dict[str, Any], *, loose: bool) -> str:
        """The JSON schema of a call. `loose`: the arguments may be any object."""
        any_object = {"type": "object"}
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": function["name"]},
                    self.arguments: (not loose and function.get("parameters")) or any_object,
                },
                "required": ["name", self.arguments],
                "additionalProperties": False,
            }
            for function in (tool["function"] for tool in tools)
        ]
        return bounded_json({"anyOf": calls, "x-guidance": {**spacing, "lenient": True}})

    @classmethod
    def of(cls, tokenizer: Tokenizer | None) -> ToolFormat:
        """Detect the format from what the chat template writes for a tool, and for an earlier call."""
        if tokenizer is None:
            return cls(supported=False)
        prompt = _rendered(tokenizer, [QUESTION], tools=[PROBE])
        if prompt is None or prompt == _rendered(tokenizer, [QUESTION]):
            return cls(supported=False)
        called = _rendered(tokenizer, CALLED, tools=[PROBE])
        shown = "".join(tokenizer.templates.values()) if called is None else prompt + called
        parser = next((one for one in PARSERS if any(sign in shown for sign in one.signs)), None)
        if parser is not None:
            tags = [*(tag for pair in parser.frames for tag in pair), *parser.signs]
            return replace(cls.by(parser), hidden=any(map(tokenizer.hides, tags)))
        return LLAMA3 if '{"name": function name, "parameters"' in prompt else cls(supported=True)

    @classmethod
    def by(cls, parser: type[FramedParser]) -> ToolFormat:
        """The format whose calls a parser reads."""
        return cls(
            supported=True,
            parser=parser,
            frame=parser.forced or parser.frames[0],
            openings=tuple(parser.openings or (opening for opening, _ in parser.frames)),
            bare=HERMES_BARE if parser is readers.HermesParser else (),
        )


LLAMA3 = ToolFormat(
    supported=True, parser=readers.Llama3Parser, arguments="parameters", frame=("", ""), bare=LLAMA3_BARE
)


def _rendered(tokenizer: Tokenizer, messages: Sequence[Message], **variables: Any) -> str | None:
    """A conversation in the chat template; None if that refuses it."""
    try:
        return tokenizer.render(messages, **variables)
    except RequestError:
        return None


@dataclass(frozen=True, slots=True)
class ChatGrammars:
    """Makes the grammar of the answer to one prompt.

    Args:
        calls: how the model calls tools.
        thoughts: how it writes thoughts; None: it has none.
        special: ids of its special tokens.
        prompt: the prompt, which may open thoughts.
        continued: the text of the model that the answer continues.
    """

    calls: ToolFormat
    thoughts: Thoughts | None
    special: Mapping[str, int]
    prompt: str
    continued: str

    def forced_call(self, tools: Tools) -> Grammar:
        """A call of one of the tools. Raises `ApiError`."""
        try:
            call = self.calls.forced_call(tools) if tools else None
        except RequestError as error:
            raise invalid("tools", str(error)) from None
        if call is None:
            problem = "this model's format of tool calls is unknown" if tools else "no such tool in tools"
            raise unsupported("tool_choice", problem)
        return self._after_thoughts({"calls": call})

    def answer(self, text: Grammar, tools: Tools) -> Grammar:
        """A text of a grammar, or calls of some of the tools. Raises `ApiError`."""
        try:
            calls = self.calls.free_calls(tools, self.special) if tools else None
            return self._after_thoughts({"text": text} if calls is None else {"text": text, "calls": calls})
        except RequestError as error:
            raise invalid("response_format", str(error)) from None

    def _after_thoughts(self, parts: Mapping[str, Grammar]) -> Grammar:
        form, first = self.thoughts, "start: body\n"
        choices = {name: f"@{name}" for name in parts}
        if form is not None:
            first = form.rules(self.special, self.prompt, self.continued)
            choices |= {"text": form.framed("@text", self.special)} if "text" in parts else {}
        elif len(parts) == 1:
            return next(iter(parts.values()))
        return Grammar.joined(f"{first}body: {' | '.join(choices.values())}", **parts)
