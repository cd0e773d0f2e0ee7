"""Checks what a drafter proposes. It may be written by anybody."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from soothsay.core.request import RequestDrafter
from soothsay.core.tree import DraftTree
from soothsay.errors import DrafterError


def check_drafts(
    drafter: RequestDrafter, trees: object, roots: Sequence[int], vocab_size: int
) -> Sequence[DraftTree]:
    """Return the trees that a drafter proposed for requests whose last tokens are `roots`.

    Warns if a tree will be cut to its root because the drafter's `max_nodes` is 1. Raises `DrafterError` if
    they are not a `DraftTree` for each request, have other roots, or have tokens that the model lacks.
    """
    count = len(roots)
    who = f"drafter {drafter.name!r}: propose gave"
    if not isinstance(trees, list | tuple):
        raise DrafterError(f"{who} a {type(trees).__name__}; it must give a list of {count} DraftTree")
    if len(trees) != count:
        raise DrafterError(f"{who} {len(trees)} trees for {count} requests; it must give one for each")
    for tree, root in zip(trees, roots, strict=True):
        if not isinstance(tree, DraftTree):
            raise DrafterError(f"{who} a {type(tree).__name__} in its list; it must give DraftTrees")
        if not 0 <= min(tree.tokens) <= max(tree.tokens) < vocab_size:
            bad = next(token for token in tree.tokens if not 0 <= token < vocab_size)
            raise DrafterError(f"{who} token {bad}; this model has tokens 0 to {vocab_size - 1}")
        if tree.tokens[0] != root:
            raise DrafterError(
                f"{who} a tree with the root {tree.tokens[0]}; the root is the last committed token, "
                f"request.tokens[-1], which is {root} here, and guesses go below it"
            )
        if len(tree) > 1 and drafter.max_nodes <= 1:
            warnings.warn(
                f"drafter {drafter.name!r} proposes {len(tree)} nodes, and its max_nodes={drafter.max_nodes} "
                "counts the root: nothing is drafted; set max_nodes to the nodes of its largest tree",
                stacklevel=2,
            )
    return trees
