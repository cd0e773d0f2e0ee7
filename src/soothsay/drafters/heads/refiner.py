"""A small recurrent cell that makes a one-pass drafter's guesses depend on the tokens of their path.

One pass predicts all depths before any draft token is chosen, so its guesses do not know of each other. The
cell walks along a path: at each depth it reads the pass's output, the token that was chosen last and its own
state, and corrects the output. xPress (2026) refines so with a low rank; ReDrafter (Cheng et al. 2024, arXiv
2403.09919) drafts by a recurrent cell alone.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soothsay.core.params import MIN_TEMPERATURE
from soothsay.core.request import Request
from soothsay.core.transfer import download, send
from soothsay.core.tree import DraftTree
from soothsay.drafters.heads.trained_head import ShortlistHead, TargetEnds
from soothsay.drafters.ops.draft_ops import Candidates, DraftOps, HeadOutputs, Refinement
from soothsay.drafters.trees.guesses import SHARPNESS
from soothsay.drafters.trees.templates import draw_template, fill_drawn, score_rows
from soothsay.model.ops.linear import Dense

UNITS = 16
"""Sizes of cells, and of layers beside them, are multiples of this, which suits all vector instructions."""


class Refiner(nn.Module):
    """`state = silu(read(output) + token(embedding) + carry(state above))`, `output += out(state)`.

    Tokens come as embeddings of the target, so the cell has no rows of its own for them. Along paths it costs
    little: `read` is computed once for each depth, `token` once for each token of a shortlist.

    Args:
        hidden_size: H, of outputs and embeddings.
        units: U, of the state.
    """

    def __init__(self, hidden_size: int, units: int):
        super().__init__()
        self.units = units
        self.read: nn.Module = Dense.random(hidden_size, units)
        self.token: nn.Module = Dense.random(hidden_size, units)
        self.carry: nn.Module = Dense.random(units, units)
        self.out: nn.Module = Dense.random(units, hidden_size)

    def forward(self, output: Tensor, embedded: Tensor, above: Tensor | None) -> tuple[Tensor, Tensor]:
        """Refine the outputs of one depth.

        Args:
            output: `[M, H]`, the pass's normed output at this depth.
            embedded: `[M, H]`, the normed embedding of the token before the guess.
            above: `[M, U]`, the state one token above; None below the root.

        Returns:
            The refined output `[M, H]`, and the state `[M, U]`, both float32.
        """
        state = self.read(output).float() + self.token(embedded).float()
        if above is not None:
            state = state + self.carry(above).float()
        state = F.silu(state)
        return output + self.out(state).float(), state

    def begin(self, outputs: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Refine the first depth of R requests, and prepare the depths below it.

        Args:
            outputs: `[R, D, H]`, the pass's normed outputs.
            embedded: `[R, H]`, the normed embeddings of the roots' tokens.

        Returns:
            `[R * D, H]`, the outputs, the first of each request refined; `[R * D, U]`, what `read` makes of
            each; and `[R, U]`, the states of the roots. All float32.
        """
        first, states = self(outputs[:, 0], embedded, None)
        rows = torch.cat([first[:, None], outputs[:, 1:]], dim=1).flatten(0, 1)
        return rows, self.read(outputs.flatten(0, 1)).float(), states


CANDIDATES = 64
"""Guesses of a depth that are refined below every node."""

FOLLOWERS = 64
"""Tokens that often follow a node's own, refined below it too: the guesses of a depth do not know it."""

DRAWN_BRANCH = 8
"""Draws below a node, for verifiers that draw."""

ROWS = 1024
"""Tokens whose part of the cell is computed at a time."""


