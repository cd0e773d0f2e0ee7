"""Multi-token prediction (DeepSeek-V3, 2024, arXiv 2412.19437): modules that are trained with the target."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from soothsay.core.batch import Batch
from soothsay.core.request import Request
from soothsay.drafters.heads.mtp.mtp_head import MTPHead
from soothsay.drafters.heads.recurrent_drafter import ConfidentDrafter, Outputs
from soothsay.drafters.trees.own_kv import DraftPass


class MTP(ConfidentDrafter):
    """Drafts with modules that were trained with the target: module k predicts the token k + 1 ahead.

    The last module is used again for tokens further ahead. Module k reads the output of module k - 1 at the
    row before. So all modules are computed over committed tokens. Zeros stand for the missing output before
    a request's first row.

    Example:
        With modules A and B, a root r and a node n below it: A at r predicts n. B at n reads A's output at r,
        and predicts the token below n. B at that token reads B's output at n.
    """

    method, kind = "mtp", MTPHead

    @property
    def num_modules(self) -> int:
        """Number of modules."""
        return self.served.head.config.block.num_layers

    @cached_property
    def _last(self) -> _LastOutputs:
        return _LastOutputs(self.target.config.block_size)

    def release(self, request: Request) -> None:
        """Forget a request, after its full blocks are complete for other requests."""
        super().release(request)
        self._last.release(request)

    def run(self, batch: DraftPass) -> Outputs:
        """Compute all modules over committed tokens, each after the one before it."""
        if self.num_modules == 1:
            return super().run(batch)
        packed, outs = self.pack(batch.rows), list[Tensor]()
        for module in range(self.num_modules):
            read = self._last.before(batch, outs[-1], module - 1) if outs else torch.cat(batch.features)
            outs.append(self.run_module(packed, read, module))
        self._last.keep(batch, torch.stack(outs, dim=1))
        return tuple(packed.select_logit_rows(out) for out in outs)

    def run_nodes(self, packed: Batch, read: Outputs) -> Outputs:
        """Compute the modules that predict the next levels; each reads the module before it at the parent.

        `read` begins with the module that predicted the nodes. The last module alone reads itself.
        """
        first = self.num_modules - max(len(read) - 1, 1)
        modules = range(first, self.num_modules)
        return tuple(self.run_module(packed, out, i) for i, out in zip(modules, read, strict=False))


class _LastOutputs:
    """Keeps the modules' outputs at the last row of each request, and at the last row of each full block.

    The row after reads them: of the same request, or of another request that begins after the same block.
    """

    def __init__(self, block_size: int):
        self._block_size = block_size
        self._of_request: dict[Request, Tensor] = {}  # [D, H], of D modules
        self._of_block: dict[int, Tensor] = {}  # [D, H], at the block's last row

    def keep(self, batch: DraftPass, outs: Tensor) -> None:
        """Keep what rows after a pass read, of `[N, D, H]` outputs at its committed tokens."""
        size = self._block_size
        parts = torch.split(outs, [len(rows.tokens) for rows in batch.rows])
        for request, rows, own in zip(batch.requests, batch.rows, parts, strict=True):
            self._of_request[request] = own[-1]
            for block in range(rows.start // size, (rows.start + len(own)) // size):
                assert rows.table is not None
                self._of_block[int(rows.table[block])] = own[(block + 1) * size - 1 - rows.start].clone()

    def before(self, batch: DraftPass, out: Tensor, module: int) -> Tensor:
        """Return `[N, H]`, the outputs of `module` at the row before each row. `out`: those at the rows."""
        parts: list[Tensor] = []
        outs = torch.split(out, [len(rows.tokens) for rows in batch.rows])
        for request, rows, own in zip(batch.requests, batch.rows, outs, strict=True):
            last = self._of_request.get(request)
            if last is None and rows.start > rows.first_key and rows.table is not None:
                # of another request
                last = self._of_block[int(rows.table[rows.start // self._block_size - 1])]
            parts += [own.new_zeros(1, own.shape[1]) if last is None else last[None, module], own[:-1]]
        return torch.cat(parts)

    def release(self, request: Request) -> None:
        """Forget a request. What is kept of its blocks stays."""
        self._of_request.pop(request, None)
