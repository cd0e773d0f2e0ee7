"""Marian's tokenizers: the pieces of `source.spm`, with the ids of `vocab.json`."""

from __future__ import annotations

import json
import random
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest
from vocabulary_oracle import KEPT

from soothsay.errors import ModelError
from soothsay.tokenizer import Tokenizer
from soothsay.vocabulary.sentencepiece import SentencePieceModel

UNIGRAM: dict[str, Any] = json.loads(KEPT.read_text("utf-8"))["the most probable pieces"]
PIECES = SentencePieceModel.parse(b64decode(UNIGRAM["model"])).texts
TARGET = ("\u2581the\u2581river", "\u2581bridge\u2581over", ">>deu<<")


def write(folder: Path, **changed: int) -> dict[str, int]:
    """The ids of a vocabulary: those of special tokens, of the pieces in another order, and of targets."""
    others = [piece for piece in PIECES if piece not in ("<s>", "</s>", "<unk>")]
    random.Random(0).shuffle(others)
    order = ["</s>", "<unk>", *others, *TARGET, "<pad>"]
    ids = {text: number for number, text in enumerate(order)}
    (folder / "source.spm").write_bytes(b64decode(UNIGRAM["model"]))
    (folder / "vocab.json").write_text(json.dumps(ids | changed))
    return ids


def test_pieces_have_the_ids_of_the_vocabulary(tmp_path: Path) -> None:
    ids = write(tmp_path)
    tokenizer = Tokenizer.from_directory(tmp_path)
    for text, cut in UNIGRAM["cut"].items():
        if "</s>" in text:  # there, ours is found in the text
            continue
        own = tokenizer.encode(text)
        assert own == [*(ids[PIECES[piece]] for piece in cut), ids["</s>"]], text
        assert tokenizer.decode(own) == UNIGRAM["said"][text].replace(" \u2047 ", ""), text


def test_tokens_of_targets(tmp_path: Path) -> None:
    ids = write(tmp_path)
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.encode(">>deu<< the river") == [ids[">>deu<<"], *tokenizer.encode("the river")]
    assert tokenizer.decode([ids[TARGET[0]], ids["<pad>"], ids[TARGET[1]]]) == "the river bridge over"
    assert tokenizer.special == {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


@pytest.mark.parametrize("change", [{"<pad>": 999}, {"<unk>": -1}, {"</s>": 1}])
def test_ids_that_cannot_be(tmp_path: Path, change: dict[str, int]) -> None:
    write(tmp_path, **change)
    with pytest.raises(ModelError, match=r"source\.spm cannot be read"):
        Tokenizer.from_directory(tmp_path)