class RefinedTrees:
    """Grows trees from the outputs of one pass.

    The cell's part of each token is computed once, here. So a node of a tree costs two small products.

    Args:
        head: ready to draft.
        cell: of the head.
        shared: what it shares with the target.
        ops: those of the target's drafters.
        nodes: of the largest tree, the root included.
    """

    def __init__(self, head: ShortlistHead, cell: Refiner, shared: TargetEnds, ops: DraftOps, nodes: int):
        self.head, self.cell, self.shared, self.nodes = head, cell, shared, nodes
        self.sampling, self.ops = shared.kernels.sampling, ops
        device = shared.norm.weight.device
        ids = torch.arange(shared.vocab_size, device=device) if head.shortlist is None else head.shortlist
        self.ids: list[int] = ids.tolist()
        with torch.inference_mode():
            units = torch.eye(self.cell.units, device=device)
            tokens = [self.cell.token(head.embedded(some, shared)) for some in torch.split(ids, ROWS)]
            corrections = head.logits(self.cell.out(units).float(), shared)
            self.refinement = Refinement(
                tokens=torch.cat(tokens).bfloat16().cpu(),
                carry=self.cell.carry(units).bfloat16().contiguous().cpu(),
                out=corrections.t().bfloat16().contiguous().cpu(),
                followers=_followers(torch.cat(tokens), corrections).cpu(),
            )

    def trees(self, requests: Sequence[Request], outputs: HeadOutputs) -> list[DraftTree]:
        """Make a tree for each of R requests, whose guesses begin with the token after the root."""
        logits, read, states = outputs
        depths = len(logits) // len(states)
        if any(request.params.rule.guessing.draws for request in requests):
            return self._drawn(requests, logits, depths)
        factors = [SHARPNESS if request.params.temperature == 0 else 1.0 for request in requests]
        found = download(*self._candidates(requests, logits, depths, factors), read, states)
        scores, values, places, read, states = map(torch.from_numpy, found)
        trees = []
        for i, request in enumerate(requests):
            own = slice(i * depths, (i + 1) * depths)
            scale = factors[i] / max(request.params.temperature or 1.0, MIN_TEMPERATURE)
            guesses = scores[own], factors[i], values[own], places[own]
            trees.append(self._tree(request, Candidates(*guesses, read[own], states[i], scale)))
        return trees

    def _tree(self, request: Request, candidates: Candidates) -> DraftTree:
        size, depth = min(self.nodes, request.max_nodes), max(request.max_depth, 0)
        places, parents, scores = self.ops.grow_paths(self.refinement, candidates, size, depth)
        tree = DraftTree(request.last_token)
        tree.append_nodes([self.ids[place] for place in places[1:]], parents[1:], scores[1:])
        return tree

    def _candidates(
        self, requests: Sequence[Request], logits: Tensor, depths: int, factors: Sequence[float]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Scores `[R * D, V_short]`; log-probabilities and places of each row's best tokens, `[R * D, K]`."""
        rows, short = [depths] * len(requests), self.head.shortlist
        if any(r.constraint is not None or r.params.changes_logits for r in requests):
            whole = self.head.whole(logits, self.shared.vocab_size)
            logits = score_rows(requests, whole, rows, self.sampling)
            logits = logits if short is None else logits.index_select(1, short)
        elif any(request.params.temperature > 0 for request in requests):
            logits = score_rows(requests, logits, rows, self.sampling, short)
        sharp = [factor for factor in factors for _ in range(depths)]
        best = self.sampling.largest(logits, CANDIDATES, send(sharp, logits.device))
        return logits, *best

    def _drawn(self, requests: Sequence[Request], logits: Tensor, depths: int) -> list[DraftTree]:
        """Trees for verifiers that must know what each token was drawn from: its depth, not refined."""
        whole = self.head.whole(logits, self.shared.vocab_size)
        scores = score_rows(requests, whole, [depths] * len(requests), self.sampling).cpu()
        trees = []
        for request, rows in zip(requests, torch.split(scores, depths), strict=True):
            tree, guessing = DraftTree(request.last_token), request.params.rule.guessing
            size, depth = min(self.nodes, request.max_nodes) - 1, min(max(request.max_depth, 0), depths)
            fill_drawn(tree, draw_template(guessing, depth, DRAWN_BRANCH, size), [*rows], request)
            trees.append(tree)
        return trees


def _followers(tokens: Tensor, corrections: Tensor) -> Tensor:
    """The tokens that a cell without context expects after each token, `[V_short, FOLLOWERS]` places.

    Args:
        tokens: `[V_short, U]`, their parts of a state.
        corrections: `[U, V_short]`, of each unit.
    """
    count, matrix = min(FOLLOWERS, len(tokens)), corrections.bfloat16()
    states = torch.split(F.silu(tokens.float()).bfloat16(), ROWS)
    return torch.cat([(some @ matrix).topk(count).indices for some in states])
