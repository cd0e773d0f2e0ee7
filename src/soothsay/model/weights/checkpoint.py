"""A checkpoint: a configuration, named tensors and a tokenizer, in any file format.

Every format is presented in Hugging Face's terms (configuration keys, tensor names, shapes `[out, in]`), so
one loader serves all formats.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from soothsay.errors import ModelError, type_of
from soothsay.files import check_place, read_json_object, user_path
from soothsay.model.families.fields import each, whole
from soothsay.model.families.parsing import parse_model_config
from soothsay.model.formats.declared import open_format
from soothsay.model.formats.gguf_names import choose, is_gguf
from soothsay.model.formats.pickles import PickledFile
from soothsay.model.formats.stacked_experts import unstacked
from soothsay.model.formats.weight_format import Reader, WeightFormat
from soothsay.model.specs.feed_forward_spec import ExpertsSpec
from soothsay.model.specs.model_spec import ModelSpec
from soothsay.model.weights.generation_config import FILE as GENERATION_CONFIG
from soothsay.model.weights.generation_config import recommended, sampling_in_file
from soothsay.model.weights.hf_names import names_of
from soothsay.model.weights.hub import (
    HUB_NAMES,
    bundled_models,
    bundled_path,
    download,
    has_safetensors,
    meant,
)
from soothsay.model.weights.packaged import PACKAGED, pull, pulled
from soothsay.tokenizer import Tokenizer
from soothsay.vocabulary.directory import tokenizer_files

_TOKEN_IDS = each(whole(0, 2**31 - 1))

STARTS = ("decoder_start_token_id", "forced_bos_token_id")
"""Keys of an encoder-decoder's first tokens, which count in `generation_config.json` if they are there."""

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""Names of files with weights, or of their index without its ending. The first that is there is read."""

ADAPTER = "adapter_config.json"
"""The file by which a directory shows that it has what was trained beside a model, and no model."""

LEAST_BITS = 2
"""Bits that a weight takes at least in safetensors and pickles, in any format that is read."""


class Checkpoint(Protocol):
    """A model file or directory, as the loader sees it."""

    path: Path
    config: dict[str, Any]  # the keys of a Hugging Face config.json
    eos_ids: tuple[int, ...]

    @property
    def files(self) -> tuple[Path, ...]:
        """All files with weights."""

    def names(self) -> frozenset[str]:
        """Names of all tensors, as Hugging Face writes them."""

    def open(self) -> AbstractContextManager[Reader]:
        """A function from a name to its tensor, a view of the mapped file where the format allows it.

        Leaving the context unmaps the files to which no tensor refers.
        """

    def stored(self) -> Iterable[tuple[str, int]]:
        """For each tensor, the stored type of its elements and their number."""

    def weight_format(self) -> WeightFormat | None:
        """How weights in integers are stored; None: there are none. Raises `ModelError` if unknown."""

    def num_bytes(self) -> int:
        """Bytes of all files with weights."""

    def most_weights(self) -> int:
        """The most weights that the files can hold, by the types of their tensors."""

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer in the checkpoint, if any."""

    def sampling_defaults(self) -> dict[str, float]:
        """The sampling parameters of requests that leave them out; see `generation_config`.

        Raises `ModelError`.
        """


