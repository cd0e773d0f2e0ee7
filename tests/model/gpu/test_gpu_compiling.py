"""Kernels of a GPU, compiled without one: what they must contain, and what they may take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import interpreter  # noqa: F401 (before kernels are imported, which other tests run)
import pytest
from compiling import Case, Report, compile_all

from soothsay.core.drawing import CONTENDERS
from soothsay.core.functions import ACTIVATIONS, UNGATED
from soothsay.model.gpu import gpu_layers
from soothsay.model.gpu.gpu_layers import HEADS
from soothsay.model.gpu.gpu_plan import CHUNK, KEYS, RUN
from soothsay.model.gpu.gpu_sampling import BLOCK
from soothsay.model.gpu.gpu_sampling import FEW as FEW_NUMBERS
from soothsay.model.gpu.tiles import TILES, Tile
from soothsay.model.specs.feed_forward_spec import CLIPPED

MAX_SHARED = 227 * 1024
"""Bytes of shared memory that a program may have on compute capability 9.0."""
MAX_SPILLED = 8
"""Bytes of registers kept in memory. Compilers may trade two registers for one more program at a time."""


AHEAD = "fma ld.global"
"""What products lack that have no bias: they load everything ahead."""


def floats(dtype: str, tile: Tile, wants: str) -> Case:
    """A product with weights in floats."""
    constants = {"BLOCK_M": tile.rows, "BLOCK_N": tile.outputs, "BLOCK_K": tile.inputs}
    types = f"*{dtype} *{dtype} - *fp32"
    return Case("linear.multiply_floats", types, constants, tile.warps, tile.stages, wants, AHEAD)


def integers(tile: Tile, bits: int, group: int, offset: int, width: int, words: int) -> Case:
    """A product with weights in integers. Factors of 8 bits have units."""
    constants = {"BITS": bits, "GROUP": group, "OFFSET": offset, "WIDTH": width, "WORDS": words}
    constants |= {"UNIT_STEPS": 4 if width == 8 else 0, "BLOCK_M": tile.rows, "STAGES": tile.stages}
    units = "*i32" if width == 8 else "-"
    types = f"*i8 *fp32 *fp32 {'*u8' if bits == 4 else '*i8'} *i32 {units} - *fp32"
    return Case("linear.multiply_integers", types, constants, tile.warps, tile.stages, "mma cp.async", AHEAD)


def attention(kernel: str, tile: int, size: int, *, softcap: bool = False, dtype: str = "bf16") -> Case:
    """Attention for heads of `size` numbers, in tiles of this many queries; four share a head of keys."""
    constants = {"SOFTCAP": softcap, "KEYS": KEYS, "CHUNK": CHUNK, "SIZE": size}
    constants |= {"D": 1 << (size - 1).bit_length(), "PAGE": 16, "ROWS": tile // 4, "M": tile, "GROUP": 4}
    warps = 4 if tile == 16 and size <= 128 else 8
    multiplies = f"{'mma' if tile == 16 else 'wgmma'} cp.async"
    if kernel == "attend_rows":
        types = f"*{dtype} *{dtype} *i32 - *{dtype} i32 i32 i32 fp32"
        return Case("attention.attend_rows", types, constants | {"RUN": RUN}, warps, 3, multiplies)
    types = f"*{dtype} *{dtype} *i32 *fp32 *fp32 i32 i32 i32 fp32"
    return Case("attention.attend_chunks", types, constants | {"PROGRAMS": 264}, warps, 3, multiplies)


def best(count: int, has_noise: bool) -> Case:
    """The best numbers of parts of rows."""
    types = "*fp32 *fp32 *fp32 *i64 *i64 *i64" if has_noise else "*fp32 *fp32 *fp32 *fp32 *fp32 *i64"
    return Case("draws.best", types, {"COUNT": count, "HAS_NOISE": has_noise, "BLOCK": BLOCK})


def masses(count: int) -> Case:
    """Sums of probabilities of parts of rows."""
    types = "*fp32 *fp32 *fp32 *fp32 *i64 *i64 *i64"
    return Case("draws.masses", types, {"COUNT": count, "BLOCK": BLOCK})


SMALL, MIDDLE, LARGE = TILES["float"]
FEW = TILES["integer"][0]
Q4_K, Q6_K = (4, 32, 1, 8, 1), (8, 16, 0, 8, 1)


def gated(name: str) -> Case:
    """An activation, with a gate where it has one."""
    constants = {"ACTIVATION": name, "GATED": name not in UNGATED, "BLOCK": gpu_layers.BLOCK}
    return Case("glue.gated", "*bf16 *bf16", constants)


CASES = (  # each kernel of the package
    floats("bf16", SMALL, "mma cp.async"),
    floats("bf16", MIDDLE, "wgmma cp.async"),
    integers(FEW, 4, 32, 0, 16, 1),  # int4, Q4_0
    integers(FEW, *Q4_K),
    integers(FEW, *Q6_K),
    Case(
        "linear.quantize_rows",
        "*bf16 *i8 *fp32 *fp32",
        {"GROUP": 32, "OFFSET": 1, "BLOCK_M": 8, "BLOCK_K": 256},
    ),
    Case("linear.add_splits", "*fp32 *fp32 *bf16", {"BLOCK": 1024}),
    Case(
        "linear.read_integers",
        "*i64 *u8 *i32 *i32 *fp32",
        {"BITS": 4, "GROUP": 32, "OFFSET": 1, "WIDTH": 8, "WORDS": 1, "UNIT_STEPS": 4, "BLOCK": 256},
    ),
    attention("attend_chunks", 16, 80, dtype="fp16"),
    attention("attend_chunks", 64, 64, softcap=True),
    attention("attend_rows", 64, 128),
    Case(
        "attention.join_chunks",
        "*i32 *fp32 *fp32 *fp32 *bf16",
        {"CHUNK": CHUNK, "RUN": RUN, "SIZE": 128, "D": 128, "HEADS": HEADS},
    ),
    Case(
        "glue.add_norm",
        "*fp32 *bf16 *fp32 *fp32 *fp32 *fp32 *bf16 i32 fp32 fp32",
        {"POST_CENTRED": False, "CENTRED": True, "BLOCK": 8192},
        8,
    ),
    Case(
        "glue.rotate_store",
        "*bf16 *fp32 *fp32 *fp32 *fp32 *fp32 *bf16 *bf16 *i64 i32 i32 i32 i32 fp32 fp32 fp32 fp32",
        {"SIZE": 128, "D": 128, "HEADS": HEADS},
    ),
    gated("gelu_tanh"),
    gated("relu2"),
    best(CONTENDERS, True),
    masses(CONTENDERS),
    Case("draws.noise", "*i64 *i64 *fp32", {"BLOCK": BLOCK}),
    Case("draws.ranks", "*fp32 *i64", {"BLOCK": BLOCK}),
)

MORE_CASES = (  # kernels for other weights and activations, and in larger tiles
    attention("attend_chunks", 16, 128),
    attention("attend_chunks", 64, 128),
    attention("attend_chunks", 16, 256),
    attention("attend_rows", 16, 256, softcap=True),
    *map(gated, (*ACTIVATIONS, CLIPPED, *UNGATED)),
    floats("bf16", LARGE, "wgmma cp.async"),
    floats("fp16", replace(SMALL, inputs=64), "mma cp.async"),
    replace(floats("fp32", replace(SMALL, inputs=32), "cp.async"), lacks="ld.global"),
    integers(FEW, 4, 64, 2, 16, 1),  # GPTQ, AWQ
    integers(FEW, 4, 32, 1, 16, 2),  # Q4_1
    integers(FEW, 8, 32, 0, 16, 1),  # int8, Q8_0
    *(integers(tile, *kind) for tile in TILES["integer"][1:] for kind in (Q4_K, Q6_K)),
    *(best(1, False), best(FEW_NUMBERS, False), best(1, True), masses(0)),
)


def faults(case: Case, report: Report, capability: int) -> list[str]:
    """What a compiled kernel lacks, and what it may not have."""
    wants = case.wants if capability == 90 else case.wants.replace("wgmma", "mma")
    found = [f"lacks {name}" for name in wants.split() if not report.instructions[name]]
    found += [f"has {name}" for name in case.lacks.split() if report.instructions[name]]
    if report.shared > MAX_SHARED:
        found.append(f"takes {report.shared} bytes of shared memory")
    if report.spilled > MAX_SPILLED and capability == 90:
        found.append(f"spills {report.spilled} bytes")
    return found


@pytest.mark.parametrize(
    ("cases", "capability"),
    [
        pytest.param(CASES, 90, id="9.0"),
        pytest.param(CASES, 80, id="8.0", marks=pytest.mark.slow),
        pytest.param(MORE_CASES, 90, id="more, 9.0", marks=pytest.mark.slow),
        pytest.param(MORE_CASES, 80, id="more, 8.0", marks=pytest.mark.slow),
    ],
)
def test_kernels_compile(cases: Sequence[Case], capability: int) -> None:
    """With products of matrices by the units for them, loads ahead of them, and no sum fused unasked."""
    reports = compile_all(cases, capability)
    found = {case.name: faults(case, reports[case.name], capability) for case in cases}
    assert not {name: own for name, own in found.items() if own}
