"""The tutorial runs from its first block to its last, in one folder, as a reader would do it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from test_docs import TUTORIAL, blocks_of, run


def test_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `sibyl` for `smollm2`, as the page allows. Python that begins with a name is a file."""
    monkeypatch.chdir(tmp_path)
    for block in blocks_of(TUTORIAL):
        text = block.text.replace("smollm2", "sibyl")
        if block.not_run:
            continue
        if block.tag != "python":
            run(replace(block, text=text))
            continue
        first, *_ = text.splitlines()
        if first.startswith("# "):
            Path(first.removeprefix("# ")).write_text(text)
        exec(compile(text, str(block), "exec"), {"__name__": "tutorial"})
