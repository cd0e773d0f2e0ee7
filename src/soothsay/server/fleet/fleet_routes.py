"""`/health` and `/ready`: whether engines run. `/replicas`: how many there are, and how to change that."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from soothsay.server.access.accounts import Account
from soothsay.server.access.api_keys import KeyFileError, KeyRing
from soothsay.server.fleet.canary import Watch
from soothsay.server.fleet.engine_fleet import Fleet
from soothsay.server.fleet.replica import EngineState, Replica
from soothsay.server.http.api_errors import ApiError, invalid
from soothsay.server.http.api_route import ApiRoute
from soothsay.server.http.bodies import BodyReader, Whole


class ReplicasRequest(BaseModel):
    """The body of `POST /replicas`: the number of engines, or the engine that shall be drained."""

    model_config = ConfigDict(extra="forbid", strict=True)

    replicas: Whole | Literal["auto"] | None = None  # "auto": by the rule
    drain: Whole | None = None  # the number of an engine


def replica_routes(fleet: Fleet, bodies: BodyReader) -> list[ApiRoute]:
    """The routes to show and to change the engines of a fleet."""

    async def show(_: Request) -> Response:
        return JSONResponse(_replica_state(fleet))

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
        return JSONResponse(_replica_state(fleet))

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


def _replica_state(fleet: Fleet) -> dict[str, Any]:
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


def health_routes(fleet: Fleet, watch: Watch, keys: KeyRing | None) -> list[ApiRoute]:
    """The routes for load balancers and supervisors. None of them needs an API key.

    If the server has keys, only an operator's key shows more than the status: load, process ids and reasons
    are nobody else's business.
    """

    def shows_more(http: Request) -> bool:
        account: Account | None = http.state.account
        return keys is None or (account is not None and account.key.operator)

    async def health(http: Request) -> Response:
        """Whether an engine runs and answers. Engines that do not run are restarted without a request."""
        state = _state(fleet, watch) if shows_more(http) else {"status": watch.status}
        return JSONResponse(state, 200 if watch.status == EngineState.OK else 503)

    async def ready(http: Request) -> Response:
        """Whether the server would answer another request. A load balancer should use another one if not."""
        problem = watch.problem
        try:
            if keys is not None:
                keys.check()
        except KeyFileError:
            problem = "the API keys cannot be read"
        if problem is None:
            return JSONResponse({"status": "ready"})
        reason = {"reason": problem} if shows_more(http) else {}
        return JSONResponse({"status": "not ready", **reason}, 503)

    return [
        ApiRoute("/health", health, described=True, keyless=True),
        ApiRoute("/v1/health", health, keyless=True),
        ApiRoute("/ping", health, methods=["GET", "POST"], keyless=True),
        ApiRoute("/ready", ready, described=True, keyless=True),
    ]


def _state(fleet: Fleet, watch: Watch) -> dict[str, Any]:
    replicas, age, wait = fleet.replicas, watch.answer_age, fleet.jobs.restart_in
    state: dict[str, Any] = {
        "status": watch.status,
        "engine_pid": replicas[0].pid if replicas else None,
        "engine_restarts": fleet.restarts,
        "seconds_since_answer": None if age is None else round(age, 1),
        "seconds_to_restart": None if wait is None else round(wait, 1),
    }
    if len(replicas) > 1:
        state["replicas"] = [facts(replica) for replica in replicas]
    return state
