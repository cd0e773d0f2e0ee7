"""Multi-token prediction (DeepSeek-V3, 2024, arXiv 2412.19437): modules that were trained with the target."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from soothsay.config import DType, ModelConfig
from soothsay.drafters.base import Target
from soothsay.drafters.context import Pass
from soothsay.drafters.grown import Confident, RecurrentDrafter
from soothsay.drafters.head import Head, RecurrentHead, load_head
from soothsay.engine.batch import Batch
from soothsay.engine.request import Request
from soothsay.model.kernels import Kernels
from soothsay.model.linear import Dense
from soothsay.model.rope import Rope
from soothsay.model.transformer import Block, RMSNorm


@dataclass(frozen=True)
class MTPConfig:
    """What a checkpoint's modules compute. They share embedding and output head with the target."""

    block: ModelConfig
    """Of the module's decoder block; its `num_layers` is the number of modules."""

    target_layers: int
    """Decoder blocks of the target; its last output is what the first module reads."""

    hidden_first: bool = False
    """Whether the projection takes cat[hidden, embedding] (MiMo) and not cat[embedding, hidden]."""

    zero_first: bool = False
    """Whether the first row's embedding is zero (DeepSeek, GLM, MiMo)."""


class MTPModule(nn.Module):
    """One module: embedding of a token and the hidden state before it, each normed, through one block."""

    def __init__(self, config: MTPConfig, layer: int, kernels: Kernels):
        super().__init__()
        c = config.block
        self.config, self.kernels = config, kernels
        self.embedding_norm = RMSNorm(c.hidden_size, c.norm_eps)
        self.hidden_norm = RMSNorm(c.hidden_size, c.norm_eps)
        self.projection: nn.Module = Dense.random(2 * c.hidden_size, c.hidden_size)
        self.block = Block(c, layer, kernels)
        self.norm = RMSNorm(c.hidden_size, c.norm_eps)

    def forward(
        self, embedded: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor], batch: Batch, kv: Tensor | None
    ) -> Tensor:
        """`[N, H]` embeddings of tokens, `[N, H]` normed states before them -> `[N, H]` normed, float32."""
        dtype = self.block.dtype
        parts = [
            self.kernels.norm(embedded, self.embedding_norm, dtype),
            self.kernels.norm(hidden, self.hidden_norm, dtype),
        ]
        x = self.projection(torch.cat(parts[::-1] if self.config.hidden_first else parts, dim=-1))
        return self.kernels.norm(self.block(x.float(), rope, batch, kv), self.norm, torch.float32)


class MTPHead(RecurrentHead):
    """The modules, first to last; the last one is used again for guesses further ahead."""

    method = "mtp"
    config: MTPConfig

    def __init__(self, config: MTPConfig, kernels: Kernels):
        super().__init__()
        self.config = config
        self.taps = (config.target_layers,)
        self.rope = Rope(config.block.rope, config.block.head_dim)
        self.steps = nn.ModuleList(
            MTPModule(config, layer, kernels) for layer in range(config.block.num_layers)
        )

    @property
    def dtype(self) -> torch.dtype:
        """Of what its linear layers give, and of its KV."""
        return cast(MTPModule, self.steps[0]).block.dtype

    def forward(
        self, embedded: Tensor, features: Tensor, batch: Batch, kv: Tensor | None, step: int = 0
    ) -> Tensor:
        """Module `step`; see `RecurrentHead`. Outputs are normed, as the output head reads them."""
        if self.config.zero_first:
            embedded = embedded.masked_fill((batch.positions == FIRST_ROW)[:, None], 0.0)
        out: Tensor = self.steps[step](embedded, features, self.rope(batch.positions), batch, kv)
        return out


FIRST_ROW = 1
"""There is no row 0, which would read the feature of a token before the first."""


class MTP(RecurrentDrafter):
    """The target's own modules draft: the first guess is the first module's, the second the second's.

    Guess k + 1 is module k's, or the last one's again. A module reads the output of the one before it at the
    row before, so all of them run over the committed tokens; where a request begins, zeros stand for it.

    Args:
        target: the model to draft for.
        model: a checkpoint's directory, or a head; empty: `drafters/mtp` beside the target's weights, or the
            target's own checkpoint.
        depth: tokens that are guessed in a row.
        width: nodes of each level that are explored further; None: as many as the largest tree has room for.
        branch: likeliest tokens proposed below each of them; None: one more than `width`.
        dtype: the modules', as in `LLM`; "auto" is the target's.
    """

    def __init__(
        self,
        target: Target,
        model: str | Path | Head = "",
        depth: int = 8,
        width: int | None = None,
        branch: int | None = None,
        dtype: DType = "auto",
    ):
        shape = Confident.within("mtp", target, depth, width, branch)
        served = load_head(MTPHead, model, target, dtype)
        super().__init__(target, served, shape)
        self.head = served.head
        self._last: dict[Request, Tensor] = {}  # [D, H] the modules' outputs at a request's last row
        self._ends: dict[int, Tensor] = {}  # and at the last rows of full blocks

    def release(self, request: Request) -> None:
        """See `RecurrentDrafter`."""
        super().release(request)
        self._last.pop(request, None)

    def _outputs(self, batch: Pass) -> Tensor:
        """`[M, n * H]`: of the module whose guess comes next, and of those behind it."""
        packed = self._pack(batch)
        embedded = self.head.embed(packed.tokens, self.served.shared)
        num, size = self.head.config.block.num_layers, self.head.config.block.hidden_size
        read = torch.split(torch.cat(batch.features), size, dim=1)  # by as many modules, in their order
        committed = len(batch.rows[0].tokens) > 0
        count = num if committed else max(len(read) - 1, 1)
        outs: list[Tensor] = []
        for i, module in enumerate(range(num - count, num)):
            before = self._before(batch, outs[-1], module) if committed and outs else read[i].contiguous()
            outs.append(self.head(embedded, before, packed, self.context.pool.layers[module], module))
        if committed and num > 1:
            self._keep(batch, torch.stack(outs, dim=1))
        return torch.cat(outs, dim=1).index_select(0, packed.logit_rows)

    def _keep(self, batch: Pass, outs: Tensor) -> None:
        """Note what the rows that come next read, of `[N, D, H]` outputs at committed tokens."""
        size = self.target.config.block_size
        parts = torch.split(outs, [len(rows.tokens) for rows in batch.rows])
        for request, rows, own in zip(batch.requests, batch.rows, parts, strict=True):
            self._last[request] = own[-1]
            for block in range(rows.start // size, (rows.start + len(own)) // size):
                assert rows.table is not None
                self._ends[int(rows.table[block])] = own[(block + 1) * size - 1 - rows.start].clone()

    def _before(self, batch: Pass, out: Tensor, module: int) -> Tensor:
        """What `module` reads at committed tokens: of the row before, what the module before has put out."""
        parts: list[Tensor] = []
        outs = torch.split(out, [len(rows.tokens) for rows in batch.rows])
        for request, rows, own in zip(batch.requests, batch.rows, outs, strict=True):
            last = self._last.get(request)
            if last is None and rows.start > rows.first_key and rows.table is not None:  # others' block
                last = self._ends[int(rows.table[rows.start // self.target.config.block_size - 1])]
            parts += [own.new_zeros(1, own.shape[1]) if last is None else last[None, module - 1], own[:-1]]
        return torch.cat(parts)

    def _logits(self, outputs: Tensor) -> Tensor:
        return super()._logits(outputs[:, : self.head.config.block.hidden_size].contiguous())
