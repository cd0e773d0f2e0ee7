"""Are a device's bits those that were predicted, and does no row's bits depend on its company?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import predicted_bits
import torch
from job import TINY, Job, Numbers
from torch import Tensor

from soothsay.bench.random_models import LlamaShape
from soothsay.core.batch import Batch, Rows
from soothsay.core.cache import KVPool
from soothsay.core.sampling_ops import SamplingOps
from soothsay.core.tree import DraftTree
from soothsay.model.decoder.norm import RMSNorm
from soothsay.model.gpu import tiles
from soothsay.model.gpu.gpu_kernels import GpuKernels
from soothsay.model.gpu.gpu_linear import GpuLinear
from soothsay.model.ops.kernels import StockKernels
from soothsay.model.ops.linear import Integer
from soothsay.model.transformer import Transformer
from soothsay.model.weights.quantized import Quantized, round_to_nearest

COUNTS = 1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65
PAGE = 16
MODEL = LlamaShape(layers=3, hidden=1024, heads=8, kv_heads=2, ffn=2816, vocab=4096)
"""With heads of 128, and layers whose inputs are split."""

CONTEXTS, BRANCHES = (1023, 255, 60, 9, 0, 700), (0, 0, 1, 1, 2, 4, 4, 5, 7)
"""Keys before the trees of a pass, and parents of a tree's nodes after the root. A path crosses chunks."""


def measure(job: Job) -> Numbers:
    """Checks: each is True, or else something is wrong."""
    torch.manual_seed(0)
    for kind in predicted_bits.PREDICTED:
        yield f"bits of {kind}", partial(_predicted, job, kind)
    for kind in ("bfloat16", "float16", "float32", "int8", "int4"):
        yield f"linear, {kind}", partial(_linear, job, kind)
    yield "norms and activations", partial(_glue, job)
    for size in (64, 128):
        yield f"attention, heads of {size}", partial(_attention, job, size)
    yield "sampling", partial(_sampling, job)
    for dtype in job.dtypes:
        yield f"passes, {dtype}", partial(_passes, job, dtype)


def _predicted(job: Job, kind: str) -> dict[str, Any]:
    """The digest of a device's bits, and whether it is that of Hopper's arithmetic, or of integers."""
    if job.dry:
        import interpreter

        with interpreter.dots("hopper"):
            found = predicted_bits.digest(kind, job.device)
    else:
        found = predicted_bits.digest(kind, job.device)
    must = job.dry or kind.startswith("int") or torch.cuda.get_device_capability() == (9, 0)
    is_right = found == predicted_bits.PREDICTED[kind]
    return {"digest": found} | ({"as predicted": is_right} if must else {})


def _linear(job: Job, kind: str) -> dict[str, Any]:
    """Against float64 or the stock layer; each row alone, among others, in another order, in other tiles."""
    outputs, inputs, rows = (65, 256, 20) if job.dry else (648, 4096, 130)
    weight: Tensor | Quantized = torch.randn(outputs, inputs) / inputs**0.5
    x = (torch.randn(rows, inputs) * torch.logspace(-3, 3, rows)[:, None]).to(job.device)
    if kind.startswith("int"):
        weight = round_to_nearest(weight, int(kind[3:]), 32)
        exact = Integer(weight, None, torch.float32)(x[:8].cpu()).double()
    else:
        weight = weight.to(getattr(torch, kind))
        exact = x[:8].cpu().to(weight.dtype).double() @ weight.double().t()
    made = GpuLinear(weight, None, torch.float32, job.device)
    among = made(x)
    error = float((among[:8].cpu() - exact).norm() / exact.norm())
    counts = [count for count in COUNTS if count < rows]
    found: dict[str, Any] = {
        "splits": made.splits,
        "error": error,
        "is near": error < 1e-4,
        "in any company": all(torch.equal(made(x[-count:]), among[-count:]) for count in counts),
        "alone": all(torch.equal(made(x[n : n + 1])[0], among[n]) for n in range(0, rows, 7)),
        "in another order": torch.equal(made(x.flip(0)).flip(0), among),
    }
    for tile in tiles.TILES[made.weight.kind]:
        with patch.dict(tiles.TILES, {made.weight.kind: (tile,)}):
            found[f"in tiles of {tile.rows}"] = torch.equal(made(x[:33]), among[:33])
    return found


