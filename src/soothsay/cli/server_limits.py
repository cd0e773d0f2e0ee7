"""The limits that `soothsay serve` sets. Their defaults, and the reasons for them, are in `ServerConfig`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from soothsay.cli.options import LIMITS
from soothsay.server.server_config import ServerConfig


def _limit(explanation: str, **bounds: Any) -> Any:
    """An option in the help's panel of limits."""
    return typer.Option(help=explanation, rich_help_panel=LIMITS, **bounds)


@dataclass(frozen=True)
class ServerLimits:
    """Options with the names of fields of `ServerConfig`."""

    max_queue: Annotated[int, _limit("Limit of waiting answers. Further ones get 429.", min=0)] = (
        ServerConfig.max_queue
    )
    timeout: Annotated[float, _limit("Limit of seconds for an answer.", min=0.1)] = ServerConfig.timeout
    client_timeout: Annotated[float, _limit("Limit of seconds to wait for a slow client.", min=1)] = (
        ServerConfig.client_timeout
    )
    stall_timeout: Annotated[
        float,
        _limit("Limit of seconds for one step. An engine that takes longer is killed and restarted.", min=1),
    ] = ServerConfig.stall_timeout
    start_timeout: Annotated[
        float,
        _limit(
            "Limit of seconds from an engine's start to its first answer. A slower one is restarted.", min=1
        ),
    ] = ServerConfig.start_timeout
    canary_interval: Annotated[
        float,
        _limit("Seconds without an answer after which the server asks the engine for one itself.", min=0.1),
    ] = ServerConfig.canary_interval
    max_temperature: Annotated[float, _limit("Limit of temperatures.", min=0, max=1e6)] = (
        ServerConfig.max_temperature
    )
    max_penalty: Annotated[
        float, _limit("Limit of presence and frequency penalties, in both directions.", min=0, max=1e6)
    ] = ServerConfig.max_penalty
    max_bias: Annotated[
        float, _limit("Limit of a token's logit bias, in both directions.", min=0, max=1e6)
    ] = ServerConfig.max_bias
    max_repetition_penalty: Annotated[
        float, _limit("Limit of the repetition penalty. Its inverse is the lower limit.", min=1, max=1e3)
    ] = ServerConfig.max_repetition_penalty
    max_stops: Annotated[int, _limit("Limit of stop strings, and of stop tokens.", min=0)] = (
        ServerConfig.max_stops
    )
    min_priority: Annotated[
        int,
        _limit(
            "The lowest, most urgent priority of requests if there are no keys.", min=-(2**31), max=2**31 - 1
        ),
    ] = ServerConfig.min_priority
    max_connections: Annotated[int, _limit("Limit of open connections.", min=1)] = (
        ServerConfig.max_connections
    )
    max_connections_per_address: Annotated[
        int | None, _limit("Limit of open connections of one client address.", min=1, show_default="no limit")
    ] = ServerConfig.max_connections_per_address
    drain: Annotated[float, _limit("Limit of seconds for running answers at shutdown.", min=0)] = (
        ServerConfig.drain
    )
