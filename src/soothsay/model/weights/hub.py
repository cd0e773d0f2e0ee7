"""Models by their names: on the hub, on this machine, short names, and what was probably meant."""

import errno
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatch
from importlib import resources
from pathlib import Path

from soothsay.errors import ModelError
from soothsay.model.formats.gguf_names import choose, is_gguf
from soothsay.model.weights.packaged import PACKAGED, pulled
from soothsay.vocabulary.directory import FORMS

SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
"""Files of which a directory with safetensors has one."""


PICKLED = "pytorch_model*.bin"
"""Files of a repository that has its weights in PyTorch's pickles only."""

COPIES = ["consolidated*.safetensors", "original/*"]
"""Files of a repository that have the same weights again, in their authors' own form (Mistral, gpt-oss)."""


def download(name: str, kind: str = "") -> Path:
    """Download a model, and return its directory, or its `.gguf` file.

    Files that were downloaded before are not downloaded again, and are found without a network too.

    Args:
        name: `owner/name` of a repository.
        kind: the type of weights of a GGUF file in it, such as "Q4_K_M". Empty: the safetensors; if there are
            none, the only GGUF model, or that of type Q4_K_M; without one, PyTorch's pickles.

    Raises `ModelError` if the repository cannot be downloaded, or has no such model.
    """
    from huggingface_hub import hf_hub_download

    with _readable_errors(name):
        if not kind:
            tokenizers = [file for form in FORMS for file in form.files]
            wanted = ["*.json", "*.safetensors", "*.jinja", *tokenizers]
            directory = fetch(name, wanted)
            names = [] if has_safetensors(directory) else _files(name)
            if not any(file.lower().endswith(".gguf") for file in names):
                if any(fnmatch(file, PICKLED) for file in names):
                    return fetch(name, [*wanted, PICKLED])
                return directory
        files = choose(_files(name) if kind else names, kind, name, usual=True)
        paths = [Path(hf_hub_download(name, file)) for file in files]
        return paths[0]


def fetch(name: str, wanted: Sequence[str]) -> Path:
    """Download the files of a repository whose names match patterns. Returns its directory.

    Raises `ModelError` if they cannot be downloaded.
    """
    from huggingface_hub import snapshot_download

    with _readable_errors(name):
        return Path(snapshot_download(name, allow_patterns=[*wanted], ignore_patterns=COPIES))


@contextmanager
def checked(name: str) -> Iterator[None]:
    """Compare a repository's large files in the hub's cache with their SHA-256, when the block ends.

    The hub's library compares sizes only. A file with another digest is deleted, so that it is downloaded
    again. A name that is not of a repository in the cache has no files to compare.

    Raises `ModelError` if a digest is wrong. It replaces an error that the block raised.
    """
    from huggingface_hub import constants

    try:
        yield
    finally:
        blobs = Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}", "blobs")
        wrong = [blob for blob in blobs.glob("*") if not _has_its_digest(blob)]
        for blob in wrong:
            blob.unlink()
        if wrong:
            raise ModelError(
                f"{name!r} had files with a wrong digest ({len(wrong)}); they are deleted. "
                "Try again, and they are downloaded again"
            )


def _has_its_digest(blob: Path) -> bool:
    """Whether a cached file has the digest in its name. Small files are named otherwise, and pass."""
    if not re.fullmatch("[0-9a-f]{64}", blob.name):
        return True
    with blob.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == blob.name


def has_safetensors(directory: Path) -> bool:
    """Whether a directory has a model's weights in safetensors."""
    return any((directory / file).is_file() for file in SAFETENSORS)


def _files(name: str) -> list[str]:
    """Names of a repository's files; without a network, of those that have been downloaded."""
    from huggingface_hub import constants, model_info, snapshot_download

    try:
        # fails at once without a network, where `list_repo_files` retries for 23 seconds
        about = model_info(name, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        return [file.rfilename for file in about.siblings or ()]
    except Exception:  # of whichever HTTP library the hub's own uses
        here = None
        with suppress(OSError):
            here = Path(snapshot_download(name, allow_patterns=[], local_files_only=True))
        if here is None:
            raise
    return [file.relative_to(here).as_posix() for file in here.rglob("*") if file.is_file()]


@contextmanager
def _readable_errors(name: str) -> Iterator[None]:
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # of whichever HTTP library the hub's own uses
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"{name!r} is not a local path and could not be downloaded ({reason}); {_advice(error)}"
        ) from error


def _advice(error: Exception) -> str:
    """What a user can do about a download that failed."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return "accept the model's terms on the hub, and log in with `hf auth login` or HF_TOKEN"
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    if status in (401, 403, 404) or isinstance(error, errors.HFValidationError):
        private = "A private model needs `hf auth login` or HF_TOKEN"
        return f"check the name, or give a directory or a .gguf file. {private}"
    number = error.errno if isinstance(error, OSError) and not isinstance(error, ConnectionError) else None
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "make room there, or set HF_HOME to a directory on another disk"
    if number is not None:
        return "set HF_HOME to a directory that can be written"
    return (
        "check the network, set HF_ENDPOINT to a mirror of the hub, or give a directory or a .gguf file. "
        "What has arrived is kept: the next try goes on from there"
    )


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
        yield KnownModel(name, "in the package, with trained drafters; made for tests", size, folder)
    for name, model in PACKAGED.items():
        yield KnownModel(name, f"{Path(model.file).stem}, a chat model", model.num_bytes, pulled(name))
    cached = dict(_cached())
    for name, (place, size) in HUB_NAMES.items():
        there, path = cached.pop(place.partition(":")[0], (size, None))
        about = f"{place}; it can call tools" + ("" if path else "; name and size are unverified")
        yield KnownModel(name, about, there, path)
    for name, (size, path) in sorted(cached.items()):
        yield KnownModel(name, "from the hub", size, path)


CLOSE = 0.75
"""Similarity, as `difflib` has it, from which a name counts as that of another file in its directory."""


def meant(name: str) -> str:
    """The short name, or the model in the same directory, that is spelt most like `name`; empty: none is.

    Short names are also compared by the names that their models have elsewhere.
    """
    path = Path(name)
    entries = _entries(path.parent) if len(path.parts) > 1 else ()
    beside = {_bare(entry.name): str(path.with_name(entry.name)) for entry in entries}
    spelt = {known.lower(): known for known in known_names()}
    spelt |= {Path(model.file).stem.lower(): short for short, model in PACKAGED.items()}
    spelt |= {Path(place.partition(":")[0]).name.lower(): short for short, (place, _) in HUB_NAMES.items()}
    near = get_close_matches(_bare(path.name), beside, n=1, cutoff=CLOSE)
    close = get_close_matches(name.lower(), spelt, n=1) or get_close_matches(path.name.lower(), spelt, n=1)
    return next((places[key] for keys, places in ((near, beside), (close, spelt)) for key in keys), "")


def _bare(name: str) -> str:
    """The name of a file as it is compared: without what all such files have."""
    return name.lower().removesuffix(".gguf")


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
