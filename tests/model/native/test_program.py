"""Programs against the same operations called one by one: the same bits."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tiny import mixtures
from torch import Tensor

from soothsay.core.batch import Batch, Rows
from soothsay.core.states import LayerStates
from soothsay.core.tree import DraftTree
from soothsay.model.decoder.attention_layer import Sinks
from soothsay.model.decoder.blocks import Block, record, unrecord
from soothsay.model.decoder.decoder_block import DecoderBlock, LayerPass
from soothsay.model.decoder.feed_forward import Experts
from soothsay.model.decoder.norm import RMSNorm, Vector
from soothsay.model.decoder.rope import Rope
from soothsay.model.native.native_blocks import NativeBlocks
from soothsay.model.native.native_kernels import NativeKernels
from soothsay.model.ops.kernels import BlocksPass, Kernels, StockKernels
from soothsay.model.ops.linear import Dense, Packed
from soothsay.model.specs.attention_spec import HeadRotation, QueryGrowthSpec, RopeSpec
from soothsay.model.specs.state_specs import ConvolutionSpec, DeltaSpec
from soothsay.model.transformer import Transformer
from soothsay.model.weights.numeric_mode import NumericMode

COMMON = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_heads": 4, "attention_scale": 0.2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "windows": (7, 7)},
    "gemma2": {
        "post_norms": True,
        "activation": "gelu_tanh",
        "windows": (7, None),
        "attention_softcap": 5.0,
        "intermediate_size": 48,
    },
    "gemma3": {
        "post_norms": True,
        "qk_norm": True,
        "windows": (7, None),
        "second_rope": RopeSpec(1e3),
        "second_rope_layers": (0,),
    },
    "multiplier": {"residual_multiplier": 0.22, "second_rope": RopeSpec(kind="none"), "rotary_dim": 16},
    "mixtral": {"experts": mixtures(4, 2, 48, layers=(1,))},
    "glm4_moe": {
        "experts": mixtures(
            *(8, 3, 48, (0, 1)),
            **{"sigmoid": True, "corrected": True, "groups": 4, "groups_chosen": 2, "scale": 2.5},
            shared_size=32,
        )
    },
    "gpt_oss": {
        **{"qkv_bias": True, "o_bias": True, "mlp_bias": True, "windows": (7, None), "sinks": True},
        "activation": "clipped_swiglu",
        "experts": mixtures(8, 4, 48, (0, 1), router_bias=True),
    },
    "qwen3_5": {
        "mixers": {
            0: DeltaSpec(key_heads=2, value_heads=4, key_size=32, value_size=16, taps=4, norm_eps=1e-6)
        },
        "gated_attention": True,
        "qk_norm": True,
        "rotary_dim": 16,
    },
    "qwen3_next": {
        "mixers": {
            1: DeltaSpec(key_heads=2, value_heads=2, key_size=16, value_size=48, taps=4, norm_eps=1e-6)
        },
        "gated_attention": True,
        "experts": mixtures(4, 2, 48, layers=(1,), shared_size=32, shared_gate=True),
    },
    "lfm2": {"mixers": {0: ConvolutionSpec(channels=48, taps=3)}, "qk_norm": True},
    "llama4": {
        "windows": (-7, None),
        "experts": mixtures(
            *(8, 2, 48, (0, 1)),
            **{"sigmoid": True, "normalize": False, "scales_inputs": True, "shared_size": 48},
        ),
    },
    "nemotron_h": {
        "activation": "relu2",
        "experts": mixtures(8, 3, 48, (0, 1), sigmoid=True, corrected=True, shared_size=32),
    },
    "nemotron_3_super": {
        "activation": "relu2",
        "experts": mixtures(8, 3, 48, (0, 1), sigmoid=True, latent_size=32, shared_size=48),
    },
    "cohere": {"parallel": True, "centred_norms": True},
    "gpt_neox": {
        **dict.fromkeys(("parallel", "parallel_norms", "centred_norms", "norm_biases", "mlp_bias"), True),
        **{"activation": "plain_gelu", "qk_norm": True, "qk_norm_last": True, "rotary_dim": 16},
    },
    "olmo": {"centred_norms": True, "norm_weights": False, "activation": "gelu"},
    "ministral3": {"query_growth": QueryGrowthSpec(0.1, 16, 512)},
    "olmo2": {"pre_norms": False, "post_norms": True, "qk_norm": True, "qk_norm_over_heads": True},
}
MODES = {
    "bfloat16": NumericMode(torch.bfloat16),
    "int8": NumericMode(torch.bfloat16, 8),
    "int8 in float32": NumericMode(torch.float32, 8),
    "int4": NumericMode(torch.bfloat16, 4),
    "KV in int8": NumericMode(torch.bfloat16, 8),
}


def pack(
    module: torch.nn.Module, kernels: NativeKernels, mode: NumericMode, kv_dtype: torch.dtype | None = None
) -> None:
    """Give `module` the library's linear layers; none of its weights and biases is left at zero or one."""
    for name, part in list(module.named_modules()):
        if isinstance(part, Dense):
            bias = None if part.bias is None else torch.randn_like(part.bias)
            weight, out = mode.convert(name, part.weight.detach()), mode.output(name, kv_dtype or mode.dtype)
            module.set_submodule(name, kernels.linear(weight, bias, out))
        elif not isinstance(part, Rope) and isinstance(weight := getattr(part, "weight", None), Tensor):
            weight.data.uniform_(0.5, 1.5)
        elif isinstance(part, Vector):
            part.e_score_correction_bias.data.uniform_(-0.2, 0.2)
        elif isinstance(part, Sinks):
            part.sinks.data.normal_()
    module.eval().requires_grad_(False)


