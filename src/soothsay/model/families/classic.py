"""Families with layer norms: those of the years before Llama, and later ones that kept them."""

from collections.abc import Sequence
from typing import Any

from soothsay.model.families.decoder import dense, llama_like
from soothsay.model.families.fields import require, require_only, usual_keys
from soothsay.model.families.layer_fields import Raw, every, rotations, windows
from soothsay.model.specs.attention_spec import HeadRotation
from soothsay.model.specs.model_spec import EmbeddingSpec, ModelSpec, NormSpec, PositionsSpec

LAYER_NORM = NormSpec(centred=True, biased=True)

UNGATED = {
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "plain_gelu_tanh"),
    **{"gelu": "plain_gelu", "relu": "relu", "relu2": "relu2"},
}
"""Activations of parts without a gate."""

KEYS = {
    **{"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"},
    **{"n_positions": "max_position_embeddings", "activation_function": "hidden_act"},
    **dict.fromkeys(("n_inner", "ffn_dim", "ffn_hidden_size"), "intermediate_size"),
    **{"activation": "hidden_act", "num_kv_heads": "num_key_value_heads"},
    **dict.fromkeys(("norm_eps", "norm_epsilon", "layer_norm_eps", "layer_norm_epsilon"), "rms_norm_eps"),
}
"""Keys that these families have in place of the usual ones."""


def _usual(raw: Raw, *, biased: bool = True, **defaults: Any) -> Raw:
    """The file with the usual keys. `biased`: linear layers have biases, whatever the file says."""
    raw = {"rms_norm_eps": 1e-5, **defaults, **raw, **usual_keys(raw, KEYS)}
    size = 4 * int(raw["hidden_size"])
    return {"intermediate_size": size, **raw, "attention_bias": biased, "mlp_bias": biased}


def _decoder(raw: Raw, rotated: Sequence[HeadRotation] | None = None, **layer: Any) -> ModelSpec:
    """A decoder with layer norms, whose feed-forward parts have no gate."""
    return llama_like(raw, None, rotated, dense(raw, UNGATED), {"norm": LAYER_NORM, **layer})


def starcoder2(raw: Raw) -> ModelSpec:
    """A `sliding_window` holds for all layers."""
    biased = bool(raw.get("use_bias", True))
    raw = _usual(raw, biased=biased, hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True)
    windowed = windows(raw, every, reads_types=False)
    return llama_like(raw, windowed, mlps=dense(raw, UNGATED), layer={"norm": LAYER_NORM})


def jais2(raw: Raw) -> ModelSpec:
    """Jais 2: the squared ReLU, and biases everywhere."""
    return _decoder(_usual(raw, hidden_act="relu2"))


def phi(raw: Raw) -> ModelSpec:
    """Phi-1, Phi-1.5 and Phi-2: half of each head rotates, and both parts read the same normed stream."""
    require_only(raw, qk_layernorm=False)
    raw = _usual(raw, hidden_act="gelu_new")
    return _decoder(raw, rotations(raw, share=0.5), parallel=True, head_bias=True)


def gpt_neox(raw: Raw) -> ModelSpec:
    """GPT-NeoX and Pythia: a quarter of each head rotates. Both parts may read the same stream."""
    biased, both = bool(raw.get("attention_bias", True)), bool(raw.get("use_parallel_residual", True))
    theta = raw.get("rotary_emb_base", 1e4)
    raw = {**_usual(raw, hidden_act="gelu", rope_theta=theta), "attention_bias": biased}
    rotated = rotations(raw, share=raw.get("rotary_pct", 0.25))
    layer = {"norm": LAYER_NORM, "parallel": both, "parallel_norms": both}
    by_head = bool(raw.get("qkv_by_head", True))
    return llama_like(raw, None, rotated, dense(raw, UNGATED), layer, by_key_head=by_head)


