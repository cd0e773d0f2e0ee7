"""DFlash and its kin: published layouts compute what their own packages do; trees under stress."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dflash_oracle import CASES, CONTEXT, KEPT, PATHS, compute, config, features, target_ends, weights
from safetensors.torch import load_file, save_file
from torch import Tensor

from soothsay.config import EngineConfig
from soothsay.core.batch import Rows
from soothsay.core.tree import DraftTree
from soothsay.drafters.base import Target
from soothsay.drafters.heads.checkpoints.directory import read_head
from soothsay.drafters.heads.modules.base import TargetEnds
from soothsay.drafters.heads.modules.dflash import DFlashHead
from soothsay.drafters.trees.draft_blocks import BlockPacker, scratch_pool
from soothsay.model.transformer import Transformer

Make = Callable[..., Transformer]
Raw = dict[str, Tensor]


@pytest.fixture(scope="module")
def target(tiny: Make) -> Target:
    model = tiny(num_layers=6, windows=(None,) * 6)
    with torch.no_grad():
        model.embedding.weight.copy_(target_ends()[0])
        model.head.weight.copy_(target_ends()[1])
    return Target(model, None, EngineConfig(max_context=256), num_blocks=4)


def save(path: Path, raw: Raw, options: dict[str, Any]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(options))
    save_file(raw, path / "model.safetensors")
    return path


def guesses(head: DFlashHead, target: Target, chunks: tuple[int, ...] = (3,)) -> Tensor:
    """The same logits as `compute`. The context comes in chunks that begin at these tokens.

    The request's blocks are the second and the fourth of the pool. Another request's rows stand before it.
    """
    shared, c, root = TargetEnds.of(target.model), head.config, len(CONTEXT) - 1
    packer = BlockPacker(target, c.size, c.mask, c.sights, c.block.group)
    pool = scratch_pool(target, c.block, torch.float32, 2 * (c.size + root))
    read = head.fuse(list(features()), shared)
    table, others = np.array([1, 3]), np.array([0, 2])
    block = DraftTree(CONTEXT[-1])
    block.extend([0] * c.size)
    borders = [1, *chunks, root + 1]
    out = torch.empty(0)
    for begin, end in pairwise(borders):
        own = Rows(np.array(CONTEXT[begin:end]), begin, table, block if end > root else None, first_key=1)
        other = Rows(np.array([8, 9]), 1, others, block, first_key=1)
        place = packer.pack([other, own])
        with torch.no_grad():
            rows = torch.cat([torch.randn(2, read.shape[1]), read[begin - 1 : end - 1]])
            out = head(rows, head.embed(place.tokens, shared), place, pool.layers)
    out = out[1:]  # [1, B, H]
    first = c.size - c.num_guesses
    with torch.no_grad():
        logits = head.logits(out[0, first:], shared)
        if head.path_head is None:
            return torch.stack([logits, logits])
        known = head.path_head.read(out)
        found = []
        for path in PATHS:
            before = torch.tensor(CONTEXT[-2:-1])
            states, steps = head.path_head.begin(known, torch.tensor(CONTEXT[-1:]), before), []
            for depth, token in enumerate([CONTEXT[-1], *path][: len(logits)]):
                here = slice(depth, depth + 1)
                corrected, states = head.path_head.step(
                    logits[here], known[0, first:][here], torch.tensor([token]), states
                )
                steps.append(corrected)
            found.append(torch.cat(steps))
        return torch.stack(found)


def opened(path: Path, target: Target) -> DFlashHead:
    head = read_head(path, target)
    assert isinstance(head, DFlashHead)
    return head


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_that_the_packages_computed(name: str, target: Target, tmp_path: Path) -> None:
    head = opened(save(tmp_path, weights(name), config(name)), target)
    found = guesses(head, target)
    torch.testing.assert_close(found, load_file(KEPT)[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_the_file_holds_what_the_packages_compute(name: str) -> None:
    pytest.importorskip("speculators", reason="no speculators: the package is not installed")
    pytest.importorskip("dflash", reason="no speculators: nor dflash")
    torch.testing.assert_close(compute(name), load_file(KEPT)[name], rtol=1e-5, atol=1e-5)
