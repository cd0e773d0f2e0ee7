"""`soothsay serve`: serves a model over HTTP with OpenAI's protocol."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from soothsay.cli.engine_options import (
    PortableOption,
    RayAddressOption,
    ReplicaCoresOption,
    ReplicasOption,
    StageKeyOption,
    StageOption,
    StagesOption,
    parse_bounds,
    parse_stages,
)
from soothsay.cli.options import (
    LIMITS,
    DrafterOption,
    DTypeOption,
    GenerationConfigOption,
    KeepOption,
    KvTokensOption,
    LearnOption,
    MaxContextOption,
    MaxRunningOption,
    ModelArgument,
    NameOption,
)
from soothsay.cli.terminal import notice, sampling_summary
from soothsay.server.server_config import ServerConfig, served_name

if TYPE_CHECKING:
    pass

LOOPBACK = ("127.0.0.1", "::1", "localhost")
"""Addresses that only this machine can reach."""


def serve(
    model: ModelArgument,
    host: Annotated[
        str,
        typer.Option(
            "--host", help="The address to listen on. The default is reachable from this machine only."
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="The port; 0: any free port.")] = 8000,
    name: NameOption = None,
    drafter: DrafterOption = "auto",
    allow_drafter: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-drafter",
            show_default="all drafters",
            help="A drafter that requests may choose. Can be repeated.",
        ),
    ] = None,
    dtype: DTypeOption = "auto",
    max_context: MaxContextOption = None,
    generation_config: GenerationConfigOption = "auto",
    kv_tokens: KvTokensOption = None,
    keep: KeepOption = None,
    learn: LearnOption = 0.0,
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
    replicas: ReplicasOption = "1",
    replica_cores: ReplicaCoresOption = None,
    ray_address: RayAddressOption = None,
    stages: StagesOption = 1,
    stage: StageOption = None,
    stage_key: StageKeyOption = None,
    portable: PortableOption = False,
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
    max_running: MaxRunningOption = 64,
    max_stall: Annotated[
        float,
        typer.Option(
            "--max-stall",
            min=0.01,
            help="Limit of seconds for a step in which prefill runs beside decoding. A smaller limit lets "
            "running answers flow more evenly, and new answers begin later.",
            rich_help_panel=LIMITS,
        ),
    ] = 0.25,
    max_queue: Annotated[
        int,
        typer.Option(
            "--max-queue",
            min=0,
            help="Limit of waiting answers. Further ones get 429.",
            rich_help_panel=LIMITS,
        ),
    ] = 256,
    timeout: Annotated[
        float,
        typer.Option("--timeout", min=0.1, help="Limit of seconds for an answer.", rich_help_panel=LIMITS),
    ] = 600.0,
    client_timeout: Annotated[
        float,
        typer.Option(
            "--client-timeout",
            min=1,
            help="Limit of seconds to wait for a slow client.",
            rich_help_panel=LIMITS,
        ),
    ] = 30.0,
    stall_timeout: Annotated[
        float,
        typer.Option(
            "--stall-timeout",
            min=1,
            help="Limit of seconds for one step. An engine that takes longer is killed and restarted.",
            rich_help_panel=LIMITS,
        ),
    ] = 300.0,
    start_timeout: Annotated[
        float,
        typer.Option(
            "--start-timeout",
            min=1,
            help="Limit of seconds from an engine's start to its first answer. A slower one is restarted.",
            rich_help_panel=LIMITS,
        ),
    ] = 1800.0,
    canary_interval: Annotated[
        float,
        typer.Option(
            "--canary-interval",
            min=0.1,
            help="Seconds without an answer after which the server asks the engine for one itself.",
            rich_help_panel=LIMITS,
        ),
    ] = 30.0,
    max_temperature: Annotated[
        float,
        typer.Option(
            "--max-temperature", min=0, max=1e6, help="Limit of temperatures.", rich_help_panel=LIMITS
        ),
    ] = 2.0,
    max_penalty: Annotated[
        float,
        typer.Option(
            "--max-penalty",
            min=0,
            max=1e6,
            help="Limit of presence and frequency penalties, in both directions.",
            rich_help_panel=LIMITS,
        ),
    ] = 2.0,
    max_bias: Annotated[
        float,
        typer.Option(
            "--max-bias",
            min=0,
            max=1e6,
            help="Limit of a token's logit bias, in both directions.",
            rich_help_panel=LIMITS,
        ),
    ] = 100.0,
    max_repetition_penalty: Annotated[
        float,
        typer.Option(
            "--max-repetition-penalty",
            min=1,
            max=1e3,
            help="Limit of the repetition penalty. Its inverse is the lower limit.",
            rich_help_panel=LIMITS,
        ),
    ] = 10.0,
    min_priority: Annotated[
        int,
        typer.Option(
            "--min-priority",
            min=-(2**31),
            max=2**31 - 1,
            help="The lowest, most urgent priority of requests if there are no keys.",
            rich_help_panel=LIMITS,
        ),
    ] = 0,
    max_connections: Annotated[
        int,
        typer.Option("--max-connections", min=1, help="Limit of open connections.", rich_help_panel=LIMITS),
    ] = 1000,
    max_connections_per_address: Annotated[
        int | None,
        typer.Option(
            "--max-connections-per-address",
            min=1,
            show_default="no limit",
            help="Limit of open connections of one client address.",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    drain: Annotated[
        float,
        typer.Option(
            "--drain",
            min=0,
            help="Limit of seconds for running answers at shutdown.",
            rich_help_panel=LIMITS,
        ),
    ] = 60.0,
) -> None:
    """Serve a model over HTTP with OpenAI's protocol. SIGTERM ends it after the running answers."""
    bounds = parse_bounds(replicas)
    if replica_cores is None and ray_address not in (None, "local"):
        raise typer.BadParameter("--ray-address needs --replica-cores N: machines of a cluster may differ")
    with ExitStack() as stack:
        with notice(f"loading {model} ..."):
            from soothsay.server.api_keys import KeyRing
            from soothsay.server.app import Server
            from soothsay.server.engines import Placement, engines, stages_on_ray
            from soothsay.server.fleet.fleet import Fleet
            from soothsay.server.log import log_to_stderr
            from soothsay.server.process import PORTABLE, load
            from soothsay.server.runner import make_runner

            keys = None if api_keys is None else KeyRing(api_keys)
            shared = parse_stages(stages, stage, stage_key, replicas=bounds.most)
            if ray_address is not None and isinstance(shared, int):
                shared = stages_on_ray(shared, replica_cores or 1)
            factory = partial(
                load,
                model,
                stages=shared,
                kernels="portable" if portable else "auto",
                drafter=drafter,
                dtype=dtype,
                max_context=max_context,
                kv_tokens=kv_tokens,
                max_requests=max_running,
                max_stall=max_stall,
                generation_config=generation_config,
                keep=keep,
                learn=learn,
                learn_for_tenants=learn_for_tenants,
            )
            placement = Placement(
                bounds.most,
                replica_cores,
                ray_address,
                environment=PORTABLE if portable else {},
                stages=shared if isinstance(shared, int) else len(shared) + 1,
            )
            make = stack.enter_context(engines(factory, placement))
            fleet = stack.enter_context(Fleet(make, bounds))
        config = ServerConfig(
            name=name or served_name(model),
            drafters=fleet.model.drafters if allow_drafter is None else tuple(allow_drafter),
            hosts=allowed_hosts(host, allowed_host or [], keyless=keys is None),
            share_between_keys=share_between_keys,
            split_reasoning=split_reasoning,
            max_queue=max_queue,
            timeout=timeout,
            client_timeout=client_timeout,
            min_priority=min_priority,
            max_connections=max_connections,
            max_connections_per_address=max_connections_per_address,
            drain=drain,
            stall_timeout=stall_timeout,
            start_timeout=start_timeout,
            canary_interval=canary_interval,
            max_temperature=max_temperature,
            max_penalty=max_penalty,
            max_bias=max_bias,
            max_repetition_penalty=max_repetition_penalty,
        )
        console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        if defaults := sampling_summary(fleet.model.sampling_defaults):
            console.print(f"defaults of the model: {defaults}; --generation-config none ignores them")
        if learn and keys is not None and not learn_for_tenants and not share_between_keys:
            console.print("warning: requests with keys teach drafters nothing without --learn-for-tenants")
        if keys is None and host not in LOOPBACK:
            console.print(f"warning: everyone who can reach {host} can use it; --api-keys FILE requires keys")
        if console.is_terminal and port:
            address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            console.print(
                f"{config.name} is served at {address}/v1, with a page at {address}. Ctrl-C ends it."
            )
        log_to_stderr()
        make_runner(Server(fleet, config, keys), host, port).run()


def allowed_hosts(host: str, allowed: Sequence[str], *, keyless: bool) -> tuple[str, ...]:
    """The names that requests may have in their Host header; empty: any name.

    A server without keys that only this machine can reach allows this machine's names and `allowed`. Other
    servers allow any name, unless `allowed` has some.
    """
    if not allowed and not (keyless and host in LOOPBACK):
        return ()
    return tuple(name.lower() for name in ("localhost", "127.0.0.1", "[::1]", *allowed))
