"""What the packages `sentencepiece` and `mistral-common` make of texts, with small tokenizers.

`python tests/helpers/vocabulary_oracle.py` writes it to a file anew, and needs both packages and `tiktoken`.
"""

from __future__ import annotations

import io
import json
import random
import tempfile
from base64 import b64encode
from pathlib import Path
from typing import Any

KEPT = Path(__file__).with_name("vocabulary_oracle.json")

CORPUS = [
    "The river runs below the old bridge, and the town sleeps.",
    "A bridge is a road over a river; a road is a bridge over land.",
    "Don't count 1234 bridges, we'll count 98 rivers: 3.14 each!",
    "Über die Brücke führt ein Weg. naïve café",
    "def bridge(river):\n    return river + 1\n",
]
ALPHABET = "the river brdg äüé漢🙂 \n\t ,.0123T'ﬁ"


def texts() -> list[str]:
    """Texts to cut: lines like those of the training, and random ones."""
    rng = random.Random(0)
    fixed = ["", " ", "  two  spaces ", "the [INST] river</s>", "a\n\n b", "ﬁne"]
    return [*CORPUS, *fixed, *("".join(rng.choices(ALPHABET, k=rng.randint(1, 40))) for _ in range(60))]


def sentencepiece_model(**options: Any) -> dict[str, Any]:
    """A small model of SentencePiece, and what it makes of the texts."""
    from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

    written = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 20), model_writer=written, minloglevel=2, **options
    )
    model = SentencePieceProcessor(model_proto=written.getvalue())
    cut = {text: model.encode(text) for text in texts()}
    return {
        "model": b64encode(written.getvalue()).decode(),
        "cut": cut,
        "said": {text: model.decode(ids) for text, ids in cut.items()},
    }


def tekken_model() -> dict[str, Any]:
    """A small tekken.json, and what mistral-common makes of the texts."""
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer
    from tiktoken._educational import bpe_train

    pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ranks = bpe_train("\n".join(CORPUS), 320, pattern, visualise=None)
    config = {"pattern": pattern, "num_vocab_tokens": 320, "default_vocab_size": 330}
    content = {
        "config": {**config, "default_num_special_tokens": 20, "version": "v7"},
        "vocab": [
            {"rank": rank, "token_bytes": b64encode(token).decode(), "token_str": None}
            for token, rank in ranks.items()
        ],
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tekken.json"
        file.write_text(json.dumps(content))
        model = Tekkenizer.from_file(file)
    cut = {text: model.encode(text, bos=False, eos=False) for text in texts()}
    return {"model": content, "cut": cut, "said": {text: model.decode(ids) for text, ids in cut.items()}}


def main() -> None:
    """Write the file."""
    with tempfile.TemporaryDirectory() as folder:
        rules = Path(folder) / "rules.tsv"
        rules.write_text("FB01\t66 69\n54\t74\n")  # "ﬁ" becomes "fi", and "T" becomes "t"
        kept = {
            "like Llama": sentencepiece_model(
                model_type="bpe",
                vocab_size=360,
                byte_fallback=True,
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                split_digits=True,
            ),
            "like Gemma": sentencepiece_model(
                model_type="bpe",
                vocab_size=380,
                byte_fallback=True,
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                add_dummy_prefix=False,
                pad_id=0,
                eos_id=1,
                bos_id=2,
                unk_id=3,
                user_defined_symbols=["\n\n", "\u2581\u2581", "[INST]"],
            ),
            "pairs without bytes": sentencepiece_model(
                model_type="bpe", vocab_size=110, normalization_rule_tsv=str(rules)
            ),
            "the most probable pieces": sentencepiece_model(
                model_type="unigram", vocab_size=64, normalization_rule_tsv=str(rules)
            ),
            "tekken": tekken_model(),
        }
    KEPT.write_text(json.dumps(kept, ensure_ascii=False, separators=(",", ":")) + "\n", "utf-8")


if __name__ == "__main__":
    main()
