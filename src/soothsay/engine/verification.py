"""The verification of a step: from the logits of all trees to one verdict a turn."""

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from soothsay.core.answer import TokenLogprobs
from soothsay.core.sampling import VERIFYING, Keyed, Nodes, draw, perturb
from soothsay.core.sampling_ops import DrawnTree, SamplingOps
from soothsay.core.transfer import download, send, upload
from soothsay.core.tree import DraftTree
from soothsay.core.turn import Turn
from soothsay.core.verify import Evidence, Guessing, not_finite
from soothsay.errors import RequestError

KnownLogprobs = dict[tuple[int, int], tuple[float, npt.NDArray[Any], npt.NDArray[Any]]]
"""By row of logits and token: its log-probability, and ids and log-probabilities of the likeliest tokens."""

Said = TypeVar("Said", int, Tensor)
"""What the target says at a node: the token that it draws, or its scores of all tokens."""


def verify(turns: Iterable[Turn], logits: Tensor, ops: SamplingOps) -> None:
    """Set `verdict`, `authors` and `logprobs` of every turn that has a tree.

    Verifiers run side by side. In each round, every one names the nodes that it needs to see. On a CPU, what
    the target says there is computed then, for all of them together. On another device it is computed for all
    nodes of all trees before the first round, and the host waits once.

    Args:
        turns: of one step, with `nodes` set.
        logits: `[M, V]` float32, the rows that `nodes` index.
        ops: of the device where the logits are.

    Raises:
        RequestError: the parameters of a request forbid every token.
        ModelError: the model's logits are not finite numbers.
    """
    drafted = [turn for turn in turns if turn.tree is not None]
    plain: list[Turn] = []
    trees: list[DrawnTree] = []
    for turn in drafted:
        if turn.tree is not None and (request := turn.request).draws_plainly:
            own = turn.nodes.start, request.params.temperature, request.seed, request.length
            plain.append(turn)
            trees.append(DrawnTree(turn.tree, *own))
    for turn, verdict in zip(plain, ops.follow(logits, trees) if trees else (), strict=True):
        turn.verdict = verdict
    left = [(turn, turn.tree) for turn in drafted if turn.tree is not None and turn.verdict is None]
    walks = [_Walk(*one, logits.shape[-1]) for one in left]
    known: KnownLogprobs = {}
    for view, shares_noise in ((_DrawnView, True), (_ScoredView, False)) if walks else ():
        if running := [walk for walk in walks if walk.shares_noise is shares_noise]:
            view(running, logits, ops, known).run()
    for turn in drafted:
        if turn.accepted or turn.request.traces is not None:
            _note_authors(turn)
    if noted := [turn for turn in drafted if turn.request.params.logprobs is not None]:
        _note_logprobs(noted, logits, ops, known)


class _Walk:
    """One tree whose verifier is under way."""

    __slots__ = ("_steps", "root", "shares_noise", "tree", "turn", "wanted")

    def __init__(self, turn: Turn, tree: DraftTree, vocab_size: int):
        request, rule = turn.request, turn.request.params.rule
        self.turn, self.tree, self.root = turn, tree, turn.nodes.start
        self.shares_noise = rule.guessing is Guessing.SHARED_NOISE
        self._steps = rule.walk(tree, Keyed(request.seed, VERIFYING, request.length), vocab_size)
        self.wanted = Nodes(request, tree, next(self._steps))

    def show(self, evidence: Evidence) -> None:
        """Show the verifier the evidence at the wanted nodes. It wants more, or sets the verdict."""
        try:
            self.wanted = Nodes(self.turn.request, self.tree, self._steps.send(evidence))
        except StopIteration as ended:
            self.turn.verdict = ended.value


class _View(ABC, Generic[Said]):
    """What the target says at the nodes of some trees, until they have verdicts.

    Args:
        walks: of the trees.
        logits: `[M, V]`, of all nodes of the step.
        ops: of the device of the logits.
        known: is given log-probabilities that a view computes beside.
    """

    def __init__(self, walks: list[_Walk], logits: Tensor, ops: SamplingOps, known: KnownLogprobs):
        self.walks, self.logits, self.ops, self.known = walks, logits, ops, known
        self._ahead: dict[int, tuple[Said, float]] = {}  # by row
        whole = [Nodes(walk.turn.request, walk.tree, range(len(walk.tree))) for walk in walks]
        if asked := ops.ahead(whole, logits.device):
            rows = [walk.root + node for walk in walks for node in range(len(walk.tree))]
            self._ahead = dict(zip(rows, zip(*self.look_ahead(rows, asked), strict=True), strict=True))

    @abstractmethod
    def compute(self, rows: list[int], asked: Sequence[Nodes]) -> tuple[Sequence[Said], list[float]]:
        """What the target says at nodes, and the best score of each. `rows` are those of the nodes."""

    def look_ahead(self, rows: list[int], asked: Sequence[Nodes]) -> tuple[Sequence[Said], list[float]]:
        """`compute`, of all nodes before a verifier asks for one."""
        return self.compute(rows, asked)

    @abstractmethod
    def evidence(self, said: Sequence[Said]) -> Evidence:
        """What a verifier is shown."""

    def run(self) -> None:
        """Run all verifiers to their ends. Raises errors as `verify` does."""
        running = self.walks
        while running:
            rows = [walk.root + node for walk in running for node in walk.wanted.indices]
            if self._ahead:
                said: Sequence[Said] = [self._ahead[row][0] for row in rows]
                best = [self._ahead[row][1] for row in rows]
            else:
                said, best = self.compute(rows, [walk.wanted for walk in running])
            _check_scores(best, self.logits, rows)
            begin = 0
            for walk in running:
                end = begin + len(walk.wanted.indices)
                walk.show(self.evidence(said[begin:end]))
                begin = end
            running = [walk for walk in running if walk.turn.verdict is None]


