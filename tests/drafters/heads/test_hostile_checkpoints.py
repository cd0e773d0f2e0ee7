"""Damaged and hostile drafter directories: every one is refused by `DrafterError`, or loads."""

from __future__ import annotations

import collections
import json
import pickle
import random
import struct
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from heads import random_dflash, random_peagle
from hostile_heads import HOSTILE, changed, places, read
from odd_tensors import ODD_TENSORS
from safetensors.torch import load_file, save_file

from soothsay.config import EngineConfig
from soothsay.drafters.base import Target
from soothsay.drafters.heads.checkpoints.head_directory import read_head
from soothsay.errors import DrafterError, ModelError
from soothsay.model.formats.pickles import unpickled
from soothsay.model.weights.checkpoint import open_checkpoint
from soothsay.model.weights.load import load_model

BUNDLED = open_checkpoint("sibyl").path / "drafters"
HEADS = ("block", "dflash", "eagle", "eagle3", "hydra", "medusa", "mtp", "peagle")


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(load_model(open_checkpoint("sibyl"), "float32"), None, EngineConfig(), num_blocks=4)


def source(name: str) -> Path:
    """The directory of a head that is bundled, or was made with random weights."""
    made = {"dflash": partial(random_dflash, markov=True), "peagle": random_peagle}
    return made[name]() if name in made else BUNDLED / name


def copied(name: str, directory: Path) -> dict[str, Any]:
    """Link a head's weights into `directory`, and return its configuration."""
    for file in source(name).glob("*.safetensors"):
        (directory / file.name).symlink_to(file)
    config: dict[str, Any] = json.loads((source(name) / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config))
    return config


@pytest.mark.filterwarnings("ignore:.*was made for contexts of")
@pytest.mark.parametrize("name", HEADS)
def test_every_field_of_a_heads_configuration(name: str, target: Target, tmp_path: Path) -> None:
    config = copied(name, tmp_path)
    assert read(tmp_path, target)
    rng = random.Random(name)
    for place in places(config):
        for value in rng.sample(HOSTILE, 8):
            (tmp_path / "config.json").write_text(json.dumps(changed(config, place, value)))
            read(tmp_path, target)


