"""`soothsay datastore build | info`."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from soothsay import LLM
from soothsay.cli.app import app
from soothsay.drafters.lookup import text_store
from soothsay.drafters.lookup.text_store import Datastore

CHAT = [
    {"role": "user", "content": "Where does the river rise?"},
    {"role": "assistant", "content": "In the hills."},
]


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["datastore", *map(str, args)], env={"COLUMNS": "300"})


@pytest.fixture
def texts(tmp_path: Path) -> list[Path]:
    chat, text = tmp_path / "chat.jsonl.gz", tmp_path / "text.txt"
    chat.write_bytes(gzip.compress((json.dumps({"messages": CHAT}) + "\n").encode()))
    text.write_text("Once upon a time there was a fox.")
    return [chat, text]


def test_it_holds_texts_and_conversations(texts: list[Path], tmp_path: Path, sibyl: LLM) -> None:
    out = tmp_path / "new" / "rest.store"
    built = run("build", "sibyl", *texts, "--out", out)
    assert built.exit_code == 0, built.output
    assert sibyl.tokenizer is not None
    text = sibyl.tokenizer.encode(texts[1].read_text())
    chat = sibyl.tokenizer.encode(sibyl.tokenizer.render(CHAT, add_generation_prompt=False), special=False)
    count = len(text) + len(chat)
    assert f"{count} tokens in 2 documents" in built.stdout
    store = Datastore(out)
    assert (store.num_tokens, store.num_documents) == (count, 2)
    for document in (text, chat):
        matches = store.find(np.array(document[:6]), 1)
        assert matches.lengths == [6]
        assert store.continuations(matches, 99) == [document[6:]]
    result = run("info", out, "--model", "sibyl")
    assert result.exit_code == 0, result.output
    told = " ".join(result.stdout.split())
    for fact in (
        f"{count} tokens in 2 documents",
        f"8,192 tokens, {len({*text, *chat})} of which",
        f"✓ sibyl: --drafter 'rest(store={out})'",
        store.identity,
    ):
        assert fact in told
    assert sibyl.generate("Once upon", drafter=f"rest(store={out})").stats.drafted > 0


def test_what_cannot_be_done_ends_with_one_line(texts: list[Path], tmp_path: Path, shared: Path) -> None:
    out = tmp_path / "rest.store"
    for args, message in [
        (("build", "sibyl", texts[1], "-o", texts[0]), "exists already, and is not a datastore"),
        (("build", "sibyl", texts[1], "-o", texts[1] / "x"), "cannot be written"),
        (("build", "nobody", texts[1], "-o", out), "no model at 'nobody'"),
        (("info", texts[1]), "is no datastore, or is damaged"),
        (("info", tmp_path / "gone"), "gone cannot be read"),
    ]:
        result = run(*args)
        assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1), result.output
        assert message in result.stderr
    assert run("build", "sibyl", *texts, "-o", out).exit_code == 0
    result = run("info", out, "-m", shared / "data" / "stories260K.gguf")
    assert (result.exit_code, "was built with another tokenizer than that of" in result.stderr) == (2, True)


def test_an_interrupt_leaves_no_half_file(
    texts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(text_store, "sorted_suffixes", interrupted)
    assert run("build", "sibyl", *texts, "-o", tmp_path / "rest.store").exit_code == 130
    assert sorted(tmp_path.iterdir()) == sorted(texts)
