"""A block of guesses in one pass (P-EAGLE 2026, arXiv 2602.01469; DFlash 2026, arXiv 2602.06036).

The rows of EAGLE, a token with the target's feature before it, and behind the root as many rows that hold
nothing but learned vectors: one pass over all of them gives every guess at once. What guesses do not know of
each other, a small product of each token with the next can add.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from soothsay.config import DType, ModelConfig
from soothsay.drafters.base import Observation, Target, check_at_least_one
from soothsay.drafters.context import FeatureContext, Pass, State, pack
from soothsay.drafters.grown import Confident, GrownDrafter, _Growth
from soothsay.drafters.head import Head, Shared, load_head
from soothsay.drafters.template import Layout
from soothsay.engine.batch import Batch
from soothsay.engine.cache import KVPool
from soothsay.engine.request import Request
from soothsay.engine.tree import DraftTree
from soothsay.errors import DrafterError
from soothsay.model.kernels import Kernels
from soothsay.model.linear import Dense, normal
from soothsay.model.rope import Rope
from soothsay.model.transformer import Block, Blocks, Embedding, RMSNorm


@dataclass(frozen=True)
class BlockConfig:
    """What the drafter computes. It shares embedding and output head with the target."""

    block: ModelConfig
    """Of its decoder blocks; `num_layers` is their number, `hidden_size` must be the target's."""

    target_hidden_size: int
    taps: tuple[int, ...]
    """Layers of the target whose inputs, put together, are the feature."""

    size: int
    """Guesses in one pass."""

    markov_rank: int = 0
    """Rank of the product that corrects a guess by the token before it; 0: there is none."""

    def __post_init__(self) -> None:
        """Raise `DrafterError` for numbers that make no drafter."""
        if self.size < 1 or self.block.num_layers < 1 or not self.taps or self.markov_rank < 0:
            raise DrafterError(
                f"block with size={self.size}, {self.block.num_layers} layers, taps={self.taps}, "
                f"markov_rank={self.markov_rank}: it needs at least one guess, layer and tap, no rank below 0"
            )


