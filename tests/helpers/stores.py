"""A datastore for the bundled model: a few texts."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

from soothsay.drafters.lookup.text_store import write_datastore
from soothsay.model.weights.checkpoint import open_checkpoint

TEXTS = (
    "The river rises in the hills north of the town and flows through farmland.",
    "In spring the river floods the low meadows, and farmers move their cattle to higher ground.",
    "A man is standing on a ladder and repairs the roof. The answer is 72.",
    "Sure! Here is a Python function that adds two numbers:\n\ndef add(a, b):\n    return a + b\n",
    "Hello! How can I help you today?",
)


@cache
def tiny_store(model: str = "sibyl") -> Path:
    """Write the datastore to a file, which is removed when the process ends."""
    directory = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    tokenizer = open_checkpoint(model).tokenizer()
    assert tokenizer is not None
    write_datastore(directory / "rest.store", [np.array(tokenizer.encode(text)) for text in TEXTS], tokenizer)
    return directory / "rest.store"
