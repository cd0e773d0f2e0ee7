"""The bundled model in engines that share its weights and its tokenizer.

Loading them takes longer than many tests.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from soothsay import LLM
from soothsay.model.weights.checkpoint import SafetensorsCheckpoint


@cache
def _loaded(dtype: str, kv_dtype: str, max_context: int | None) -> LLM:
    numbers = {"kv_dtype": kv_dtype, "max_context": max_context, "kv_tokens": 256}
    return LLM("sibyl", dtype=dtype, drafter="none", **numbers)  # type: ignore[arg-type]


def bundled(dtype: str, max_context: int | None = None, kv_dtype: str = "auto", **options: Any) -> LLM:
    """`LLM("sibyl", dtype=dtype, **options)`. Its model belongs to others too, and must not be changed."""
    first = _loaded(dtype, kv_dtype, max_context)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("soothsay.llm.load_model", lambda *_, **__: first.model)
        patch.setattr(SafetensorsCheckpoint, "tokenizer", lambda _: first.tokenizer)
        return LLM("sibyl", dtype=dtype, max_context=max_context, **options)  # type: ignore[arg-type]
