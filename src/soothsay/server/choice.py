"""Which drafters requests may choose."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from soothsay.drafters import Drafter, build_drafter
from soothsay.errors import DrafterError
from soothsay.llm import LLM
from soothsay.server.errors import ApiError

log = logging.getLogger("soothsay.server")


class Drafters:
    """The drafters of a server, each built when a request first names it, and then kept.

    Args:
        llm: for whom they guess. Its own drafter needs no name.
        names: specifications that requests may write, "none" among them or not.
    """

    def __init__(self, llm: LLM, names: Sequence[str]):
        self._llm = llm
        self._own = str(llm.drafter)
        self.names = tuple(dict.fromkeys((self._own, "none", *names)))
        self._built: dict[str, Drafter] = {}
        self._building = asyncio.Lock()

    async def get(self, name: str | None) -> Drafter | None:
        """The drafter of this name; None is the model's own. Raises `ApiError` for one that cannot be had."""
        if name is None or name == self._own:
            return None
        if name not in self.names:
            message = f"drafter {name!r} is not offered here; choose from {', '.join(self.names)}"
            raise ApiError(400, message, "invalid_value", param="speculation.drafter")
        async with self._building:
            if name not in self._built:
                try:
                    self._built[name] = await asyncio.to_thread(build_drafter, name, self._llm.engine.target)
                except DrafterError as error:  # the message may tell paths
                    log.warning("drafter not available", extra={"drafter": name, "reason": str(error)})
                    message = f"drafter {name!r} does not fit this model, or its files are missing"
                    raise ApiError(400, message, "invalid_value", param="speculation.drafter") from None
        return self._built[name]

    def name_of(self, drafter: Drafter) -> str:
        """What a request's drafter is called."""
        return next((name for name, one in self._built.items() if one is drafter), self._own)
