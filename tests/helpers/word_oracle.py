"""How texts are cut into words, by the name of the pre-tokenizer (`tokenizer.ggml.pre`).

The file has four parts. `names` are all that llama.cpp knows. `texts` are short and nasty. `llama.cpp` is
what its program `llama-tokenize` does; `python tests/helpers/word_oracle.py PROGRAM [NAME...]` writes it
anew, half a minute a name. `models` has the texts that llama.cpp cuts otherwise than the models' own
expressions do. tiktoken agreed on those of tekken, gpt-4o and kimi-k2, and the `tokenizers` library with
the published expression of tiny_aya; the others are soothsay's result, kept. In expressions like GPT-4o's,
llama.cpp knows no case beyond ASCII and no marks. It does not compose (NFC), and takes white space beyond
ASCII for a vertical tab.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gguf import GGUFWriter

from soothsay.vocabulary.byte_level import byte_text

KEPT = Path(__file__).with_name("word_oracle.json")
CUT = "\u2502"
BYTES = {byte_text(bytes([byte])): byte for byte in range(256)}

NAMES = (
    *("gpt-2", "smollm", "command-r", "llama-bpe", "dbrx", "glm4", "minicpm5", "qwen2", "megrez", "qwen35"),
    *("seed-coder", "tekken", "gpt-4o", "kimi-k2", "deepseek-llm", "deepseek-coder", "deepseek-v3"),
    *("jais-2", "laguna", "ufakzeka", "bailingmoe", "exaone-moe", "youtu", "tiny_aya", "spark2_5", "falcon"),
    *("bloom", "viking"),
)
"""One name of each rule."""

_FILE = json.loads(KEPT.read_text("utf-8"))
LLAMA_NAMES: list[list[str]] = _FILE["names"]
"""The names that llama.cpp 11434 knows, those with the same expressions together."""

TEXTS: list[str] = _FILE["texts"]


def vocabulary(texts: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens and merges with which each word of `texts` becomes one token, wherever texts are cut.

    All parts of the texts are tokens, and all pairs of neighbouring parts merge, the shortest first.
    """
    spelled = [[byte_text(char.encode()) for char in text] for text in texts]
    parts = {tuple(chars[i:j]) for chars in spelled for j in range(len(chars) + 1) for i in range(j)}
    merges = [(char[:i], char[i]) for (char, *more) in sorted(parts) if not more for i in range(1, len(char))]
    for part in sorted(parts, key=lambda part: (len(part), part)):
        merges += [("".join(part[:i]), "".join(part[i:])) for i in range(1, len(part))]
    return list(dict.fromkeys([*BYTES, *(left + right for left, right in merges)])), list(
        dict.fromkeys(merges)
    )


def write_vocabulary(path: Path, name: str, tokens: list[str], merges: list[tuple[str, str]]) -> None:
    """Write a GGUF file without weights."""
    writer = GGUFWriter(path, "llama")
    for add, value in (
        (writer.add_block_count, 1),
        (writer.add_context_length, 64),
        (writer.add_embedding_length, 32),
        (writer.add_feed_forward_length, 64),
        (writer.add_head_count, 2),
    ):
        add(value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges([f"{left} {right}" for left, right in merges])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_cuts(program: str, name: str) -> list[str]:
    """The texts with `CUT` between words."""
    tokens, merges = vocabulary(TEXTS)
    cuts = []
    with tempfile.TemporaryDirectory() as folder:
        model, file = Path(folder, "vocabulary.gguf"), Path(folder, "text")
        write_vocabulary(model, name, tokens, merges)
        for text in TEXTS:
            file.write_bytes(text.encode())
            options = ["--ids", "--no-bos", "--no-parse-special", "--log-disable"]
            command = [program, "-m", str(model), "-f", str(file), *options]
            done = subprocess.run(command, capture_output=True, check=True, text=True)
            cuts.append(CUT.join(plain(tokens[i]) for i in json.loads(done.stdout)))
    return cuts


def plain(spelled: str) -> str:
    """The text of a word that has a character for each byte."""
    return bytes(BYTES[char] for char in spelled).decode()


if __name__ == "__main__":
    kept = json.loads(KEPT.read_text("utf-8"))
    kept["llama.cpp"] |= {name: llama_cuts(sys.argv[1], name) for name in sys.argv[2:] or NAMES}
    KEPT.write_text(json.dumps(kept, ensure_ascii=False, indent=0) + "\n", "utf-8")
