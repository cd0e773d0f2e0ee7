"""P-EAGLE: published layouts compute what speculators does; trees under stress."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from one_shot import STRESSES, check_best_tree, log_probs, made, serve
from oracles import dense_block, randomize, rms_norm, taps_of
from peagle_oracle import DEPTH, KEPT, KINDS, MASK, TAPS, block, compute, config, features, flags, weights
from safetensors.torch import load_file, save_file
from speculators_oracle import CONTEXT, HEADS, KV
from tiny import TINY, adapted
from torch import Tensor

from soothsay.config import EngineConfig
from soothsay.core.batch import Batch, Rows
from soothsay.core.tree import DraftTree
from soothsay.drafters.base import Target
from soothsay.drafters.heads.checkpoints.head_directory import open_head, read_head
from soothsay.drafters.heads.eagle3 import Eagle3Config
from soothsay.drafters.heads.peagle import PEagle, PEagleConfig, PEagleHead
from soothsay.drafters.heads.trained_head import TargetEnds
from soothsay.drafters.trees.own_kv import own_pool
from soothsay.model.ops.kernels import StockKernels
from soothsay.model.transformer import Transformer

Make = Callable[..., Transformer]


@pytest.fixture(scope="module")
def target(tiny: Make) -> Target:
    model = tiny(num_layers=6, windows=(None,) * 6)
    return Target(model, None, EngineConfig(max_context=256), num_blocks=4)


def save(path: Path, raw: dict[str, Tensor], options: dict[str, Any]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(options))
    save_file(raw, path / "model.safetensors")
    return path


def guesses(path: Path, target: Target, chunk: int = 2) -> Tensor:
    """The same logits as `compute`. The first rows come in a pass of their own."""
    head, shared = read_head(path, target), TargetEnds.of(target.model)
    assert isinstance(head, PEagleHead)
    pool = own_pool(target, head.config.first.block, torch.float32)
    chain = DraftTree(CONTEXT[-1])
    chain.extend([0] * (DEPTH - 1))
    out, table = torch.empty(0), np.array([2, 0])
    with torch.no_grad():
        read = head.fuse(list(features()), shared)
        for begin, end, tree in ((0, chunk, None), (chunk, len(CONTEXT), chain)):
            rows = Rows(np.array(CONTEXT[begin:end]), begin, table, tree)
            batch = Batch.pack([rows], block_size=target.config.block_size, group=HEADS // KV)
            embedded, features_read = head.embed(batch.tokens, shared), read[begin:end]
            if tree is not None:
                mask, feature = head.mask_row(shared)
                embedded[end - begin :] = mask
                features_read = torch.cat([features_read, feature.expand(DEPTH - 1, -1)])
            out = head(embedded, features_read, batch, pool.layers)
        logits = head.logits(out[-DEPTH:], shared)
    assert (logits.isfinite().sum(1) == len(head.listed)).all()
    return logits[:, head.listed]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_that_speculators_computed(kind: str, target: Target, tmp_path: Path) -> None:
    found = guesses(save(tmp_path, weights(kind), config(kind)), target)
    torch.testing.assert_close(found, load_file(KEPT)[kind], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_holds_what_speculators_computes(kind: str) -> None:
    pytest.importorskip("speculators", reason="no speculators: the package is not installed")
    torch.testing.assert_close(compute(kind), load_file(KEPT)[kind], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("first", [0, 1])
def test_vllms_layout_is_the_same_head(first: int, target: Target, tmp_path: Path) -> None:
    """The first block is the midlayer, and the others are numbered from 0 or 1."""
    kind, raw = "three layers", {}
    for name, tensor in weights(kind).items():
        layer = int(name.split(".")[1]) if name.startswith("layers.") else -1
        theirs = name.replace("layers.0.", "midlayer.") if layer == 0 else name
        theirs = name.replace(f"layers.{layer}.", f"layers.{layer - 1 + first}.") if layer > 0 else theirs
        raw[theirs] = tensor
    raw["mask_hidden"] = raw["mask_hidden"][0]
    options = {
        **block(kind),
        **flags(kind),
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": len(raw["d2t"]),
        "eagle_aux_hidden_state_layer_ids": TAPS,
        "ptd_token_id": MASK,
        "parallel_drafting": True,
    }
    save(tmp_path, raw, options)
    torch.testing.assert_close(guesses(tmp_path, target), load_file(KEPT)[kind], rtol=1e-5, atol=1e-5)
    with open_head(tmp_path, target) as stored:
        assert (stored.method, stored.layout) == ("peagle", "P-EAGLE (original)")
        assert stored.draft_vocabulary == len(raw["d2t"])
        assert stored.head.config.depth == 8


# drafts


def make_head(layers: int = 2, **changes: Any) -> PEagleHead:
    block = adapted(TINY, num_layers=layers, windows=(None,) * layers, **changes)
    first = Eagle3Config(block, 48, 33, (0, 1, 2), own_embedding=True, norm_before_residual=layers == 1)
    head: PEagleHead = randomize(PEagleHead(PEagleConfig(first, 96, 4), StockKernels()))
    head.d2t = torch.arange(33) * 2
    return head


def plain_logits(
    head: PEagleHead, target: Transformer, tokens: Sequence[int], depth: int, first: int
) -> Tensor:
    """`[depth, V]` logits after `tokens`: rows of the tokens from `first` on, and `depth - 1` mask rows."""
    w, c, masks = head.state_dict(), head.config.first, depth - 1
    taps = torch.cat(taps_of(target, tokens[:-1], head.taps), dim=-1)[first - 1 :]
    features = torch.cat([taps, w["mask_hidden"].expand(masks, -1)]) @ w["fc.weight"].t()
    embedded = w["embedding.weight"][[*tokens[first:], *[head.config.mask] * masks]]
    normed = rms_norm(features, head.hidden_norm)
    x = normed if c.norm_before_residual else features
    both = torch.cat([rms_norm(embedded, head.embedding_norm), normed], dim=-1)
    places = first + torch.arange(len(x))
    x = dense_block(w, "block", c.block, x, places, both)
    for layer in range(c.block.num_layers - 1):
        x = dense_block(w, f"more.{layer}", c.block, x, places)
    logits = torch.full((depth, 97), -torch.inf)
    logits[:, head.listed] = rms_norm(x[-depth:], head.norm) @ w["head.weight"].t()
    return logits


@pytest.mark.parametrize("stress", STRESSES)
@pytest.mark.parametrize("layers", [1, 3])
def test_guesses_are_the_likeliest_by_plain_attention(stress: str, layers: int, tiny: Make) -> None:
    target, head = tiny(0), make_head(layers)

    def make(t: object) -> PEagle:
        return PEagle(t, copy.deepcopy(head), nodes=20, branch=3)  # type: ignore[arg-type]

    drafter, _ = serve(target, make, stress)
    drafts = made(drafter)
    for guess in drafts[:: len(drafts) // 20 or 1]:
        depth = min(4, guess.max_nodes)
        known = plain_logits(head, target, guess.tokens, depth, guess.first_key)
        check_best_tree(guess, log_probs(guess, known), branch=3, size=20)
