"""`/replicas`: how many engines there are, and how an operator changes that."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from soothsay.server.fleet.engine_fleet import Fleet
from soothsay.server.fleet.replica import Replica
from soothsay.server.http.api_errors import ApiError, invalid
from soothsay.server.http.api_route import ApiRoute
from soothsay.server.http.body_reader import BodyReader
from soothsay.server.http.body_types import Whole


class ReplicasRequest(BaseModel):
    """The body of `POST /replicas`: the number of engines, or the engine that shall be drained."""

    model_config = ConfigDict(extra="forbid", strict=True)

    replicas: Whole | Literal["auto"] | None = None  # "auto": by the rule
    drain: Whole | None = None  # the number of an engine


def replica_routes(fleet: Fleet, bodies: BodyReader) -> list[ApiRoute]:
    """The routes to show and to change the engines of a fleet."""

    async def show(_: Request) -> Response:
        return JSONResponse(_state(fleet))

    async def change(http: Request) -> Response:
        body = await bodies.read(http, ReplicasRequest, lambda body: body)
        if (body.replicas is None) == (body.drain is None):
            raise ApiError(400, "give either replicas or drain", "invalid_value")
        if body.drain is not None:
            fleet.drain(_engine(fleet, body.drain))
        elif isinstance(body.replicas, int):
            fleet.scale(_checked(fleet, body.replicas))
        else:
            fleet.scale(None)
        return JSONResponse(_state(fleet))

    return [
        ApiRoute("/replicas", show, described=True, operator=True),
        ApiRoute("/replicas", change, body=ReplicasRequest, operator=True, answers=False),
    ]


def facts(replica: Replica) -> dict[str, Any]:
    """What `/health` says of one of several engines."""
    return {
        "replica": replica.number,
        "status": "draining" if replica.draining else replica.state,
        "engine_pid": replica.pid,
        "restarts": replica.restarts,
        "running": replica.load.running,
        "waiting": replica.load.waiting,
        "kv_usage": round(replica.load.kv_usage, 3),
        "numeric_mode": replica.numerics.mode,
    }


def _state(fleet: Fleet) -> dict[str, Any]:
    bounds, fixed = fleet.scaler.bounds, fleet.scaler.fixed
    return {
        "replicas": len(fleet.lasting),
        "least": bounds.least,
        "most": bounds.most,
        "set_to": "auto" if fixed is None else fixed,
        "engines": [facts(replica) for replica in fleet.replicas],
    }


def _checked(fleet: Fleet, size: int) -> int:
    """A number within the bounds of the command line. Raises `ApiError` for another one."""
    bounds = fleet.scaler.bounds
    if size != bounds.clamp(size):
        message = f"this server has {bounds.least} to {bounds.most} engines (soothsay serve --replicas)"
        raise invalid("replicas", message)
    return size


def _engine(fleet: Fleet, number: int) -> Replica:
    """The engine with a number. Raises `ApiError` if there is none that is not drained already."""
    for replica in fleet.lasting:
        if replica.number == number:
            return replica
    raise ApiError(404, f"there is no engine {number} to drain", "not_found", param="drain")
