"""What names of GGUF files say: the type of most weights, and which part of a model a file is.

Only the first bytes say whether a file is one: names may lack the suffix, as in Ollama's folders.

`gemma-3-1b.Q4_K_M.gguf` is a whole model, and `qwen3-Q8_0-00002-of-00003.gguf` the second of three parts.
"""

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from soothsay.errors import ModelError

USUAL_TYPE = "Q4_K_M"
"""The type that is taken from a hub's repository if none is named."""

MAX_LISTED = 50
"""Limit of names in a message."""

MAX_PARTS = 1000
"""Limit of parts of a model. The largest models have about 50."""

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.DOTALL | re.IGNORECASE)
_PATTERN = "{}-{:05d}-of-{:05d}{}"
_TYPE = re.compile(
    r"(?<![A-Z0-9])(?:UD-)?(?:(?:I|T)?Q\d+(?:_\w+)?|MXFP4(?:_\w+)?|BF16|FP?16|FP?32)(?![A-Z0-9_])",
    re.IGNORECASE,
)


def is_gguf(path: Path) -> bool:
    """Whether a file begins as GGUF files do."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def part_names(name: str) -> tuple[str, ...]:
    """Names of all parts of the model to which a file belongs, by its name. A whole file is its only part.

    Example:
        >>> part_names("a-00002-of-00003.gguf")
        ('a-00001-of-00003.gguf', 'a-00002-of-00003.gguf', 'a-00003-of-00003.gguf')
    """
    part = _part(name)
    if part is None:
        return (name,)
    stem, _, count, suffix = part
    return tuple(_PATTERN.format(stem, number, count, suffix) for number in range(1, count + 1))


def weight_type(name: str) -> str:
    """The type of weights that a file's name ends with, in upper case; empty if it names none.

    Example:
        >>> weight_type("Q8_0/qwen2.5-q4_k_m-00001-of-00002.gguf")
        'Q4_K_M'
    """
    types: list[str] = _TYPE.findall(PurePosixPath(name).name)
    return types[-1].upper() if types else ""


def choose(names: Iterable[str], wanted: str, place: str, *, usual: bool) -> tuple[str, ...]:
    """The names of the files of one model: one file, or all parts.

    Args:
        names: of files. Those that are no GGUF models are ignored.
        wanted: the type of weights, such as "Q4_K_M" in any case; empty: the only model that there is.
        place: how a user names the folder or the repository.
        usual: without `wanted`, take `USUAL_TYPE` if there is more than one model.

    Raises `ModelError`, which lists the types, if there is no such model or more than one.
    """
    models = {_first(name): weight_type(name) for name in sorted(names) if _is_model(name)}
    if not models:
        raise ModelError(f"{place} has no .gguf file with a model")
    found, kind = list(models), (wanted or (USUAL_TYPE if usual else "")).upper()
    if wanted or kind in models.values():
        found = [name for name, its_kind in models.items() if its_kind == kind]
    if len(found) == 1:
        return part_names(found[0])
    kinds = sorted(set(models.values()) - {""})
    if not found:
        listed = ", ".join(kinds[:MAX_LISTED]) or "none with a type in its name"
        raise ModelError(f"{place} has no model of type {kind}; it has {listed}")
    if len(kinds) == len(models):
        raise ModelError(
            f"{place} has {len(models)} models: {', '.join(kinds[:MAX_LISTED])}; choose one by its type: "
            f"'{place}:{kinds[0]}'"
        )
    listed = ", ".join(found[:MAX_LISTED])
    raise ModelError(f"{place} has {len(found)} models: {listed}; give the path of one of these files")


def _is_model(name: str) -> bool:
    """Whether a name is a model's, not that of its encoder of images or of the statistics for quantizing."""
    lower = PurePosixPath(name).name.lower()
    if not lower.endswith(".gguf") or "mmproj" in lower:
        return False
    return "imatrix" not in lower or weight_type(name) != ""


def _part(name: str) -> tuple[str, int, int, str] | None:
    """The stem of a part's name, its number, the number of parts, and the suffix. None for another name."""
    matched = _PART.fullmatch(name)
    if matched is None or not 1 <= int(matched[2]) <= int(matched[3]) <= MAX_PARTS:
        return None
    return matched[1], int(matched[2]), int(matched[3]), matched[4]


def _first(name: str) -> str:
    part = _part(name)
    return name if part is None else _PATTERN.format(part[0], 1, *part[2:])
