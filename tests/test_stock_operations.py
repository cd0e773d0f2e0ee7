"""Each operation of PyTorch in a pass is in the table of docs/guarantee.md, which says if its bits stay."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from places import ROOT

SOURCE = ROOT / "src" / "soothsay"
ROOMS = ("model", "model/decoder", "model/ops")
"""Folders of what computes in a pass by PyTorch's operations."""

PASSES = [
    *(file for room in ROOMS for file in sorted((SOURCE / room).glob("*.py"))),
    *(SOURCE / "core" / f"{name}.py" for name in ("cache", "drawing", "functions", "noise", "sampling")),
    *(SOURCE / file for file in ("core/verify.py", "engine/verification.py")),
]
OURS = {"add", "norm", "select", "__init__"}
"""Methods of kernels, modules and configurations that have the name of a tensor's."""


def operations(source: str) -> Iterator[str]:
    """Names of PyTorch's functions, and of methods that are called and that tensors have."""
    tree = ast.parse(source)
    called = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            yield "@"
        if not isinstance(node, ast.Attribute):
            continue
        name, owner = node.attr, ast.unparse(node.value)
        if owner in ("torch", "F"):
            own = getattr(torch if owner == "torch" else torch.nn.functional, name)
            if callable(own) and not isinstance(own, type):
                yield name
        elif node in called and hasattr(torch.Tensor, name) and owner not in ("math", "np"):
            yield name


def listed() -> tuple[set[str], set[str]]:
    """Operations that the table allows, and those that it names as not used."""
    page = (ROOT / "docs" / "guarantee.md").read_text()
    table = page.partition("## Operations of a pass")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| ")]
    named = [("not used" in result, set(re.findall(r"`(\w+)`", names))) for result, names in rows]
    return (
        set[str]().union(*(names for refused, names in named if not refused)),
        set[str]().union(*(names for refused, names in named if refused)),
    )


@pytest.mark.parametrize("file", PASSES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_operations_of_passes_are_listed(file: Path) -> None:
    unlisted = set(operations(file.read_text())) - listed()[0] - OURS
    assert not unlisted, "test their bits in tests/model/test_row_bits.py, and list them in docs/guarantee.md"


def test_rooms_are_read() -> None:
    read = {file.parent.relative_to(SOURCE).as_posix() for file in PASSES}
    assert read == {*ROOMS, "core", "engine"}
    assert "bmm" in operations((SOURCE / "model/ops/attention.py").read_text())


def test_what_is_not_used_is_found() -> None:
    allowed, refused = listed()
    assert {"gelu", "silu", "sigmoid", "softplus"} <= refused
    assert not allowed & refused
    found = {*operations("y = F.gelu(x) @ map(torch.sigmoid, x).logsumexp(-1) + math.exp(2)")}
    assert found == {"@", "gelu", "sigmoid", "logsumexp"}