@pytest.mark.filterwarnings("ignore:.*was made for contexts of")
@pytest.mark.parametrize("name", HEADS)
def test_tensors_of_odd_shapes_and_types(name: str, target: Target, tmp_path: Path) -> None:
    copied(name, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    weights, rng = load_file(file), random.Random(name)
    file.unlink()
    for tensor in rng.sample(sorted(weights), min(6, len(weights))):
        for value in ODD_TENSORS:
            save_file({**weights, tensor: value}, file)
            assert not read(tmp_path, target) or tensor == "t2d"  # which is not used
    save_file({**weights, "d2t": torch.zeros(3, 3)}, file)
    read(tmp_path, target)


@pytest.mark.parametrize(
    ("name", "tensors"),
    [
        (
            "medusa",
            {"99999.0.linear.weight": torch.zeros(384, 384), "0.99999.linear.weight": torch.zeros(384, 384)},
        ),
        ("medusa", {f"{'9' * 5000}.0.linear.weight": torch.zeros(384, 384)}),
        ("mtp", {f"model.layers.{'9' * 5000}.eh_proj.weight": torch.zeros(1)}),
        ("eagle", {f"layers.{'9' * 5000}.x": torch.zeros(1), "fc.weight": torch.zeros(1)}),
    ],
)
def test_numbers_in_names_are_not_believed(
    name: str, tensors: dict[str, torch.Tensor], target: Target, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((BUNDLED / name / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    assert not read(tmp_path, target)


def test_promised_heads_are_counted(target: Target, tmp_path: Path) -> None:
    config = copied("hydra", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_heads": 60_000}))
    with pytest.raises(DrafterError, match="promises 120,000 modules"):
        read_head(tmp_path, target)


# pickles


def zipped(
    file: Path,
    program: bytes,
    compression: int = zipfile.ZIP_STORED,
    name: str = "data.pkl",
    **entries: bytes,
) -> Path:
    """A file as torch.save writes it, with any program."""
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr(f"archive/{name}", program)
        archive.writestr("archive/version", b"3\n")
        archive.writestr("archive/byteorder", b"little")
        for entry, content in entries.items():
            archive.writestr(f"archive/{entry}", content)
    return file


def call(module: str, name: str, arguments: bytes) -> bytes:
    return b"\x80\x02c" + f"{module}\n{name}\n".encode() + arguments + b"R."


def integer(value: int) -> bytes:
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def storage_of(count: int) -> bytes:
    """A tensor of `count` floats, whose storage is said to hold them."""
    name = b"X\x07\x00\x00\x00storageq\x00ctorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
    storage = b"(" + name + integer(count) + b"tQ"
    shape, stride = integer(count) + b"\x85", integer(1) + b"\x85"
    hooks = b"ccollections\nOrderedDict\n)R"
    rebuilt = (
        b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + integer(0) + shape + stride + b"\x89" + hooks
    )
    return b"\x80\x02}X\x01\x00\x00\x00w" + rebuilt + b"tRs."


BOMBS: dict[str, Callable[[Path], Any]] = {
    "bytes that are made": lambda file: zipped(file, call("builtins", "bytearray", integer(2**40) + b"\x85")),
    "a function": lambda file: zipped(file, call("os", "system", b"X\x02\x00\x00\x00ls\x85")),
    "a storage that is not there": lambda file: zipped(file, storage_of(2**40), **{"data/0": b"0" * 64}),
    "a program that is compressed": lambda file: zipped(
        file, b"\x80\x02]" + b"K\x01a" * 10**6 + b".", zipfile.ZIP_DEFLATED
    ),
    "zeros that are compressed": lambda file: zipped(
        file, b"\x80\x02}.", zipfile.ZIP_DEFLATED, **{"data/0": b"\0" * 10**7}
    ),
    "a long program": lambda file: zipped(file, b"\x80\x02" + b"]0" * (2**20 + 1) + b"}."),
    "a tensor without values": lambda file: torch.save({"w": torch.zeros(1).expand(2**40)}, file),
    "a small tensor without values": lambda file: torch.save({"w": torch.zeros(1).expand(99, 99)}, file),
    "many tensors of one storage": lambda file: torch.save(
        dict.fromkeys(map(str, range(99)), torch.zeros(999)), file
    ),
    "a tensor of another device": lambda file: torch.save({"w": torch.zeros(2**40, device="meta")}, file),
    "a sparse tensor": lambda file: torch.save(
        {"w": torch.sparse_coo_tensor(torch.zeros(1, 1).long(), torch.ones(1), (2**40,))}, file
    ),
    "a quantized tensor": lambda file: torch.save(
        {"w": torch.quantize_per_tensor(torch.zeros(4), 1.0, 0, torch.qint8)}, file
    ),
    "a storage that is not there, old format": lambda file: old(file, storage_of(2**40)),
    "bytes that are made, old format": lambda file: old(
        file, call("builtins", "bytearray", integer(2**40) + b"\x85")
    ),
    "text": lambda file: file.write_text("hello"),
    "nothing": lambda file: file.write_bytes(b""),
    "a list": lambda file: torch.save([torch.zeros(1)], file),
    "an object": lambda file: torch.save({"w": Path("x")}, file),
    "a counter": lambda file: torch.save(collections.Counter("abc"), file),
    "a deep program": lambda file: zipped(file, b"\x80\x02" + b"(" * 10**6 + b"."),
    "the start of an archive": lambda file: file.write_bytes(b"PK\x03\x04" + b"\0" * 100),
    "a long text in a program": lambda file: zipped(
        file, b"\x80\x02X" + struct.pack("<I", 2**32 - 1) + b"a."
    ),
    "many bytes in a program": lambda file: zipped(file, b"\x80\x05\x96" + struct.pack("<Q", 2**60) + b"a."),
    "a large place in the memo": lambda file: zipped(
        file, b"\x80\x02}r" + struct.pack("<I", 2**32 - 1) + b"."
    ),
}


def old(file: Path, program: bytes) -> None:
    """A file as PyTorch before 1.6 wrote it."""
    start = [pickle.dumps(value, 2) for value in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})]
    file.write_bytes(b"".join([*start, program, pickle.dumps(["0"], 2), struct.pack("<q", 2**40), b"0" * 64]))


@pytest.mark.parametrize("name", ["data.pkl", "DATA.PKL", "data.Pkl"])
def test_a_program_is_checked_in_any_spelling_of_its_name(name: str, tmp_path: Path) -> None:
    """PyTorch finds all of them."""
    plain = zipped(tmp_path / "plain.bin", b"\x80\x02}.", name=name)
    assert torch.load(plain, weights_only=True) == unpickled(plain) == {}
    with pytest.raises(ModelError, match="holds more than tensors"):
        unpickled(zipped(tmp_path / "x.bin", call("builtins", "bytearray", integer(9) + b"\x85"), name=name))


def test_pickles_that_ask_for_memory() -> None:
    """All of them in a process with little memory."""
    if not Path("/proc/self/statm").exists():
        pytest.skip("needs /proc/self/statm")
    script = """
        import resource, sys, tempfile
        from pathlib import Path
        sys.path[:0] = sys.argv[1:]
        import test_hostile_checkpoints as tests
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**28,) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (120, 120))
        for name, write in tests.BOMBS.items():
            with tempfile.TemporaryDirectory() as directory:
                file = Path(directory) / "x.bin"
                write(file)
                try:
                    loaded = tests.unpickled(file)
                except tests.ModelError as error:
                    print(name, error)
                else:
                    print(name, "loaded", sum(tensor.nbytes for tensor in loaded.values()))
                    assert not loaded
    """
    here = Path(__file__).parent
    command = [sys.executable, "-c", textwrap.dedent(script), str(here), str(here.parents[1] / "helpers")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:] + run.stdout[-500:]
    assert len(run.stdout.splitlines()) >= len(BOMBS)
    assert "alloc" not in run.stdout  # refused before memory was asked for


@pytest.mark.parametrize("new_format", [True, False])
def test_honest_pickles(tmp_path: Path, new_format: bool) -> None:
    tied = torch.randn(3, 4)
    weights = {
        "a": tied,
        "b": tied,
        "c": torch.nn.Parameter(torch.randn(2, 2).bfloat16()),
        "d": torch.arange(5),
        "e": torch.zeros(3, dtype=torch.bool),
        "f": torch.randn(4, 3).t(),
    }
    torch.save(
        collections.OrderedDict(weights), tmp_path / "x.bin", _use_new_zipfile_serialization=new_format
    )
    loaded = unpickled(tmp_path / "x.bin")
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)


@pytest.mark.parametrize("rewritten", [False, True], ids=["PyTorch's", "with 32-bit numbers"])
def test_a_zip_in_which_readers_find_different_entries_is_refused(tmp_path: Path, rewritten: bool) -> None:
    file, other = tmp_path / "x.bin", tmp_path / "y.bin"
    torch.save({"w": torch.ones(4)}, other if rewritten else file)
    if rewritten:
        with zipfile.ZipFile(other) as old, zipfile.ZipFile(file, "w") as new:
            for entry in old.infolist():
                new.writestr(entry.filename, old.read(entry))
    assert unpickled(file)["w"].tolist() == [1.0] * 4
    good = file.read_bytes()
    place = good.rfind(b"PK\x06\x07") + 8
    moved = good[:place] + struct.pack("<Q", 4) + good[place + 8 :]
    for bad in (good + good, good[:-2] + b"\x01\x00 ", *([] if rewritten else [moved])):
        file.write_bytes(bad)
        with pytest.raises(ModelError, match="more than one list of its entries"):
            unpickled(file)


def test_random_damage_of_pickles(tmp_path: Path) -> None:
    file, rng = tmp_path / "x.bin", random.Random(0)
    for new_format in (True, False):
        torch.save({"w": torch.ones(4, 4)}, file, _use_new_zipfile_serialization=new_format)
        good = file.read_bytes()
        for _ in range(300):
            damaged = bytearray(good)
            for _ in range(rng.choice([1, 2, 8])):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            file.write_bytes(damaged[: rng.choice([len(damaged), rng.randrange(len(damaged))])])
            try:
                assert sum(tensor.nbytes for tensor in unpickled(file).values()) <= 2 * len(good)
            except ModelError:
                continue
