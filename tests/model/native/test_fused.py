"""Blocks in one call against the same kernels called one by one: the same bits."""

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
from soothsay.core.tree import DraftTree
from soothsay.model.attention_layer import Sinks
from soothsay.model.blocks import Block, fuse, unfuse
from soothsay.model.delta_layer import DeltaLayer
from soothsay.model.feed_forward import Experts, FeedForward
from soothsay.model.linear import Dense
from soothsay.model.native.fused import NativeBlocks
from soothsay.model.native.kernels import NativeKernels
from soothsay.model.native.linear import NativeLinear
from soothsay.model.norm import Vector
from soothsay.model.numeric_mode import NumericMode
from soothsay.model.rope import Rope
from soothsay.model.specs.rope_spec import QueryGrowthSpec, RopeSpec
from soothsay.model.specs.state_specs import ConvolutionSpec, DeltaSpec
from soothsay.model.transformer import Transformer

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
    "ministral3": {"query_growth": QueryGrowthSpec(0.1, 16, 512)},
    "olmo2": {"pre_norms": False, "post_norms": True, "qk_norm": True, "qk_norm_over_heads": True},
}
FUSED = {
    "olmo2": [False] * 3,
    "cohere": [False] * 3,
    "ministral3": [False] * 3,
    "nemotron_h": [False] * 3,
    "nemotron_3_super": [False] * 3,
    "qwen3_next": [True, False, False],
}  # first block, second block, both
MODES = {
    "bfloat16": NumericMode(torch.bfloat16),
    "int8": NumericMode(torch.bfloat16, 8),
    "int8 in float32": NumericMode(torch.float32, 8),
    "int4": NumericMode(torch.bfloat16, 4),
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
    return Batch.pack(rows, block_size=8, group=model.config.group, windows=model.config.windows)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_are_the_same(
    tiny: Callable[..., Transformer], kernels: NativeKernels, family: str, mode: str
) -> None:
    if mode == "bfloat16" and not kernels.multiplies_bfloat16:
        pytest.skip(f"{kernels.variant} does not multiply bfloat16")
    torch.manual_seed(0)
    config = tiny(1, **COMMON | FAMILIES[family]).config
    kv_dtype = MODES[mode].kv_dtype(config, kernels)
    assert (kv_dtype is torch.int16) == (mode != "bfloat16")
    model = Transformer(config, kernels, kv_dtype=kv_dtype)
    pack(model, kernels, MODES[mode], kv_dtype)
    routed = [part.mlp for part in model.blocks if isinstance(part.mlp, Experts)]
    ran = []
    native = [
        (isinstance(part.mlp, FeedForward) or isinstance(part.mlp.router, NativeLinear))
        and (not isinstance(part.attention, DeltaLayer) or isinstance(part.attention.gates, NativeLinear))
        for part in model.blocks
    ]
    expected, results = FUSED.get(family, [*native, all(native)]), []
    for fused in (False, True):
        if fused:
            fuse(model)
        found = [isinstance(part.fused, NativeBlocks) for part in (*model.blocks, model.blocks)]
        assert found == (expected if fused else [False] * 3)
        assert all((part.fused is not None) == fused for part in routed)
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
    if not kernels.multiplies_bfloat16:
        pytest.skip(f"{kernels.variant} does not multiply bfloat16")
    config = tiny(1, **COMMON | FAMILIES["mixtral"] | {"hidden_size": 256}).config
    model = Transformer(config, kernels)
    pack(model, kernels, MODES["int8"])
    fuse(model)
    fused = model.blocks[1].fused
    assert isinstance(fused, NativeBlocks)
    assert fused.scratch[2] >= 4 * config.hidden_size > 4 * 4 * 32


@pytest.mark.parametrize("mode", MODES)
def test_experts_may_be_chosen_by_other_rows_than_they_read(
    tiny: Callable[..., Transformer], kernels: NativeKernels, mode: str
) -> None:
    """As in Gemma 4, whose router has a norm of its own."""
    if mode == "bfloat16" and not kernels.multiplies_bfloat16:
        pytest.skip(f"{kernels.variant} does not multiply bfloat16")
    torch.manual_seed(0)
    model = Transformer(tiny(1, **COMMON | {"experts": mixtures(8, 2, 48, layers=(1,))}).config, kernels)
    pack(model, kernels, MODES[mode])
    fuse(model)
    experts = model.blocks[1].mlp
    assert isinstance(experts, Experts)
    assert experts.fused is not None
    x, routed = torch.randn(2, 20, model.config.hidden_size).to(model.dtype)
    by_others = experts(x, routed)
    assert torch.equal(by_others, experts.mixed(x, experts.router(routed)))
    assert not torch.equal(by_others, experts(x))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [64, 128])
