"""The protocol of a drafter. All that makes a method differ from another is in `propose` and `observe`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

from torch import Tensor

from soothsay.config import EngineConfig
from soothsay.engine.cache import KVPool
from soothsay.engine.request import Request
from soothsay.engine.timing import StepTimes
from soothsay.engine.tree import DraftTree
from soothsay.engine.verify import Verdict
from soothsay.errors import DrafterError
from soothsay.model.transformer import Transformer
from soothsay.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Target:
    """What a drafter is built for: the model that verifies, and the shape of the memory it shares."""

    model: Transformer
    tokenizer: Tokenizer | None
    config: EngineConfig
    num_blocks: int  # of the KV pool; a drafter's own pool has as many, addressed alike
    path: Path | None = None  # where the model came from; its trained drafters are looked for there
    cache: KVPool | None = None  # the model's own keys and values; None where nothing is served
    times: Callable[[], StepTimes] | None = None  # of the model's passes, measured when first asked for


@dataclass(frozen=True, slots=True)
class Observation:
    """What one request's share of a step showed, before its new tokens are appended.

    Rows are the request's pending tokens `tokens[start : start + p]`, then its tree's nodes from 1 on. A
    prompt chunk that ends before the prompt does has no tree, no logits and no verdict.
    """

    request: Request
    start: int
    num_pending: int  # p
    taps: tuple[Tensor, ...]  # for each of the drafter's taps, [rows, hidden] float32
    tree: DraftTree | None = None
    logits: Tensor | None = None  # [nodes, V] of the target at every node, rejected ones included
    verdict: Verdict | None = None


class Drafter(ABC):
    """Guesses what comes next.

    One instance serves all requests of an engine that chose it; state of a request is kept under the request
    until `release`. Guesses can be wrong in any way without changing a word of the output: the worst a
    drafter can do is be slow.
    """

    taps: tuple[int, ...] = ()
    """Target layers whose input it wants to see; the number of layers means the last one's output."""

    max_nodes: int = 1
    """The largest tree it proposes, the root included."""

    least: float = 0.0
    """A tree that grows level by level stops where its last nodes are right less often than this, taken
    together: another level would not be worth its time. The controller sets it before it asks."""

    trained: bool = False
    """Whether it was made for its target: guesses that are never right then mean that something is wrong."""

    decisions: Mapping[str, int] = MappingProxyType({})
    """Of one that chooses among others, for each of them by name: in how many steps of requests it was asked;
    and under "none", in how many nobody was. Empty for all others."""

    @cached_property
    def name(self) -> str:
        """What it is called where its guesses are told of: its specification without options, which
        `build_drafter` sets, else its class.
        """
        return type(self).__name__

    @abstractmethod
    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """A tree for each request, rooted at its last committed token.

        Trees may be larger than `request.max_nodes` or deeper than `request.max_depth`; the engine then keeps
        the best-scored nodes. KV of a drafter's own may be written to slots up to the root's offset +
        `max_nodes` - 1.
        """

    def signal(self, request: Request) -> int:
        """Of what kind its guesses would be now, as far as it can tell in some tens of microseconds.

        Numbers mean nothing but that guesses differ: the controller learns what those of each are worth, and
        asks for them only where that pays. Few, so that there is something to learn from.
        """
        return 0

    def observe(self, observations: Sequence[Observation]) -> None:  # noqa: B027 - most drafters need not look
        """Learn from a step: every request of this drafter that took part, prompt chunks included."""

    def authors(self, request: Request, tree: DraftTree, nodes: Sequence[int]) -> list[str]:
        """Who guessed each of some nodes, by `name`. Asked after `propose` and before `observe`.

        Args:
            request: whose tree it is.
            tree: the one that was proposed, or what was kept of it.
            nodes: without the root; each stands behind the one that it hangs below, unless that is the root.
        """
        return [self.name] * len(nodes)

    def release(self, request: Request) -> None:  # noqa: B027
        """Forget a request: it has ended, or lost its blocks and will come again."""

    def reset(self) -> None:  # noqa: B027
        """Forget what was said in other requests. Never called while any runs."""


class NoDrafter(Drafter):
    """Plain decoding: a tree of one node."""

    def __init__(self, target: Target):
        self.target = target

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """The roots alone."""
        return [DraftTree(int(request.tokens[-1])) for request in requests]


def check_at_least_one(name: str, **numbers: int) -> None:
    """Raise `DrafterError` for an option of drafter `name` that is below 1."""
    if min(numbers.values()) < 1:
        given = ", ".join(f"{key}={value}" for key, value in numbers.items())
        raise DrafterError(f"{name}({given}): each must be at least 1")
