"""GGUF files of T5 and its relatives, as llama.cpp's converter writes them, and the tokenizer inside."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from encoder_decoders import START, UNTIED, VOCAB, oracle_logits, random_sequence_oracle
from families import array, random_tokens, read_config
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from safetensors.torch import load_file
from transformers import T5Tokenizer

from soothsay import LLM, ModelError, SamplingParams
from soothsay.core.batch import Rows
from soothsay.core.tree import DraftTree
from soothsay.model.formats.gguf_tokenizer import build_tokenizer
from soothsay.model.weights.checkpoint import open_checkpoint, read_model_config
from soothsay.model.weights.load import load_model

FAR = {"relative_attention_max_distance": 128, "layer_norm_epsilon": 2.0**-10}
"""The distance of all published models, which files do not state, and a number that float32 keeps."""

GATED = {"feed_forward_proj": "gated-gelu"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("t5", {}),
    "t5_1.1": ("t5_1.1", {}),
    "t5_1.1_tied": ("t5", GATED),
    "mt5": ("mt5", {**UNTIED, "decoder_start_token_id": 3}),
    "umt5": ("umt5", {}),
    "umt5_one_layer": ("umt5", {"num_decoder_layers": 1}),
}
Edit = Callable[[GGUFWriter], None]


def write(
    path: Path,
    source: Path,
    kind: str = "F32",
    edit: Edit = lambda _: None,
    arch: str = "t5",
    without: str = "",
) -> Path:
    """Write a directory's model. `edit` changes the metadata; the tensor `without` is left out."""
    c = SimpleNamespace(**read_config(source))
    writer = GGUFWriter(path, arch)
    writer.add_context_length(512)
    writer.add_embedding_length(c.d_model)
    writer.add_feed_forward_length(c.d_ff)
    writer.add_block_count(c.num_layers)
    writer.add_decoder_block_count(c.num_decoder_layers)
    writer.add_head_count(c.num_heads)
    writer.add_key_length(c.d_kv)
    writer.add_value_length(c.d_kv)
    writer.add_layer_norm_eps(c.layer_norm_epsilon)
    writer.add_relative_attn_buckets_count(c.relative_attention_num_buckets)
    writer.add_layer_norm_rms_eps(c.layer_norm_epsilon)
    writer.add_decoder_start_token_id(c.decoder_start_token_id)
    edit(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.T5, max(c.num_layers, c.num_decoder_layers))
    for full, tensor in load_file(source / "model.safetensors").items():
        stored = names.get_name(full, try_suffixes=(".weight",))
        assert stored is not None, full
        packs = tensor.ndim > 1 and (kind == "F16" or ("rel_b" not in stored and tensor.shape[-1] % 32 == 0))
        used = GGMLQuantizationType[kind if packs else "F32"]
        data = tensor.contiguous().numpy()
        if stored != without:
            writer.add_tensor(stored, data if not used else quantize(data, used), raw_dtype=used)
    writer.add_tensor("dec.blk.0.cross_attn_rel_b.weight", np.ones((8, 4), np.float32))  # in files of T5 1.0
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits(path: Path, source: list[int], target: list[int], dtype: Any = "float32") -> torch.Tensor:
    model = load_model(open_checkpoint(path), dtype)
    row = Rows(array([*source, *target]), 0, None, DraftTree(target[-1]), source=len(source))
    with torch.no_grad():
        hidden, _ = model(model.pack([row]))
        found: torch.Tensor = model.logits(hidden)[len(source) :]
    return found


def softer(oracle: Any) -> Any:
    """The same with smaller queries: rounding grows less from layer to layer."""
    for key, parameter in oracle.named_parameters():
        if key.endswith(".q.weight"):
            parameter.data.mul_(0.3)
    return oracle


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    base, changes = CASES[name]
    oracle = softer(random_sequence_oracle(base, **FAR, **changes))
    oracle.save_pretrained(tmp_path)
    path = write(tmp_path / "model.gguf", tmp_path)
    spec, original = (read_model_config(open_checkpoint(place)) for place in (path, tmp_path))
    assert replace(spec, source=None) == replace(original, source=None)
    assert spec.source is not None
    assert spec.source.start == (changes.get("decoder_start_token_id", START),)
    source, target = random_tokens(np.random.default_rng(0), 200, 160)
    expected = oracle_logits(oracle, source, [START, *target])
    assert (logits(path, source, [START, *target]) - expected).abs().max() < 1e-4
    assert expected.std() > 0.2


