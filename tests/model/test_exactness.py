"""The bits of logits: a node of a tree, in any batch and after any chunking, against plain decoding."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import pytest
import torch
from slow import distinct
from torch import Tensor

from soothsay.core.batch import Batch, Rows
from soothsay.core.cache import KVPool
from soothsay.core.tree import DraftTree
from soothsay.model.transformer import Transformer
from soothsay.model.weights.checkpoint import open_checkpoint
from soothsay.model.weights.load import load_model

BLOCK = 16
NUM_BLOCKS = 400
TREES = 12


@cache
def model(dtype: str) -> Transformer:
    return load_model(open_checkpoint("sibyl"), dtype)


def logits(target: Transformer, cache: KVPool, rows: list[Rows]) -> list[Tensor]:
    """Compute the logits `[nodes, V]` of each request's tree nodes."""
    c = target.spec
    batch = Batch.pack(rows, block_size=BLOCK, group=c.group, windows=c.windows)
    with torch.inference_mode():
        out = target.logits(target(batch, cache)[0].index_select(0, batch.logit_rows))
    return [out[begin:end] for begin, end in batch.spans]


def grow(rng: random.Random, root: int, vocab_size: int) -> DraftTree:
    """Make a random tree, anything from a chain to a bush."""
    tree = DraftTree(root)
    for _ in range(rng.randint(0, 6)):
        stem = tree.tokens[1 : rng.randint(1, len(tree))]
        path = []
        node = 0
        for token in stem:  # follow the tree for a while, then leave it
            if rng.random() < 0.3 or tree.parents[tree.tokens.index(token)] != node:
                break
            node = tree.tokens.index(token)
            path.append(token)
        tree.extend([*path, *(rng.randrange(vocab_size) for _ in range(rng.randint(1, 5)))])
    return tree


def path_to(tree: DraftTree, node: int) -> list[int]:
    tokens: list[int] = []
    while node > 0:
        tokens.insert(0, tree.tokens[node])
        node = tree.parents[node]
    return tokens


@pytest.mark.parametrize("dtype", distinct("float32", "bfloat16", "int8", "int4"))
def test_random_trees_in_random_batches(dtype: str) -> None:
    """Contexts of up to 300 tokens cross several of the attention's blocks of keys."""
    target, rng = model(dtype), random.Random(0)
    vocab_size = target.spec.vocab_size
    trees_seen = nodes_seen = branching = 0
    while trees_seen < TREES:
        together, alone = target.new_cache(NUM_BLOCKS, BLOCK), target.new_cache(NUM_BLOCKS, BLOCK)
        blocks = list(range(NUM_BLOCKS))
        rng.shuffle(blocks)
        contexts, tables, trees = [], [], []
        for _ in range(rng.randint(1, 5)):
            context = np.array([rng.randrange(vocab_size) for _ in range(rng.choice([1, 9, 70, 130, 300]))])
            contexts.append(context)
            tables.append(np.array([blocks.pop() for _ in range(len(context) // BLOCK + 4)]))
            trees.append(grow(rng, int(context[-1]), vocab_size))
        rows = []
        for context, table, tree in zip(contexts, tables, trees, strict=True):
            start = rng.randrange(len(context))  # what is before it came in an earlier pass, as a chunk would
            if start:
                logits(target, together, [Rows(context[:start], 0, table)])
            rows.append(Rows(context[start:], start, table, tree))
        for context, table, tree, found in zip(
            contexts, tables, trees, logits(target, together, rows), strict=True
        ):
            end = len(context)
            plain = {0: logits(target, alone, [Rows(context, 0, table, DraftTree(int(context[-1])))])[0][0]}
            for node in range(1, len(tree)):
                if node in tree.parents:
                    continue
                path = path_to(tree, node)  # from the root to a leaf, one token at a time
                nodes = [node]
                while tree.parents[nodes[0]] > 0:
                    nodes.insert(0, tree.parents[nodes[0]])
                for i, (token, at) in enumerate(zip(path, nodes, strict=True)):
                    step = Rows(np.array([token]), end + i, table, DraftTree(token))
                    plain[at] = logits(target, alone, [step])[0][0]
            for node in range(len(tree)):
                assert torch.equal(found[node], plain[node]), (dtype, len(context), tree.parents, node)
            trees_seen += 1
            nodes_seen += len(tree)
            branching += len(set(tree.parents)) < len(tree)
    assert nodes_seen > 4 * TREES
    assert branching > TREES / 3