def batch(model: Transformer, *, pooled: bool) -> Batch:
    """Make a batch of a prompt, and of a tree after another prompt."""
    tree = DraftTree(5)
    tree.extend([6, 7])
    tree.extend([6, 8])
    tables = [np.arange(10), np.arange(10, 20)] if pooled else [None, None]
    rows = [
        Rows(np.arange(40), 0, tables[0], DraftTree(39), state=0 if pooled else None),
        Rows(np.array([3, 4, 5]), 0, tables[1], tree, state=1 if pooled else None),
    ]
    return Batch.pack(rows, block_size=8, group=model.spec.group, windows=model.spec.windows)


def cuts(blocks: object) -> list[int]:
    """Cuts of each block's program."""
    assert isinstance(blocks, NativeBlocks)
    return [native.program.cuts for native in blocks.programs()]


Forward = Callable[[Kernels, Tensor, LayerPass], Tensor]


class Formula(DecoderBlock):
    """A layer that computes a formula."""

    rope_number, dtype = 0, torch.float32

    def __init__(self, forward: Forward, width: int):
        super().__init__()
        self._forward, self.width = forward, width

    def compute(self, ops: Kernels, x: Tensor, at: LayerPass) -> Tensor:
        return self._forward(ops, x, at)


def assert_recorded(
    kernels: NativeKernels, forward: Forward, x: Tensor, rows: Batch, most: int = 0
) -> Tensor:
    """Compute `forward` as operations, and as a program with at most `most` cuts: the same bits."""
    rope, before = Rope(HeadRotation(RopeSpec(), 32))(rows.positions), x.clone()
    expected = forward(kernels, x, LayerPass(rows, rope))
    blocks = kernels.record([Formula(forward, x.shape[1])])
    assert cuts(blocks)[0] <= most
    assert torch.equal(blocks(BlocksPass(x, (rope, rope), rows, None, (0,)))[1], expected)
    assert torch.equal(x, before)
    return expected


