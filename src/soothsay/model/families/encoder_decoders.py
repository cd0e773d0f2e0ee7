"""Families with an encoder, which reads a source, and a decoder, which writes an answer to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from soothsay.model.families.classic import UNGATED
from soothsay.model.families.decoder import activation, norm_eps
from soothsay.model.families.fields import require, usual_keys
from soothsay.model.families.layer_fields import Raw, count, heads_of
from soothsay.model.specs.attention_spec import NO_ROTATION, AttentionSpec, HeadRotation, RelativeSpec
from soothsay.model.specs.feed_forward_spec import DenseSpec
from soothsay.model.specs.model_spec import (
    EmbeddingSpec,
    HeadSpec,
    ModelSpec,
    NormSpec,
    PositionsSpec,
    SequenceLayerSpec,
    SourceSpec,
)

T5_PROJECTIONS = {
    **{"relu": "relu", "gelu_new": "plain_gelu_tanh", "gelu": "plain_gelu"},
    **{"gated-gelu": "gelu_tanh", "gated-gelu_new": "gelu_tanh", "gated-silu": "silu"},
}
"""From `feed_forward_proj` to our activations."""


KEYS = {
    **{"d_model": "hidden_size", "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"},
    **{"d_kv": "head_dim", "d_ff": "intermediate_size", "n_positions": "max_position_embeddings"},
    **{"layer_norm_epsilon": "rms_norm_eps"},
}
"""Keys that these families have in place of the usual ones."""


def t5(raw: Raw) -> ModelSpec:
    """T5, T5 1.1, FLAN-T5, UL2: scores are not scaled, and have numbers by distance added."""
    return _t5({"feed_forward_proj": "relu", **raw}, scaled=_scaled(raw))


def mt5(raw: Raw) -> ModelSpec:
    """mT5: T5 1.1 for many languages."""
    return _t5({"feed_forward_proj": "gated-gelu", **raw}, scaled=False)


def umt5(raw: Raw) -> ModelSpec:
    """umT5: each layer has numbers of its own by distance."""
    return _t5({"feed_forward_proj": "gated-gelu", **raw}, scaled=_scaled(raw), shares=False)


def _scaled(raw: Raw) -> bool:
    """Whether logits are divided by the root of the hidden size. Older files do not say so: tied heads do."""
    return bool(raw.get("scale_decoder_outputs", raw.get("tie_word_embeddings", True)))


def _t5(raw: Raw, *, scaled: bool, shares: bool = True) -> ModelSpec:
    raw = {**raw, **usual_keys(raw, KEYS)}
    hidden, (heads, _, size) = int(raw["hidden_size"]), heads_of(raw)
    norm = NormSpec(norm_eps(raw))
    plain = AttentionSpec(heads, heads, HeadRotation(NO_ROTATION, size), scale=1.0)
    kind = activation({"hidden_act": raw["feed_forward_proj"]}, T5_PROJECTIONS)
    dense = DenseSpec(int(raw["intermediate_size"]), kind)
    buckets = int(raw.get("relative_attention_num_buckets", 32))
    most = int(raw.get("relative_attention_max_distance", 128))
    require(
        4 <= buckets < 2 * most,
        f"relative_attention_num_buckets {buckets} does not fit relative_attention_max_distance {most}",
    )

    def layers(number: int, *, both_ways: bool, cross: AttentionSpec | None) -> Sequence[SequenceLayerSpec]:
        places = [0 if shares else layer for layer in range(number)]
        own = [replace(plain, relative=RelativeSpec(buckets, most, both_ways, place)) for place in places]
        return [SequenceLayerSpec(mixer, dense, norm, cross=cross) for mixer in own]

    encoder = layers(count(raw), both_ways=True, cross=None)
    decoder = layers(int(raw.get("num_decoder_layers", count(raw))), both_ways=False, cross=plain)
    head = HeadSpec(bool(raw.get("tie_word_embeddings", True)), scale=hidden**-0.5 if scaled else 1.0)
    context = 2 * int(raw.get("max_position_embeddings", 512))  # of source and target; it has no limit
    spec = ModelSpec("t5", int(raw["vocab_size"]), hidden, tuple(decoder), context, norm, head=head)
    start = int(raw.get("decoder_start_token_id", raw.get("pad_token_id", 0)))
    return _with_encoder(spec, encoder, (start,))


MAX_WAVES = 2**16
"""Limit of positions without learned embeddings, whose table no file has. NLLB has 1,024."""

NORM = NormSpec(1e-5, centred=True, biased=True)
"""The norms of BART's relatives."""

