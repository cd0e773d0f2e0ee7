"""The grammar of an answer in a chat: thoughts first, and then the text that a request wants, or calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from soothsay.core.grammar import Grammar
from soothsay.errors import RequestError
from soothsay.server.http.api_errors import invalid, unsupported
from soothsay.server.tools.reasoning import Thoughts
from soothsay.server.tools.tool_calls import Tools
from soothsay.server.tools.tool_format import ToolFormat


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
