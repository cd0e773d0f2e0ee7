"""Each operation of a pass: bits of a row alone and among others, by strides, addresses and threads.

Strided rows are for stock operations that get them. The others take adjacent rows, as `Kernels` says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from kernels import FASTEST, STOCK
from row_bits import assert_row_bits
from torch import Tensor

from soothsay.core.batch import Batch, Rows
from soothsay.core.cache import row_size, written
from soothsay.core.functions import UNGATED
from soothsay.core.params import SamplingParams
from soothsay.core.sampling_ops import SampledRows
from soothsay.core.strands import WITHIN, Strand, Strands
from soothsay.core.tree import DraftTree
from soothsay.engine.verification import best_logprobs
from soothsay.model.decoder.feed_forward import Xielu, moments
from soothsay.model.decoder.norm import Multipliers, RMSNorm
from soothsay.model.decoder.rope import QueryGrowth, Rope
from soothsay.model.native.native_linear import ACTIVATIONS as NATIVE_ACTIVATIONS
from soothsay.model.ops.kernels import Kernels
from soothsay.model.ops.operands import HeadForm, Scoring
from soothsay.model.ops.state_ops import Recurrence, StateSpace
from soothsay.model.specs.attention_spec import HeadRotation, QueryGrowthSpec, RopeSpec
from soothsay.model.specs.feed_forward_spec import RoutingSpec
from soothsay.model.specs.state_specs import DeltaSpec, StateSpaceSpec
from soothsay.model.transformer import finished_logits
from soothsay.model.weights.quantized import Quantized

DTYPES = (torch.float32, torch.bfloat16)
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "clipped_swiglu", *UNGATED)
each_kernels = pytest.mark.parametrize(
    "kernels", dict.fromkeys([STOCK, FASTEST]), ids=lambda kernels: kernels.name
)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
Run = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def norm(size: int, **options: Any) -> RMSNorm:
    made = RMSNorm(size, 1e-6, **options).requires_grad_(False)
    for parameter in made.parameters():
        parameter.data = torch.rand(size) + 0.5
    return made


@each_dtype
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", [75, 144, 1000])
def test_activations(activation: str, size: int, dtype: torch.dtype) -> None:
    rows = (torch.randn(64, 2 * size) * 3).to(dtype)
    assert_row_bits(lambda x: STOCK.gated(x, activation), rows)


@each_dtype
@pytest.mark.parametrize("size", [75, 144, 1000])
def test_a_learned_activation(size: int, dtype: torch.dtype) -> None:
    assert_row_bits(Xielu().requires_grad_(False), (torch.randn(64, size) * 3).to(dtype))


@each_dtype
@pytest.mark.parametrize("activation", NATIVE_ACTIVATIONS)
def test_native_activations(activation: str, dtype: torch.dtype) -> None:
    rows = (torch.randn(64, 2 * 528) * 3).to(dtype)
    assert_row_bits(lambda x: FASTEST.gated(x, activation), rows, strided=False)


@each_dtype
@each_kernels
@pytest.mark.parametrize("size", [80, 976])
def test_sums_and_norms(kernels: Kernels, size: int, dtype: torch.dtype) -> None:
    first, second, centred = norm(size), norm(size), norm(size, centred=True, biased=True)

    def run(x: Tensor) -> Tensor:
        total, normed = kernels.add_norm(x, x.to(dtype), second, first, dtype)
        parts = kernels.norm(x, first, dtype), kernels.norm(x, centred, dtype), kernels.add(x, x, None)
        return torch.cat([total, normed.float(), *(part.float() for part in parts)], -1)

    assert_row_bits(run, torch.randn(64, size) * 3, strided=kernels is STOCK)


@each_dtype
@each_kernels
@pytest.mark.parametrize("kept", [None, torch.int16, torch.int8], ids=str)
def test_heads_that_are_normed_turned_and_kept(
    kernels: Kernels, dtype: torch.dtype, kept: torch.dtype | None
) -> None:
    """Queries, and the rows of the pool."""
    rope, norms, kept = Rope(HeadRotation(RopeSpec(), 32)), (norm(32), norm(32)), kept or dtype
    form, growth = HeadForm(0.3, norms, norms[0]), QueryGrowth(QueryGrowthSpec(0.3, 100, 4000))

    def run(x: Tensor) -> Tensor:
        positions = (x[:, 0].float().abs() * 1000).long()
        cos, sin = rope(positions)
        pool = torch.zeros(4, len(x), row_size(32, kept), dtype=kept)
        heads = x.reshape(len(x), 7, 32)
        q = kernels.rotate_store(heads, (cos, sin), pool, torch.arange(len(x)), form)
        q = kernels.grow(q, growth.factors, growth.span, growth.shift, positions)
        pooled = pool.view(torch.uint8).transpose(0, 1).flatten(1)
        return torch.cat([q.flatten(1), cos[:, 0], sin[:, 0], pooled.float()], -1)

    assert_row_bits(run, torch.randn(64, 7 * 32).to(dtype), strided=kernels is STOCK)


@each_kernels
@pytest.mark.parametrize("dtype", [*DTYPES, torch.int16, torch.int8], ids=str)
@pytest.mark.parametrize("kind", ["plain", "capped", "sinks"])
def test_attention(kernels: Kernels, dtype: torch.dtype, kind: str) -> None:
    """Rows are requests with contexts of different lengths."""
    if dtype is torch.int16 and not kernels.dtype_of_keys:
        kernels = STOCK
    block, heads, group, d = 8, 2, 3, 32
    options = {"plain": {}, "capped": {"softcap": 2.0}, "sinks": {"sinks": torch.randn(heads * group)}}[kind]
    lengths, tables = (
        np.random.default_rng(0).integers(1, 300, 64),
        np.random.default_rng(1).permutation(2560),
    )
    kv = written(*torch.randn(2, heads, 2560 * block, d), dtype)

    def run(x: Tensor) -> Tensor:
        numbers = (x[:, 0] * 64).long().tolist()
        requests = [
            Rows(np.array([1]), int(lengths[n]), tables[40 * n : 40 * n + 40], DraftTree(1)) for n in numbers
        ]
        batch = Batch.pack(requests, block_size=block, group=group, ops=kernels)
        return kernels.attend(x.view(len(x), heads * group, d), kv, batch, Scoring(**options))

    rows = torch.randn(64, heads * group * d)
    rows[:, 0] = torch.arange(64) / 64  # the request's number
    assert_row_bits(run, rows, strided=kernels is STOCK)


@pytest.mark.parametrize("size", [2, 5, 6, 7, 9, 10, 12])
def test_attention_of_small_heads(size: int) -> None:
    """Places of rows among those of one path count, too."""
    kv, q, length = torch.randn(4, 128, size), torch.randn(8, 4, size), 100
    rows = Rows(np.arange(8), length, np.arange(128))
    together = STOCK.attend(q, kv, Batch.pack([rows], block_size=1, group=2))
    for row in range(8):
        alone = Rows(np.arange(1), length + row, np.arange(128))
        own = STOCK.attend(q[row : row + 1], kv, Batch.pack([alone], block_size=1, group=2))
        assert torch.equal(own[0], together[row])


@each_kernels
@pytest.mark.parametrize("options", [{}, {"sigmoid": True, "groups": 4, "groups_chosen": 2}, {"within": 0.3}])
def test_routes_of_experts(kernels: Kernels, options: dict[str, Any]) -> None:
    c = RoutingSpec(16, 7, **options)
    correction = torch.randn(16) if options else None
    assert_row_bits(lambda x: torch.cat(kernels.route(x, c, correction), -1), torch.randn(64, 16) * 3)


@each_kernels
def test_gates(kernels: Kernels) -> None:
    def run(x: Tensor) -> Tensor:
        return kernels.sigmoid_gate(x[:, :80].contiguous(), x[:, 80:].bfloat16())

    assert_row_bits(run, torch.randn(64, 160))


def random_integers(out: int, size: int, bits: int) -> Quantized:
    values = torch.randint(0, 2**bits, (out, size), dtype=torch.uint8)
    return Quantized(bits, values, torch.rand(out, size // 32) / 100)


LAYERS: dict[str, Callable[[Kernels], Any]] = {
    "float32": lambda kernels: kernels.linear(torch.randn(101, 80), torch.randn(101), torch.float32),
    "bfloat16": lambda kernels: kernels.linear(torch.randn(101, 80).bfloat16(), None, torch.bfloat16),
    "odd sizes": lambda kernels: kernels.linear(torch.randn(3, 80), None, torch.float32),
    "int8": lambda kernels: kernels.linear(random_integers(96, 160, 8), None, torch.float32),
    "int4": lambda kernels: kernels.linear(random_integers(96, 160, 4), torch.randn(96), torch.bfloat16),
}


@each_kernels
@pytest.mark.parametrize("name", LAYERS)
def test_linear_layers(kernels: Kernels, name: str) -> None:
    layer = LAYERS[name](kernels)
    assert_row_bits(layer, torch.randn(64, 160 if name.startswith("int") else 80))


SPACE = StateSpaceSpec(heads=4, head_size=48, groups=2, state_size=32, taps=4, norm_eps=1e-3)
RULE = DeltaSpec(key_heads=2, value_heads=4, key_size=32, value_size=48, taps=4, norm_eps=1e-3)


@each_kernels
@pytest.mark.parametrize("rule", [StateSpace(SPACE), Recurrence(RULE)], ids=["space", "delta"])
def test_rules_of_states(kernels: Kernels, rule: StateSpace | Recurrence) -> None:
    c = rule.spec
    width = c.channels + rule.outputs
    rule.requires_grad_(False)

    def run(x: Tensor) -> Tensor:
        strands = Strands(tuple(Strand(i, 1, 0, (), slot=WITHIN) for i in range(len(x))))
        rows, gates = x[:, :width], x[:, width:]
        return kernels.token_rule(rows, gates, rule, None, strands)

    assert_row_bits(run, torch.randn(8, width + c.state.gates))


@each_kernels
def test_convolutions(kernels: Kernels) -> None:
    taps = torch.randn(3, 80)

    def run(x: Tensor) -> Tensor:
        return kernels.convolve(
            x, taps, None, Strands(tuple(Strand(i, 1, 0, (), slot=WITHIN) for i in range(len(x))))
        )

    assert_row_bits(run, torch.randn(64, 80))


LOGITS: dict[str, tuple[int, Run]] = {
    "softcap": (1003, lambda x: finished_logits(x, 0.7, 6.0)),
    "moments": (1003, lambda x: torch.cat(moments(x), -1)),
    "multipliers": (1003, lambda x: STOCK.scale(x, Multipliers((0.3, 1.7), (3, 1000)).row)),
    "log-probabilities": (
        40001,
        lambda x: torch.from_numpy(best_logprobs(x, [5] * len(x), 4, STOCK.sampling)[2]),
    ),
    **{
        f"{name}, {width} tokens": (width, lambda x, params=params: sampled(x, params))
        for width in (1003, 40001)
        for name, params in {
            "all": SamplingParams(temperature=0.7),
            "top-p": SamplingParams(temperature=1.3, top_p=0.9, min_p=1e-5),
            "top-k": SamplingParams(temperature=1.3, top_k=300, top_p=0.9),
        }.items()
    },
}


def sampled(x: Tensor, params: SamplingParams) -> Tensor:
    keys = [(first, second) for first, second in (x[:, :2].abs() * 1e6).long().tolist()]
    return STOCK.sampling.scores(x, SampledRows.of([params] * len(x), keys, x.device))


@pytest.mark.parametrize("name", LOGITS)
def test_logits_and_what_is_drawn_from_them(name: str) -> None:
    width, run = LOGITS[name]
    assert_row_bits(run, torch.randn(9 if width < 2000 else 3, width) * 4)


@each_kernels
@pytest.mark.parametrize("width", [1008, 40001])
def test_operations_of_sampling(kernels: Kernels, width: int) -> None:
    def run(x: Tensor) -> Tensor:
        factors, places = torch.full((len(x),), 0.7), torch.full((len(x),), 3)
        floors = x.new_full((len(x),), -2.0)
        x = x.clone()
        x[:, 3] = 1.0
        values, tokens = kernels.sampling.largest(x, 5, factors)
        mass = kernels.sampling.mass_before(x, factors, x.amax(-1), floors, places)[:, None]
        raced = kernels.sampling.race(x, factors, (x[:, :2].abs() * 1e6).long(), 4)
        return torch.cat([values, tokens, mass, *raced], -1)

    assert_row_bits(run, torch.randn(9 if width < 2000 else 3, width))
