"""Runs requests on an engine, step by step, for benchmarks that time its steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from soothsay import LLM, Request, SamplingParams
from soothsay.core.tenant import EVERYBODY, Tenant
from soothsay.drafters.registry import DrafterSpec
from soothsay.errors import SoothsayError, reason_of


@contextmanager
def running(
    llm: LLM,
    asked: Sequence[tuple[list[int], SamplingParams]],
    drafter: DrafterSpec,
    tenant: Tenant = EVERYBODY,
    *,
    traced: bool = False,
) -> Iterator[list[Request]]:
    """Add a request for each prompt to the engine. None is left in it at the end, also on Ctrl-C.

    Args:
        llm: without other requests.
        asked: token ids of the prompts, and how to answer them.
        drafter: of all of them.
        tenant: of all of them.
        traced: whether they keep a `StepTrace` of each step.

    Raises `RequestError` if a prompt does not fit.
    """
    requests = [
        one
        for prompt, params in asked
        for one in llm.requests(prompt, params, drafter=drafter, tenant=tenant, traced=traced)
    ]
    try:
        for request in requests:
            llm.engine.add(request)
        yield requests
    finally:
        for request in requests:
            llm.engine.cancel(request)


def answer_of(request: Request) -> list[int]:
    """The tokens of an ended request. Raises `SoothsayError` if the engine failed at it."""
    if request.failure is not None:
        reason = reason_of(request.failure)
        raise SoothsayError(f"the engine failed at a request: {reason}") from request.failure
    tokens: list[int] = request.tokens[request.num_prompt :].tolist()
    return tokens
