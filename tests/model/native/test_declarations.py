"""What Python says of the library's functions and structs is what csrc/kernels.h declares."""

from __future__ import annotations

import re
from collections.abc import Iterator
from ctypes import Structure, c_double, c_float, c_int, c_int64, c_uint64, c_void_p
from typing import Any

import pytest
from places import ROOT

import soothsay.drafters.ops.native_draft_ops
import soothsay.model.native.native_kernels  # noqa: F401  defines the structs
from soothsay.model.native.library import DECLARATIONS, signatures

HEADER = re.sub(r"//.*", "", (ROOT / "csrc" / "kernels.h").read_text("utf-8"))
TYPES: dict[str, type[Any]] = {
    "int": c_int,
    "int64_t": c_int64,
    "uint64_t": c_uint64,
    "float": c_float,
    "double": c_double,
}
STRUCTS: dict[str, str] = dict(re.findall(r"struct (\w+) \{(.*?)\};", HEADER, re.DOTALL))


def functions(text: str) -> list[str]:
    return [" ".join(found.split()) for found in re.findall(r"^\w[^;{}]*\([^)]*\);", text, re.MULTILINE)]


def fields(body: str) -> Iterator[tuple[str, type[Any]]]:
    """The fields of a struct of C: their names and ctypes' types."""
    for line in filter(None, map(str.strip, body.split(";"))):
        kind, *names = re.split(r"\s+(?=\**\w+(?:\[\d+\])?(?:,|$))|,\s*", line.replace("* ", " *"))
        kind = kind.removeprefix("const ")
        for name in names:
            field, _, count = name.lstrip("*").rstrip("]").partition("[")
            of_one = c_void_p if "*" in name else TYPES.get(kind) or MIRRORS[kind]
            yield field, of_one * int(count) if count else of_one


MIRRORS = {
    name: mirror
    for mirror in Structure.__subclasses__()
    for name in re.findall(r"`(soothsay_\w+)`", mirror.__doc__ or "")
}
"""The structs of Python, by the struct of C that their docstring names."""


def test_each_function_is_declared_as_in_c() -> None:
    assert functions(DECLARATIONS) == functions(HEADER)


def test_each_function_has_its_types() -> None:
    types = {name: (result, arguments) for name, result, arguments in signatures()}
    assert len(types) == len(functions(HEADER))
    assert types["soothsay_runs_here"] == (c_int, [])
    assert types["soothsay_automaton_new"] == (c_void_p, [c_int])
    numbers = [c_void_p, c_int, c_int64, c_void_p, c_void_p, c_int]
    assert types["soothsay_linear"] == (None, numbers)


def test_each_struct_has_a_mirror() -> None:
    assert MIRRORS.keys() == STRUCTS.keys()


@pytest.mark.parametrize("name", STRUCTS)
def test_a_mirror_has_the_fields_of_its_struct(name: str) -> None:
    own = [field[:2] for field in MIRRORS[name]._fields_]
    assert own == [*fields(STRUCTS[name])]
