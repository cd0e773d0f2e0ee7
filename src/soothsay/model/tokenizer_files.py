"""Writes a tokenizer as the files of a Hugging Face directory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from soothsay.model.generation_config import FILE as GENERATION_CONFIG
from soothsay.tokenizer import Tokenizer


def write_tokenizer(directory: Path, tokenizer: Tokenizer, eos_ids: Sequence[int]) -> None:
    """Write what `Tokenizer.from_directory` reads, and the tokens that end an answer.

    The files are tokenizer.json, tokenizer_config.json with the chat templates and the special tokens, and
    generation_config.json.
    """
    tokenizer.backend.save(str(directory / "tokenizer.json"))
    settings: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special}
    if set(tokenizer.templates) == {"default"}:
        settings["chat_template"] = tokenizer.templates["default"]
    elif tokenizer.templates:
        settings["chat_template"] = [
            {"name": name, "template": source} for name, source in tokenizer.templates.items()
        ]
    _write(directory / "tokenizer_config.json", settings)
    if eos_ids:
        _write(directory / GENERATION_CONFIG, {"eos_token_id": list(eos_ids)})


def _write(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
