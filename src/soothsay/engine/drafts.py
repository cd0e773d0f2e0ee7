"""Checks what a drafter proposes. It may be written by anybody."""

import warnings
from collections.abc import Callable, Sequence
from typing import TypeVar

from soothsay.core.request import Request, RequestDrafter
from soothsay.core.tree import DraftTree
from soothsay.errors import DrafterError, type_of

Given = TypeVar("Given")
Said = TypeVar("Said")


def blaming(drafter: RequestDrafter, method: Callable[[Given], Said], given: Given) -> Said:
    """Call a drafter's method. What it raises gets a note that names the drafter."""
    try:
        return method(given)
    except Exception as error:
        error.add_note(f"drafter {drafter.name!r} raised it")
        raise


def check_drafts(
    drafter: RequestDrafter, trees: object, requests: Sequence[Request], vocab_size: int
) -> Sequence[DraftTree]:
    """Return the trees that a drafter proposed for requests.

    Warns if a tree will be cut to its root because the drafter's `max_nodes` is 1. Raises `DrafterError` if
    they are not a `DraftTree` for each request, have other roots, or have tokens that the model lacks.
    """
    count = len(requests)
    if not isinstance(trees, list | tuple):
        raise _wrong(drafter, f"{type_of(trees)}; it must give a list of {count} DraftTree")
    if len(trees) != count:
        raise _wrong(drafter, f"{len(trees)} trees for {count} requests; it must give one for each")
    for tree, request in zip(trees, requests, strict=True):
        if not isinstance(tree, DraftTree):
            raise _wrong(drafter, f"{type_of(tree)} in its list; it must give DraftTrees")
        if not 0 <= min(tree.tokens) <= max(tree.tokens) < vocab_size:
            bad = next(token for token in tree.tokens if not 0 <= token < vocab_size)
            raise _wrong(drafter, f"token {bad}; this model has tokens 0 to {vocab_size - 1}")
        if tree.tokens[0] != request.last_token:
            raise _wrong(
                drafter,
                f"a tree with the root {tree.tokens[0]}; the root is the last committed token, "
                f"request.tokens[-1], which is {request.last_token} here, and guesses go below it",
            )
        if len(tree) > 1 and drafter.max_nodes <= 1:
            warnings.warn(
                f"drafter {drafter.name!r} proposes {len(tree)} nodes, and its max_nodes={drafter.max_nodes} "
                "counts the root: nothing is drafted; set max_nodes to the nodes of its largest tree",
                stacklevel=2,
            )
    return trees


def _wrong(drafter: RequestDrafter, what: str) -> DrafterError:
    return DrafterError(f"drafter {drafter.name!r}: propose gave {what}")
