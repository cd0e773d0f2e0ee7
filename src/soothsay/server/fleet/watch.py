"""Watches over the engines: asks them for short answers, and tells what is known of them.

`/health` and `/ready` say whether engines run. `/replicas` says how many there are, and changes that.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from secrets import token_hex
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from soothsay.core.params import SamplingParams
from soothsay.core.tenant import Tenant
from soothsay.server.access.accounts import Account
from soothsay.server.access.api_keys import KeyFileError, KeyRing
from soothsay.server.engines.engine_messages import RequestOptions
from soothsay.server.fleet.engine_fleet import Fleet
from soothsay.server.fleet.engine_loop import EngineLoop
from soothsay.server.fleet.jobs import Job
from soothsay.server.fleet.replica import EngineState, Replica
from soothsay.server.http.api_errors import ApiError, invalid
from soothsay.server.http.api_route import ApiRoute
from soothsay.server.http.bodies import BodyReader, Whole
from soothsay.server.http.json_log import log
from soothsay.server.server_config import ServerConfig

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
"""For the canary's answer. Its first step reads the prompt, and the next ones draft and verify."""

PROMPT = [0]
"""A token that every model has."""

FIRST = -(2**62)
"""Priority of the canary: users' requests in the waiting line must not make it late."""

TICK = 0.25
"""Longest time between two looks at the engine, in seconds."""

RETRY = 2.0
"""Seconds after a failed canary until the next one."""


class Canary:
    """Finds out whether an engine answers, and kills an engine that hangs.

    A canary is a request of the server's own. It goes the whole way of a user's request, with the model's own
    drafter: through the pipe, the waiting line, prefill, drafting and verification, and back. Tokens of
    users' answers prove the same, so a canary is sent only when there were none for a while. It has a tenant
    of its own, so it sees nothing of others and leaves nothing to them. Metrics do not count it.

    Args:
        loop: passes canaries to the engine.
        engine: to watch.
        drafter: the name of the model's own drafter.
        config: how often to ask, and how long to wait.
    """

    def __init__(self, loop: EngineLoop, engine: Replica, drafter: str, config: ServerConfig):
        self._loop, self._engine, self._drafter, self._config = loop, engine, drafter, config
        self._options = RequestOptions(priority=FIRST, tenant=Tenant("canary", token_hex(16)))
        self._failure: tuple[float, ApiError] | None = None  # of the last canary, and when it failed
        self._asking: asyncio.Task[None] | None = None
        self._asked_at = -math.inf  # when the last canary ended, from `time.monotonic`

    @property
    def failure(self) -> ApiError | None:
        """Why the engine does not answer, as far as is known; None if the last sign was good."""
        if self._failure is None or self._failure[0] < (self._engine.answered_at or 0.0):
            return None
        return self._failure[1]

    @property
    def problem(self) -> str | None:
        """Why the engine should get no requests now; None if it should."""
        engine = self._engine
        if engine.state is not EngineState.OK:
            return engine.state
        if self.failure is not None:
            return f"the engine does not answer: {self.failure.message}"
        if engine.answered_at is None:
            return "the engine has not answered since it was started"
        return None

    @property
    def status(self) -> str:
        """The engine's state in a word or two; "ok" if it does what it should.

        An engine that is late with an answer may be busy: that is no failure. `look` sees whether it hangs.
        """
        failed = self.failure is not None and self.failure.code != "timeout"
        return "engine failing" if failed and self._engine.state is EngineState.OK else self._engine.state

    def look(self) -> None:
        """Kill the engine if it hangs, and send it a canary if it is time."""
        try:
            self._check_pulse()
        except Exception:  # the watch must go on
            log.error("watch failed", exc_info=True)
        if self._is_due() and (self._asking is None or self._asking.done()):
            self._asking = asyncio.create_task(self._ask())

    def stop(self) -> None:
        """Give up the canary under way."""
        if self._asking is not None:
            self._asking.cancel()

    def _is_due(self) -> bool:
        """Whether it is time for a canary."""
        engine, now = self._engine, time.monotonic()
        if engine.state is not EngineState.OK:
            return False
        if self.failure is not None or engine.answered_at is None:
            return now - self._asked_at >= min(RETRY, self._config.canary_interval)
        return now - engine.answered_at >= self._config.canary_interval

    async def _ask(self) -> None:
        """Send a canary, and note how it ends."""
        engine = self._engine
        job = Job([PROMPT], PARAMS, self._options, self._drafter, self._config.canary_timeout, counted=False)
        try:
            await self._loop.submit(job, engine)
            async for _ in job:
                pass
        except ApiError as error:
            self._failure = time.monotonic(), error
            if engine.state is EngineState.OK:
                log.error("canary failed", extra={"reason": error.message})
        else:
            self._failure = None
        finally:
            self._loop.cancel(job)
            self._asked_at = time.monotonic()

    def _check_pulse(self) -> None:
        """Kill an engine that hangs: in a step, or before its first answer."""
        engine, now = self._engine, time.monotonic()
        if engine.pid is None:
            return
        if engine.answered_at is None:
            silent, limit = now - engine.started_at, self._config.start_timeout
        else:
            silent, limit = now - (engine.pinged_at or now), self._config.stall_timeout
            engine.ping()
        if silent > limit:
            log.critical("engine does not answer", extra={"seconds": round(silent, 1)})
            engine.kill()


