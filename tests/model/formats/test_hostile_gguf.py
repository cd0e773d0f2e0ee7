"""Damaged and hostile GGUF files: refused at once, whatever counts and lengths they state."""

from __future__ import annotations

import random
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGUFValueType, GGUFWriter, TokenType

from soothsay.errors import ModelError
from soothsay.model.formats import gguf_header
from soothsay.model.formats.gguf_file import GGUFCheckpoint
from soothsay.model.formats.gguf_header import read_header
from soothsay.model.weights.checkpoint import read_model_config
from soothsay.model.weights.load import load_model
from soothsay.vocabulary import merges

U8, U32, F32, STRING, ARRAY, U64 = 0, 4, 6, 8, 9, 10  # types of values


def text(value: str | bytes) -> bytes:
    value = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(value)) + value


def header(*parts: bytes, tensors: int = 0, entries: int = 1, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries) + b"".join(parts)


def array(kind: int, count: int, content: bytes = b"") -> bytes:
    return text("a") + struct.pack("<IIQ", ARRAY, kind, count) + content


def tensor(
    name: str, shape: list[int], kind: int = 0, offset: int = 0, dimensions: int | None = None
) -> bytes:
    count = len(shape) if dimensions is None else dimensions
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", count, *shape, kind, offset)


CRAFTED: dict[str, tuple[bytes, str]] = {
    "an array of 2^40 numbers": (header(array(U8, 2**40)), "length of metadata 'a' is 1,099,511,627,776"),
    "an array of 2^63 texts": (header(array(STRING, 2**63)), "length of metadata 'a'"),
    "an array that overflows": (header(array(U64, 2**61)), "length of metadata 'a'"),
    "an array of arrays": (header(array(ARRAY, 1, struct.pack("<IQ", U8, 0))), "array of arrays"),
    "many entries": (header(entries=2**60), "number of metadata entries"),
    "many tensors": (header(entries=0, tensors=2**60), "number of tensors"),
    "a long key": (header(struct.pack("<Q", 2**62) + b"abc" * 9), "length of a metadata key"),
    "a long text": (header(text("a") + struct.pack("<IQ", STRING, 2**62)), "length of metadata 'a'"),
    "an unknown type": (header(text("a") + struct.pack("<IQ", 99, 0)), "type 99"),
    "an unknown type in an array": (header(array(99, 1, b"0" * 9)), "type 99"),
    "the same key twice": (
        header(*[text("a") + struct.pack("<IB", U8, 1)] * 2, b"0" * 9, entries=2),
        "'a' is there twice",
    ),
    "a text in an array that is longer than the file": (
        header(array(STRING, 2, text("x") + struct.pack("<Q", 2**63) + b"0" * 99)),
        "ends within metadata 'a'",
    ),
    "texts in an array that end with the file": (
        header(array(STRING, 2, text("x" * 8))),
        "ends within metadata 'a'",
    ),
    "a text in an array that is not UTF-8": (
        header(array(STRING, 2, text("x") + text(b"\xff"))),
        "metadata 'a' is not UTF-8",
    ),
    "a key that is not UTF-8": (header(text(b"\xff\xff") + struct.pack("<IB", U8, 1)), "not UTF-8"),
    "version 1": (header(version=1, entries=0), "version 1"),
    "version 2^31": (header(version=2**31 + 1, entries=0), "version"),
    "too many dimensions": (
        header(tensor("t", [1], dimensions=2**32 - 1), b"0" * 99, entries=0, tensors=1),
        "4294967295 dimensions",
    ),
    "no dimensions": (header(tensor("t", []), b"0" * 99, entries=0, tensors=1), "0 dimensions"),
    "a shape that overflows": (
        header(tensor("t", [2**32, 2**32, 2**2]), b"0" * 99, entries=0, tensors=1),
        "beyond the file",
    ),
    "a shape of zeros": (header(tensor("t", [0, 4]), b"0" * 99, entries=0, tensors=1), r"\[4, 0\]"),
    "an offset beyond the file": (
        header(tensor("t", [1], offset=2**60), b"0" * 99, entries=0, tensors=1),
        "beyond the file",
    ),
    "an offset that overflows": (
        header(tensor("t", [1], offset=2**64 - 32), b"0" * 99, entries=0, tensors=1),
        "beyond the file",
    ),
    "an offset that is not aligned": (
        header(tensor("t", [1], offset=5), b"0" * 99, entries=0, tensors=1),
        "no multiple of 32",
    ),
    "tensors that overlap": (
        header(tensor("t", [16]), tensor("u", [1], offset=32), b"0" * 199, entries=0, tensors=2),
        "overlaps",
    ),
    "the same tensor twice": (
        header(tensor("t", [1]), tensor("t", [1], offset=32), b"0" * 199, entries=0, tensors=2),
        "'t' is there twice",
    ),
    "an unknown type of tensors": (
        header(tensor("t", [1], 999), b"0" * 99, entries=0, tensors=1),
        "type 999",
    ),
    "a row that is not whole blocks": (
        header(tensor("t", [31], 8), b"0" * 199, entries=0, tensors=1),
        r"Q8_0 has shape \[31\]",
    ),
    "rows that are whole blocks together only": (
        header(tensor("t", [16, 2], 8), b"0" * 199, entries=0, tensors=1),
        r"Q8_0 has shape \[2, 16\]",
    ),
    "alignment 0": (header(text("general.alignment") + struct.pack("<II", U32, 0)), "alignment is 0"),
    "alignment 3": (header(text("general.alignment") + struct.pack("<II", U32, 3)), "alignment is 3"),
    "alignment of a text": (header(text("general.alignment") + struct.pack("<I", STRING) + text("x")), "'x'"),
    "nothing after the magic": (b"GGUF", "ends within"),
    "the other byte order": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "other byte order"),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_headers_are_refused(name: str, tmp_path: Path) -> None:
    content, words = CRAFTED[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=words) as caught:
        GGUFCheckpoint(path)
    assert str(path) in str(caught.value)


