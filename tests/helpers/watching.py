"""Watches a page in a browser: what it says on the console, and what it requests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Request

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
"""Commands that start a Chromium, in order of preference."""

QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
SEED, MAX_TOKENS = 7, 60
QUESTION = "Repeat after me: one two three, one two three."


@contextmanager
def open_browser() -> Iterator[Browser]:
    """An installed Chromium. Skips the test if there is none."""
    command = next(filter(None, map(shutil.which, BROWSERS)), None)
    if command is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=command, args=QUIET)
        yield browser
        browser.close()


class Watched:
    """A page, and a record of its errors and requests."""

    def __init__(self, page: Page, url: str):
        self.page, self.url = page, url
        self.said: list[str] = []
        self.asked: list[str] = []
        page.on("console", lambda message: self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("requestfailed", self._failed)

    def _failed(self, request: Request) -> None:
        if (
            request.failure != "net::ERR_ABORTED"
        ):  # Chromium reports this even for streams that were read to their end
            self.said.append(f"{request.failure}: {request.url}")

    def open(self) -> Page:
        """Open the page, which shows answers token by token."""
        self.page.add_init_script("localStorage.setItem('soothsay.draft view', 'true')")
        self.page.goto(self.url)
        self.page.wait_for_selector("#status[data-state=ok]")
        self.page.fill("#seed", str(SEED))
        self.page.fill("#max-tokens", str(MAX_TOKENS))
        return self.page

    def ask(self, text: str = QUESTION) -> Page:
        """Send a message, and wait for the end of its answer."""
        self.page.fill("#message", text)
        self.page.press("#message", "Enter")
        self.page.wait_for_selector("#turns > :last-child .said:not(.running)", state="attached")
        self.page.wait_for_selector("#send:visible")
        return self.page
