"""The protocol of a drafter, and what watches one.

A drafter needs four members: `max_nodes`, `propose`, `observe` and `release`. The rest has defaults. The
controller uses more protocols, which a drafter may inherit: `SignalingDrafter`, `LevelwiseDrafter` and
`ReadingDrafter`.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

from soothsay.config import EngineConfig
from soothsay.core.cache import KVPool
from soothsay.core.request import Observation, Request
from soothsay.core.tenant import PerTenant, State, Tenant
from soothsay.core.tree import DraftTree
from soothsay.drafters.ops.draft_ops import DraftOps
from soothsay.errors import DrafterError
from soothsay.model.timing.pass_times import PassTimes
from soothsay.model.transformer import Transformer
from soothsay.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Target:
    """What a drafter is built for: the model that verifies, and the shape of its KV pool.

    Example:
        >>> class Comma(Drafter):
        ...     max_nodes = 2
        ...
        ...     def __init__(self, target: Target):
        ...         super().__init__(target)
        ...         self.comma = target.tokenizer.encode(",")
        ...
        ...     def propose(self, requests):
        ...         trees = [DraftTree(request.last_token) for request in requests]
        ...         for tree in trees:
        ...             tree.extend(self.comma)
        ...         return trees
        >>> params = SamplingParams(temperature=0, max_tokens=8)
        >>> llm.generate("red, green, blue", params, drafter=Comma).stats.drafts > 0
        True
    """

    model: Transformer
    tokenizer: Tokenizer | None
    config: EngineConfig
    num_blocks: int  # of the KV pool; a drafter's own pool has the same number, at the same addresses
    path: Path | None = None  # of the model; drafters that were trained for it are looked for there
    cache: KVPool | None = None  # the model's own keys and values; None where nothing is served
    times: Callable[[], PassTimes] | None = None  # the best that is known of the model's passes
    ops: DraftOps = field(default_factory=DraftOps)  # the operations of drafters on the model's device

    @property
    def pool(self) -> KVPool:
        """`cache`; where nothing is served, a new pool in its place."""
        return self.cache or self.model.new_cache(self.num_blocks, self.config.block_size)

    @property
    def vocabulary(self) -> str:
        """A string that identifies the vocabulary."""
        if self.tokenizer is None:
            return f"{self.model.spec.vocab_size} tokens"
        return self.tokenizer.fingerprint.hex()


FIRST_GAIN = 2.0
"""Initial estimate of a drafter's right nodes, before its first draft. High, so that the drafter is tried."""