BART_ACTIVATIONS = {**UNGATED, "swish": "plain_silu", "silu": "plain_silu"}
"""From `activation_function` to our activations."""


def bart(raw: Raw) -> ModelSpec:
    """BART: norms follow sums, and positions are learned."""
    return _bart(raw, _learned(raw), norms_sums=True, norm=NORM)


def mbart(raw: Raw) -> ModelSpec:
    """mBART: BART with norms before the parts."""
    return _bart(raw, _learned(raw), norm=NORM)


def marian(raw: Raw) -> ModelSpec:
    """Marian (OPUS-MT): norms follow sums. The padding's logit was not trained."""
    shared, never = "share_encoder_decoder_embeddings", int(raw["pad_token_id"])
    require(raw.get(shared, True), f"{shared} is supported only as true; take another model")
    require(0 <= never < int(raw["vocab_size"]), f"pad_token_id {never} is not one of the tokens")
    return _bart(raw, _waves(raw), norms_sums=True, never=never)


def m2m_100(raw: Raw) -> ModelSpec:
    """M2M-100 and NLLB: norms stand before the parts. Positions begin after that of the padding."""
    shift, waves = int(raw.get("pad_token_id", 1)) + 1, int(raw["d_model"]) // 2 - 1
    rows = int(raw["max_position_embeddings"]) + shift
    return _bart(raw, PositionsSpec(rows, shift, waves), head_biased=False)


def pegasus(raw: Raw) -> ModelSpec:
    """Pegasus: norms stand before the parts."""
    return _bart(raw, _waves(raw))


def _learned(raw: Raw) -> PositionsSpec:
    return PositionsSpec(int(raw["max_position_embeddings"]) + 2, shift=2)


def _waves(raw: Raw) -> PositionsSpec:
    return PositionsSpec(int(raw["max_position_embeddings"]), waves=int(raw["d_model"]) / 2)


def _bart(
    raw: Raw,
    positions: PositionsSpec,
    *,
    norms_sums: bool = False,
    norm: NormSpec | None = None,
    head_biased: bool = True,
    never: int | None = None,
) -> ModelSpec:
    """A relative of BART. Stacks end with a norm: their own, or with `norms_sums` that of the last sum.

    `norm` follows the embeddings. For `never` see `HeadSpec`.
    """
    hidden = int(raw["d_model"])
    require(
        positions.waves is None or positions.rows <= MAX_WAVES,
        f"max_position_embeddings is more than {MAX_WAVES:,}, the limit of positions that are not learned",
    )

    def layers(stack: str, *, reads: bool) -> list[SequenceLayerSpec]:
        heads, _, size = heads_of(
            {"hidden_size": hidden, "num_attention_heads": raw[f"{stack}_attention_heads"]}
        )
        rotation = HeadRotation(NO_ROTATION, size)
        attention = AttentionSpec(heads, heads, rotation, scale=size**-0.5, bias=True, o_bias=True)
        kind = activation({"hidden_act": raw.get("activation_function", "gelu")}, BART_ACTIVATIONS)
        dense = DenseSpec(int(raw[f"{stack}_ffn_dim"]), kind, bias=True)
        layer = SequenceLayerSpec(attention, dense, NORM, cross=attention if reads else None)
        made = [replace(layer, norms="after" if norms_sums else "before")] * int(raw[f"{stack}_layers"])
        return [*made[:-1], replace(made[-1], norms="between")] if norms_sums else made

    scale = hidden**0.5 if raw.get("scale_embedding", False) else 1.0
    spec = ModelSpec(
        str(raw["model_type"]),
        int(raw["vocab_size"]),
        hidden,
        tuple(layers("decoder", reads=True)),
        2 * positions.count,  # of source and target together
        NORM,
        EmbeddingSpec(scale, positions=positions, norm=norm),
        HeadSpec(bool(raw.get("tie_word_embeddings", True)), head_biased, never=never),
    )
    start = raw["decoder_start_token_id"], raw.get("forced_bos_token_id")
    return _with_encoder(spec, layers("encoder", reads=False), tuple(int(t) for t in start if t is not None))


def _with_encoder(spec: ModelSpec, layers: Sequence[SequenceLayerSpec], start: tuple[int, ...]) -> ModelSpec:
    """A decoder with an encoder of these layers, whose tensors have names of their own."""
    require(
        all(0 <= token < spec.vocab_size for token in start),
        f"decoder_start_token_id, forced_bos_token_id: {start} are not among {spec.vocab_size} tokens",
    )
    encoder = replace(spec, family=f"{spec.family} encoder", layers=tuple(layers))
    return replace(spec, source=SourceSpec(encoder, start))