class SafetensorsCheckpoint:
    """A Hugging Face directory: config.json, and weights in one file or in shards with an index.

    The weights are safetensors. Where there are none, tensors are taken from PyTorch's pickles, and no code
    in them is run.
    """

    def __init__(self, path: Path):
        self.path = path
        if not (path / "config.json").is_file():
            _refuse_adapter(path)
        self.config = read_json_object(path / "config.json")
        file = path / GENERATION_CONFIG
        generation = read_json_object(file) if file.is_file() else {}
        self.config |= {key: generation[key] for key in STARTS if generation.get(key) is not None}
        parts = generation, self.config, self.config.get("text_config")  # the last, of a multimodal model
        files = file, path / "config.json", path / "config.json"
        self.eos_ids = next(filter(None, map(_eos_ids, files, parts)), ())
        self._files = _files_of_tensors(path)
        for shard in self.files:
            if not shard.is_file():
                raise ModelError(
                    f"the index of {path} names {shard.name}, which is missing; download it again"
                )
        self._experts = unstacked(self.config, self._files, self._read_shapes)

    @property
    def files(self) -> tuple[Path, ...]:
        """All files with weights."""
        return tuple(sorted(set(self._files.values())))

    def names(self) -> frozenset[str]:
        """Names of all tensors. Experts that are stacked in one tensor are named one by one."""
        stacks = {part.stack for part in self._experts.values()}
        return frozenset(self._files.keys() - stacks | self._experts.keys())

    @contextmanager
    def open(self) -> Iterator[Reader]:
        """A function from a name to its tensor, a view of the mapped file. It is a copy of a stack's part."""
        with ExitStack() as stack:
            opened: dict[Path, Any] = {}

            def read(name: str) -> torch.Tensor:
                part = self._experts.get(name)
                stored = name if part is None else part.stack
                file = self._files[stored]
                if file not in opened:
                    opened[file] = stack.enter_context(open_weights(file))
                try:
                    if part is not None:
                        return part.of(opened[file].get_slice(stored)[part.expert])
                    tensor: torch.Tensor = opened[file].get_tensor(stored)
                except (SafetensorError, KeyError) as error:
                    raise ModelError(f"{file} does not give {name!r} ({error}); download it again") from error
                return tensor

            yield read

    def _read_shapes(self, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
        """The shapes of some tensors. each file is opened once."""
        shapes: dict[str, tuple[int, ...]] = {}
        for file in self.files:
            if own := [name for name in names if self._files[name] == file]:
                with open_weights(file) as opened:
                    shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in own}
        return shapes

    def stored(self) -> Iterator[tuple[str, int]]:
        """For each tensor, its dtype and its number of elements."""
        with self.open() as read:
            for name in self._files:
                tensor = read(name)
                yield str(tensor.dtype).removeprefix("torch."), tensor.numel()

    def weight_format(self) -> WeightFormat | None:
        """See `Checkpoint`."""
        return open_format(self.config, self.path)

    def num_bytes(self) -> int:
        """Bytes of all files with weights."""
        return sum(file.stat().st_size for file in self.files)

    def most_weights(self) -> int:
        """See `Checkpoint`."""
        return self.num_bytes() * 8 // LEAST_BITS

    def tokenizer(self) -> Tokenizer | None:
        """The directory's tokenizer; None without a file of one."""
        return Tokenizer.from_directory(self.path) if tokenizer_files(self.path) else None

    def sampling_defaults(self) -> dict[str, float]:
        """See `Checkpoint`."""
        file = self.path / GENERATION_CONFIG
        stated = sampling_in_file(file) if file.is_file() else {}
        return stated or recommended(self.config.get("_name_or_path"), *self.path.absolute().parts[-3:])


def open_checkpoint(model: str | os.PathLike[str]) -> Checkpoint:
    """Open a model.

    Args:
        model: one of
            a directory with safetensors, or with one GGUF model;
            a GGUF file by its first bytes, whatever its name, or any part of one in parts;
            a bundled model's name;
            the name of a model that a package carries (`PACKAGED`), which is downloaded if it is not there;
            `owner/name`, a repository on the Hugging Face hub, or its short name (`HUB_NAMES`);
            `directory:TYPE` or `owner/name:TYPE`, the GGUF model there whose name has that type of weights,
            such as `Q4_K_M`, in any case.

    Raises `ModelError` if there is no model, if there are several, or if its files are missing or damaged.
    """
    if not isinstance(model, str | os.PathLike):
        raise TypeError(f"a model is a path, a name or a Transformer, not {type_of(model)}")
    path = user_path(model)
    check_place(path)
    if path.is_dir() and str(model):
        gguf = not has_safetensors(path) and any(file.suffix.lower() == ".gguf" for file in path.iterdir())
        return _open(_gguf_in(path, "", str(model)) if gguf else path)
    if _names_gguf(path):
        if not path.exists():
            raise ModelError(f"{path} is missing. {_suggestion(str(path))}")
        return _open(path)
    if path.exists() and str(model):
        raise ModelError(
            f"{path} is neither a directory nor a GGUF file; a file of safetensors is read with its directory"
        )
    if str(model) in bundled_models():
        return _open(bundled_path(str(model)))
    if str(model) in PACKAGED:
        return _open(pulled(str(model)) or pull(str(model)))
    name, _, kind = str(model).rpartition(":")
    if name and user_path(name).is_dir():
        return _open(_gguf_in(user_path(name), kind, name))
    name, _, kind = HUB_NAMES.get(str(model), (str(model),))[0].partition(":")
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ModelError(
            f"no model at {str(model)!r}: give a directory, a .gguf file, a short name or a hub name "
            f"'owner/name', with ':TYPE' after it to choose among GGUF files. {_suggestion(name)}"
        )
    try:
        return _open(download(name, kind))
    except ModelError as error:
        raise ModelError(f"{error}. {_suggestion(name)}") from error


def _suggestion(name: str) -> str:
    """What a user can give in place of a name that is no model's."""
    likely = meant(name)
    return (f"Did you mean {likely}? " if likely else "") + "'soothsay models' lists names that work"


