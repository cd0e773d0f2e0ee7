"""The page in a browser without a server: its own files, and replies that a test writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from watching import Watched

from soothsay.server.http.api_route import HEADERS, START, TYPES

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

URL = "http://localhost:9/"
"""Where the page seems to be. Browsers let pages of this machine write to the clipboard."""

SITE = resources.files("soothsay.server") / "site"

Reply = str | Sequence[dict[str, Any]] | dict[str, Any] | None
"""The text of an answer, its chunks, or the arguments of `Route.fulfill`. None: no reply comes."""


def streamed(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Arguments that let a route reply with a stream of chunks."""
    data = [*map(json.dumps, chunks), "[DONE]"]
    return {"content_type": "text/event-stream", "body": "".join(f"data: {one}\n\n" for one in data)}


def whole(text: str) -> list[dict[str, Any]]:
    """The chunks of an answer that comes at once."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 1, "completion_tokens": 9, "total_tokens": 10}
    return [{"choices": [choice], "usage": None}, {"choices": [], "usage": usage}]


class Stage(Watched):
    """The page, with a model that says what `reply` returns for the body of a request."""

    def __init__(self, page: Page, reply: Callable[[dict[str, Any]], Reply] | Reply = "Hello."):
        super().__init__(page, URL)
        self.reply = reply
        self.card = {"id": "fake", "drafters": ["auto", "none", "suffix"], "max_model_len": 512}
        self.bodies: list[dict[str, Any]] = []
        page.route("**/*", self._serve)

    def open(self) -> Page:
        """Open the page, which shows answers as they are meant to be read."""
        self.page.goto(self.url)
        self.page.wait_for_selector("#status[data-state=ok]")
        return self.page

    def _serve(self, route: Route) -> None:
        path = urlsplit(route.request.url).path
        if not route.request.url.startswith(URL):
            route.abort()
        elif path == "/health":
            route.fulfill(json={"status": "ok"})
        elif path == "/metrics":
            route.fulfill(body="")
        elif path == "/v1/models":
            route.fulfill(json={"data": [self.card]})
        elif path == "/v1/chat/completions":
            self.bodies.append(route.request.post_data_json)
            given = self.reply(self.bodies[-1]) if callable(self.reply) else self.reply
            given = whole(given) if isinstance(given, str) else given
            if given is None:
                return
            route.fulfill(**(given if isinstance(given, dict) else streamed(given)))
        else:
            name = PurePosixPath(path).name or START
            headers = {**HEADERS, "Content-Type": TYPES[PurePosixPath(name).suffix]}
            route.fulfill(body=(SITE / name).read_bytes(), headers=headers)
