"""GGUF files in several parts: opened by any of them, refused if they do not fit each other."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from gguf import GGUFValue, GGUFValueType, GGUFWriter
from gguf_files import LAYERS, TENSORS, write_gguf
from rich.filesize import decimal
from typer.testing import CliRunner

from soothsay.cli.app import app
from soothsay.errors import ModelError
from soothsay.model.formats import gguf_header
from soothsay.model.formats.gguf_header import read_parts
from soothsay.model.weights.checkpoint import open_checkpoint
from soothsay.model.weights.load import load_model


def tensors(path: Path) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(path)
    with checkpoint.open() as read:
        return {name: read(name).clone() for name in checkpoint.names()}


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    return write_gguf(tmp_path / "model.gguf", in_part=6)


def refused(path: Path, words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        open_checkpoint(path)
    assert str(path.parent) in str(caught.value)


def test_each_part_opens_all(parts: list[Path], tmp_path: Path) -> None:
    (whole,) = write_gguf(tmp_path / "whole.gguf")
    expected = tensors(whole)
    assert [part.name for part in parts] == [f"model-0000{i}-of-00004.gguf" for i in (1, 2, 3, 4)]
    for part in parts:
        checkpoint = open_checkpoint(part)
        assert checkpoint.path == parts[0]
        assert checkpoint.files == tuple(parts)
        assert checkpoint.config == open_checkpoint(whole).config
        assert checkpoint.num_bytes() == sum(file.stat().st_size for file in parts)
        found = tensors(part)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert load_model(open_checkpoint(parts[2]), "float32").spec.num_layers == LAYERS


def test_a_first_part_without_tensors(tmp_path: Path) -> None:
    """As `llama-gguf-split --no-tensor-first-split` writes it."""
    first, second = tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf"
    split = {
        "split.count": GGUFValue(2, GGUFValueType.UINT16),
        "split.tensors.count": GGUFValue(TENSORS, GGUFValueType.INT32),
    }
    write_gguf(second, more={**split, "split.no": GGUFValue(1, GGUFValueType.UINT16)})
    writer = GGUFWriter(first, "llama")
    writer.kv_data[0] = dict(write_metadata(second))
    writer.kv_data[0].update({**split, "split.no": GGUFValue(0, GGUFValueType.UINT16)})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    (whole,) = write_gguf(tmp_path / "whole.gguf")
    assert tensors(first).keys() == tensors(whole).keys()


def write_metadata(path: Path) -> dict[str, GGUFValue]:
    """The metadata of a file that `write_gguf` makes, to be written into another."""
    kinds = {str: GGUFValueType.STRING, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32}
    metadata = gguf_header.read_header(path).metadata
    return {key: GGUFValue(value, kinds[type(value)]) for key, value in metadata.items()}


def test_inspect_counts_all_parts(parts: list[Path]) -> None:
    told = CliRunner().invoke(app, ["inspect", str(parts[1])], env={"COLUMNS": "300"})
    assert told.exit_code == 0, told.output
    size = decimal(sum(part.stat().st_size for part in parts))
    assert re.search(rf"on disk +{size}, 4 files in {re.escape(str(parts[0].parent))}\b", told.stdout)


def test_missing_parts_are_named(parts: list[Path]) -> None:
    parts[0].unlink()
    parts[2].unlink()
    refused(parts[1], r"one of 4 parts; .* model-00001-of-00004\.gguf, model-00003-of-00004\.gguf$")


def test_not_all_of_many_missing_parts_are_named(tmp_path: Path) -> None:
    part = tmp_path / "m-00001-of-00900.gguf"
    write_gguf(part, more={"split.count": GGUFValue(900, GGUFValueType.UINT16)})
    refused(part, r"m-00011-of-00900\.gguf and 889 more$")


def test_a_part_with_another_name(parts: list[Path]) -> None:
    renamed = parts[1].rename(parts[1].with_name("mine.gguf"))
    refused(renamed, r"part 2 of 4, so its name should end with -00002-of-00004\.gguf")


def test_a_part_with_the_name_of_another(parts: list[Path]) -> None:
    shutil.copy(parts[1], parts[2])
    refused(parts[2], "part 2 of 4, so its name should end with")
    refused(parts[0], r"model-00003-of-00004\.gguf belongs to another model .* part 2 of 4; download")


def test_a_part_of_a_model_with_other_parts(parts: list[Path], tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = write_gguf(tmp_path / "other" / "model.gguf", in_part=8)
    shutil.copy(other[1], parts[1])
    refused(parts[0], r"model-00002-of-00004\.gguf belongs to another model .* part 2 of 3; download")


def test_a_tensor_in_two_parts(parts: list[Path]) -> None:
    content = parts[1].read_bytes()
    name = next(name for name in gguf_header.read_header(parts[1]).tensors if name.startswith("blk.0"))
    there = next(
        other
        for other in gguf_header.read_header(parts[0]).tensors
        if len(other) == len(name) and other != name
    )
    parts[1].write_bytes(content.replace(name.encode(), there.encode()))
    refused(parts[0], rf"model-00002-of-00004\.gguf belongs .* '{re.escape(there)}', as model-00001-of-00004")


@pytest.mark.parametrize("stated", [TENSORS - 1, TENSORS + 1, 0])
def test_a_number_of_tensors_that_does_not_fit(tmp_path: Path, stated: int) -> None:
    more = {"split.tensors.count": GGUFValue(stated, GGUFValueType.INT32)}
    parts = write_gguf(tmp_path / "model.gguf", in_part=6, more=more)
    refused(parts[0], rf"00004-of-00004\.gguf belongs .* {stated} tensors, and the parts have {TENSORS}")


def test_more_tensors_than_the_limit_together(parts: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_header, "MAX_TENSORS", TENSORS)
    read_parts(parts[0])
    monkeypatch.setattr(gguf_header, "MAX_TENSORS", TENSORS - 1)
    refused(parts[0], f"more than {TENSORS - 1} tensors")


@pytest.mark.parametrize(
    ("count", "number", "words"),
    [
        (1001, 0, "1,000 parts are the limit"),
        (2**32 - 1, 0, "1,000 parts are the limit"),
        (3, 3, "part 4 of 3"),
        (3, 2**31, "part 2,147,483,649 of 3"),
    ],
)
def test_numbers_of_parts_have_a_limit(tmp_path: Path, count: int, number: int, words: str) -> None:
    more = {"split.count": count, "split.no": number}
    values = {key: GGUFValue(value, GGUFValueType.UINT32) for key, value in more.items()}
    (path,) = write_gguf(tmp_path / "m-00001-of-00003.gguf", more=values)
    refused(path, words)


@pytest.mark.parametrize("key", ["split.count", "split.no", "split.tensors.count"])
def test_numbers_that_are_none(tmp_path: Path, key: str) -> None:
    for value in (GGUFValue("x", GGUFValueType.STRING), GGUFValue(-1, GGUFValueType.INT32)):
        parts = write_gguf(tmp_path / "model.gguf", in_part=6, more={key: value})
        refused(parts[0], f"00004.gguf: {key} is .* should be a number")


@pytest.mark.parametrize("count", [0, 1])
def test_a_merged_file_is_whole(tmp_path: Path, count: int) -> None:
    values = {"split.count": GGUFValue(count, GGUFValueType.UINT16)}
    (path,) = write_gguf(tmp_path / "model-00001-of-00003.gguf", more=values)
    assert open_checkpoint(path).files == (path,)
