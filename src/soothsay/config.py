"""Everything that can be configured, as frozen dataclasses.

`ModelConfig` says what a decoder computes. A model family is a value of it, never a subclass;
`soothsay.model.families` makes the values. `EngineConfig` is the one home of the engine's numbers, each with
the reason for its default.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral, Real
from typing import Literal

from soothsay.errors import ModelError
from soothsay.states_config import ConvolutionConfig, DeltaConfig, StatesConfig, StateSpaceConfig

DType = Literal["auto", "float32", "bfloat16", "int8", "int4"]
"""What linear layers compute in. "auto": what the weights are stored in, if the machine is fast at it."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864) and its long-context scalings."""

    theta: float = 10_000.0
    kind: str = "default"  # or linear, llama3, yarn, longrope, proportional, none (nothing rotates)
    factor: float = 1.0
    original_max_positions: int = 0  # llama3, yarn, longrope: the context of the first training
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn, longrope: scales cos and sin; None: derived from `factor`
    mscale: float = 0.0  # yarn, as DeepSeek writes it
    mscale_all_dim: float = 0.0
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    short_factors: tuple[float, ...] = ()  # longrope: divisors of the frequencies, one for each pair
    long_factors: tuple[float, ...] = ()
    context: int = 0  # longrope: the longest context that is served; it chooses between the factors
    share: float = 1.0  # proportional: the share of the pairs that turn; their frequencies are those of all


@dataclass(frozen=True)
class QueryGrowthConfig:
    """Queries are multiplied by `1 + beta ln(1 + floor((position + shift) / span))`."""

    beta: float
    span: int
    shift: int = 0
    unrotated: bool = False  # only in layers that do not rotate


