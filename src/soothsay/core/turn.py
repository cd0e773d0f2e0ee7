"""One request's part of one step. It travels through the stages of the step, and each fills in a part."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from soothsay.core.answer import StepTrace, TokenLogprobs
from soothsay.core.cache import Move
from soothsay.core.request import Request
from soothsay.core.tree import DraftTree
from soothsay.core.verify import Verdict
from soothsay.errors import RequestError


@dataclass(slots=True)
class Turn:
    """What a request puts into a pass, and what comes out for it.

    A turn brings `num_tokens` pending tokens. If the last committed token is among them, the turn also brings
    a draft tree whose root is that token. A prefill chunk that ends earlier has no tree, and nothing of it is
    verified.

    Example:
        The committed tokens are `a b c d`, and `a b` have their KV. A turn with 2 tokens and a tree of the
        nodes `d -> e -> f` and `d -> g` puts 5 rows into the pass: `c`, `d`, `e`, `f`, `g`. Four of them are
        nodes with logits: `d`, `e`, `f`, `g`. If the target says `e` and then `h`, the verdict has the path
        of node 1 and the tokens `e h`.
    """

    request: Request
    num_tokens: int
    """Pending tokens that go into the pass. Set by `schedule`."""

    tree: DraftTree | None = None
    """Set by `propose`. None: the chunk ends before the committed tokens do."""

    rows: slice = field(init=False, repr=False)
    """Rows of the pass: the pending tokens, then the tree's nodes from 1 on. Set by `forward`."""

    nodes: slice = field(init=False, repr=False)
    """Rows of the logits: the tree's nodes from the root on. Set by `forward`."""

    verdict: Verdict | None = None
    """Set by `verify`. None: there is no tree."""

    authors: dict[int, str] = field(default_factory=dict)
    """Which drafter proposed a node, by name. Set by `verify` for accepted nodes; for all, if traced."""

    logprobs: list[TokenLogprobs] | None = None
    """Log-probabilities of the verdict's tokens, if the request wants them. Set by `verify`."""

    times: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the step by part, which still grow. Set by the engine, if traced."""

    @property
    def reaches_end(self) -> bool:
        """Whether the last committed token goes in, so that a tree can hang below it."""
        return self.num_tokens == self.request.length - self.request.cached

    @property
    def num_rows(self) -> int:
        """Rows of the pass. The root is the last pending token, so it counts once."""
        return self.num_tokens + (0 if self.tree is None else len(self.tree.tokens) - 1)

    @property
    def accepted(self) -> Sequence[int]:
        """Accepted nodes below the root, in order."""
        return () if self.verdict is None else self.verdict.path

    @property
    def move(self) -> Move:
        """How the KV of the accepted nodes gets next to the context. Valid until `update`."""
        request = self.request
        root = request.cached + self.num_tokens - 1
        nodes = [root + node for node in self.accepted]
        return Move(request.table, nodes, root + 1, request.state, tuple(request.marks))

    def take_in(self) -> None:
        """Add to the request what the turn brought: tokens, KV, statistics and a trace.

        Raises `RequestError` if the answer ends at a limit of its grammar.
        """
        request, tree, verdict = self.request, self.tree, self.verdict
        request.cached += self.num_tokens
        if tree is not None and verdict is not None:
            drafted_by = [*map(self.authors.__getitem__, verdict.path)]
            limit = None if request.constraint is None else request.constraint.limit(verdict.tokens)
            tokens = verdict.tokens if limit is None else verdict.tokens[: limit[0]]
            emitted = request.emit(tokens, drafted_by, self.logprobs)
            request.cached += len(verdict.path)
            if emitted:
                request.stats.record(len(tree.tokens) - 1, max(tree.depths), drafted_by[:emitted], emitted)
            if request.traces is not None:
                trace = StepTrace(
                    tokens=[*tree.tokens],
                    parents=[*tree.parents],
                    scores=[*tree.scores],
                    authors=[self.authors.get(node) for node in range(len(tree))],
                    path=[*verdict.path],
                    bonus=verdict.tokens[-1],
                    times=self.times,
                )
                request.traces.append(trace)
            if limit is not None and request.finish_reason is None:
                raise RequestError(limit[1])
        if request.finish_reason is not None:  # the answer may end before the last accepted token
            request.cached = min(request.cached, request.length)
