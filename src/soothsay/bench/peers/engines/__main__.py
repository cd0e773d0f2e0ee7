"""Run one engine. It reads requests as lines of JSON from stdin and writes replies to stdout.

    python -m engines NAME '{"model": ..., "dtype": ..., "threads": ..., "context": ...}'

The first reply says that the engine is available: `{"result": {"version": ..., "modes": [...]}}`. Then each
request is a call of a method of `Peer`: `{"call": "decode", "args": [...]}`. The reply to it is
`{"result": ...}`, `{"unavailable": reason}` or `{"error": text}`. The process ends when stdin ends.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from .hugging_face import Transformers
from .llama_server import LlamaServer
from .llamacpp import LlamaCpp
from .openvino import OpenVINO
from .ours import Soothsay
from .peer import Peer, Setup, UnavailableError

PEERS: dict[str, type[Peer]] = {
    "soothsay": Soothsay,
    "transformers": Transformers,
    "openvino": OpenVINO,
    "llama.cpp": LlamaCpp,
    "llama-server": LlamaServer,
}


def serve(kind: type[Peer], setup: Setup) -> None:
    """Report whether the engine is available, then answer requests until stdin ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # stdout becomes stderr, also for C libraries, so that no print mixes with replies

    def reply(work: Callable[[], Any]) -> None:
        try:
            line = {"result": work()}
        except UnavailableError as reason:
            line = {"unavailable": str(reason)}
        except Exception as error:
            line = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(line), file=replies, flush=True)

    made: list[Peer] = []

    def make() -> dict[str, Any]:
        if setup.device != "cpu" and kind not in (Soothsay, Transformers):
            raise UnavailableError(f"it is not run on {setup.device} here")
        made.append(kind(setup))
        return {"version": made[0].version, "modes": made[0].modes}

    def answer(call: str, args: list[Any]) -> Any:
        return getattr(made[0], call)(*args)

    reply(make)
    for line in sys.stdin if made else ():
        request = json.loads(line)
        reply(lambda request=request: answer(**request))  # type: ignore[misc]


if __name__ == "__main__":
    serve(PEERS[sys.argv[1]], Setup(**json.loads(sys.argv[2])))
