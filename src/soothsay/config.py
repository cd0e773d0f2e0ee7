"""Everything that can be configured, as frozen dataclasses.

`ModelConfig` says what a decoder computes. Every family that soothsay knows is a value of it, never a
subclass. `EngineConfig` is the one home of the engine's numbers, each with the reason for its default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from soothsay.errors import ModelError

FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text")
ROPE_KINDS = ("default", "linear", "llama3", "yarn")
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
GEMMA3_DEFAULTS = {  # Google's multimodal checkpoints leave out what equals transformers' defaults
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864) and its long-context scalings."""

    theta: float = 10_000.0
    kind: str = "default"  # one of ROPE_KINDS
    factor: float = 1.0
    original_max_positions: int = 0  # llama3, yarn: the context the model was first trained with
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn: scales cos and sin; None means 0.1 ln(factor) + 1
    mscale: float = 0.0  # yarn, as DeepSeek writes it
    mscale_all_dim: float = 0.0
    truncate: bool = True  # yarn: round the correction range to whole dimensions

    @classmethod
    def from_hf(cls, scaling: Mapping[str, Any], theta: float, max_positions: int) -> RopeConfig:
        """Read a `rope_scaling` or `rope_parameters` mapping. Raises `ModelError` for an unknown type."""
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in ROPE_KINDS:
            raise ModelError(
                f"rope_scaling type {kind!r} is not supported; known types: {', '.join(ROPE_KINDS)}"
            )
        if kind != "default" and scaling.get("factor") is None:
            raise ModelError(f"rope_scaling of type {kind!r} has no 'factor' in config.json")

        def number(key: str, default: float) -> float:
            value = scaling.get(key)
            return default if value is None else float(value)

        attention_factor = scaling.get("attention_factor")
        return cls(
            theta=number("rope_theta", theta),
            kind=kind,
            factor=number("factor", 1.0),
            original_max_positions=int(scaling.get("original_max_position_embeddings") or max_positions),
            low_freq_factor=number("low_freq_factor", 1.0),
            high_freq_factor=number("high_freq_factor", 4.0),
            beta_fast=number("beta_fast", 32.0),
            beta_slow=number("beta_slow", 1.0),
            attention_factor=None if attention_factor is None else float(attention_factor),
            mscale=number("mscale", 0.0),
            mscale_all_dim=number("mscale_all_dim", 0.0),
            truncate=bool(scaling.get("truncate", True)),
        )


@dataclass(frozen=True)
class ModelConfig:
    """What one decoder computes. `windows[i]` is layer i's sliding window in tokens."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rope: RopeConfig
    windows: tuple[int | None, ...]
    local_rope: RopeConfig | None = None  # Gemma 3: layers with a window rotate by another base
    norm_eps: float = 1e-6
    activation: str = "silu"
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    zero_centred_norms: bool = False  # Gemma: the weight of a norm is stored as w - 1
    post_norms: bool = False  # Gemma 2 and 3: a norm behind each block too
    embedding_scale: float = 1.0
    attention_scale: float = 1.0
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    normalize_experts: bool = True
    sparse_layers: tuple[int, ...] = ()  # layers whose feed-forward part is a mixture of experts

    @property
    def group(self) -> int:
        """Query heads that share one key-value head."""
        return self.num_heads // self.num_kv_heads

    def kv_bytes_per_token(self, element_size: int) -> int:
        """Bytes of keys and values that one token costs over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element_size

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Read a Hugging Face `config.json`. Raises `ModelError` naming what is missing or unknown."""
        if "text_config" in raw:  # multimodal wrappers (gemma3): the decoder's part is inside
            outer = {key: raw[key] for key in ("tie_word_embeddings",) if key in raw}
            raw = {**raw["text_config"], **outer}
        family = str(raw.get("model_type", ""))
        if family == "gemma3_text":
            raw = {**GEMMA3_DEFAULTS, **raw}
        if family not in FAMILIES:
            named = f"model_type {family!r}" if family else f"architectures {raw.get('architectures')!r}"
            raise ModelError(f"{named} is not a family that soothsay knows: {', '.join(FAMILIES)}")
        try:
            return _from_hf(cls, family, raw)
        except KeyError as error:
            raise ModelError(f"config.json of family {family!r} has no {error.args[0]!r}") from None


def _from_hf(cls: type[ModelConfig], family: str, raw: Mapping[str, Any]) -> ModelConfig:
    gemma = family.startswith("gemma")
    layers, heads = int(raw["num_hidden_layers"]), int(raw["num_attention_heads"])
    hidden = int(raw["hidden_size"])
    kv_heads = int(raw.get("num_key_value_heads") or heads)
    head_dim = int(raw.get("head_dim") or hidden // heads)
    if heads % kv_heads:
        raise ModelError(f"{heads} attention heads cannot share {kv_heads} key-value heads evenly")
    rope, local_rope = _ropes(family, raw)
    activation = raw.get("hidden_activation", "gelu_pytorch_tanh") if gemma else raw.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise ModelError(f"activation {activation!r} is not supported; known: {', '.join(ACTIVATIONS)}")
    attention_bias = bool(raw.get("attention_bias", False))
    return cls(
        family=family,
        vocab_size=int(raw["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=_max_positions(family, raw, rope),
        rope=rope,
        local_rope=local_rope,
        windows=_windows(family, raw, layers),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        activation=ACTIVATIONS[activation],
        tie_embeddings=bool(raw.get("tie_word_embeddings", gemma)),
        qkv_bias=family == "qwen2" or attention_bias,
        o_bias=family != "qwen2" and attention_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=family in ("qwen3", "qwen3_moe", "gemma3_text"),
        zero_centred_norms=gemma,
        post_norms=gemma,
        embedding_scale=hidden**0.5 if gemma else 1.0,
        attention_scale=float(raw.get("query_pre_attn_scalar") or head_dim) ** -0.5,
        attention_softcap=raw.get("attn_logit_softcapping"),
        logit_softcap=raw.get("final_logit_softcapping"),
        **(_experts(family, raw, layers) if family in ("mixtral", "qwen3_moe") else {}),
    )


def _experts(family: str, raw: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The fields of `ModelConfig` that only mixtures of experts have."""
    dense = set(raw.get("mlp_only_layers") or ())
    step = int(raw.get("decoder_sparse_step") or 1)
    count = raw.get("num_local_experts") or raw["num_experts"]
    return {
        "num_experts": int(count),
        "experts_per_token": int(raw["num_experts_per_tok"]),
        "expert_size": int(raw.get("moe_intermediate_size") or raw["intermediate_size"]),
        "normalize_experts": family == "mixtral" or bool(raw.get("norm_topk_prob", False)),
        "sparse_layers": tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0),
    }


