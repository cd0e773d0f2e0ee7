"""The verification of a step: from the logits of all trees to one verdict a turn."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from soothsay.core.answer import TokenLogprobs
from soothsay.core.drawing import draw
from soothsay.core.noise import SamplingKernels
from soothsay.core.sampling import VERIFYING, Keyed, Nodes, best_tokens, perturb
from soothsay.core.tree import DraftTree
from soothsay.core.turn import Turn
from soothsay.core.verify import Evidence, Guessing, Verdict, not_finite
from soothsay.errors import RequestError


def verify(turns: Iterable[Turn], logits: Tensor, kernels: SamplingKernels) -> None:
    """Set `verdict`, `authors` and `logprobs` of every turn that has a tree.

    Verifiers run side by side. In each round every open one names the nodes that it needs to see, and the
    target's scores of all those nodes are computed together.

    Args:
        turns: of one step, with `nodes` set.
        logits: `[M, V]` float32, the rows that `nodes` index.
        kernels: of the device where the logits are.

    Raises:
        RequestError: the parameters of a request forbid every token.
        ModelError: the model's logits are not finite numbers.
    """
    open_ = [_Verification(turn, turn.tree) for turn in turns if turn.tree is not None]
    while open_:
        by_draws = [one for one in open_ if one.rule.guessing is Guessing.SHARED_NOISE]
        by_scores = [one for one in open_ if one.rule.guessing is not Guessing.SHARED_NOISE]
        for some, needs_scores in ((by_draws, False), (by_scores, True)):
            if some:
                _show(some, logits, needs_scores, kernels)
        open_ = [one for one in open_ if one.turn.verdict is None]


def _show(
    open_: Sequence[_Verification], logits: Tensor, needs_scores: bool, kernels: SamplingKernels
) -> None:
    """Show verifiers the nodes that they want, and conclude those that have seen enough."""
    rows = [one.turn.nodes.start + node for one in open_ for node in one.wanted.indices]
    wanted, own, scores = [one.wanted for one in open_], _rows(logits, rows), None
    if needs_scores:
        scores = perturb(own, wanted, kernels)
        draws = best_tokens(scores, kernels)
        best = scores.gather(1, torch.tensor(draws, device=scores.device)[:, None])[:, 0].tolist()
    else:
        draws, best = draw(own, wanted, kernels)
    _check_scores(best)
    begin = 0
    for one in open_:
        end = begin + len(one.wanted.indices)
        verdict = one.show(Evidence(draws[begin:end], None if scores is None else scores[begin:end]))
        if verdict is not None:
            _conclude(one.turn, one.tree, verdict, logits)
        begin = end


class _Verification:
    """One tree whose verifier is under way."""

    __slots__ = ("_walk", "rule", "tree", "turn", "wanted")

    def __init__(self, turn: Turn, tree: DraftTree):
        request = turn.request
        self.turn, self.tree, self.rule = turn, tree, request.params.rule
        chance = Keyed(request.seed, VERIFYING, len(request.tokens))
        self._walk = self.rule.verify(tree, chance)
        self.wanted = Nodes(request, tree, next(self._walk))

    def show(self, evidence: Evidence) -> Verdict | None:
        """Give the verifier what the target says at the wanted nodes; return the verdict, if it has one."""
        try:
            indices = self._walk.send(evidence)
        except StopIteration as ended:
            verdict: Verdict = ended.value
            return verdict
        self.wanted = Nodes(self.turn.request, self.tree, indices)
        return None


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


def _rows(logits: Tensor, rows: list[int]) -> Tensor:
    """Select some rows. The result is a view if they are consecutive."""
    if rows == [*range(rows[0], rows[0] + len(rows))]:
        return logits if len(rows) == len(logits) else logits[rows[0] : rows[-1] + 1]
    return logits[torch.tensor(rows, device=logits.device)]


def _conclude(turn: Turn, tree: DraftTree, verdict: Verdict, logits: Tensor) -> None:
    """Note a verdict. Ask for authors now: drafters forget their trees when they observe the step."""
    request = turn.request
    turn.verdict = verdict
    nodes = verdict.path if request.traces is None else range(1, len(tree))
    if nodes:
        turn.authors = dict(zip(nodes, request.drafter.authors(request, tree, nodes), strict=True))
    if request.params.logprobs is not None:
        own = logits[turn.nodes][[0, *verdict.path]]
        turn.logprobs = token_logprobs(own, verdict.tokens, request.params.logprobs)


def token_logprobs(logits: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprobs]:
    """The model's own log-probabilities of some tokens, and of the `count` likeliest beside each.

    Args:
        logits: `[n, V]` float32, the row before each token.
        tokens: n token ids.
        count: at most V.
    """
    chosen, ids, values = (found.tolist() for found in best_logprobs(logits, tokens, count))
    return [
        TokenLogprobs(token, logprob, dict(zip(top_ids, top_values, strict=True)))
        for token, logprob, top_ids, top_values in zip(tokens, chosen, ids, values, strict=True)
    ]


def best_logprobs(logits: Tensor, tokens: Sequence[int], count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The log-probabilities `[n]` of tokens; ids and log-probabilities `[n, count]` of the likeliest.

    Arguments are those of `token_logprobs`.
    """
    logprobs = logits.log_softmax(-1)  # [n, V]
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    if chosen.isnan().any():
        raise not_finite()
    values, ids = logprobs.topk(count, dim=-1)
    return chosen, ids, values
