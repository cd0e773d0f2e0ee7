"""`soothsay serve`: serves a model over HTTP with OpenAI's protocol."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from ipaddress import ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from soothsay.cli.engine_options import EngineOptions, PlacementOptions
from soothsay.cli.option_groups import grouped
from soothsay.cli.options import MaxStallOption, ModelArgument, NameOption
from soothsay.cli.server_limits import ServerLimits
from soothsay.cli.terminal import notice, sampling_summary
from soothsay.server.server_config import MAX_STALL, ServerConfig, served_name

if TYPE_CHECKING:
    from soothsay.server.fleet.engine_fleet import Fleet

LOOPBACK = ("127.0.0.1", "::1", "localhost")
"""Addresses that only this machine can reach."""


@grouped
def serve(
    model: ModelArgument,
    *,
    host: Annotated[
        str,
        typer.Option(
            "--host", help="The address to listen on. The default is reachable from this machine only."
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="The port; 0: any free port.")] = 8000,
    name: NameOption = None,
    any_model: Annotated[
        bool,
        typer.Option("--any-model", help="Answer requests that name another model, too."),
    ] = False,
    allow_drafter: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-drafter",
            show_default="all drafters",
            help="A drafter that requests may choose. Can be repeated.",
        ),
    ] = None,
    engine: EngineOptions,
    learn_for_tenants: Annotated[
        bool,
        typer.Option(
            "--learn-for-tenants",
            help="Learn for each API key and cache_salt, apart. Otherwise drafters learn from requests that "
            "have neither.",
        ),
    ] = False,
    split_reasoning: Annotated[
        bool,
        typer.Option(
            "--split-reasoning/--no-split-reasoning",
            help="Return a model's thoughts as reasoning_content, or as a part of the answer's text.",
        ),
    ] = True,
    placement: PlacementOptions,
    api_keys: Annotated[
        Path | None,
        typer.Option(
            "--api-keys",
            dir_okay=False,
            help="File of API keys, see 'soothsay keys'.",
            show_default="no keys",
        ),
    ] = None,
    share_between_keys: Annotated[
        bool,
        typer.Option(
            "--share-between-keys",
            help="Let requests with different keys share prefixes and drafts. Whoever has a key can then "
            "find out what others have written.",
        ),
    ] = False,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-host",
            show_default="this machine's names if there are no keys",
            help="A name that requests may have in their Host header. Can be repeated.",
        ),
    ] = None,
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(
            "--trusted-proxy",
            show_default="none",
            help="Address or network of a proxy whose X-Forwarded-For names the client. Can be repeated.",
        ),
    ] = None,
    max_stall: MaxStallOption = MAX_STALL,
    limits: ServerLimits,
) -> None:
    """Serve a model over HTTP with OpenAI's protocol. SIGTERM ends it after the running answers."""
    from soothsay.server.access.api_keys import KeyRing
    from soothsay.server.http.listening import bind

    keys = None if api_keys is None else KeyRing(api_keys)
    proxies = trusted_proxies(trusted_proxy or [])
    arguments = {**engine.for_llm(), "max_stall": max_stall, "learn_for_tenants": learn_for_tenants}
    with bind(host, port) as sockets, _fleet(model, placement, arguments) as fleet:
        from soothsay.server.http.json_log import log_to_stderr
        from soothsay.server.http_server import Server
        from soothsay.server.runner import make_runner

        config = ServerConfig(
            name=name or served_name(model),
            any_model=any_model,
            drafters=fleet.model.drafters if allow_drafter is None else tuple(allow_drafter),
            hosts=allowed_hosts(host, allowed_host or [], keyless=keys is None),
            trusted_proxies=proxies,
            share_between_keys=share_between_keys,
            split_reasoning=split_reasoning,
            **asdict(limits),
        )
        console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        if defaults := sampling_summary(fleet.model.sampling_defaults):
            console.print(f"defaults of the model: {defaults}; --generation-config none ignores them")
        if engine.learn and keys is not None and not learn_for_tenants and not share_between_keys:
            console.print("warning: requests with keys teach drafters nothing without --learn-for-tenants")
        if keys is None and host not in LOOPBACK:
            console.print(f"warning: everyone who can reach {host} can use it; --api-keys FILE requires keys")
        if console.is_terminal and port:
            console.print(_invitation(config.name, host, port))
        log_to_stderr()
        make_runner(Server(fleet, config, keys), host, port).run(sockets)


@contextmanager
def _fleet(model: str, placement: PlacementOptions, arguments: Mapping[str, Any]) -> Iterator[Fleet]:
    """The engines, which have loaded the model. `arguments`: of their `LLM`."""
    bounds = placement.bounds()
    with ExitStack() as stack:
        with notice(f"loading {model} ..."):
            from soothsay.server.engines.engine_process import load
            from soothsay.server.fleet.engine_fleet import Fleet
            from soothsay.server.placement import engines

            shared = placement.shared(bounds.most)
            kernels = "portable" if placement.portable else "auto"
            factory = partial(load, model, stages=shared, kernels=kernels, **arguments)
            make = stack.enter_context(engines(factory, placement.placement(bounds.most, shared)))
            fleet = stack.enter_context(Fleet(make, bounds))
        yield fleet


def _invitation(name: str, host: str, port: int) -> str:
    """Where the model is served, for people."""
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    return f"{name} is served at {address}/v1, with a page at {address}. Ctrl-C ends it."


def allowed_hosts(host: str, allowed: Sequence[str], *, keyless: bool) -> tuple[str, ...]:
    """The names that requests may have in their Host header; empty: any name.

    A server without keys that only this machine can reach allows this machine's names and `allowed`. Other
    servers allow any name, unless `allowed` has some.
    """
    if not allowed and not (keyless and host in LOOPBACK):
        return ()
    return tuple(name.lower() for name in ("localhost", "127.0.0.1", "[::1]", *allowed))


def trusted_proxies(given: Sequence[str]) -> tuple[str, ...]:
    """Addresses and networks of proxies. Raises `typer.BadParameter` for anything else."""
    for one in given:
        try:
            ip_network(one)
        except ValueError as error:
            raise typer.BadParameter(f"{error}; give --trusted-proxy an address or a network") from None
    return tuple(given)
