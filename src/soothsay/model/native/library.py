"""Opens a compiled library: one of C functions for each instruction set, called through ctypes."""

import ctypes
import platform
import re
from collections.abc import Iterator
from ctypes import c_double, c_float, c_int, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from soothsay.errors import ModelError
from soothsay.processors import granted_processors, num_threads

FAMILIES = {
    "x86": ("amx", "avx512bf16", "avx512vnni", "avx512", "avxvnni", "avx2", "portable"),
    "arm": ("bf16", "i8mm", "dotprod", "portable"),
}
"""Instruction sets of each family of processors, the fastest first."""

VARIANTS = FAMILIES["arm" if platform.machine().lower() in ("aarch64", "arm64") else "x86"]
"""Instruction sets of this family."""

BFLOAT16 = ("amx", "avx512bf16", "bf16")
"""Instruction sets that multiply bfloat16."""

DECLARATIONS = """
int soothsay_runs_here();
void soothsay_set_threads(int count);
void soothsay_linear(const void* x, int x_is_bf16, int64_t rows, const soothsay_weights* weights, void* out,
    int out_is_bf16);
void soothsay_add_norm(const float* x, const void* delta, int delta_is_bf16, const float* post,
    const float* weight, float eps, int64_t rows, int n, float* total, void* normed, int normed_is_bf16);
void soothsay_route(const void* scores, int are_bf16, int64_t rows, const soothsay_routing* routing,
    float* shares, int64_t* chosen);
void soothsay_run(const soothsay_layer* layers, int count, const soothsay_pass* pass);
void soothsay_rows(const int64_t* rows, int64_t count, const soothsay_weights* weights, float* out);
void soothsay_pack(const uint8_t* integers, int64_t rows, int inputs, int bits, void* data);
void soothsay_lay_out(const int64_t* plan, int64_t count, int64_t block_size, int64_t N, int64_t M,
    int64_t* out);
void soothsay_gumbel(const int64_t* keys, const int64_t* tokens, int one_row, int64_t rows, int64_t width,
    float* out);
void soothsay_race(const float* x, const float* temperatures, const int64_t* keys, int64_t rows,
    int64_t width, int count, float* values, int64_t* places);
void soothsay_mass_before(const float* x, const float* factors, const float* tops, const float* floors,
    const int64_t* places, int64_t rows, int64_t width, float* out);
void soothsay_largest(const float* x, const float* factors, int64_t rows, int64_t width, int count,
    float* values, int64_t* places);
void soothsay_follow(const float* logits, int64_t width, const int64_t* plan, const float* temperatures,
    int64_t count, int64_t* out);
void soothsay_move(void* memory, int64_t planes, int64_t slots, int64_t size, const int64_t* places,
    int64_t count);
soothsay_automaton* soothsay_automaton_new(int counted);
void soothsay_automaton_free(soothsay_automaton* automaton);
void soothsay_automaton_read(soothsay_automaton* automaton, soothsay_reading* text, const int64_t* tokens,
    int64_t count);
soothsay_matcher* soothsay_matcher_new(soothsay_automaton* own, double doubt);
void soothsay_matcher_free(soothsay_matcher* matcher);
int soothsay_matcher_watch(soothsay_matcher* matcher, const soothsay_automaton* const* others,
    const double* doubts, int count, const int64_t* tokens, int64_t num_tokens);
int soothsay_matcher_read(soothsay_matcher* matcher, const int64_t* tokens, int64_t count);
int soothsay_matcher_grow(const soothsay_matcher* matcher, int nodes, int depth, int widest, double least,
    int draws, uint64_t seed, int64_t first, double odds, double weight, int* tokens, int* parents,
    double* scores);
void soothsay_look(const soothsay_looking* looking, const float* features, const float* embedded,
    int64_t rows, float* logits, float* read, float* states);
int soothsay_grow_paths(const soothsay_paths* paths, int nodes, int depth, double least, int64_t* places,
    int* parents, double* scores);
void soothsay_draft(const soothsay_recurrent* recurrent, const soothsay_pool* pool,
    soothsay_growing* requests, int64_t count);
"""
"""The functions of a library, word by word as csrc/kernels.h declares them. It says what they do."""

_TYPES = {
    "void": None,
    "int": c_int,
    "int64_t": c_int64,
    "uint64_t": c_uint64,
    "float": c_float,
    "double": c_double,
}


class Library:
    """The library of an instruction set, open.

    Raises `OSError` if it is missing or cannot run on this processor.
    """

    def __init__(self, variant: str):
        self.variant, self.multiplies_bfloat16 = variant, variant in BFLOAT16
        self._loaded, self._granted = _opened(variant), granted_processors()
        self.gains = self._loaded.soothsay_runs_here() == 1
        """Whether it is faster than the instruction sets after it in `VARIANTS`."""

    @property
    def _library(self) -> ctypes.CDLL:
        """The functions, set to torch's number of threads now, but no more than the machine grants."""
        self._loaded.soothsay_set_threads(min(num_threads(), self._granted))
        return self._loaded


def check_kernels(name: str) -> None:
    """Raise `ModelError` unless kernels of a name run here: "auto", "stock", or one of `VARIANTS`."""
    if problem := _problem(name):
        there = [one for one in ("auto", "stock", *VARIANTS) if not _problem(one)]
        raise ModelError(f"{problem}; on this machine there are {', '.join(there)}")


def _problem(name: str) -> str:
    """Why kernels of a name do not run here; empty: they do."""
    if name in ("auto", "stock"):
        return ""
    if name not in VARIANTS:
        return f"there are no kernels {name!r}"
    try:
        _opened(name)
        return ""
    except OSError as error:
        return str(error)


def _opened(variant: str) -> ctypes.CDLL:
    """The functions of a library, with the types that `DECLARATIONS` gives them. Raises `OSError`."""
    file = Path(__file__).with_name(f"_{variant}.abi3.so")
    if not file.is_file():
        raise OSError(f"the native kernels for {variant} are not compiled")
    library = ctypes.CDLL(str(file))
    if not library.soothsay_runs_here():
        raise OSError(f"this processor lacks {variant}")
    for name, result, arguments in signatures():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def signatures() -> Iterator[tuple[str, type[Any] | None, list[type[Any] | None]]]:
    """The name, result and arguments of each function, in types of ctypes. A pointer is `c_void_p`."""
    for result, name, arguments in re.findall(r"(\w[^();]*?)(\w+)\(([^()]*)\);", DECLARATIONS):
        yield name, _type(result), [_type(one) for one in arguments.split(",") if one]


def _type(declared: str) -> type[Any] | None:
    """The type of "int count" is `c_int`, that of "const float* x" is `c_void_p`."""
    return c_void_p if "*" in declared else _TYPES[declared.split()[0]]
