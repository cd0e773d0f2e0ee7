"""What a model may be: a folder, a file, one of several files, a repository on the hub."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from gguf_files import write_gguf
from huggingface_hub import ModelInfo
from huggingface_hub.errors import HFValidationError

from soothsay import LLM
from soothsay.errors import ModelError
from soothsay.model.formats.gguf_file import GGUFCheckpoint
from soothsay.model.weights.adapter_files import AdapterFiles
from soothsay.model.weights.checkpoint import SafetensorsCheckpoint, open_checkpoint
from soothsay.model.weights.hub import download
from soothsay.server.server_config import served_name
from soothsay.vocabulary.directory import FORMS


def write_safetensors(folder: Path) -> None:
    """A copy of the bundled model."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in open_checkpoint("sibyl").path.iterdir():
        if file.is_file():
            shutil.copy(file, folder)


class TestFolders:
    def test_one_file(self, tmp_path: Path) -> None:
        (file,) = write_gguf(tmp_path / "a.Q8_0.gguf")
        (tmp_path / "mmproj-a.gguf").touch()
        (tmp_path / "config.json").write_text("{}")  # some repositories of GGUF files have one
        for name in (tmp_path, str(tmp_path), f"{tmp_path}:q8_0"):
            checkpoint = open_checkpoint(name)
            assert isinstance(checkpoint, GGUFCheckpoint)
            assert checkpoint.path == file

    def test_one_model_in_parts(self, tmp_path: Path) -> None:
        parts = write_gguf(tmp_path / "a-F32.gguf", in_part=7)
        assert len(parts) == 3
        for name in (str(tmp_path), f"{tmp_path}:F32"):
            assert open_checkpoint(name).files == tuple(parts)
        parts[0].unlink()
        with pytest.raises(ModelError, match=r"a-F32-00001-of-00003\.gguf"):
            open_checkpoint(tmp_path)

    def test_several(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_gguf(tmp_path / "models" / "a.Q4_K_M.gguf")
        parts = write_gguf(tmp_path / "models" / "a.F32.gguf", in_part=9)
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ModelError, match=r"^models has 2 models: F32, Q4_K_M; .* 'models:F32'$"):
            open_checkpoint("models")
        assert open_checkpoint("models:Q4_K_M").path.name == "a.Q4_K_M.gguf"
        assert open_checkpoint("models:f32").files == tuple(Path("models") / part.name for part in parts)
        with pytest.raises(ModelError, match=r"^models has no model of type Q4_0; it has F32, Q4_K_M$"):
            open_checkpoint("models:q4_0")

    def test_safetensors_go_first(self, tmp_path: Path) -> None:
        write_safetensors(tmp_path)
        (file,) = write_gguf(tmp_path / "a.Q8_0.gguf")
        assert isinstance(open_checkpoint(tmp_path), SafetensorsCheckpoint)
        assert open_checkpoint(f"{tmp_path}:Q8_0").path == file

    def test_a_folder_with_a_colon(self, tmp_path: Path) -> None:
        (file,) = write_gguf(tmp_path / "a:Q8_0" / "b.F16.gguf")
        assert open_checkpoint(tmp_path / "a:Q8_0").path == file
        assert open_checkpoint(f"{tmp_path}/a:Q8_0:f16").path == file

    @pytest.mark.parametrize("name", ["A.GGUF", "a", "sha256-0123abcd", "a.bin", "a.Gguf"])
    def test_a_file_is_known_by_its_first_bytes(self, tmp_path: Path, name: str) -> None:
        (file,) = write_gguf(tmp_path / "a.gguf")
        file.rename(tmp_path / name)
        for model in (tmp_path / name, str(tmp_path / name)):
            assert isinstance(open_checkpoint(model), GGUFCheckpoint)
        (tmp_path / "other").write_bytes(b"GGML" + bytes(100))
        with pytest.raises(ModelError, match="other is neither a directory nor a GGUF file"):
            open_checkpoint(tmp_path / "other")

    def test_capital_letters(self, tmp_path: Path) -> None:
        """In a folder, by type, and in parts."""
        for file in write_gguf(tmp_path / "a-Q8_0.gguf", in_part=7):
            file.rename(file.with_suffix(".GGUF"))
        for model in (tmp_path, f"{tmp_path}:q8_0", tmp_path / "a-Q8_0-00002-of-00003.GGUF"):
            assert [file.name[-15:] for file in open_checkpoint(model).files] == [
                f"{i}-of-00003.GGUF" for i in (1, 2, 3)
            ]

    @pytest.mark.parametrize("beside", [(), ("config.json",)])
    def test_an_adapter(self, tmp_path: Path, beside: tuple[str, ...]) -> None:
        for name in beside:
            shutil.copy(open_checkpoint("sibyl").path / name, tmp_path)
        (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
        (tmp_path / "adapter_model.safetensors").touch()
        with pytest.raises(ModelError, match=r"holds an adapter \(LoRA\).*load org/base, with this"):
            open_checkpoint(tmp_path)
        write_safetensors(tmp_path)  # a whole model with an adapter beside it
        assert isinstance(open_checkpoint(tmp_path), SafetensorsCheckpoint)

    def test_no_model(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=r"config\.json is missing"):
            open_checkpoint(tmp_path)
        with pytest.raises(ModelError, match=r"has no \.gguf file with a model"):
            open_checkpoint(f"{tmp_path}:Q8_0")
        (tmp_path / "mmproj.gguf").touch()
        with pytest.raises(ModelError, match=r"has no \.gguf file with a model"):
            open_checkpoint(tmp_path)


class Hub:
    """In place of the hub: repositories are folders, and downloads are links to their files."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch):
        self.root, self.cache, self.downloaded = root / "hub", root / "cache", list[str]()
        self.offline = False
        self.failure: Exception | None = None
        for function in (self.model_info, self.snapshot_download, self.hf_hub_download):
            monkeypatch.setattr(huggingface_hub, function.__name__, function)

    def repository(self, name: str) -> Path:
        return self.root / name

    def model_info(self, name: str, timeout: float) -> ModelInfo:
        assert timeout > 0
        return ModelInfo(id=name, siblings=[{"rfilename": file} for file in self.files(name)])

    def files(self, name: str) -> list[str]:
        if self.offline:
            raise RuntimeError("no network")  # as an HTTP library's own errors, no OSError
        if not self.repository(name).is_dir():
            raise OSError(f"404: there is no {name}")
        files = (file for file in self.repository(name).rglob("*") if file.is_file())
        return [file.relative_to(self.repository(name)).as_posix() for file in files]

    def snapshot_download(
        self,
        name: str,
        *,
        allow_patterns: list[str],
        ignore_patterns: Sequence[str] = (),
        local_files_only: bool = False,
    ) -> str:
        if self.failure is not None:
            raise self.failure
        if self.offline or local_files_only:
            if not (self.cache / name).is_dir():
                raise FileNotFoundError(f"{name} is not in the cache")
        else:
            for file in self.files(name):
                wanted, refused = (
                    any(fnmatch(file, pattern) for pattern in patterns)
                    for patterns in (allow_patterns, ignore_patterns)
                )
                if wanted and not refused:
                    self.hf_hub_download(name, file)
        return str(self.cache / name)

    def hf_hub_download(self, name: str, file: str) -> str:
        here = self.cache / name / file
        if not here.exists():
            if self.offline or not (self.repository(name) / file).is_file():
                raise FileNotFoundError(f"404: {name} has no {file}")
            here.parent.mkdir(parents=True, exist_ok=True)
            here.symlink_to(self.repository(name) / file)
            self.downloaded.append(file)
        return str(here)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    return Hub(tmp_path, monkeypatch)


@pytest.fixture
def gguf(hub: Hub) -> Path:
    """A repository with GGUF files of three types, one in a folder and in parts."""
    folder = hub.repository("org/m-GGUF")
    write_gguf(folder / "m.Q4_K_M.gguf")
    write_gguf(folder / "m.Q8_0.gguf")
    write_gguf(folder / "F32" / "m-F32.gguf", in_part=7)
    for name in ("README.md", "mmproj-m-F16.gguf", "m.imatrix.gguf", "tokenizer.bin"):
        (folder / name).touch()
    return folder


class TestHub:
    def test_a_type(self, hub: Hub, gguf: Path) -> None:
        checkpoint = open_checkpoint("org/m-GGUF:q8_0")
        assert checkpoint.path.name == "m.Q8_0.gguf"
        assert hub.downloaded == ["m.Q8_0.gguf"]

    def test_a_type_in_parts(self, hub: Hub, gguf: Path) -> None:
        checkpoint = open_checkpoint("org/m-GGUF:F32")
        assert [file.name for file in checkpoint.files] == [f"m-F32-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
        assert hub.downloaded == [f"F32/{file.name}" for file in checkpoint.files]

    def test_the_usual_type(self, hub: Hub, gguf: Path) -> None:
        assert open_checkpoint("org/m-GGUF").path.name == "m.Q4_K_M.gguf"
        assert hub.downloaded == ["m.Q4_K_M.gguf"]

    def test_the_only_type(self, hub: Hub, gguf: Path) -> None:
        (gguf / "m.Q4_K_M.gguf").unlink()
        with pytest.raises(ModelError, match=r"^org/m-GGUF has 2 models: F32, Q8_0; .*: 'org/m-GGUF:F32'\. "):
            open_checkpoint("org/m-GGUF")
        shutil.rmtree(gguf / "F32")
        assert open_checkpoint("org/m-GGUF").path.name == "m.Q8_0.gguf"
        assert hub.downloaded == ["m.Q8_0.gguf"]

    def test_a_type_that_is_not_there(self, hub: Hub, gguf: Path) -> None:
        with pytest.raises(ModelError, match=r"no model of type Q6_K; it has F32, Q4_K_M, Q8_0\. "):
            open_checkpoint("org/m-GGUF:Q6_K")
        assert hub.downloaded == []

    def test_safetensors_as_ever(self, hub: Hub) -> None:
        """A GGUF file beside them is downloaded only if its type is named."""
        folder = hub.repository("org/m")
        write_safetensors(folder)
        write_gguf(folder / "m.Q4_K_M.gguf")
        assert isinstance(open_checkpoint("org/m"), SafetensorsCheckpoint)
        assert "model.safetensors" in hub.downloaded
        assert "m.Q4_K_M.gguf" not in hub.downloaded
        hub.downloaded.clear()
        assert isinstance(open_checkpoint("org/m:Q4_K_M"), GGUFCheckpoint)
        assert hub.downloaded == ["m.Q4_K_M.gguf"]

    @pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
    def test_all_forms_of_tokenizers_and_no_copies_of_weights(self, hub: Hub, weights: str) -> None:
        folder = hub.repository("org/m")
        (folder / "original").mkdir(parents=True)
        copies = {"consolidated.safetensors", "original/model.safetensors", "original/config.json"}
        tokenizers = {file for form in FORMS for file in form.files}
        for file in (weights, *tokenizers, *copies):
            (folder / file).touch()
        download("org/m")
        assert set(hub.downloaded) == {weights, *tokenizers}

    @pytest.mark.parametrize("matrices", ["adapter_model.safetensors", "adapter_model.bin"])
    def test_an_adapter(self, hub: Hub, matrices: str) -> None:
        folder = hub.repository("org/a")
        (folder / "checkpoint-5").mkdir(parents=True)
        for file in (matrices, "checkpoint-5/adapter_model.safetensors", "merged.Q4_K_M.gguf"):
            (folder / file).touch()
        (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
        AdapterFiles("org/a")
        assert set(hub.downloaded) == {"adapter_config.json", matrices}

    def test_without_a_network(self, hub: Hub, gguf: Path) -> None:
        for name in ("org/m-GGUF:Q8_0", "org/m-GGUF:F32"):
            open_checkpoint(name)
        hub.offline = True
        assert open_checkpoint("org/m-GGUF:Q8_0").path.name == "m.Q8_0.gguf"
        assert len(open_checkpoint("org/m-GGUF:F32").files) == 3
        with pytest.raises(ModelError, match="no model of type Q4_K_M; it has F32, Q8_0"):
            open_checkpoint("org/m-GGUF:Q4_K_M")
        with pytest.raises(ModelError, match=r"'org/other' .* could not be downloaded \(no network\)"):
            open_checkpoint("org/other:Q8_0")

    def test_no_repository(self, hub: Hub) -> None:
        for name in ("org/none", "org/none:Q8_0"):
            with pytest.raises(ModelError, match=r"'org/none' .* could not be downloaded \(404: there is no"):
                open_checkpoint(name)

    @pytest.mark.parametrize(
        ("failure", "advice"),
        [
            (OSError(errno.ENOSPC, "No space left on device"), "make room there, or set HF_HOME"),
            (OSError(errno.EACCES, "Permission denied"), "set HF_HOME to a directory that can be written"),
            (ConnectionResetError(errno.ECONNRESET, "reset"), "check the network, set HF_ENDPOINT"),
            (TimeoutError("too slow"), "check the network, set HF_ENDPOINT"),
            (HFValidationError("Repo id must be"), "check the name"),
        ],
        ids=lambda one: type(one).__name__,
    )
    def test_failures(self, hub: Hub, failure: Exception, advice: str) -> None:
        hub.failure = failure
        with pytest.raises(ModelError, match=rf"'org/m' .* could not be downloaded .*; {advice}"):
            open_checkpoint("org/m")

    def test_a_repository_without_models(self, hub: Hub) -> None:
        (hub.repository("org/m") / "sub").mkdir(parents=True)
        (hub.repository("org/m") / "sub" / "pytorch_model.bin").touch()
        with pytest.raises(ModelError, match=r"config\.json is missing"):
            open_checkpoint("org/m")
        with pytest.raises(ModelError, match=r"org/m has no \.gguf file with a model"):
            open_checkpoint("org/m:Q8_0")

    def test_a_missing_part(self, hub: Hub, gguf: Path) -> None:
        (gguf / "F32" / "m-F32-00001-of-00003.gguf").unlink()
        with pytest.raises(ModelError, match=r"404: org/m-GGUF has no F32/m-F32-00001-of-00003\.gguf"):
            open_checkpoint("org/m-GGUF:F32")

    @pytest.mark.parametrize("name", ["nope", "nope:Q8_0", "a/b/c", "./a:Q8_0", "/a/b:Q8_0", "~/b"])
    def test_no_name_of_the_hub(self, hub: Hub, name: str) -> None:
        with pytest.raises(ModelError, match=f"no model at '{name}': give .* 'owner/name', with ':TYPE'"):
            open_checkpoint(name)

    def test_a_model_runs(self, hub: Hub, gguf: Path) -> None:
        for drafter in ("none", "draft-model(model=org/m-GGUF:Q8_0)"):
            assert LLM("org/m-GGUF:F32", drafter=drafter).generate([1, 2, 3]).token_ids


def test_the_hubs_own_cache_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through huggingface_hub itself."""
    cached, commit = tmp_path / "models--org--m", "0" * 40
    write_gguf(cached / "snapshots" / commit / "m.F32.gguf", in_part=7)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("org/m", "org/m:f32"):
        checkpoint = open_checkpoint(name)
        assert [file.name for file in checkpoint.files] == [f"m.F32-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    with pytest.raises(ModelError, match="org/m has no model of type Q8_0; it has F32"):
        open_checkpoint("org/m:Q8_0")
    with pytest.raises(ModelError, match="'org/other' is not a local path and could not be downloaded"):
        open_checkpoint("org/other:Q8_0")


def test_served_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "a.gguf").touch()
    monkeypatch.chdir(tmp_path / "models")
    monkeypatch.setenv("HOME", str(tmp_path))
    names = {
        "sibyl": "sibyl",
        "org/m": "org/m",
        "org/m-GGUF:Q8_0": "org/m-GGUF:Q8_0",
        "a.gguf": "a.gguf",
        f"{tmp_path}/models/a.gguf": "a.gguf",
        "~/models/a.gguf": "a.gguf",
        ".": "models",
        "../models/": "models",
        f"{tmp_path}/models:Q8_0": "models:Q8_0",
        "~/models:q8_0": "models:q8_0",
        ".:Q8_0": "models:Q8_0",
    }
    assert {given: served_name(given) for given in names} == names


LONG = "x" * 5000
"""A name that no file can have."""


@pytest.mark.parametrize("name", [LONG, f"{LONG}.gguf", f"owner/{LONG}:Q4_K_M"])
def test_a_name_that_is_too_long(name: str) -> None:
    with pytest.raises(ModelError, match=r"x\.\.\. cannot be read \(File name too long\)$"):
        open_checkpoint(name)


@pytest.mark.parametrize(
    "options", [{"generation_config": LONG}, {"chat_template": LONG}, {"adapters": {"a": LONG}}]
)
def test_other_names_that_are_too_long(options: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="File name too long"):
        LLM("sibyl", **options)