def test_a_head_that_is_a_copy_of_the_table(tmp_path: Path) -> None:
    """As in files that are made of a pytorch_model.bin: T5 1.0 scales its logits there too."""
    oracle = random_sequence_oracle("t5", **FAR)
    oracle.save_pretrained(tmp_path)
    table = oracle.shared.weight.detach().numpy()
    copied = write(
        tmp_path / "model.gguf", tmp_path, edit=lambda writer: writer.add_tensor("output.weight", table)
    )
    assert not read_model_config(open_checkpoint(copied)).head.tied
    source, target = random_tokens(np.random.default_rng(1), 20, 30)
    expected = oracle_logits(oracle, source, target)
    assert (logits(copied, source, target) - expected).abs().max() < 1e-4


def test_numbers_of_16_bits(tmp_path: Path) -> None:
    """Those by distance too."""
    oracle = random_sequence_oracle("umt5", **FAR).half().float()
    oracle.save_pretrained(tmp_path)
    path = write(tmp_path / "model.gguf", tmp_path, "F16")
    source, target = random_tokens(np.random.default_rng(3), 20, 30)
    assert (logits(path, source, target) - oracle_logits(oracle, source, target)).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["t5", "t5_1.1", "umt5"])
def test_blocks_run_as_integers(name: str, tmp_path: Path) -> None:
    softer(random_sequence_oracle(name, **FAR, d_ff=96)).save_pretrained(tmp_path)
    exact, integers = (write(tmp_path / f"{kind}.gguf", tmp_path, kind) for kind in ("F32", "Q8_0"))
    assert integers.stat().st_size < 0.4 * exact.stat().st_size
    checkpoint, original = open_checkpoint(integers), open_checkpoint(exact)
    assert checkpoint.names() == original.names()
    with checkpoint.open() as read, original.open() as read_original:
        for each in checkpoint.names():
            expected = read_original(each)
            assert (read(each) - expected).norm() < 0.01 * expected.norm(), each
    source, target = random_tokens(np.random.default_rng(2), 30, 40)
    found, *wanted = (
        logits(path, source, target, dtype)
        for path, dtype in ((integers, "auto"), (integers, "float32"), (exact, "float32"))
    )
    for floats in wanted:  # of the same weights, and of those before rounding
        errors = (found - floats).norm(dim=1) / floats.norm(dim=1)
        assert 0 < errors.median() < 0.1


TEXTS = (
    "translate English to German: The house is small.",
    "Das Haus ist klein, aber schön; Straße, Äpfel, Übermut.",
    "Où est le café déjà vu ? À côté de l'hôtel.",
    "cafe\u0301 and na\u00efve",  # marks on their own
    "",
    " ",
    "   leading and   inner  spaces  ",
    "line one\nline two\r\n\ttabbed",
    "no\u00a0break, \u3000wide",
    "smile \U0001f600 and \U0001f468\u200d\U0001f469\u200d\U0001f467, done",
    "日本語のテキスト",
    "def f(x):\n    return x ** 2  # squared",
    'for (int i = 0; i < 10; ++i) { puts("a\\n"); }',
    "ﬁne ﬂow \uff21\uff22\uff23 \uff11\uff12",
    "<extra_id_0> walks in <extra_id_1>park",
    "an end</s> within, <pad> and <unk>",
    "[PAD155] [PAD165] [PAD175] are no tokens",
    "3.14159, 1,000,000 and 42%",
    "ALL CAPS and MiXeD cAsE",
    "The house is small. " * 8,
    "already\u2581cut\u2581",
    "unknown ъыь letters éъé",
)
REPLACED = {
    **dict.fromkeys(("\n", "\r", "\t", "\u00a0", "\u3000"), " "),
    **{"ﬁ": "fi", "ﬂ": "fl", "e\u0301": "é", "\u200d": ""},
    **{chr(0xFF21 + i): chr(ord("A") + i) for i in range(26)},
}
"""What a map of characters replaces: a part of SentencePiece's own."""

