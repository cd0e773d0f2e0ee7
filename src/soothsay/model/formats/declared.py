"""Formats of quantized weights that a config.json declares. AWQ, GPTQ and FP8 are here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from soothsay.files import read_json_object
from soothsay.model.formats.bitsandbytes import BitsAndBytes
from soothsay.model.formats.compressed_tensors import CompressedTensors
from soothsay.model.formats.four_bit_floats import EXPERTS, MODELOPT, PACKED
from soothsay.model.formats.hqq import HQQ
from soothsay.model.formats.mlx import MLX
from soothsay.model.formats.weight_format import (
    FLAGS,
    REORDERED,
    WIDTHS,
    Reader,
    Settings,
    WeightFormat,
    checked,
    kind,
    unpack,
)
from soothsay.model.weights.quantized import Quantized


@dataclass(frozen=True, slots=True)
class AWQ:
    """The format of AutoAWQ for its GEMM kernels.

    `qweight` `[in, out / 8]` int32 and `qzeros` `[groups, out / 8]` are packed along `out`, with columns
    0 2 4 6 1 3 5 7 in a word. `scales` is `[groups, out]`.
    """

    path: Path
    group_size: int | None
    bits: int = 4

    @classmethod
    def of(cls, settings: Settings) -> AWQ:
        """Read the configuration. Raises `ModelError` for an unknown setting."""
        short = "w_bit" in settings.values  # the keys of AutoAWQ's own quant_config.json
        settings.one_of("w_bit" if short else "bits", {4: 4})
        settings.one_of("version", {"gemm": 0, "GEMM": 0}, default="gemm")
        return cls(settings.path, settings.group_size("q_group_size" if short else "group_size"))

    @property
    def name(self) -> str:
        """See `WeightFormat`."""
        return f"{kind(4, self.group_size)} (AWQ)"

    def holds(self, names: frozenset[str], module: str) -> bool:
        """See `WeightFormat`."""
        return f"{module}.qweight" in names

    def tensors(self, module: str) -> list[str]:
        """See `WeightFormat`."""
        return [f"{module}.{suffix}" for suffix in ("qweight", "qzeros", "scales")]

    def read(self, read: Reader, module: str) -> Quantized | Tensor:
        """See `WeightFormat`."""
        weight, zeros, scales = (read(name) for name in self.tensors(module))
        values, zeros, scales = self._columns(weight).t(), self._columns(zeros).t(), scales.t()
        return checked(f"{self.path}: {module}", 4, self.group_size, values, scales, zeros)

    @staticmethod
    def _columns(packed: Tensor) -> Tensor:
        """`[n, out / 8]` -> `[n, out]`."""
        return unpack(packed, 4).view(len(packed), -1, 8)[..., [0, 4, 1, 5, 2, 6, 3, 7]].flatten(1)


@dataclass(frozen=True, slots=True)
class GPTQ:
    """The format of AutoGPTQ and GPTQModel.

    `qweight` `[in * bits / 32, out]` int32 is packed along `in`, `qzeros` `[groups, out * bits / 32]` along
    `out`. `scales` is `[groups, out]`, and `g_idx` `[in]` has the group of each input.
    """

    path: Path
    stored: int  # bits of an integer
    group_size: int | None
    symmetric: bool
    desc_act: bool
    zero_shift: int  # subtracted from zero points before packing

    @classmethod
    def of(cls, settings: Settings) -> GPTQ:
        """Read the configuration. Raises `ModelError` for an unknown setting."""
        # GPTQModel's; "-:regex" means modules that are not quantized
        for rule in settings.part("dynamic").values:
            if not rule.startswith("-:"):
                raise settings.refusal(f"gptq with settings of its own for {rule!r} (dynamic)")
        return cls(
            settings.path,
            stored=settings.one_of("bits", {2: 2, 3: 3, 4: 4, 8: 8}),
            group_size=settings.group_size(),
            symmetric=settings.one_of("sym", FLAGS, default=True),
            desc_act=settings.one_of("desc_act", FLAGS, default=False),
            zero_shift=settings.one_of("checkpoint_format", {"gptq": 1, "gptq_v2": 0}, default="gptq"),
        )

    @property
    def name(self) -> str:
        """See `WeightFormat`."""
        return f"{kind(self.stored, self.group_size)} (GPTQ{REORDERED * self.desc_act})"

    @property
    def bits(self) -> int:
        """See `WeightFormat`. Weights in another order of inputs are floats."""
        return 8 if self.desc_act else WIDTHS[self.stored]

    def holds(self, names: frozenset[str], module: str) -> bool:
        """See `WeightFormat`."""
        return f"{module}.qweight" in names

    def tensors(self, module: str) -> list[str]:
        """See `WeightFormat`."""
        suffixes = ["qweight", "scales"]
        suffixes += [] if self.symmetric else ["qzeros"]
        suffixes += ["g_idx"] if self.desc_act else []
        return [f"{module}.{suffix}" for suffix in suffixes]

    def read(self, read: Reader, module: str) -> Quantized | Tensor:
        """See `WeightFormat`."""
        held = {name.removeprefix(f"{module}."): read(name) for name in self.tensors(module)}
        zeros, bits = None, self.stored
        if not self.symmetric:  # added to whole words, which undoes the borrow of a zero point 0
            ones = 0 if bits == 3 else sum(1 << at for at in range(0, 32, bits))
            zeros = unpack(held["qzeros"] + self.zero_shift * ones, bits).t()
            if bits == 3:  # integers run through words, and the writers subtract from each
                zeros = zeros + self.zero_shift & 7
        values, scales = unpack(held["qweight"].t(), bits), held["scales"].t()
        where, groups = f"{self.path}: {module}", held.get("g_idx")
        return checked(where, bits, self.group_size, values, scales, zeros, groups)


def auto_round(settings: Settings) -> AWQ | GPTQ:
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
        return AWQ.of(Settings(common, settings.path))
    version = "gptq" if shift else "gptq_v2"
    return GPTQ.of(Settings({**common, "checkpoint_format": version}, settings.path))


@dataclass(frozen=True, slots=True)
class FP8:
    """Floats of 8 bits, and factors of their blocks.

    Kernels multiply integers and not floats of 8 bits, so weights are dequantized and rounded to integers of
    8 bits in groups of 32 inputs. They take as much memory. The error is small beside FP8's own: 0.6% of a
    weight matrix's norm, and 2.6% (both measured on normally distributed weights).
    """

    path: Path
    scale: str = "weight_scale_inv"
    """Suffix of the factors' name: `[ceil(out / rows), ceil(in / columns)]`, `[out, 1]`, or one number."""

    block: tuple[int, int] | None = None
    """Rows and columns of a block; None: one factor for each row, or for all."""

    bits: int = 8
    name: str = "FP8"

    @classmethod
    def of(cls, settings: Settings) -> FP8:
        """Read the configuration of DeepSeek and Qwen. Raises `ModelError` for an unknown setting."""
        settings.one_of("fmt", {"e4m3": 1, "float8_e4m3fn": 1}, default="e4m3")
        written_by_autofp8 = "ignored_layers" in settings.values
        return cls(
            settings.path,
            "weight_scale" if written_by_autofp8 else "weight_scale_inv",
            _block(settings, "weight_block_size"),
        )

    @classmethod
    def of_compressed_tensors(cls, settings: Settings) -> FP8:
        """Read the configuration of compressed-tensors. Raises `ModelError` for an unknown setting."""
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
        return cls(settings.path, "weight_scale", blocks.pop())

    def holds(self, names: frozenset[str], module: str) -> bool:
        """See `WeightFormat`."""
        return f"{module}.{self.scale}" in names

    def tensors(self, module: str) -> list[str]:
        """See `WeightFormat`."""
        return [f"{module}.weight", f"{module}.{self.scale}"]

    def read(self, read: Reader, module: str) -> Tensor:
        """The weight of `module`, `[out, in]` float32."""
        values, scales = (read(name) for name in self.tensors(module))
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
        rows, columns = self.block or (1, size)
        expected = -(-out // rows), -(-size // columns)
        if factors.reshape(len(factors), -1).shape != expected:
            raise ValueError(
                f"scales {list(scales.shape)} for {list(values.shape)}, {list(expected)} are needed"
            )
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


@dataclass(frozen=True, slots=True)
class ModelOpt:
    """The format of NVIDIA's Model Optimizer: weights in NVFP4, in FP8, or in both. Dtypes tell which."""

    path: Path
    kinds: tuple[int, ...]  # bits of weights in this checkpoint

    @classmethod
    def of(cls, settings: Settings) -> ModelOpt:
        """Read the configuration. Raises `ModelError` for an unknown setting."""
        groups = settings.part("config_groups")
        schemes = [groups.part(name).part("weights") for name in groups.values]
        for scheme in schemes:
            scheme.one_of("type", {"float": 1})
        kinds = {scheme.one_of("num_bits", {4: 4, 8: 8}) for scheme in schemes}
        inner = settings.part("quantization") if "quantization" in settings.values else settings
        kinds = kinds or {inner.one_of("quant_algo", {"NVFP4": 4, "FP8": 8})}
        return cls(settings.path, tuple(sorted(kinds)))

    @property
    def name(self) -> str:
        """See `WeightFormat`."""
        return f"{' and '.join('NVFP4' if bits == 4 else 'FP8 in int8' for bits in self.kinds)} (ModelOpt)"

    @property
    def bits(self) -> int:
        """See `WeightFormat`."""
        return max(self.kinds)

    def holds(self, names: frozenset[str], module: str) -> bool:
        """See `WeightFormat`."""
        return f"{module}.weight_scale" in names

    def tensors(self, module: str) -> list[str]:
        """See `WeightFormat`. Weights in NVFP4 have another one."""
        return [f"{module}.weight", f"{module}.weight_scale"]

    def read(self, read: Reader, module: str) -> Quantized | Tensor:
        """See `WeightFormat`."""
        in_fp8 = read(f"{module}.weight").dtype == torch.float8_e4m3fn
        return FP8(self.path, "weight_scale").read(read, module) if in_fp8 else MODELOPT.read(read, module)


def _compressed_tensors(settings: Settings) -> WeightFormat:
    """The format of a checkpoint of compressed-tensors, in integers or in floats."""
    stored = settings.values.get("format")
    if isinstance(stored, str) and stored in PACKED:
        return PACKED[stored]
    in_floats = stored in ("float-quantized", "naive-quantized")
    return FP8.of_compressed_tensors(settings) if in_floats else CompressedTensors.of(settings)


BESIDE = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
"""Files of older writers, beside a config.json that does not mention them, and their methods."""

WEIGHT_FORMATS: dict[str, Callable[[Settings], WeightFormat]] = {
    "compressed-tensors": _compressed_tensors,
    "gptq": GPTQ.of,
    "awq": AWQ.of,
    "auto-round": auto_round,
    "bitsandbytes": BitsAndBytes.of,
    "hqq": HQQ.of,
    "mxfp4": lambda settings: EXPERTS,
    "modelopt": ModelOpt.of,
    "fp8": FP8.of,
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
    keys = "quantization_config", "compression_config"
    settings = next((part[key] for part in parts for key in keys if part.get(key)), None)
    for name, method in BESIDE.items():
        if not settings and (path / name).is_file():
            settings = {"quant_method": method, **read_json_object(path / name)}
    if config.get("quantization") and not (isinstance(settings, Mapping) and settings.get("quant_method")):
        return MLX.of(Settings({"quantization": config["quantization"]}, path).part("quantization"))
    if not settings:
        return None
    declared = Settings(settings if isinstance(settings, Mapping) else {}, path)
    return declared.one_of("quant_method", WEIGHT_FORMATS)(declared)
