"""Models with short names, models that are here, and names that were probably meant."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from gguf_files import write_gguf
from huggingface_hub import constants
from typer.testing import CliRunner

from soothsay.cli.app import app
from soothsay.errors import ModelError
from soothsay.model.weights import checkpoint
from soothsay.model.weights.checkpoint import open_checkpoint
from soothsay.model.weights.hub import HUB_NAMES, known_models, known_names, meant


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, on a machine to which no model was downloaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def download(hub: Path, name: str, content: bytes) -> None:
    """Put a file into the hub's cache, as the hub's library does."""
    repository = hub / f"models--{name.replace('/', '--')}"
    for folder in ("blobs", "refs", f"snapshots/{'1' * 40}"):
        (repository / folder).mkdir(parents=True)
    (repository / "blobs" / "x").write_bytes(content)
    (repository / "refs" / "main").write_text("1" * 40)
    (repository / "snapshots" / ("1" * 40) / "m.gguf").symlink_to(repository / "blobs" / "x")


def test_what_is_here(hub: Path) -> None:
    listed = {model.name: model for model in known_models()}
    assert tuple(listed) == known_names()
    assert [name for name, model in listed.items() if model.path is not None] == ["sibyl"]
    short = next(iter(HUB_NAMES))
    assert "name and size are unverified" in listed[short].about
    download(hub, HUB_NAMES[short][0].partition(":")[0], bytes(70))
    download(hub, "org/m", bytes(3000))
    listed = {model.name: model for model in known_models()}
    assert tuple(listed) == (*known_names(), "org/m")
    assert (listed[short].num_bytes, listed["org/m"].num_bytes) == (70, 3000)
    assert listed[short].path
    assert "unverified" not in listed[short].about
    printed = CliRunner().invoke(app, ["models"], env={"COLUMNS": "80"}).stdout
    assert re.search(r"^org/m +3\.0 kB +yes +from the hub *$", printed, re.MULTILINE)
    assert re.search(r"^smollm2 +98\.4 MB +no +SmolLM2-135M-Instruct", printed, re.MULTILINE)
    assert all(name in printed for name in HUB_NAMES)


def test_a_short_name_is_one_of_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []
    (file,) = write_gguf(tmp_path / "m.gguf")
    monkeypatch.setattr(checkpoint, "download", lambda name, kind: asked.append((name, kind)) or file)
    assert open_checkpoint("qwen2.5-0.5b").path == file
    assert asked == [("Qwen/Qwen2.5-0.5B-Instruct-GGUF", "Q4_K_M")]


def test_what_was_meant(tmp_path: Path) -> None:
    (file,) = write_gguf(tmp_path / "SmolLM2-135M.Q4_1.gguf")
    assert [meant(name) for name in ("smolm2", "qwen2.5_0.5b", "unheard")] == ["smollm2", "qwen2.5-0.5b", ""]
    for wrong in ("SmolLM2-135M.Q4_0.gguf", "smollm2-135M.Q4_1.gguf", "SmolLM2-135M.Q4_1"):
        with pytest.raises(ModelError, match=f"{tmp_path / wrong}.* Did you mean {file}"):
            open_checkpoint(tmp_path / wrong)
    for other in ("a.gguf", "other-135M.Q4_0.gguf"):  # alike in what all such files have
        with pytest.raises(ModelError, match=rf"{other} is missing\. 'soothsay models' lists"):
            open_checkpoint(tmp_path / other)
    with pytest.raises(ModelError, match=r"nowhere/a\.gguf is missing\. 'soothsay models' lists"):
        open_checkpoint(tmp_path / "nowhere" / "a.gguf")