def gpt2(raw: Raw) -> ModelSpec:
    """Positions are learned, and nothing rotates."""
    require_only(
        raw, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False
    )
    raw = _usual(raw, hidden_act="gelu_new", tie_word_embeddings=True)
    return _learned_positions(raw, shift=0)


def opt(raw: Raw) -> ModelSpec:
    """OPT: as GPT-2, with a plain ReLU. The first two rows of the table of positions are not used."""
    require_only(raw, do_layer_norm_before=True, _remove_final_layer_norm=False)
    require_only(raw, word_embed_proj_dim=raw["hidden_size"])
    affine, biased = (bool(raw.get(key, True)) for key in ("layer_norm_elementwise_affine", "enable_bias"))
    raw = _usual({**raw, "norm_eps": 1e-5}, biased=biased, hidden_act="relu", tie_word_embeddings=True)
    return _learned_positions(raw, shift=2, norm=NormSpec(centred=True, biased=affine, learned=affine))


def _learned_positions(raw: Raw, shift: int, **own: Any) -> ModelSpec:
    rows = int(raw["max_position_embeddings"]) + shift
    embedding = EmbeddingSpec(positions=PositionsSpec(rows, shift))
    return _decoder(raw, rotations(raw, unrotated=every(raw)), embedding=embedding, **own)


def gptj(raw: Raw) -> ModelSpec:
    """GPT-J: neighbours rotate, in a part of each head; attention has no biases."""
    raw = {**_usual(raw, hidden_act="gelu_new"), "attention_bias": False}
    share = int(raw.get("rotary_dim", 64)) * int(raw["num_attention_heads"]) / int(raw["hidden_size"])
    return _decoder(raw, rotations(raw, share=share, neighbours=True), parallel=True, head_bias=True)


def falcon(raw: Raw) -> ModelSpec:
    """Falcon: one head of keys, or several in the newer architecture."""
    require_only(raw, alibi=False)
    newer, biased = bool(raw.get("new_decoder_architecture", False)), bool(raw.get("bias", False))
    require(
        not newer or raw.get("num_ln_in_parallel_attn") == 1,
        "two norms in a block (Falcon 40B and 180B) are not supported; take another model",
    )
    raw = {"tie_word_embeddings": True, "max_position_embeddings": 2048, **raw}
    raw = _usual(raw, biased=biased, hidden_act="gelu")
    if not newer and raw.get("multi_query", True):
        raw = {**raw, "num_key_value_heads": 1}
    layer = {"norm": LAYER_NORM, "parallel": newer or bool(raw.get("parallel_attn", True))}
    by_head = bool(raw.get("qkv_by_head", True))
    return llama_like(raw, mlps=dense(raw, UNGATED), layer=layer, by_key_head=by_head)


def stablelm(raw: Raw) -> ModelSpec:
    """StableLM: Llama with layer norms. A quarter of each head rotates."""
    require_only(raw, qk_layernorm=False)
    raw = _usual(raw, biased=False)
    layer = {"norm": LAYER_NORM, "parallel": bool(raw.get("use_parallel_residual", False))}
    biased, rotated = bool(raw.get("use_qkv_bias", False)), rotations(raw, share=0.25)
    return llama_like(raw, rotated=rotated, layer=layer, bias=biased)


def nemotron(raw: Raw) -> ModelSpec:
    """Nemotron-4 and Minitron: a squared ReLU, and half of each head rotates. Norms are stored around 0."""
    biases = {key: bool(raw.get(key, False)) for key in ("attention_bias", "mlp_bias")}
    raw = {**_usual(raw, hidden_act="relu2"), **biases}
    return _decoder(raw, rotations(raw, share=0.5), zero_centred_norms=True)


def olmo(raw: Raw) -> ModelSpec:
    """OLMo 1: norms have no weights. Numbers of queries, keys and values may be clipped."""
    layer = {"norm": NormSpec(centred=True, learned=False)}
    return llama_like({**raw, "rms_norm_eps": 1e-5}, layer=layer, clip=raw.get("clip_qkv"))
