"""Quantized formats against their published layouts, packed here value by value, and against the package
compressed-tensors where it is installed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from soothsay.errors import ModelError
from soothsay.model.formats.compressed_tensors import Scheme
from soothsay.model.formats.declared import open_format
from soothsay.model.formats.weight_format import WeightFormat
from soothsay.model.weights.quantized import Quantized, round_to_nearest

HERE = Path("model")
MODULE = "model.layers.0.self_attn.q_proj"
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def integers(*shape: int, bits: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 2**bits, shape, generator=torch.Generator().manual_seed(seed))


def scales(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(9)).half() + 0.5


def pack_rows(values: Tensor, bits: int, order: list[int] | None = None) -> Tensor:
    """`[n, m]` -> `[n, m * bits / 32]`, one value at a time; `order` says which one comes first in a word."""
    per_word = 32 // bits
    order = order or list(range(per_word))
    rows = []
    for row in values.tolist():
        row += [0] * (-len(row) % per_word)
        words = [row[i : i + per_word] for i in range(0, len(row), per_word)]
        rows.append([signed(sum(word[k] << bits * at for at, k in enumerate(order))) for word in words])
    return torch.tensor(rows, dtype=torch.int32)


def signed(word: int) -> int:
    """The int32 with the bits of `word`."""
    return (word + 2**31) % 2**32 - 2**31


def compressed(**settings: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16}
    group = {"targets": ["Linear"], "weights": {**weights, **settings}}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def opened(settings: dict[str, Any]) -> WeightFormat:
    format = open_format({"quantization_config": settings}, HERE)
    assert format is not None
    return format


def read(settings: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    """Read `tensors` with `opened(settings)`. Their names are given without the module."""
    format, held = opened(settings), {f"{MODULE}.{name}": tensor for name, tensor in tensors.items()}
    assert format.holds(frozenset(held), MODULE)
    assert not format.holds(frozenset(held), "lm_head")
    assert set(format.tensors(MODULE)) <= set(held)
    return format.read(held.__getitem__, MODULE)


def assert_holds(
    quantized: Quantized, bits: int, values: Tensor, scales: Tensor, zeros: Tensor | None
) -> None:
    """`values` and `zeros` count from 0, all of them `[out, ...]`."""
    assert quantized.bits == bits
    assert quantized.values.dtype == torch.uint8
    assert quantized.scales.dtype == torch.float32
    assert torch.equal(quantized.values, values.to(torch.uint8))
    assert torch.equal(quantized.scales, scales.float())
    if zeros is None:
        assert quantized.zeros is None
    else:
        assert quantized.zeros is not None
        assert torch.equal(quantized.zeros, zeros.to(torch.uint8))
    assert all(t is None or t.is_contiguous() for t in (quantized.values, quantized.scales, quantized.zeros))
    groups = scales.repeat_interleave(values.shape[1] // scales.shape[1], 1).float()
    middle = torch.full_like(scales, 2 ** (bits - 1)) if zeros is None else zeros
    shift = middle.repeat_interleave(values.shape[1] // scales.shape[1], 1)
    assert torch.allclose(quantized.dequantize(), (values - shift).float() * groups)


def test_plain_weights_have_no_format() -> None:
    assert open_format({"model_type": "llama"}, HERE) is None
    assert open_format({"quantization_config": None}, HERE) is None


# compressed-tensors


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [16, None])
def test_packed(bits: int, symmetric: bool, group_size: int | None) -> None:
    groups = 1 if group_size is None else 3
    values, zeros = integers(10, 48, bits=bits), integers(10, groups, bits=bits, seed=1)
    tensors = {
        "weight_packed": pack_rows(values, bits),
        "weight_scale": scales(10, groups),
        "weight_shape": torch.tensor([10, 48]),
        "weight_zero_point": pack_rows(zeros.t(), bits).t(),  # along out, which is no multiple of a word here
    }
    strategy = {"strategy": "channel" if group_size is None else "group", "group_size": group_size}
    quantized = read(compressed(num_bits=bits, symmetric=symmetric, **strategy), tensors)
    assert_holds(quantized, bits, values, scales(10, groups), None if symmetric else zeros)


def test_packed_by_their_package() -> None:
    """Integers and words as compressed-tensors 0.20 packs them."""
    quantized = read(
        compressed(strategy="channel", symmetric=False, group_size=None),
        {
            "weight_packed": torch.tensor([[1985229328], [-19088744]], dtype=torch.int32),
            "weight_scale": torch.ones(2, 1),
            "weight_shape": torch.tensor([2, 8]),
            "weight_zero_point": torch.tensor([[0x98]], dtype=torch.int32),  # of 0 and 1
        },
    )
    assert torch.equal(
        quantized.dequantize(), torch.arange(-8.0, 8).view(2, 8) - torch.tensor([[0.0], [1.0]])
    )


def test_rows_that_do_not_fill_their_last_word() -> None:
    values = integers(3, 44, bits=4)
    tensors = {
        "weight_packed": pack_rows(values, 4),
        "weight_scale": scales(3, 1),
        "weight_shape": torch.tensor([3, 44]),
    }
    assert_holds(
        read(compressed(strategy="channel", group_size=None), tensors), 4, values, scales(3, 1), None
    )


@pytest.mark.parametrize("symmetric", [True, False])
def test_int8(symmetric: bool) -> None:
    values, zeros = integers(5, 24, bits=8), integers(5, 1, bits=8, seed=1)
    settings = compressed(num_bits=8, strategy="channel", group_size=None, symmetric=symmetric)
    tensors = {
        "weight": (values - 128).to(torch.int8),
        "weight_scale": scales(5, 1),
        "weight_zero_point": (zeros - 128).to(torch.int8),
    }
    quantized = read({**settings, "format": "int-quantized"}, tensors)
    assert_holds(quantized, 8, values, scales(5, 1), None if symmetric else zeros)


def test_modules_of_several_groups() -> None:
    settings = compressed()
    settings["config_groups"] = {
        "rest": settings["config_groups"]["group_0"],
        "int8": {
            "targets": ["re:.*down_proj$"],
            "format": "int-quantized",
            "weights": {"num_bits": 8, "strategy": "channel"},
        },
        "one": {"targets": ["a.up_proj"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 8}},
    }
    settings["config_groups"]["one"]["weights"]["symmetric"] = False
    format = opened(settings)
    assert format.name == (
        "int4, groups of 16 and int8, a scale per channel and int4, groups of 8 (compressed-tensors)"
    )
    assert format.bits == 4
    assert format.tensors("a.down_proj") == ["a.down_proj.weight", "a.down_proj.weight_scale"]
    assert format.tensors("a.up_proj")[-1] == "a.up_proj.weight_zero_point"
    assert format.tensors("b.up_proj")[-1] == "b.up_proj.weight_scale"
    del settings["config_groups"]["rest"]
    with pytest.raises(ModelError, match=r"b\.up_proj"):
        opened(settings).tensors("b.up_proj")


@pytest.mark.parametrize(
    "scheme", [Scheme(4, 16), Scheme(4, 32), Scheme(4), Scheme(8, 16), Scheme(8, packed=False)]
)
def test_what_is_written_is_read_again(scheme: Scheme) -> None:
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(0))
    rounded = round_to_nearest(weight, scheme.bits, scheme.group_size)
    rounded = Quantized(rounded.bits, rounded.values, rounded.scales.bfloat16().float())
    tensors = scheme.write(rounded, MODULE)
    assert tensors[f"{MODULE}.weight_scale"].dtype == torch.bfloat16
    names = {name.removeprefix(f"{MODULE}."): tensor for name, tensor in tensors.items()}
    settings = json.loads(json.dumps(scheme.config(["lm_head"])))
    assert_holds(read(settings, names), scheme.bits, rounded.values, rounded.scales, None)
    packed = pack_rows(rounded.values, scheme.bits)
    if scheme.packed:
        assert torch.equal(names["weight_packed"], packed)
        assert names["weight_shape"].tolist() == [24, 64]
    else:
        assert torch.equal(names["weight"].int(), rounded.values.int() - 128)


def test_what_is_declared() -> None:
    weights = {"type": "int", "symmetric": True, "dynamic": False}
    tokens = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    int4 = {"num_bits": 4, "strategy": "group", "group_size": 128, **weights}
    int8 = {"num_bits": 8, "strategy": "channel", "group_size": None, **weights}
    for scheme, format, weights, inputs in (
        (Scheme(4, 128), "pack-quantized", int4, None),
        (Scheme(8, packed=False), "int-quantized", int8, tokens),
    ):
        assert scheme.config(["lm_head", "gate"]) == {
            "quant_method": "compressed-tensors",
            "format": format,
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
            },
            "ignore": ["gate", "lm_head"],
        }


# GPTQ


def gptq_tensors(bits: int, values: Tensor, zeros: Tensor, groups: int, version: int) -> dict[str, Tensor]:
    """Pack integers `[out, in]` and zero points `[out, groups]` as GPTQ does.

    Version 1 subtracts one from each zero point in whole words, so a 0 borrows from its neighbour.
    """
    words = pack_rows(zeros.t(), bits)
    ones = sum(1 << at for at in range(0, 32, bits)) if version == 1 else 0
    size = values.shape[1]
    return {
        "qweight": pack_rows(values, bits).t().contiguous(),
        "qzeros": torch.tensor(
            [[signed(w - ones) for w in row] for row in words.tolist()], dtype=torch.int32
        ),
        "scales": scales(len(values), groups).t().contiguous(),
        "g_idx": (torch.arange(size) // (size // groups)).int(),
    }


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("groups", [1, 3])
def test_gptq(bits: int, version: int, symmetric: bool, groups: int) -> None:
    values, zeros = integers(8, 48, bits=bits), integers(8, groups, bits=bits, seed=1)
    if symmetric:
        zeros.fill_(2 ** (bits - 1))
    zeros[0] = zeros[0].clamp(min=1) if symmetric else 0
    settings: dict[str, Any] = {"quant_method": "gptq", "bits": bits, "group_size": 48 // groups}
    settings |= {"sym": symmetric, "desc_act": False}
    settings |= {"group_size": -1} if groups == 1 else {}
    settings |= {"checkpoint_format": "gptq_v2"} if version == 2 else {}
    quantized = read(settings, gptq_tensors(bits, values, zeros, groups, version))
    assert_holds(quantized, bits, values, scales(8, groups), None if symmetric else zeros)
    assert (f"{MODULE}.qzeros" in opened(settings).tensors(MODULE)) != symmetric


def test_gptq_in_the_order_of_activations() -> None:
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": True, "desc_act": True}
    values = integers(8, 48, bits=4)
    tensors = gptq_tensors(4, values, torch.full((8, 3), 8), 3, 1)
    assert_holds(read(settings, tensors), 4, values, scales(8, 3), None)  # in order after all
    tensors["g_idx"] = tensors["g_idx"].flip(0)
    weight = read(settings, tensors)
    exact = (values - 8).float().view(8, 3, 16) * scales(8, 3).float().flip(1)[..., None]
    assert torch.equal(weight, exact.view(8, 48))
    for wrong in (torch.full((48,), 3), torch.full((48,), -1), torch.zeros(47, dtype=torch.int32)):
        with pytest.raises(ValueError, match=r"its .* inputs are not in groups 0 to 2"):
            read(settings, {**tensors, "g_idx": wrong})


def test_compressed_tensors_in_the_order_of_activations() -> None:
    values = integers(8, 48, bits=4)
    tensors = {
        "weight_packed": pack_rows(values, 4),
        "weight_scale": scales(8, 3),
        "weight_shape": torch.tensor([8, 48]),
        "weight_g_idx": torch.arange(48) // 16,
    }
    assert_holds(read(compressed(actorder="group"), tensors), 4, values, scales(8, 3), None)
    tensors["weight_g_idx"] = torch.arange(48) % 3
    assert_holds(read(compressed(actorder="weight"), tensors), 4, values, scales(8, 3), None)
    weight = read(compressed(actorder="group"), tensors)
    assert torch.equal(weight, (values - 8).float() * scales(8, 3).float()[:, torch.arange(48) % 3])


# AWQ


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("own_keys", [True, False])
def test_awq(groups: int, own_keys: bool) -> None:
    values, zeros = integers(16, 48, bits=4), integers(16, groups, bits=4, seed=1)
    tensors = {
        "qweight": pack_rows(values.t(), 4, AWQ_ORDER),
        "qzeros": pack_rows(zeros.t(), 4, AWQ_ORDER),
        "scales": scales(16, groups).t().contiguous(),
    }
    size = -1 if groups == 1 else 16
    keys = {"w_bit": 4, "q_group_size": size, "version": "GEMM"} if own_keys else {"bits": 4}
    settings = {"quant_method": "awq", "group_size": size, "version": "gemm", "zero_point": True, **keys}
    assert_holds(read(settings, tensors), 4, values, scales(16, groups), zeros)


# what is refused

GPTQ_SETTINGS = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ_SETTINGS = {"quant_method": "awq", "bits": 4, "group_size": 128}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"quant_method": "aqlm"}, "quant_method 'aqlm'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size \[128\]"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, r"weight_block_size \[128, 0\]"),
        ({"bits": 4}, "quant_method None"),
        (["gptq"], "quant_method None"),
        ({"quant_method": ["gptq"]}, r"quant_method \['gptq'\]"),
        ({**GPTQ_SETTINGS, "bits": 5}, "bits 5"),
        ({**GPTQ_SETTINGS, "group_size": 0}, "group_size 0"),
        ({**GPTQ_SETTINGS, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({**GPTQ_SETTINGS, "dynamic": {"-:.*mtp": {}, ".*down": {"bits": 8}}}, r"'\.\*down' \(dynamic\)"),
        ({**AWQ_SETTINGS, "bits": 8}, "bits 8"),
        ({**AWQ_SETTINGS, "version": "gemv"}, "version 'gemv'"),
        (compressed(num_bits=3), "num_bits 3"),
        (compressed(type="float"), "type 'float'"),
        (compressed(strategy="tensor"), "strategy 'tensor'"),
        (compressed(actorder="sideways"), "actorder 'sideways'"),
        ({**compressed(), "format": "marlin-24"}, "format 'marlin-24'"),
        ({**compressed(), "format": "int-quantized"}, "num_bits 4"),
        ({**compressed(), "config_groups": {}}, "without config_groups"),
        ({**compressed(), "config_groups": {"W4A16": ["Linear"]}}, "'W4A16' has no 'weights'"),
        ({**compressed(), "transform_config": {"config_groups": {}}}, "transform_config"),
        ({**compressed(), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    ],
)
def test_what_is_refused_by_name(settings: Any, named: str) -> None:
    with pytest.raises(
        ModelError, match=rf"^model .*{named}.*compressed-tensors.*gptq.*awq.*soothsay quantize"
    ):
        open_format({"quantization_config": settings}, HERE)


def test_what_is_accepted() -> None:
    assert opened({**compressed(), "sparsity_config": {"format": "dense"}}).name.startswith("int4")
    assert open_format({"compression_config": compressed()}, HERE) is not None  # the key's older name
    assert opened({**GPTQ_SETTINGS, "dynamic": {"-:.*mtp": {}}}).name == "int4, groups of 128 (GPTQ)"
    assert opened(AWQ_SETTINGS).name == "int4, groups of 128 (AWQ)"


def test_groups_that_do_not_divide_the_inputs() -> None:
    tensors = {
        "weight_packed": pack_rows(integers(10, 48, bits=4), 4),
        "weight_scale": scales(10, 2),
        "weight_shape": torch.tensor([10, 48]),
    }
    with pytest.raises(ValueError, match="groups of 20"):
        read(compressed(group_size=20), tensors)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("weight_scale", lambda t: t[:, :2]),
        ("weight_scale", lambda t: t[:-1]),
        ("weight_packed", lambda t: t[:, :-1]),
        ("weight_packed", lambda t: t[:-1]),
        ("weight_zero_point", lambda t: t[:, :2]),
        ("weight_zero_point", lambda t: torch.cat([t, t])[:1]),
    ],
)
def test_tensors_that_do_not_fit_each_other(name: str, change: Callable[[Tensor], Tensor]) -> None:
    tensors = {
        "weight_packed": pack_rows(integers(10, 48, bits=4), 4),
        "weight_scale": scales(10, 3),
        "weight_shape": torch.tensor([10, 48]),
        "weight_zero_point": pack_rows(integers(3, 10, bits=4), 4).t(),
    }
    tensors[name] = change(tensors[name])
    with pytest.raises(ValueError, match=r"(scales|zero points) .*int4, groups of 16"):
        read(compressed(symmetric=False), tensors)


# the package itself


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scheme", [Scheme(4, 16), Scheme(4), Scheme(8, 16), Scheme(8, packed=False)])
def test_transformers_loads_what_is_written(scheme: Scheme, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 40}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    tensors: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            rounded = round_to_nearest(module.weight.detach(), scheme.bits, scheme.group_size)
            rounded = Quantized(rounded.bits, rounded.values, rounded.scales.bfloat16().float())
            tensors |= scheme.write(rounded, name)
            module.weight.data = rounded.dequantize()
    kept = {k: v for k, v in model.state_dict().items() if f"{k}_scale" not in tensors}
    rest = {k: v for k, v in kept.items() if f"{k}_packed" not in tensors}
    save_file({**rest, **tensors}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    declared = {**config.to_dict(), "quantization_config": scheme.config(["lm_head"])}
    (tmp_path / "config.json").write_text(json.dumps(declared))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.arange(20)[None]
    with torch.no_grad():
        ours, said = model(ids).logits, theirs(ids).logits
    # they quantize activations where products are of integers
    assert torch.allclose(said, ours, atol=1e-6 if scheme.packed else 0.02)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_what_their_package_packs(bits: int, symmetric: bool) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    arguments = {"num_bits": bits, "symmetric": symmetric, "strategy": "group", "group_size": 16}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments))
    half = 2 ** (bits - 1)
    values, zeros = integers(10, 48, bits=bits) - half, integers(10, 3, bits=bits, seed=1) - half
    zeros = torch.zeros_like(zeros) if symmetric else zeros
    steps = scales(10, 3).float()
    weight = (values - zeros.repeat_interleave(16, 1)) * steps.repeat_interleave(16, 1)
    state = {"weight": weight, "weight_scale": steps, "weight_zero_point": zeros.to(torch.int8)}
    packed = BaseCompressor.get_value_from_registry("pack-quantized").compress(state, scheme)
    quantized = read(compressed(**arguments), packed)
    assert_holds(quantized, bits, values + half, steps, None if symmetric else zeros + half)
