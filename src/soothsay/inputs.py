"""What callers of `LLM` may give: one prompt or many, and parameters for all or for each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
from torch import Tensor

from soothsay.core.params import SamplingParams
from soothsay.errors import RequestError

Prompt = str | Sequence[int] | np.ndarray[Any, np.dtype[Any]] | Tensor
"""Text, or token ids: a sequence or an array with one dimension."""

EXPECTED = "give text, a sequence of token ids (integers), or a list of such prompts"


def listed(prompts: object) -> tuple[list[Any], bool]:
    """The prompts in a list, and whether they were one prompt.

    The prompts of a list are not checked. Raises `TypeError` for what is neither a prompt nor a collection.
    """
    if isinstance(prompts, str):
        return [prompts], True
    items = _items(prompts)
    return ([items], True) if items and all(map(_is_id, items)) else (items, False)


def token_ids(prompt: object) -> list[int]:
    """The token ids of a prompt that is not text. Raises `TypeError` if it has anything else."""
    ids = _items(prompt)
    for one in ids:
        if not _is_id(one):
            raise TypeError(f"{one!r:.40} is not a token id: {EXPECTED}")
    return list(map(int, ids))


def for_each(values: Any, count: int, name: str) -> Sequence[Any]:
    """One value for each of `count` prompts. `values` is one for all prompts, or a list or tuple.

    Raises `RequestError` for a list of another length.
    """
    if not isinstance(values, list | tuple):
        return [values] * count
    if len(values) != count:
        many = "prompt" if count == 1 else "prompts"
        raise RequestError(f"{len(values)} {name} for {count} {many}: give one for all, or one for each")
    return values


def check_params(params: object) -> None:
    """Raise `TypeError` for parameters that are not `SamplingParams`."""
    if not isinstance(params, SamplingParams):
        fields = "**params" if isinstance(params, Mapping) else "temperature=0"
        raise TypeError(f"params must not be a {type(params).__name__}: write SamplingParams({fields})")


def _items(given: object) -> list[Any]:
    """The items of an array or a collection that has an order. Raises `TypeError` for anything else."""
    if isinstance(given, np.ndarray | Tensor):
        given = given.tolist()
    if not isinstance(given, Iterable) or isinstance(
        given, str | bytes | bytearray | Mapping | set | frozenset
    ):
        raise TypeError(f"a prompt must not be a {type(given).__name__}: {EXPECTED}")
    return list(given)


def _is_id(item: object) -> bool:
    return type(item) is int or (isinstance(item, Integral) and not isinstance(item, bool))
