"""A small model drafts for a large one (Leviathan et al. 2022, arXiv 2211.17192; Chen et al. 2023, arXiv
2302.01318).

The draft model samples with the target's own noise: at temperature above 0 it proposes what the target would
draw if both agreed (Daliri et al. 2024, arXiv 2408.07978). With `width` above 1 it grows a tree by
confidence, as EAGLE-2 does (Li et al. 2024, arXiv 2406.16858), and the best nodes are kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from soothsay.config import DType
from soothsay.drafters.base import Drafter, Observation, Target
from soothsay.engine.batch import Batch, Rows
from soothsay.engine.cache import Move
from soothsay.engine.request import Request
from soothsay.engine.sampling import Nodes, perturb
from soothsay.engine.tree import DraftTree
from soothsay.errors import DrafterError
from soothsay.model.checkpoint import open_checkpoint
from soothsay.model.load import load_model
from soothsay.model.transformer import Transformer
from soothsay.tokenizer import Tokenizer


@dataclass(slots=True)
class _State:
    """A request as the draft model sees it."""

    cached: int  # committed tokens whose KV is in the draft model's pool
    noted: int  # full blocks of them that are noted by content
    expanded: DraftTree  # the last tree's nodes that were run, in order of their slots


@dataclass(slots=True, eq=False)
class _Growth:
    """A tree on its way: which of its nodes have been run, which are next."""

    request: Request
    state: _State
    tree: DraftTree
    frontier: range = range(1)  # nodes of `state.expanded` that were run last
    node_of: list[int] = field(default_factory=lambda: [0])  # node of `state.expanded` -> node of `tree`


class DraftModel(Drafter):
    """Another model with the same vocabulary proposes a chain or a tree.

    Its KV lives in a pool of its own, addressed by the target's blocks. A block that the target found in its
    prefix cache may never have been seen by this model; so it notes what it has computed by content, and
    fills the rest in.

    Args:
        target: the model to draft for.
        model: a path or name that `LLM` would take, or a `Transformer`.
        depth: tokens that are guessed in a row.
        width: nodes of each level that are explored further; 1 gives a chain.
        branch: likeliest tokens proposed below each of them.
        dtype: the draft model's, as in `LLM`.
    """

    def __init__(
        self,
        target: Target,
        model: str | Path | Transformer,
        depth: int = 4,
        width: int = 1,
        branch: int = 1,
        dtype: DType = "auto",
    ):
        if min(depth, width, branch) < 1:
            raise DrafterError(
                f"draft-model(depth={depth}, width={width}, branch={branch}): each must be at least 1"
            )
        if not isinstance(model, Transformer):
            checkpoint = open_checkpoint(str(model))
            _check_vocabulary(checkpoint.tokenizer(), target, str(model))
            model = load_model(checkpoint, dtype, target.model.device)
        if model.config.max_positions < (target.config.max_context or 0):
            raise DrafterError(
                f"the draft model has a context of {model.config.max_positions} tokens, the target's is "
                f"{target.config.max_context}: set max_context to at most the former"
            )
        self.target, self.model = target, model
        self.depth, self.width, self.branch = depth, width, branch
        self.max_nodes = 1 + depth if width == branch == 1 else 1 + branch + (depth - 1) * width * branch
        self.pool = model.new_cache(target.num_blocks, target.config.block_size)
        self._states: dict[Request, _State] = {}
        self._computed: dict[int, bytes] = {}  # block -> the content whose KV is in it

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """Grow a tree for each request, all of them level by level together."""
        trees = [DraftTree(int(request.tokens[-1])) for request in requests]
        growing = [
            _Growth(request, self._state(request), tree)
            for request, tree in zip(requests, trees, strict=True)
            if request.max_nodes > 1
        ]
        if growing:
            logits = self._run_pending(growing)
        for level in range(1, self.depth + 1):
            growing = self._grow(growing, logits, level) if growing else []
            if not growing:
                break
            logits = self._run(
                [
                    Rows(
                        _NO_TOKENS, len(g.request.tokens), g.request.table, g.state.expanded, g.frontier.start
                    )
                    for g in growing
                ]
            )
        return trees

    def observe(self, observations: Sequence[Observation]) -> None:
        """Keep the KV of the nodes that were accepted: move it next to the context."""
        moves = []
        for seen in observations:
            state, behind = self._states.get(seen.request), len(seen.request.tokens)
            if state is None or seen.verdict is None:
                continue
            if state.cached == behind:  # it drafted in this step
                path = state.expanded.walk(seen.verdict.tokens[:-1])[1:]
                moves.append(Move(seen.request.table, [behind - 1 + node for node in path], behind))
                state.cached += len(path)
        self.pool.commit(moves)

    def release(self, request: Request) -> None:
        """Forget a request."""
        self._states.pop(request, None)

    def _state(self, request: Request) -> _State:
        """The request's state, with its next blocks taken over."""
        size, root = self.target.config.block_size, int(request.tokens[-1])
        state = self._states.get(request)
        if state is None:
            known = 0
            for i in range(request.num_full_blocks):
                if self._computed.get(request.blocks[i]) != request.digest(i):
                    break
                known += size
            cached = min(known, len(request.tokens) - 1)
            state = self._states[request] = _State(cached, cached // size, DraftTree(root))
        state.expanded = DraftTree(root)
        for block in request.blocks[state.noted :]:
            self._computed.pop(block, None)
        return state

    def _run_pending(self, growing: Sequence[_Growth]) -> Tensor:
        """Run committed tokens that have no KV yet; `[R, V]` logits at the roots."""
        logits: dict[_Growth, Tensor] = {}
        size = self.target.config.block_size
        while len(logits) < len(growing):
            rows, ends, room = [], [], self.target.config.max_rows
            for growth in growing:
                request, state = growth.request, growth.state
                tokens = request.tokens[state.cached :][:room]
                if growth in logits or not len(tokens):
                    continue
                at_end = state.cached + len(tokens) == len(request.tokens)
                known = tokens.clip(max=self.model.config.vocab_size - 1)  # the target's may go further
                rows.append(Rows(known, state.cached, request.table, state.expanded if at_end else None))
                state.cached += len(tokens)
                for block in range(state.noted, state.cached // size):
                    self._computed[request.blocks[block]] = request.digest(block)
                state.noted = state.cached // size
                room -= len(tokens)
                if at_end:
                    ends.append(growth)
            logits.update(zip(ends, self._run(rows), strict=True))
        return torch.stack([logits[growth] for growth in growing])

    def _run(self, rows: Sequence[Rows]) -> Tensor:
        """`[M, V]` logits of the draft model, in the target's vocabulary."""
        c = self.model.config
        batch = Batch.pack(
            rows,
            block_size=self.target.config.block_size,
            group=c.group,
            windows=c.windows,
            device=self.model.device,
        )
        hidden, _ = self.model(batch, self.pool)
        logits = self.model.logits(hidden.index_select(0, batch.logit_rows))
        return F.pad(logits, (0, self.target.model.config.vocab_size - logits.shape[1]), value=-torch.inf)

    def _grow(self, growing: Sequence[_Growth], logits: Tensor, level: int) -> list[_Growth]:
        """Add a level to every tree; return those that go on, their frontier set to the nodes to run next."""
        scores = perturb(logits, [Nodes(g.request, g.state.expanded, g.frontier) for g in growing])
        branch = min(self.branch, scores.shape[1])
        values, tokens = scores.log_softmax(-1).topk(branch, dim=-1)  # [M, branch]
        rows = iter(zip(values.tolist(), tokens.tolist(), strict=True))
        going = []
        for growth in growing:
            tree, expanded, request = growth.tree, growth.state.expanded, growth.request
            added = [  # (score, node, node of `expanded` above it)
                (tree.scores[node := tree.add(growth.node_of[above], token, log_prob)], node, above)
                for above in growth.frontier
                for log_prob, token in zip(*next(rows), strict=True)
                if log_prob > -math.inf
            ]
            goes_on = level < min(self.depth, request.max_depth)
            room = min(self.width, request.max_nodes - len(expanded)) if goes_on else 0
            first = len(expanded)
            for _, node, above in sorted(added, key=lambda item: -item[0])[: max(room, 0)]:
                if tree.tokens[node] not in request.end_tokens:
                    expanded.add(above, tree.tokens[node])
                    growth.node_of.append(node)
            growth.frontier = range(first, len(expanded))
            if growth.frontier:
                going.append(growth)
        return going


_NO_TOKENS = np.empty(0, dtype=np.int64)


def _check_vocabulary(own: Tokenizer | None, target: Target, name: str) -> None:
    """Raise `DrafterError` if the two tokenizers disagree about any token."""
    if own is None or target.tokenizer is None:
        return
    draft, other = own.vocabulary(), target.tokenizer.vocabulary()
    differing = sorted(token for token in draft.keys() | other.keys() if draft.get(token) != other.get(token))
    if differing:
        raise DrafterError(
            f"the draft model {name} has another vocabulary than the target: {len(differing)} tokens differ, "
            f"for example {differing[0]!r} ({draft.get(differing[0])} against {other.get(differing[0])}); "
            "choose a draft model of the same family, or a drafter that needs none, such as prompt-lookup"
        )