SENTINELS, FILLERS = 10, 30


def character_map(replaced: Mapping[str, str]) -> bytes:
    """SentencePiece's map of characters: a trie of UTF-8 bytes in a double array, then the texts.

    The children of a unit stand at `base ^ byte`. That with byte 0 is a leaf with the place of a text.
    """
    texts = b"".join(text.encode() + b"\0" for text in replaced.values())
    places = np.cumsum([0, *(len(text.encode()) + 1 for text in replaced.values())])
    leaves = {text.encode(): int(place) for text, place in zip(replaced, places, strict=False)}
    units, taken = {0: 0}, {0}

    def add(prefix: bytes, at: int) -> None:
        longer = {word[len(prefix)] for word in leaves if word.startswith(prefix) and word != prefix}
        ends = prefix in leaves
        base = next(
            base
            for base in range(1, 2**16)
            if base ^ at < 2**16 and not taken & {base ^ byte for byte in (0, *longer)}
        )
        taken.update(base ^ byte for byte in (0, *longer))
        units[at] = units.get(at, 0) | (base ^ at) << 10 | ends << 8
        if ends:
            units[base] = 1 << 31 | leaves[prefix]
        for byte in longer:
            units[base ^ byte] = byte
            add(prefix + bytes([byte]), base ^ byte)

    add(b"", 0)
    trie = struct.pack(f"<{max(units) + 257}I", *(units.get(i, 0) for i in range(max(units) + 257)))
    return struct.pack("<I", len(trie)) + trie + texts


@pytest.fixture(scope="module")
def pieces() -> list[tuple[str, float]]:
    """Pieces of the texts above and their scores, after T5's special tokens."""
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = tokenizers.trainers.UnigramTrainer(
        vocab_size=260, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    learned = [text for text in TEXTS if not any(mark in text for mark in ("ъ", "<", "[", "\u2581"))]
    backend.train_from_iterator(learned, trainer)
    return [(text, score) for text, score in json.loads(backend.to_str())["model"]["vocab"]]


@pytest.fixture(scope="module")
def original(pieces: list[tuple[str, float]]) -> Any:
    """The tokenizer of transformers."""
    return T5Tokenizer(vocab=pieces, extra_ids=SENTINELS, _spm_precompiled_charsmap=character_map(REPLACED))


def describe(writer: GGUFWriter, original: Any, pieces: list[tuple[str, float]]) -> None:
    """Write the metadata of a tokenizer. Unused tokens fill the vocabulary up."""
    tokens = sorted(original.get_vocab(), key=original.get_vocab().__getitem__)
    assert tokens[: len(pieces)] == [text for text, _ in pieces]
    count = len(tokens)
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*tokens, *(f"[PAD{i}]" for i in range(count, count + FILLERS))])
    scores = [score for _, score in pieces]
    writer.add_token_scores([*scores, *[-1000.0] * (count - len(pieces)), *[-10000.0] * FILLERS])
    kinds = [*[TokenType.CONTROL] * 2, TokenType.UNKNOWN, *[TokenType.NORMAL] * (len(pieces) - 3)]
    kinds += [*[TokenType.USER_DEFINED] * (count - len(pieces)), *[TokenType.UNUSED] * FILLERS]
    writer.add_token_types(kinds)
    writer.add_add_space_prefix(True)
    writer.add_remove_extra_whitespaces(True)
    writer.add_precompiled_charsmap(character_map(REPLACED))
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(2)
    writer.add_pad_token_id(0)


@pytest.fixture(scope="module")
def texts_too(
    tmp_path_factory: pytest.TempPathFactory, original: Any, pieces: list[tuple[str, float]]
) -> tuple[Path, Path]:
    """A directory with a model and its tokenizer, and the GGUF file of the same."""
    directory = tmp_path_factory.mktemp("texts")
    size = len(original) + FILLERS
    random_sequence_oracle("t5_1.1", **FAR, vocab_size=size).save_pretrained(directory)
    original.save_pretrained(directory)
    edit: Edit = lambda writer: describe(writer, original, pieces)  # noqa: E731
    return directory, write(tmp_path_factory.mktemp("gguf") / "model.gguf", directory, edit=edit)


