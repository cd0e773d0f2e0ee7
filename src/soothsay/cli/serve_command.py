"""`soothsay serve` serves a model over HTTP."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from ipaddress import ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer
from rich.console import Console

from soothsay.cli.terminal import facts_table, load_bar
from soothsay.config import EngineConfig
from soothsay.errors import SoothsayError
from soothsay.options import (
    ModelChoice,
    ModelOptions,
    check_room,
    common,
    drafters_like,
    flag,
    option,
    optional,
)
from soothsay.processors import granted_processors
from soothsay.server.server_config import MAX_STALL, ServerConfig, ServerLimits, served_name

if TYPE_CHECKING:
    from soothsay.model.pipeline.pipeline import Stages
    from soothsay.server.fleet.engine_fleet import Bounds, Fleet
    from soothsay.tokenizer import Tokenizer


LEARNING, REQUESTS, ACCESS = "Learning", "Requests", "Access"
"""Panels of the help."""


@dataclass(frozen=True)
class EngineOptions(ModelOptions):
    """How an engine of `serve` or `batch` runs its model."""

    kv_tokens: int | None = optional("by --kv-memory", min=1)
    """Size of the KV cache in tokens, for all requests together."""

    keep: Path | None = optional("forget it at the end", file_okay=False, panel=LEARNING)
    """A directory that keeps what drafters learn across restarts, apart for each tenant. It holds what
    users wrote. Only this user of the machine can read it."""

    learn: float = option(0.0, min=0, max=1, panel=LEARNING)
    """Share of a core's time, such as 0.1, in which trained drafters learn from answers."""

    max_running: int = option(EngineConfig.max_requests, min=1, panel="Limits")
    """Limit of answers in one step."""

    def for_llm(self) -> dict[str, Any]:
        """The options as arguments of `load`."""
        options = asdict(self)
        return {"max_requests": options.pop("max_running"), **options}

    def check(self, replicas: int, ray_address: str | None, cores: int | None = None) -> None:
        """Raise `SoothsayError` for options that do not go together, and where no engine can be started.

        `replicas`: the largest number of engines. `cores`: of each, see `PlacementOptions.replica_cores`.
        """
        if not hasattr(signal, "pthread_sigmask"):
            raise SoothsayError(
                "serve and batch need what Windows does not have: run them in WSL or on Linux; generate and "
                "chat need less"
            )
        if self.kv_tokens is not None and self.kv_memory is not None:
            raise SoothsayError("the KV cache has one size: give --kv-memory or --kv-tokens")
        if self.threads is not None and (replicas > 1 or ray_address is not None or cores is not None):
            others = "with --replicas, --replica-cores or --ray-address"
            raise SoothsayError(
                f"--threads is for one engine; {others}, each has a thread for each of its own cores"
            )
        if ray_address is None:
            needed = (cores or 0) * replicas
            if needed > (granted := granted_processors()):
                raise SoothsayError(
                    f"--replicas {replicas} with --replica-cores {cores} needs {needed} physical cores, "
                    f"and this process may use {granted}"
                )
            check_room(self.kv_memory, self.device)


@dataclass(frozen=True)
class PlacementOptions:
    """How many engines `serve` has, and where they and their stages run."""

    PANEL = "Many engines"

    replicas: str = option("1", metavar="N or MIN:MAX")
    """Number of engines behind this port. With bounds, it follows the load. If an engine dies, another
    one continues its answers."""

    replica_cores: int | None = optional("the cores of this machine, shared equally", min=1)
    """Physical cores of each engine, which are its own."""

    ray_address: str | None = optional("no Ray: all engines run on this machine")
    """Run the engines on a Ray cluster: 'auto', HOST:PORT, or 'local' to start one here."""

    stages: int = option(1, min=1)
    """Number of processes that share each engine's layers: of this machine, or Ray actors."""

    stage: list[str] | None = option(None, metavar="HOST:PORT")
    """The address of a 'soothsay stage', which runs a part of the layers of a model that is too large for
    this machine. Can be repeated."""

    stage_key: Path | None = option(None, dir_okay=False, show_default=False)
    """File with the key of these stages."""

    portable: bool = flag()
    """Use only instructions that all processors of the family have, so that engines on different machines
    give equal answers. Slower."""

    def kernels(self, chosen: str) -> str:
        """The kernels of the engines. Raises `typer.BadParameter` for others beside --portable."""
        if self.portable and chosen not in ("auto", "portable"):
            raise typer.BadParameter(f"--portable is --kernels portable: leave out --kernels {chosen}")
        return "portable" if self.portable else chosen

    def bounds(self) -> Bounds:
        """The bounds of the number of engines. Raises `typer.BadParameter`."""
        from soothsay.server.fleet.engine_fleet import Bounds

        try:
            bounds = Bounds.parse(self.replicas)
        except SoothsayError as error:
            raise typer.BadParameter(f"--replicas: {error}") from None
        if self.replica_cores is None and self.ray_address not in (None, "local"):
            reason = "machines of a cluster may differ"
            raise typer.BadParameter(f"--ray-address needs --replica-cores N: {reason}")
        return bounds

    def shared(self, replicas: int) -> Stages:
        """The processes that share an engine's layers. Raises `typer.BadParameter`, or `SoothsayError`."""
        if not self.stage and self.ray_address is None:
            return self.stages
        from soothsay.model.pipeline.pipeline import StageAddress, read_key
        from soothsay.server.placement import stages_on_ray

        if not self.stage:
            return stages_on_ray(self.stages, self.replica_cores or 1)
        if self.stages > 1 or replicas > 1:
            raise typer.BadParameter("--stage serves one engine; leave out --stages and --replicas")
        if self.stage_key is None:
            raise typer.BadParameter("--stage needs --stage-key FILE, as 'soothsay stage' does")
        secret = read_key(self.stage_key)
        return [StageAddress.parse(address, secret) for address in self.stage]


