"""The server's numbers, each with the reason for its default."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerConfig:
    """What the server lets its clients do. The engine's own numbers are in `soothsay.config`."""

    name: str
    """What clients call the model."""

    drafters: tuple[str, ...] = ()
    """Drafters that a request may choose beside the model's own and "none", each built when first chosen.
    Never a client's own specification: that could name files, or fill the memory with one drafter after
    another."""

    hosts: tuple[str, ...] = ()
    """Names, in lower case, that requests may call the server by in their Host header; none: any. Where no
    key is asked for, a page of another site could otherwise have its own name lead to this machine (DNS
    rebinding), and read the answers."""

    max_queue: int = 256
    """Answers that may wait while `EngineConfig.max_requests` are running; further ones are refused with
    429."""

    timeout: float = 600.0
    """Seconds from a request's arrival to its answer's end."""

    client_timeout: float = 30.0
    """Seconds that a client may take to send its headers, to send another part of its body, or to read."""

    drain: float = 60.0
    """Seconds that running answers get to end when the server is told to."""

    settling: float = 60.0
    """Seconds after which an engine that was started again counts as sound. One that dies sooner would only
    die again."""

    max_body: int = 4 << 20
    """Bytes of a request's body: many times the text of any context that a CPU would read."""

    max_n: int = 16
    """Answers to one prompt."""

    max_prompts: int = 64
    """Prompts of one request for completions."""

    max_logprobs: int = 20
    """Likeliest tokens that are told beside each token; as many as OpenAI tells."""

    max_stops: int = 16
    """Stop strings, and stop tokens."""

    max_stop_length: int = 256
    """Characters of a stop string."""

    max_logit_bias: int = 1024
    """Tokens with a bias."""
