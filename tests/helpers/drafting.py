"""Requests for tests of trees alone, without an engine."""

from __future__ import annotations

from collections.abc import Sequence

from soothsay import SamplingParams
from soothsay.core.request import Request
from soothsay.drafters.base import NoDrafter

GREEDY = SamplingParams(temperature=0, max_tokens=50)


def make_request(
    tokens: Sequence[int] = (1, 2, 3), params: SamplingParams = GREEDY, *, nodes: int = 16
) -> Request:
    limit = len(tokens) + (params.max_tokens or 0)
    request = Request(tokens, params, seed=params.seed or 0, limit=limit, drafter=NoDrafter(None))  # type: ignore[arg-type]
    request.max_nodes = nodes
    return request
