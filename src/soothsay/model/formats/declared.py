"""The format of quantized weights that a config.json declares. A new format is one line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from soothsay.errors import ModelError
from soothsay.files import read_json_object
from soothsay.model.formats.awq import AWQ
from soothsay.model.formats.compressed_tensors import CompressedTensors
from soothsay.model.formats.fp8 import FP8
from soothsay.model.formats.gptq import GPTQ
from soothsay.model.formats.mxfp4 import MXFP4
from soothsay.model.formats.weight_format import Settings, WeightFormat


def _compressed_tensors(settings: Settings) -> WeightFormat:
    """The format of a checkpoint of compressed-tensors, in integers or in floats."""
    in_floats = settings.values.get("format") in ("float-quantized", "naive-quantized")
    return FP8.of_compressed_tensors(settings) if in_floats else CompressedTensors.of(settings)


BESIDE = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files of older writers, beside a config.json that does not mention them, and their methods."""

WEIGHT_FORMATS: dict[str, Callable[[Settings], WeightFormat]] = {
    "compressed-tensors": _compressed_tensors,
    "gptq": GPTQ.of,
    "awq": AWQ.of,
    "mxfp4": MXFP4.of,
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
        raise ModelError(
            f"{path} is quantized in MLX's format, which soothsay does not read: take the model that it was "
            "made from, or a GGUF file of it"
        )
    if not settings:
        return None
    declared = Settings(settings if isinstance(settings, Mapping) else {}, path)
    return declared.one_of("quant_method", WEIGHT_FORMATS)(declared)
