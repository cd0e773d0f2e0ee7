"""How near the speed of memory passes and linear layers are."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from job import LLAMAS, TINY, Job, Numbers

from soothsay import SamplingParams
from soothsay.bench.random_models import LlamaShape
from soothsay.model.gpu.gpu_linear import GpuLinear
from soothsay.model.timing.pass_measuring import VerifyPass, filled_cache
from soothsay.model.timing.pass_predicting import Work, held_bytes
from soothsay.model.transformer import Transformer
from soothsay.model.weights.quantized import Quantized

ROWS = 1, 16, 17, 64, 128
COLD = 2**29
"""Bytes of weights that take turns, so that caches hold none of them."""


def measure(job: Job) -> Numbers:
    """Ceilings first, then whole passes, then linear layers one by one."""
    copied, product = copy_rate(job), _product_rate(job)
    yield "ceilings", {"copy, GB/s": copied / 1e9, "product, TFLOP/s": product / 1e12}
    for size, shape in ({"tiny": TINY} if job.dry else LLAMAS).items():
        models = {dtype: job.random_model(shape, dtype) for dtype in job.dtypes}
        for context in (20,) if job.dry else (128, 8192):
            yield f"passes of {size} after {context}", partial(_passes, job, models, context, copied)
        for dtype, model in models.items():
            yield f"plain decoding of {size} in {dtype}", partial(_decoding, job, model, copied)
        del models
    for size, shape in ({"tiny": TINY} if job.dry else LLAMAS).items():
        for name, (outputs, inputs) in linear_shapes(shape).items():
            for dtype in job.dtypes:
                yield f"{size} {name} in {dtype}", partial(_linear, job, dtype, outputs, inputs, copied)


def copy_rate(job: Job) -> float:
    """Bytes read and written in a second, in a copy."""
    source = torch.ones(2**20 if job.dry else 2**32, dtype=torch.uint8, device=job.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / job.in_turns({"": lambda: target.copy_(source)})[""]


def _product_rate(job: Job) -> float:
    """Operations a second of a large product in bfloat16, by the vendor's library."""
    size = 64 if job.dry else 8192
    a, b = (torch.randn(size, size, device=job.device).bfloat16() for _ in range(2))
    return 2 * size**3 / job.in_turns({"": lambda: a @ b})[""]


def linear_shapes(shape: LlamaShape) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the linear layers of a model."""
    head = shape.hidden // shape.heads
    return {
        "qkv": ((shape.heads + 2 * shape.kv_heads) * head, shape.hidden),
        "o": (shape.hidden, shape.hidden),
        "gate_up": (2 * shape.ffn, shape.hidden),
        "down": (shape.hidden, shape.ffn),
        "head": (shape.vocab, shape.hidden),
    }


def random_linear(job: Job, dtype: str, outputs: int, inputs: int) -> GpuLinear:
    """A layer with random weights, made on the device."""
    if not dtype.startswith("int"):
        weight = torch.randn(outputs, inputs, device=job.device, dtype=torch.bfloat16)
        return GpuLinear(weight, None, torch.bfloat16, job.device)
    bits, where = int(dtype[3:]), {"device": job.device}
    values = torch.randint(0, 2**bits, (outputs, inputs), dtype=torch.uint8, **where)
    scales = torch.rand(outputs, inputs // 32, **where).half().float()
    return GpuLinear(Quantized(bits, values, scales), None, torch.bfloat16, job.device)


def cold_layers(layer: GpuLinear, job: Job) -> list[GpuLinear]:
    """Copies of a layer, as many as the caches cannot hold."""
    count = 1 if job.dry else max(COLD // held_bytes(layer), 1)
    return [layer, *(copy.deepcopy(layer) for _ in range(count - 1))]


def _linear(job: Job, dtype: str, outputs: int, inputs: int, copied: float) -> dict[str, float]:
    """The share of the copy's bandwidth at one row; and 16 and 64 rows in units of it."""
    layers = cold_layers(random_linear(job, dtype, outputs, inputs), job)
    calls = {}
    for rows in (1, 16, 64):
        x = torch.randn(rows, inputs, device=job.device).bfloat16()
        calls[str(rows)] = job.recorded([partial(layer, x) for layer in layers])
    seconds = {rows: total / len(layers) for rows, total in job.in_turns(calls, warm=1).items()}
    bandwidth = held_bytes(layers[0]) / seconds["1"] / copied
    ratios = {f"{rows} rows": seconds[rows] / seconds["1"] for rows in ("16", "64")}
    return {"us": 1e6 * seconds["1"], "of bandwidth": bandwidth, **ratios}


def pass_calls(model: Transformer, context: int, rows: Sequence[int]) -> dict[int, Callable[[], object]]:
    """Passes over trees of some numbers of rows, laid out already."""
    pool = filled_cache(model, context, max(rows))
    trees = {count: VerifyPass(model, pool, count, context, "binary").rows for count in rows}
    return {count: partial(model.run, model.pack([tree], 16), pool) for count, tree in trees.items()}


def _passes(job: Job, models: Mapping[str, Transformer], context: int, copied: float) -> dict[str, Any]:
    """Passes of all numbers of rows in all types, in turns."""
    calls, some = {}, (1, 17) if job.dry else ROWS
    for dtype, model in models.items():
        own = pass_calls(model, context, some)
        calls |= {f"{dtype} {rows}": call for rows, call in own.items()}
    seconds, found = job.in_turns(calls), dict[str, Any]()
    for dtype, model in models.items():
        one = seconds[f"{dtype} 1"]
        found[dtype] = {"ms": 1e3 * one, "of bandwidth": Work.of(model, 1, context).bytes / one / copied}
        found[dtype] |= {f"{rows} rows": seconds[f"{dtype} {rows}"] / one for rows in some[1:]}
        found[dtype]["faster than bfloat16"] = seconds["bfloat16 1"] / one
    return found


def _decoding(job: Job, model: Transformer, copied: float) -> dict[str, float]:
    """Plain decoding by the engine, host and waits included."""
    llm = job.llm(model, prefix_caching=False)
    few, tokens = (1, 3) if job.dry else (8, 72)
    prompt = [*range(1, 21)]

    def answer(count: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        return job.wall(partial(llm.generate, prompt, params))

    answer(few)
    step = (answer(tokens) - answer(few)) / (tokens - few)
    return {"tokens/s": 1 / step, "of bandwidth": Work.of(model, 1, 32).bytes / step / copied}
