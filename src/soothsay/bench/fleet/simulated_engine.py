"""An engine without a model: the scheduler and the prefix cache are real, and time is counted."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from soothsay.bench.fleet.step_times import StepTimes
from soothsay.bench.fleet.trace import TracedRequest, token_ids
from soothsay.config import EngineConfig
from soothsay.core.cache import BlockAllocator
from soothsay.core.params import SamplingParams
from soothsay.core.request import Request
from soothsay.core.tree import DraftTree
from soothsay.core.turn import Turn
from soothsay.core.verify import Verdict
from soothsay.drafters.base import NoDrafter
from soothsay.engine.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Speculation:
    """What draft trees bring, on average."""

    nodes: int = 1  # of a tree, the root included
    tokens: float = 1.0  # tokens that an answer gets in a step; at most `nodes`


ROUNDING = 1e-9
"""Added before numbers are rounded down, so that 10 * 1.1 is 11."""

NOTHING = -1
"""A token that no answer has."""


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request at an engine, and its results so far. Times are in seconds since the beginning."""

    traced: TracedRequest
    due: float  # when it was sent
    request: Request = field(repr=False)
    said: list[int] = field(repr=False)  # the answer's tokens
    steps: int = 0  # steps that brought tokens
    first: float = 0.0  # when its first token came
    end: float = 0.0

    @classmethod
    def of(cls, traced: TracedRequest, due: float, block_size: int, speculation: Speculation) -> Self:
        """A request that no engine has yet."""
        text, said = token_ids(traced.prompt).tolist(), token_ids([traced.answer]).tolist()
        params = SamplingParams(ignore_eos=True, max_tokens=len(said))
        limit, drafter = len(text) + len(said), _Drafter(speculation.nodes)
        request = Request(text, params, seed=0, limit=limit, drafter=drafter, block_size=block_size)
        return cls(traced, due, request, said)

    @property
    def digests(self) -> list[bytes]:
        """Digests of the full blocks of the prompt and the answer so far."""
        return [self.request.digest(block) for block in range(self.request.num_full_blocks)]


class SimulatedEngine:
    """An engine that steps in simulated time.

    Args:
        config: with `kv_tokens` filled in.
        times: of its steps.
        speculation: what its drafters bring.
        clock: simulated seconds.
    """

    def __init__(
        self, config: EngineConfig, times: StepTimes, speculation: Speculation, clock: Callable[[], float]
    ):
        self._times, self._speculation, self._clock = times, speculation, clock
        blocks = (config.kv_tokens or 0) // config.block_size
        allocator = BlockAllocator(blocks, config.block_size, share=config.prefix_caching)
        self._allocator = allocator
        self._scheduler = Scheduler(config, allocator, clock=clock)
        self._requests: dict[Request, SimulatedRequest] = {}
        self._turns: list[Turn] = []

    @property
    def num_answers(self) -> int:
        """Answers under way, those that wait included."""
        return len(self._requests)

    @property
    def is_stepping(self) -> bool:
        """Whether a step has begun and has not ended."""
        return bool(self._turns)

    def add(self, simulated: SimulatedRequest) -> None:
        """Put a request into the waiting line."""
        self._requests[simulated.request] = simulated
        self._scheduler.add(simulated.request)

    def begin_step(self) -> float:
        """Begin a step with all waiting requests. Returns its seconds; 0 if there is nothing to do."""
        self._turns = self._scheduler.schedule()
        if not self._turns:
            return 0.0
        for turn in self._turns:
            if turn.reaches_end:
                self._speculate(turn, self._requests[turn.request])
        ones = [turn for turn in self._turns if turn.num_tokens == 1]
        chunks = [turn for turn in self._turns if turn.num_tokens > 1]
        decoded = sum(turn.request.cached for turn in ones) / max(len(ones), 1)
        shared = sum(self._num_shared(turn.request) for turn in ones) / max(len(ones), 1)
        rows = sum(turn.num_tokens for turn in chunks)
        read = sum(turn.num_tokens * turn.request.cached for turn in chunks) / max(rows, 1)
        nodes = sum(max(turn.num_nodes - 1, 0) for turn in self._turns)
        return self._times(len(ones), decoded, shared, rows + nodes, read if chunks else decoded)

    def end_step(self) -> list[SimulatedRequest]:
        """Take in the step that began last, at its end. Returns the requests that have ended."""
        turns, self._turns = self._turns, []
        self._scheduler.update(turns)
        ended = []
        for simulated in [self._requests[turn.request] for turn in turns]:
            request = simulated.request
            request.pieces.clear()
            if request.num_output and simulated.steps == 0:
                simulated.first = self._clock()
            simulated.steps = request.stats.steps
            if request.finish_reason is not None:
                simulated.end = self._clock()
                ended.append(self._requests.pop(request))
        return ended

    def _num_shared(self, request: Request) -> int:
        """Number of leading tokens whose KV blocks other running requests have too."""
        references = self._allocator.num_references
        count = bisect_left(request.blocks, True, key=lambda block: references(block) == 1)
        return count * request.block_size

    def _speculate(self, turn: Turn, simulated: SimulatedRequest) -> None:
        """Give a turn a tree whose first nodes are right, and what the target says of it.

        After i steps, the request has got `i * tokens` tokens, rounded down.
        """
        request, mean, steps = turn.request, self._speculation.tokens, simulated.steps
        said, rest = request.num_output, simulated.said
        nodes = min(request.max_nodes, self._speculation.nodes)
        count = min(
            int((steps + 1) * mean + ROUNDING) - int(steps * mean + ROUNDING), nodes, len(rest) - said
        )
        turn.tree = DraftTree(int(request.tokens[-1]))
        turn.tree.extend((rest[said : said + count - 1] + [NOTHING] * nodes)[: nodes - 1])
        path = [*range(1, count)]
        turn.authors = dict.fromkeys(path, "simulated")
        turn.verdict = Verdict(path, rest[said : said + count])


class _Drafter(NoDrafter):
    """Gives the size of trees. The engine never asks it for a tree."""

    def __init__(self, nodes: int):
        self.max_nodes = nodes