LOOPBACK = ("127.0.0.1", "::1", "localhost")
"""Addresses that only this machine can reach."""


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Serve a model over HTTP with OpenAI's protocol. Ctrl-C or SIGTERM ends it after the running answers."""

    choice: ModelChoice
    host: str = option("127.0.0.1")
    """The address to listen on. The default is reachable from this machine only."""

    port: int = option(8000, min=0, max=65535)
    """The port; 0: any free port."""

    name: list[str] | None = common("served_name")
    """Name of the model in requests. Can be repeated; replies have the first."""

    api_key: list[str] | None = optional("none")
    """A key of 8 to 256 characters that clients must have. Can be repeated. The variable
    SOOTHSAY_SERVE_API_KEY hides it from other users of this machine; --api-keys has limits and
    permissions."""

    cors_origin: list[str] | None = optional("none")
    """Origin of a page whose scripts may use this server, such as https://app.example.com; '*': any page.
    Can be repeated."""

    any_model: bool = flag(panel=REQUESTS)
    """Answer requests that name another model, too."""

    allow_drafter: list[str] | None = optional("all drafters", panel=REQUESTS, autocompletion=drafters_like)
    """A drafter that requests may choose. Can be repeated."""

    engine: EngineOptions
    learn_for_tenants: bool = flag(panel=LEARNING)
    """Learn for each API key and cache_salt, apart. Otherwise drafters learn from requests that have
    neither."""

    split_reasoning: bool = option(True, "--split-reasoning/--no-split-reasoning", panel=REQUESTS)
    """Return a model's thoughts as reasoning_content, or as a part of the answer's text."""

    placement: PlacementOptions
    api_keys: Path | None = optional("no file", dir_okay=False, panel=ACCESS)
    """File of API keys, see 'soothsay keys'."""

    share_between_keys: bool = flag(panel=ACCESS)
    """Let requests with different keys share prefixes and drafts. Whoever has a key can then find out
    what others have written."""

    allowed_host: list[str] | None = optional("this machine's names if there are no keys", panel=ACCESS)
    """A name that requests may have in their Host header. Can be repeated."""

    trusted_proxy: list[str] | None = optional("none", panel=ACCESS)
    """Address or network of a proxy whose X-Forwarded-For names the client. Can be repeated."""

    log_level: Literal["debug", "info", "warning", "error"] = option("info", panel="Output")
    """The least level of what is logged; 'debug' has the requests of probes, too."""

    max_stall: float = option(MAX_STALL, min=0.01, panel="Limits")
    """Limit of seconds for a step that reads prompts. With a smaller limit, running answers flow more
    evenly and short prompts wait less, but reading a long prompt takes longer."""

    limits: ServerLimits

    def run(self) -> None:
        """Serve until a signal ends it."""
        bounds = self.placement.bounds()
        self.engine.check(bounds.most, self.placement.ray_address, self.placement.replica_cores)
        from soothsay.server.access.api_keys import KeyRing
        from soothsay.server.http.json_log import LEVEL
        from soothsay.server.runner import bind

        if os.getpid() != 1:  # the first process of a container ignores signals that have no handler
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a supervisor sees that its own signal ended it
        os.environ[LEVEL] = self.log_level
        model, given = self.choice.name, self.api_key or ()
        keys = KeyRing(self.api_keys, given) if given or self.api_keys else None
        proxies, origins = trusted_proxies(self.trusted_proxy or []), cors_origins(self.cors_origin or [])
        learning = {"max_stall": self.max_stall, "learn_for_tenants": self.learn_for_tenants}
        kernels = self.placement.kernels(self.engine.kernels)
        arguments = {**self.engine.for_llm(), "kernels": kernels, **learning}
        with bind(self.host, self.port) as sockets, _fleet(model, self.placement, bounds, arguments) as fleet:
            from soothsay.server.http.json_log import log, log_to_stderr
            from soothsay.server.http_server import Server
            from soothsay.server.runner import make_runner

            allowed = self.allow_drafter
            name, *aliases = self.name or [served_name(model)]
            config = ServerConfig(
                name,
                aliases=tuple(aliases),
                any_model=self.any_model,
                drafters=fleet.model.drafters if allowed is None else tuple(allowed),
                hosts=allowed_hosts(self.host, self.allowed_host or [], keyless=keys is None),
                cors_origins=origins,
                trusted_proxies=proxies,
                share_between_keys=self.share_between_keys,
                split_reasoning=self.split_reasoning,
                **asdict(self.limits),
            )
            console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
            log_to_stderr()
            self._warn(console, keyless=keys is None)
            address = _address(*sockets[0].getsockname()[:2])
            facts = {"model": ", ".join(config.names), **fleet.model.about, "address": f"{address}/v1"}
            if self.engine.kv_memory is None and self.engine.kv_tokens is None and "kv_cache" in facts:
                facts["kv_cache"] += " (by default 25% of the free memory, or what all answers can need)"
            if console.is_terminal:
                facts["address"] += f", and a page at {address}; Ctrl-C ends it"
                console.print(facts_table((name.replace("_", " "), fact) for name, fact in facts.items()))
                console.print(_request(address, fleet.model.tokenizer, keyless=keys is None))
            else:
                log.info("loaded", extra=facts)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # in any process: the runner has its own handler
            make_runner(Server(fleet, config, keys), self.host, self.port).run(sockets)

    def _warn(self, console: Console, *, keyless: bool) -> None:
        """Warn of what is open or useless: on a terminal, or else in the log."""
        from soothsay.server.http.json_log import log

        warn: Callable[[str], None] = (
            partial(console.print, "Warning:") if console.is_terminal else log.warning
        )
        if self.engine.learn and not (keyless or self.learn_for_tenants or self.share_between_keys):
            warn("requests with keys teach drafters nothing without --learn-for-tenants")
        is_open, any_page = self.host not in LOOPBACK, "*" in (self.cors_origin or ())
        if keyless and (is_open or any_page):
            who = (
                f"everyone who can reach {self.host}" if is_open else "every page in this machine's browsers"
            )
            warn(f"{who} can use it; --api-key KEY or --api-keys FILE requires keys")


