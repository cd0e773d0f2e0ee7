"""A pass of an encoder-decoder is split into the rows of sources and those of targets."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from soothsay.core.batch import Batch, Rows
from soothsay.core.sides import Sides
from soothsay.core.tree import DraftTree
from soothsay.errors import ModelError


def rows(
    *tokens: int, start: int = 0, source: int = 3, tree: DraftTree | None = None, block: int = 0
) -> Rows:
    """The rows of a request, whose KV is in two blocks from `block` on."""
    table = np.array([block, block + 1], dtype=np.int64)
    return Rows(np.array(tokens, dtype=np.int64), start, table, tree, source=source)


def test_the_example_with_another_request_before_it() -> None:
    tree = DraftTree(9)
    tree.extend([7])
    other = rows(4, 5, source=2, block=4)  # reads a source, and nothing else
    sides = Sides.of(Batch.pack([other, rows(1, 2, 3, 9, tree=tree)], block_size=4))
    assert sides.rows.tolist() == [5, 6]
    assert sides.slots.tolist() == [16, 17, 0, 1, 2]
    source, target = sides.source, sides.target
    assert source is not None
    assert target is not None
    assert source.tokens.tolist() == [4, 5, 1, 2, 3]
    assert source.positions.tolist() == [0, 1, 0, 1, 2]
    seen = [(list(path.rows), path.positions.tolist(), path.keys.tolist()) for path in source.paths]
    assert seen == [([0, 1], [1, 1], [0, 1]), ([2, 3, 4], [2, 2, 2], [2, 3, 4])]
    assert (target.tokens.tolist(), target.positions.tolist()) == ([9, 7], [0, 1])
    assert target.slots.tolist() == [3, 4]
    [own], across = target.paths, target.across
    assert (list(own.rows), own.positions.tolist(), own.keys.tolist()) == ([0, 1], [0, 1], [3, 4])
    assert across is not None
    [path] = across.paths
    assert (list(path.rows), path.positions.tolist(), path.keys.tolist()) == ([0, 1], [2, 2], [0, 1, 2])
    assert sides.spread(torch.ones(2, 1)).flatten().tolist() == [0, 0, 0, 0, 0, 1, 1]


def test_branches_share_their_source() -> None:
    tree = DraftTree(9)
    for parent, token in ((0, 5), (0, 6), (1, 7)):
        tree.add(parent, token)
    sides = Sides.of(Batch.pack([rows(8, 9, start=3, tree=tree)], block_size=4))
    assert sides.source is None
    target = sides.target
    assert target is not None
    assert [path.keys.tolist() for path in target.paths] == [[3, 4, 6], [3, 4, 5, 7]]
    assert target.across is not None
    [path] = target.across.paths
    assert sorted(path.rows) == [0, 1, 2, 3, 4]
    assert path.keys.tolist() == [0, 1, 2]


def test_what_is_no_source_is_refused() -> None:
    with pytest.raises(ModelError, match="does not score texts"):
        Sides.of(Batch.pack([rows(1, 2, source=0)], block_size=4))
    for start, tokens in ((0, (1, 2)), (1, (2, 3, 9))):
        with pytest.raises(ValueError, match="read as a whole"):
            Sides.of(Batch.pack([rows(*tokens, start=start)], block_size=4))