class BlockHead(Head):
    """Guess 1 comes from the root's row, guess k + 1 from the k-th learned row behind it."""

    method = "block"

    def __init__(self, config: BlockConfig, kernels: Kernels):
        super().__init__()
        c = config.block
        self.config, self.kernels, self.taps = config, kernels, config.taps
        self.fc: nn.Module = Dense.random(len(config.taps) * config.target_hidden_size, c.hidden_size)
        self.embedding_norm = RMSNorm(c.hidden_size, c.norm_eps)
        self.feature_norm = RMSNorm(c.hidden_size, c.norm_eps)
        self.projection: nn.Module = Dense.random(2 * c.hidden_size, c.hidden_size)
        self.blocks = Blocks(Block(c, layer, kernels) for layer in range(c.num_layers))
        self.norm = RMSNorm(c.hidden_size, c.norm_eps)
        self.rope = Rope(c.rope, c.head_dim)
        self.queries = nn.Parameter(normal(config.size - 1, 2, c.hidden_size, std=1.0))
        self.markov_in: Embedding | None = None
        self.markov_out: nn.Module | None = None
        if config.markov_rank:
            self.markov_in = Embedding(normal(c.vocab_size, config.markov_rank, std=0.02), 1.0)
            self.markov_out = Dense(torch.zeros(c.vocab_size, config.markov_rank))

    @property
    def dtype(self) -> torch.dtype:
        """Of what its linear layers give, and of its keys and values."""
        return cast(Block, self.blocks[0]).dtype

    def fuse(self, taps: Sequence[Tensor], shared: Shared) -> Tensor:
        """`[N, H_target]` for each tap, as they are -> `[N, H]` float32."""
        return cast(Tensor, self.fc(torch.cat(list(taps), dim=-1))).float()

    def forward(
        self, embedded: Tensor, features: Tensor, batch: Batch, kv: Sequence[Tensor] | None = None
    ) -> Tensor:
        """One pass.

        Args:
            embedded: `[N, H]` of each row's token; of the k-th row behind a root, `queries[k - 1, 0]`.
            features: `[N, H]` fused, of the token before; of the k-th row behind a root, `queries[k - 1, 1]`.
            batch: where the rows stand.
            kv: keys and values of each block, `[2 * H_kv, S, d]`; None: they live within the pass.

        Returns:
            `[N, H]` normed, float32.
        """
        normed = [
            self.kernels.norm(embedded, self.embedding_norm, self.dtype),
            self.kernels.norm(features, self.feature_norm, self.dtype),
        ]
        x = cast(Tensor, self.projection(torch.cat(normed, dim=-1))).float()
        rope = self.rope(batch.positions)
        last = len(self.blocks)
        x = self.blocks(x, (rope, rope), batch, kv, range(last))[last]
        return self.kernels.norm(x, self.norm, torch.float32)

    def logits(self, hidden: Tensor, shared: Shared) -> Tensor:
        """`[M, H]` normed -> `[M, V]` float32, before `correct`."""
        return shared.logits(hidden)

    def correct(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """The logits of guesses, `[M, V]`, below the tokens `[M]`: `logits` itself if there is no product."""
        if self.markov_in is None or self.markov_out is None:
            return logits
        correction: Tensor = self.markov_out(self.markov_in(tokens))
        return logits + correction.float()


class BlockDrafter(GrownDrafter[FeatureContext]):
    """All guesses from one pass, and the tree is made of the likeliest.

    The keys of the learned rows stand where those of the next tokens will: these overwrite them. Without a
    product of each token with the next, the tree is the best one by the guesses' own probabilities. With it,
    the tree grows level by level, each guess corrected by the one above it.

    Args:
        target: the model to draft for.
        model: a directory with the drafter, or a `BlockHead`; "" is `drafters/block` beside the target.
        nodes: of the largest tree, the root not counted; `EngineConfig.max_tree` may allow fewer.
        branch: likeliest tokens at each depth, or below each node, that may stand in the tree.
        width: nodes of each level that are explored further, where the tree grows level by level; None: an
            eighth of the largest tree, and no fewer than 4.
        dtype: of the drafter's linear layers; "auto" is the target's.
    """

    trained = True

    def __init__(
        self,
        target: Target,
        model: str | Path | BlockHead = "",
        nodes: int = 63,
        branch: int = 8,
        width: int | None = None,
        dtype: DType = "auto",
    ):
        width = max(target.config.max_tree // 8, 4) if width is None else width
        check_at_least_one("block", nodes=nodes, branch=branch, width=width)
        self.served = load_head(BlockHead, model, target, dtype)
        self.head, self.shared, self.taps = self.served.head, self.served.shared, self.served.taps
        c = self.head.config.block
        pool = KVPool(
            (c.num_layers, c.num_kv_heads, c.head_dim),
            target.num_blocks,
            target.config.block_size,
            self.head.dtype,
            target.model.device,
        )
        super().__init__(
            target, FeatureContext(target, pool), Confident(self.head.config.size, width, branch)
        )
        self.max_nodes = 1 + nodes
        self.layout = Layout("best-first", self.head.config.size, branch, nodes)
        self._marginals = torch.empty(0)  # [M, V] of the last pass: for each request, of each depth

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """A tree for each request whose features are known, the root alone for the others."""
        if self.head.config.markov_rank:
            return super().propose(requests)
        trees = {request: DraftTree(int(request.tokens[-1])) for request in requests}
        ready = [request for request in requests if request.max_nodes > 1 and self.context.ready(request)]
        if ready:
            marginals = self._run(ready)
            depths = [len(logits) for logits in marginals]
            trees.update(zip(ready, self.layout.trees(ready, torch.cat(marginals), depths), strict=True))
        return [*trees.values()]

    def observe(self, observations: Sequence[Observation]) -> None:
        """Keep the features that the next rows read."""
        for batch in self.context.observe(observations, self.served.fuse):
            self._hidden(batch)

    @torch.inference_mode()
    def release(self, request: Request) -> None:
        """Forget a request, its last full blocks filled for those that go on from there."""
        for batch in self.context.close(request):
            self._hidden(batch)

    def _open(self, request: Request) -> State | None:
        return self.context.states[request] if self.context.ready(request) else None

    def _run_pending(self, growing: Sequence[_Growth]) -> Tensor:
        """What is known of each root, see `_outputs`: `[R, 2]`."""
        marginals = self._run([growth.request for growth in growing])
        self._marginals = torch.cat(marginals)
        rows = accumulate((len(logits) for logits in marginals), initial=0)
        known = [(row, growth.tree.tokens[0]) for row, growth in zip(rows, growing, strict=False)]
        return torch.tensor(known, device=self._marginals.device)

    def _outputs(self, batch: Pass) -> Tensor:
        """Of each node, the row of the marginals for what is below it, and its token: `[M, 2]` int64."""
        tokens = [token for rows in batch.rows if rows.tree for token in rows.tree.tokens[rows.first :]]
        rows = torch.cat(batch.features)[:, 0] + 1
        return torch.stack([rows, torch.tensor(tokens, device=rows.device)], dim=1)

    def _logits(self, outputs: Tensor) -> Tensor:
        rows, tokens = outputs.unbind(1)
        return self.head.correct(self._marginals.index_select(0, rows), tokens)

    def _run(self, requests: Sequence[Request]) -> list[Tensor]:
        """The pass: for each request, `[D, V]` logits of the first D tokens behind its root."""
        chains = {}
        for request in requests:
            depth = min(self.head.config.size, request.max_nodes)
            chains[request] = DraftTree(int(request.tokens[-1]))
            chains[request].extend([0] * (depth - 1))  # learned rows; their tokens are not read
        found: dict[Request, Tensor] = {}
        for batch in self.context.catch_up(chains):
            logits = self.head.logits(self._hidden(batch), self.shared)
            found.update(
                zip(batch.ends, torch.split(logits, [len(chains[r]) for r in batch.ends]), strict=True)
            )
        return [found[request] for request in requests]

    def _hidden(self, batch: Pass) -> Tensor:
        """`[M, H]` of a pass's logit rows."""
        c, begin = self.head.config.block, 0
        packed = pack(batch.rows, self.target, c.group, c.windows)
        embedded = self.shared.embed(packed.tokens)
        features = torch.empty_like(embedded)
        for rows, read in zip(batch.rows, batch.features, strict=True):
            behind, end = begin + len(rows.tokens), begin + rows.num_rows
            features[begin:behind] = read
            embedded[behind:end] = self.head.queries[: end - behind, 0]
            features[behind:end] = self.head.queries[: end - behind, 1]
            begin = end
        hidden: Tensor = self.head(embedded, features, packed, self.context.pool.layers)
        return hidden.index_select(0, packed.logit_rows)
