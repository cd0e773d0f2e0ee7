"""`DraftOps` in C: the library of an instruction set, called through ctypes."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from ctypes import Structure, byref, c_double, c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor, nn

from soothsay.core.noise import LOW_64_BITS
from soothsay.core.tree import DraftTree
from soothsay.drafters.ops.automaton import Automaton, Reading, Tokens
from soothsay.drafters.ops.continuations import LEAST, WIDEST, KnownNoise
from soothsay.drafters.ops.draft_ops import (
    LEAST_REFINED,
    Candidates,
    DraftOps,
    DraftOutput,
    HeadOutputs,
    RecurrentLayers,
    RedrafterCall,
    Refinement,
)
from soothsay.drafters.ops.native_recurrent import NativeRecurrentDrafts
from soothsay.model.native.library import Library
from soothsay.model.native.native_kernels import load_native
from soothsay.model.native.native_linear import NativeLinear
from soothsay.model.native.native_sampling import NativeSampling
from soothsay.model.ops.kernels import Kernels
from soothsay.model.ops.operands import Norm

CPU = torch.device("cpu")

_NO_NOISE = False, 0, 0, 0.0, 0.0


class NativeAutomaton:
    """An `Automaton` in a library's memory: 90 to 135 bytes for each token that it has read.

    Args:
        library: an open library.
        counted: see `Automaton`.
    """

    __slots__ = ("_handle", "_library", "counted", "size")

    def __init__(self, library: ctypes.CDLL, counted: int):
        self.counted, self.size = counted, 0
        self._library = library
        self._handle: int = library.soothsay_automaton_new(counted)

    def __del__(self) -> None:
        self._library.soothsay_automaton_free(self._handle)

    def read(self, text: Reading, tokens: Tokens) -> None:
        """See `Automaton`."""
        self._library.soothsay_automaton_read(self._handle, byref(text), tokens.tobytes(), len(tokens))
        self.size += len(tokens)

    def matcher(self, doubt: float) -> NativeMatcher:
        """See `Automaton`."""
        return NativeMatcher(self, doubt)


class NativeMatcher:
    """A `Matcher` in a library's memory.

    Args:
        own: reads its text.
        doubt: see `Matcher.watch`.
    """

    __slots__ = ("_handle", "_library", "_others", "_own", "longest")

    def __init__(self, own: NativeAutomaton, doubt: float):
        self._own, self._library = own, own._library
        self._others: list[NativeAutomaton] = []  # alive while they are watched
        self._handle: int = self._library.soothsay_matcher_new(own._handle, doubt)
        self.longest = 0

    def __del__(self) -> None:
        self._library.soothsay_matcher_free(self._handle)

    def watch(self, others: Sequence[tuple[Automaton, float]], end: Tokens) -> None:
        """See `Matcher`."""
        automata, count = [one for one, _ in others if isinstance(one, NativeAutomaton)], len(others)
        assert len(automata) == count
        self.longest = self._library.soothsay_matcher_watch(
            self._handle,
            (c_void_p * count)(*[automaton._handle for automaton in automata]),
            (c_double * count)(*[doubt for _, doubt in others]),
            *(count, end.tobytes(), len(end)),
        )
        self._others = automata

    def read(self, tokens: Tokens) -> None:
        """See `Matcher`."""
        self.longest = self._library.soothsay_matcher_read(self._handle, tokens.tobytes(), len(tokens))
        self._own.size += len(tokens)

    def grow(self, tree: DraftTree, nodes: int, depth: int, noise: KnownNoise | None = None) -> None:
        """See `Matcher`."""
        tokens, parents, scores = (c_int * nodes)(), (c_int * nodes)(), (c_double * nodes)()
        size = self._library.soothsay_matcher_grow(
            *(self._handle, nodes, depth, WIDEST, LEAST),
            *(_NO_NOISE if noise is None else (True, noise.seed & LOW_64_BITS, *noise[1:])),
            *(tokens, parents, scores),
        )
        tree.append_nodes(tokens[1:size], parents[1:size], scores[1:size])


class _Looking(Structure):
    """`soothsay_looking` of csrc/kernels.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("look", "guesses", "cell_read", "cell_token", "cell_out")),
        *(("head", c_void_p), ("norm", c_void_p), ("eps", c_float), ("embedding", c_int), ("depths", c_int)),
    )


class NativeRedrafter:
    """Computes a `RedrafterCall`. Outputs of layers are float32, whatever type they were made to have.

    Args:
        library: an open library.
        layers: see `DraftOps.redrafter_head`; the other arguments too.
    """

    def __init__(self, library: ctypes.CDLL, layers: Sequence[NativeLinear], norm: Norm, depths: int):
        self._library, self._depths = library, depths
        self._held = layers, norm  # the library reads them
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
        inputs = features.data_ptr(), embedded.data_ptr(), rows
        self._library.soothsay_look(byref(self._looking), *inputs, *(part.data_ptr() for part in out))
        return out


class _Paths(Structure):
    """`soothsay_paths` of csrc/kernels.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("values", "places", "read", "root", "tokens", "carry", "out")),
        *((name, c_void_p) for name in ("scores", "followers")),
        ("tokens_count", c_int64),
        *((name, c_float) for name in ("scale", "factor")),
        *((name, c_int) for name in ("depths", "count", "units", "following")),
    )


class NativeDraftOps(Library, DraftOps):
    """The operations of one compiled library.

    Raises `OSError` if the library is missing or cannot run on this processor.
    """

    def __init__(self, variant: str):
        super().__init__(variant)
        self.sampling = NativeSampling(variant)

    def redrafter_head(self, layers: Sequence[nn.Module], norm: Norm, depths: int) -> RedrafterCall | None:
        """See `DraftOps`."""
        own = [layer for layer in layers if isinstance(layer, NativeLinear)]
        return NativeRedrafter(self._library, own, norm, depths) if own == [*layers] else None

    def recurrent_drafts(self, layers: RecurrentLayers) -> NativeRecurrentDrafts | None:
        """See `DraftOps`."""
        return NativeRecurrentDrafts(self._library, layers) if NativeRecurrentDrafts.fit(layers) else None

    def grow_paths(
        self, refinement: Refinement, candidates: Candidates, nodes: int, depth: int
    ) -> DraftOutput:
        """See `DraftOps`."""
        r, c = refinement, candidates
        tensors = [c.values, c.places, c.read, c.root, r.tokens, r.carry, r.out, c.scores, r.followers]
        assert all(tensor.is_contiguous() for tensor in tensors)
        numbers = len(r.tokens), c.scale, c.factor, *c.values.shape, len(c.root), r.followers.shape[1]
        paths = _Paths(*(tensor.data_ptr() for tensor in tensors), *numbers)
        places, parents, scores = (c_int64 * nodes)(), (c_int * nodes)(), (c_double * nodes)()
        limits = nodes, depth, math.log(LEAST_REFINED)
        size = self._library.soothsay_grow_paths(byref(paths), *limits, places, parents, scores)
        return DraftOutput(places[:size], parents[:size], scores[:size])

    def automaton(self, counted: int) -> NativeAutomaton:
        """See `DraftOps`."""
        return NativeAutomaton(self._library, counted)


def draft_ops(kernels: Kernels, device: torch.device = CPU) -> DraftOps:
    """The operations of drafters that go with a model's kernels: of the same library, or stock ones.

    Beside a model on another device than the CPU, they are those of the best library that runs here.
    """
    host = kernels if device.type == "cpu" else load_native()
    return NativeDraftOps(host.variant) if host is not None and host.variant else DraftOps()