def test_the_tokenizer_gives_the_ids_of_transformers(texts_too: tuple[Path, Path], original: Any) -> None:
    tokenizer = open_checkpoint(texts_too[1]).tokenizer()
    assert tokenizer is not None
    for text in TEXTS:
        assert tokenizer.encode(text) == original(text).input_ids, text
        assert tokenizer.encode(text, special=False) == original(text, add_special_tokens=False).input_ids
    assert tokenizer.special == {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    for text in TEXTS[:3]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert 0 < sum(2 in original(text).input_ids for text in TEXTS) < 8  # of unknown characters


@pytest.mark.parametrize("drafter", ["none", "suffix"])
def test_answers_are_those_of_the_directory(texts_too: tuple[Path, Path], drafter: str) -> None:
    directory, path = texts_too
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    expected, found = (
        LLM(place, drafter=drafter, dtype="float32", kv_tokens=4096).generate([*TEXTS], greedy)
        for place in (directory, path)
    )
    for one, other in zip(expected, found, strict=True):
        assert one.prompt_token_ids == other.prompt_token_ids
        assert one.token_ids == other.token_ids
        assert one.text == re.sub("<extra_id_.>", "", other.text)  # special tokens in one
    assert len({token for result in found for token in result.token_ids}) > 20
    assert (sum(result.stats.accepted for result in found) > 0) == (drafter == "suffix")
    assert open_checkpoint(path).eos_ids == open_checkpoint(directory).eos_ids == (1,)


WORDS: dict[str, Any] = {
    "model": "t5",
    "tokens": ["<pad>", "</s>", "<unk>", "<0x41>", "\u2581", "a", "\u2581a", "\u2581\u2581"],
    "scores": np.float32([0, 0, 0, -5, -2, -2, -1, -1]),
    "token_type": np.int32([3, 3, 2, 6, 1, 1, 1, 1]),
}


def words(**changes: Any) -> Any:
    named = {f"tokenizer.ggml.{key}": value for key, value in {**WORDS, **changes}.items()}
    return build_tokenizer({key: value for key, value in named.items() if value is not None}, Path("file"))


def test_settings_of_the_tokenizer() -> None:
    """Without settings a space comes first, spaces are joined, and an end follows."""
    assert words().encode("a  a") == [6, 6, 1]
    assert words(add_eos_token=False).encode("a  a") == [6, 6]
    assert words(add_space_prefix=False).encode("a  a") == [5, 6, 1]
    assert words(remove_extra_whitespaces=False).encode("a  a") == [6, 4, 6, 1]
    assert words().encode("aA a?") == [6, 3, 6, 2, 1]  # a byte, and none
    swapped = character_map({"?": "a"})
    for dtype in (np.uint8, np.int8):  # older files have the latter
        assert words(precompiled_charsmap=np.frombuffer(swapped, dtype)).encode("??") == [6, 5, 1]


def test_added_tokens_do_not_lower_the_score_of_unknown_characters() -> None:
    """-2 for a space, -30 for the first character and -1 are better than -2, -20, -20 and -20."""
    more = {"?a": (-20, 1), "b": (-20, 1), "c": (-20, 1), "abc": (-1, 1), "<x>": (-1000, 4)}
    lists = {
        "tokens": [*WORDS["tokens"], *more],
        "scores": np.float32([*WORDS["scores"], *(score for score, _ in more.values())]),
        "token_type": np.int32([*WORDS["token_type"], *(kind for _, kind in more.values())]),
    }
    assert words(**lists).encode("?abc<x>") == [4, 2, 11, 12, 1]


@pytest.mark.parametrize(
    ("change", "words_of_error"),
    [
        ({"scores": WORDS["scores"][:5]}, "5 scores for 8 tokens"),
        ({"scores": None}, "no metadata 'tokenizer.ggml.scores'"),
        ({"scores": np.float32([np.nan] * 8)}, "not a finite number"),
        ({"token_type": np.int32([5] * 8)}, "damaged"),
        ({"token_type": np.int32([3] * 8)}, "damaged"),
        ({"precompiled_charsmap": np.uint8([9, 0, 0, 0, 1])}, "damaged"),
        ({"precompiled_charsmap": np.uint8([*character_map({"a": "b" * 257})])}, "by more than 256 bytes"),
    ],
)
def test_damaged_tokenizers(change: dict[str, Any], words_of_error: str) -> None:
    with pytest.raises(ModelError, match=words_of_error):
        words(**change)


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("t5")
    random_sequence_oracle("t5_1.1", **FAR).save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    ("key", "value", "words_of_error"),
    [
        ("block_count", 5, "promises"),
        ("block_count", 2**31, "num_hidden_layers"),
        ("block_count", 9_999, "promises"),
        ("decoder_block_count", 4, "promises"),
        ("decoder_block_count", 0, "num_decoder_layers"),
        ("decoder_block_count", 2**31, "num_decoder_layers"),
        ("decoder_block_count", 9_999, "promises"),
        ("decoder_start_token_id", VOCAB, "decoder_start_token_id"),
        ("decoder_start_token_id", 2**32 - 1, "decoder_start_token_id"),
        ("attention.relative_buckets_count", 16, "relative_attention_bias"),
        ("attention.relative_buckets_count", 2**31, "relative_attention_num_buckets"),
        ("attention.relative_buckets_count", 0, "relative_attention_num_buckets"),
        ("attention.relative_buckets_count", None, "no metadata t5.attention.relative_buckets_count"),
        ("attention.key_length", 2**31, "head"),
        ("attention.head_count", 2, "should be"),
        ("attention.head_count", 0, "head_count is 0"),
        ("feed_forward_length", 2**31, "intermediate_size"),
        ("feed_forward_length", 79, "should be"),
        ("embedding_length", 2**20, "promises"),
    ],
)
def test_damaged_metadata(t5: Path, tmp_path: Path, key: str, value: int | None, words_of_error: str) -> None:
    def edit(writer: GGUFWriter) -> None:
        changed = writer.kv_data[0].pop(f"t5.{key}")
        if value is not None:
            writer.kv_data[0][f"t5.{key}"] = replace(changed, value=value)

    path = write(tmp_path / "model.gguf", t5, edit=edit)
    with pytest.raises(ModelError, match=words_of_error) as error:
        load_model(open_checkpoint(path), "float32")
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    "name",
    [
        "token_embd", "enc.output_norm", "dec.output_norm", "enc.blk.0.attn_rel_b", "dec.blk.0.attn_rel_b",
        "enc.blk.3.attn_q", "dec.blk.2.cross_attn_v", "dec.blk.1.cross_attn_norm", "enc.blk.0.ffn_gate",
        "dec.blk.0.ffn_gate", "dec.blk.2.ffn_down",
    ],
)  # fmt: skip
def test_missing_tensors(t5: Path, tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "model.gguf", t5, without=f"{name}.weight")
    with pytest.raises(ModelError, match="tensor"):
        load_model(open_checkpoint(path), "float32")