def others(block: torch.nn.Module) -> int:
    """Count the linear layers that the library does not multiply by. Routers are often plain."""
    return sum(isinstance(part, Packed) for part in block.modules())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_are_the_same(
    tiny: Callable[..., Transformer], kernels: NativeKernels, family: str, mode: str
) -> None:
    torch.manual_seed(0)
    config = tiny(1, **COMMON | FAMILIES[family]).spec
    is_small = mode == "KV in int8" and not config.states
    kv_dtype = MODES[mode].kv_dtype(config, kernels, "int8" if is_small else "auto")
    assert kv_dtype is (torch.bfloat16 if mode == "bfloat16" else torch.int8 if is_small else torch.int16)
    model = Transformer(config, kernels, kv_dtype=kv_dtype)
    pack(model, kernels, MODES[mode], kv_dtype)
    routed = [part.mlp for part in model.blocks if isinstance(part.mlp, Experts)]
    ran, results = [], []
    for recorded in (False, True):
        if recorded:
            record(model)
            assert cuts(model.blocks.recorded) == [others(block) for block in model.blocks]
        pool = model.new_cache(20, 8, requests=2, nodes=4)
        memory = [part for layer in pool.layers for part in ([layer] if isinstance(layer, Tensor) else layer)]
        for part in memory:
            part.zero_()
        hidden, taps = model(batch(model, pooled=True), pool, taps=(1, 2))
        alone, _ = model(batch(model, pooled=False))
        ran.append(model.experts_run)
        results.append((hidden, *taps, *memory, alone))
    for expected, result in zip(*results, strict=True):
        assert torch.equal(expected, result)
        assert expected.isfinite().all()
    assert ran[0] == ran[1]
    assert not routed or ran[0] >= routed[0].spec.routing.chosen


def test_experts_have_room_for_sums_wider_than_all_heads(
    tiny: Callable[..., Transformer], kernels: NativeKernels
) -> None:
    config = tiny(1, **COMMON | FAMILIES["mixtral"] | {"hidden_size": 256}).spec
    model = Transformer(config, kernels)
    pack(model, kernels, MODES["int8"])
    record(model)
    assert isinstance(recorded := model.blocks.recorded, NativeBlocks)
    assert recorded.programs()[1].program.scratch >= 4 * config.hidden_size


@pytest.mark.parametrize("mode", MODES)
def test_experts_may_be_chosen_by_other_rows_than_they_read(
    tiny: Callable[..., Transformer], kernels: NativeKernels, mode: str
) -> None:
    """As in Gemma 4, whose router has a norm of its own."""
    torch.manual_seed(0)
    model = Transformer(tiny(1, **COMMON | {"experts": mixtures(8, 2, 48, layers=(1,))}).spec, kernels)
    pack(model, kernels, MODES[mode])
    experts, hidden = model.blocks[1].mlp, model.spec.hidden_size
    assert isinstance(experts, Experts)

    def by_others(ops: Kernels, x: Tensor, at: LayerPass) -> Tensor:
        routed = ops.scale(x, -1.0)
        return experts(ops, ops.cast(x, model.dtype), ops.cast(routed, model.dtype))

    def by_same(ops: Kernels, x: Tensor, at: LayerPass) -> Tensor:
        return experts(ops, ops.cast(x, model.dtype))

    x, rows = torch.randn(43, hidden), batch(model, pooled=False)
    found = [assert_recorded(kernels, forward, x, rows, 1) for forward in (by_others, by_same)]
    assert not torch.equal(*found)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [64, 128])
def test_attention_may_read_rows_of_its_own(
    tiny: Callable[..., Transformer], kernels: NativeKernels, size: int, dtype: torch.dtype, mode: str
) -> None:
    """The norm's input is not the residual stream, and has another size, as in EAGLE."""
    torch.manual_seed(0)
    model = tiny(1, **COMMON)
    block = Block(model.spec.layers[0], model.spec.hidden_size, kernels, in_features=size)
    pack(block, kernels, MODES[mode])
    assert block.attention_norm is None
    rows = batch(model, pooled=False)
    x, inputs = torch.randn(len(rows.tokens), 64), torch.randn(len(rows.tokens), size).to(dtype)
    rope = model.ropes[0](rows.positions)
    before = x.clone()
    expected = block(x, rope, rows, None, inputs)
    record(block)
    assert block.recorded is not None
    assert torch.equal(block(x, rope, rows, None, inputs), expected)
    assert not torch.equal(block(x, rope, rows, None, -inputs), expected)
    assert torch.equal(x, before)


