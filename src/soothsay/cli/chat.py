"""`soothsay chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from soothsay.cli.options import (
    DrafterOption,
    DTypeOption,
    MaxContextOption,
    MaxTokensOption,
    MinPOption,
    ModelOption,
    SeedOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
)
from soothsay.cli.terminal import ACCEPTED, load_llm, report, right_guesses, summary
from soothsay.errors import RequestError, SoothsayError

if TYPE_CHECKING:
    from soothsay.drafters import DrafterSpec
    from soothsay.engine.params import SamplingParams
    from soothsay.llm import LLM
    from soothsay.result import Choice
    from soothsay.tokenizer import Message

ANSWER_SHARE = 4
"""One part in so many of the context is kept free for the answer; older turns make room for it."""


def chat(
    model: ModelOption = "sibyl",
    drafter: DrafterOption = "auto",
    system: Annotated[str, typer.Option("--system", help="What the model is told before all else.")] = "",
    show_drafted: Annotated[
        bool, typer.Option("--show-drafted", help=f"Show accepted draft tokens in {ACCEPTED}.")
    ] = False,
    max_tokens: MaxTokensOption = 512,
    temperature: TemperatureOption = 0.7,
    top_p: TopPOption = 1.0,
    top_k: TopKOption = 0,
    min_p: MinPOption = 0.0,
    seed: SeedOption = None,
    dtype: DTypeOption = "auto",
    max_context: MaxContextOption = None,
) -> None:
    """Talk with a model. /help lists what can be changed on the way."""
    from soothsay.engine.params import SamplingParams

    params = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, max_tokens=max_tokens
    )
    llm = load_llm(model, drafter=drafter, dtype=dtype, max_context=max_context)
    if llm.tokenizer is None or not llm.tokenizer.has_chat_template:
        raise RequestError(f"{model} has no chat template; try: soothsay generate --model {model} PROMPT")
    console = Console(highlight=False, soft_wrap=True)
    console.print(Text(f"{model}, drafter {drafter}. /help for commands, Ctrl-D to leave.", "dim"))
    Conversation(llm, params, drafter, console, system=system, colour=show_drafted).run()


class Conversation:
    """What has been said, and how to go on.

    Args:
        llm: who answers.
        params: how; commands replace it.
        drafter: who guesses; a command replaces it.
        console: where answers go.
        system: the system message; empty for none.
        colour: whether accepted draft tokens are coloured.
    """

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        drafter: DrafterSpec,
        console: Console,
        *,
        system: str = "",
        colour: bool = False,
    ):
        self.llm, self.params, self.drafter, self.console = llm, params, drafter, console
        self.system, self.colour = system, colour
        self.turns: list[tuple[str, str]] = []  # (what the user said, the answer)
        self.last: tuple[Choice, float] | None = None  # with its seconds
        self.open = True
        self._commands: dict[str, tuple[Callable[[str], None], str, str]] = {
            "/help": (self._help, "", "this list"),
            "/reset": (self._reset, "", "forget the conversation, but not the system message"),
            "/system": (self._system, "TEXT", "set the system message; without TEXT, remove it"),
            "/temperature": (self._temperature, "X", "0: always the likeliest token"),
            "/drafter": (self._drafter, "SPEC", "another drafter, such as none or prompt-lookup"),
            "/colour": (self._colour, "", "show accepted draft tokens in colour, or stop it"),
            "/stats": (self._stats, "", "numbers of the last answer"),
            "/quit": (self._quit, "", "leave, like Ctrl-D"),
        }

    def run(self) -> None:
        """Read and answer until the user leaves."""
        interactive = sys.stdin.isatty()
        if interactive:
            with contextlib.suppress(ImportError):  # editing and history, where the platform has it
                import readline  # noqa: F401
        while self.open:
            try:
                line = input("\n> " if interactive else "").strip()
            except (EOFError, KeyboardInterrupt):
                if interactive:
                    self.console.print()
                return
            try:
                self.handle(line)
            except SoothsayError as error:
                report(error)

    def handle(self, line: str) -> None:
        """Obey a command, or answer. Raises `SoothsayError` where that is not possible."""
        name, _, rest = line.partition(" ")
        if not line.startswith("/"):
            if line:
                self._answer(line)
        elif name in self._commands:
            self._commands[name][0](rest.strip())
        else:
            raise RequestError(f"there is no command {name}; /help lists those there are")

    def _answer(self, text: str) -> None:
        ids, dropped = self._prompt(text)
        stream = self.llm.stream(ids, self.params, drafter=self.drafter)
        if dropped:
            del self.turns[:dropped]
            what = "turn" if dropped == 1 else f"{dropped} turns"
            context = f"the context of {self._context} tokens"
            self._say(f"the conversation has outgrown {context}: dropped the oldest {what}", "yellow")
        begin = time.perf_counter()
        with _interruptible() as interrupted:
            for piece in stream:
                style = ACCEPTED if self.colour and piece.drafted else None
                self.console.out(piece.text, style=style, end="", highlight=False)
                if interrupted.is_set():
                    stream.cancel()
        choice, seconds = stream.choice, time.perf_counter() - begin
        self.turns.append((text, choice.text))
        self.last = choice, seconds
        ending = {"cancelled": "; stopped", "length": "; cut at --max-tokens, or the end of the context"}
        self.console.print()
        self._say(summary(choice.stats, seconds) + ending.get(choice.finish_reason, ""))

    @property
    def _context(self) -> int:
        """Tokens of prompt and answer that one request can have."""
        return min(self.llm.config.max_context or 0, self.llm.config.kv_tokens or 0)

    def _prompt(self, text: str) -> tuple[list[int], int]:
        """Token ids of the conversation and `text`, and how many of the oldest turns had to go."""
        room = self._context - self._context // ANSWER_SHARE
        for dropped in range(len(self.turns)):
            ids = self.llm.chat_prompt(self._messages(text, dropped))
            if len(ids) <= room:
                return ids, dropped
        # `text` alone: whether it is too long is for the engine to say
        return self.llm.chat_prompt(self._messages(text, len(self.turns))), len(self.turns)

    def _messages(self, text: str, first: int) -> list[Message]:
        """The system message, the turns from `first` on, and `text`."""
        said = [("system", self.system)] if self.system else []
        for question, answer in self.turns[first:]:
            said += [("user", question), ("assistant", answer)]
        return [{"role": role, "content": content} for role, content in [*said, ("user", text)]]

    def _say(self, text: str, style: str = "dim") -> None:
        self.console.print(Text(text, style))

    def _help(self, _: str) -> None:
        table = Table.grid(padding=(0, 2))
        for name, (_command, argument, what) in self._commands.items():
            table.add_row(f"{name} {argument}", Text(what, "dim"))
        self.console.print(table)
        self._say("Ctrl-C stops an answer, and leaves at the prompt.")

    def _reset(self, _: str) -> None:
        self.turns.clear()
        self._say("forgotten")

    def _system(self, text: str) -> None:
        self.system = text
        self._say("system message set" if text else "no system message")

    def _temperature(self, text: str) -> None:
        try:
            temperature = float(text)
        except ValueError:
            raise RequestError(f"/temperature needs a number, not {text!r}") from None
        self.params = replace(self.params, temperature=temperature)
        self._say(f"temperature {temperature:g}")

    def _drafter(self, spec: str) -> None:
        from soothsay.drafters import build_drafter

        self.drafter = build_drafter(spec, self.llm.engine.target)
        self._say(f"drafter {spec}")

    def _colour(self, _: str) -> None:
        self.colour = not self.colour
        look = f"are shown in {ACCEPTED}" if self.colour else "look like the rest"
        self._say(f"accepted draft tokens {look}")

    def _stats(self, _: str) -> None:
        if self.last is None:
            raise RequestError("/stats tells of the last answer, and there is none yet")
        choice, seconds = self.last
        stats = choice.stats
        self._say(
            f"{summary(stats, seconds)}\n{stats.drafted} tokens drafted, {stats.accepted} of them accepted\n"
            f"{right_guesses(stats)}\nseed {choice.seed}"
        )

    def _quit(self, _: str) -> None:
        self.open = False


@contextlib.contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Within, a first Ctrl-C only sets the event, so that no step is cut in half; a second one raises."""
    pressed = threading.Event()

    def note(_signal: int, _frame: FrameType | None) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