class Drafter(ABC):
    """Proposes draft tokens. A new drafter is a subclass that sets `max_nodes` and writes `propose`.

    One instance serves all requests that chose it. It keeps the state of a request under the request until
    `release`. Wrong drafts never change the output: a bad drafter is slow, and nothing else.
    docs/adding-a-drafter.md explains the protocol.

    Attributes:
        target: the model, its tokenizer and the engine's configuration (`Target`).
        max_nodes: nodes of the largest tree that it proposes, the root included. With 1, nothing is drafted.
        taps: target layers whose input the drafter reads. The number of layers means the last layer's output.
        trained: whether it was trained for its target. If its drafts are never right, that is reported.
        likely_gain: the controller's first estimate of the right nodes in a large draft.
        decisions: in how many steps each drafter was asked, by its name. Only a controller has any.

    Example:
        >>> class Repeat(Drafter):
        ...     max_nodes = 2  # the root, and one draft token
        ...
        ...     def propose(self, requests):
        ...         return [self.draft(request.last_token) for request in requests]
        ...
        ...     def draft(self, token):
        ...         tree = DraftTree(token)
        ...         tree.extend([token])
        ...         return tree
        >>> params = SamplingParams(temperature=0, max_tokens=8)
        >>> llm.generate("one one one", params, drafter=Repeat).stats.drafts > 0
        True
    """

    taps: tuple[int, ...] = ()
    max_nodes: int = 1
    trained: bool = False
    likely_gain: float = FIRST_GAIN
    decisions: Mapping[str, int] = MappingProxyType({})

    def __init__(self, target: Target):
        self.target = target

    @cached_property
    def name(self) -> str:
        """The drafter's name in statistics and traces.

        `build_drafter` sets it to the name in the registry. The default is the name of the class.
        """
        return type(self).__name__

    @abstractmethod
    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """Draft a tree for each request, rooted at its last committed token.

        Trees may be larger than `request.max_nodes` or deeper than `request.max_depth`: the engine keeps the
        best-scored nodes. A drafter may write KV of its own to slots up to the root's offset + `max_nodes` -
        1.
        """

    def observe(self, observations: Sequence[Observation]) -> None:  # noqa: B027 - most drafters need nothing
        """Learn from a step. There is one observation for each of its requests, prefill chunks included."""

    def authors(self, request: Request, tree: DraftTree, nodes: Sequence[int]) -> list[str]:
        """The name of the drafter that proposed each node. Called after `propose` and before `observe`.

        Args:
            request: the request that the tree is for.
            tree: the proposed tree, or the part of it that was kept.
            nodes: nodes without the root. Each comes after its parent, unless that is the root.
        """
        return [self.name] * len(nodes)

    def finish_loading(self) -> None:  # noqa: B027
        """Wait for what is read in the background. The times of passes are not measured beside it."""

    def num_known(self, request: Request, blocks: Sequence[int]) -> int:
        """How many of the blocks that hold a prompt's beginning this drafter can go on after.

        The target's keys and values are in all of them. It reads the others again where a drafter needs more:
        the features of all tokens. Most drafters need nothing.
        """
        return len(blocks)

    def release(self, request: Request) -> None:  # noqa: B027
        """Forget a request: it has ended, or it was preempted and will start again."""

    def reset(self) -> None:  # noqa: B027
        """Forget what was learned from other requests. Never called while a request runs."""

    def study(self) -> bool:
        """Learn from what waits, within its share of time. Returns whether more waits.

        It is called when there is time. Most drafters learn at once, or nothing.
        """
        return False

    def learned(self) -> Sequence[RememberingDrafter[Any]]:
        """What it learns from requests and can be kept across restarts. Most drafters: nothing."""
        return ()


class SignalingDrafter(Drafter):
    """A drafter that can say cheaply what kind of draft it would make.

    The controller learns the acceptance of each kind apart, and asks for the kinds that pay.
    """

    @abstractmethod
    def signal(self, request: Request) -> int:
        """The kind of the next draft, as a small integer, in some tens of microseconds.

        0 means that it would have no nodes. Other values have no meaning beyond being different. Few values
        give the controller more drafts of each.
        """

    def first_gain(self, signal: int, sampled: bool) -> float:
        """Initial estimate of the right nodes in a large draft, before the first draft of this kind.

        Args:
            signal: the kind.
            sampled: whether the request samples at a temperature above 0.
        """
        return FIRST_GAIN


class LevelwiseDrafter(Drafter):
    """A drafter that grows its trees level by level, and can stop early."""

    min_level_gain: float = 0.0
    """The price of a level, in tokens. The controller sets it before it asks for a draft.

    A tree stops growing where the nodes to continue have probabilities whose sum is below it. Another level
    would gain at most that sum."""


class ReadingDrafter(Drafter):
    """A drafter that reads the tokens of requests itself, and lags behind where it is not asked.

    The controller lets it catch up before it asks for a draft. So the price of a draft has no prompt in it.
    """

    @abstractmethod
    def unread(self, request: Request) -> int:
        """About how many committed tokens it has not read, without the last, which each draft reads."""

    @abstractmethod
    def catch_up(self, requests: Sequence[Request]) -> None:
        """Read these tokens."""


class Memory(Protocol):
    """What a drafter has learned from one tenant's requests."""

    def state(self) -> State:
        """The memory as arrays. Empty: nothing."""

    def merge(self, other: Any) -> None:
        """Take over what another memory has.

        Several engines may have learned from a tenant, and parts of it the same: nothing counts twice. Where
        not all fits, the older part makes room.
        """


