"""The engine llama.cpp, as its program llama-server runs it."""

from __future__ import annotations

import atexit
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from typing import Any

from .peer import Peer, Setup, UnavailableError

SLOTS = 16
"""Requests that the server answers at once."""

OWN_FLAGS = "--cache-ram", "0", "--no-webui"


class LlamaServer(Peer):
    """llama-server from the PATH, with a server for each mode.

    Answers end at the model's end token. Told to ignore it, the server would choose another token instead.
    """

    def __init__(self, setup: Setup):
        found = shutil.which("llama-server")
        if found is None:
            raise UnavailableError("llama-server is not on the PATH; it is a program of llama.cpp")
        about = subprocess.run([found, "--version"], capture_output=True, text=True, check=False)
        self.program, self.version = found, (about.stderr + about.stdout).strip().splitlines()[0]
        self.flags = {"plain": [], "n-grams": ["--spec-type", "ngram-simple"]}
        if setup.draft_model:
            self.flags["draft model"] = ["-md", setup.draft_model, "--spec-type", "draft-simple"]
        self.modes, self.setup = (*self.flags,), setup
        self.servers: dict[str, str] = {}
        """The addresses of servers that run, by mode."""

    def load(self) -> None:
        """See `Peer`."""
        self._ask("plain", [[0]], 1)

    def decode(self, ids: list[int], count: int) -> tuple[float, list[int]]:
        """See `Peer`."""
        (reply,) = self._ask("plain", [ids], count + 1, ignore_eos=True)
        timings = reply["timings"]
        return timings["predicted_ms"] / 1e3 * count / timings["predicted_n"], reply["tokens"]

    def prompt(self, ids: list[int]) -> float:
        """See `Peer`."""
        (reply,) = self._ask("plain", [ids], 1)
        seconds: float = reply["timings"]["prompt_ms"] / 1e3
        return seconds

    def answers(self, prompts: list[list[int]], count: int, mode: str) -> list[list[int]]:
        """See `Peer`."""
        return [reply["tokens"] for reply in self._ask(mode, prompts, count)]

    def _ask(self, mode: str, prompts: list[list[int]], count: int, **more: object) -> list[Any]:
        if mode not in self.servers:
            self.servers[mode] = self._start(self.flags[mode])
        asked = {"prompt": prompts, "n_predict": count, "temperature": 0, "cache_prompt": False}
        body = json.dumps({**asked, "return_tokens": True, **more}).encode()
        request = urllib.request.Request(
            f"{self.servers[mode]}/completion", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as reply:
            replies = json.load(reply)
        return sorted(replies, key=lambda one: one["index"]) if isinstance(replies, list) else [replies]

    def _start(self, flags: list[str]) -> str:
        """Start a server, and wait until it has loaded the model. Returns its address."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        setup, threads = self.setup, str(self.setup.threads)
        command = [self.program, "-m", setup.export, "--port", str(port), "-t", threads, "-tb", threads]
        command += ["-np", str(SLOTS), "-c", str(SLOTS * setup.context), *OWN_FLAGS, *flags]
        process = subprocess.Popen(command)
        atexit.register(process.kill)
        address = f"http://127.0.0.1:{port}"
        while True:
            if process.poll() is not None:
                raise UnavailableError(f"llama-server ends at once with {' '.join(flags)}; see the log")
            try:
                urllib.request.urlopen(f"{address}/health").close()
            except (urllib.error.URLError, ConnectionError):  # it does not listen yet, or loads the model
                time.sleep(0.2)
            else:
                return address
