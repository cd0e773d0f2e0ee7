"""A server under 32 streams at once: plainly, and with the drafter that it chooses."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from typing import Any

from job import Job, Numbers

STREAMS, ROUNDS = 32, 3


def measure(job: Job) -> Numbers:
    """Plain and `auto` in turns, of one server; `bench serve` keeps all its numbers beside the results."""
    yield "plain and auto", lambda: _serve(job)


def _serve(job: Job) -> dict[str, Any]:
    model = "sibyl" if job.dry else str(job.grown(job.model))
    port, file = _free_port(), job.out / "serve-load.json"
    file.unlink(missing_ok=True)
    words = ["serve", model, "--port", str(port), "--device", job.device.type]
    with (job.out / "server.log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "soothsay", *words], stdout=log, stderr=subprocess.STDOUT
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(server, f"{url}/health", job)
            streams, rounds, tokens = (2, 1, 4) if job.dry else (STREAMS, ROUNDS, 128)
            sizes = "--concurrency", str(streams), "--requests", str(2 * streams), "--rounds", str(rounds)
            targets = f"plain={url},speculation=false", f"auto={url}"
            table = job.command("bench", "serve", *targets, *sizes, "-n", str(tokens), "--json", file)
        finally:
            server.terminate()
            server.wait(20)
    return {"table": table}


def _wait(server: subprocess.Popen[bytes], url: str, job: Job) -> None:
    """Wait until a server is ready."""
    while job.left > 0 and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                json.load(answer)
                return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"the server did not start: it ended with {server.poll()}")


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
