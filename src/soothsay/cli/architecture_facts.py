"""What `soothsay inspect` says of a model's architecture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from soothsay.model.specs.attention_spec import AttentionSpec, LatentSpec
from soothsay.model.specs.feed_forward_spec import DenseSpec, ExpertsSpec
from soothsay.model.specs.model_spec import ModelSpec
from soothsay.model.specs.state_specs import BesideStatesSpec, ConvolutionSpec, DeltaSpec, StateSpaceSpec

Rows = Iterator[tuple[str, str]]


def architecture(c: ModelSpec) -> Rows:
    """What a model computes: a name and a sentence for each fact. An empty name continues the one before."""
    dense, mixtures = c.parts(DenseSpec), c.parts(ExpertsSpec)
    sizes = sorted({part.size for part in dense.values()})
    yield "family", c.family
    units = f", {' and '.join(f'{size:,}' for size in sizes)} feed-forward" if sizes else ""
    yield "layers", f"{c.num_layers} of {c.hidden_size:,} hidden{units}"
    if mixtures:
        e = c.first(ExpertsSpec)
        beside = "" if e.shared is None else f", and {e.shared.size:,} for all tokens"
        chosen = f"{e.routing.chosen} for each token{beside}, in {len(mixtures)} layers"
        yield "experts", f"{e.routing.count} of {e.expert.size:,}, {chosen}"
    yield from _mixers(c)
    if (parts := c.stream_size // c.hidden_size) > 1:
        yield "streams", f"{parts} of {c.hidden_size:,}, predicted and corrected in each layer"
    if c.num_sharing_layers:
        yield "shared KV", f"the last {c.num_sharing_layers} layers read that of layers before them"
    tied = "the head shares the embedding" if c.head.tied else "with a head of its own"
    yield "vocabulary", f"{c.vocab_size:,} tokens, {tied}"
    yield "context", f"{c.max_positions:,} tokens"
    yield from _rotary(c)
    yield "blocks", _blocks(c)
    for size, count in Counter(window for window in c.windows if window is not None).items():
        kind = "window" if size > 0 else "chunks"
        yield kind, f"{abs(size):,} tokens in {count} of {c.num_layers} layers"


def _mixers(c: ModelSpec) -> Rows:
    """The parts in which tokens read what came before them."""
    read = sorted(c.parts(AttentionSpec).values(), key=lambda own: own.window is None)
    if read:
        own, other = read[0], read[-1]
        sinks = ", each with a sink" if own.sinks else ""
        yield "attention", f"{own.heads} heads of {own.size}, {own.kv_heads} for keys and values{sinks}"
        if other.kv_shape != own.kv_shape or other.keys_are_values:
            values = ", values are keys" if other.keys_are_values else ""
            heads = f"{other.kv_heads} heads of {other.size} for keys{values}"
            yield "", f"{heads}, in layers without a window"
    if latent := c.parts(LatentSpec):
        own_latent = latent[0]
        states = f"latent states of {own_latent.rank} and {own_latent.rotated} rotated"
        yield "attention", f"{own_latent.heads} heads over {states}"
    for d in list(c.parts(DeltaSpec).values())[:1]:
        states = f"{d.value_heads} heads with states of {d.key_size} x {d.value_size}"
        yield "recurrent", f"{len(c.states)} of {c.num_layers} layers, {states}"
    for m in list(c.parts(StateSpaceSpec).values())[:1]:
        beside = " beside attention" if isinstance(c.layers[0].mixer, BesideStatesSpec) else ""
        states = f"{m.heads} heads with states of {m.head_size} x {m.state_size}"
        yield "recurrent", f"{len(c.states)} of {c.num_layers} layers of Mamba-2{beside}, {states}"
    for convolution in list(c.parts(ConvolutionSpec).values())[:1]:
        taps = convolution.taps
        yield "convolutions", f"{len(c.states)} of {c.num_layers} layers, over {taps} tokens"


def _rotary(c: ModelSpec) -> Rows:
    counts = Counter(layer.attention.rotation for layer in c.layers if layer.attention is not None)
    main = c.rotation
    rope, kind = main.rope, main.rope.kind
    scaling = "not scaled" if kind == "default" else f"scaled by {kind}, factor {rope.factor:g}"
    if kind == "longrope":
        which = "long" if rope.context > rope.original_max_positions else "short"
        scaling += f", {which} factors (short with max_context={rope.original_max_positions} or less)"
    part = "" if main.rotated is None else f", {main.rotated} of {main.size} dimensions"
    yield "rotary", "none" if kind == "none" else f"base {rope.theta:,.0f}, {scaling}{part}"
    for other, count in counts.items():
        if other != main:
            none = other.rope.kind == "none"
            base = "none" if none else f"base {other.rope.theta:,.0f}"
            yield "", f"{base} in {count} of {c.num_layers} layers"


def _blocks(c: ModelSpec) -> str:
    first, single = c.layers[0], [layer.mixer is None for layer in c.layers]
    if any(single):
        number = sum(single)
        return f"a single part each, the feed-forward part in {number} of {c.num_layers}; a norm before it"
    norms = "around" if first.pre_norms and first.post_norms else "before" if first.pre_norms else "after"
    between = "beside" if first.parallel else "then"
    return f"attention, {between} the feed-forward part; norms {norms} them"
