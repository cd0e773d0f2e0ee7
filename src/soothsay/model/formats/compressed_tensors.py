"""compressed-tensors checkpoints: LLM Compressor and vLLM write them, and so does `soothsay quantize`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from soothsay.errors import ModelError
from soothsay.model.formats.weight_format import (
    FLAGS,
    REORDERED,
    Layout,
    Reader,
    Settings,
    WeightFormat,
    grouped,
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

    @property
    def layout(self) -> Layout:
        """The tensors of a weight."""
        suffixes = ["weight_packed", "weight_shape"] if self.packed else ["weight"]
        zeros, groups = ["weight_zero_point"] * (not self.symmetric), ["weight_g_idx"] * self.reordered
        return Layout((*suffixes, "weight_scale", *zeros, *groups), self.decode)

    def decode(self, read: Reader) -> Quantized | Tensor:
        """See `Layout`."""
        zeros = None if self.symmetric else read("weight_zero_point")
        if self.packed:
            out, size = (int(number) for number in read("weight_shape"))
            values = unpack(read("weight_packed"), self.bits)[:, :size]
            zeros = None if zeros is None else unpack(zeros.t(), self.bits).t()[:out]
        else:
            values = read("weight").view(torch.uint8) ^ 128  # from -128..127 to 0..255
            zeros = None if zeros is None else zeros.view(torch.uint8) ^ 128
        groups = read("weight_g_idx") if self.reordered else None
        return grouped(self.bits, self.group_size, values, read("weight_scale"), zeros, groups)

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


def compressed_tensors(settings: Settings) -> WeightFormat:
    """The format of a checkpoint of integers. Raises `ModelError` for an unknown setting."""
    if settings.values.get("transform_config"):
        raise settings.refusal("compressed-tensors with a transform_config")
    if settings.part("sparsity_config").values.get("format", "dense") != "dense":
        raise settings.refusal("compressed-tensors with a sparsity_config")
    schemes = []  # targets and their scheme
    for name, group in settings.part("config_groups").values.items():
        if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
            raise settings.refusal(f"compressed-tensors, where config group {name!r} has no 'weights'")
        stored = group.get("format") or settings.values.get("format")
        weights = Settings({**group["weights"], "format": stored}, settings.path)
        schemes.append((_targets(settings, group.get("targets") or []), _read_scheme(weights)))
    if not schemes:
        raise settings.refusal("compressed-tensors without config_groups")

    def layout(module: str) -> Layout:
        """The layout of the scheme that names `module`, else of the scheme for all linear layers."""
        named = (own for targets, own in schemes if any(_names(target, module) for target in targets))
        general = (own for targets, own in schemes if "Linear" in targets)
        if (scheme := next(named, None) or next(general, None)) is None:
            raise ModelError(
                f"{settings.path}: in quantization_config, no config group has {module} for a target"
            )
        return scheme.layout

    kinds = dict.fromkeys(scheme.name for _, scheme in schemes)
    bits = min(8 if scheme.reordered else scheme.bits for _, scheme in schemes)
    return WeightFormat(f"{' and '.join(kinds)} (compressed-tensors)", bits, "weight_scale", layout)


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