def read_model_config(checkpoint: Checkpoint) -> ModelSpec:
    """The configuration of a checkpoint's model.

    Raises `ModelError` if it cannot be parsed, or promises more than the files hold. So whoever builds this
    model takes memory and time in proportion to the files.
    """
    try:
        spec = parse_model_config(checkpoint.config)
    except ModelError as error:
        raise ModelError(f"{checkpoint.path}: {error}") from error
    if spec.head.tied and _has_own_head(spec, checkpoint):
        spec = replace(spec, head=replace(spec.head, tied=False))  # transformers 5 writes true for all T5
    tensors = len(checkpoint.names())
    modules = spec.num_layers + sum(own.routing.count for own in spec.parts(ExpertsSpec).values())
    if modules > tensors:
        raise ModelError(
            f"{checkpoint.path}: config.json promises {modules:,} layers and experts, and there are "
            f"{tensors:,} tensors; the download is incomplete, or config.json belongs to another model"
        )
    if spec.num_parameters > (most := checkpoint.most_weights()):
        checkpoint.weight_format()  # raises for a format of fewer bits that is not read
        raise ModelError(
            f"{checkpoint.path}: config.json promises {spec.num_parameters:,} weights, and files of "
            f"{checkpoint.num_bytes():,} bytes hold at most {most:,}; the download is incomplete, or "
            "config.json belongs to another model"
        )
    return spec


def _has_own_head(spec: ModelSpec, checkpoint: Checkpoint) -> bool:
    """Whether the files have a head unlike the embedding. transformers 5 does not tie it either."""
    names = checkpoint.names()
    head, table = (f"{names_of(spec.family)[module][0]}.weight" for module in ("head", "embedding"))
    embeddings = [name for name in names if name.endswith(table)]
    if head not in names or not embeddings:
        return False
    with checkpoint.open() as read:
        own, shared = read(head), read(min(embeddings, key=len))
        return own.shape == shared.shape and not own.to(shared.dtype).equal(shared)


def _open(path: Path) -> Checkpoint:
    """Open a directory with safetensors, or a GGUF file."""
    if path.is_dir() or not _names_gguf(path):
        return SafetensorsCheckpoint(path)
    from soothsay.model.formats.gguf_file import GGUFCheckpoint  # imports the gguf package, which takes time

    return GGUFCheckpoint(path)


def _names_gguf(path: Path) -> bool:
    """Whether a path is that of a GGUF file, also of one that is missing."""
    return path.suffix.lower() == ".gguf" or is_gguf(path)


def _gguf_in(directory: Path, kind: str, place: str) -> Path:
    """The GGUF model in a directory, its first part. `place` is the directory as the user wrote it."""
    names = (file.name for file in directory.iterdir())
    return directory / choose(names, kind, place, usual=False)[0]


def _files_of_tensors(path: Path) -> dict[str, Path]:
    """The file of each tensor in a directory. Raises `ModelError` without any weights."""
    for name in WEIGHTS:
        index, single = path / f"{name}.index.json", path / name
        listed = _read_index(index, single.suffix) if index.is_file() else {}
        is_whole = all(file.is_file() for file in set(listed.values()))
        if listed and (is_whole or not single.is_file()):  # else it is that of a model saved here before
            return listed
        if single.is_file():
            return _names_in(single)
    _refuse_adapter(path)
    if len(others := [*path.glob("*.safetensors")]) == 1:  # as older writers of GPTQ name them
        return _names_in(others[0])
    raise ModelError(f"{path} has no weights: there is no {', no '.join(WEIGHTS)}, and no index of these")


def _refuse_adapter(path: Path) -> None:
    """Raises `ModelError`, which says what to do, if a directory without a model has an adapter."""
    if (path / ADAPTER).is_file():
        base = str(read_json_object(path / ADAPTER).get("base_model_name_or_path") or "its base model")
        raise ModelError(
            f"{path} holds an adapter (LoRA), and not a model: load {base:.200}, with this directory as an "
            "adapter (--lora NAME=PATH, or LLM(adapters=...))"
        )


def _names_in(file: Path) -> dict[str, Path]:
    with open_weights(file) as opened:
        return dict.fromkeys(opened.keys(), file)


def open_weights(file: Path) -> Any:
    """Open a file of safetensors, or of pickled tensors. Raises `ModelError` if it is damaged."""
    if file.suffix in (".bin", ".pt"):
        return PickledFile(file)
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        why = str(error).removeprefix("Error while deserializing header: ")
        raise ModelError(f"{file} is damaged or cut short ({why}); download it again") from error


def _read_index(index: Path, suffix: str) -> dict[str, Path]:
    """Tensors and their files. Raises `ModelError` for a file outside of the index's directory."""
    files = read_json_object(index).get("weight_map")
    if not isinstance(files, dict):
        raise ModelError(f"{index} has no 'weight_map' from tensors to files; download it again")
    for file in set(map(str, files.values())):  # a hub's cache has links there; they are the user's own
        if not file.endswith(suffix) or "/" in file or "\\" in file or "\0" in file:
            raise ModelError(
                f"{index} names {file!r}, which is not a {suffix} file beside it; check the model's origin"
            )
    return {name: index.parent / str(file) for name, file in files.items()}


def _eos_ids(file: Path, content: Any) -> tuple[int, ...]:
    """Token ids at `eos_token_id` of a file or of an object in it, one or several."""
    eos = content.get("eos_token_id") if isinstance(content, dict) else None
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    try:
        return tuple(_TOKEN_IDS.accept(ids))
    except ValueError:
        raise ModelError(
            f"{file}: eos_token_id is not a token id or a list of them; download it again"
        ) from None
