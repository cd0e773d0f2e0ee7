"""Count the instructions of products, for 32 inputs of one output and one row.

    python tests/helpers/count_instructions.py linear_4.o linear_6_16.o

The loop over groups is the longest one of a function, read in the disassembly. Loops within it, which
prefetch, are counted once. Times that are derived from counts are derived, not measured.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FUNCTION = re.compile(
    r"tile_groups<.*?Int<(?P<bits>\d), (?P<table>true|false)>, (?P<group>\d+),"
    r" .*?Beside\)(?P<beside>\d), .*?Source\)(?P<source>\d), (?P<rows>\d+), (?P<columns>\d+)>"
)
BESIDE, SOURCES = ("one zero", "zeros", "minimums"), ("half scales", "two levels", "float scales")
PRODUCTS = ("sdot", "smmla", "vpdpbusd", "vpmaddubsw")


class Count(NamedTuple):
    """The loop of a function."""

    name: str
    rows: int
    registers: int  # of outputs
    each: float  # instructions for 32 inputs of an output and a row
    products: float  # of these, those that multiply
    spilled: int  # loads and stores at the stack, in the whole loop


def loops(disassembly: str) -> Iterator[tuple[str, list[str]]]:
    """The name of each function, and the instructions of its longest loop."""
    for body in re.split(r"\n(?=[0-9a-f]+ <)", disassembly):
        head, *lines = body.splitlines()
        read = (re.match(r"\s*([0-9a-f]+):\s+(.*)", line) for line in lines)
        code = [(int(found[1], 16), found[2]) for found in read if found]
        aims = ((at, re.match(r"(?:j|b|cb|tb)\S*\s+(?:\S+, )*([0-9a-f]+) <", text)) for at, text in code)
        jumps = [(int(aim[1], 16), at) for at, aim in aims if aim and int(aim[1], 16) < at]
        if jumps:
            begin, end = max(jumps, key=lambda jump: jump[1] - jump[0])
            yield head, [text for at, text in code if begin <= at <= end]


def counts(disassembly: str, lanes: int) -> Iterator[Count]:
    """The counts of products with groups of 32 inputs, for vectors of `lanes` outputs."""
    for head, code in loops(disassembly):
        found = FUNCTION.search(head)
        if found is None or found["group"] != "32":
            continue
        rows, columns = int(found["rows"]), int(found["columns"])
        size, kinds = rows * columns * lanes, Counter(text.split()[0] for text in code)
        name = f"{found['bits']} bits{' by table' * (found['table'] == 'true')}, "
        name += f"{BESIDE[int(found['beside'])]}, {SOURCES[int(found['source'])]}"
        products, at_stack = sum(kinds[kind] for kind in PRODUCTS), sum("sp" in text for text in code)
        yield Count(name, rows, columns, len(code) / size, products / size, at_stack)


def main() -> None:
    """Print a line for each function."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("objects", nargs="+", type=Path)
    parser.add_argument("--objdump", default="aarch64-linux-gnu-objdump")
    parser.add_argument("--lanes", type=int, default=4, help="outputs of a vector")
    given = parser.parse_args()
    for file in given.objects:
        command = [given.objdump, "-d", "-C", "--no-show-raw-insn", file]
        shown = subprocess.run(command, capture_output=True, text=True, check=True)
        for count in sorted(counts(shown.stdout, given.lanes)):
            tile = f"{count.rows} rows x {count.registers} registers"
            products = f"{count.products:.2f} of them products, {count.spilled} at the stack"
            print(f"{file.name}: {count.name}; {tile}: {count.each:.2f}, {products}")


if __name__ == "__main__":
    main()
