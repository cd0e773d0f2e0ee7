"""One decoder for all model families. Families differ by configuration alone.

It serves decoding, verification, drafting and training. The residual stream, norms and attention are float32.
Linear layers and the KV pool have the model's dtype, or the pool has a type of its own.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import cast

import torch
from torch import Tensor, nn

from soothsay.core.accepted import Accepted
from soothsay.core.batch import Batch, Rows
from soothsay.core.cache import KVPool, LayerMemory, Move
from soothsay.core.params import MAX_LOGIT_CHANGE
from soothsay.core.sides import Sides
from soothsay.core.states import StatePool
from soothsay.model.decoder.attention_layer import RecurrentLayer
from soothsay.model.decoder.blocks import Block, Blocks, build_layer, build_stream
from soothsay.model.decoder.embedding import Embedding, Entry, LayerEmbeddings
from soothsay.model.decoder.encoder import Encoder
from soothsay.model.decoder.feed_forward import Experts
from soothsay.model.decoder.norm import build_norm
from soothsay.model.decoder.rope import Rope
from soothsay.model.ops.kernels import Kernels, Outputs, StockKernels
from soothsay.model.ops.linear import Dense, normal
from soothsay.model.ops.lora import NO_ADAPTERS
from soothsay.model.specs.model_spec import ModelSpec
from soothsay.model.stage import Layers, PoolSize, Stage, StagePass


def finished_logits(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    """An output head's products `[M, V]` as logits: scaled, and bounded smoothly by `softcap`; float32."""
    logits = logits.float() if scale == 1.0 else logits.float() * scale
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


class LocalStage:
    """Consecutive layers of a decoder in this process. They are `Layers`.

    Args:
        spec: of the whole decoder.
        kernels: that the layers were built for.
        blocks: the layers.
        ropes: those that the layers rotate by, as `ModelSpec.rotations` has them.
        layers: the numbers of the layers.
        kv_dtype: element type of the KV pool; None: that of linear layers' outputs.
    """

    def __init__(
        self,
        spec: ModelSpec,
        kernels: Kernels,
        blocks: Blocks,
        ropes: Sequence[Rope],
        layers: range,
        kv_dtype: torch.dtype | None = None,
    ):
        self.spec, self.kernels, self.blocks = spec, kernels, blocks
        self.ropes, self.layers, self._kv_dtype = ropes, layers, kv_dtype
        self.adapters = NO_ADAPTERS

    @cached_property
    def device(self) -> torch.device:
        """The device of the weights, which do not move after the first pass."""
        return self.ropes[0].signed.device

    @property
    def dtype(self) -> torch.dtype:
        """Element type of linear layers' outputs."""
        return self.blocks.dtype

    @property
    def kv_dtype(self) -> torch.dtype:
        """Element type of the KV pool; see `soothsay.core.cache`."""
        return self._kv_dtype or self.dtype

    def pack(self, requests: Sequence[Rows], block_size: int = 1) -> Batch:
        """Lay out a pass of the model. `block_size` is that of the KV pool."""
        spec = self.spec
        return self.kernels.pack_rows(requests, block_size, spec.group, spec.windows, self.device)

    def new_cache(self, size: PoolSize) -> KVPool:
        """A KV pool for its layers, which counts them from 0."""
        states, at, kept = None, (self.dtype, self.device), self.spec.states
        if kept:
            own = {layer - self.layers.start: kept[layer] for layer in kept if layer in self.layers}
            states = StatePool(own, size.requests, size.snapshots, size.nodes, *at)
        shapes = self.spec.kv_shapes[self.layers.start : self.layers.stop]
        layout = shapes, size.num_blocks, size.block_size, self.kv_dtype, self.device
        cache = KVPool(*layout, states, self.kernels)
        if size.is_filled:
            cache.fill()
        return cache

    def run(self, at: StagePass) -> dict[int, Tensor]:
        """See `Layers`. Raises `ValueError` as `Transformer.forward` does."""
        x, batch, cache, layers, taps, embeddings = at
        available = len(x) if cache is None else cache.num_slots
        if batch.num_slots > available:  # kernels do not check bounds
            raise ValueError(f"the batch uses {batch.num_slots} slots, and {available} are available")
        if self.spec.states and cache is not None:
            for request in batch.requests:
                nodes = 0 if request.tree is None else len(request.tree)
                _states(cache).check(request.state, nodes, request.marks)
        ropes = [rope(batch.positions) for rope in self.ropes]
        start, kv = self.layers.start, self._kv(cache, len(x))
        own, tapped = [layer - start for layer in layers], [tap - start for tap in taps]
        adapted = self.adapters.of_rows(batch.requests)
        streams = self.blocks(x, ropes, batch, kv, own, tapped, embeddings, adapted)
        return {number + start: stream for number, stream in streams.items()}

    def _kv(self, cache: KVPool | None, rows: int) -> Sequence[LayerMemory] | None:
        """The keys and values that each layer reads; None: within the pass, as the layers output them."""
        if cache is None and self.kv_dtype == self.dtype and not self.spec.num_sharing_layers:
            return None
        pool, start = self.new_cache(PoolSize(rows, 1)) if cache is None else cache, self.layers.start
        if not self.spec.num_sharing_layers:
            return pool.layers
        return tuple(pool.layers[layer - start] for layer in self.spec.kv_layers[start : self.layers.stop])

    def commit(self, cache: KVPool, moves: Sequence[Move]) -> None:
        """See `Layers`."""
        cache.commit(moves)
        if cache.states is None or not moves:
            return
        for move in moves:
            cache.states.check(move.state, max(move.nodes) + 1, move.marks)
        accepted = Accepted.of(moves, self.device)
        for number, states in cache.states.layers.items():
            layer = cast(Block, self.blocks[number]).attention
            cast(RecurrentLayer, layer).commit(states, accepted)

    def copy_state(self, cache: KVPool, source: int, target: int) -> None:
        """See `Layers`."""
        if cache.states is not None:
            cache.states.copy(source, target)


