"""A recurrent head's drafts in one call."""

from ctypes import CDLL, Structure, addressof, byref, c_double, c_float, c_int, c_int64, c_uint64, c_void_p
from typing import cast

import numpy as np
import torch
from torch import Tensor

from soothsay.core.arrays import IntArray
from soothsay.core.noise import LOW_64_BITS
from soothsay.core.verify import Guessing
from soothsay.drafters.ops.draft_ops import DraftBatch, DraftInput, DraftOutput, RecurrentLayers
from soothsay.model.decoder.blocks import Block
from soothsay.model.decoder.embedding import Embedding, IntegerEmbedding
from soothsay.model.native.native_blocks import NativeBlocks
from soothsay.model.native.native_linear import NativeLinear, PackedTable, address
from soothsay.model.native.program import KV_FORMATS, LayerRun


class _Recurrent(Structure):
    """`soothsay_recurrent` of csrc/kernels.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("block", "head", "fuse", "join", "table", "tap_norms", "rows")),
        *((name, c_void_p) for name in ("embedding_norm", "feature_norm", "norm", "cos", "sin", "ids")),
        *((name, c_int64) for name in ("outputs", "vocabulary", "scratch")),
        ("least", c_double),
        *((name, c_float) for name in ("embedding_scale", "eps")),
        *((name, c_int) for name in ("rows_are_bf16", "norms_residual", "norms_output")),
        *((name, c_int) for name in ("hidden", "d", "is_bf16", "taps", "tap_size")),
        *((name, c_int) for name in ("fuse_is_bf16", "join_is_bf16", "depth", "width", "branch")),
    )


class _Pool(Structure):
    """`soothsay_pool` of csrc/kernels.h."""

    _fields_ = (("data", c_void_p), ("slots", c_int64), ("block_size", c_int64), ("format", c_int))


class _Growing(Structure):
    """`soothsay_growing` of csrc/kernels.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("tokens", "table", "ends", "features")),
        *((name, c_void_p) for name in ("tree_tokens", "tree_parents", "scores")),
        *((name, c_int64) for name in ("start", "first_key", "pending", "num_ends")),
        ("seed", c_uint64),
        *((name, c_float) for name in ("factor", "top_p", "min_p")),
        *((name, c_int) for name in ("top_k", "draws", "nodes", "depth", "size")),
    )


