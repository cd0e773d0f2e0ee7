"""Tokenizers in other forms than tokenizer.json cut texts as the packages that made them."""

from __future__ import annotations

import json
import random
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers
from transformers import AutoTokenizer
from vocabulary_oracle import ALPHABET, CORPUS, KEPT, texts

from soothsay.errors import ModelError
from soothsay.tokenizer import Tokenizer

ORACLE: dict[str, Any] = json.loads(KEPT.read_text("utf-8"))
PIECES = [name for name in ORACLE if name != "tekken"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}<|user|>{{ m.content }}{{ eos_token }}{% endfor %}"


def write(folder: Path, name: str, **settings: Any) -> Path:
    """A folder with one of the kept tokenizers."""
    model = ORACLE[name]["model"]
    if name == "tekken":
        (folder / "tekken.json").write_text(json.dumps(model))
    else:
        (folder / "tokenizer.model").write_bytes(b64decode(model))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("name", ORACLE)
def test_texts_are_cut_as_by_the_package(tmp_path: Path, name: str) -> None:
    tokenizer = Tokenizer.from_directory(write(tmp_path, name))
    special = [text for text in ORACLE[name]["cut"] if "</s>" in text or "[INST]" in text]
    assert special
    for text, ids in ORACLE[name]["cut"].items():
        if text not in special:  # there, ours are found in the text
            assert tokenizer.encode(text, special=False) == ids, text
            assert tokenizer.decode(ids) == ORACLE[name]["said"][text].replace(" \u2047 ", ""), text