class _DrawnView(_View[int]):
    """For verifiers that share noise: the token at each node."""

    def compute(self, rows: list[int], asked: Sequence[Nodes]) -> tuple[Sequence[int], list[float]]:
        return draw(_select(self.logits, rows), asked, self.ops).wait()

    def look_ahead(self, rows: list[int], asked: Sequence[Nodes]) -> tuple[Sequence[int], list[float]]:
        """Also computes the log-probabilities of the draws, which are there after the same wait."""
        logits = _select(self.logits, rows)
        drawn, groups = draw(logits, asked, self.ops), defaultdict[int, list[int]](list)
        wanted = [nodes.request.params.logprobs for nodes in asked for _ in nodes.indices]
        for place, count in enumerate(wanted):
            if count is not None:
                groups[count].append(place)
        found, first = list[Tensor](), drawn.tokens.clamp(min=0)
        places = upload([torch.tensor(own) for own in groups.values()], logits.device)
        for count, own in zip(groups, places, strict=True):
            tokens = first.index_select(0, own)
            found += (tokens, *self.ops.logprobs(logits.index_select(0, own), tokens, count))
        said, beside = drawn.wait_with(*found)
        for number, group in enumerate(groups.values()):
            own_tokens, *logprobs = beside[4 * number : 4 * number + 4]
            keys = zip((rows[place] for place in group), own_tokens.tolist(), strict=True)
            self.known.update(zip(keys, zip(*logprobs, strict=True), strict=True))
        return said

    def evidence(self, said: Sequence[int]) -> Evidence:
        return Evidence(said, ())


class _ScoredView(_View[Tensor]):
    """For verifiers that decide at random: the scores of all tokens at each node, `[V]` on the host."""

    def compute(self, rows: list[int], asked: Sequence[Nodes]) -> tuple[Sequence[Tensor], list[float]]:
        scores = perturb(_select(self.logits, rows), asked, self.ops).cpu()
        best: list[float] = scores.amax(-1).tolist()
        return [*scores], best

    def evidence(self, said: Sequence[Tensor]) -> Evidence:
        return Evidence((), said)


def _check_scores(best: Sequence[float], logits: Tensor, rows: Sequence[int]) -> None:
    """Raise `RequestError` or `ModelError` if the best score of one of `rows` is not a finite number.

    It is not if no logit of the row is. A row that is partly NaN may have a finite best score, since reading
    all numbers would cost too much. The draw is a token of the vocabulary in any case.
    """
    if all(map(math.isfinite, best)):
        return
    empty = [row for row, score in zip(rows, best, strict=True) if score == -math.inf]
    if empty and any(map(math.isfinite, logits[empty[0]].tolist())):
        raise RequestError("no token is left that the answer could continue with: parameters forbid all")
    raise not_finite()


def _select(logits: Tensor, rows: list[int]) -> Tensor:
    """Select some rows. The result is a view if they are consecutive."""
    if rows == [*range(rows[0], rows[0] + len(rows))]:
        return logits if len(rows) == len(logits) else logits[rows[0] : rows[-1] + 1]
    return logits.index_select(0, send(rows, logits.device))


def _note_authors(turn: Turn) -> None:
    """Ask for authors now: drafters forget their trees when they observe the step."""
    request, tree = turn.request, turn.tree
    if tree is None:
        return
    if nodes := turn.accepted if request.traces is None else range(1, len(tree)):
        turn.authors = dict(zip(nodes, request.drafter.authors(request, tree, nodes), strict=True))


def _note_logprobs(turns: Sequence[Turn], logits: Tensor, ops: SamplingOps, known: KnownLogprobs) -> None:
    """Set the log-probabilities of the verdicts' tokens, for requests that want them."""
    groups = defaultdict[int, list[tuple[Turn, list[int]]]](list)  # by number of likeliest tokens
    for turn in turns:
        if (count := turn.request.params.logprobs) is not None and turn.verdict is not None:
            groups[count].append((turn, turn.verdict.tokens))
    for count, wanted in groups.items():
        rows = [turn.nodes.start + node for turn, _ in wanted for node in (0, *turn.accepted)]
        tokens = [token for _, own in wanted for token in own]
        there = [known.get(pair) for pair in zip(rows, tokens, strict=True)]
        if None in there:
            found = best_logprobs(_select(logits, rows), tokens, count, ops)
        else:
            found = _finite([np.array(part) for part in zip(*filter(None, there), strict=True)])
        named = iter(_named_logprobs(tokens, found))
        for turn, own in wanted:
            turn.logprobs = [next(named) for _ in own]


def _named_logprobs(tokens: Sequence[int], found: Sequence[npt.NDArray[Any]]) -> list[TokenLogprobs]:
    """What `best_logprobs` gives, token by token."""
    chosen, ids, values = (each.tolist() for each in found)
    return [
        TokenLogprobs(token, logprob, dict(zip(top_ids, top_values, strict=True)))
        for token, logprob, top_ids, top_values in zip(tokens, chosen, ids, values, strict=True)
    ]


def best_logprobs(
    logits: Tensor, tokens: Sequence[int], count: int, ops: SamplingOps
) -> list[npt.NDArray[Any]]:
    """The model's log-probabilities `[n]` of tokens; ids and log-probabilities `[n, count]` of the likeliest.

    Args:
        logits: `[n, V]` float32, the row before each token.
        tokens: n token ids.
        count: at most V.
        ops: of the device of the logits.

    Raises:
        ModelError: the logits are not finite numbers.
    """
    return _finite(download(*ops.logprobs(logits, send(tokens, logits.device), count)))


def _finite(found: list[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
    if any(map(math.isnan, found[0])):
        raise not_finite()
    return found
