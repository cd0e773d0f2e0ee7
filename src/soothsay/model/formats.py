"""Weights that others quantized, read; and ours, written so that others can read them.

A format tells from config.json alone which tensors hold the weight of a module. A *module* is a tensor name
less its suffix, such as `model.layers.0.self_attn.q_proj`. Integers of 4 or 8 bits lie in words of 32, and
formats differ in the direction and the order in which they fill them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from soothsay.errors import ModelError
from soothsay.model.checkpoint import Reader
from soothsay.model.quantized import Quantized

T = TypeVar("T")

FLAGS = {True: True, False: False}


class WeightFormat(Protocol):
    """How a checkpoint stores its quantized weights."""

    @property
    def name(self) -> str:
        """For people: bits, groups, and whose format it is."""

    @property
    def bits(self) -> int:
        """Of most of its integers: 4 or 8."""

    def holds(self, names: frozenset[str], module: str) -> bool:
        """Whether `module` is quantized in a checkpoint with these tensors; else it is a plain `.weight`."""

    def tensors(self, module: str) -> list[str]:
        """Names of the tensors that `read` asks for."""

    def read(self, read: Reader, module: str) -> Quantized:
        """The weight of `module`. Raises `ModelError` where its tensors do not fit each other, or its groups
        are not runs of inputs."""


def open_format(config: Mapping[str, Any], path: Path) -> WeightFormat | None:
    """The format that a config.json declares, None where weights are plain. `path` is for messages.

    Raises `ModelError` for a method or a setting that is not known.
    """
    settings = config.get("quantization_config") or config.get("compression_config")
    if not settings:
        return None
    known: dict[str, Callable[[_Settings], WeightFormat]] = {
        "compressed-tensors": CompressedTensors.of,
        "gptq": GPTQ.of,
        "awq": AWQ.of,
    }
    declared = _Settings(settings if isinstance(settings, Mapping) else {}, path)
    return declared.one_of("quant_method", known)(declared)


@dataclass(frozen=True, slots=True)
class _Settings:
    """A `quantization_config`, or a part of it."""

    values: Mapping[str, Any]
    path: Path

    def one_of(self, key: str, known: Mapping[Any, T], default: Any = None) -> T:
        """What the value at `key` stands for. Raises `ModelError` if it is not one of `known`."""
        value = self.values.get(key, default)
        if isinstance(value, str | int | None) and value in known:
            return known[value]
        raise self.refusal(f"{key} {value!r}")

    def group_size(self, key: str = "group_size") -> int | None:
        """Inputs that share a scale, None for all of them."""
        size = self.values.get(key)
        if size is None or size == -1:
            return None
        if not isinstance(size, int) or size < 1:
            raise self.refusal(f"{key} {size!r}")
        return size

    def refusal(self, what: str) -> ModelError:
        return ModelError(
            f"{self.path} is quantized in a way that soothsay does not read: {what}. It reads "
            "compressed-tensors (pack-quantized of 4 or 8 bits, int-quantized of 8), gptq (4 or 8 bits) and "
            "awq (gemm, 4 bits). Or take the model that this one was made from, and quantize it with "
            "soothsay quantize"
        )


# compressed-tensors: what vLLM and LLM Compressor write, and transformers loads with the package of that name


@dataclass(frozen=True, slots=True)
class Scheme:
    """How compressed-tensors stores a weight: its integers are signed, its scales `[out, groups]`.

    Packed along `in`, as `weight_packed` with `weight_shape`, after adding `2 ** (bits - 1)`; zero points are
    packed along `out` by the same rule. Or not packed, as int8.
    """

    bits: int  # 4 or 8
    group_size: int | None = None  # None: a scale per output channel
    packed: bool = True
    symmetric: bool = True
    reordered: bool = False  # `weight_g_idx` says which group an input is of

    @property
    def name(self) -> str:
        """For people."""
        return _kind(self.bits, self.group_size)

    def tensors(self, module: str) -> list[str]:
        """See `WeightFormat`."""
        suffixes = ["weight_packed", "weight_shape"] if self.packed else ["weight"]
        suffixes += ["weight_scale"]
        suffixes += [] if self.symmetric else ["weight_zero_point"]
        suffixes += ["weight_g_idx"] if self.reordered else []
        return [f"{module}.{suffix}" for suffix in suffixes]

    def read(self, read: Reader, module: str, path: Path) -> Quantized:
        """See `WeightFormat`."""
        held = {name.removeprefix(f"{module}."): read(name) for name in self.tensors(module)}
        zeros = held.get("weight_zero_point")
        if self.packed:
            out, size = (int(number) for number in held["weight_shape"])
            values = _unpack(held["weight_packed"], self.bits)[:, :size]
            zeros = None if zeros is None else _unpack(zeros.t(), self.bits).t()[:out]
        else:
            values = held["weight"].view(torch.uint8) ^ 128  # from -128..127 to 0..255
            zeros = None if zeros is None else zeros.view(torch.uint8) ^ 128
        if self.reordered:
            _require_runs(held["weight_g_idx"], self.group_size, f"{path}: {module}", "actorder 'group'")
        scales = held["weight_scale"]
        return _checked(f"{path}: {module}", self.bits, self.group_size, values, scales, zeros)

    def write(self, weight: Quantized, module: str) -> dict[str, Tensor]:
        """The tensors of a symmetric weight by name. Scales are rounded to bfloat16."""
        if self.packed:
            shape = torch.tensor(weight.shape)
            stored = {"weight_packed": _pack(weight.values, self.bits), "weight_shape": shape}
        else:
            stored = {"weight": (weight.values ^ 128).view(torch.int8)}
        stored["weight_scale"] = weight.scales.bfloat16()
        return {f"{module}.{suffix}": tensor for suffix, tensor in stored.items()}

    def config(self, ignore: Iterable[str]) -> dict[str, Any]:
        """The `quantization_config` of a model whose linear layers, but those in `ignore`, are stored so.

        Weights that are not packed are for products of integers: activations are to be quantized too, each
        token by itself as it comes.
        """
        weights = {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": True,
            "strategy": "channel" if self.group_size is None else "group",
            "group_size": self.group_size,
            "dynamic": False,
        }
        tokens = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
        inputs = None if self.packed else tokens
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized" if self.packed else "int-quantized",
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
            },
            "ignore": sorted(ignore),
        }


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """Modules by their scheme."""

    path: Path
    schemes: tuple[tuple[tuple[str, ...], Scheme], ...]  # targets and what holds for them

    @classmethod
    def of(cls, settings: _Settings) -> CompressedTensors:
        """Read the configuration. Raises `ModelError` for what is not known."""
        if settings.values.get("transform_config"):
            raise settings.refusal("compressed-tensors with a transform_config")
        if (settings.values.get("sparsity_config") or {}).get("format", "dense") != "dense":
            raise settings.refusal("compressed-tensors with a sparsity_config")
        schemes = []
        for name, group in (settings.values.get("config_groups") or {}).items():
            if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
                raise settings.refusal(f"compressed-tensors, where config group {name!r} has no 'weights'")
            stored = group.get("format") or settings.values.get("format")
            weights = _Settings({**group["weights"], "format": stored}, settings.path)
            schemes.append((tuple(group.get("targets") or ()), cls._read_scheme(weights)))
        if not schemes:
            raise settings.refusal("compressed-tensors without config_groups")
        return cls(settings.path, tuple(schemes))

    @staticmethod
    def _read_scheme(settings: _Settings) -> Scheme:
        packed = settings.one_of("format", {"pack-quantized": True, "int-quantized": False})
        settings.one_of("type", {"int": "int"}, default="int")
        settings.one_of("strategy", {"group": "group", "channel": "channel"})
        in_order = dict.fromkeys((None, False, "weight", "static"), False)
        return Scheme(
            bits=settings.one_of("num_bits", {4: 4, 8: 8} if packed else {8: 8}),
            group_size=settings.group_size(),
            packed=packed,
            symmetric=settings.one_of("symmetric", FLAGS, default=True),
            reordered=settings.one_of("actorder", in_order | dict.fromkeys((True, "group", "dynamic"), True)),
        )

    @property
    def name(self) -> str:
        """See `WeightFormat`."""
        kinds = dict.fromkeys(scheme.name for _, scheme in self.schemes)
        return f"{' and '.join(kinds)} (compressed-tensors)"

    @property
    def bits(self) -> int:
        """See `WeightFormat`."""
        return min(scheme.bits for _, scheme in self.schemes)

    def holds(self, names: frozenset[str], module: str) -> bool:
        """See `WeightFormat`."""
        return f"{module}.weight_scale" in names

    def tensors(self, module: str) -> list[str]:
        """See `WeightFormat`."""
        return self._scheme(module).tensors(module)

    def read(self, read: Reader, module: str) -> Quantized:
        """See `WeightFormat`."""
        return self._scheme(module).read(read, module, self.path)

    def _scheme(self, module: str) -> Scheme:
        """The one that names `module`, else the one for all linear layers."""
        for targets, scheme in self.schemes:
            if any(_names(target, module) for target in targets):
                return scheme
        for targets, scheme in self.schemes:
            if "Linear" in targets:
                return scheme
        raise ModelError(f"{self.path}: in quantization_config, no config group has {module} for a target")


def _names(target: str, module: str) -> bool:
    return bool(re.match(target[3:], module)) if target.startswith("re:") else target == module


# GPTQ and AWQ


@dataclass(frozen=True, slots=True)
class GPTQ:
    """What AutoGPTQ and GPTQModel write: `qweight` `[in * bits / 32, out]` int32, packed along `in`, `scales`
    `[groups, out]`, `qzeros` `[groups, out * bits / 32]` packed along `out`, `g_idx` `[in]`."""

    path: Path
    bits: int
    group_size: int | None
    symmetric: bool
    desc_act: bool
    zero_shift: int  # what was subtracted from zero points before they were packed

    @classmethod
    def of(cls, settings: _Settings) -> GPTQ:
        """Read the configuration. Raises `ModelError` for what is not known."""
        rules = settings.values.get("dynamic") or {}  # GPTQModel: "-:regex" leaves modules as they are
        for rule in rules:
            if not rule.startswith("-:"):
                raise settings.refusal(f"gptq with settings of its own for {rule!r} (dynamic)")
        return cls(
            settings.path,
            bits=settings.one_of("bits", {4: 4, 8: 8}),
            group_size=settings.group_size(),
            symmetric=settings.one_of("sym", FLAGS, default=True),
            desc_act=settings.one_of("desc_act", FLAGS, default=False),
            zero_shift=settings.one_of("checkpoint_format", {"gptq": 1, "gptq_v2": 0}, default="gptq"),
        )

    @property
    def name(self) -> str:
        """See `WeightFormat`."""
        return f"{_kind(self.bits, self.group_size)} (GPTQ)"

    def holds(self, names: frozenset[str], module: str) -> bool:
        """See `WeightFormat`."""
        return f"{module}.qweight" in names

    def tensors(self, module: str) -> list[str]:
        """See `WeightFormat`."""
        suffixes = ["qweight", "scales"]
        suffixes += [] if self.symmetric else ["qzeros"]
        suffixes += ["g_idx"] if self.desc_act else []
        return [f"{module}.{suffix}" for suffix in suffixes]

    def read(self, read: Reader, module: str) -> Quantized:
        """See `WeightFormat`."""
        held = {name.removeprefix(f"{module}."): read(name) for name in self.tensors(module)}
        zeros = None
        if not self.symmetric:  # shifted in whole words, so that what a 0 borrowed is paid back
            ones = 0x11111111 if self.bits == 4 else 0x01010101
            zeros = _unpack(held["qzeros"] + self.zero_shift * ones, self.bits).t()
        if self.desc_act:
            _require_runs(held["g_idx"], self.group_size, f"{self.path}: {module}", "desc_act")
        values, scales = _unpack(held["qweight"].t(), self.bits), held["scales"].t()
        return _checked(f"{self.path}: {module}", self.bits, self.group_size, values, scales, zeros)


@dataclass(frozen=True, slots=True)
class AWQ:
    """What AutoAWQ writes for its GEMM kernels: `qweight` `[in, out / 8]` int32 and `qzeros`
    `[groups, out / 8]`, both packed along `out` with columns 0 2 4 6 1 3 5 7 in a word; `scales`
    `[groups, out]`."""

    path: Path
    group_size: int | None
    bits: int = 4

    @classmethod
    def of(cls, settings: _Settings) -> AWQ:
        """Read the configuration. Raises `ModelError` for what is not known."""
        short = "w_bit" in settings.values  # the keys of AutoAWQ's own quant_config.json
        settings.one_of("w_bit" if short else "bits", {4: 4})
        settings.one_of("version", {"gemm": 0, "GEMM": 0}, default="gemm")
        return cls(settings.path, settings.group_size("q_group_size" if short else "group_size"))

    @property
    def name(self) -> str:
        """See `WeightFormat`."""
        return f"{_kind(4, self.group_size)} (AWQ)"

    def holds(self, names: frozenset[str], module: str) -> bool:
        """See `WeightFormat`."""
        return f"{module}.qweight" in names

    def tensors(self, module: str) -> list[str]:
        """See `WeightFormat`."""
        return [f"{module}.{suffix}" for suffix in ("qweight", "qzeros", "scales")]

    def read(self, read: Reader, module: str) -> Quantized:
        """See `WeightFormat`."""
        weight, zeros, scales = (read(name) for name in self.tensors(module))
        values, zeros, scales = self._columns(weight).t(), self._columns(zeros).t(), scales.t()
        return _checked(f"{self.path}: {module}", 4, self.group_size, values, scales, zeros)

    @staticmethod
    def _columns(packed: Tensor) -> Tensor:
        """`[n, out / 8]` -> `[n, out]`."""
        return _unpack(packed, 4).view(len(packed), -1, 8)[..., [0, 4, 1, 5, 2, 6, 3, 7]].flatten(1)


# what they share


def _pack(values: Tensor, bits: int) -> Tensor:
    """`[n, m]` uint8 -> int32 `[n, m * bits / 32]`, rounded up; the first value in a word's lowest bits."""
    values = torch.nn.functional.pad(values, (0, -values.shape[1] % (32 // bits)))
    if bits == 4:
        values = values[:, ::2] | values[:, 1::2] << 4
    words = values.flatten().view(torch.int32)  # little-endian, as every machine that torch runs on
    return words.view(len(values), values.shape[1] // 4)


def _unpack(words: Tensor, bits: int) -> Tensor:
    """The reverse of `_pack`, less its rounding: `[n, k]` int32 -> `[n, k * 32 / bits]` uint8."""
    values = words.flatten().view(torch.uint8)
    if bits == 4:
        values = torch.stack([values & 15, values >> 4], dim=-1)
    return values.view(len(words), words.shape[1] * 32 // bits)


def _checked(
    where: str, bits: int, group_size: int | None, values: Tensor, scales: Tensor, zeros: Tensor | None
) -> Quantized:
    """Raises `ModelError` where shapes do not belong together."""
    out, size = values.shape
    expected = (out, 1 if group_size is None else size / group_size)  # a fraction fits nothing
    shapes = {"scales": scales.shape} | ({} if zeros is None else {"zero points": zeros.shape})
    for what, shape in shapes.items():
        if tuple(shape) != expected:
            raise ModelError(
                f"{where}: integers {[out, size]} and {what} {list(shape)} do not make a weight "
                f"of {_kind(bits, group_size)}; the file is damaged, or config.json another model's"
            )
    zeros = None if zeros is None else zeros.contiguous()
    return Quantized(bits, values.contiguous(), scales.float().contiguous(), zeros)


def _require_runs(groups: Tensor, group_size: int | None, where: str, setting: str) -> None:
    """Raises `ModelError` if inputs are not in groups one run after the other."""
    runs = torch.arange(len(groups)) // (group_size or len(groups))
    if not torch.equal(groups.long(), runs):
        raise ModelError(
            f"{where} was quantized with {setting}: its groups are not runs of inputs, which soothsay's "
            "kernels need. Take a version made without it, or quantize the model with soothsay quantize"
        )


def _kind(bits: int, group_size: int | None) -> str:
    return f"int{bits}, " + ("a scale per channel" if group_size is None else f"groups of {group_size}")
