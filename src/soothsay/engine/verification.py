"""The verification of a step: from the logits of all trees to one verdict a turn."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy.typing as npt
import torch
from torch import Tensor

from soothsay.core.answer import TokenLogprobs
from soothsay.core.sampling import VERIFYING, Keyed, Nodes, Sampled, draw, perturb
from soothsay.core.sampling_ops import SamplingOps
from soothsay.core.transfer import download
from soothsay.core.tree import DraftTree
from soothsay.core.turn import Turn
from soothsay.core.verify import Evidence, Guessing, not_finite
from soothsay.errors import RequestError


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
    walks = [_Walk(turn, turn.tree) for turn in turns if turn.tree is not None]
    for compute, shares_noise in ((_draw, True), (_score, False)):
        running = [walk for walk in walks if walk.shares_noise is shares_noise]
        view = _View(running, logits, ops, compute)
        while running:
            for walk, seen in zip(running, view.look([walk.wanted for walk in running]), strict=True):
                walk.show(seen)
            running = [walk for walk in running if walk.turn.verdict is None]
    for walk in walks:
        _note_authors(walk.turn, walk.tree)
    _note_logprobs([walk.turn for walk in walks], logits, ops)


class _Walk:
    """One tree whose verifier is under way."""

    __slots__ = ("_steps", "shares_noise", "tree", "turn", "wanted")

    def __init__(self, turn: Turn, tree: DraftTree):
        request, rule = turn.request, turn.request.params.rule
        self.turn, self.tree, self.shares_noise = turn, tree, rule.guessing is Guessing.SHARED_NOISE
        self._steps = rule.verify(tree, Keyed(request.seed, VERIFYING, len(request.tokens)))
        self.wanted = Nodes(request, tree, next(self._steps))

    def show(self, seen: Sequence[_Seen]) -> None:
        """Show the verifier what the target says at the wanted nodes. It wants more, or sets the verdict."""
        evidence = Evidence([one.token for one in seen], [one.scores for one in seen])
        try:
            self.wanted = Nodes(self.turn.request, self.tree, self._steps.send(evidence))
        except StopIteration as ended:
            self.turn.verdict = ended.value


class _Seen(NamedTuple):
    """What the target says at a node."""

    token: int  # that it draws
    scores: Tensor  # [V] on the host; empty for verifiers that share noise
    best: float  # score


class _View:
    """What the target says at the nodes of some trees. Each is computed once.

    Args:
        walks: of the trees.
        logits: `[M, V]`, of all nodes of the step.
        ops: of the device of the logits.
        compute: `_draw` or `_score`.
    """

    def __init__(
        self,
        walks: Sequence[_Walk],
        logits: Tensor,
        ops: SamplingOps,
        compute: Callable[[Tensor, Sequence[Nodes], SamplingOps], list[_Seen]],
    ):
        self._whole = [Nodes(walk.turn.request, walk.tree, range(len(walk.tree))) for walk in walks]
        self._roots: dict[Sampled, int] = {walk.turn.request: walk.turn.nodes.start for walk in walks}
        self._logits, self._ops, self._compute = logits, ops, compute
        self._seen: dict[int, _Seen] = {}  # by row

    def look(self, wanted: Sequence[Nodes]) -> list[list[_Seen]]:
        """What the target says at nodes. Raises errors as `verify` does."""
        rows = [[self._roots[nodes.request] + node for node in nodes.indices] for nodes in wanted]
        if any(row not in self._seen for own in rows for row in own):
            asked = self._ops.choose(wanted, self._whole, self._logits.device)
            places = [self._roots[nodes.request] + node for nodes in asked for node in nodes.indices]
            found = self._compute(_select(self._logits, places), asked, self._ops)
            self._seen.update(zip(places, found, strict=True))
        seen = [[self._seen[row] for row in own] for own in rows]
        _check_scores([one.best for own in seen for one in own])
        return seen


def _draw(logits: Tensor, asked: Sequence[Nodes], ops: SamplingOps) -> list[_Seen]:
    """For verifiers that share noise: the token at each node."""
    tokens, best = draw(logits, asked, ops).wait()
    return [_Seen(token, _NO_SCORES, score) for token, score in zip(tokens, best, strict=True)]


def _score(logits: Tensor, asked: Sequence[Nodes], ops: SamplingOps) -> list[_Seen]:
    """For verifiers that decide at random: the scores of all tokens at each node."""
    scores = perturb(logits, asked, ops).cpu()
    return [_Seen(0, row, best) for row, best in zip(scores, scores.amax(-1).tolist(), strict=True)]


_NO_SCORES = torch.empty(0)


def _check_scores(best: Sequence[float]) -> None:
    """Raise `RequestError` or `ModelError` if the best score of a row is not a finite number.

    It is NaN if all of a row is. A row that is partly NaN may have a finite best score, since reading all
    numbers would cost too much. The draw is a token of the vocabulary in any case.
    """
    if all(map(math.isfinite, best)):
        return
    if -math.inf in best:
        raise RequestError("no token is left that the answer could continue with: parameters forbid all")
    raise not_finite()


def _select(logits: Tensor, rows: list[int]) -> Tensor:
    """Select some rows. The result is a view if they are consecutive."""
    if rows == [*range(rows[0], rows[0] + len(rows))]:
        return logits if len(rows) == len(logits) else logits[rows[0] : rows[-1] + 1]
    return logits[torch.tensor(rows, device=logits.device)]


def _note_authors(turn: Turn, tree: DraftTree) -> None:
    """Ask for authors now: drafters forget their trees when they observe the step."""
    request = turn.request
    nodes = turn.accepted if request.traces is None else range(1, len(tree))
    if nodes:
        turn.authors = dict(zip(nodes, request.drafter.authors(request, tree, nodes), strict=True))


def _note_logprobs(turns: Sequence[Turn], logits: Tensor, ops: SamplingOps) -> None:
    """Set the log-probabilities of the verdicts' tokens, for requests that want them."""
    groups = defaultdict[int, list[tuple[Turn, list[int]]]](list)  # by number of likeliest tokens
    for turn in turns:
        if (count := turn.request.params.logprobs) is not None and turn.verdict is not None:
            groups[count].append((turn, turn.verdict.tokens))
    for count, wanted in groups.items():
        rows = [turn.nodes.start + node for turn, _ in wanted for node in (0, *turn.accepted)]
        tokens = [token for _, own in wanted for token in own]
        found = iter(token_logprobs(_select(logits, rows), tokens, count, ops))
        for turn, own in wanted:
            turn.logprobs = [next(found) for _ in own]


def token_logprobs(
    logits: Tensor, tokens: Sequence[int], count: int, ops: SamplingOps
) -> list[TokenLogprobs]:
    """The model's own log-probabilities of some tokens, and of the `count` likeliest beside each.

    Args:
        logits: `[n, V]` float32, the row before each token.
        tokens: n token ids.
        count: at most V.
        ops: of the device of the logits.
    """
    chosen, ids, values = (found.tolist() for found in best_logprobs(logits, tokens, count, ops))
    return [
        TokenLogprobs(token, logprob, dict(zip(top_ids, top_values, strict=True)))
        for token, logprob, top_ids, top_values in zip(tokens, chosen, ids, values, strict=True)
    ]


def best_logprobs(
    logits: Tensor, tokens: Sequence[int], count: int, ops: SamplingOps
) -> list[npt.NDArray[Any]]:
    """The log-probabilities `[n]` of tokens; ids and log-probabilities `[n, count]` of the likeliest.

    Arguments are those of `token_logprobs`. Raises `ModelError` if the logits are not finite numbers.
    """
    found = download(*ops.logprobs(logits, torch.tensor(tokens, device=logits.device), count))
    if any(map(math.isnan, found[0])):
        raise not_finite()
    return found
