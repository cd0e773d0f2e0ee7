"""Splits a file of conversations into those to train on and those held out, by a hash of what is asked.

    python split_prompts.py conversations.jsonl.gz train.jsonl.gz held-out.jsonl.gz

One conversation of sixteen is held out: that whose first user message has a SHA-256 that begins with a byte
divisible by 16. So a prompt is on the same side in every file, whoever splits it. The order stays.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
from pathlib import Path


def held_out(messages: list[dict[str, str]]) -> bool:
    """Whether a conversation is held out."""
    asked = next((message["content"] for message in messages if message["role"] == "user"), "")
    return hashlib.sha256(asked.encode()).digest()[0] % 16 == 0


def split(source: Path, kept: Path, held: Path) -> tuple[int, int]:
    """Write both parts, and return their numbers of conversations."""
    lines: tuple[list[str], list[str]] = [], []
    with gzip.open(source, "rt", encoding="utf-8") as file:
        for line in file:
            lines[held_out(json.loads(line)["messages"])].append(line)
    for path, part in zip((kept, held), lines, strict=True):
        with gzip.GzipFile(path, "wb", mtime=0) as out:
            out.write("".join(part).encode())
    return len(lines[0]), len(lines[1])


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    print(*split(*map(Path, sys.argv[1:])))
