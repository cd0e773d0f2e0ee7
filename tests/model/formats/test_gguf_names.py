"""What names of GGUF files say, and which file a user means."""

from __future__ import annotations

import pytest

from soothsay.errors import ModelError
from soothsay.model.formats.gguf_names import choose, part_names, weight_type

FILES = [
    "README.md",
    "config.json",
    "a.Q4_K_M.gguf",
    "a.Q4_K_S.gguf",
    "a.UD-Q4_K_XL.gguf",
    "a.BF16-00001-of-00002.gguf",
    "a.BF16-00002-of-00002.gguf",
    "Q8_0/a-Q8_0-00001-of-00002.gguf",
    "Q8_0/a-Q8_0-00002-of-00002.gguf",
    "mmproj-a-F16.gguf",
    "a.mmproj-Q8_0.gguf",
    "imatrix.gguf",
    "a.imatrix.gguf",
]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gemma-3-270m.Q4_K_M.gguf", "Q4_K_M"),
        ("SmolLM2-135M-Instruct-Q4_1.gguf", "Q4_1"),
        ("qwen2.5-0.5b-instruct-q4_k_m.gguf", "Q4_K_M"),
        ("Phi-3-mini-4k-instruct-q4.gguf", "Q4"),
        ("Phi-3-mini-4k-instruct-fp16.gguf", "FP16"),
        ("Llama-3.2-1B-IQ4_XS.gguf", "IQ4_XS"),
        ("Qwen3-8B-TQ1_0.gguf", "TQ1_0"),
        ("model.i1-Q6_K.gguf", "Q6_K"),
        ("Qwen3-0.6B-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("gpt-oss-20b-MXFP4.gguf", "MXFP4"),
        ("ggml-model-bf16-00001-of-00003.gguf", "BF16"),
        ("a-Q4_0_4_4.gguf", "Q4_0_4_4"),
        ("a-Q5_K_M-imat.gguf", "Q5_K_M"),
        ("Q8_0/model-f32.gguf", "F32"),
        ("Q8_0/model.gguf", ""),
        ("stories260K.gguf", ""),
        ("faq8-model.gguf", ""),
    ],
)
def test_types(name: str, expected: str) -> None:
    assert weight_type(name) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a-00002-of-00002.gguf", ("a-00001-of-00002.gguf", "a-00002-of-00002.gguf")),
        ("a\nb-00001-of-00001.gguf", ("a\nb-00001-of-00001.gguf",)),
        ("a-00003-of-00002.gguf", ("a-00003-of-00002.gguf",)),
        ("a-00000-of-00002.gguf", ("a-00000-of-00002.gguf",)),
        ("a-00001-of-99999.gguf", ("a-00001-of-99999.gguf",)),
        ("a-1-of-2.gguf", ("a-1-of-2.gguf",)),
        ("a.gguf", ("a.gguf",)),
    ],
)
def test_names_of_parts(name: str, expected: tuple[str, ...]) -> None:
    assert part_names(name) == expected


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("Q4_K_M", ("a.Q4_K_M.gguf",)),
        ("q4_k_s", ("a.Q4_K_S.gguf",)),
        ("ud-q4_k_xl", ("a.UD-Q4_K_XL.gguf",)),
        ("bf16", ("a.BF16-00001-of-00002.gguf", "a.BF16-00002-of-00002.gguf")),
        ("Q8_0", ("Q8_0/a-Q8_0-00001-of-00002.gguf", "Q8_0/a-Q8_0-00002-of-00002.gguf")),
    ],
)
def test_a_type_is_chosen(wanted: str, expected: tuple[str, ...]) -> None:
    for usual in (True, False):
        assert choose(reversed(FILES), wanted, "o/n", usual=usual) == expected


def test_without_a_type() -> None:
    assert choose(FILES, "", "o/n", usual=True) == ("a.Q4_K_M.gguf",)
    for usual in (True, False):
        assert choose(["a.gguf", "mmproj.gguf"], "", "o/n", usual=usual) == ("a.gguf",)
        assert choose(["a.Q8_0.gguf", "x.bin"], "", "o/n", usual=usual) == ("a.Q8_0.gguf",)
    later_parts = [file for file in FILES if "-00002-of" in file and "BF16" in file]
    assert len(choose(later_parts, "", "o/n", usual=False)) == 2  # so that the missing part is named


@pytest.mark.parametrize(
    ("names", "wanted", "words"),
    [
        (FILES, "", "^o/n has 5 models: BF16, Q4_K_M, Q4_K_S, Q8_0, UD-Q4_K_XL; .*: 'o/n:BF16'$"),
        (FILES, "Q4_K", "^o/n has no model of type Q4_K; it has BF16, Q4_K_M, Q4_K_S, Q8_0, UD-Q4_K_XL$"),
        (FILES, "F16", "no model of type F16"),
        (["a.gguf"], "Q4_0", "no model of type Q4_0; it has none with a type in its name"),
        (["a.gguf", "b.gguf"], "", "2 models: a.gguf, b.gguf; give the path of one"),
        (["a-q4_0.gguf", "b-Q4_0.gguf"], "Q4_0", "2 models: a-q4_0.gguf, b-Q4_0.gguf; give the path of one"),
        (["mmproj-F16.gguf", "imatrix.gguf", "x.safetensors"], "", "^o/n has no .gguf file with a model$"),
        ([], "Q4_0", "^o/n has no .gguf file with a model$"),
    ],
)
def test_no_model_or_several(names: list[str], wanted: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        choose(names, wanted, "o/n", usual=False)


def test_the_usual_type_is_not_there() -> None:
    with pytest.raises(ModelError, match="o/n has 2 models: Q4_0, Q8_0; choose one by its type: 'o/n:Q4_0'"):
        choose(["a.Q4_0.gguf", "a.Q8_0.gguf"], "", "o/n", usual=True)
