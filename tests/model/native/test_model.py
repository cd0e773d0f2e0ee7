"""Whole models with native kernels against the same weights with stock operations."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tiny import mixtures

from soothsay.core.batch import Batch, Rows
from soothsay.core.tree import DraftTree
from soothsay.model.native.native_kernels import load_native
from soothsay.model.specs.attention_spec import RopeSpec
from soothsay.model.transformer import Transformer

COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 32,
    "num_heads": 4,
    "attention_scale": 32**-0.5,
}
FAMILIES = {
    "llama": {},
    "mistral": {"windows": (7, 7)},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "gemma2": {
        "post_norms": True,
        "activation": "gelu_tanh",
        "windows": (7, None),
        "attention_softcap": 5.0,
        "logit_softcap": 10.0,
        "embedding_scale": 8.0,
    },
    "gemma3": {
        "post_norms": True,
        "qk_norm": True,
        "windows": (7, None),
        "second_rope": RopeSpec(1e3),
        "second_rope_layers": (0,),
    },
    "mixtral": {"experts": mixtures(4, 2, 48, layers=(0, 1))},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_agree(tiny: Callable[..., Transformer], family: str) -> None:
    native = load_native()
    if native is None:
        pytest.skip("no native kernels: they were not compiled")
    stock = tiny(1, **COMMON, **FAMILIES[family])
    assert native.fit(stock.spec)
    other = Transformer(stock.spec, native).eval().requires_grad_(False)
    other.load_state_dict(stock.state_dict())
    tree = DraftTree(5)
    tree.extend([6, 7])
    tree.extend([6, 8])
    tree.extend([9])
    rows = [
        Rows(np.arange(40), 0, np.arange(10), DraftTree(39)),
        Rows(np.array([3, 4, 5]), 0, np.arange(10, 20), tree),
    ]
    batch = Batch.pack(rows, block_size=8, group=stock.spec.group, windows=stock.spec.windows)
    results = []
    for model in (stock, other):
        hidden, taps = model(batch, model.new_cache(20, 8), taps=(1, 2))
        results.append((model.logits(hidden), *taps))
    for expected, result in zip(*results, strict=True):
        assert (expected - result).abs().max() < 1e-4 * expected.abs().max()
    with pytest.raises(ValueError, match="the batch uses 87 slots, and 47 are available"):
        other(batch)  # packed for a pool
    alone = Batch.pack(
        [row._replace(table=None) for row in rows], group=stock.spec.group, windows=batch.windows
    )
    torch.testing.assert_close(other.logits(other(alone)[0]), results[1][0])
