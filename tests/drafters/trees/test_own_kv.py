"""A drafter's own keys: who sees which of them, and what is found again."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from soothsay import DraftTree, SamplingParams, Target
from soothsay.config import EngineConfig
from soothsay.core.batch import Batch, Rows
from soothsay.core.request import Request
from soothsay.drafters.base import NoDrafter
from soothsay.drafters.trees.own_kv import TokenKV
from soothsay.model.kernel_sets import best_kernels
from soothsay.model.native.layout import FlatPaths
from soothsay.model.transformer import Transformer

Make = Callable[..., Transformer]
BLOCK = 4


def random_tree(rng: np.random.Generator, nodes: int) -> DraftTree:
    tree = DraftTree(3)
    while len(tree) < nodes:
        tree.add(int(rng.integers(len(tree))), int(rng.integers(90)))
    return tree


@pytest.mark.parametrize("kind", ["stock", "best"])
@pytest.mark.parametrize("first_key", [1, 3, 130])
@pytest.mark.parametrize("window", [None, 6])
def test_rows_see_nothing_below_their_first_key(
    first_key: int, window: int | None, kind: str, tiny: Make
) -> None:
    """The result equals that of a context that begins there, since attention is relative."""
    model = tiny(4, windows=(None, window), head_dim=32, hidden_size=64)
    if kind == "best":
        other = Transformer(model.spec, best_kernels(model.spec)).eval().requires_grad_(False)
        other.load_state_dict(model.state_dict())
        model = other
    rng = np.random.default_rng(first_key)
    tree = random_tree(rng, 9)
    tokens = rng.integers(0, 97, 7)
    pool = model.new_cache(100, BLOCK)
    for layer in pool.layers:
        layer.normal_(std=50)  # whatever lies below is not to be seen
    table = rng.permutation(100)[: -(-(first_key + 20) // BLOCK)]

    def run(rows: list[Rows], cache: object) -> torch.Tensor:
        batch = Batch.pack(
            rows, block_size=BLOCK if cache else 1, group=model.spec.group, windows=model.spec.windows
        )
        return model(batch, cache)[0]

    chunk = Rows(tokens[:3], first_key, table, first_key=first_key)
    rest = Rows(tokens[3:], first_key + 3, table, tree, first_key=first_key)
    got = torch.cat([run([chunk], pool), run([rest], pool)])
    expected = run([Rows(tokens, 0, None, tree)], None)
    assert torch.allclose(got, expected, atol=2e-3)


def test_a_row_that_could_not_see_itself_is_refused() -> None:
    rows = Rows(np.array([1, 2]), 3, np.arange(4), DraftTree(2), first_key=4)
    with pytest.raises(ValueError, match="a row at offset 3 sees no keys below 4"):
        Batch.pack([rows], block_size=BLOCK)
    Batch.pack([rows._replace(first_key=3)], block_size=BLOCK)


@pytest.mark.parametrize("seed", range(10))
def test_both_layouts_of_paths_agree_on_what_is_seen(seed: int) -> None:
    rng = np.random.default_rng(seed)
    start = int(rng.integers(1, 200))
    hidden = int(rng.integers(0, start + 1))
    table = rng.permutation(100)
    tree = random_tree(rng, int(rng.integers(1, 12)))
    rows = Rows(np.array([5, 3]), start, table, tree, first_key=hidden)
    batch = Batch.pack([rows], block_size=BLOCK, group=4)

    def slot(offset: int) -> int:
        return int(table[offset // BLOCK]) * BLOCK + offset % BLOCK

    root = start + 1
    expected = {0: range(hidden, start + 1), 1: range(hidden, root + 1)}
    for node in range(1, len(tree)):
        expected[node + 1] = [*range(hidden, root + 1), *(root + n for n in tree.path(node)[1:])]
    flat = FlatPaths.of(batch.paths).lists
    for i in range(len(flat.row_begin) - 1):
        keys = flat.keys[flat.key_begin[i] : flat.key_begin[i + 1]].tolist()
        for at in range(int(flat.row_begin[i]), int(flat.row_begin[i + 1])):
            seen = keys[: int(flat.positions[at]) + 1]
            assert seen == [slot(offset) for offset in expected.pop(int(flat.rows[at]))]
    assert not expected
    assert batch.positions.tolist() == [start, root, *(root + d for d in tree.depths[1:])]


def test_the_last_token_of_a_known_prompt_is_computed_again(tiny: Make) -> None:
    """The drafter needs its logits, though the block that it fills is noted."""
    model, text = tiny(0), [*range(20, 20 + 2 * BLOCK)]
    target = Target(model, None, EngineConfig(max_context=200, block_size=BLOCK, max_rows=16), 8)
    kv, computed = TokenKV(target, model.new_cache(8, BLOCK)), []
    for _ in range(2):
        request = Request(
            text, SamplingParams(), seed=0, limit=200, drafter=NoDrafter(target), block_size=BLOCK
        )
        request.blocks, request.max_nodes = [5, 2], 4
        (one,) = kv.catch_up({request: DraftTree(text[-1])})
        computed.append(one.rows[0].tokens.tolist())
    assert computed == [text, text[-1:]]
