"""Specs of parts in which tokens read the keys and values of tokens before them, and of their positions."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeSpec:
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


NO_ROTATION = RopeSpec(kind="none")
"""Nothing rotates."""


@dataclass(frozen=True)
class HeadRotation:
    """How the heads of queries and keys rotate. Layers whose heads rotate equally share a module `Rope`."""

    rope: RopeSpec
    size: int  # dimensions of a head
    rotated: int | None = None  # the first dimensions of a head, which rotate; None: all
    neighbours: bool = False  # as stored, dimensions 2 i and 2 i + 1 of a head rotate together


@dataclass(frozen=True)
class QueryGrowthSpec:
    """Queries are multiplied by `1 + beta ln(1 + floor((position + shift) / span))`."""

    beta: float
    span: int
    max_positions: int  # beyond these, the factor stays
    shift: int = 0


ANOTHER_MODEL = -1
"""In place of a layer whose keys and values are read: they are another model's."""


@dataclass(frozen=True)
class HeadNorms:
    """Root mean square norms of queries and keys, before they rotate."""

    eps: float
    over_heads: bool = False  # OLMo 2 and 3: a norm of all queries together, and one of all keys
    learned: bool = True  # False: Llama 4's norms, without weights
    values: bool = False  # Gemma 4: values are normed, without weights
    last: bool = False  # Hunyuan: their weights multiply heads that have rotated


@dataclass(frozen=True)
class RelativeSpec:
    """Each head adds a learned number to a score, by the distance of the key (T5, arXiv 1910.10683).

    Near distances have numbers of their own, farther ones share them in buckets that grow with the distance.
    """

    buckets: int
    most: int  # the distance from which on all share one
    both_ways: bool  # keys after the row have half of the buckets
    layer: int = 0  # whose numbers they are


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention with rotary positions."""

    heads: int
    kv_heads: int
    rotation: HeadRotation
    scale: float  # of scores
    window: int | None = None  # sliding window in tokens; None: a row sees everything before it.
    # -n: a row sees the positions from the last multiple of n on, as in Llama 4
    softcap: float | None = None
    norms: HeadNorms | None = None
    bias: bool = False  # of queries, keys and values
    o_bias: bool = False
    gated: bool = False  # outputs are multiplied by the sigmoid of a gate for each number
    gates_apart: bool = False  # AFMoE: as stored, gates are a matrix of their own
    sinks: bool = False  # gpt-oss: each head has a score of a key without a value, which all rows see
    growth: QueryGrowthSpec | None = None
    keys_are_values: bool = False  # Gemma 4: values are the keys before their norm and their rotation
    reads: int | None = None  # Gemma 4: the layer whose keys and values it reads; None: its own
    clip: float | None = None  # OLMo: the largest size of numbers in queries, keys and values
    by_key_head: bool = False  # GPT-NeoX, Falcon: as stored, the rows of each key head stand together
    relative: RelativeSpec | None = None
    inner_eps: float | None = None  # BitNet: of a norm of all heads' outputs; None: there is none

    @property
    def size(self) -> int:
        """Dimensions of a head."""
        return self.rotation.size

    @property
    def group(self) -> int:
        """Query heads that share one key-value head."""
        return self.heads // self.kv_heads

    @property
    def projections(self) -> int:
        """How many of queries, keys and values are products of their own."""
        if self.reads is not None:
            return 1
        return 2 if self.keys_are_values else 3

    @property
    def stored_rows(self) -> list[int]:
        """The rows of queries, keys and values in checkpoints. Gates are among queries, or after them."""
        queries, keys = self.heads * self.size, self.kv_heads * self.size
        read = [queries, queries] if self.gates_apart else [queries * (1 + self.gated)]
        return read + [keys] * (self.projections - 1)

    @property
    def kv_shape(self) -> tuple[int, int]:
        """Its heads in the KV pool, keys' and values', and their size."""
        return 0 if self.reads is not None else 2 * self.kv_heads, self.size

    def num_parameters(self, hidden: int) -> int:
        """Weights in matrices."""
        keys = self.kv_heads * (self.projections - 1)
        return hidden * ((2 + self.gated) * self.heads + keys) * self.size


@dataclass(frozen=True)
class LatentSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

    Per token, the KV pool holds one row for all heads: a normed latent state, of which each head makes keys
    and values, and a rotated key.
    """

    heads: int
    rank: int  # size of the latent state
    rotation: HeadRotation  # of the key that rotates
    plain: int  # dimensions of a head's other keys
    value: int  # dimensions of a head's values
    scale: float  # of scores
    query_rank: int | None = None  # queries are made of a normed state of this size; None: of the input
    growth: QueryGrowthSpec | None = None
    window: int | None = None
    softcap: float | None = None
    bias: bool = False
    o_bias: bool = False

    @property
    def rotated(self) -> int:
        """Dimensions of the rotated key."""
        return self.rotation.size

    @property
    def group(self) -> int:
        """Query heads that share one key-value head: all."""
        return self.heads

    @property
    def kv_shape(self) -> tuple[int, int]:
        """Its heads in the KV pool, and their size."""
        return 1, self.rank + self.rotated

    def num_parameters(self, hidden: int) -> int:
        """Weights in matrices."""
        queries = self.heads * (self.plain + self.rotated)
        q = hidden * queries if self.query_rank is None else self.query_rank * (hidden + queries)
        heads = self.heads * (self.rank * (self.plain + self.value) + self.value * hidden)
        return q + hidden * (self.rank + self.rotated) + heads
