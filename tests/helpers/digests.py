"""Digests of the bits of logits of each test model and numeric mode, and of what drafters draft for sibyl.

Run it before and after a change that should keep all bits, and compare the two outputs. The first run writes
the test models to the folder; later runs read them. Words after the folder choose models and drafters.

    export PYTHONPATH=src:tests/helpers OMP_NUM_THREADS=1
    python tests/helpers/digests.py /tmp/digest-models > after.txt
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import numpy as np
import torch
from every_drafter import DRAFTERS, resolve
from families import BLOCK, CASES, MULTIMODALS, VOCAB, random_oracle

from soothsay import LLM, SamplingParams
from soothsay.core.batch import Rows
from soothsay.core.cache import Move
from soothsay.core.tree import DraftTree
from soothsay.errors import ModelError
from soothsay.model.ops.kernels import StockKernels
from soothsay.model.transformer import Transformer
from soothsay.model.weights.checkpoint import open_checkpoint
from soothsay.model.weights.load import load_model

MODES = ("float32", "bfloat16", "int8", "int4")
TAPS = (0, 1)


def digest(parts: list[torch.Tensor]) -> str:
    """A short digest of the bits of some tensors."""
    total = hashlib.sha256()
    for part in parts:
        total.update(part.float().contiguous().numpy().tobytes())
    return total.hexdigest()[:16]


@torch.no_grad()
def passes(model: Transformer) -> str:
    """Two prompts, a tree of each, the accepted path, and a pass after it; and a pass without a pool."""
    rng, found = np.random.default_rng(7), list[torch.Tensor]()
    cache = model.new_cache(24, BLOCK, requests=2, snapshots=1, nodes=12)
    tables = rng.permutation(24).reshape(2, 12)

    def run(requests: list[Rows], pool: object = cache) -> None:
        hidden, taps = model(model.pack(requests, BLOCK), pool, taps=TAPS)  # type: ignore[arg-type]
        found.extend([model.logits(hidden), *taps])

    prompts = [rng.integers(VOCAB, size=size) for size in (41, 17)]
    run(
        [
            Rows(tokens, 0, table, state=i)
            for i, (tokens, table) in enumerate(zip(prompts, tables, strict=True))
        ]
    )
    tree = DraftTree(5)
    for parent, token in ((0, 8), (0, 13), (1, 21), (3, 34), (2, 55), (4, 89)):
        tree.add(parent, token)
    starts = [len(tokens) for tokens in prompts]
    root = np.array([5])
    run(
        [
            Rows(root, start, table, tree, state=i)
            for i, (start, table) in enumerate(zip(starts, tables, strict=True))
        ]
    )
    nodes = [[1, 3, 4], [2]]  # accepted
    model.commit(
        cache,
        [
            Move(table, [start + node for node in path], start + 1, state=i)
            for i, (start, table, path) in enumerate(zip(starts, tables, nodes, strict=True))
        ],
    )
    last = rng.integers(VOCAB, size=3)
    ends = [start + 1 + len(path) for start, path in zip(starts, nodes, strict=True)]
    run([Rows(last, end, table, state=i) for i, (end, table) in enumerate(zip(ends, tables, strict=True))])
    run([Rows(prompts[0], 0)], None)
    return digest(found)


def models(folder: Path, wanted: list[str]) -> None:
    """Print a digest of each test model by numeric mode, with native kernels and with stock ones."""
    names = [name for name in (*CASES, *MULTIMODALS, "sibyl") if not wanted or name in wanted]
    for name in names:
        path: Path | str = "sibyl" if name == "sibyl" else folder / name
        if isinstance(path, Path) and not path.exists():
            random_oracle(name).save_pretrained(path)
        checkpoint = open_checkpoint(path)
        for mode in MODES:
            for kernels in (None, StockKernels()):
                title = f"{name} {mode} {'fastest' if kernels is None else 'stock'}"
                try:
                    model = load_model(checkpoint, mode, kernels=kernels)  # type: ignore[arg-type]
                except ModelError as error:
                    print(title, "refused:", str(error)[:90].replace(str(folder), ""), flush=True)
                    continue
                print(title, passes(model), flush=True)


def drafters(wanted: list[str]) -> None:
    """Print a digest of what each drafter proposes for sibyl, and of what is accepted."""
    for spec in DRAFTERS:
        is_timed = spec == "auto" or "|" in spec  # what they choose depends on the times of this machine
        if is_timed or (wanted and spec not in wanted):
            continue
        llm = LLM("sibyl", drafter=resolve(spec), dtype="int8", kv_tokens=1024)
        total = hashlib.sha256()
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature, max_tokens=24, seed=3)
            [request] = llm.requests("To be or not to be, to be or", params, traced=True)
            llm.engine.add(request)
            while llm.engine.has_work:
                llm.engine.step()
            for step in request.traces or ():
                total.update(repr((list(step.tokens), list(step.path), step.bonus)).encode())
        print("drafter", spec, total.hexdigest()[:16], flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    models(Path(sys.argv[1]), sys.argv[2:])
    drafters(sys.argv[2:])