class NativeRecurrentDrafts:
    """Computes `RecurrentDrafts`.

    Args:
        library: an open library.
        layers: pass `fit`.
    """

    def __init__(self, library: CDLL, layers: RecurrentLayers):
        self._library, self._layers = library, layers  # which the library reads
        block, embedding = cast(Block, layers.block), cast(Embedding, layers.embedding)
        (program,) = cast(NativeBlocks, block.recorded).programs(block.dtype)
        (segment,) = program.segments
        self._block = program, LayerRun(ops=segment.ops, count=segment.size)
        integers = embedding.table if isinstance(embedding, IntegerEmbedding) else None
        plain = None if integers is not None else embedding.weight.detach()
        self._held = plain
        self._recurrent = _Recurrent(
            addressof(self._block[1]),
            *(cast(NativeLinear, layer).address for layer in (layers.head, layers.fuse)),
            None if layers.join is None else cast(NativeLinear, layers.join).address,
            None if integers is None else cast(PackedTable, integers).layer.address,
            *(address(layers.tap_norms), address(plain)),
            *(norm.weight.data_ptr() for norm in (layers.embedding_norm, layers.feature_norm, layers.norm)),
            *(None, None, address(layers.ids)),
            *(cast(NativeLinear, layers.head).out_features, len(embedding.weight)),
            program.program.scratch,
            0.0,
            *(embedding.scale, layers.norm.eps),
            plain is not None and plain.dtype == torch.bfloat16,
            *(layers.norms_residual, layers.norms_output),
            *(block.width, len(layers.rope.signed), block.dtype == torch.bfloat16),
            *(layers.taps, cast(NativeLinear, layers.fuse).in_features // layers.taps),
            layers.fuse.dtype == torch.bfloat16,
            layers.join is not None and layers.join.dtype == torch.bfloat16,
        )

    @staticmethod
    def fit(layers: RecurrentLayers) -> bool:
        """Whether the library's call computes each layer."""
        block, head, embedding = layers.block, layers.head, layers.embedding
        norms = layers.embedding_norm, layers.feature_norm, layers.norm
        if isinstance(embedding, IntegerEmbedding):
            table = isinstance(embedding.table, PackedTable)
        else:
            weight = cast(Tensor, embedding.weight)
            table = weight.dtype in (torch.bfloat16, torch.float32) and weight.is_contiguous()
        return (
            isinstance(block, Block)
            and isinstance(block.recorded, NativeBlocks)
            and not block.recorded.programs(block.dtype)[0].program.cuts
            and isinstance(head, NativeLinear)
            and isinstance(layers.fuse, NativeLinear)
            and (layers.join is None or isinstance(layers.join, NativeLinear))
            and head.dtype == torch.float32
            and table
            and not any(norm.centred or norm.eps != layers.norm.eps for norm in norms)
        )

    def __call__(self, batch: DraftBatch) -> list[DraftOutput | None]:
        """See `RecurrentDrafts`."""
        d, kv = batch, batch.kv
        last = max(
            own.rows.start + len(own.rows.tokens) + min(own.request.max_depth, d.depth) for own in d.inputs
        )
        cos, sin = self._layers.rope.table(last)
        r = self._recurrent
        r.cos, r.sin, r.least = cos.data_ptr(), sin.data_ptr(), d.least
        r.depth, r.width, r.branch = d.depth, d.width, d.branch
        pool = _Pool(kv.data_ptr(), kv.shape[1], d.block_size, KV_FORMATS[kv.dtype])
        room = 1 + d.branch + max(d.depth - 1, 0) * d.width * d.branch
        written = np.empty((len(d.inputs), 3, room), dtype=np.int64)  # the last are float64
        held = [_NativeInput(own, written[i], d.block_size) for i, own in enumerate(d.inputs)]
        growing = (_Growing * len(held))(*(own.growing for own in held))
        self._library.soothsay_draft(byref(r), byref(pool), growing, len(held))
        return [
            _read(own, one.size) if one.nodes else None for own, one in zip(written, growing, strict=True)
        ]


class _NativeInput:
    """A request as the library reads it, and the memory that has to outlive the call."""

    def __init__(self, own: DraftInput, written: IntArray, block_size: int):
        request, rows, params = own.request, own.rows, own.request.params
        pending = len(rows.tokens)
        needed = rows.start + pending + max(own.nodes - 1, 0)
        if rows.table is None or len(rows.table) * block_size < needed:
            raise IndexError("a request has fewer KV blocks than its rows need")
        self.tokens = np.ascontiguousarray(rows.tokens, dtype=np.int64)
        self.table = np.ascontiguousarray(rows.table, dtype=np.int64)
        self.ends = np.fromiter(request.end_tokens, np.int64)
        self.features = own.features.contiguous()
        self.growing = _Growing(
            *(part.ctypes.data for part in (self.tokens, self.table, self.ends)),
            self.features.data_ptr(),
            *(row.ctypes.data for row in written),
            *(rows.start, rows.first_key, pending, len(self.ends)),
            request.seed & LOW_64_BITS,
            own.factor,
            *(params.top_p, params.min_p, params.top_k),
            params.temperature > 0 and params.rule.guessing is Guessing.SHARED_NOISE,
            *(own.nodes, request.max_depth),
        )


def _read(written: IntArray, size: int) -> DraftOutput:
    tokens, parents, scores = written[:, :size]
    return DraftOutput(tokens.tolist(), parents.tolist(), scores.view(np.float64).tolist())
