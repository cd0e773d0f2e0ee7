"""Configurations of public models, reduced to the fields that soothsay reads, and how each would run.

`python tests/helpers/public_models.py` writes the table of docs/public-models.md anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from soothsay.errors import ModelError
from soothsay.model.families.fields import FIELDS, PARTS
from soothsay.model.families.parsing import parse_model_config
from soothsay.model.formats.declared import open_format
from soothsay.model.specs.attention_spec import AttentionSpec, LatentSpec
from soothsay.model.specs.feed_forward_spec import ExpertsSpec
from soothsay.model.specs.model_spec import ModelSpec
from soothsay.model.specs.state_specs import (
    BesideStatesSpec,
    ConvolutionSpec,
    DeltaSpec,
    SelectiveSpec,
    StateSpaceSpec,
)

FILE = Path(__file__).with_name("public_configs.json")
PAGE = Path(__file__).parents[2] / "docs" / "public-models.md"
KEPT = {"quantization_config", "architectures", "dtype", "torch_dtype"}


def reduced(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config.json that are read."""
    kept = {}
    for key, value in raw.items():
        if key in PARTS and isinstance(value, Mapping):
            kept[key] = reduced(value)
        elif key in FIELDS or key in KEPT:
            kept[key] = value
    return kept


def public_configs() -> dict[str, dict[str, Any]]:
    """The configurations by the names of their models."""
    configs: dict[str, dict[str, Any]] = json.loads(FILE.read_text())
    return configs


def row(name: str, raw: Mapping[str, Any]) -> str:
    """The row of a model in the table."""
    try:
        config = parse_model_config(raw)
        stored = open_format(raw, Path("config.json"))
    except ModelError as error:
        reason = str(error).partition(" is not supported: ")[2] or str(error)
        stated = reason.partition("does not read: ")[2].partition(". It reads")[0]
        reason = f"its weights are not read: {stated}" if stated else reason
        return f"| {name} | `{raw['model_type']}` | no | {reason} |"
    held = "" if stored is None else f"; weights: {stored.name}"
    return f"| {name} | `{raw['model_type']}` | {size(config.num_parameters)} | {described(config)}{held} |"


def size(parameters: int) -> str:
    """15735168 is 16M."""
    if parameters < 1e9:
        return f"{parameters / 1e6:.0f}M"
    return f"{parameters / 1e9:,.{0 if parameters > 1e11 else 1}f}B"


def described(c: ModelSpec) -> str:
    """What a model computes, in a few words."""
    attention, spaces = c.parts(AttentionSpec), len(c.parts(StateSpaceSpec))
    parts = ["latent attention" if c.parts(LatentSpec) else "attention"]
    if c.parts(DeltaSpec):
        parts = [f"states in {len(c.states)} of {c.num_layers} layers, attention in the others"]
    if spaces:
        beside = isinstance(c.layers[0].mixer, BesideStatesSpec)
        place = "beside it" if beside else f"in {len(attention)}"
        parts = [f"Mamba-2 in {spaces} of {c.num_layers} layers, attention {place}"]
    if scans := len(c.parts(SelectiveSpec)):
        parts = [f"Mamba in {scans} of {c.num_layers} layers, attention in {len(attention)}"]
    if (streams := c.stream_size // c.hidden_size) > 1:
        parts.append(f"{streams} streams")
    if c.parts(ConvolutionSpec):
        parts = [f"convolutions in {len(c.states)} of {c.num_layers} layers, attention in the others"]
    for window in sorted({window for window in c.windows if window is not None}):
        kind = "windows" if window > 0 else "chunks"
        parts.append(f"{kind} of {abs(window):,} in {c.windows.count(window)} of {c.num_layers} layers")
    if any(own.sinks for own in attention.values()):
        parts.append("sinks")
    if mixtures := c.parts(ExpertsSpec):
        routing = c.first(ExpertsSpec).routing
        parts.append(f"{routing.chosen} of {routing.count} experts in {len(mixtures)} layers")
    return f"{', '.join(parts)}; {c.max_positions:,} tokens"


def table() -> str:
    """The table of all models."""
    head = "| model | `model_type` | parameters | how it runs, or why not |\n| --- | --- | --- | --- |\n"
    return head + "".join(row(name, raw) + "\n" for name, raw in sorted(public_configs().items()))


def main() -> None:
    """Write the table into the page."""
    before, _, _ = PAGE.read_text().partition("| model |")
    PAGE.write_text(before + table())


if __name__ == "__main__":
    main()
