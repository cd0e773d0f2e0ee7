"""What users can configure. `EngineConfig` is the one home of the engine's numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from numbers import Integral, Real
from typing import Any, Literal, TypedDict, TypeVar, Unpack

from soothsay.errors import ModelError

F = TypeVar("F", bound=Callable[..., Any])

DType = Literal["auto", "float32", "bfloat16", "int8", "int4"]
"""What linear layers compute in. "auto": what the weights are stored in, if the machine is fast at it."""

KVDType = Literal["auto", "int8"]
"""How the KV pool keeps keys and values. "auto": so that rounding them costs no quality."""

UNITS = {"": 1, "b": 1} | {
    scale + unit: base**power
    for power, scale in enumerate("kmgt", 1)
    for unit, base in (("", 1024), ("ib", 1024), ("b", 1000))
}
"""Bytes of the units of sizes of memory, in lower case."""


def memory_size(size: int | str) -> int | float:
    """Read a size of memory: a whole number of bytes, or a share of the free memory from 0 to 1 as a float.

    "4GiB" and "4G" are 4 x 1024^3 bytes, "4GB" are 4 x 1000^3, and "50%" is half of what is free.

    Raises `ModelError` for anything else, for less than a byte, and for more than 100%.
    """
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?) ?([a-z]{0,3}|%)", str(size).strip().lower(), re.ASCII)
    number, unit = (float(found[1]), found[2]) if found else (0.0, "")
    if unit == "%" and 0 < number <= 100:
        return number / 100
    if (num_bytes := int(number * UNITS.get(unit, 0))) < 1:
        raise ModelError(
            f"{size!r} is no size of memory: give bytes, such as 4GiB or 500MB, or a share of the free "
            "memory, such as 50%, up to 100%"
        )
    return num_bytes


LEAST = {
    "max_context": 2,  # a prompt and an answer
    "kv_tokens": 1,
    "snapshot_bytes": 0,
    "block_size": 1,
    "max_requests": 1,
    "max_rows": 1,
    "max_tree": 1,
    "engines": 1,
}
"""The least values of the engine's whole numbers."""


def check_names(
    owner: str, given: Iterable[str], known: Collection[str], instead: Mapping[str, str] | None = None
) -> None:
    """Raise `TypeError` if `owner` has no option of a given name. It says which one is meant, or all.

    `instead`: what to do in place of options that are elsewhere.
    """
    for name in given:
        if name not in known:
            meant = get_close_matches(name, known, 1)
            hint = f"did you mean {meant[0]}?" if meant else f"it has {', '.join(known)}"
            raise TypeError(f"{owner} has no option {name!r}; {(instead or {}).get(name, hint)}")


def checks_names(instead: Mapping[str, str] | None = None) -> Callable[[F], F]:
    """Let a method, or a class when it is made, check the names of keywords with `check_names`."""

    def checked(made: Any) -> Any:
        if isinstance(made, type):
            made.__init__ = checked(made.__init__)  # type: ignore[misc]
            return made
        owner, known = made.__qualname__.removesuffix(".__init__"), [*signature(made).parameters][1:]

        @wraps(made)
        def call(*values: Any, **options: Any) -> Any:
            check_names(owner, options, known, instead)
            return made(*values, **options)

        return call

    return checked


class EngineOptions(TypedDict, total=False):
    """The numbers of `EngineConfig` as keywords of `LLM`."""

    max_context: int | None
    block_size: int
    kv_tokens: int | None
    kv_memory: int | str | None
    max_requests: int
    max_rows: int
    max_stall: float | None
    max_tree: int
    snapshot_bytes: int | None
    prefix_caching: bool
    learn: float
    learn_for_tenants: bool
    engines: int


@checks_names()
@dataclass(frozen=True)
class EngineConfig:
    """The engine's numbers. A None is derived from the model and the machine when the engine is built.

    Args:
        max_context: limit of tokens in one request, prompt and answer together. None: the model's own.
        block_size: tokens in one block of the KV pool. Small blocks let short prompts share prefixes and
            waste little; large blocks keep block tables short.
        kv_tokens: tokens that the KV pool holds for all requests together. None: what `kv_memory` holds.
        kv_memory: memory of the KV pool: bytes, such as 2**32 or "4GiB", or a share of the free memory, such
            as "50%". None: enough for `max_requests` full contexts, but no more than 25% (of a GPU's: 80%).
        max_requests: limit of requests in one step; the others wait. On a CPU 16 rows take about 1.3 times as
            long as one row, so more requests at a time would gain little.
        max_rows: limit of rows in one forward pass. Longer prompts are read in chunks.
        max_stall: limit of seconds for a step in which prompts are read: others answer, or come, meanwhile.
            Prefill chunks are cut to fit. None: no limit, for callers that wait for all answers together; a
            server sets one.
        max_tree: limit of nodes in a request's draft tree, the root included. A drafter may want fewer. On a
            CPU without AMX, a pass of 16 rows takes little longer than one of a single row. With AMX, larger
            trees gained nothing.
        snapshot_bytes: memory of the prefix cache for copies of states, in models with recurrent layers. A
            prompt continues from the last copy in the prefix that it shares. None: a sixteenth of the free
            memory, at most two copies for each of `max_requests`.
        prefix_caching: whether finished requests keep their KV until the memory is needed, and equal prefixes
            share it.
        learn: share of one core's time, 0 to 1, in which trained drafters learn from the target's answers. 0:
            they do not learn. Tokens do not depend on it.
        learn_for_tenants: whether drafters learn for each tenant apart. Otherwise they learn only from
            requests without a tenant.
        engines: limit of engines with this configuration that share the machine's memory.

    Raises:
        ModelError: a number cannot work.

    Example:
        >>> config = EngineConfig(max_context=1024)
        >>> config.with_options(max_requests=8).max_requests
        8
    """

    max_context: int | None = None
    block_size: int = 16
    kv_tokens: int | None = None
    kv_memory: int | str | None = None
    max_requests: int = 64
    max_rows: int = 512
    max_stall: float | None = None
    max_tree: int = 16
    snapshot_bytes: int | None = None
    prefix_caching: bool = True
    learn: float = 0.0
    learn_for_tenants: bool = False
    engines: int = 1

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            value, optional = getattr(self, name), self.__dataclass_fields__[name].default is None
            if value is None and optional:
                continue
            if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
                what = f"an integer, at least {least}{', or None' if optional else ''}"
                raise ModelError(f"{name}={value!r} is not possible: it must be {what}")
        if self.kv_memory is not None:
            memory_size(self.kv_memory)
            if self.kv_tokens is not None:
                raise ModelError("the KV pool has one size: give kv_tokens or kv_memory, not both")
        if not isinstance(self.learn, Real) or not 0 <= self.learn <= 1:
            raise ModelError(f"learn={self.learn!r} is not possible: it is a share of time, from 0 to 1")
        stall = self.max_stall
        if stall is not None and (not isinstance(stall, Real) or not stall > 0):
            raise ModelError(f"max_stall={stall!r} is not possible: it must be above 0 seconds, or None")

    def with_options(self, **options: Unpack[EngineOptions]) -> EngineConfig:
        """Replace single numbers. Raises `TypeError` for a name that is not the engine's."""
        return replace(self, **options)