def test_special_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(write(tmp_path, "like Llama"))
    assert tokenizer.special == {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    ids = tokenizer.encode("The</s>The", special=True)
    assert (ids[0], ids.count(2)) == (1, 1)
    assert tokenizer.decode(ids) == "The The"  # a space is put before each part, and dropped at the start
    tokenizer = Tokenizer.from_directory(write(tmp_path, "like Llama", legacy=False, add_bos_token=False))
    assert tokenizer.decode(tokenizer.encode("The</s>The")) == "TheThe"
    assert tokenizer.encode("The") == ids[1 : ids.index(2)]
    tokenizer = Tokenizer.from_directory(write(tmp_path, "like Gemma", add_eos_token=True))
    assert tokenizer.special["pad_token"] == "<pad>"
    assert tokenizer.encode("")[:: len(tokenizer.encode("")) - 1] == [2, 1]
    assert tokenizer.decode(tokenizer.encode("[INST]a\n\nb  c")) == "[INST]a\n\nb  c"
    assert len(tokenizer.encode("\n\n  [INST]", special=False)) == 3
    (tmp_path / "tokenizer.model").unlink()
    tokenizer = Tokenizer.from_directory(write(tmp_path, "tekken"))
    assert tokenizer.encode("[INST]</s>") == [1, 3, 2]
    assert tokenizer.decode([1, 3, 2]) == ""
    assert len(tokenizer) == 330


def test_special_tokens_of_newer_tekken(tmp_path: Path) -> None:
    model = {**ORACLE["tekken"]["model"]}
    model["special_tokens"] = [
        {"rank": 1, "token_str": "<s>", "is_control": True},
        {"rank": 7, "token_str": "[THINK]", "is_control": True},
    ]
    (tmp_path / "tekken.json").write_text(json.dumps(model))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.encode("[THINK]<SPECIAL_19>[INST]")[:3] == [1, 7, 19]
    assert len(tokenizer.encode("[INST]")) > 2


def test_added_tokens_and_a_chat_template(tmp_path: Path) -> None:
    """As Phi-3's folder has them: a token after the others, one in the place of another, one for tools."""
    size = len(Tokenizer.from_directory(write(tmp_path, "like Llama")))
    added = {
        "2": {"content": "<|end|>", "special": True},
        str(size): {"content": "<|user|>", "special": True, "rstrip": True},
        str(size + 3): {"content": "<tool>", "special": False},
    }
    write(tmp_path, "like Llama", added_tokens_decoder=added, eos_token="<|end|>", chat_template=TEMPLATE)
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert len(tokenizer) == size + 4
    ids = tokenizer.encode_chat([{"role": "user", "content": "  The"}])
    assert (ids[0], ids[1], ids[-1]) == (1, size, 2)
    assert ids[2:-1] == tokenizer.encode("The", special=False)  # white space after <|user|> is a part of it
    assert tokenizer.decode(ids) == "The"
    assert tokenizer.decode(tokenizer.encode("<tool>")) == "<tool>"
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<older>": size + 2}))
    assert Tokenizer.from_directory(tmp_path).encode("<older>", special=False) == [size + 2]


def test_a_template_in_the_file_of_a_processor(tmp_path: Path) -> None:
    write(tmp_path, "tekken")
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.render([{"role": "user", "content": "hi"}]) == "hi"
    assert tokenizer.special["eos_token"] == "<end>"


@pytest.fixture(scope="module", params=["GPT2Tokenizer", "Qwen2TokenizerFast", None])
def vocab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with vocab.json and merges.txt."""
    folder = tmp_path_factory.mktemp("vocab")
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
    )
    backend.train_from_iterator(CORPUS * 10, trainer)
    backend.model.save(str(folder))
    size = backend.get_vocab_size()
    added = {str(size): {"content": "<|im_start|>", "special": True}}
    settings = {"eos_token": "<|im_start|>", "added_tokens_decoder": added, "add_bos_token": False}
    if request.param is not None:
        settings["tokenizer_class"] = request.param
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    return folder


def test_vocab_and_merges_are_read_as_by_transformers(vocab: Path) -> None:
    theirs, ours = AutoTokenizer.from_pretrained(vocab), Tokenizer.from_directory(vocab)
    rng = random.Random(1)
    more = ["".join(rng.choices(ALPHABET + "A\u0301WE'LL", k=30)) for _ in range(100)]
    for text in [*texts(), *more, "<|im_start|>user\nHi<|endoftext|>"]:
        assert ours.encode(text) == theirs(text)["input_ids"], text
    assert ours.encode("<|im_start|>") == [len(ours) - 1]
    assert ours.decode([len(ours) - 1, *ours.encode("river")]) == "river"


def test_which_files_were_looked_for(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(
        ModelError, match=r"tokenizer\.json, tokenizer\.model, .* merges\.txt, and has vocab\.json"
    ):
        Tokenizer.from_directory(tmp_path)


def refused(folder: Path, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        Tokenizer.from_directory(folder)


def test_damaged_pieces(tmp_path: Path) -> None:
    whole = b64decode(ORACLE["like Llama"]["model"])
    file = tmp_path / "tokenizer.model"
    rng = random.Random(0)
    for _ in range(150):
        damaged = bytearray(whole[: rng.randrange(len(whole))] if rng.random() < 0.5 else whole)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged) or 1) :][:1] = b""
            if damaged:
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        file.write_bytes(damaged)
        try:
            tokenizer = Tokenizer.from_directory(tmp_path)
        except ModelError as error:
            assert "tokenizer.model cannot be read" in str(error)  # noqa: PT017
        else:
            tokenizer.decode(tokenizer.encode("The river"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no pieces"),
        (b"IQ== 0\nIg== 1\n", r"cannot be read: .*tiktoken's list of tokens.* Add the tokenizer\.json"),
        (b"aGVsbG8 0\r\nIg== 1\r\n", "tiktoken's list of tokens"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "ends after the message"),
        (b"\x0a\xff", "an integer without an end"),
        (b"\xff" * 20, "an integer without an end"),
        (b"\x0a\x07\x0a\x01a\x15\x00\x00\xc0\x7f", "ends after the message"),
        (b"\x0a\x08\x0a\x01a\x15\x00\x00\xc0\x7f", "score of piece 0 is not a number"),
        (b"\x0a\x03\x0a\x01a" * 2, "the same text"),
        (b"\x0a\x03\x0a\x01a\x12\x02\x18\x03", "words or characters"),
        (b"\x0a\x03\x0a\x01a\x12\x03\xc0\x01\x01", "spaces after words"),
        (b"\x0a\x02\x08\x01", "a number where it should have bytes"),
        (b"\x0a\x83\x10\x0a\x80\x10" + b"a" * 2048, "2,048 characters"),
    ],
)
def test_hostile_pieces(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    refused(tmp_path, words)


def test_too_many_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("soothsay.vocabulary.sentencepiece.MAX_PIECES", 100)
    refused(write(tmp_path, "like Llama"), "more than 100 pieces")
    with (tmp_path / "tokenizer.model").open("wb") as file:
        file.truncate(2**25 + 1)
    refused(tmp_path, "is the limit")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"config": None}, "no 'config'"),
        ({"vocab": None}, "should be lists"),
        ({"vocab": [{"rank": 0}]}, "a token has no 'token_bytes'"),
        ({"vocab": [{"rank": 0, "token_bytes": "?"}]}, "cannot be read"),
        ({"vocab": []}, "ranks are not those"),
        ({"special_tokens": [{"rank": 20, "token_str": "x"}]}, "do not fit 20 ids"),
        ({"special_tokens": [{"rank": True, "token_str": "x"}]}, "a token has no 'rank'"),
        ({"special_tokens": [{"rank": 0, "token_str": "a" * 2000}]}, "2,000 characters"),
        ({"config": {"pattern": "(", "default_vocab_size": 330, "default_num_special_tokens": 20}}, "read"),
        ({"config": {"pattern": "a" * 5000}}, "'pattern' is not a text"),
        ({"config": {"pattern": "a", "default_vocab_size": 2**40}}, "'default_vocab_size' is"),
    ],
)
def test_hostile_tekken(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    (tmp_path / "tekken.json").write_text(json.dumps({**ORACLE["tekken"]["model"], **changes}))
    refused(tmp_path, words)


@pytest.mark.parametrize(
    ("ids", "merges", "settings", "words"),
    [
        ({"a": "0"}, "", {}, "does not give an id"),
        ({"a": -1}, "", {}, "does not give an id"),
        ({}, "", {}, "no tokens"),
        ({"a": 2**40}, "", {}, "vocab.json cannot be read"),
        ({"a": 0, "b": 1}, "a b", {}, "cannot be read"),  # there is no "ab"
        ({"a": 0, "b": 1, "ab": 2}, "a  b", {}, "which is not two tokens"),
        ({"a": 0}, "a", {}, "which is not two tokens"),
        ({"a": 0}, "", {"tokenizer_class": "Magic"}, "'Magic' is not known"),
        ({"a": 0}, "", {"added_tokens_decoder": {"x": {"content": "y"}}}, "no token at 'x'"),
        ({"a": 0}, "", {"added_tokens_decoder": {"1": {"content": ""}}}, "not a text"),
        ({"a": 0}, "", {"added_tokens_decoder": {"9" * 5000: {"content": "y"}}}, "is not from 0 to"),
        ({"a": 0}, "", {"added_tokens_decoder": []}, None),
        ({"a": 0}, "", {"added_tokens_decoder": [1]}, "should be an object"),
        ({"a": 0, "b": 1}, "", {"added_tokens_decoder": {"1": {"content": "a"}}}, "the same text"),
    ],
)
def test_hostile_vocab(
    tmp_path: Path, ids: dict[str, Any], merges: str, settings: dict[str, Any], words: str | None
) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps(ids))
    (tmp_path / "merges.txt").write_text(merges)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    if words is not None:
        refused(tmp_path, words)
    else:
        Tokenizer.from_directory(tmp_path)