def test_layers_of_other_kinds_are_called_one_by_one(
    tiny: Callable[..., Transformer], kernels: NativeKernels
) -> None:
    model = Transformer(tiny(1, **COMMON).spec, kernels)
    pack(model.blocks[0], kernels, MODES["int8"])
    model.eval().requires_grad_(False)
    rows = batch(model, pooled=False)
    expected, _ = model(rows)
    record(model)
    assert cuts(model.blocks.recorded) == [0, 4]
    assert torch.equal(model(rows)[0], expected)
    unrecord(model)
    assert [part.recorded for part in (*model.blocks, model.blocks)] == [None] * 3


def test_a_model_that_nobody_holds_is_gone_at_once(
    tiny: Callable[..., Transformer], kernels: NativeKernels
) -> None:
    """Gigabytes are not to wait for a search for cycles."""
    model = Transformer(tiny(1, **COMMON).spec, kernels)
    pack(model, kernels, MODES["int8"])
    record(model)
    assert model.blocks.recorded is not None
    gone = weakref.ref(model.blocks[0])
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_states_are_written_to_their_own_pool(
    tiny: Callable[..., Transformer], kernels: NativeKernels
) -> None:
    """A part of a pool may be where one of a pool that is gone was."""
    model = Transformer(tiny(1, **COMMON | FAMILIES["qwen3_5"]).spec, kernels)
    pack(model, kernels, MODES["int8"])
    record(model)
    pool = model.new_cache(20, 8, requests=2, nodes=4)
    model(batch(model, pooled=True), pool)
    first, *others = pool.layers
    assert isinstance(first, LayerStates)
    before, moved = first.matrices.clone(), type(first)(*map(torch.zeros_like, first))
    pool.layers = moved, *others
    model(batch(model, pooled=True), pool)
    assert torch.equal(first.matrices, before)
    assert moved.matrices.any()


@pytest.mark.parametrize("taps", [(), (0,), (1,), (2,), (0, 3), (0, 1, 2, 3)])
@pytest.mark.parametrize("layers", [None, (0, 1, 2), (0, 2), (2,), (1, 0)])
def test_some_layers_and_what_they_read(
    tiny: Callable[..., Transformer],
    kernels: NativeKernels,
    layers: tuple[int, ...] | None,
    taps: tuple[int, ...],
) -> None:
    torch.manual_seed(0)
    model = Transformer(tiny(1, **COMMON, num_layers=3, windows=(None,) * 3).spec, kernels)
    pack(model, kernels, MODES["int8"])
    taps = tuple(tap for tap in taps if layers is None or tap in (*layers, 3))
    results = []
    for change in (unrecord, record):
        change(model)
        pool = model.new_cache(20, 8)
        hidden, seen = model(batch(model, pooled=True), pool, layers=layers, taps=taps)
        results.append((hidden, *seen, *pool.layers))
    assert len(results[0]) == 1 + len(taps) + 3
    for expected, result in zip(*results, strict=True):
        assert torch.equal(expected, result)


