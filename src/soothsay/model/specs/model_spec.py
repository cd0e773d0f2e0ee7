"""What a decoder computes, as one value. A model family is a function that makes such values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, TypeVar

from soothsay.core.state_shape import StateShape
from soothsay.errors import ModelError
from soothsay.model.specs.attention_spec import NO_ROTATION, AttentionSpec, HeadRotation, LatentSpec
from soothsay.model.specs.feed_forward_spec import DenseAndExpertsSpec, DenseSpec, ExpertsSpec
from soothsay.model.specs.state_specs import (
    BesideStatesSpec,
    ConvolutionSpec,
    DeltaSpec,
    SelectiveSpec,
    StateSpaceSpec,
)

StateSpec = DeltaSpec | ConvolutionSpec | StateSpaceSpec | SelectiveSpec
"""A part that keeps a state."""

MixerSpec = AttentionSpec | LatentSpec | StateSpec | BesideStatesSpec
"""A part in which tokens read what came before them."""

MLPSpec = DenseSpec | ExpertsSpec | DenseAndExpertsSpec
"""A part that reads each token by itself."""

Part = AttentionSpec | LatentSpec | StateSpec | DenseSpec | ExpertsSpec
AnyPart = TypeVar("AnyPart", bound=Part)


@dataclass(frozen=True)
class NormSpec:
    """A root mean square norm (Zhang and Sennrich 2019, arXiv 1910.07467), or a layer norm (1607.06450)."""

    eps: float = 1e-6
    centred: bool = False  # a layer norm: it subtracts the mean first
    biased: bool = False  # a layer norm adds a bias; Cohere's does not
    learned: bool = True  # False: OLMo's norms, without weights


@dataclass(frozen=True)
class AlternatingSpec:
    """A layer predicts and corrects a stream of several parts. See `soothsay.model.decoder.alternating`."""

    parts: int  # of the residual stream, each of the hidden size
    scaled: bool  # what a layer's own embedding is gated by is multiplied by a learned vector
    laurel_rank: int  # inner size of the learned residual layer

    def num_parameters(self, hidden: int) -> int:
        """Weights of one layer in matrices."""
        return (2 * self.laurel_rank + self.parts) * hidden + (self.parts + 1) * self.parts**2

    def num_stream_parameters(self, hidden: int) -> int:
        """Weights that spread embeddings over the stream, and merge it."""
        return 2 * (self.parts - 1) * hidden**2


@dataclass(frozen=True)
class LayerInputSpec:
    """Gemma 3n and 4: a layer reads an embedding of its own for each token."""

    size: int
    activation: str


@dataclass(frozen=True)
class LayerSpec:
    """A layer of a decoder: a mixer, then a feed-forward part. One of both may be absent (Nemotron-H)."""

    mixer: MixerSpec | None
    mlp: MLPSpec | None
    norm: NormSpec = NormSpec()
    pre_norms: bool = True  # a norm before each part
    post_norms: bool = False  # a norm after each part
    parallel: bool = False  # Cohere: both parts read the same normed stream
    parallel_norms: bool = False  # GPT-NeoX: they read the same stream, each by a norm of its own
    input: LayerInputSpec | None = None
    scalar: bool = False  # Gemma 4: the layer's output is multiplied by a number
    alternating: AlternatingSpec | None = None

    @property
    def parts(self) -> Iterator[Part]:
        """Its parts, those of pairs one by one."""
        for part in (self.mixer, self.mlp):
            match part:
                case BesideStatesSpec():
                    yield from (part.attention, part.states)
                case DenseAndExpertsSpec():
                    yield from (part.dense, part.experts)
                case None:
                    pass
                case _:
                    yield part

    @property
    def attention(self) -> AttentionSpec | LatentSpec | None:
        """Its part with keys and values, if there is one."""
        own = self.mixer.attention if isinstance(self.mixer, BesideStatesSpec) else self.mixer
        return own if isinstance(own, AttentionSpec | LatentSpec) else None

    @property
    def state(self) -> StateShape | None:
        """The state that it keeps of a request; None: it keeps none."""
        own = self.mixer.states if isinstance(self.mixer, BesideStatesSpec) else self.mixer
        return None if own is None or isinstance(own, AttentionSpec | LatentSpec) else own.state

    @property
    def window(self) -> int | None:
        """See `AttentionSpec`."""
        return None if self.attention is None else self.attention.window

    @property
    def kv_shape(self) -> tuple[int, int]:
        """Its heads in the KV pool, keys' and values', and their size. Without keys there are none."""
        return (0, 0) if self.attention is None else self.attention.kv_shape

    def width(self, hidden: int) -> int:
        """Size of a row of the residual stream."""
        return hidden * (1 if self.alternating is None else self.alternating.parts)

    def num_parameters(self, hidden: int) -> int:
        """Weights in matrices. Biases and norms are left out."""
        total = sum(part.num_parameters(hidden) for part in self.parts)
        total += 0 if self.input is None else 2 * hidden * self.input.size
        return total + (0 if self.alternating is None else self.alternating.num_parameters(hidden))


@dataclass(frozen=True)
class SequenceLayerSpec(LayerSpec):
    """A layer of an encoder, or of a decoder that reads what an encoder makes of a source.

    See `soothsay.model.decoder.sequence_block`. The numbers of its heads are those of `mixer`.
    """

    cross: AttentionSpec | None = None  # reads the source, after the mixer
    norms: Literal["before", "after", "between"] = "before"
    # before each part; after each sum (BART); after each but the last one, where the model's own norm follows

    @property
    def parts(self) -> Iterator[Part]:
        """See `LayerSpec`."""
        if self.cross is not None:
            yield self.cross
        yield from super().parts


@dataclass(frozen=True)
class SourceSpec:
    """A model reads a source in both directions, and then writes a target (Vaswani et al. 2017)."""

    encoder: ModelSpec  # whose embeddings are the decoder's, and which has no output head
    start: tuple[int, ...]  # the target's first tokens, which are not generated


@dataclass(frozen=True)
class LayerEmbeddingsSpec:
    """The table of the layers' own embeddings. See `soothsay.model.decoder.layer_embeddings`."""

    size: int  # of one layer's embedding
    rows: int  # tokens that have some; the others have token 0's