@dataclass(frozen=True)
class HeadsConfig:
    """The key-value heads of one layer's attention."""

    count: int
    size: int  # dimensions of each, and of query heads
    keys_are_values: bool = False  # values are the keys before their norm and their rotation


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

    Per layer and token, the KV pool holds one row for all heads: a normed latent state, of which each head
    makes keys and values, and a rotated key.
    """

    rank: int  # size of the latent state
    rotated: int  # dimensions of the rotated key
    plain: int  # dimensions of a head's other keys
    value: int  # dimensions of a head's values
    # queries are made of a normed state of this size; None: of the block's input
    query_rank: int | None = None


@dataclass(frozen=True)
class ExpertsConfig:
    """Mixtures of experts, which are the feed-forward part of some layers."""

    count: int
    chosen: int  # experts of each row
    size: int  # as `intermediate_size`, of one expert
    layers: tuple[int, ...]  # those that have experts
    normalize: bool = True  # the weights of the chosen experts add up to 1
    sigmoid: bool = False  # an expert's weight is the sigmoid of its score, not its softmax among all
    corrected: bool = False  # a learned number is added to each weight, for the choice alone
    correction_name: str = "e_score_correction_bias"  # name of these numbers in checkpoints
    groups: int = 1  # experts are chosen from the best groups of consecutive experts
    groups_chosen: int = 1
    group_best: int = 2  # a group is worth as much as this many of its best experts together
    scale: float = 1.0  # factor of all weights
    shared_size: int = 0  # as `intermediate_size`, of the part that all rows run through beside their experts
    router_bias: bool = False
    shared_gate: bool = False  # the shared part is multiplied by the sigmoid of a score of its own
    scales_inputs: bool = False  # Llama 4: experts read a row times its weight
    beside_dense: bool = False  # Gemma 4: layers have a dense part too, and each of the two norms of its own
    latent_size: int | None = None  # Nemotron 3 Super: experts read and write states of this size


@dataclass(frozen=True)
class AlternatingConfig:
    """Layers that predict and correct a stream of several parts. See `soothsay.model.alternating`."""

    parts: int  # of the residual stream, each of the hidden size
    scaled: bool  # what a layer's own embedding is gated by is multiplied by a learned vector
    laurel_rank: int  # inner size of the learned residual layer
    sparsity: tuple[float, ...]  # for each layer, the share of gates that become zero


@dataclass(frozen=True)
class ModelConfig:
    """What one decoder computes."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # with latent attention, of the parts that rotate
    max_positions: int
    rope: RopeConfig
    windows: tuple[int | None, ...]  # for each layer, its sliding window in tokens; None: it sees everything.
    # -n: a row sees the positions from the last multiple of n on, as in Llama 4
    second_rope: RopeConfig | None = None  # of some layers: other frequencies, or none
    second_rope_layers: tuple[int, ...] = ()
    rotary_dim: int | None = None  # the first dimensions of a head, which rotate; None: all
    rotates_neighbours: bool = False  # as stored, dimensions 2 i and 2 i + 1 of a head rotate together
    norm_eps: float = 1e-6
    activation: str = "silu"  # "relu2" is a squared ReLU, without a gate
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_unit_norm: bool = False  # Llama 4: where a layer rotates, a norm of each head without weights
    qk_norm_over_heads: bool = False  # OLMo 2 and 3: a norm of all queries together, and one of all keys
    value_norm: bool = False  # Gemma 4: values are normed, without weights
    global_heads: HeadsConfig | None = None  # Gemma 4: of layers without a window; None: those of the others
    num_shared_kv_layers: int = 0  # Gemma 4: the last layers, which read keys and values of layers before
    wide_shared_kv_layers: bool = False  # the feed-forward parts of these layers have twice the size
    layer_embedding_size: int | None = None  # Gemma 4: each layer reads an embedding of its own
    layer_vocab_size: int | None = (
        None  # Gemma 3n: tokens with embeddings for layers; the others have token 0's
    )
    alternating: AlternatingConfig | None = None  # Gemma 3n: the residual stream has several parts
    layer_scalars: bool = False  # Gemma 4: each layer's output is multiplied by a number
    centred_norms: bool = False  # Cohere: a norm subtracts the mean first
    parallel: bool = False  # Cohere: attention and the feed-forward part read the same normed stream
    # Nemotron-H: each layer is a single part, and these are feed-forward parts; None: each layer has both
    feed_forward_layers: tuple[int, ...] | None = None
    mlp_multipliers: tuple[float, float] | None = None  # Falcon-H1: of gates, and of the part's outputs
    zero_centred_norms: bool = False  # Gemma: a norm's weight w is stored as w - 1
    pre_norms: bool = True  # a norm before attention and before the feed-forward part
    post_norms: bool = False  # a norm after attention and after the feed-forward part
    embedding_scale: float = 1.0
    embedding_scale_rounded: bool = False  # Gemma: to the dtype of the embedding's table, as in training
    residual_multiplier: float = 1.0  # Granite: what attention and feed-forward part add is multiplied by it
    attention_scale: float = 1.0
    attention_softcap: float | None = None
    sinks: bool = False  # gpt-oss: each head has a score of a key without a value, which all rows see
    query_growth: QueryGrowthConfig | None = None  # Ministral 3, Llama 4
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None  # attention over latent states, which are one key-value head
    delta: DeltaConfig | None = None  # some layers keep a state instead of keys and values
    convolution: ConvolutionConfig | None = None  # some layers read the last tokens by a convolution
    state_space: StateSpaceConfig | None = None  # some layers are Mamba-2's
    gated_attention: bool = False  # attention's output is multiplied by the sigmoid of a gate for each number

    @property
    def states(self) -> StatesConfig | None:
        """The layers that keep a state instead of keys and values, or beside them."""
        return self.delta or self.convolution or self.state_space

    @cached_property
    def group(self) -> int:
        """Query heads that share one key-value head. The greatest common divisor, if layers differ."""
        return math.gcd(*(self.num_heads // self.heads(i).count for i in range(self.num_layers)))

    @property
    def stream_size(self) -> int:
        """Size of a row between two blocks."""
        return self.hidden_size * (1 if self.alternating is None else self.alternating.parts)

    def heads(self, layer: int) -> HeadsConfig:
        """The key-value heads that a layer reads."""
        if self.global_heads is not None and self.windows[layer] is None:
            return self.global_heads
        return HeadsConfig(self.num_kv_heads, self.head_dim)

    @cached_property
    def kv_layers(self) -> tuple[int, ...]:
        """For each layer, the layer whose keys and values it reads: itself, or the last one of its kind that
        has its own. There are two kinds: layers with a window, and layers without. -1: another model's."""
        own, last = self.num_layers - self.num_shared_kv_layers, self.last_kv_layers
        shared = (last.get(window is None, -1) for window in self.windows[own:])
        return (*range(own), *shared)

    @cached_property
    def last_kv_layers(self) -> Mapping[bool, int]:
        """The last layers with keys and values of their own. True: without a window. False: with one."""
        own = self.num_layers - self.num_shared_kv_layers
        layers = [layer for layer in range(own) if self.has_keys(layer)]
        return {self.windows[layer] is None: layer for layer in layers}

    def shares_kv(self, layer: int) -> bool:
        """Whether a layer reads the keys and values of another one."""
        return self.kv_layers[layer] != layer

    def mlp_size(self, layer: int) -> int:
        """`intermediate_size` of one layer's dense feed-forward part."""
        is_wide = self.wide_shared_kv_layers and self.shares_kv(layer)
        return self.intermediate_size * (2 if is_wide else 1)

    @property
    def has_common_blocks(self) -> bool:
        """Whether blocks compute no more than Llama's and Gemma's do. Heads of drafters are made of these."""
        return self.has_native_blocks and self.states is None and not self.gated_attention

    @property
    def has_native_blocks(self) -> bool:
        """Whether one native call runs the blocks."""
        special = (
            *(self.qk_norm_over_heads, self.centred_norms, self.parallel, self.value_norm),
            *(self.layer_scalars, self.layer_embedding_size, self.num_shared_kv_layers),
            *(self.query_growth, self.latent, self.global_heads, self.mlp_multipliers, self.alternating),
        )
        is_whole = self.feed_forward_layers is None and self.activation != "relu2"
        return self.pre_norms and is_whole and not any(special)

    @property
    def num_parameters(self) -> int:
        """Weights of the whole model in matrices. Biases and norms are left out."""
        hidden, layers = self.hidden_size, range(self.num_layers)
        total = self.vocab_size * hidden * (1 if self.tie_embeddings else 2)
        total += sum(self.attention_parameters(i) + self.mlp_parameters(i) for i in layers)
        if self.layer_embedding_size is not None:  # a table, its projection, and two matrices in each layer
            rows = self.layer_vocab_size or self.vocab_size
            total += (rows + 3 * hidden) * self.layer_embedding_size * self.num_layers
        if self.alternating is not None:
            a = self.alternating
            own = (2 * a.laurel_rank + a.parts) * hidden + (a.parts + 1) * a.parts**2
            total += own * self.num_layers + 2 * (a.parts - 1) * hidden**2
        return total

    def attention_parameters(self, layer: int) -> int:
        """Weights of a layer's attention, and of what stands beside it or takes its place, in matrices."""
        kept = self._state_parameters if self.keeps_state(layer) else 0
        return kept + (self._key_parameters(layer) if self.has_keys(layer) else 0)

    def mlp_parameters(self, layer: int) -> int:
        """Weights of a layer's feed-forward part in matrices."""
        if self.feed_forward_layers is not None and self.has_attention(layer):
            return 0
        matrices, hidden, total = 2 if self.activation == "relu2" else 3, self.hidden_size, 0
        if self.experts is not None and self.is_sparse(layer):
            e, width = self.experts, self.experts.latent_size or hidden
            total = e.count * (matrices * e.size * width + hidden)
            total += (matrices * e.shared_size + e.shared_gate) * hidden
            total += 0 if e.latent_size is None else 2 * hidden * e.latent_size
            if not e.beside_dense:
                return total
        return total + matrices * hidden * self.mlp_size(layer)

    @property
    def _state_parameters(self) -> int:
        """Weights in matrices of what keeps a state in a layer."""
        if self.delta is not None:
            d = self.delta
            products = self.hidden_size * (d.channels + 2 * d.values + 2 * d.value_heads)
            return products + d.taps * d.channels
        if self.convolution is not None:
            return (4 * self.hidden_size + self.convolution.taps) * self.convolution.channels
        m = self.state_space
        assert m is not None
        return self.hidden_size * (2 * m.size + m.channels + m.heads) + m.taps * m.channels

    def _key_parameters(self, layer: int) -> int:
        """Weights of a layer's attention in matrices."""
        c = self.latent
        if c is None:
            own = self.heads(layer)
            keys = 0 if self.shares_kv(layer) else own.count * (1 if own.keys_are_values else 2)
            return self.hidden_size * ((2 + self.gated_attention) * self.num_heads + keys) * own.size
        queries, hidden = self.num_heads * (c.plain + c.rotated), self.hidden_size
        q = hidden * queries if c.query_rank is None else c.query_rank * (hidden + queries)
        heads = self.num_heads * (c.rank * (c.plain + c.value) + c.value * hidden)
        return q + hidden * (c.rank + c.rotated) + heads

    @property
    def kv_shapes(self) -> tuple[tuple[int, int], ...]:
        """For each layer with keys of its own: its heads in the KV pool, keys' and values', and their size.

        The last layers may share the keys of others. Layers without attention have no heads.
        """
        if self.latent is not None:
            return ((1, self.latent.rank + self.latent.rotated),) * self.num_layers
        own = range(self.num_layers - self.num_shared_kv_layers)
        heads = ((2 if self.has_keys(layer) else 0, self.heads(layer)) for layer in own)
        return tuple((parts * own.count, own.size) for parts, own in heads)

    def has_attention(self, layer: int) -> bool:
        """Whether a layer has attention, or what takes its place."""
        return self.feed_forward_layers is None or layer not in self.feed_forward_layers

    def has_keys(self, layer: int) -> bool:
        """Whether a layer reads keys and values."""
        return self.has_attention(layer) and not self.is_recurrent(layer)

    def keeps_state(self, layer: int) -> bool:
        """Whether a layer keeps a state."""
        return self.states is not None and layer in self.states.layers

    def is_recurrent(self, layer: int) -> bool:
        """Whether a layer keeps a state instead of keys and values."""
        has_both = self.state_space is not None and self.state_space.beside is not None
        return self.keeps_state(layer) and not has_both

    def is_unrotated(self, layer: int) -> bool:
        """Whether a layer's queries and keys do not rotate."""
        rope = self.second_rope if layer in self.second_rope_layers else self.rope
        return rope is not None and rope.kind == "none"

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer's feed-forward part is a mixture of experts."""
        return self.experts is not None and layer in self.experts.layers


LEAST = {
    "max_context": 2,  # a prompt and an answer
    "kv_tokens": 1,
    "snapshot_bytes": 0,
    "block_size": 1,
    "max_requests": 1,
    "max_rows": 1,
    "max_tree": 1,
    "engines": 1,
}
"""The least values of the engine's whole numbers."""


@dataclass(frozen=True)
class EngineConfig:
    """The engine's numbers. A None is derived from the model and the machine when the engine is built.

    Args:
        max_context: limit of tokens in one request, prompt and answer together. None: the model's own.
        block_size: tokens in one block of the KV pool. Small blocks let short prompts share prefixes and
            waste little; large blocks keep block tables short.
        kv_tokens: tokens that the KV pool holds for all requests together. None: enough for `max_requests`
            full contexts, but no more than a quarter of the free memory.
        max_requests: limit of requests in one step; the others wait. On a CPU 16 rows take about 1.3 times as
            long as one row, so more requests at a time would gain little.
        max_rows: limit of rows in one forward pass. Longer prompts are read in chunks.
        max_stall: limit of seconds for a step in which prompts are read: others answer, or come, meanwhile.
            Prefill chunks are cut to fit. None: no limit, for callers that wait for all answers together; a
            server sets one.
        max_tree: limit of nodes in a request's draft tree, the root included. A drafter may want fewer. On a
            CPU without AMX, a pass of 16 rows takes little longer than one of a single row. With AMX, larger
            trees gained nothing.
        snapshot_bytes: memory of the prefix cache for copies of states, in models with recurrent layers. A
            prompt continues from the last copy in the prefix that it shares. None: a sixteenth of the free
            memory, at most two copies for each of `max_requests`.
        prefix_caching: whether finished requests keep their KV until the memory is needed, and equal prefixes
            share it.
        learn: share of one core's time, 0 to 1, in which trained drafters learn from the target's answers. 0:
            they do not learn. Tokens do not depend on it.
        learn_for_tenants: whether drafters learn for each tenant apart. Otherwise they learn only from
            requests without a tenant.
        engines: limit of engines with this configuration that share the machine's memory.

    Raises:
        ModelError: a number cannot work.
    """

    max_context: int | None = None
    block_size: int = 16
    kv_tokens: int | None = None
    max_requests: int = 64
    max_rows: int = 512
    max_stall: float | None = None
    max_tree: int = 16
    snapshot_bytes: int | None = None
    prefix_caching: bool = True
    learn: float = 0.0
    learn_for_tenants: bool = False
    engines: int = 1

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            value, optional = getattr(self, name), self.__dataclass_fields__[name].default is None
            if value is None and optional:
                continue
            if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
                what = f"an integer, at least {least}{', or None' if optional else ''}"
                raise ModelError(f"{name}={value!r} is not possible: it must be {what}")
        if not isinstance(self.learn, Real) or not 0 <= self.learn <= 1:
            raise ModelError(f"learn={self.learn!r} is not possible: it is a share of time, from 0 to 1")
        stall = self.max_stall
        if stall is not None and (not isinstance(stall, Real) or not stall > 0):
            raise ModelError(f"max_stall={stall!r} is not possible: it must be above 0 seconds, or None")