class Transformer(Entry):
    """A decoder with random float32 weights. `soothsay.model.weights.load.load_model` loads one.

    A tied head shares the embedding's table in training. In a loaded model it may have a packed copy.

    Args:
        spec: what it computes.
        kernels: None: stock operations.
        layers: the layers that are here; None: all. `rest` has those after them.
        kv_dtype: as in `LocalStage`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        kernels: Kernels | None = None,
        layers: range | None = None,
        kv_dtype: torch.dtype | None = None,
    ):
        kernels = kernels or StockKernels()
        super().__init__(spec, kernels)
        self.spec = spec
        hidden, own = spec.hidden_size, spec.embedding.layers
        self.embedding = Embedding(normal(spec.vocab_size, hidden, std=0.02), spec.embedding.scale)
        layers = range(spec.num_layers) if layers is None else layers
        self.blocks = Blocks(
            build_layer(spec.layers[layer], hidden, kernels, spec.rope_number(layer)) for layer in layers
        )
        self.norm = build_norm(spec.norm, hidden)
        self.head: nn.Module = Dense.random(hidden, spec.vocab_size, bias=spec.head.biased)
        if spec.head.tied:
            self.head.weight = self.embedding.weight
        self.ropes = nn.ModuleList(Rope(rotation) for rotation in spec.rotations)
        self.stream = build_stream(spec)
        self.layer_embeddings = None if own is None else LayerEmbeddings(own, spec, kernels)
        self.encoder = None if spec.source is None else Encoder(spec.source.encoder, kernels)
        self._mixtures = tuple(part for part in self.blocks.modules() if isinstance(part, Experts))
        ropes = [rope for rope in self.ropes if isinstance(rope, Rope)]
        self.own = LocalStage(spec, kernels, self.blocks, ropes, layers, kv_dtype)
        """Runs `blocks`."""
        self.rest: Sequence[Stage] = ()
        """Run the layers after these, in other processes."""
        self.bits: int | None = None
        """Bits to which weights of drafters are rounded, as the loaded weights are; None: all are plain."""
        self.formats: str | None = None
        """The number formats in words, if they were chosen on loading: `NumericMode.name`."""

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Element type of linear layers' outputs."""
        return self.own.dtype

    @property
    def kv_dtype(self) -> torch.dtype:
        """Element type of the KV pool; see `soothsay.core.cache`."""
        return self.own.kv_dtype

    @property
    def stages(self) -> tuple[Layers, ...]:
        """Run all layers, one after the other."""
        return self.own, *self.rest

    @property
    def experts_run(self) -> float | None:
        """Mean number of experts that a layer ran in the last pass; None: no layer has experts."""
        mixtures = self._mixtures
        return sum(int(mixture.ran) for mixture in mixtures) / len(mixtures) if mixtures else None

    def run(
        self,
        batch: Batch,
        cache: KVPool | None = None,
        layers: Sequence[int] | None = None,
        taps: Sequence[int] = (),
    ) -> Outputs:
        """One pass with logits, as the engine and draft models run it. Arguments are those of `forward`.

        Returns:
            What `forward` returns, and `[M, V]` float32 logits of the batch's logit rows.
        """
        return self.kernels.run_pass(self, batch, cache, layers, taps)

    def compute(
        self, batch: Batch, cache: KVPool | None, layers: Sequence[int] | None, taps: Sequence[int]
    ) -> Outputs:
        """The pass of `run`, operation by operation."""
        hidden, tapped = self(batch, cache, layers=layers, taps=taps)
        return hidden, tapped, self.logits(batch.select_logit_rows(hidden))

    def forward(
        self,
        batch: Batch,
        cache: KVPool | None = None,
        *,
        layers: Sequence[int] | None = None,
        taps: Sequence[int] = (),
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One pass over the weights for all rows.

        Args:
            batch: N rows.
            cache: keys and values; None: they live within the pass (scoring, training).
            layers: the layers to run, ascending; None: all. The others write no keys and values.
            taps: those of `layers` whose input is returned; `num_layers` means the last output.

        Returns:
            `[N, hidden]` normed final states, and `[N, hidden]` for each tap; float32.

        With an encoder, rows of sources have no final states: they are zeros. See `soothsay.core.sides`.

        Raises:
            ValueError: the batch was packed for a larger pool, or for a pool where `cache` is None; or a
                request has no slot for its state, or a larger tree than the slot has room for.
            ModelError: there is an encoder, and a request has no source.
            StageError: a process that runs some of the layers has ended.
        """
        if self.encoder is None:
            return self._decode(batch, cache, layers, taps)
        sides, cache = Sides.of(batch), cache or self.new_cache(batch.num_slots, 1)
        self.encoder.read(sides, self.embedding, self.blocks, cache)
        if sides.target is None:
            none = self.norm.weight.new_zeros(len(batch.tokens), self.spec.hidden_size)
            return none, (none,) * len(taps)
        hidden, tapped = self._decode(sides.target, cache, layers, taps)
        return sides.spread(hidden), tuple(map(sides.spread, tapped))

    def _decode(
        self, batch: Batch, cache: KVPool | None, layers: Sequence[int] | None, taps: Sequence[int]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        x, last = self.embed(batch), self.spec.num_layers
        own = None if self.layer_embeddings is None else self.layer_embeddings(batch.tokens, x)
        layers, streams = range(last) if layers is None else layers, dict[int, Tensor]()
        x = self.stream.enter(x)
        for stage in self.stages:
            if part := [layer for layer in layers if layer in stage.layers]:
                embeddings = None if own is None else own[stage.layers.start : stage.layers.stop]
                streams |= stage.run(StagePass(x, batch, cache, part, taps, embeddings))
                x = streams.pop(stage.layers.stop)
        tapped = (self.stream.tap(streams[tap]) if tap != last else self.stream.leave(x) for tap in taps)
        return self.final(x), tuple(tapped)

    def embed(self, batch: Batch) -> Tensor:
        """The embeddings of tokens at their positions: `[N, hidden]` float32."""
        return self.placed(self.embedding(batch.tokens), batch.positions)

    def final(self, x: Tensor) -> Tensor:
        """The normed final states of the last block's output: `[N, width] -> [N, hidden]` float32."""
        return self.kernels.norm(self.stream.leave(x), self.norm, x.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits of final states: `[M, hidden]` -> `[M, V]` float32."""
        own = self.spec.head
        logits = finished_logits(self.head(hidden), own.scale, own.softcap)
        if own.never is not None:
            logits[:, own.never] = -MAX_LOGIT_CHANGE
        return logits

    def pack(self, requests: Sequence[Rows], block_size: int = 1) -> Batch:
        """Lay out a pass of this model. `block_size` is that of the KV pool."""
        return self.own.pack(requests, block_size)

    def new_cache(
        self,
        num_blocks: int,
        block_size: int,
        *,
        requests: int = 1,
        snapshots: int = 0,
        nodes: int = 1,
        is_filled: bool = False,
    ) -> KVPool:
        """A KV pool for this model; for the arguments see `PoolSize`."""
        size = PoolSize(num_blocks, block_size, requests, snapshots, nodes, is_filled)
        cache = self.own.new_cache(size)
        for stage in self.rest:
            stage.follow(cache, size)
        return cache

    def commit(self, cache: KVPool, moves: Sequence[Move]) -> None:
        """Take in the accepted nodes of the last pass: their KV, and what they do to states."""
        for stage in self.stages:
            stage.commit(cache, moves)

    def copy_state(self, cache: KVPool, source: int, target: int) -> None:
        """Copy a state from slot to slot, in all layers."""
        for stage in self.stages:
            stage.copy_state(cache, source, target)


def linear_shapes(spec: ModelSpec) -> dict[str, torch.Size]:
    """The shape `[out, in]` of the weight of each linear layer of a model, by the layer's name."""
    with torch.device("meta"):
        model = Transformer(spec)
    return {name: part.weight.shape for name, part in model.named_modules() if isinstance(part, Dense)}


def _states(cache: KVPool) -> StatePool:
    if cache.states is None:
        raise ValueError("the model keeps states, and the pool has no room for them")
    return cache.states