def _glue(job: Job) -> dict[str, bool]:
    """Against stock operations, and each row alone."""
    ours, stock, size = GpuKernels(job.device), StockKernels(), 100 if job.dry else 4096
    norm = RMSNorm(size, 1e-5).to(job.device)
    x, delta = (torch.randn(9, size, device=job.device) * 3 for _ in range(2))
    calls: dict[str, Callable[[Any, slice], Tensor]] = {
        "norm": lambda ops, s: ops.norm(x[s], norm, torch.float32),
        "sum and norm": lambda ops, s: ops.add_norm(x[s], delta[s], norm, norm, torch.float32)[1],
        "silu": lambda ops, s: ops.gated(x[s], "silu"),
        "gelu": lambda ops, s: ops.gated(x[s], "gelu_tanh"),
    }
    found = {}
    for name, call in calls.items():
        among = call(ours, slice(None))
        found[f"{name} is near"] = torch.allclose(among, call(stock, slice(None)), rtol=1e-5, atol=1e-5)
        alone = [call(ours, slice(row, row + 1)) for row in range(len(x))]
        found[f"{name} alone"] = torch.equal(torch.cat(alone), among)
    return found


def _attention(job: Job, size: int) -> dict[str, Any]:
    """Trees after contexts of all kinds, against stock attention in float32."""
    heads, group = (1, 2) if job.dry else (2, 4)
    requests = _requests((40, 0) if job.dry else (*CONTEXTS, 2050))
    slots = sum(len(rows.table) for rows in requests if rows.table is not None) * PAGE
    kv = torch.randn(2 * heads, slots, size, device=job.device).bfloat16()
    ours, stock = (
        Batch.pack(requests, block_size=PAGE, group=group, device=job.device, ops=ops)
        for ops in (GpuKernels(job.device), StockKernels())
    )
    q = torch.randn(len(ours.tokens), heads * group, size, device=job.device).bfloat16() * 0.4
    exact = StockKernels().attend(q.float(), kv, stock)
    error = float((GpuKernels(job.device).attend(q, kv, ours).float() - exact).norm() / exact.norm())
    return {"error": error, "is near": error < 1e-2}


def _sampling(job: Job) -> dict[str, bool]:
    """Operations on rows of logits: alone and among 64, and tokens against those of the host."""
    ops, stock, found = GpuKernels(job.device).sampling, SamplingOps(), dict[str, bool]()
    rows, vocab = (5, 300) if job.dry else (64, 128_256)
    given = torch.randn(rows, vocab) * 4, torch.full((rows,), 0.8), torch.arange(2 * rows).view(rows, 2)
    calls: dict[str, Callable[[SamplingOps, Tensor, Tensor, Tensor], Sequence[Tensor]]] = {
        "argmax": lambda own, x, t, k: (own.argmax(x),),
        "largest": lambda own, x, t, k: own.largest(x, 4, t),
        "race": lambda own, x, t, k: own.race(x, t, k, 4),
        "logprobs": lambda own, x, t, k: own.logprobs(x, x.argmax(-1), 4),
    }
    for name, call in calls.items():
        there = [part.to(job.device) for part in given]
        among, first = call(ops, *there), call(ops, *(part[:1] for part in there))
        found[f"{name} alone"] = all(torch.equal(a[:1], b) for a, b in zip(among, first, strict=True))
        pairs = [*zip(among, call(stock, *given), strict=True)]
        tokens = [(a.cpu(), b) for a, b in pairs if not a.is_floating_point()]
        found[f"{name} as on the host"] = all(torch.equal(a, b) for a, b in tokens)
    return found


