"""`soothsay generate`: answers one prompt as plain text on stdout."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from soothsay.cli.option_groups import grouped
from soothsay.cli.options import MaxTokensOption, ModelOption, ModelOptions, SamplingOptions
from soothsay.cli.terminal import acceptance_summary, harmless, load_llm, summary

if TYPE_CHECKING:
    from soothsay.core.answer import Piece

TEMPERATURE = 0.0
"""The temperature where neither the user nor the model names one."""


@grouped
def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(help="The prompt. '-' reads it from stdin, as does a pipe without a prompt."),
    ] = None,
    *,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", exists=True, dir_okay=False, help="Read the prompt from a file."),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", "-c", help="Wrap the prompt in the model's chat template.")
    ] = False,
    model: ModelOption = "sibyl",
    max_tokens: MaxTokensOption = 256,
    sampling: SamplingOptions,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="End the answer before this text. Can be repeated.")
    ] = None,
    options: ModelOptions,
    stats: Annotated[
        bool | None,
        typer.Option("--stats/--no-stats", show_default="in a terminal", help="Show statistics on stderr."),
    ] = None,
) -> None:
    """Answer one prompt. Only the answer goes to stdout, as a stream.

    Where neither an option nor the model's files name a temperature, it is 0.
    """
    text = _read_prompt(prompt, file)
    from soothsay.core.params import SamplingParams

    given = sampling.given(stop=stop or (), max_tokens=max_tokens)
    llm = load_llm(model, **asdict(options))
    params = SamplingParams(**{"temperature": TEMPERATURE, **llm.sampling_defaults, **given})
    begin = time.perf_counter()
    stream = llm.stream(llm.chat_prompt([{"role": "user", "content": text}]) if chat else text, params)
    _write(stream)
    choice, seconds = stream.choice, time.perf_counter() - begin
    console = Console(stderr=True, style="dim", highlight=False, soft_wrap=True)
    if stats or (stats is None and console.is_terminal):
        ending = f"ended by {choice.finish_reason}" + (f", seed {choice.seed}" if params.temperature else "")
        console.print(summary(choice.stats, seconds), acceptance_summary(choice.stats), ending, sep="\n")
    if not choice.text and not chat and llm.tokenizer is not None and llm.tokenizer.has_chat_template:
        console.print("the model continued the prompt with nothing; it is made for chats: try --chat")


def _write(stream: Iterable[Piece]) -> None:
    """Write an answer to stdout, piece by piece."""
    on_terminal = sys.stdout.isatty()
    try:
        for piece in stream:
            sys.stdout.write(harmless(piece.text) if on_terminal else piece.text)
            sys.stdout.flush()
    finally:
        if on_terminal:
            sys.stdout.write("\n")


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
