"""The metadata of a GGUF file: values under its architecture's prefix, and what they say of rotary positions.

Keys mean what llama.cpp's converter writes and its runtime computes.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from soothsay.core.arrays import FloatArray
from soothsay.errors import ModelError
from soothsay.model.families.fields import MAX_LAYERS

ROPE_DIVISORS = "rope_freqs.weight"
LONGROPE_FACTORS = {"rope_factors_long.weight": "long_factor", "rope_factors_short.weight": "short_factor"}
"""Tensors with the factors of longrope, and their keys in a `rope_scaling`."""

MAX_FACTORS = 2**15
"""Limit of the factors in a tensor: a head has at most twice as many dimensions."""


class Metadata:
    """The metadata of a file, looked up under its architecture's prefix."""

    def __init__(self, path: Path, values: Mapping[str, Any]):
        self.path, self.values = path, values
        self.architecture = str(values.get("general.architecture"))

    def raw(self, key: str, default: Any = None) -> Any:
        """A value as it is in the file."""
        return self.values.get(f"{self.architecture}.{key}", default)

    def get(self, key: str, default: Any = None) -> Any:
        """A value, or `default`. Raises `ModelError` for a list whose values differ between layers."""
        value = self.raw(key, default)
        if not isinstance(value, list | np.ndarray):
            return value
        values = list(value) if isinstance(value, list) else value.tolist()
        if len(set(values)) != 1:
            raise ModelError(
                f"{self.path}: {self.architecture}.{key} differs from layer to layer: {values!r:.80}"
            )
        return values[0]

    def number(self, key: str, default: Any = None) -> Any:
        """A value that is a number above 0, or `default`. Raises `ModelError` for another one."""
        value = self.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ModelError(
                f"{self.path}: {self.architecture}.{key} is {value!r:.80} and should be a number; "
                "the file is damaged"
            )
        return value

    def require(self, key: str) -> Any:
        """A number. Raises `ModelError` if it is missing."""
        value = self.number(key)
        if value is None:
            raise ModelError(
                f"{self.path} has no metadata {self.architecture}.{key}; "
                "convert the model again with a current llama.cpp"
            )
        return value

    def layers(self, key: str, count: int) -> list[int]:
        """A whole number for each of `count` layers. Raises `ModelError` for another value."""
        value = self.raw(key)
        values = value.tolist() if isinstance(value, np.ndarray) else value
        values = values if isinstance(values, list) else [values] * min(count, MAX_LAYERS)
        if len(values) != count or not all(isinstance(n, int) and 0 <= n < 2**31 for n in values):
            raise ModelError(
                f"{self.path}: {self.architecture}.{key} {value!r:.80} of {count} layers is damaged"
            )
        return values


Own = Callable[[Metadata], dict[str, Any]]


def read_rope_scaling(
    data: Metadata, divisors: Tensor | None, factors: Mapping[str, Tensor], theta: float, own: Own
) -> dict[str, Any]:
    """The mapping `rope_scaling` of config.json, empty without scaling.

    Args:
        data: of the file.
        divisors: those of the frequencies, `[d / 2]`, if the file has them.
        factors: longrope's, by their keys in the mapping.
        theta: the base.
        own: returns what the mapping of this architecture has besides, if the scaling is YaRN.
    """
    if factors:
        return _longrope(data, factors)
    kind = data.get("rope.scaling.type", "linear")
    # the new key, then the old one
    factor = data.number("rope.scaling.factor") or data.number("rope.scale_linear") or 1.0
    unscaled = kind == "none" or (kind == "linear" and factor == 1)
    if divisors is not None and unscaled:
        found = divisors.double().numpy()
        possible = found.ndim == 1 and bool(np.isfinite(found).all() and (found > 0).all())
        with np.errstate(all="ignore"):
            scaling = _llama3_scaling(found, theta) if possible else None
        if scaling is None:
            raise ModelError(
                f"{data.path}: no scaling of Llama 3's kind gives the divisors in {ROPE_DIVISORS!r}; "
                "load the model from its Hugging Face directory instead"
            )
        return scaling
    if unscaled:
        return {}
    if divisors is not None or kind not in ("linear", "yarn"):
        also = f" with {ROPE_DIVISORS!r}" if divisors is not None else ""
        raise ModelError(
            f"{data.path}: rope.scaling.type {kind!r}{also} is not supported, only linear and yarn"
        )
    given: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        keys = {
            "original_max_position_embeddings": "original_context_length",
            "attention_factor": "yarn_attn_factor",
            "beta_fast": "yarn_beta_fast",
            "beta_slow": "yarn_beta_slow",
        }
        given |= {name: data.number(f"rope.scaling.{key}") for name, key in keys.items()}
        multiplier = data.number("rope.scaling.attn_factor", 1.0)
        if multiplier != 1.0:  # llama.cpp multiplies its default by it
            given["attention_factor"] = multiplier * (0.1 * math.log(factor) + 1.0)
        given |= own(data)
    return {name: value for name, value in given.items() if value is not None}


def _longrope(data: Metadata, factors: Mapping[str, Tensor]) -> dict[str, Any]:
    if any(values.ndim != 1 or len(values) > MAX_FACTORS for values in factors.values()):
        raise ModelError(f"{data.path}: the factors of longrope are no lists for a head; the file is damaged")
    return {
        "rope_type": "longrope",
        "original_max_position_embeddings": data.number("rope.scaling.original_context_length")
        or data.require("context_length"),
        **{key: values.tolist() for key, values in factors.items()},
    }


def _llama3_scaling(divisors: FloatArray, theta: float) -> dict[str, Any] | None:
    """Llama 3's scaling parameters from the divisors of the frequencies, `[d / 2]`; None if none fit.

    A divisor is 1 / (keep + (1 - keep) / factor). `keep` rises from 0 to 1 as the turns of a wave over the
    original context rise from `low` to `high`. The context only sets the unit of turns, so Llama's 8192 does.
    """
    factor, context = float(divisors.max()), 8192
    if factor == 1:
        return {}
    turns = context * theta ** (-np.arange(len(divisors)) / len(divisors)) / (2 * math.pi)
    keep = (1 / divisors - 1 / factor) / (1 - 1 / factor)
    steps = turns[keep < 0.5], turns[keep >= 0.5]
    bounds = [(1.0, 4.0)]
    between = (keep > 1e-3) & (keep < 1 - 1e-3)
    if between.sum() >= 2:  # two points define the line
        slope, start = np.polyfit(turns[between], keep[between], 1)
        bounds.append((float(-start / slope), float((1 - start) / slope)))
    elif all(map(len, steps)):  # no wave is between: both bounds are one
        bounds.append((float(steps[0].max() + steps[1].min()) / 2,) * 2)
    for low, high in bounds:
        risen = (turns - low) / (high - low) if low < high else turns >= low
        if np.allclose(np.clip(risen, 0, 1), keep, atol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": context,
            }
    return None