def _requests(contexts: Sequence[int], branches: Sequence[int] = BRANCHES) -> list[Rows]:
    """A tree after each number of keys. Tables of blocks are shuffled."""
    used = [-(-(context + 2 + len(branches)) // PAGE) for context in contexts]
    blocks, rows = np.random.default_rng(0).permutation(sum(used)).astype(np.int64), []
    for context, count in zip(contexts, used, strict=True):
        tree = DraftTree(7)
        for node, parent in enumerate(branches, start=1):
            tree.add(parent, node + 8, -1.0)
        table, blocks = blocks[:count], blocks[count:]
        rows.append(Rows(np.array([7]), context, table, tree))
    return rows


def _passes(job: Job, dtype: Any) -> dict[str, bool]:
    """Whole passes: trees together, their paths alone, their tokens one by one; eager, replayed, padded."""
    model = job.random_model(TINY if job.dry else MODEL, dtype)
    requests = _requests((20, 0), BRANCHES[:3]) if job.dry else _requests(CONTEXTS)
    pool = model.new_cache(sum(len(rows.table) for rows in requests if rows.table is not None), PAGE)
    for request in requests:
        _read(model, pool, request, max(request.start, 1))
    together, at = _eager(model, pool, requests), 0
    replayed = torch.equal(_again(model, pool, requests), together)
    alone = paths = single = True
    for number, request in enumerate(requests):
        tree = request.tree or DraftTree(0)
        own, at = together[at : at + len(tree)], at + len(tree)
        alone &= torch.equal(_again(model, pool, [request]), own)  # filled up to 16 rows
        for path in tree.paths() if number < (1 if job.dry else 3) else ():
            nodes = [0, *(node for node in path if node)]
            chain = DraftTree(7)
            chain.extend([tree.tokens[node] for node in nodes[1:]])
            paths &= torch.equal(_eager(model, pool, [request._replace(tree=chain)]), own[nodes])
            for step, node in enumerate(nodes):
                token, place = tree.tokens[node], request.start + step
                rows = Rows(np.array([token]), place, request.table, DraftTree(token))
                single &= torch.equal(_again(model, pool, [rows])[0], own[node])
    found = {"replayed": replayed, "each request alone": alone, "each path alone": paths}
    return found | {"token by token": single, "prompts in chunks": _chunks(job, model)}


def _read(model: Transformer, pool: KVPool, request: Rows, chunk: int) -> None:
    """Read a random prompt before a request's tree, in chunks."""
    tokens = np.random.default_rng(1).integers(0, model.spec.vocab_size, request.start)
    for begin in range(0, request.start, chunk):
        rows = request._replace(tokens=tokens[begin : begin + chunk], start=begin, tree=None)
        model.run(model.pack([rows], PAGE), pool)


def _chunks(job: Job, model: Transformer) -> bool:
    """Whether the logits after a prompt are the same when it is read in chunks of other sizes."""
    (request,), found = _requests([24 if job.dry else 600], [0]), []
    for chunk in (24, 7) if job.dry else (600, 128, 65, 64, 33, 7):
        pool = model.new_cache(request.start // PAGE + 1, PAGE)
        _read(model, pool, request, chunk)
        found.append(_eager(model, pool, [request]))
    return all(torch.equal(logits, found[0]) for logits in found)


def _eager(model: Transformer, pool: KVPool, requests: Sequence[Rows]) -> Tensor:
    """The logits of a pass, operation by operation."""
    return model.compute(model.pack(requests, PAGE), pool, None, ())[2]


def _again(model: Transformer, pool: KVPool, requests: Sequence[Rows]) -> Tensor:
    """The logits of a recorded pass: it has been run often enough."""
    batch = model.pack(requests, PAGE)
    return [model.run(batch, pool)[2] for _ in range(4)][-1]