def test_attention_may_read_rows_of_its_own(
    tiny: Callable[..., Transformer], kernels: NativeKernels, size: int, dtype: torch.dtype, mode: str
) -> None:
    """The norm's input is not the residual stream, and has another size, as in EAGLE."""
    if mode == "bfloat16" and not kernels.multiplies_bfloat16:
        pytest.skip(f"{kernels.variant} does not multiply bfloat16")
    torch.manual_seed(0)
    model = tiny(1, **COMMON)
    block = Block(model.config.layers[0], model.config.hidden_size, kernels, in_features=size)
    pack(block, kernels, MODES[mode])
    assert block.attention_norm is None
    rows = batch(model, pooled=False)
    x, inputs = torch.randn(len(rows.tokens), 64), torch.randn(len(rows.tokens), size).to(dtype)
    rope = model.ropes[0](rows.positions)
    before = x.clone()
    expected = block(x, rope, rows, None, inputs)
    fuse(block)
    assert block.fused is not None
    assert torch.equal(block(x, rope, rows, None, inputs), expected)
    assert not torch.equal(block(x, rope, rows, None, -inputs), expected)
    assert torch.equal(x, before)


def test_layers_of_other_kinds_are_called_one_by_one(
    tiny: Callable[..., Transformer], kernels: NativeKernels
) -> None:
    model = Transformer(tiny(1, **COMMON).config, kernels)
    fuse(model)
    assert [block.fused for block in model.blocks] == [None, None]
    pack(model.blocks[0], kernels, MODES["int8"])
    fuse(model)
    assert [block.fused is None for block in model.blocks] == [False, True]
    assert model.blocks.fused is None
    unfuse(model)
    assert [block.fused for block in model.blocks] == [None, None]


def test_a_model_that_nobody_holds_is_gone_at_once(
    tiny: Callable[..., Transformer], kernels: NativeKernels
) -> None:
    """Gigabytes are not to wait for a search for cycles."""
    model = Transformer(tiny(1, **COMMON).config, kernels)
    pack(model, kernels, MODES["int8"])
    fuse(model)
    assert model.blocks.fused is not None
    gone = weakref.ref(model.blocks[0])
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("taps", [(), (0,), (1,), (2,), (0, 3), (0, 1, 2, 3)])
@pytest.mark.parametrize("layers", [None, (0, 1, 2), (0, 2), (2,), (1, 0)])
def test_some_layers_and_what_they_read(
    tiny: Callable[..., Transformer],
    kernels: NativeKernels,
    layers: tuple[int, ...] | None,
    taps: tuple[int, ...],
) -> None:
    torch.manual_seed(0)
    model = Transformer(tiny(1, **COMMON, num_layers=3, windows=(None,) * 3).config, kernels)
    pack(model, kernels, MODES["int8"])
    taps = tuple(tap for tap in taps if layers is None or tap in (*layers, 3))
    results = []
    for change in (unfuse, fuse):
        change(model)
        pool = model.new_cache(20, 8)
        hidden, seen = model(batch(model, pooled=True), pool, layers=layers, taps=taps)
        results.append((hidden, *seen, *pool.layers))
    assert len(results[0]) == 1 + len(taps) + 3
    for expected, result in zip(*results, strict=True):
        assert torch.equal(expected, result)
