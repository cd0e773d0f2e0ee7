"""The server's limits and names, each with the reason for its default."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address

from soothsay.files import user_path
from soothsay.options import option, optional

MAX_STALL = 0.15
"""Default limit of seconds for a step that reads prompts, see `EngineConfig`. A request waits for a few."""


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Limits of the server that are options of `soothsay serve`."""

    PANEL = "Limits"

    max_queue: int = option(256, min=0)
    """Limit of waiting answers. Further ones get 429.

    They wait while `EngineConfig.max_requests` are running."""

    timeout: float = option(600.0, min=0.1)
    """Limit of seconds for an answer.

    It counts from a request's arrival to the end of its last answer."""

    client_timeout: float = option(30.0, min=1)
    """Limit of seconds to wait for a slow client.

    The client has to send its headers, to send the next part of its body, or to read the next 32 KB of a
    reply."""

    stall_timeout: float = option(300.0, min=1)
    """Limit of seconds for one step. An engine that takes longer is killed and restarted.

    It is many times the longest step of a model that a CPU can serve."""

    start_timeout: float = option(1800.0, min=1)
    """Limit of seconds from an engine's start to its first answer. A slower one is restarted.

    It loads a model, and measures the drafters' costs for the first answer."""

    canary_interval: float = option(30.0, min=0.1)
    """Seconds without an answer after which the server asks the engine for one itself."""

    max_temperature: float = option(2.0, min=0, max=1e6)
    """Limit of temperatures.

    This limit and the next three are those of OpenAI's API by default. An operator may widen them up to
    `soothsay.core.params.BOUNDS`."""

    max_penalty: float = option(2.0, min=0, max=1e6)
    """Limit of presence and frequency penalties, in both directions."""

    max_bias: float = option(100.0, min=0, max=1e6)
    """Limit of a token's logit bias, in both directions.

    At 100, the token is said always or never."""

    max_repetition_penalty: float = option(10.0, min=1, max=1e3)
    """Limit of the repetition penalty. Its inverse is the lower limit.

    OpenAI's API has no such parameter."""

    max_stops: int = option(512, min=0)
    """Limit of stop strings, and of stop tokens.

    So many strings take about 0.05 ms a token."""

    min_priority: int = option(0, min=-(2**31), max=2**31 - 1)
    """The lowest, most urgent priority of requests if there are no keys.

    With keys, each key says it."""

    max_connections: int = option(1000, min=1)
    """Limit of open connections.

    It is some times the answers that run and wait. It is lower if the process may not open as many files.
    Beyond it, the connection that has been idle for longest is closed, or the new one."""

    max_connections_per_address: int | None = optional("no limit", min=1)
    """Limit of open connections of one client address.

    By default there is none, since proxies have many."""

    drain: float = option(60.0, min=0)
    """Limit of seconds for running answers at shutdown."""


@dataclass(frozen=True)
class ServerConfig(ServerLimits):
    """What the server allows its clients. The engine's own numbers are in `soothsay.config`."""

    name: str
    """Name of the model in requests and replies."""

    aliases: tuple[str, ...] = ()
    """Further names of the model in requests. Replies have `name`."""

    any_model: bool = False
    """Whether requests may name any model, and get answers of this one. Clients with fixed names need it."""

    drafters: tuple[str, ...] = ()
    """Names of drafters that a request may choose, besides the model's own and "none". Each is built when a
    request first chooses it. A client cannot send a specification of its own: it could name files, or fill
    the memory with one drafter after another."""

    hosts: tuple[str, ...] = ()
    """Allowed names in the Host header, in lower case; empty: any name. A server without API keys needs this:
    otherwise a page of another site can let its own name lead to this machine (DNS rebinding) and read the
    answers."""

    cors_origins: tuple[str, ...] = ()
    """Origins of pages that may send requests and read the replies, such as "https://app.example.com"; "*":
    any page. Browsers refuse all others (CORS)."""

    trusted_proxies: tuple[str, ...] = ()
    """Addresses and networks of proxies. Only from them, X-Forwarded-For says where a request comes from:
    anybody can send that header."""

    share_between_keys: bool = False
    """Whether requests with different API keys share prefixes, drafts and grammars. That is faster where
    their texts are alike. But someone who guesses a part of another one's prompt can then see that the guess
    was right, and read what follows."""

    split_reasoning: bool = True
    """Whether the thoughts of a reasoning model are a field of their own in replies to chats."""

    settling: float = 10.0
    """Seconds of service after which an engine that has answered counts as sound. If it dies later, it is
    restarted at once: most likely, something outside has killed it."""

    restart_delay: float = 1.0
    """Seconds before an engine is restarted if it died young after a restart. Doubles each time, since it may
    only die again."""

    max_restart_delay: float = 60.0
    """Limit of `restart_delay`. The engine comes back by itself within this time after the cause is gone."""

    canary_timeout: float = 30.0
    """Limit of seconds for that answer. `/ready` then says that the engine does not answer."""

    max_body: int = 4 << 20
    """Limit of bytes in a request's body: many times the text of any context that a CPU can prefill."""

    max_bodies: int = 64 << 20
    """Limit of bytes in all bodies that are being received. Beyond it, bodies above 32 KB get 503."""

    max_unread: int = 64 << 20
    """Limit of bytes in all large replies that are being sent. Beyond it, connections of clients that do not
    read are aborted, the oldest first."""

    min_body_rate: int = 1 << 16
    """Bytes in a second that a client must send of its body after its first `client_timeout` seconds. The
    largest body has 64 more seconds."""

    max_failed_keys: int = 60
    """Limit of requests a minute with a wrong API key, of one client address. Further ones get 429."""

    max_n: int = 16
    """Limit of answers to one prompt."""

    max_prompts: int = 64
    """Limit of prompts in one request for completions."""

    max_logprobs: int = 20
    """Limit of alternatives listed for each token. OpenAI has the same limit."""

    max_stop_length: int = 1024
    """Limit of characters in a stop string, and in a text of `bad_words`."""

    max_bad_words: int = 128
    """Limit of texts that an answer must not contain: each costs a comparison a token."""

    max_logit_bias: int = 1024
    """Limit of tokens with a bias."""

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model, the first of which is that of replies."""
        return self.name, *self.aliases

    def serves(self, name: str | None) -> bool:
        """Whether a request that names this model is for the one that is served. None, or empty: no name.

        Clients leave out the ending of a GGUF file, and Ollama's add a tag.
        """
        known = {*self.names, *(GGUF_ENDING.sub("", own) for own in self.names)}
        return not name or self.any_model or name.removesuffix(":latest") in known


GGUF_ENDING = re.compile(r"(-\d{5}-of-\d{5})?\.gguf$", re.IGNORECASE)
"""The end of the name of a GGUF file, or of its first part."""


def served_name(model: str) -> str:
    """The default name of a model in requests: the model as given, without its folder."""
    if user_path(model).exists():
        return user_path(model).resolve().name
    folder, _, kind = model.rpartition(":")
    return f"{served_name(folder)}:{kind}" if folder and user_path(folder).exists() else model


def network(address: str) -> str:
    """What an address counts as for limits: itself, or the /64 network of an IPv6 address.

    One client of IPv6 usually has a whole /64. All that is no address counts as one: a proxy may pass on any
    text of a client as its address.
    """
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(parsed, IPv6Address):
        return str(parsed.ipv4_mapped or IPv6Address(int(parsed) >> 64 << 64))
    return address
