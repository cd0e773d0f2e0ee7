"""Formats of quantized weights that a config.json declares. AWQ, GPTQ, FP8, HQQ and BitNet are here.

HQQ (half-quadratic quantization) is what its library and transformers save.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from soothsay.files import read_json_object
from soothsay.model.formats.bitsandbytes import bitsandbytes
from soothsay.model.formats.compressed_tensors import compressed_tensors
from soothsay.model.formats.four_bit_floats import EXPERTS, PACKED, fp4_weight
from soothsay.model.formats.mlx import mlx
from soothsay.model.formats.weight_format import (
    FLAGS,
    REORDERED,
    WIDTHS,
    Reader,
    Settings,
    WeightFormat,
    grouped,
    in_rows,
    kind,
    one_layout,
    unpack,
)
from soothsay.model.weights.quantized import Quantized


def hqq(settings: Settings) -> WeightFormat:
    """Integers in groups that run through all rows, with zero points that are floats.

    `W_q` `[groups / n, group_size]` has n integers in each uint8, or 10 of 3 bits in each int32: groups of
    the first n-th of the weight in the upper bits, then those of the second. `scale` and `zero` are
    `[groups, 1]`, and `shape` is that of the weight.

    Raises `ModelError` for an unknown setting.
    """
    parts = settings.part("quant_config")
    for name in ("scale_quant_params", "zero_quant_params"):
        if parts.values.get(name):
            raise settings.refusal(f"hqq with {name}")
    weights = parts.part("weight_quant_params")
    weights.one_of("axis", {1: 1})  # groups of axis 0 are columns
    bits = weights.one_of("nbits", {bits: bits for bits in (2, 3, 4, 8)})
    group_size = weights.group_size()  # None: a row

    def decode(read: Reader) -> Quantized:
        packed, scale, zero = read("W_q"), read("scale"), read("zero")
        out, size = (int(number) for number in read("shape"))
        words = packed.view(torch.int32 if bits == 3 else torch.uint8)  # may be saved as floats
        count = 10 if bits == 3 else 8 // bits
        group = group_size or size
        groups = out * size // group
        shapes = tuple(words.shape), tuple(scale.shape), tuple(zero.shape)
        if shapes != ((-(-groups // count), group), (groups, 1), (groups, 1)):
            raise ValueError(f"{shapes} for {[out, size]}")
        shifts = range(bits * (count - 1), -1, -bits)
        fields = [(words >> shift & 2**bits - 1).to(torch.uint8) for shift in shifts]
        values = torch.cat(fields)[:groups].view(out, size)
        scales = scale.float()
        factors = [in_rows(part.flatten(), group, out, size) for part in (scales, -zero.float() * scales)]
        return Quantized(WIDTHS[bits], values, factors[0], minimums=factors[1])

    return one_layout(
        f"{kind(bits, group_size)} (HQQ)", WIDTHS[bits], ("W_q", "scale", "zero", "shape"), decode
    )


def awq(settings: Settings) -> WeightFormat:
    """The format of AutoAWQ for its GEMM kernels.

    `qweight` `[in, out / 8]` int32 and `qzeros` `[groups, out / 8]` are packed along `out`, with columns
    0 2 4 6 1 3 5 7 in a word. `scales` is `[groups, out]`.

    Raises `ModelError` for an unknown setting.
    """
    short = "w_bit" in settings.values  # the keys of AutoAWQ's own quant_config.json
    settings.one_of("w_bit" if short else "bits", {4: 4})
    settings.one_of("version", {"gemm": 0, "GEMM": 0}, default="gemm")
    size = settings.group_size("q_group_size" if short else "group_size")

    def columns(packed: Tensor) -> Tensor:  # [n, out / 8] -> [n, out]
        return unpack(packed, 4).view(len(packed), -1, 8)[..., [0, 4, 1, 5, 2, 6, 3, 7]].flatten(1)

    def decode(read: Reader) -> Quantized | Tensor:
        values, zeros = columns(read("qweight")).t(), columns(read("qzeros")).t()
        return grouped(4, size, values, read("scales").t(), zeros)

    return one_layout(f"{kind(4, size)} (AWQ)", 4, ("qweight", "qzeros", "scales"), decode)


def gptq(settings: Settings) -> WeightFormat:
    """The format of AutoGPTQ and GPTQModel.

    `qweight` `[in * bits / 32, out]` int32 is packed along `in`, `qzeros` `[groups, out * bits / 32]` along
    `out`. `scales` is `[groups, out]`, and `g_idx` `[in]` has the group of each input.

    Raises `ModelError` for an unknown setting.
    """
    # GPTQModel's; "-:regex" means modules that are not quantized
    for rule in settings.part("dynamic").values:
        if not rule.startswith("-:"):
            raise settings.refusal(f"gptq with settings of its own for {rule!r} (dynamic)")
    bits, size = settings.one_of("bits", {2: 2, 3: 3, 4: 4, 8: 8}), settings.group_size()
    symmetric = settings.one_of("sym", FLAGS, default=True)
    reordered = settings.one_of("desc_act", FLAGS, default=False)
    # subtracted from zero points before packing
    shift = settings.one_of("checkpoint_format", {"gptq": 1, "gptq_v2": 0}, default="gptq")

    def decode(read: Reader) -> Quantized | Tensor:
        zeros = None
        if not symmetric:  # added to whole words, which undoes the borrow of a zero point 0
            ones = 0 if bits == 3 else sum(1 << at for at in range(0, 32, bits))
            zeros = unpack(read("qzeros") + shift * ones, bits).t()
            if bits == 3:  # integers run through words, and the writers subtract from each
                zeros = zeros + shift & 7
        values, groups = unpack(read("qweight").t(), bits), read("g_idx") if reordered else None
        return grouped(bits, size, values, read("scales").t(), zeros, groups)

    suffixes = ["qweight", "scales", *["qzeros"] * (not symmetric), *["g_idx"] * reordered]
    name = f"{kind(bits, size)} (GPTQ{REORDERED * reordered})"
    # weights in another order of inputs are floats
    return one_layout(name, 8 if reordered else WIDTHS[bits], suffixes, decode)


def auto_round(settings: Settings) -> WeightFormat:
    """The format of AutoRound, which packs as GPTQ or AWQ do. Raises `ModelError` for an unknown setting."""
    settings.one_of("data_type", {"int": 0}, default="int")
    keys = "bits", "group_size", "sym"
    common = {key: settings.values.get(key) for key in keys}
    for name, own in settings.part("extra_config").values.items():
        own = {**common, **own} if isinstance(own, Mapping) else {}
        if any(own.get(key) != common[key] for key in keys) and own.get("bits") not in (16, 32):
            raise settings.refusal(f"auto-round with settings of its own for {name!r:.80} (extra_config)")
    packings = {"auto_round": 0, "auto_round:gptq": 1, "auto_round:auto_gptq": 1, "auto_round:auto_awq": None}
    shift = settings.one_of("packing_format", packings, default="auto_round:gptq")
    if shift is None:
        return awq(Settings(common, settings.path))
    version = "gptq" if shift else "gptq_v2"
    return gptq(Settings({**common, "checkpoint_format": version}, settings.path))


def bitnet(settings: Settings) -> WeightFormat:
    """Weights of -1, 0 and 1 times a number (BitNet b1.58, Ma et al. 2024, arXiv 2402.17764).

    `weight` `[out / 4, in]` uint8 has four integers in each number, those of the first quarter of the rows in
    the lowest bits. Kernels round activations in groups, and transformers all of a row together.

    Raises `ModelError` for an unknown setting.
    """
    settings.one_of("quantization_mode", {"offline": 0}, default="offline")
    settings.one_of("use_rms_norm", {False: 0}, default=False)
    divides = settings.one_of(
        "linear_class", {"bitlinear": True, "autobitlinear": False}, default="bitlinear"
    )

    def decode(read: Reader) -> Quantized | Tensor:
        packed, scale = read("weight"), read("weight_scale").float()
        if packed.dtype != torch.uint8 or packed.ndim != 2 or scale.numel() != 1:
            raise ValueError(f"a weight of {packed.dtype}, {list(packed.shape)}, scales {list(scale.shape)}")
        values = torch.cat([packed >> 2 * part & 3 for part in range(4)]) + 1  # the middle is 2
        scales = (1 / scale if divides else scale).expand(len(values), 1)
        return grouped(2, None, values, scales)

    return one_layout("ternary (BitNet)", 2, ("weight", "weight_scale"), decode, mark="weight_scale")


def fp8(settings: Settings) -> WeightFormat:
    """Floats of 8 bits, as DeepSeek and Qwen write them. Raises `ModelError` for an unknown setting."""
    settings.one_of("fmt", {"e4m3": 1, "float8_e4m3fn": 1}, default="e4m3")
    written_by_autofp8 = "ignored_layers" in settings.values
    scale = "weight_scale" if written_by_autofp8 else "weight_scale_inv"
    return _fp8_format(scale, _block(settings, "weight_block_size"))


def _compressed_fp8(settings: Settings) -> WeightFormat:
    """Floats of 8 bits of compressed-tensors. Raises `ModelError` for an unknown setting."""
    blocks = set()
    groups = settings.part("config_groups")
    for name in groups.values:
        scheme = groups.part(name).part("weights")
        scheme.one_of("type", {"float": 1})
        scheme.one_of("num_bits", {8: 8})
        scheme.one_of("symmetric", {True: True}, default=True)
        by_block = scheme.one_of("strategy", {"tensor": False, "channel": False, "block": True})
        blocks.add(_block(scheme, "block_structure") if by_block else None)
    if len(blocks) != 1:
        raise settings.refusal(f"compressed-tensors of floats with {len(blocks)} sizes of blocks")
    return _fp8_format("weight_scale", blocks.pop())


def _fp8_format(scale: str, block: tuple[int, int] | None) -> WeightFormat:
    """Kernels multiply integers and not floats of 8 bits, so weights are dequantized and rounded to integers
    of 8 bits in groups of 32 inputs. The error is small beside FP8's own: 0.6% of a weight matrix's norm, and
    2.6% (both measured on normally distributed weights).
    """
    decode = partial(_fp8_weight, scale, block)
    return one_layout("FP8", 8, ("weight", scale), decode, mark=scale, are_fp8=True)


def _fp8_weight(scale: str, block: tuple[int, int] | None, read: Reader) -> Tensor:
    """A weight, `[out, in]` float32.

    Args:
        scale: suffix of the factors, `[ceil(out / rows), ceil(in / columns)]`, `[out, 1]`, or one number.
        block: rows and columns of a block; None: one factor for each row, or for all.
        read: reads a tensor.
    """
    values, scales = read("weight"), read(scale)
    if values.dtype != torch.float8_e4m3fn or values.ndim != 2:
        raise ValueError(f"a weight of {values.dtype}, {list(values.shape)}, and not a matrix in e4m3")
    if scales.dtype == torch.uint8:  # exponents of two
        scales = scales.view(torch.float8_e8m0fnu)
    if not scales.is_floating_point():
        raise ValueError(f"scales of {scales.dtype}")
    factors = scales.float()
    if scales.numel() == 1:
        return values.float() * factors.reshape(1, 1)
    out, size = values.shape
    rows, columns = block or (1, size)
    expected = -(-out // rows), -(-size // columns)
    if factors.reshape(len(factors), -1).shape != expected:
        raise ValueError(f"scales {list(scales.shape)} for {list(values.shape)}, {list(expected)} are needed")
    factors = factors.reshape(expected).repeat_interleave(columns, 1)[:, :size]
    weight = values.float()
    weight *= factors.repeat_interleave(rows, 0)[:out] if rows > 1 else factors
    return weight


def _block(settings: Settings, key: str) -> tuple[int, int] | None:
    """Rows and columns of a block. Raises `ModelError` for values that are none."""
    size = settings.values.get(key)
    if size is None:
        return None
    if (
        not isinstance(size, list)
        or len(size) != 2
        or not all(type(n) is int and 0 < n < 2**31 for n in size)
    ):
        raise settings.refusal(f"{key} {size!r:.80}")
    return size[0], size[1]


def modelopt(settings: Settings) -> WeightFormat:
    """The format of NVIDIA's Model Optimizer: weights in NVFP4, in FP8, or in both. Dtypes tell which.

    Raises `ModelError` for an unknown setting.
    """
    groups = settings.part("config_groups")
    schemes = [groups.part(name).part("weights") for name in groups.values]
    for scheme in schemes:
        scheme.one_of("type", {"float": 1})
    kinds = {scheme.one_of("num_bits", {4: 4, 8: 8}) for scheme in schemes}
    inner = settings.part("quantization") if "quantization" in settings.values else settings
    kinds = kinds or {inner.one_of("quant_algo", {"NVFP4": 4, "FP8": 8})}
    names = " and ".join("NVFP4" if bits == 4 else "FP8 in int8" for bits in sorted(kinds))

    def decode(read: Reader) -> Quantized | Tensor:
        if read("weight").dtype == torch.float8_e4m3fn:
            return _fp8_weight("weight_scale", None, read)
        return fp4_weight(read, "weight", "weight_scale", "weight_scale_2")

    # weights in NVFP4 have another tensor
    suffixes = "weight", "weight_scale"
    return one_layout(f"{names} (ModelOpt)", max(kinds), suffixes, decode, mark="weight_scale")


def _compressed_tensors(settings: Settings) -> WeightFormat:
    """The format of a checkpoint of compressed-tensors, in integers or in floats."""
    stored = settings.values.get("format")
    if isinstance(stored, str) and stored in PACKED:
        return PACKED[stored]
    in_floats = stored in ("float-quantized", "naive-quantized")
    return _compressed_fp8(settings) if in_floats else compressed_tensors(settings)


BESIDE = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
"""Files of older writers, beside a config.json that does not mention them, and their methods."""

DECLARED = ("quantization_config", "compression_config", "quantization")
"""Keys of a config.json that declare a format."""

WEIGHT_FORMATS: dict[str, Callable[[Settings], WeightFormat]] = {
    "compressed-tensors": _compressed_tensors,
    "gptq": gptq,
    "awq": awq,
    "auto-round": auto_round,
    "bitsandbytes": bitsandbytes,
    "hqq": hqq,
    "bitnet": bitnet,
    "mxfp4": lambda settings: EXPERTS,
    "modelopt": modelopt,
    "fp8": fp8,
}
"""Formats by the `quant_method` of their `quantization_config`."""


def open_format(config: Mapping[str, Any], path: Path) -> WeightFormat | None:
    """The format that a config.json declares, or a file beside it; None for plain weights.

    Args:
        config: the content of config.json.
        path: the model's directory, or a name for error messages.

    Raises `ModelError` for an unknown method or setting.
    """
    text = config.get("text_config")
    parts = config, text if isinstance(text, Mapping) else {}  # a multimodal model may declare it inside
    settings = next((part[key] for part in parts for key in DECLARED[:2] if part.get(key)), None)
    for name, method in BESIDE.items():
        if not settings and (path / name).is_file():
            settings = {"quant_method": method, **read_json_object(path / name)}
    if config.get("quantization") and not (isinstance(settings, Mapping) and settings.get("quant_method")):
        return mlx(Settings({"quantization": config["quantization"]}, path).part("quantization"))
    if not settings:
        return None
    declared = Settings(settings if isinstance(settings, Mapping) else {}, path)
    return declared.one_of("quant_method", WEIGHT_FORMATS)(declared)
