"""Splits the thoughts of a reasoning model from its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from soothsay.core.grammar import spelled
from soothsay.server.tools.harmony import CHANNEL, SPACE, HarmonyFormat, rules_up_to
from soothsay.server.tools.tool_calls import ParsedPart, ToolCallParser, overlap
from soothsay.tokenizer import Tokenizer

TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel>thought", "<channel|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
"""Tags around thoughts: of most models, of Mistral's, of Seed-OSS, of Gemma 4, of Command A."""

ANSWER_TAGS = (
    ("<response>", "</response>"),
    ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ("<|START_TEXT|>", "<|END_TEXT|>"),
)
"""Tags around the answer after thoughts: of Granite 3, of Command A, of newer Commands."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model writes its thoughts: between two tags."""

    opening: str
    closing: str

    hidden: bool = False
    """Whether a tag is a special token, which has a text only without `skip_special_tokens`."""

    answer: tuple[tuple[str, str], ...] = ()
    """Tags that may stand around the rest of the answer, and are dropped."""

    @classmethod
    def of(cls, tokenizer: Tokenizer | None) -> Thoughts | None:
        """Detect the format: the chat template has the tag that closes thoughts. None: there are none."""
        if tokenizer is None:
            return None
        source = "".join(tokenizer.templates.values())
        if CHANNEL in source:
            return HarmonyFormat(tokenizer.hides(CHANNEL))
        answer = tuple(pair for pair in ANSWER_TAGS if pair[0] in source)
        for opening, closing in TAGS:
            if closing in source:
                return cls(opening, closing, any(map(tokenizer.hides, (opening, closing))), answer)
        return None

    def is_open(self, prompt: str, continued: str = "") -> bool:
        """Whether the answer begins within thoughts.

        Args:
            prompt: the prompt, which some templates end with the opening tag.
            continued: the text of the model that the answer continues. It may end in the middle of thoughts.
        """
        is_within = continued.rfind(self.opening) > continued.rfind(self.closing)
        return is_within or prompt.rstrip().endswith(self.opening)

    def rules(self, special: Mapping[str, int], prompt: str, continued: str = "") -> str:
        """Rules in Lark of an answer: thoughts, and then a `body`, which others define.

        There are thoughts where the prompt has opened them. There may be where it has not, unless it has
        closed them, or the answer continues a text.

        Args:
            special: ids of special tokens.
            prompt, continued: see `is_open`.
        """
        first = f"space? ({spelled(self.opening, special)} thoughts space?)?"
        if self.is_open(prompt, continued):
            first = "thoughts space?"
        elif continued or prompt.rstrip().endswith(self.closing):
            first = "space?"
        return f"start: {first} body\n{rules_up_to(self.closing, special)}\n{SPACE}\n"

    def framed(self, text: str, special: Mapping[str, int]) -> str:
        """An expression in Lark: a text, which may have the tags of answers around it."""
        tags = [[spelled(tag, special) for tag in pair] for pair in self.answer]
        return " | ".join([text, *(f"{opening} {text} ({closing})?" for opening, closing in tags)])

    def wrapped(self, parser: ToolCallParser, *, opened: bool) -> ToolCallParser:
        """A parser that splits off thoughts, and passes the rest on to another one.

        Args:
            parser: reads the rest of the answer.
            opened: whether the prompt has opened the thoughts.
        """
        rest = AnswerParser(parser, self.answer) if self.answer else parser
        return ReasoningParser(rest, self, opened=opened)


Thoughts = ReasoningFormat | HarmonyFormat
"""How a model writes its thoughts."""


class TaggedStart:
    """Tells apart what stands between two tags at the start of an answer, and the rest.

    Args:
        pairs: the tags that may stand there.
        closing: the second tag of a pair whose first one has come before the answer; empty: none has.
    """

    def __init__(self, pairs: Sequence[tuple[str, str]], closing: str = ""):
        self._pairs, self._closing = pairs, closing
        self._begun = bool(closing)  # whether it is known if the answer begins with a tag
        self._held = ""
        self.ended = False  # whether the second tag has come

    def read(self, text: str, *, final: bool) -> tuple[str, str]:
        """Read the next piece. Returns what is certain: the text between the tags, and the rest."""
        self._held += text
        if not self._begun:
            begun = self._held.lstrip()
            self._begun = final or not any(opening.startswith(begun) for opening, _ in self._pairs)
            for opening, closing in self._pairs:
                if begun.startswith(opening):
                    self._begun, self._closing = True, closing
                    self._held = begun.removeprefix(opening)
        if not self._begun:
            return "", ""
        held, self._held = self._held, ""
        if not self._closing:
            return "", held
        inside, tag, rest = held.partition(self._closing)
        if tag:
            self._closing, self.ended = "", True
            return inside, rest
        certain = len(held) if final else len(held) - overlap(held, self._closing)
        self._held = held[certain:]
        return held[:certain], ""


class ReasoningParser(ToolCallParser):
    """Splits thoughts at the start of an answer from the rest, which another parser reads.

    White space around thoughts is not part of them. Thoughts that are not closed last until the end.

    Args:
        parser: reads the answer after the thoughts.
        form: the tags.
        opened: whether the prompt has opened the thoughts.
    """

    def __init__(self, parser: ToolCallParser, form: ReasoningFormat, *, opened: bool):
        self._parser = parser
        self._start = TaggedStart([(form.opening, form.closing)], form.closing if opened else "")
        self._space = ""  # at the end of the thoughts so far
        self._thought = self._said = False  # whether any thoughts, and any of the rest, were returned

    def parse(self, text: str, *, final: bool = False) -> ParsedPart:
        """Return the thoughts and the rest, up to what may be a part of a tag."""
        inside, rest = self._start.read(text, final=final)
        inside = self._space + inside if self._thought else inside.lstrip()
        thoughts = inside.rstrip()
        self._space = inside[len(thoughts) :]
        self._thought = self._thought or bool(thoughts)
        if self._start.ended and not self._said:
            rest = rest.lstrip()
        self._said = self._said or bool(rest)
        return replace(self._parser.parse(rest, final=final), reasoning=thoughts)


class AnswerParser(ToolCallParser):
    """Drops tags around an answer, which another parser reads.

    Args:
        parser: reads the answer.
        pairs: tags that may stand around it.
    """

    def __init__(self, parser: ToolCallParser, pairs: Sequence[tuple[str, str]]):
        self._parser, self._start = parser, TaggedStart(pairs)

    def parse(self, text: str, *, final: bool = False) -> ParsedPart:
        """Read the next piece."""
        return self._parser.parse("".join(self._start.read(text, final=final)), final=final)
