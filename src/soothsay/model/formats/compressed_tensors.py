"""compressed-tensors checkpoints: LLM Compressor and vLLM write them, and so does `soothsay quantize`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from soothsay.errors import ModelError
from soothsay.model.formats.weight_format import (
    FLAGS,
    REORDERED,
    Reader,
    Settings,
    checked,
    kind,
    pack,
    unpack,
)
from soothsay.model.weights.quantized import Quantized

MAX_PATTERN, MAX_REPEATS = 512, 5
"""Limits of a pattern for names of modules, in characters and repetitions. Matching tries all ways to divide
a name among repetitions: with 5 of them, some hundred thousand ways."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How compressed-tensors stores a weight: signed integers, and scales `[out, groups]`.

    Packed: `weight_packed` has the integers plus `2 ** (bits - 1)`, packed along `in`; `weight_shape` has the
    shape; zero points are packed along `out`. Not packed: `weight` is int8.
    """

    bits: int  # 2, 4 or 8
    group_size: int | None = None  # None: a scale per output channel
    packed: bool = True
    symmetric: bool = True
    reordered: bool = False  # `weight_g_idx` has the group of each input

    @property
    def name(self) -> str:
        """For people."""
        return kind(self.bits, self.group_size) + REORDERED * self.reordered

    def tensors(self, module: str) -> list[str]:
        """See `WeightFormat`."""
        suffixes = ["weight_packed", "weight_shape"] if self.packed else ["weight"]
        suffixes += ["weight_scale"]
        suffixes += [] if self.symmetric else ["weight_zero_point"]
        suffixes += ["weight_g_idx"] if self.reordered else []
        return [f"{module}.{suffix}" for suffix in suffixes]

    def read(self, read: Reader, module: str, path: Path) -> Quantized | Tensor:
        """See `WeightFormat`."""
        held = {name.removeprefix(f"{module}."): read(name) for name in self.tensors(module)}
        zeros = held.get("weight_zero_point")
        if self.packed:
            out, size = (int(number) for number in held["weight_shape"])
            values = unpack(held["weight_packed"], self.bits)[:, :size]
            zeros = None if zeros is None else unpack(zeros.t(), self.bits).t()[:out]
        else:
            values = held["weight"].view(torch.uint8) ^ 128  # from -128..127 to 0..255
            zeros = None if zeros is None else zeros.view(torch.uint8) ^ 128
        scales, groups = held["weight_scale"], held.get("weight_g_idx")
        return checked(f"{path}: {module}", self.bits, self.group_size, values, scales, zeros, groups)

    def write(self, weight: Quantized, module: str) -> dict[str, Tensor]:
        """The tensors of a symmetric weight by name. Scales are rounded to bfloat16."""
        if self.packed:
            shape = torch.tensor(weight.shape)
            stored = {"weight_packed": pack(weight.values, self.bits), "weight_shape": shape}
        else:
            stored = {"weight": (weight.values ^ 128).view(torch.int8)}
        stored["weight_scale"] = weight.scales.bfloat16()
        return {f"{module}.{suffix}": tensor for suffix, tensor in stored.items()}

    def config(self, ignore: Iterable[str]) -> dict[str, Any]:
        """The `quantization_config` of a model whose linear layers, except `ignore`, are stored like this.

        Weights that are not packed are meant for integer products, so the config asks for quantized
        activations too, with a scale for each token.
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
    """The schemes of a checkpoint, by module."""

    path: Path
    schemes: tuple[tuple[tuple[str, ...], Scheme], ...]  # targets and their scheme

    @classmethod
    def of(cls, settings: Settings) -> CompressedTensors:
        """Read the configuration. Raises `ModelError` for an unknown setting."""
        if settings.values.get("transform_config"):
            raise settings.refusal("compressed-tensors with a transform_config")
        if settings.part("sparsity_config").values.get("format", "dense") != "dense":
            raise settings.refusal("compressed-tensors with a sparsity_config")
        schemes = []
        for name, group in settings.part("config_groups").values.items():
            if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
                raise settings.refusal(f"compressed-tensors, where config group {name!r} has no 'weights'")
            stored = group.get("format") or settings.values.get("format")
            weights = Settings({**group["weights"], "format": stored}, settings.path)
            schemes.append((_targets(settings, group.get("targets") or []), cls._read_scheme(weights)))
        if not schemes:
            raise settings.refusal("compressed-tensors without config_groups")
        return cls(settings.path, tuple(schemes))

    @staticmethod
    def _read_scheme(settings: Settings) -> Scheme:
        packed = settings.one_of("format", {"pack-quantized": True, "int-quantized": False})
        settings.one_of("type", {"int": "int"}, default="int")
        settings.one_of("strategy", {"group": "group", "channel": "channel"})
        in_order = dict.fromkeys((None, False, "weight", "static"), False)
        return Scheme(
            bits=settings.one_of("num_bits", {2: 2, 4: 4, 8: 8} if packed else {8: 8}),
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
        return min(8 if scheme.reordered else scheme.bits for _, scheme in self.schemes)

    def holds(self, names: frozenset[str], module: str) -> bool:
        """See `WeightFormat`."""
        return f"{module}.weight_scale" in names

    def tensors(self, module: str) -> list[str]:
        """See `WeightFormat`."""
        return self._scheme(module).tensors(module)

    def read(self, read: Reader, module: str) -> Quantized | Tensor:
        """See `WeightFormat`."""
        return self._scheme(module).read(read, module, self.path)

    def _scheme(self, module: str) -> Scheme:
        """The scheme that names `module`, else the scheme for all linear layers."""
        for targets, scheme in self.schemes:
            if any(_names(target, module) for target in targets):
                return scheme
        for targets, scheme in self.schemes:
            if "Linear" in targets:
                return scheme
        raise ModelError(f"{self.path}: in quantization_config, no config group has {module} for a target")


def _targets(settings: Settings, targets: Any) -> tuple[str, ...]:
    """The targets of a group: names, classes, and patterns after "re:", which must be cheap to match."""
    if not isinstance(targets, list):
        raise settings.refusal(f"targets {targets!r:.80}, which is no list")
    for target in targets:
        if not isinstance(target, str):
            raise settings.refusal(f"target {target!r:.80}, which is no text")
        if target.startswith("re:"):
            plain = re.sub(r"\\.", "x", target)  # without escapes
            repeats = len(re.findall(r"[*+?{]", plain))
            if len(target) > MAX_PATTERN or repeats > MAX_REPEATS or re.search(r"\)[*+{]", plain):
                raise settings.refusal(f"the pattern {target!r:.80}, which may take too long to match")
            try:
                re.compile(target[3:])
            except (re.error, RecursionError, OverflowError) as error:
                raise settings.refusal(f"the pattern {target!r:.80} ({error})") from error
    return tuple(targets)


def _names(target: str, module: str) -> bool:
    return bool(re.match(target[3:], module)) if target.startswith("re:") else target == module
