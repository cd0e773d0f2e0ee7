"""EAGLE-3 and EAGLE-3.1 heads compute what the package `speculators` does, on a context and on a tree."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from speculators_oracle import (
    CONTEXT,
    FLAGS,
    HEADS,
    KEPT,
    KV,
    PATHS,
    compute,
    config,
    features,
    weights,
)
from torch import Tensor

from soothsay.config import EngineConfig
from soothsay.core.batch import Batch, Rows
from soothsay.core.tree import DraftTree
from soothsay.drafters.base import Target
from soothsay.drafters.heads.checkpoints.head_directory import read_head
from soothsay.drafters.heads.eagle3 import Eagle3Head
from soothsay.drafters.heads.trained_head import TargetEnds
from soothsay.model.transformer import Transformer


@pytest.fixture(scope="module")
def target(tiny: Callable[..., Transformer]) -> Target:
    model = tiny(num_layers=6, windows=(None,) * 6)
    return Target(model, None, EngineConfig(max_context=256), num_blocks=4)


def ours(kind: str, target: Target, path: Path) -> Tensor:
    """The same logits as `compute`: the tree is grown level by level, siblings in one pass."""
    (path / "config.json").write_text(json.dumps(config(kind)))
    save_file(weights(kind), path / "model.safetensors")
    head, shared = read_head(path, target), TargetEnds.of(target.model)
    assert isinstance(head, Eagle3Head)
    read = head.fuse([tap[: len(CONTEXT)] for tap in features()], shared)
    tree, out = DraftTree(CONTEXT[-1]), torch.empty(0)
    nodes = [0, 0]
    for depth in range(3):
        batch = Batch.pack([Rows(np.array(CONTEXT), 0, tree=tree)], group=HEADS // KV)
        with torch.no_grad():
            out = head(head.embed(batch.tokens, shared), read, batch, None)
        if depth == 2:
            break
        above = [len(CONTEXT) - 1 + node for node in nodes]  # rows of the parents
        read = torch.cat([read, out[above]])
        nodes = [tree.add(node, path[depth]) for node, path in zip(nodes, PATHS, strict=True)]
    order = [*range(len(CONTEXT)), *(len(CONTEXT) + i for i in (0, 2, 1, 3))]  # by level -> by path
    return head.logits(out, shared)[order][:, head.listed].detach()


@pytest.mark.parametrize("kind", FLAGS)
def test_logits_are_those_that_speculators_computed(kind: str, target: Target, tmp_path: Path) -> None:
    expected = load_file(KEPT)[kind]
    torch.testing.assert_close(ours(kind, target, tmp_path), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", FLAGS)
def test_the_file_holds_what_speculators_computes(kind: str) -> None:
    pytest.importorskip("speculators", reason="no speculators: the package is not installed")
    torch.testing.assert_close(compute(kind), load_file(KEPT)[kind], rtol=1e-5, atol=1e-5)