def test_tensors_that_are_not_known(t5: Path, tmp_path: Path) -> None:
    for name in ("enc.blk.0.attn_gate.weight", "dec.blk.x", "enc.", "dec.cls.weight"):
        path = write(
            tmp_path / "model.gguf",
            t5,
            edit=lambda writer, name=name: writer.add_tensor(name, np.ones(2, np.float32)),  # type: ignore[misc]
        )
        with pytest.raises(ModelError, match="has no tensor"):
            load_model(open_checkpoint(path), "float32")


def test_statistics_for_quantizing_are_refused_as_no_model(tmp_path: Path) -> None:
    path = tmp_path / "m.imatrix.gguf"
    writer = GGUFWriter(path, "")
    writer.kv_data = [{}]  # such files name no architecture
    writer.add_string("general.type", "imatrix")
    writer.add_tensor("blk.0.attn_q.weight.counts", np.ones(1, np.float32))
    for write_part in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
    ):
        write_part()
    writer.close()
    with pytest.raises(ModelError, match=r"m\.imatrix\.gguf is of the type 'imatrix', so it holds no model"):
        open_checkpoint(path)


def test_an_encoder_alone_is_refused(t5: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", t5, arch="t5encoder")
    with pytest.raises(ModelError, match="the encoder of a T5 alone, which writes no answers"):
        open_checkpoint(path)
