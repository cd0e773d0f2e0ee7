"""A route, with what the gate and the description of the API must know of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

Handler = Callable[[Request], Awaitable[Response]]


class ApiRoute(Route):
    """A route.

    Args:
        path, handler: what it serves, and how.
        methods: by default POST if there is a body, else GET.
        body: the class of the body of a POST.
        described: whether `/openapi.json` lists a path without a body.
        keyless: whether it needs no API key.
        operator: whether it is for operators' keys only.
        counted: whether a GET counts as a request of a key. The replies of most have some hundred bytes, or
            are for operators, whose monitors poll them.
        answers: whether a request asks for answers of the model, so that the key's limit of answers holds.
    """

    def __init__(
        self,
        path: str,
        handler: Handler,
        *,
        methods: Sequence[str] = (),
        body: type[BaseModel] | None = None,
        described: bool = False,
        keyless: bool = False,
        operator: bool = False,
        counted: bool = False,
        answers: bool = True,
    ):
        super().__init__(path, handler, methods=methods or ("GET" if body is None else "POST",))
        self.body, self.described = body, described
        self.keyless, self.operator, self.counted, self.answers = keyless, operator, counted, answers