@contextmanager
def _fleet(
    model: str, placement: PlacementOptions, bounds: Bounds, arguments: Mapping[str, Any]
) -> Iterator[Fleet]:
    """The engines, which have loaded the model. `arguments`: of `load`."""
    with ExitStack() as stack:
        from soothsay.server.engines.engine_process import PORTABLE, load
        from soothsay.server.fleet.engine_fleet import Fleet
        from soothsay.server.placement import engines

        shared = placement.shared(bounds.most)
        stages = shared if isinstance(shared, int) else len(shared) + 1
        variables = PORTABLE if placement.portable else {}
        place = bounds.most, placement.replica_cores, placement.ray_address
        factory = partial(load, model, stages=shared, **arguments)
        make = stack.enter_context(engines(factory, *place, variables, stages))
        with load_bar(f"loading {model} ..."):
            fleet = stack.enter_context(Fleet(make, bounds))
        yield fleet


def _address(host: str, port: int) -> str:
    """The address of the server from this machine. `host` may be that of all networks."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _request(address: str, tokenizer: Tokenizer | None, *, keyless: bool) -> str:
    """A command that sends a request, to be pasted. `KEY` stands for the key."""
    path, asked = "completions", dict[str, Any](prompt="Once upon a time" if tokenizer else [0])
    if tokenizer is not None and tokenizer.has_chat_template:
        path, asked = "chat/completions", {"messages": [{"role": "user", "content": "Hello!"}]}
    key = "" if keyless else "-H 'Authorization: Bearer KEY' "
    return f"curl {address}/v1/{path} {key}-H 'Content-Type: application/json' -d '{json.dumps(asked)}'"


ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@,*]+")
"""The origin of a page: scheme, host and perhaps a port."""


def cors_origins(given: Sequence[str]) -> tuple[str, ...]:
    """Origins of pages, as browsers send them. Raises `SoothsayError` for anything else."""
    for one in given:
        if one != "*" and not ORIGIN.fullmatch(one.lower()):
            raise SoothsayError(
                f"--cors-origin {one}: give scheme and host, and perhaps a port, without a path, as in "
                "https://app.example.com or http://localhost:3000; or '*' for any page"
            )
    return tuple(one.lower() for one in given)


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
