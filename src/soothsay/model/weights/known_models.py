"""Models that have a short name, models that are on this machine, and names that were probably meant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import resources
from pathlib import Path

from soothsay.model.formats.gguf_names import is_gguf
from soothsay.model.weights.packaged import PACKAGED, pulled


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that can be named, and where it is."""

    name: str
    about: str
    num_bytes: int  # on the disk, or to download
    path: Path | None = None  # None: not on this machine yet


HUB_NAMES: Mapping[str, tuple[str, int]] = {
    "qwen2.5-0.5b": ("Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M", 491_000_000),
    "qwen2.5-1.5b": ("Qwen/Qwen2.5-1.5B-Instruct-GGUF:Q4_K_M", 1_120_000_000),
    "qwen2.5-coder-1.5b": ("Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF:Q4_K_M", 1_120_000_000),
}
"""Short names of models on the hub: the name there, and about how many bytes. They can call tools."""


def bundled_models() -> tuple[str, ...]:
    """Names of the models in the package."""
    return tuple(sorted(entry.parent.name for entry in _bundled().glob("*/config.json")))


def bundled_path(name: str) -> Path:
    """The directory of a model in the package."""
    return _bundled() / name


def known_names() -> tuple[str, ...]:
    """All short names."""
    return (*bundled_models(), *PACKAGED, *HUB_NAMES)


def known_models() -> Iterator[KnownModel]:
    """Models with a short name, then others of the Hugging Face hub that were downloaded."""
    for name in bundled_models():
        folder = bundled_path(name)
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        yield KnownModel(name, "in the package, with trained drafters; knows nothing", size, folder)
    for name, model in PACKAGED.items():
        yield KnownModel(name, f"{Path(model.file).stem}, a chat model", model.num_bytes, pulled(name))
    cached = dict(_cached())
    for name, (place, size) in HUB_NAMES.items():
        there, path = cached.pop(place.partition(":")[0], (size, None))
        about = f"{place}, calls tools" + ("" if path else "; never fetched by us")
        yield KnownModel(name, about, there, path)
    for name, (size, path) in sorted(cached.items()):
        yield KnownModel(name, "from the hub", size, path)


def meant(name: str) -> str:
    """The short name, or the model in the same directory, that is spelt most like `name`; empty: none is.

    Short names are also compared by the names that their models have elsewhere.
    """
    path = Path(name)
    beside = (
        [str(path.with_name(entry.name)) for entry in _entries(path.parent)] if len(path.parts) > 1 else []
    )
    spelt = {known.lower(): known for known in (*known_names(), *beside)}
    spelt |= {Path(model.file).stem.lower(): short for short, model in PACKAGED.items()}
    spelt |= {Path(place.partition(":")[0]).name.lower(): short for short, (place, _) in HUB_NAMES.items()}
    close = get_close_matches(name.lower(), spelt, n=1) or get_close_matches(path.name.lower(), spelt, n=1)
    return spelt[close[0]] if close else ""


def _entries(directory: Path) -> Iterator[Path]:
    """The models in a directory that may not exist."""
    try:
        yield from (
            entry for entry in directory.iterdir() if (entry / "config.json").is_file() or is_gguf(entry)
        )
    except OSError:
        return


def _cached() -> Iterator[tuple[str, tuple[int, Path | None]]]:
    """Repositories in the hub's cache: their names, bytes and directories."""
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except (CacheNotFound, OSError):
        return
    for repo in repos:
        if repo.repo_type == "model" and repo.size_on_disk:
            yield repo.repo_id, (repo.size_on_disk, repo.repo_path)


def _bundled() -> Path:
    return Path(str(resources.files("soothsay"))) / "bundled"
