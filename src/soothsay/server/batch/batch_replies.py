"""Makes replies functions of their requests: without times, random ids, and how the answer was computed.

So the output of a batch has the same bytes however often it was interrupted, and whichever drafter was used.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

from soothsay.server.http.body_types import Json

TIMES = ("created", "created_at", "completed_at")
"""Fields with times. OpenAI's schema requires them, so they are 0."""

OF_THE_RUN = ("metrics", "timings")
"""Fields of a reply that depend on the drafter and on time."""

USAGE_OF_THE_RUN = ("speculation", "prompt_tokens_details", "completion_tokens_details")
"""Fields of the usage that depend on the drafter and on the prefix cache."""

PREFIX = re.compile(r"[a-z]+[-_]|")
"""What an id begins with. The rest is random."""


def settle(reply: Json, key: str) -> Json:
    """Replace what depends on the run in a whole reply. `key` takes the place of chance. Changes `reply`."""
    for name in OF_THE_RUN:
        reply.pop(name, None)
    usage = reply.get("usage") or {}
    for name in USAGE_OF_THE_RUN:
        usage.pop(name, None)
    if "input_tokens_details" in usage:  # required by OpenAI's schema
        usage["input_tokens_details"] = {"cached_tokens": 0}
    reply |= {name: 0 for name in TIMES if name in reply}
    for number, part in enumerate(_parts(reply)):
        for name in ("id", "call_id"):
            if name in part:
                part[name] = _id(part[name], f"{key}/{number}/{name}")
    return reply


def answer_tokens(reply: Json) -> int:
    """Number of tokens of all answers in a reply."""
    usage = reply.get("usage") or {}
    return int(usage.get("completion_tokens") or usage.get("output_tokens") or 0)


def _parts(reply: Json) -> Iterator[Json]:
    """The objects of a reply that may have ids, in order."""
    yield reply
    for choice in reply.get("choices", ()):
        yield from choice.get("message", {}).get("tool_calls", ())
    yield from reply.get("output", ())


def _id(random: str, key: str) -> str:
    """An id of the form of a random one, made of a key."""
    found = PREFIX.match(random)
    prefix = found[0] if found else ""
    digest = hashlib.shake_256(key.encode()).hexdigest(len(random))
    return prefix + digest[: len(random) - len(prefix)]
