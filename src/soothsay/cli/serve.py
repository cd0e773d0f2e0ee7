"""`soothsay serve`: a model behind OpenAI's protocol."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from soothsay.cli.options import DrafterOption, DTypeOption, MaxContextOption
from soothsay.cli.terminal import notice

LOOPBACK = ("127.0.0.1", "::1", "localhost")
"""Addresses that only this machine reaches."""

_LIMITS = "Limits"


def serve(
    model: Annotated[
        str, typer.Argument(help="A Hugging Face directory, a .gguf file, a hub name, or a bundled model.")
    ],
    host: Annotated[
        str, typer.Option("--host", help="Where to listen; only this machine unless told otherwise.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any that is free.")] = 8000,
    name: Annotated[
        str | None,
        typer.Option(
            "--served-model-name",
            show_default="the model as given, without its folder",
            help="What clients call the model.",
        ),
    ] = None,
    drafter: DrafterOption = "auto",
    allow_drafter: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-drafter",
            show_default="every drafter there is",
            help="A drafter that requests may choose; may be given repeatedly.",
        ),
    ] = None,
    dtype: DTypeOption = "auto",
    max_context: MaxContextOption = None,
    kv_tokens: Annotated[
        int | None,
        typer.Option(
            "--kv-tokens",
            min=1,
            show_default="by memory",
            help="Tokens that the KV pool holds, of all answers.",
        ),
    ] = None,
    api_keys: Annotated[
        Path | None,
        typer.Option(
            "--api-keys", dir_okay=False, help="Who may ask; see 'soothsay keys'.", show_default="everyone"
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-host",
            show_default="this machine's, where no key is asked for",
            help="A name that the server may be called by (Host header); may be given repeatedly.",
        ),
    ] = None,
    max_running: Annotated[
        int,
        typer.Option("--max-running", min=1, help="Answers in one step.", rich_help_panel=_LIMITS),
    ] = 64,
    max_stall: Annotated[
        float,
        typer.Option(
            "--max-stall",
            min=0.01,
            help="Seconds that a step may take while prompts are read beside answers: with fewer, those flow "
            "more evenly, and new ones begin later.",
            rich_help_panel=_LIMITS,
        ),
    ] = 0.25,
    max_queue: Annotated[
        int,
        typer.Option(
            "--max-queue", min=0, help="Answers that may wait; further ones get 429.", rich_help_panel=_LIMITS
        ),
    ] = 256,
    timeout: Annotated[
        float,
        typer.Option("--timeout", min=0.1, help="Seconds for an answer, at most.", rich_help_panel=_LIMITS),
    ] = 600.0,
    client_timeout: Annotated[
        float,
        typer.Option(
            "--client-timeout", min=1, help="Seconds to wait for a slow client.", rich_help_panel=_LIMITS
        ),
    ] = 30.0,
    drain: Annotated[
        float,
        typer.Option(
            "--drain", min=0, help="Seconds for running answers at shutdown.", rich_help_panel=_LIMITS
        ),
    ] = 60.0,
) -> None:
    """Serve a model over HTTP as OpenAI does. SIGTERM ends it once all that runs has been answered."""
    with ExitStack() as stack:
        with notice(f"loading {model} ..."):
            from soothsay.server.app import Server
            from soothsay.server.config import ServerConfig
            from soothsay.server.keys import KeyRing
            from soothsay.server.log import log_to_stderr
            from soothsay.server.process import EngineProcess, load
            from soothsay.server.run import make_runner

            keys = None if api_keys is None else KeyRing(api_keys)
            factory = partial(
                load,
                model,
                drafter=drafter,
                dtype=dtype,
                max_context=max_context,
                kv_tokens=kv_tokens,
                max_requests=max_running,
                max_stall=max_stall,
            )
            engine = stack.enter_context(EngineProcess(factory))
        config = ServerConfig(
            name=name or (Path(model).resolve().name if Path(model).exists() else model),
            drafters=engine.model.drafters if allow_drafter is None else tuple(allow_drafter),
            hosts=allowed_hosts(host, allowed_host or [], keyless=keys is None),
            max_queue=max_queue,
            timeout=timeout,
            client_timeout=client_timeout,
            drain=drain,
        )
        if keys is None and host not in LOOPBACK:
            console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
            console.print(f"warning: everyone who can reach {host} may ask; --api-keys FILE asks for a key")
        log_to_stderr()
        make_runner(Server(engine, config, keys), host, port).run()


def allowed_hosts(host: str, allowed: Sequence[str], *, keyless: bool) -> tuple[str, ...]:
    """What requests may call the server; nothing is anything, which is for servers that ask for keys, or are
    open to a network anyway, unless names are `allowed` there.
    """
    if not allowed and not (keyless and host in LOOPBACK):
        return ()
    return tuple(name.lower() for name in ("localhost", "127.0.0.1", "[::1]", *allowed))