@dataclass(frozen=True)
class PositionsSpec:
    """An embedding of each position, added to its token's: learned (GPT-2, OPT), or of waves (Marian)."""

    rows: int
    shift: int = 0  # the row of position 0
    waves: float | None = None  # see `soothsay.model.decoder.embedding.Waves`; None: learned

    @property
    def count(self) -> int:
        """How many positions have an embedding."""
        return self.rows - self.shift


@dataclass(frozen=True)
class EmbeddingSpec:
    """The table of the tokens' embeddings."""

    scale: float = 1.0
    scale_rounded: bool = False  # Gemma: to the dtype of the embedding's table, as in training
    layers: LayerEmbeddingsSpec | None = None
    positions: PositionsSpec | None = None
    norm: NormSpec | None = None  # BART: of embeddings with their positions


@dataclass(frozen=True)
class HeadSpec:
    """The output head."""

    tied: bool = False  # it is the embedding's table
    biased: bool = False
    scale: float = 1.0
    softcap: float | None = None
    never: int | None = None  # Marian: a token that is not written, since its logit was not trained


@dataclass(frozen=True)
class ModelSpec:
    """What one decoder computes."""

    family: str  # its name, which chooses the names of tensors in checkpoints
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    max_positions: int
    norm: NormSpec = NormSpec()  # the last one
    embedding: EmbeddingSpec = EmbeddingSpec()
    head: HeadSpec = field(default=HeadSpec())
    residual_multiplier: float = 1.0  # Granite: what layers add to the stream is multiplied by it
    zero_centred_norms: bool = False  # Gemma: a norm's weight w is stored as w - 1
    source: SourceSpec | None = None  # an encoder-decoder

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """For each layer, its window; see `AttentionSpec`."""
        return tuple(layer.window for layer in self.layers)

    @property
    def attentions(self) -> list[AttentionSpec | LatentSpec]:
        """The layers' parts with keys and values."""
        return [layer.attention for layer in self.layers if layer.attention is not None]

    def parts(self, kind: type[AnyPart]) -> dict[int, AnyPart]:
        """The parts of one kind, by layer."""
        found = ((i, part) for i, layer in enumerate(self.layers) for part in layer.parts)
        return {layer: part for layer, part in found if isinstance(part, kind)}

    def first(self, kind: type[AnyPart]) -> AnyPart:
        """The first part of a kind. Raises `ModelError` if there is none."""
        for part in self.parts(kind).values():
            return part
        raise ModelError(f"a model of family {self.family!r} has no {kind.__name__.removesuffix('Spec')}")

    @cached_property
    def rotations(self) -> tuple[HeadRotation, ...]:
        """The different ways in which heads rotate; at least one."""
        found = tuple(dict.fromkeys(part.rotation for part in self.attentions))
        return found or (HeadRotation(NO_ROTATION, 2),)

    @property
    def rotation(self) -> HeadRotation:
        """How the heads of most layers rotate: of those without a window, if these rotate."""
        own = sorted(self.attentions, key=lambda part: part.window is not None)
        rotating = (part.rotation for part in own if part.rotation.rope.kind != "none")
        return next(rotating, self.rotations[0])

    @property
    def counts_positions(self) -> bool:
        """Whether it was made for a number of positions: not one that knows distances or states only."""
        rotates = any(own.rope.kind != "none" for own in self.rotations)
        return self.source is None and (rotates or self.embedding.positions is not None)

    def rope_number(self, layer: int) -> int:
        """The place among `rotations` of a layer's."""
        own = self.layers[layer].attention
        return 0 if own is None else self.rotations.index(own.rotation)

    @cached_property
    def group(self) -> int:
        """Query heads that share one key-value head. The greatest common divisor, if layers differ."""
        return math.gcd(*(part.group for part in self.attentions)) or 1

    @property
    def stream_size(self) -> int:
        """Size of a row between two layers."""
        return self.layers[0].width(self.hidden_size)

    @cached_property
    def kv_layers(self) -> tuple[int, ...]:
        """For each layer, the layer whose keys and values it reads. `ANOTHER_MODEL`: another model's."""
        own = self.parts(AttentionSpec)
        read = ((i, own[i].reads if i in own else None) for i in range(self.num_layers))
        return tuple(i if other is None else other for i, other in read)

    @cached_property
    def last_kv_layers(self) -> dict[bool, int]:
        """The last layers with keys and values of their own. True: without a window. False: with one."""
        own = self.parts(AttentionSpec).items()
        return {part.window is None: layer for layer, part in own if part.reads is None}

    @property
    def num_sharing_layers(self) -> int:
        """The last layers, which read keys and values of other layers."""
        return sum(layer != source for layer, source in enumerate(self.kv_layers))

    @property
    def kv_shapes(self) -> tuple[tuple[int, int], ...]:
        """For each layer, its heads in the KV pool and their size. The last layers may share other's."""
        own = self.num_layers - self.num_sharing_layers
        return tuple(layer.kv_shape for layer in self.layers[:own])

    @cached_property
    def states(self) -> dict[int, StateShape]:
        """The states that layers keep of a request, by layer."""
        return {i: layer.state for i, layer in enumerate(self.layers) if layer.state is not None}

    def state_bytes(self, element_size: int) -> int:
        """Bytes of the states of one request."""
        return sum(state.state_bytes(element_size) for state in self.states.values())

    def journal_bytes(self, element_size: int) -> int:
        """Bytes that a node of a draft tree takes until the tree is verified."""
        return sum(state.journal_bytes(element_size) for state in self.states.values())

    @property
    def encoder_layers(self) -> tuple[LayerSpec, ...]:
        """The layers of the encoder, if there is one."""
        return () if self.source is None else self.source.encoder.layers

    @property
    def num_parameters(self) -> int:
        """Weights of the whole model in matrices. Biases and norms are left out."""
        hidden, own = self.hidden_size, self.embedding.layers
        total = self.vocab_size * hidden * (1 if self.head.tied else 2)
        total += sum(layer.num_parameters(hidden) for layer in (*self.layers, *self.encoder_layers))
        if own is not None:  # a table, and its projection
            total += (own.rows + hidden) * own.size * self.num_layers
        places = self.embedding.positions
        total += 0 if places is None or places.waves is not None else places.rows * hidden
        alternating = self.layers[0].alternating
        return total + (0 if alternating is None else alternating.num_stream_parameters(hidden))

    def with_layers(self, change: Callable[[LayerSpec], LayerSpec]) -> ModelSpec:
        """The model with each layer changed."""
        return replace(self, layers=tuple(change(layer) for layer in self.layers))

    def with_rotations(self, change: Callable[[HeadRotation], HeadRotation]) -> ModelSpec:
        """The model with the rotation of each part changed that has keys and values."""

        def changed(layer: LayerSpec) -> LayerSpec:
            mixer = layer.mixer
            match mixer:
                case AttentionSpec() | LatentSpec():
                    mixer = replace(mixer, rotation=change(mixer.rotation))
                case BesideStatesSpec(attention=own):
                    mixer = replace(mixer, attention=replace(own, rotation=change(own.rotation)))
            return replace(layer, mixer=mixer)

        return self.with_layers(changed)
