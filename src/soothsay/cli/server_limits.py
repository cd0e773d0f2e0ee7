"""The limits that `soothsay serve` sets. Their defaults, and the reasons for them, are in `ServerConfig`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from soothsay.options import option
from soothsay.server.server_config import ServerConfig


def _limit(name: str, help: str, **bounds: Any) -> Any:
    """The option for a field of `ServerConfig`, with its default."""
    return option(getattr(ServerConfig, name), help, **bounds)


@dataclass(frozen=True)
class ServerLimits:
    """Options with the names of fields of `ServerConfig`."""

    PANEL = "Limits"

    max_queue: int = _limit("max_queue", "Limit of waiting answers. Further ones get 429.", min=0)
    timeout: float = _limit("timeout", "Limit of seconds for an answer.", min=0.1)
    client_timeout: float = _limit("client_timeout", "Limit of seconds to wait for a slow client.", min=1)
    stall_timeout: float = _limit(
        "stall_timeout",
        "Limit of seconds for one step. An engine that takes longer is killed and restarted.",
        min=1,
    )
    start_timeout: float = _limit(
        "start_timeout",
        "Limit of seconds from an engine's start to its first answer. A slower one is restarted.",
        min=1,
    )
    canary_interval: float = _limit(
        "canary_interval",
        "Seconds without an answer after which the server asks the engine for one itself.",
        min=0.1,
    )
    max_temperature: float = _limit("max_temperature", "Limit of temperatures.", min=0, max=1e6)
    max_penalty: float = _limit(
        "max_penalty", "Limit of presence and frequency penalties, in both directions.", min=0, max=1e6
    )
    max_bias: float = _limit("max_bias", "Limit of a token's logit bias, in both directions.", min=0, max=1e6)
    max_repetition_penalty: float = _limit(
        "max_repetition_penalty",
        "Limit of the repetition penalty. Its inverse is the lower limit.",
        min=1,
        max=1e3,
    )
    max_stops: int = _limit("max_stops", "Limit of stop strings, and of stop tokens.", min=0)
    min_priority: int = _limit(
        "min_priority",
        "The lowest, most urgent priority of requests if there are no keys.",
        min=-(2**31),
        max=2**31 - 1,
    )
    max_connections: int = _limit("max_connections", "Limit of open connections.", min=1)
    max_connections_per_address: int | None = _limit(
        "max_connections_per_address",
        "Limit of open connections of one client address.",
        min=1,
        show_default="no limit",
    )
    drain: float = _limit("drain", "Limit of seconds for running answers at shutdown.", min=0)
