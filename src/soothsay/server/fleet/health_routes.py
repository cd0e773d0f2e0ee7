"""`/health` and `/ready`: whether engines run, and whether the server would answer another request."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from soothsay.server.access.accounts import Account
from soothsay.server.access.api_keys import KeyFileError, KeyRing
from soothsay.server.fleet.canary import Watch
from soothsay.server.fleet.engine_fleet import Fleet
from soothsay.server.fleet.replica import EngineState
from soothsay.server.fleet.replica_routes import facts
from soothsay.server.http.api_route import ApiRoute


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
