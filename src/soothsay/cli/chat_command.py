"""`soothsay chat`: a conversation with a model in the terminal."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from inspect import signature
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from soothsay.cli.terminal import (
    ACCEPTED,
    acceptance_summary,
    load_llm,
    report,
    sampling_summary,
    summary,
    tell_bundled,
)
from soothsay.errors import RequestError, SoothsayError
from soothsay.options import ModelOptions, ModelOrSibyl, SamplingOptions, common, flag, only_adapter, option

if TYPE_CHECKING:
    from soothsay.core.params import SamplingParams
    from soothsay.drafters.registry import DrafterSpec
    from soothsay.llm import LLM
    from soothsay.result import Choice, Stream
    from soothsay.server.tools.tool_calls import ToolCallParser
    from soothsay.tokenizer import Message

ANSWER_SHARE = 4
"""The answer gets one part in `ANSWER_SHARE` of the context. Old turns are dropped to make room for it."""


@dataclass(frozen=True, kw_only=True)
class Chat:
    """Talk with a model. /help lists the commands within a conversation.

    If lines come from a pipe or a file, the exit code is 1 if one failed.
    """

    choice: ModelOrSibyl
    system: str = option("")
    """The system message."""

    show_drafted: bool = flag(help=f"Show accepted draft tokens in {ACCEPTED}.")
    plain: bool = flag(panel="Output")
    """Show answers as the model writes them, with Markdown as text."""

    max_tokens: int = common("max_tokens", default=512)
    sampling: SamplingOptions
    options: ModelOptions

    def run(self) -> None:
        """Talk until the user leaves."""
        model = self.choice.name
        from soothsay.core.params import SamplingParams

        given = self.sampling.given(max_tokens=self.max_tokens)
        adapter = only_adapter(self.options.lora)
        llm = load_llm(model, **asdict(self.options))
        tell_bundled(self.choice.given)
        params = SamplingParams(**{**llm.sampling_defaults, **given})
        if llm.tokenizer is None or not llm.tokenizer.has_chat_template:
            raise RequestError(f"{model} has no chat template; try: soothsay generate --model {model} PROMPT")
        console, drafter = Console(highlight=False, soft_wrap=True), self.options.drafter
        console.print(Text(f"{model}, drafter {drafter}. /help for commands, Ctrl-D to leave.", "dim"))
        if llm.sampling_defaults:
            console.print(Text(f"defaults of the model: {sampling_summary(llm.sampling_defaults)}", "dim"))
        markdown = console.is_terminal and not console.is_dumb_terminal and not self.plain
        talk = Conversation(llm, params, drafter, console, self.system, self.show_drafted, markdown, adapter)
        if not talk.run():
            raise typer.Exit(1)


@dataclass
class Conversation:
    """A conversation: its turns so far, and the settings of the next answer.

    A method `do_NAME` is the command /NAME. /help shows its docstring, and the name of its argument.
    """

    llm: LLM
    params: SamplingParams  # /temperature changes them
    drafter: DrafterSpec  # /drafter changes it
    console: Console  # prints the answers
    system: str = ""  # the system message; empty: none. /system changes it
    colour: bool = False  # whether to colour accepted draft tokens. /colour changes it
    markdown: bool = False  # whether to show Markdown where nothing is coloured. /markdown changes it
    adapter: str | None = None  # answers; None: the model alone
    turns: list[tuple[str, str]] = field(default_factory=list)  # (user's message, answer without thoughts)
    last: tuple[Choice, float] | None = None  # the last answer, and its seconds
    open: bool = True  # until the user leaves

    def run(self) -> bool:
        """Read and answer until the user leaves. Returns whether no line failed; a person has seen it."""
        interactive, succeeded = sys.stdin.isatty(), True
        if interactive:
            with contextlib.suppress(ImportError):  # the platform may lack what gives `input` a history
                import readline  # noqa: F401
        while self.open:
            try:
                line = input("\n> " if interactive else "").strip()
            except (EOFError, KeyboardInterrupt):
                if interactive:
                    self.console.print()
                break
            try:
                self.handle(line)
            except SoothsayError as error:
                report(error)
                succeeded = interactive
        return succeeded

    def handle(self, line: str) -> None:
        """Run a command, or answer a message. Raises `SoothsayError`."""
        name, _, rest = line.partition(" ")
        if line.startswith("/"):
            command = getattr(self, f"do_{name.removeprefix('/')}", None)
            if command is None:
                raise RequestError(f"there is no command {name}; /help lists all commands")
            command(rest.strip())
        elif line:
            self._answer(line)

    def _answer(self, text: str) -> None:
        # its libraries are as slow to import as the rest
        from soothsay.cli.printed_answer import PrintedAnswer

        ids, dropped = self._prompt(text)
        parser, params = self._reader(ids)
        stream = self.llm.stream(ids, params, drafter=self.drafter, adapter=self.adapter)
        if dropped:
            del self.turns[:dropped]
            what = "turn" if dropped == 1 else f"{dropped} turns"
            context = f"the context of {self._context} tokens"
            self._say(f"the conversation has outgrown {context}: dropped the oldest {what}", "yellow")
        begin = time.perf_counter()
        printed = PrintedAnswer(self.console, self._calls() if self.markdown and not self.colour else None)
        try:
            with _stopped_by_ctrl_c(stream):
                for piece in stream:
                    printed.add(parser.push(piece.text), ACCEPTED if self.colour and piece.drafted else None)
            printed.add(parser.end())
        finally:
            printed.end()
        choice, seconds = stream.choice, time.perf_counter() - begin
        self.turns.append((text, printed.content))
        self.last = choice, seconds
        ending = {"cancelled": "; stopped", "length": "; cut at --max-tokens, or the end of the context"}
        self._say(summary(choice.stats, seconds) + ending.get(choice.finish_reason, ""))

    def _reader(self, ids: list[int]) -> tuple[ToolCallParser, SamplingParams]:
        """What splits the answer to a prompt into thoughts and text, and the parameters that it needs."""
        from soothsay.server.tools.reasoning import ReasoningFormat
        from soothsay.server.tools.tool_calls import PlainParser

        tokenizer = self.llm.tokenizer
        form = ReasoningFormat.of(tokenizer)
        if form is None or tokenizer is None:
            return PlainParser(), self.params
        opened = form.is_open(tokenizer.decode(ids, skip_special=False))
        params = replace(self.params, skip_special_tokens=False) if form.hidden else self.params
        return form.wrapped(PlainParser(), opened=opened), params

    def _calls(self) -> ToolCallParser:
        """The parser that finds tool calls in an answer."""
        from soothsay.server.tools.tool_calls import PlainParser
        from soothsay.server.tools.tool_format import ToolFormat

        form = ToolFormat.of(self.llm.tokenizer)
        return PlainParser() if form.hidden else form.parser(())

    @property
    def _context(self) -> int:
        """Tokens of prompt and answer that one request can have."""
        return min(self.llm.config.max_context or 0, self.llm.config.kv_tokens or 0)

    def _prompt(self, text: str) -> tuple[list[int], int]:
        """Token ids of the conversation and `text`, and how many of the oldest turns were dropped."""
        room = self._context - self._context // ANSWER_SHARE
        for dropped in range(len(self.turns)):
            ids = self.llm.chat_prompt(self._messages(text, dropped))
            if len(ids) <= room:
                return ids, dropped
        # without any turns: if this is too long, the engine raises the error
        return self.llm.chat_prompt(self._messages(text, len(self.turns))), len(self.turns)

    def _messages(self, text: str, first: int) -> list[Message]:
        """The system message, the turns from `first` on, and `text`."""
        pairs = [("system", self.system)] if self.system else []
        for question, answer in self.turns[first:]:
            pairs += [("user", question), ("assistant", answer)]
        return [{"role": role, "content": content} for role, content in [*pairs, ("user", text)]]

    def _say(self, text: str, style: str = "dim") -> None:
        self.console.print(Text(text, style))

    def do_help(self, _: str) -> None:
        """Show this list."""
        table = Table.grid(padding=(0, 2))
        for name, command in vars(Conversation).items():
            if name.startswith("do_"):
                _, given = signature(command).parameters
                shown = f"/{name.removeprefix('do_')} {given.upper()}".rstrip("_")
                table.add_row(shown, Text(command.__doc__, "dim"))
        self.console.print(table)
        self._say("Ctrl-C stops an answer. At the prompt, it leaves.")

    def do_reset(self, _: str) -> None:
        """Forget the conversation, but keep the system message."""
        self.turns.clear()
        self._say("forgotten")

    def do_system(self, text: str) -> None:
        """Set the system message; without TEXT, remove it."""
        self.system = text
        self._say("system message set" if text else "no system message")

    def do_temperature(self, number: str) -> None:
        """Set the temperature; 0: always the most likely token."""
        try:
            temperature = float(number)
        except ValueError:
            raise RequestError(f"/temperature needs a number, not {number!r}") from None
        self.params = replace(self.params, temperature=temperature)
        self._say(f"temperature {temperature:g}")

    def do_drafter(self, spec: str) -> None:
        """Use another drafter, for example none or prompt-lookup."""
        from soothsay.drafters.registry import build_drafter

        self.drafter = build_drafter(spec, self.llm.engine.target)
        self._say(f"drafter {spec}")

    def do_colour(self, _: str) -> None:
        """Turn colours of accepted draft tokens on or off."""
        self.colour = not self.colour
        style = f"are shown in {ACCEPTED}" if self.colour else "have no colour"
        self._say(f"accepted draft tokens {style}")

    def do_markdown(self, _: str) -> None:
        """Show answers as Markdown, or as the model writes them."""
        self.markdown = not self.markdown
        self._say("answers are shown as " + ("Markdown" if self.markdown else "the model writes them"))

    def do_stats(self, _: str) -> None:
        """Show statistics of the last answer."""
        if self.last is None:
            raise RequestError("/stats shows the last answer's statistics, and there is none yet")
        choice, seconds = self.last
        stats = choice.stats
        self._say(
            f"{summary(stats, seconds)}\n{stats.drafted} draft tokens, {stats.accepted} of them accepted\n"
            f"{acceptance_summary(stats)}\nseed {choice.seed}"
        )

    def do_quit(self, _: str) -> None:
        """Leave, like Ctrl-D."""
        self.open = False


@contextlib.contextmanager
def _stopped_by_ctrl_c(stream: Stream) -> Iterator[None]:
    """Let the first Ctrl-C end the answer with its current text. A second one raises."""

    def on_interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        stream.cancel()

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
