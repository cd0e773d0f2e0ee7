"""`soothsay serve`: serves a model over HTTP with OpenAI's protocol."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from ipaddress import ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from soothsay.cli.engine_options import EngineOptions, PlacementOptions
from soothsay.cli.terminal import notice, sampling_summary
from soothsay.options import CommonOptions, option, shared
from soothsay.server.server_config import MAX_STALL, ServerConfig, ServerLimits, served_name

if TYPE_CHECKING:
    from soothsay.server.fleet.engine_fleet import Fleet

LOOPBACK = ("127.0.0.1", "::1", "localhost")
"""Addresses that only this machine can reach."""


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Serve a model over HTTP with OpenAI's protocol. SIGTERM ends it after the running answers."""

    model: str = shared(CommonOptions, "model")
    host: str = option(
        "127.0.0.1", "The address to listen on. The default is reachable from this machine only."
    )
    port: int = option(8000, "The port; 0: any free port.", min=0, max=65535)
    name: str | None = option(
        None,
        "Name of the model in requests.",
        "--served-model-name",
        show_default="the model as given, without its folder",
    )
    any_model: bool = option(False, "Answer requests that name another model, too.")
    allow_drafter: list[str] | None = option(
        None, "A drafter that requests may choose. Can be repeated.", show_default="all drafters"
    )
    engine: EngineOptions
    learn_for_tenants: bool = option(
        False,
        "Learn for each API key and cache_salt, apart. Otherwise drafters learn from requests that "
        "have neither.",
    )
    split_reasoning: bool = option(
        True,
        "Return a model's thoughts as reasoning_content, or as a part of the answer's text.",
        "--split-reasoning/--no-split-reasoning",
    )
    placement: PlacementOptions
    api_keys: Path | None = option(
        None, "File of API keys, see 'soothsay keys'.", dir_okay=False, show_default="no keys"
    )
    share_between_keys: bool = option(
        False,
        "Let requests with different keys share prefixes and drafts. Whoever has a key can then "
        "find out what others have written.",
    )
    allowed_host: list[str] | None = option(
        None,
        "A name that requests may have in their Host header. Can be repeated.",
        show_default="this machine's names if there are no keys",
    )
    trusted_proxy: list[str] | None = option(
        None,
        "Address or network of a proxy whose X-Forwarded-For names the client. Can be repeated.",
        show_default="none",
    )
    max_stall: float = option(
        MAX_STALL,
        "Limit of seconds for a step that reads prompts. With a smaller limit, running answers "
        "flow more evenly and short prompts wait less, but reading a long prompt takes longer.",
        min=0.01,
        panel="Limits",
    )
    limits: ServerLimits

    def run(self) -> None:
        """Serve until a signal ends it."""
        from soothsay.server.access.api_keys import KeyRing
        from soothsay.server.runner import bind

        keys = None if self.api_keys is None else KeyRing(self.api_keys)
        proxies = trusted_proxies(self.trusted_proxy or [])
        learning = {"max_stall": self.max_stall, "learn_for_tenants": self.learn_for_tenants}
        arguments = {**self.engine.for_llm(), **learning}
        with bind(self.host, self.port) as sockets, _fleet(self.model, self.placement, arguments) as fleet:
            from soothsay.server.http.json_log import log_to_stderr
            from soothsay.server.http_server import Server
            from soothsay.server.runner import make_runner

            allowed = self.allow_drafter
            config = ServerConfig(
                name=self.name or served_name(self.model),
                any_model=self.any_model,
                drafters=fleet.model.drafters if allowed is None else tuple(allowed),
                hosts=allowed_hosts(self.host, self.allowed_host or [], keyless=keys is None),
                trusted_proxies=proxies,
                share_between_keys=self.share_between_keys,
                split_reasoning=self.split_reasoning,
                **asdict(self.limits),
            )
            console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
            if defaults := sampling_summary(fleet.model.sampling_defaults):
                console.print(f"defaults of the model: {defaults}; --generation-config none ignores them")
            self._warn(console, keyless=keys is None)
            if console.is_terminal and self.port:
                console.print(_invitation(config.name, self.host, self.port))
            log_to_stderr()
            make_runner(Server(fleet, config, keys), self.host, self.port).run(sockets)

    def _warn(self, console: Console, *, keyless: bool) -> None:
        if self.engine.learn and not (keyless or self.learn_for_tenants or self.share_between_keys):
            console.print("warning: requests with keys teach drafters nothing without --learn-for-tenants")
        if keyless and self.host not in LOOPBACK:
            console.print(
                f"warning: everyone who can reach {self.host} can use it; --api-keys FILE requires keys"
            )


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
