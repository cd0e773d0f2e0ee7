"""`soothsay bench step`: what one forward pass costs by its number of rows, beside what it must cost.

Speculation lives on t(M), the time to verify M rows, being little more than t(1). Its floor is the time to
read the weights once, or the time of the arithmetic, whichever is longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from soothsay.bench.measure import Contender, interleave
from soothsay.bench.shapes import RandomCheckpoint, Shape
from soothsay.config import DType
from soothsay.engine.timing import Layout, Step, filled_cache
from soothsay.model.checkpoint import open_checkpoint
from soothsay.model.linear import Dense
from soothsay.model.load import load_model
from soothsay.model.transformer import Transformer

PRODUCT_ROWS = 256
"""Rows of the product that tells the rate of arithmetic: enough that reading its weights is a trifle."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a pass has to do at least, whoever does it."""

    bytes: int
    """Read: the weights of all linear layers, scales included, and keys and values of the context."""

    operations: int
    """Of linear layers and attention; a product and its sum are two."""

    @classmethod
    def of(cls, model: Transformer, rows: int, context: int) -> Work:
        """A pass of `rows` rows. Of mixtures of experts it counts all experts."""
        c, layers = model.config, linear_layers(model)
        keys = sum(context if window is None else min(window, context) for window in c.windows)
        kv = 2 * c.num_kv_heads * c.head_dim * model.dtype.itemsize * keys
        attention = 4 * c.num_heads * c.head_dim * keys
        return cls(
            bytes=sum(held_bytes(layer) for layer, _ in layers) + kv,
            operations=rows * (2 * sum(shape.numel() for _, shape in layers) + attention),
        )

    def floor(self, bandwidth: float, rate: float) -> float:
        """Seconds, at so many bytes and operations a second: the longer of both."""
        return max(self.bytes / bandwidth, self.operations / rate)


def linear_layers(model: Transformer) -> list[tuple[nn.Module, torch.Size]]:
    """Every linear layer with its shape `[out, in]`, which the kinds themselves do not all tell."""
    with torch.device("meta"):
        plain = Transformer(model.config)
    return [
        (model.get_submodule(name), module.weight.shape)
        for name, module in plain.named_modules()
        if isinstance(module, Dense)
    ]


def held_bytes(layer: nn.Module) -> int:
    """Bytes of all tensors of a linear layer, which a pass reads once: weights, scales, zeros, bias."""
    attributes = [value for value in vars(layer).values() if isinstance(value, Tensor)]
    return sum(tensor.nbytes for tensor in (*layer.parameters(), *layer.buffers(), *attributes))


@dataclass(frozen=True, slots=True)
class StepTime:
    """One point of t(M)."""

    dtype: str
    context: int
    rows: int
    ms: float
    ratio: float  # to one row at the same dtype and context
    floor_ms: float
    bytes: int
    operations: int


@dataclass(frozen=True, slots=True)
class StepReport:
    """All that was measured in one run."""

    model: str
    layout: Layout
    kernels: str  # between linear layers
    threads: int
    rounds: int
    bandwidth: float  # bytes a second, read
    rates: dict[str, float]  # operations a second, by dtype
    times: list[StepTime]


def bench_step(
    model: str | Shape,
    *,
    dtypes: Sequence[DType] = ("auto",),
    rows: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    contexts: Sequence[int] = (128,),
    rounds: int = 15,
    layout: Layout = "chain",
    read_bytes: int = 2**30,
) -> StepReport:
    """Measure t(M) in every dtype at every context, all of them in turn.

    Args:
        model: what `LLM` takes, or a shape, which gets random weights.
        dtypes: of linear layers; the model is loaded once for each.
        rows: sizes M of the tree; one row is always measured too.
        contexts: tokens before the tree.
        rounds: how often each is timed; times are medians. The memory's and the arithmetic's rates are the
            best of these rounds, measured among them.
        layout: of the trees.
        read_bytes: size of the buffer that tells the memory's rate, much larger than the caches.
    """
    checkpoint = RandomCheckpoint(model) if isinstance(model, Shape) else open_checkpoint(model)
    rows = sorted({1, *rows})
    models = {str(dtype): load_model(checkpoint, dtype) for dtype in dtypes}
    contenders: dict[str, Contender] = {"read": reading(read_bytes)}
    for dtype, loaded in models.items():
        contenders[f"{dtype} product"] = multiplying(loaded)
        cache = filled_cache(loaded, max(contexts) + max(rows))
        for context in contexts:
            for count in rows:
                contenders[f"{dtype} {context} {count}"] = _passes(
                    Step(loaded, cache, count, context, layout)
                )
    rates = interleave(contenders, rounds)
    bandwidth = max(rates.rounds["read"])
    arithmetic = {dtype: max(rates.rounds[f"{dtype} product"]) for dtype in models}

    def point(dtype: str, context: int, count: int) -> StepTime:
        name, work = f"{dtype} {context} {count}", Work.of(models[dtype], count, context)
        return StepTime(
            dtype=dtype,
            context=context,
            rows=count,
            ms=1e3 / rates.median(name),
            ratio=rates.ratio(f"{dtype} {context} 1", name),
            floor_ms=1e3 * work.floor(bandwidth, arithmetic[dtype]),
            bytes=work.bytes,
            operations=work.operations,
        )

    return StepReport(
        model=str(checkpoint.path),
        layout=layout,
        kernels=next(iter(models.values())).kernels.name,
        threads=torch.get_num_threads(),
        rounds=rounds,
        bandwidth=bandwidth,
        rates=arithmetic,
        times=[point(dtype, context, count) for dtype in models for context in contexts for count in rows],
    )


def _passes(step: Step) -> Contender:
    def run() -> int:
        step()
        return 1

    return run


def reading(size: int) -> Contender:
    """Reads so many bytes of float32 from memory, on all threads."""
    data = torch.ones(size // 4)

    def run() -> int:
        data.sum()
        return data.nbytes

    return run


def multiplying(model: Transformer) -> Contender:
    """Counts operations of a product of many rows with the largest linear layer of the first block."""
    block = model.get_submodule("blocks.0")
    layer, shape = max(
        (pair for pair in linear_layers(model) if pair[0] in set(block.modules())),
        key=lambda pair: pair[1].numel(),
    )
    x = torch.randn(PRODUCT_ROWS, shape[1]).to(model.dtype)

    @torch.inference_mode()
    def run() -> int:
        layer(x)
        return 2 * PRODUCT_ROWS * shape.numel()

    return run
