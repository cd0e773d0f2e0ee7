"""A model so small that every test can run it, and changes of such models by plain names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from soothsay.model.specs.attention_spec import AttentionSpec, HeadNorms, HeadRotation, RopeSpec
from soothsay.model.specs.feed_forward_spec import DenseSpec, ExpertsSpec, RoutingSpec
from soothsay.model.specs.model_spec import LayerSpec, MixerSpec, ModelSpec

ATTENTION = {
    "num_heads": "heads",
    "num_kv_heads": "kv_heads",
    "qkv_bias": "bias",
    "o_bias": "o_bias",
    "attention_scale": "scale",
    "attention_softcap": "softcap",
    "gated_attention": "gated",
    "sinks": "sinks",
    "query_growth": "growth",
    "qkv_clip": "clip",
}
ROTATION = {
    "rope": "rope",
    "head_dim": "size",
    "rotary_dim": "rotated",
    "rotates_neighbours": "neighbours",
}
NORMS = {  # a flag -> the norms of queries and keys that it stands for
    "qk_norm": {},
    "qk_unit_norm": {"learned": False},
    "qk_norm_over_heads": {"over_heads": True},
    "qk_norm_last": {"last": True},
}
DENSE = {"intermediate_size": "size", "activation": "activation", "mlp_bias": "bias"}
NORM = {"norm_eps": "eps", "centred_norms": "centred", "norm_biases": "biased", "norm_weights": "learned"}
LAYER = {name: name for name in ("pre_norms", "post_norms", "parallel", "parallel_norms")}
EMBEDDING = {"embedding_scale": "scale", "positions": "positions"}
HEAD = {"tie_embeddings": "tied", "logit_scale": "scale", "logit_softcap": "softcap", "head_bias": "biased"}
MODEL = {
    name: name for name in ("family", "vocab_size", "hidden_size", "max_positions", "residual_multiplier")
}

Mixtures = Mapping[int, ExpertsSpec]


def mixtures(
    count: int,
    chosen: int,
    size: int,
    layers: Sequence[int],
    *,
    shared_size: int = 0,
    corrected: bool = False,
    router_bias: bool = False,
    shared_gate: bool = False,
    latent_size: int | None = None,
    **routing: Any,
) -> Mixtures:
    """Mixtures of experts by layer. `adapted` gives them the activation and the biases of dense parts."""
    mixture = ExpertsSpec(
        RoutingSpec(count, chosen, **routing),
        DenseSpec(size),
        DenseSpec(shared_size) if shared_size else None,
        shared_gate=shared_gate,
        router_bias=router_bias,
        correction="e_score_correction_bias" if corrected else None,
        latent_size=latent_size,
    )
    return dict.fromkeys(layers, mixture)


def adapted(spec: ModelSpec, **changes: Any) -> ModelSpec:
    """A model with some numbers of all its layers changed.

    Beside the names of the tables above: `num_layers` copies the first layer; `windows` is by layer;
    `second_rope` is that of `second_rope_layers`; `mixers` and `experts` take the place of parts, by layer.
    """
    count, left = changes.pop("num_layers", spec.num_layers), dict(changes)
    layers = spec.layers if count == spec.num_layers else spec.layers[:1] * count

    def own(table: Mapping[str, str]) -> dict[str, Any]:
        return {field: left.pop(name) for name, field in table.items() if name in left}

    attention, rotation, dense, norm = (own(table) for table in (ATTENTION, ROTATION, DENSE, NORM))
    around, embedding, head, model = (own(table) for table in (LAYER, EMBEDDING, HEAD, MODEL))
    flags = {name: left.pop(name) for name in NORMS if name in left}
    windows, second = left.pop("windows", None), left.pop("second_rope", None)
    others: Sequence[int] = left.pop("second_rope_layers", ())
    mixers: Mapping[int, MixerSpec] = left.pop("mixers", {})
    experts: Mixtures = left.pop("experts", {})
    assert not left, left
    residual = model.get("residual_multiplier", spec.residual_multiplier)
    last = replace(spec.norm, **norm)

    def layer(number: int, old: LayerSpec) -> LayerSpec:
        mixer, mlp = old.mixer, old.mlp
        if isinstance(mixer, AttentionSpec):
            turning = replace(mixer.rotation, **rotation)
            turning = replace(turning, rope=second) if number in others else turning
            norms = mixer.norms
            if flags:
                kinds = {key: value for name, on in flags.items() if on for key, value in NORMS[name].items()}
                norms = HeadNorms(last.eps, **kinds) if any(flags.values()) else None
            if norms is not None and "eps" in norm:
                norms = replace(norms, eps=last.eps)
            if norms is not None and norms.learned is False and turning.rope.kind == "none":
                norms = None
            mixer = replace(mixer, rotation=turning, norms=norms, **attention)
            mixer = mixer if windows is None else replace(mixer, window=windows[number])
        if isinstance(mlp, DenseSpec):
            plain = mlp = replace(mlp, **dense)
            if number in experts:
                mixture, like = experts[number], {"activation": plain.activation, "bias": plain.bias}
                shared = None if mixture.shared is None else replace(mixture.shared, **like)
                return replace(
                    layer_norms(old),
                    mixer=mixers.get(number, mixer),
                    mlp=replace(mixture, expert=replace(mixture.expert, **like), shared=shared),
                )
        return replace(layer_norms(old), mixer=mixers.get(number, mixer), mlp=mlp)

    def layer_norms(old: LayerSpec) -> LayerSpec:
        return replace(old, norm=replace(last, eps=last.eps / residual**2), **around)

    return replace(
        spec,
        layers=tuple(layer(number, old) for number, old in enumerate(layers)),
        norm=last,
        embedding=replace(spec.embedding, **embedding),
        head=replace(spec.head, **head),
        **model,
    )


TINY = ModelSpec(
    family="llama",
    vocab_size=97,
    hidden_size=48,
    layers=(LayerSpec(AttentionSpec(4, 2, HeadRotation(RopeSpec(), 16), scale=16**-0.5), DenseSpec(96)),) * 2,
    max_positions=512,
)