PARTS: dict[str, Forward] = {
    "nothing": lambda ops, x, at: x,
    "a part of each row twice": lambda ops, x, at: ops.cat(
        [ops.split(x, [48, 16])[0], ops.split(x, [16, 48])[0]], x.dtype
    ),
    "parts of heads in another order": lambda ops, x, at: ops.flat(
        ops.cat(ops.split(ops.heads(x, 32), [8, 24], 2)[::-1], torch.float32, 2)
    ),
    "heads in another order": lambda ops, x, at: ops.flat(
        ops.cat(ops.split(ops.heads(x, 16), [1, 3])[::-1], torch.float32)
    ),
    "odd sizes": lambda ops, x, at: ops.cat(
        ops.split(ops.scale(ops.cast(x, torch.bfloat16), 0.3), [21, 43]), x.dtype
    ),
    "a value that is used again": lambda ops, x, at: ops.add(
        ops.scale(x, 2.0), ops.blend(x, 0.3, ops.cast(x, torch.bfloat16), -0.7), None
    ),
    "a norm that subtracts the mean": lambda ops, x, at: ops.norm(x, CENTRED, torch.float32),
    "a norm with a bias": lambda ops, x, at: ops.norm(x, BIASED, x.dtype),
    "a norm of a part": lambda ops, x, at: ops.cat(
        [ops.norm(ops.split(x, [32, 32])[1], HALF, x.dtype), ops.split(x, [32, 32])[0]], x.dtype
    ),
    "gates of rows": lambda ops, x, at: ops.add_gated(
        x, ops.split(x, [63, 1])[1], ops.cast(x, torch.bfloat16)
    ),
    "rotation": lambda ops, x, at: ops.flat(ops.rotate(ops.heads(x, 32), at.rope)),
    "growth": lambda ops, x, at: ops.flat(ops.grow(ops.heads(x, 32), GROWTH, 4, 2, at.batch.positions)),
    "a row of factors": lambda ops, x, at: ops.scale(ops.cast(x, torch.bfloat16), torch.linspace(0.1, 2, 64)),
    "gates": lambda ops, x, at: ops.sigmoid_gate(x, ops.scale(x, -1.0)),
}
CENTRED, HALF, GROWTH = RMSNorm(64, 1e-5, centred=True), RMSNorm(32, 1e-5), torch.linspace(1, 2, 6)
BIASED = RMSNorm(64, 1e-5, centred=True, biased=True)


@pytest.mark.parametrize("part", PARTS)
def test_operations_of_values(tiny: Callable[..., Transformer], kernels: NativeKernels, part: str) -> None:
    torch.manual_seed(0)
    for norm in (CENTRED, HALF, BIASED):
        norm.weight.data.uniform_(0.5, 1.5)
    assert BIASED.bias is not None
    BIASED.bias.data.uniform_(-1, 1)
    rows = batch(tiny(1, **COMMON), pooled=False)
    x = torch.randn(len(rows.tokens), 64)
    with torch.inference_mode():
        found = assert_recorded(kernels, PARTS[part], x, rows)
        stock = PARTS[part](
            StockKernels(), x, LayerPass(rows, Rope(HeadRotation(RopeSpec(), 32))(rows.positions))
        )
    torch.testing.assert_close(found.float(), stock.float(), rtol=2e-2, atol=1e-5)


def test_a_cut_in_a_program(tiny: Callable[..., Transformer], kernels: NativeKernels) -> None:
    """What no set of kernels has a form of its own for is computed between two calls."""
    rows = batch(tiny(1, **COMMON), pooled=False)
    x = torch.randn(len(rows.tokens), 64)

    def forward(ops: Kernels, x: Tensor, at: LayerPass) -> Tensor:
        first, second = ops.split(ops.scale(x, 3.0), [16, 48])
        return ops.add(x, ops.compute(lambda a, b: torch.cat([b, a], 1).sin(), 64, first, second), None)

    blocks = kernels.record([Formula(forward, 64), Formula(forward, 64)])
    assert cuts(blocks) == [1, 1]
    rope = (torch.empty(0), torch.empty(0))
    at = LayerPass(rows, rope)
    once = forward(kernels, x, at)
    found = blocks(BlocksPass(x, (rope, rope), rows, None, (0, 1), (1,)))
    assert torch.equal(found[1], once)
    assert torch.equal(found[2], forward(kernels, once, at))