def test_the_file_of_49_bytes(tmp_path: Path) -> None:
    """It states an array of 2^40 elements. Its refusal takes no memory and no time."""
    path = tmp_path / "model.gguf"
    path.write_bytes(header(array(U8, 2**40)))
    assert path.stat().st_size == 49
    script = """
        import resource, sys
        from pathlib import Path
        from soothsay import ModelError
        from soothsay.model.formats.gguf_file import GGUFCheckpoint
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**26,) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (30, 30))
        try:
            GGUFCheckpoint(Path(sys.argv[1]))
        except ModelError as error:
            print(error)
    """
    if not Path("/proc/self/statm").exists():
        pytest.skip("needs /proc/self/statm")
    command = [sys.executable, "-c", textwrap.dedent(script), str(path)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "1,099,511,627,776" in run.stdout


def test_numbers_of_values_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In all arrays together: a large file could hold many that are small."""
    monkeypatch.setattr(gguf_header, "MAX_VALUES", 10)
    path = tmp_path / "model.gguf"
    arrays = [text(f"{i}") + struct.pack("<IIQ", ARRAY, U8, 6) + b"123456" for i in range(2)]
    path.write_bytes(header(*arrays, entries=2))
    with pytest.raises(ModelError, match="limit of 4"):
        read_header(path)


def add_layers(writer: GGUFWriter) -> None:
    for layer in range(2):
        for name, shape in {
            "attn_norm": (32,),
            "ffn_norm": (32,),
            "attn_q": (32, 32),
            "attn_k": (16, 32),
            "attn_v": (16, 32),
            "attn_output": (32, 32),
            "ffn_gate": (64, 32),
            "ffn_up": (64, 32),
            "ffn_down": (32, 64),
        }.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(shape, np.float32))


KEYS: dict[str, Any] = {
    "block_count": 2,
    "context_length": 64,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 1e4,
    "rope.dimension_count": 8,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 2.0,
    "rope.scaling.original_context_length": 32,
    "rope.scaling.attn_factor": 1.5,
    "rope.scaling.yarn_beta_fast": 32.0,
    "expert_count": 0,
    "attention.key_length": 8,
}
TOKENS: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "a", "b", "ab"],
    "tokenizer.ggml.scores": [0.0] * 262,
    "tokenizer.ggml.token_type": [TokenType.UNKNOWN] + [TokenType.CONTROL] * 2 + [6] * 256 + [1] * 3,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.add_space_prefix": True,
    "tokenizer.chat_template": "{{ messages }}",
    "tokenizer.chat_template.tool_use": "{{ tools }}",
}
ODD: list[Any] = [
    *(0, -1, 1, 3, 2**31 - 1, 0.5, 1e300, float("nan"), float("inf")),
    *("x", "", "y" * 100, True, [1], ["x"]),
]


def put(writer: GGUFWriter, key: str, value: Any) -> None:
    kinds = {bool: GGUFValueType.BOOL, int: GGUFValueType.INT64, float: GGUFValueType.FLOAT64}
    if isinstance(value, list):
        kinds[str] = GGUFValueType.STRING
        inner = (
            kinds[type(value[0])] if value and not isinstance(value[0], TokenType) else GGUFValueType.INT64
        )
        writer.kv_data[0][key] = gguf.GGUFValue(value, GGUFValueType.ARRAY, inner)
    else:
        writer.kv_data[0][key] = gguf.GGUFValue(value, kinds.get(type(value), GGUFValueType.STRING))


def whole(path: Path, changes: dict[str, Any] | None = None) -> Path:
    """A model that loads, with some metadata changed."""
    writer = GGUFWriter(path, "llama")
    for key, value in {
        **{f"llama.{key}": value for key, value in KEYS.items()},
        **TOKENS,
        **(changes or {}),
    }.items():
        put(writer, key, value)
    writer.add_tensor("token_embd.weight", np.ones((64, 32), np.float32))
    writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
    add_layers(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_model_that_is_damaged_below_loads(tmp_path: Path) -> None:
    checkpoint = GGUFCheckpoint(whole(tmp_path / "model.gguf"))
    assert checkpoint.tokenizer() is not None
    assert load_model(checkpoint, "float32").spec.max_positions == 64


@pytest.mark.parametrize(
    "key", [*(f"llama.{key}" for key in KEYS), *TOKENS, "general.architecture", "split.count"]
)
def test_metadata_of_odd_values(tmp_path: Path, key: str) -> None:
    for value in ODD:
        path = whole(tmp_path / "model.gguf", {key: value})
        try:
            checkpoint = GGUFCheckpoint(path)
            read_model_config(checkpoint)
            checkpoint.tokenizer()
        except ModelError as error:
            assert str(path) in str(error)  # noqa: PT017


def test_a_long_token_is_refused(tmp_path: Path) -> None:
    tokens = [*TOKENS["tokenizer.ggml.tokens"][:-1], "a" * 5000]
    with pytest.raises(ModelError, match="a token has 5,000 characters"):
        GGUFCheckpoint(whole(tmp_path / "model.gguf", {"tokenizer.ggml.tokens": tokens}))


def test_many_characters_of_tokens_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding merges takes memory for each."""
    path = whole(tmp_path / "model.gguf")
    characters = sum(map(len, TOKENS["tokenizer.ggml.tokens"]))
    monkeypatch.setattr(merges, "MAX_CHARACTERS", characters)
    GGUFCheckpoint(path)
    monkeypatch.setattr(merges, "MAX_CHARACTERS", characters - 1)
    with pytest.raises(ModelError, match=rf"model\.gguf: the tokens have {characters:,} characters together"):
        GGUFCheckpoint(path)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("token_type", [1] * 9, "9 types of tokens for 262 tokens"),
        ("scores", [0.0] * 263, "263 scores for 262 tokens"),
        ("tokens", ["a"] * 262, "several tokens have the same text"),
    ],
)
def test_lists_of_tokens_that_do_not_fit(tmp_path: Path, key: str, value: list[Any], words: str) -> None:
    checkpoint = GGUFCheckpoint(whole(tmp_path / "model.gguf", {f"tokenizer.ggml.{key}": value}))
    with pytest.raises(ModelError, match=rf"model\.gguf: .*{words}"):
        checkpoint.tokenizer()


