"""The answers that heads are trained on have no prompt that anything is measured on."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "training"
ANSWERS = sorted(FOLDER.glob("*/answers*.jsonl.gz"))

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the package is tested without its training data")


def conversations(path: Path) -> Iterator[list[dict[str, Any]]]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["messages"]


def asked(path: Path) -> set[str]:
    return {next(m["content"] for m in one if m["role"] == "user") for one in conversations(path)}


@pytest.mark.parametrize("path", ANSWERS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_answers_are_whole_and_to_no_held_out_prompt(path: Path) -> None:
    held_out = asked(path.parent / "held-out.jsonl.gz")
    assert len(held_out) > 1000
    for messages in conversations(path):
        assert messages[-1]["role"] == "assistant"
        assert all(message["content"].strip() or message["role"] == "assistant" for message in messages)
    assert not held_out & asked(path)


def test_a_prompt_is_on_the_same_side_in_every_file(tmp_path: Path) -> None:
    texts = [f"What is {n} times {n}?" for n in range(400)]
    sides: list[dict[str, int]] = []
    for order in (texts, texts[::-1]):
        source, parts = tmp_path / "all.jsonl.gz", [tmp_path / "kept.jsonl.gz", tmp_path / "held.jsonl.gz"]
        lines = [json.dumps({"messages": [{"role": "user", "content": text}]}) for text in order]
        source.write_bytes(gzip.compress("\n".join(lines).encode()))
        subprocess.run([sys.executable, FOLDER / "split_prompts.py", source, *parts], check=True)
        sides.append({text: side for side, part in enumerate(parts) for text in asked(part)})
    assert sides[0] == sides[1]
    assert len(sides[0]) == 400
    assert 10 < sum(sides[0].values()) < 50
