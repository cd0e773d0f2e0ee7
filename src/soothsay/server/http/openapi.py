"""The OpenAPI description of the routes, made from the classes of their bodies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from soothsay import __version__

REFERENCE = "#/components/schemas/{model}"


def describe(bodies: Mapping[str, type[BaseModel]], paths: tuple[str, ...]) -> dict[str, Any]:
    """The description, as `GET /openapi.json` gives it.

    Args:
        bodies: paths that take a POST, each with the class of its body.
        paths: paths that take a GET.
    """
    kinds = [(kind, "validation") for kind in dict.fromkeys(bodies.values())]
    _, schemas = models_json_schema(kinds, ref_template=REFERENCE)  # type: ignore[arg-type]
    posts = {
        path: {
            "post": {
                "summary": (kind.__doc__ or "").partition("\n")[0],
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": _reference(kind)}},
                },
                "responses": {"200": {"description": "The answer"}, "4XX": {"description": "An error"}},
            }
        }
        for path, kind in bodies.items()
    }
    gets = {path: {"get": {"responses": {"200": {"description": "The answer"}}}} for path in paths}
    return {
        "openapi": "3.1.0",
        "info": {"title": "soothsay", "version": __version__},
        "paths": {**posts, **gets},
        "components": {"schemas": schemas.get("$defs", {})},
    }


def _reference(kind: type[BaseModel]) -> dict[str, str]:
    return {"$ref": REFERENCE.format(model=kind.__name__)}
