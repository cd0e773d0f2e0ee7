"""A ReDrafter head in one call, and trees over the refined guesses of one pass, in C."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from ctypes import Structure, byref, c_double, c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from soothsay.drafters.ops.recurrent_drafts import DraftOutput
from soothsay.drafters.ops.refinement import LEAST, Candidates, HeadOutputs, Refinement
from soothsay.model.native.linear import NativeLinear
from soothsay.model.norm import Norm


class _Looking(Structure):
    """`soothsay_looking` of csrc/kernels.h."""

    _fields_ = (
        *(
            (name, c_void_p)
            for name in ("look", "guesses", "cell_read", "cell_token", "cell_out", "head", "norm")
        ),
        ("eps", c_float),
        *((name, c_int) for name in ("embedding", "depths")),
    )


class NativeRedrafter:
    """Computes a `RedrafterCall`. Outputs of layers are float32, whatever type they were made to have.

    Args:
        run: the library's `soothsay_look`.
        layers: see `DraftOps.redrafter_head`; the other arguments too.
    """

    def __init__(self, run: Callable[..., None], layers: Sequence[NativeLinear], norm: Norm, depths: int):
        self._run, self._held, self._depths = run, (layers, norm), depths  # the library reads them
        _, _, read, _, _, head = layers
        self._units, self._tokens = read.out_features, head.out_features
        addresses = [layer.address for layer in layers]
        self._looking = _Looking(*addresses, norm.weight.data_ptr(), norm.eps, read.in_features, depths)

    def __call__(self, features: Tensor, embedded: Tensor) -> HeadOutputs:
        """See `RedrafterCall`."""
        features, embedded = features.float().contiguous(), embedded.contiguous()
        rows, depths = len(features), self._depths
        out = HeadOutputs(
            logits=torch.empty(rows * depths, self._tokens),
            read=torch.empty(rows * depths, self._units),
            states=torch.empty(rows, self._units),
        )
        self._run(
            byref(self._looking),
            features.data_ptr(),
            embedded.data_ptr(),
            rows,
            *(part.data_ptr() for part in out),
        )
        return out


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


def grow_paths(
    run: Callable[..., int], refinement: Refinement, candidates: Candidates, nodes: int, depth: int
) -> DraftOutput:
    """See `refinement.grow_refined_tree`. `run` is the library's `soothsay_grow_paths`."""
    r, c = refinement, candidates
    tensors = [c.values, c.places, c.read, c.root, r.tokens, r.carry, r.out, c.scores, r.followers]
    assert all(tensor.is_contiguous() for tensor in tensors)
    numbers = len(r.tokens), c.scale, c.factor, *c.values.shape, len(c.root), r.followers.shape[1]
    paths = _Paths(*(tensor.data_ptr() for tensor in tensors), *numbers)
    places, parents, scores = (c_int64 * nodes)(), (c_int * nodes)(), (c_double * nodes)()
    size = run(byref(paths), nodes, depth, math.log(LEAST), places, parents, scores)
    return DraftOutput(places[:size], parents[:size], scores[:size])