class Watch:
    """Watches over all engines of a fleet, with a canary for each.

    Args:
        loop: passes canaries to the engines.
        fleet: the engines. They may come and go.
        config: see `Canary`.
    """

    def __init__(self, loop: EngineLoop, fleet: Fleet, config: ServerConfig):
        self._loop, self._fleet, self._config = loop, fleet, config
        self._canaries: dict[Replica, Canary] = {}

    @property
    def problem(self) -> str | None:
        """Why the server should get no requests now; None if it should."""
        problems = [canary.problem for canary in self._canaries.values()]
        if None not in problems:
            return problems[0] if problems else self._fleet.state
        if self._loop.in_flight >= self._loop.max_in_flight:
            return "too many requests are waiting"
        return None

    @property
    def status(self) -> str:
        """The state of the engines in a word or two; "ok" if one does what it should."""
        states = [canary.status for canary in self._canaries.values()]
        return EngineState.OK if EngineState.OK in states else next(iter(states), self._fleet.state)

    @property
    def answer_age(self) -> float | None:
        """Seconds since the engines' last token; None if there was none since they were started."""
        answers = [replica.answered_at for replica in self._fleet.replicas]
        last = max((answer for answer in answers if answer is not None), default=None)
        return None if last is None else time.monotonic() - last

    async def run(self) -> None:
        """Watch, until cancelled."""
        model, canaries = self._fleet.model, self._canaries
        try:
            while True:
                for replica in set(canaries) - set(self._fleet.replicas):
                    canaries.pop(replica).stop()
                for replica in self._fleet.replicas:
                    if replica not in canaries:
                        canaries[replica] = Canary(self._loop, replica, model.drafter, self._config)
                    canaries[replica].look()
                await asyncio.sleep(min(TICK, self._config.canary_interval / 4))
        finally:
            for canary in canaries.values():
                canary.stop()


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
        else:
            fleet.scale(_checked(fleet, body.replicas) if isinstance(body.replicas, int) else None)
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
        ApiRoute("/health", health, described=True, keyless=True, level=logging.DEBUG),
        ApiRoute("/v1/health", health, keyless=True, level=logging.DEBUG),
        ApiRoute("/ping", health, methods=["GET", "POST"], keyless=True, level=logging.DEBUG),
        ApiRoute("/ready", ready, described=True, keyless=True, level=logging.DEBUG),
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
