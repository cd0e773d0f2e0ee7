"""The OpenAPI description of the routes, made from the classes of their bodies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic.json_schema import models_json_schema

from soothsay import __version__
from soothsay.server.http.api_route import ApiRoute

REFERENCE = "#/components/schemas/{model}"


def describe(routes: Iterable[ApiRoute]) -> dict[str, Any]:
    """The description of the routes that have a body or are to be described, for `GET /openapi.json`."""
    told = [route for route in routes if route.body is not None or route.described]
    kinds = [(kind, "validation") for kind in dict.fromkeys(route.body for route in told) if kind]
    _, schemas = models_json_schema(kinds, ref_template=REFERENCE)  # type: ignore[arg-type]
    paths: dict[str, Any] = {}
    for route in told:
        method = "get" if route.body is None else "post"
        paths.setdefault(route.path, {})[method] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "soothsay", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas.get("$defs", {})},
    }


def _operation(route: ApiRoute) -> dict[str, Any]:
    answer = {"200": {"description": "The answer"}}
    if route.body is None:
        return {"responses": answer}
    schema = {"$ref": REFERENCE.format(model=route.body.__name__)}
    return {
        "summary": (route.body.__doc__ or "").partition("\n")[0],
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {**answer, "4XX": {"description": "An error"}},
    }
