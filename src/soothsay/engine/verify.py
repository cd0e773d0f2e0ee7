"""Which guesses hold: from a tree and what the target draws at its nodes to the tokens that are emitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from soothsay.engine.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Verdict:
    """The accepted path and what it says."""

    path: list[int]  # accepted nodes below the root, in order
    tokens: list[int]  # their tokens, and the bonus token: the target's draw at the last of them


def match(tree: DraftTree, draws: Sequence[int]) -> Verdict:
    """Follow the draws down from the root for as long as the tree has guessed them.

    `draws[i]` is what the target emits after node i. The result is what plain decoding would say, token by
    token; for a drafter without noise of its own this accepts with exactly the law of recursive rejection
    sampling.
    """
    path: list[int] = []
    node = 0
    while (child := tree.children[node].get(draws[node])) is not None:
        path.append(child)
        node = child
    return Verdict(path, [tree.tokens[n] for n in path] + [draws[node]])
