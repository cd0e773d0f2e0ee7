"""Gives jobs to engines, and moves them to others when an engine dies, is drained or is late."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from soothsay.core.engine_load import EngineLoad
from soothsay.core.tenant import prefix_digests
from soothsay.server.engines import engine_messages as messages
from soothsay.server.engines.engine_messages import LoadedModel
from soothsay.server.fleet.jobs import Flight
from soothsay.server.fleet.replica import EngineState, Replica
from soothsay.server.fleet.router import Router
from soothsay.server.http.api_errors import ApiError, try_later
from soothsay.server.http.json_log import log

IDLE_LOSSES = 2
"""Engines that may die under a job without a new token of it between, until it is suspected to kill them.
Suspects begin one at a time, and fail if another engine dies under them before they have a new token."""

LOSSES = 50
"""Engines that may die under a job at all."""

PATIENCE = 10.0
"""Seconds that jobs wait for the next engine if there is none. If it takes longer, they fail."""

LATE = 1.0
"""Seconds of silence after which the answers under way at an engine are begun at another one too, and new
jobs go elsewhere. An engine whose steps take long gets three times its longest one."""

LATE_TO_BEGIN = 15.0
"""The same for answers without a token. A long prompt may be read in one step."""

ARRIVING = 4
"""Answers of drained engines that an engine reads at a time. The others flow meanwhile, and a new request at
this engine waits for few of them."""

JobNews = messages.Admitted | messages.EngineUpdate
"""What is told of jobs."""


class Dispatcher:
    """The jobs of a fleet, and which engine has which. Call all methods from the event loop.

    Args:
        replicas: the fleet's engines. The fleet changes the list.
        model: what they have loaded.
        tell: called with what engines say of jobs.
    """

    def __init__(self, replicas: Sequence[Replica], model: LoadedModel, tell: Callable[[JobNews], None]):
        self.moved = 0  # times that a job went on at another engine
        self._replicas, self._block_size, self._tell = replicas, model.block_size, tell
        self._router = Router[Replica](model.block_size, model.num_blocks)
        self._flights: dict[int, Flight] = {}
        self._calls: dict[int, Flight] = {}  # by the numbers that engines know
        self._further_calls = itertools.count(1)

    @property
    def load(self) -> EngineLoad:
        """The load of all engines together. The share of memory in use is their mean."""
        loads = [replica.load for replica in self._replicas]
        usage = sum(load.kv_usage for load in loads) / max(len(loads), 1)
        return EngineLoad(sum(one.running for one in loads), sum(one.waiting for one in loads), usage)

    @property
    def restart_in(self) -> float | None:
        """Seconds until an engine is started again; None if one runs or starts now."""
        waits = [replica.restart_in for replica in self._replicas]
        return min((wait for wait in waits if wait is not None), default=None) if None not in waits else None

    @property
    def serving(self) -> list[Replica]:
        """The engines that take jobs. Those that are drained take some only if there are no others."""
        ready = [replica for replica in self._replicas if replica.state is EngineState.OK]
        return [replica for replica in ready if not replica.draining] or ready

    def submit(self, submit: messages.Submit, replica: Replica | None = None) -> None:
        """Give a job to the best engine. `replica`: to this one, and to no other."""
        self._flights[submit.job] = flight = Flight(submit, pinned=replica is not None)
        if replica is None:
            self._place(flight)
        else:
            self._call(flight, replica)

    def cancel(self, job: int) -> None:
        """Give up a job. Does nothing if it has ended."""
        if (flight := self._flights.pop(job, None)) is not None:
            self._release(flight)
            self._try_suspects()

    def forget_all(self) -> None:
        """Forget all jobs, because the engines end."""
        self._flights.clear()
        self._calls.clear()

    # what engines say

    def admitted(self, replica: Replica, admitted: messages.Admitted) -> None:
        """An engine has a job in its waiting line."""
        if (flight := self._flight(replica, admitted.job)) is not None:
            self._tell(replace(admitted, job=flight.number))

    def deliver(self, replica: Replica, update: messages.EngineUpdate) -> None:
        """An engine has news of jobs. Tell what of it is new to clients."""
        answers: list[messages.AnswerUpdate] = []
        for change in update.answers:
            flight = self._flight(replica, change.job)
            if flight is None:
                continue  # it was cancelled or moved while the message was on its way
            if flight.successor is replica and flight.runner is not None:
                if flight.may_take_over(change):
                    self._leave(flight, flight.runner)
                replica.send(messages.CatchUp(change.job, flight.emitted))
            if (new := flight.take(replica, change)) is not None:
                flight.numerics = replica.numerics
                answers.append(new)
        ended: dict[int, ApiError | None] = {}
        for call, failure in update.ended.items():
            flight = self._flight(replica, call)
            if flight is not None and flight.runner is replica:
                ended[flight.number] = failure
                self._end(flight, replica)
            elif flight is not None:  # it has refused what another engine does
                self._leave(flight, replica)
        self._tell(replace(update, answers=answers, ended=ended, load=self.load))
        self._try_suspects()

    def welcome(self, replica: Replica) -> None:
        """An engine has loaded the model. Give it the jobs that wait for one."""
        others = [one for one in self.serving if one is not replica]
        for difference in others[0].numerics.differences(replica.numerics) if others else ():
            log.warning("numeric modes differ", extra={"replica": replica.number, "difference": difference})
        self._place_all()
        self.fail_stranded()

    def lose(self, replica: Replica) -> None:
        """An engine has died. Its jobs go on at others, or wait for one."""
        self._router.forget(replica)
        for flight in self._flights_at(replica):
            heir = flight.successor if flight.runner is replica else None
            del self._calls[flight.calls[replica]]
            flight.lose(replica)
            if flight.has_ended:  # it died before it said that the job has ended
                self._finish(flight, None)
            elif flight.pinned or flight.idle_losses > IDLE_LOSSES or flight.losses >= LOSSES:
                self._finish(flight, self.no_engine())
            elif heir is not None:
                heir.send(messages.CatchUp(flight.calls[heir], flight.emitted))
        if (self.restart_in or 0) > PATIENCE:  # engines die again and again
            for flight in self._homeless():
                self._finish(flight, self.no_engine())
        self._place_all()
        self._tell(messages.EngineUpdate(time.monotonic(), [], {}, self.load, {}))

    # moving jobs

    def relieve(self) -> None:
        """Let the answers of engines that are late go on at others."""
        for replica in self._replicas:
            if replica.state is EngineState.OK and replica.is_late(LATE):
                patient = not replica.is_late(LATE_TO_BEGIN)
                self.hand_over(replica, begun=patient)

    def hand_over(self, replica: Replica, *, begun: bool = False) -> bool:
        """Let other engines begin with an engine's jobs too, and take over when they are as far.

        If the engine is drained, they take a few jobs, and the next call continues. The newest come first:
        they have the most to say, and the least to read.

        Args:
            replica: the engine.
            begun: only jobs that have a token.

        Returns:
            Whether the engine has no jobs.
        """
        flights = [flight for flight in self._flights_at(replica) if not flight.pinned]
        for flight in reversed(flights):
            if flight.runner is replica and flight.successor is None and (flight.has_begun or not begun):
                self._place(flight)
        return not flights

    def has_jobs(self, replica: Replica) -> bool:
        """Whether users' jobs are at an engine."""
        return any(not flight.pinned for flight in self._flights_at(replica))

    def removed(self, replica: Replica) -> None:
        """An engine has left the fleet."""
        self._router.forget(replica)
        self.fail_stranded()

    def fail_stranded(self) -> None:
        """Fail jobs whose numeric mode no engine has, or could have once it has loaded."""
        if any(replica.state is not EngineState.OK for replica in self._replicas):
            return
        offered = {None, *(replica.numerics for replica in self._replicas)}
        for flight in self._homeless():
            if flight.numerics not in offered:
                message = "the engine of this answer has ended, and no other one has its numeric mode"
                self._finish(flight, ApiError(503, message, "engine_stopped"))

    def no_engine(self) -> ApiError:
        """The error while no engine is loaded. Clients are told when the next one starts."""
        message = "the engine has stopped, and is starting again; try again later"
        return try_later(message, "engine_stopped", seconds=max(self.restart_in or 0, 1))

    def _place_all(self) -> None:
        """Place the jobs that have no engine. At most one of the suspects may be at an engine."""
        suspects = self._suspects()
        held = suspects[1:] if all(flight.runner is None for flight in suspects) else suspects
        for flight in self._homeless():
            if flight not in held:
                self._place(flight)

    def _try_suspects(self) -> None:
        """Place the next suspect if none is at an engine."""
        if any(flight.runner is None for flight in self._suspects()):
            self._place_all()

    def _suspects(self) -> list[Flight]:
        """Jobs that may be what kills engines."""
        return [flight for flight in self._flights.values() if flight.idle_losses >= IDLE_LOSSES]

    def _place(self, flight: Flight) -> None:
        """Give a job to the best engine that does not have it. The job stays as it is if there is none."""
        if (replica := self._choose(flight)) is not None:
            self.moved += flight.losses > 0 or flight.runner is not None
            self._call(flight, replica)

    def _call(self, flight: Flight, replica: Replica) -> None:
        """Send a job to an engine. The first time, its number is the job's own."""
        call = -next(self._further_calls) if flight.num_calls else flight.number
        self._calls[call] = flight
        replica.send(flight.board(replica, call))

    def _flight(self, replica: Replica, call: int) -> Flight | None:
        """The job of an engine's message; None if the engine does not have it any more."""
        flight = self._calls.get(call)
        return flight if flight is not None and flight.calls.get(replica) == call else None

    def _choose(self, flight: Flight) -> Replica | None:
        others = [one for one in self.serving if one is not flight.runner]
        fitting = [one for one in others if flight.numerics in (None, one.numerics)]
        if flight.runner is not None:  # it need not move to an engine that is no better
            fitting = [one for one in fitting if not one.draining and not one.is_late(LATE)]
            if not flight.runner.is_late(LATE):  # it moves because this engine is drained
                fitting = [one for one in fitting if self._num_arriving(one) < ARRIVING]
        best = [one for one in fitting if one.answered_at is not None and not one.is_late(LATE)] or fitting
        if len(self._replicas) == 1 or not best:
            return next(iter(best), None)
        texts = flight.texts[:: flight.submit.params.n]
        prompts = [(len(text), self._digests(flight, text)) for text in texts]
        options = flight.submit.options
        session = (options.tenant, options.session) if options.session else None
        replica = self._router.choose(self._answers(best), prompts, session)
        for _, digests in prompts:
            self._router.note(replica, digests)
        return replica

    def _num_arriving(self, replica: Replica) -> int:
        """The number of answers that an engine has got, and that other engines still give."""
        return sum(flight.size for flight in self._flights.values() if flight.successor is replica)

    def _answers(self, replicas: Sequence[Replica]) -> dict[Replica, int]:
        """The number of answers under way at each engine."""
        answers = dict.fromkeys(replicas, 0)
        for flight in self._flights.values():
            for replica in (flight.runner, flight.successor):
                if replica in answers:
                    answers[replica] += flight.size
        return answers

    def _digests(self, flight: Flight, text: Sequence[int]) -> list[bytes]:
        tokens = np.array(text, dtype=np.int64)
        options = flight.submit.options
        return [*prefix_digests(options.tenant, tokens, self._block_size, options.adapter)]

    def _flights_at(self, replica: Replica) -> list[Flight]:
        return [one for one in self._flights.values() if replica in (one.runner, one.successor)]

    def _homeless(self) -> list[Flight]:
        """Jobs that no engine has."""
        return [flight for flight in self._flights.values() if flight.runner is None]

    def _leave(self, flight: Flight, replica: Replica) -> None:
        """Take a job from an engine."""
        replica.send(messages.Cancel(self._drop(flight, replica)))

    def _drop(self, flight: Flight, replica: Replica) -> int:
        """Note that an engine does not have a job any more. Returns the job's number there."""
        call = flight.calls[replica]
        del self._calls[call]
        flight.leave(replica)
        return call

    def _release(self, flight: Flight) -> None:
        for replica in (flight.successor, flight.runner):
            if replica is not None:
                self._leave(flight, replica)

    def _end(self, flight: Flight, replica: Replica) -> None:
        """A job has ended at an engine, whose cache has its texts now."""
        del self._flights[flight.number]
        self._drop(flight, replica)
        self._release(flight)
        if len(self._replicas) > 1:
            for text in flight.texts:
                self._router.note(replica, self._digests(flight, text))

    def _finish(self, flight: Flight, failure: ApiError | None) -> None:
        del self._flights[flight.number]
        self._release(flight)
        self._tell(messages.EngineUpdate(time.monotonic(), [], {flight.number: failure}, self.load, {}))
