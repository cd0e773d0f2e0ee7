"""`soothsay generate`: answers one prompt as plain text on stdout."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from soothsay.cli.terminal import acceptance_summary, harmless, load_llm, summary, tell_bundled
from soothsay.errors import RequestError
from soothsay.options import (
    BUNDLED,
    FILE,
    ModelOptions,
    SamplingOptions,
    argument,
    common,
    only_adapter,
    option,
    optional,
)

if TYPE_CHECKING:
    from soothsay.core.answer import Piece


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Answer one prompt. Only the answer goes to stdout, as a stream, and a line end if it has none.

    With --raw, a pipe gets the exact text.
    """

    prompt: str | None = argument(default=None)
    """The prompt. '-' reads it from stdin, as does a pipe without a prompt."""

    file: Path | None = option(None, "-f", **FILE)
    """Read the prompt from a file."""

    chat: bool | None = optional("chat, if the model is made for it", "--chat/--raw", "-c")
    """Answer a message of a user, or continue the prompt as it stands."""

    model: str | None = common("named")
    max_tokens: int = common("max_tokens", default=256)
    sampling: SamplingOptions
    stop: list[str] | None = option(None, panel=SamplingOptions.PANEL)
    """End the answer before this text. Can be repeated."""

    answer_start: str | None = option(None, panel=SamplingOptions.PANEL)
    """How the answer of an encoder-decoder begins, such as NLLB's target language."""

    options: ModelOptions
    stats: bool | None = optional("in a terminal", "--stats/--no-stats", panel="Output")
    """Show statistics on stderr."""

    def run(self) -> None:
        """Answer the prompt."""
        text = _read_prompt(self.prompt, self.file)
        if not text:
            raise RequestError("the prompt is empty")
        from soothsay.core.params import SamplingParams

        begun = {"stop": self.stop or (), "answer_start": self.answer_start or ()}
        given = self.sampling.given(**begun, max_tokens=self.max_tokens)
        adapter = only_adapter(self.options.lora)
        llm = load_llm(self.model or BUNDLED, **asdict(self.options))
        tell_bundled(self.model)
        params = SamplingParams(**{**llm.sampling_defaults, **given})
        begin = time.perf_counter()
        chats = llm.tokenizer is not None and llm.tokenizer.has_chat_template
        chat = chats if self.chat is None else self.chat
        stream = llm.stream(llm.chat_prompt(text) if chat else text, params, adapter=adapter)
        _write(stream, exact=self.chat is False)
        choice, seconds = stream.choice, time.perf_counter() - begin
        console = Console(stderr=True, style="dim", highlight=False, soft_wrap=True)
        if self.stats or (self.stats is None and console.is_terminal):
            seed = f", seed {choice.seed}" if params.temperature else ""
            ending = f"ended by {choice.finish_reason}{seed}"
            console.print(summary(choice.stats, seconds), acceptance_summary(choice.stats), ending, sep="\n")
        if not choice.text and chats and not chat:
            console.print("the model continued the prompt with nothing; it is made for chats: try --chat")


def _write(stream: Iterable[Piece], *, exact: bool) -> None:
    """Write an answer to stdout, piece by piece. Its line ends, unless a pipe wants the `exact` text."""
    on_terminal, last = sys.stdout.isatty(), ""
    try:
        for piece in stream:
            last = piece.text or last
            sys.stdout.write(harmless(piece.text) if on_terminal else piece.text)
            sys.stdout.flush()
    finally:
        if (on_terminal or (last and not exact)) and not last.endswith("\n"):
            sys.stdout.write("\n")
            sys.stdout.flush()  # before what stderr says of the answer


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from the argument, a file or stdin, without the last newline of a file or stdin."""
    if file is not None:
        if prompt is not None:
            raise typer.BadParameter("give a prompt or --file, not both")
        raw = file.read_bytes()
    elif prompt == "-" or (prompt is None and not sys.stdin.isatty()):
        raw = sys.stdin.buffer.read()
    elif prompt is None:
        raise typer.BadParameter("give a prompt, '-' to read it from stdin, or --file")
    else:
        return prompt
    try:
        return raw.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"the prompt is not UTF-8 text ({error})") from None