AnyMemory = TypeVar("AnyMemory", bound=Memory)


class RememberingDrafter(Drafter, Generic[AnyMemory]):
    """A drafter that has a memory for each tenant, which can be kept across restarts.

    Attributes:
        kind: names the form of the states, such as "suffix". It is a part of file names.
        form: whatever a state would be wrong without, besides the vocabulary.
        memories: each tenant's.
    """

    kind: str
    form: object = ""
    memories: PerTenant[AnyMemory]

    @abstractmethod
    def restored(self, state: State) -> AnyMemory:
        """The inverse of `Memory.state`. Arrays may come from a stranger.

        Raises `DrafterError` if an array is missing or impossible.
        """

    @cached_property
    def identity(self) -> str:
        """The vocabulary and the form. States of another identity are not restored."""
        return f"{self.target.vocabulary} {self.form}".strip()

    def learned(self) -> Sequence[RememberingDrafter[Any]]:
        """The drafter itself."""
        return (self,)

    def restore(self, tenant: Tenant, state: State) -> None:
        """Add a state to a tenant's memory. Raises `DrafterError` as `restored`. Then nothing has changed."""
        restored = self.restored(state)
        self.memories[tenant].merge(restored)


class NoDrafter(Drafter):
    """Plain decoding: trees have only the root."""

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """A tree with only the root for each request."""
        return [DraftTree(request.last_token) for request in requests]


def check_at_least_one(name: str, **numbers: int) -> None:
    """Raise `DrafterError` if an option of drafter `name` is below 1."""
    if min(numbers.values()) < 1:
        given = ", ".join(f"{key}={value}" for key, value in numbers.items())
        raise DrafterError(f"{name}({given}): each must be at least 1")


WATCHED_STEPS = 100
"""Steps with drafts after which a drafter is judged."""

CHANCE = 0.02
"""Share of steps in which a draft token may be right by chance."""


class MisfitWatch:
    """Counts the first steps of one drafter.

    Args:
        name: of the drafter.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.steps = 0
        self.right = 0  # steps in which a draft token was accepted

    def record(self, accepted: int) -> None:
        """Count a step with a draft of which `accepted` tokens were right.

        Warns after `WATCHED_STEPS` if hardly any step had one.
        """
        self.steps += 1
        self.right += accepted > 0
        if self.steps == WATCHED_STEPS and self.right < CHANCE * WATCHED_STEPS:
            warnings.warn(
                f"{self.name} guessed right in {self.right} of its first {WATCHED_STEPS} steps: it was "
                "probably trained for another model, or is read as another method than it is; "
                "'soothsay inspect MODEL --drafter PATH' says what it is",
                stacklevel=2,
            )


class _Forwarded:
    """An attribute or a method of the wrapped drafter."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, proxy: DrafterProxy | None, owner: type) -> Any:
        return self if proxy is None else getattr(proxy.drafter, self.name)

    def __set__(self, proxy: DrafterProxy, value: object) -> None:
        setattr(proxy.drafter, self.name, value)


class DrafterProxy(Drafter):
    """Passes every member of the protocol on to `drafter`.

    A subclass overrides the methods that it watches, and calls `self.drafter` in them. The engine cannot tell
    a proxy from its drafter: it reads the same `taps` and `trained`, and names the same authors.
    """

    taps: Any = _Forwarded()
    max_nodes: Any = _Forwarded()
    trained: Any = _Forwarded()
    likely_gain: Any = _Forwarded()
    decisions: Any = _Forwarded()
    name: Any = _Forwarded()
    propose: Any = _Forwarded()
    observe: Any = _Forwarded()
    authors: Any = _Forwarded()
    finish_loading: Any = _Forwarded()
    num_known: Any = _Forwarded()
    release: Any = _Forwarded()
    reset: Any = _Forwarded()
    study: Any = _Forwarded()
    learned: Any = _Forwarded()

    def __init__(self, drafter: Drafter):
        self.drafter = drafter
