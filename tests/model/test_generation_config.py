"""The sampling parameters in a model's files become defaults, or are refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFValue, GGUFValueType
from gguf_files import write_gguf

from soothsay import LLM, ModelError, SamplingParams
from soothsay.model.weights.checkpoint import open_checkpoint
from soothsay.model.weights.generation_config import (
    FAMILIES,
    GGUF_KEYS,
    NAMES,
    OTHERS,
    recommended,
    sampling_in_file,
)

PUBLISHED = {
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "repetition_penalty": 1.05,
    "max_new_tokens": 2048,
    "transformers_version": "4.51.0",
}
TAKEN = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}


def write(folder: Path, content: Any) -> Path:
    file = folder / "generation_config.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


@pytest.mark.parametrize(
    ("content", "taken"),
    [
        (PUBLISHED, TAKEN),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.6}),  # as vLLM
        ({"temperature": None, "top_k": None}, {}),
        ({"top_k": 20.0, "min_p": 0, "temperature": 0}, {"temperature": 0, "top_k": 20, "min_p": 0}),
        (
            {"presence_penalty": 1.5, "frequency_penalty": -1},
            {"presence_penalty": 1.5, "frequency_penalty": -1},
        ),
        ({}, {}),
    ],
)
def test_what_is_taken_from_a_file(tmp_path: Path, content: Any, taken: dict[str, float]) -> None:
    found = sampling_in_file(write(tmp_path, content))
    assert found == taken
    assert {type(found[name]) for name in found if name == "top_k"} <= {int}
    SamplingParams(**found)


@pytest.mark.parametrize(
    ("names", "family"),
    [
        (("smollm2", "Smollm2 135M 8k Lc100K Mix1 Ep2"), "smollm2"),
        ((None, "models--HuggingFaceTB--SmolLM2-135M-Instruct", "snapshots", "9c1e"), "smollm2"),
        (("Qwen2.5-Coder", "Qwen2.5 Coder 0.5B Instruct AWQ", "q.gguf"), "qwen25"),
        (("Llama-3.2-1B",), "llama3"),
        (("DeepSeek-R1-Distill-Qwen2.5-7B",), "deepseekr1"),
        (("tinyllama", 7, None), None),
    ],
)
def test_what_families_recommend(names: tuple[object, ...], family: str | None) -> None:
    assert recommended(*names) == (OTHERS if family is None else FAMILIES[family])


def test_what_families_recommend_is_possible() -> None:
    for own in (OTHERS, *FAMILIES.values()):
        SamplingParams(**own)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "value",
    [*("NaN", "Infinity", "-Infinity", "1e308", "-1e308", '"0.7"', "[0.7]", "{}", "true", "1" * 400, "-5")],
)
def test_hostile_values_are_refused_by_name(tmp_path: Path, name: str, value: str) -> None:
    possible = name.endswith(("presence_penalty", "frequency_penalty")) and value == "-5"
    file = write(tmp_path, f'{{"{name}": {value}}}')
    if possible:
        assert sampling_in_file(file) == {name: -5}
        return
    with pytest.raises(ModelError, match=rf"generation_config\.json: {name}=.* --generation-config none"):
        sampling_in_file(file)


class TestLLM:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """A copy of the bundled model with defaults of its own."""
        source = open_checkpoint("sibyl").path
        for file in source.iterdir():
            (tmp_path / file.name).symlink_to(file)
        (tmp_path / "generation_config.json").unlink()
        write(tmp_path, {"eos_token_id": 0, "temperature": 0.5, "top_k": 3})
        return tmp_path

    def test_requests_without_parameters_have_the_models(self, folder: Path) -> None:
        llm = LLM(folder, drafter="none", kv_tokens=2048)
        assert llm.default_sampling_params == SamplingParams(temperature=0.5, top_k=3)
        requests = [llm.stream("Hi")._request, llm.stream("Hi", SamplingParams())._request]
        assert [request.params for request in requests] == [llm.default_sampling_params, SamplingParams()]
        for request in requests:
            llm.engine.cancel(request)

    def test_they_can_come_from_elsewhere_or_nowhere(self, folder: Path, tmp_path: Path) -> None:
        none = LLM(folder, drafter="none", kv_tokens=2048, generation_config="none")
        assert none.default_sampling_params == SamplingParams()
        assert none.eos_ids == (0,)  # they are no sampling parameters
        other = LLM("sibyl", drafter="none", kv_tokens=2048, generation_config=folder)
        assert other.sampling_defaults == {"temperature": 0.5, "top_k": 3}
        with pytest.raises(ModelError, match=r"there is no .*nowhere.*'auto'.*'none'"):
            LLM("sibyl", generation_config=tmp_path / "nowhere")

    def test_without_any_the_familys_hold(self, folder: Path) -> None:
        write(folder, {"eos_token_id": 0})
        assert LLM(folder, drafter="none", kv_tokens=2048).sampling_defaults == OTHERS
        (named := folder / "SmolLM2-135M").mkdir()
        for file in folder.iterdir():
            (named / file.name).symlink_to(file)
        assert open_checkpoint(named).sampling_defaults() == {"temperature": 0.2, "top_p": 0.9}

    def test_a_hostile_file_can_be_ignored(self, folder: Path) -> None:
        write(folder, '{"eos_token_id": 0, "temperature": NaN}')
        with pytest.raises(ModelError, match="temperature=nan"):
            LLM(folder, drafter="none")
        assert LLM(folder, drafter="none", kv_tokens=2048, generation_config="none").sampling_defaults == {}


class TestGGUF:
    def test_they_are_metadata(self, tmp_path: Path) -> None:
        meant = {**TAKEN, "min_p": 0.05}
        more = {
            GGUF_KEYS[name]: GGUFValue(
                value, GGUFValueType.INT32 if name == "top_k" else GGUFValueType.FLOAT32
            )
            for name, value in meant.items()
        }
        (file,) = write_gguf(tmp_path / "model.gguf", more=more)
        assert open_checkpoint(file).sampling_defaults() == meant

    def test_without_any_the_familys_hold(self, tmp_path: Path) -> None:
        more = {"general.basename": GGUFValue("smollm2", GGUFValueType.STRING)}
        (file,) = write_gguf(tmp_path / "model.gguf", more=more)
        assert open_checkpoint(file).sampling_defaults() == FAMILIES["smollm2"]

    @pytest.mark.parametrize("value", [math.nan, math.inf, "x", True, 1e30])
    def test_hostile_ones(self, tmp_path: Path, value: Any) -> None:
        kinds = {bool: GGUFValueType.BOOL, str: GGUFValueType.STRING, float: GGUFValueType.FLOAT32}
        more = {"general.sampling.temp": GGUFValue(value, kinds[type(value)])}
        (file,) = write_gguf(tmp_path / "model.gguf", more=more)
        with pytest.raises(ModelError, match="temperature="):
            open_checkpoint(file).sampling_defaults()