def _ropes(family: str, raw: Mapping[str, Any]) -> tuple[RopeConfig, RopeConfig | None]:
    positions = int(raw["max_position_embeddings"])
    theta = float(raw.get("rope_theta") or (1e6 if family in ("gemma3_text", "mixtral") else 1e4))
    local_theta = float(raw.get("rope_local_base_freq") or 1e4)
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if "full_attention" in scaling:  # transformers 5 writes one mapping for each kind of layer
        local = RopeConfig.from_hf(scaling["sliding_attention"], local_theta, positions)
        return RopeConfig.from_hf(scaling["full_attention"], theta, positions), local
    local_rope = RopeConfig.from_hf({}, local_theta, positions) if family == "gemma3_text" else None
    return RopeConfig.from_hf(scaling, theta, positions), local_rope


def _max_positions(family: str, raw: Mapping[str, Any], rope: RopeConfig) -> int:
    """The context after scaling. Configurations of type llama3, and Gemma 3's, state it scaled already."""
    positions = int(raw["max_position_embeddings"])
    if rope.kind == "yarn":
        return max(positions, int(rope.original_max_positions * rope.factor))
    if rope.kind == "linear" and family != "gemma3_text":
        return int(positions * rope.factor)
    return positions


def _windows(family: str, raw: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    window = raw.get("sliding_window")
    if not window or (family.startswith("qwen") and not raw.get("use_sliding_window", False)):
        return (None,) * layers
    kinds = raw.get("layer_types")
    if kinds and family not in ("mistral", "mixtral", "qwen3_moe"):
        local = [kind == "sliding_attention" for kind in kinds]
    elif family == "gemma2":
        local = [i % 2 == 0 for i in range(layers)]
    elif family == "gemma3_text":
        pattern = int(raw.get("sliding_window_pattern") or 6)
        local = [(i + 1) % pattern != 0 for i in range(layers)]
    elif family in ("qwen2", "qwen3"):
        local = [i >= int(raw.get("max_window_layers", 28)) for i in range(layers)]
    else:  # mistral, mixtral, qwen3_moe: every layer
        local = [family != "llama"] * layers
    return tuple(int(window) if is_local else None for is_local in local)


@dataclass(frozen=True)
class EngineConfig:
    """The engine's numbers. None means: derive it from the model and the machine when the engine is built."""

    max_context: int | None = None
    """Tokens of prompt and answer in one request, at most. None: what the model was made for."""

    block_size: int = 16
    """Tokens in one block of the KV pool: so few that short prompts share prefixes and little is wasted in
    the last block, so many that block tables stay short."""

    kv_tokens: int | None = None
    """Tokens that the KV pool holds for all requests together. None: enough for `max_requests` full contexts,
    but no more than a quarter of the memory that is free."""

    max_requests: int = 64
    """Requests in one step, at most; more wait their turn. On a CPU sixteen rows cost about 1.3 times one, so
    there is little left to gain beyond."""

    max_rows: int = 512
    """Rows in one forward pass, at most: long prompts enter in chunks."""

    max_stall: float | None = None
    """Seconds that a step may take while prompts are read beside answers, or nearly so: chunks of prompts are
    cut to what fits. None: no limit, for those who wait for all answers together; a server has one."""

    max_tree: int = 16
    """Nodes in a request's draft tree, the root included, unless its drafter asks for fewer: sixteen rows are
    the most that cost little more than one on a CPU without AMX, and with it larger trees brought nothing."""

    prefix_caching: bool = True
    """Keep the KV of finished requests until the room is needed, and share equal prefixes."""


DType = Literal["auto", "float32", "bfloat16", "int8", "int4"]
"""What linear layers compute in. "auto": what the weights are stored in, if the machine is fast at it."""