@pytest.mark.parametrize(
    ("key", "value"),
    [("tokens", [1]), ("merges", [1]), ("scores", ["x"]), ("token_type", [0.5]), ("token_type", ["x"])],
)
def test_lists_of_tokens_of_wrong_types(tmp_path: Path, key: str, value: list[Any]) -> None:
    with pytest.raises(ModelError, match=rf"tokenizer\.ggml\.{key} has entries of a wrong type"):
        GGUFCheckpoint(whole(tmp_path / "model.gguf", {f"tokenizer.ggml.{key}": value}))


@pytest.mark.parametrize(("count", "shape"), [(4, (3, 8, 32)), (60_000, (60_000, 1, 2)), (4, (128, 32))])
def test_experts_that_do_not_fit(tmp_path: Path, count: int, shape: tuple[int, ...]) -> None:
    def more(writer: GGUFWriter) -> None:
        for layer in range(4):
            writer.add_tensor(f"blk.{layer}.ffn_gate_exps.weight", np.ones(shape, np.float16))

    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    for key, value in {**KEYS, "expert_count": count, "expert_used_count": 2}.items():
        put(writer, f"llama.{key}", value)
    writer.add_tensor("token_embd.weight", np.ones((64, 32), np.float32))
    more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"experts"):
        GGUFCheckpoint(tmp_path / "model.gguf")


def flip(rng: random.Random, content: bytearray) -> None:
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)


def large(rng: random.Random, content: bytearray) -> None:
    at = rng.randrange(max(len(content) - 8, 1))
    content[at : at + 8] = struct.pack("<Q", rng.choice([0, 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1]))


def cut(rng: random.Random, content: bytearray) -> None:
    del content[rng.randrange(1, len(content)) :]


def drop(rng: random.Random, content: bytearray) -> None:
    at = rng.randrange(len(content))
    del content[at : at + rng.randint(1, 16)]


@pytest.mark.parametrize("change", [flip, large, cut, drop])
def test_files_with_random_damage(tmp_path: Path, change: Callable[[random.Random, bytearray], None]) -> None:
    path = whole(tmp_path / "model.gguf")
    good, rng, refused = path.read_bytes(), random.Random(change.__name__), 0
    size = good.index(b"blk.1.ffn_down") + 64  # of the header
    for _ in range(150):
        damaged = bytearray(good[:size])
        for _ in range(1 if change is cut else rng.choice([1, 1, 2, 5])):
            change(rng, damaged)
        path.write_bytes(bytes(damaged) + good[size:])
        try:
            checkpoint = GGUFCheckpoint(path)
            checkpoint.tokenizer()
            read_model_config(checkpoint)
            with checkpoint.open() as read, torch.inference_mode():
                for name in checkpoint.names():
                    read(name)
        except ModelError:
            refused += 1
    assert refused > 30
