"""Waits until an actor has called. Ray may need long to find a machine for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import ray
from ray.exceptions import RayError

from soothsay.server.cluster.switchboard import Number, Switchboard
from soothsay.server.http.json_log import log

PATIENCE = 10.0
"""Seconds after which the log says that an actor still waits for a machine."""


def first_call(
    switchboard: Switchboard,
    number: Number,
    run: ray.ObjectRef,
    cores: int,
    wanted: Callable[[], bool] = lambda: True,
) -> Connection | None:
    """The connection of an actor that calls a number; None if it ends before.

    Args:
        switchboard: expects the number.
        number: which the actor has got.
        run: the actor's task, which ends with it.
        cores: that the actor needs.
        wanted: whether to wait any longer.
    """
    begin, told = time.monotonic(), False
    while wanted():
        if (pipe := switchboard.answer(number, 0.1)) is not None:
            return pipe
        if ray.wait([run], timeout=0)[0]:
            return None
        if not told and time.monotonic() - begin > PATIENCE:
            told = True
            log.warning("waiting for a machine of the cluster with free cores: %d", cores)
    return None


def end_of(run: ray.ObjectRef) -> str:
    """Why an actor has ended."""
    try:
        ray.get(run, timeout=1.0)
    except RayError as error:
        return str(error)
    return "it has returned"
