"""The sampling parameters that a model's author recommends: the defaults of requests that leave them out.

They are in `generation_config.json`, or in the metadata of a GGUF file (`general.sampling.*`, which
llama.cpp writes and reads), and `do_sample` has no effect, as in vLLM. Where files have none, the author's
words elsewhere count, which `FAMILIES` has.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from soothsay.core.params import BOUNDS
from soothsay.errors import ModelError, RequestError
from soothsay.files import check_place, read_json_object, user_path

FILE = "generation_config.json"

NAMES = (
    *("temperature", "top_k", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
"""Parameters that are read. Limits of lengths are not: they belong to the request."""

GGUF_KEYS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
"""Keys of the same parameters in GGUF files."""

FAMILIES: Mapping[str, Mapping[str, float]] = {
    "deepseekr1": {"temperature": 0.6, "top_p": 0.95},
    "smollm2": {"temperature": 0.2, "top_p": 0.9},
    "smollm3": {"temperature": 0.6, "top_p": 0.95},
    "qwen25": {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    "qwen3": {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    "llama3": {"temperature": 0.6, "top_p": 0.9},
    "gemma3": {"temperature": 1.0, "top_p": 0.95, "top_k": 64},
}
"""What authors recommend on a model's card or in its first release, by a part of its name: letters and digits
alone, in lower case. The first that fits counts."""

OTHERS: Mapping[str, float] = {"temperature": 0.7}
"""The parameters of a model of which nothing else is known. At 1, small models make things up."""


def sampling_in_file(file: Path) -> dict[str, float]:
    """The parameters in a generation_config.json, as far as there are any.

    Raises `ModelError` if the file cannot be read, or has an impossible value.
    """
    return _checked(read_json_object(file), str(file))


def sampling_in_gguf(metadata: Mapping[str, Any], path: Path) -> dict[str, float]:
    """The parameters in the metadata of a GGUF file. Raises `ModelError` for an impossible value."""
    found = {name: metadata[key] for name, key in GGUF_KEYS.items() if key in metadata}
    decimals = {  # the file has 32 bits: 0.95 is there as 0.949999988
        name: float(f"{value:.7g}") if isinstance(value, float) else value for name, value in found.items()
    }
    return _checked(decimals, str(path))


def sampling_in_folder(folder: str | os.PathLike[str]) -> dict[str, float]:
    """The parameters in another folder's generation_config.json. Raises `ModelError`."""
    file = user_path(folder) / FILE
    check_place(file)
    if not file.is_file():
        raise ModelError(
            f"generation_config={os.fspath(folder)!r}: there is no {file}; give a folder that has one, "
            "'auto' for the model's own, or 'none'"
        )
    return sampling_in_file(file)


def recommended(*names: object) -> dict[str, float]:
    """The parameters for a model whose files have none. `names`: what its files call it, and its path."""
    spelt = " ".join(re.sub("[^a-z0-9]", "", str(name).lower()) for name in names)
    return dict(next((own for family, own in FAMILIES.items() if family in spelt), OTHERS))


def _checked(values: Mapping[str, Any], where: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in NAMES:
        value = values.get(name)
        if value is None:
            continue
        if BOUNDS[name].whole and isinstance(value, float) and value.is_integer():
            value = int(value)
        try:
            BOUNDS[name].accept(name, value)
        except RequestError as error:
            raise ModelError(
                f"{where}: {error}; correct it, or ignore all sampling parameters of the model with "
                "--generation-config none, or LLM(..., generation_config='none')"
            ) from None
        found[name] = value
    return found
