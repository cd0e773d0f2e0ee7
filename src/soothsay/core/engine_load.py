"""How busy an engine is. Without torch, so that a server's process can import it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The requests in an engine and the memory that they hold."""

    running: int  # requests
    waiting: int  # requests
    kv_usage: float  # share of the KV pool that is in use, 0 to 1
