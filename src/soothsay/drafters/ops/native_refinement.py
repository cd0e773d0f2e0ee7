"""Trees over the refined guesses of one pass, in C."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from ctypes import Structure, byref, c_double, c_float, c_int, c_int64, c_void_p

from soothsay.drafters.ops.refinement import LEAST, Candidates, Refinement


class _Paths(Structure):
    """`soothsay_paths` of csrc/kernels.h."""

    _fields_ = (
        *(
            (name, c_void_p)
            for name in ("values", "places", "read", "root", "tokens", "carry", "out", "scores", "followers")
        ),
        ("tokens_count", c_int64),
        *((name, c_float) for name in ("scale", "factor")),
        *((name, c_int) for name in ("depths", "count", "units", "following")),
    )


def grow(
    library: ctypes.CDLL, refinement: Refinement, candidates: Candidates, nodes: int, depth: int
) -> tuple[list[int], list[int], list[float]]:
    """See `soothsay.drafters.ops.refinement.grow`."""
    function: Callable[..., int] = library.soothsay_grow_paths
    r, c = refinement, candidates
    tensors = [c.values, c.places, c.read, c.root, r.tokens, r.carry, r.out, c.scores, r.followers]
    assert all(tensor.is_contiguous() for tensor in tensors)
    numbers = len(r.tokens), c.scale, c.factor, *c.values.shape, len(c.root), r.followers.shape[1]
    paths = _Paths(*(tensor.data_ptr() for tensor in tensors), *numbers)
    places, parents, scores = (c_int64 * nodes)(), (c_int * nodes)(), (c_double * nodes)()
    size = function(byref(paths), nodes, depth, math.log(LEAST), places, parents, scores)
    return places[:size], parents[:size], scores[:size]
