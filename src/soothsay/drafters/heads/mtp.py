"""Multi-token prediction (DeepSeek-V3, 2024, arXiv 2412.19437): modules that are trained with the target."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from soothsay.core.batch import Batch
from soothsay.core.request import Request
from soothsay.drafters.heads.checkpoints.block_configs import (
    block_config,
    check_block,
    expert_names,
    hf_config,
    refusal,
    speculators_config,
)
from soothsay.drafters.heads.checkpoints.drafter_files import DrafterFiles
from soothsay.drafters.heads.checkpoints.fit import TargetFit
from soothsay.drafters.heads.checkpoints.stored_head import (
    HeadFormat,
    Names,
    StoredHead,
    Written,
    block_names,
    split,
)
from soothsay.drafters.heads.recurrent_drafter import ConfidentDrafter, Outputs
from soothsay.drafters.heads.trained_head import RecurrentHead
from soothsay.drafters.trees.own_kv import DraftPass
from soothsay.errors import DrafterError
from soothsay.model.decoder.blocks import Block
from soothsay.model.decoder.norm import RMSNorm
from soothsay.model.decoder.rope import Rope
from soothsay.model.ops.kernels import Kernels
from soothsay.model.ops.linear import Dense
from soothsay.model.specs.attention_spec import AttentionSpec
from soothsay.model.specs.feed_forward_spec import ExpertsSpec
from soothsay.model.specs.model_spec import ModelSpec

ZERO_CENTRED = ("gemma2", "gemma3_text", "qwen3_next", "qwen3_5")
"""Beginnings of families whose norms are stored minus 1."""


@dataclass(frozen=True)
class MTPConfig:
    """Configuration of MTP modules, which share the target's embedding and output head."""

    block: ModelSpec
    """The decoder block's of each module. `num_layers` is the number of modules."""

    target_layers: int
    """Number of the target's decoder blocks. The first module reads the output of the last one."""

    hidden_first: bool = False
    """Whether the projection reads cat[hidden, embedding] (MiMo) instead of cat[embedding, hidden]."""

    zero_first: bool = False
    """Whether the first row's embedding is zero (DeepSeek, GLM, MiMo)."""


class MTPModule(nn.Module):
    """One module: a decoder block over a token's embedding and the hidden state before it, each normed."""

    def __init__(self, config: MTPConfig, layer: int, kernels: Kernels):
        super().__init__()
        c = config.block
        self.config, self.kernels = config, kernels
        self.embedding_norm = RMSNorm(c.hidden_size, c.norm.eps)
        self.hidden_norm = RMSNorm(c.hidden_size, c.norm.eps)
        self.projection: nn.Module = Dense.random(2 * c.hidden_size, c.hidden_size)
        self.block = Block(c.layers[layer], c.hidden_size, kernels)
        self.norm = RMSNorm(c.hidden_size, c.norm.eps)

    def forward(
        self, embedded: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor], batch: Batch, kv: Tensor | None
    ) -> Tensor:
        """Embeddings `[N, H]` and normed states before the tokens `[N, H]` -> `[N, H]` normed, float32."""
        dtype = self.block.dtype
        parts = [
            self.kernels.norm(embedded, self.embedding_norm, dtype),
            self.kernels.norm(hidden, self.hidden_norm, dtype),
        ]
        x = self.projection(torch.cat(parts[::-1] if self.config.hidden_first else parts, dim=-1))
        return self.kernels.norm(self.block(x.float(), rope, batch, kv), self.norm, torch.float32)


class MTPHead(RecurrentHead):
    """The modules, first to last. The last one makes all further guesses, too."""

    method = "mtp"
    config: MTPConfig

    def __init__(self, config: MTPConfig, kernels: Kernels):
        super().__init__()
        self.config = config
        self.taps = (config.target_layers,)
        self.rope = Rope(config.block.rotations[0])
        self.steps = nn.ModuleList(MTPModule(config, i, kernels) for i in range(config.block.num_layers))

    def forward(
        self, embedded: Tensor, features: Tensor, batch: Batch, kv: Tensor | None, step: int = 0
    ) -> Tensor:
        """Run module `step`, see `RecurrentHead`. Outputs are normed: they are inputs of the output head."""
        if self.config.zero_first:
            embedded = embedded.masked_fill((batch.positions == FIRST_ROW)[:, None], 0.0)
        out: Tensor = self.steps[step](embedded, features, self.rope(batch.positions), batch, kv)
        return out


FIRST_ROW = 1
"""Position of a request's first row. Row 0 would read the feature of a token before the first."""


OURS = ("projection", "embedding_norm", "hidden_norm", "norm")


@dataclass(frozen=True)
class MTPLayout:
    """The names of a module's tensors. `{}` stands for the module's number in the file."""

    name: str
    step: str
    """Prefix of the tensors in `parts`."""

    parts: tuple[str, str, str, str]
    """Names of the projection, the embedding's norm, the hidden state's norm, and the last norm."""

    block: str
    """Prefix of the decoder block."""

    hidden_first: bool = False
    zero_first: bool = False
    zero_centred: bool = False
    ignored: str = "$."

    def names(self, numbers: list[int]) -> Names:
        """The table of names of modules that have these numbers in the file."""
        names: dict[str, tuple[str, ...]] = {}
        for step, number in enumerate(numbers):
            theirs = self.step.format(number)
            names |= {f"steps.{step}.{o}": (theirs + part,) for o, part in zip(OURS, self.parts, strict=True)}
            names |= block_names(f"steps.{step}.block.", self.block.format(number))
        return names

    def numbers(self, files: DrafterFiles) -> list[int]:
        """The numbers of the modules in a file. Empty if the file has another layout."""
        pattern = re.escape(f"{self.step}{self.parts[0]}.weight").replace(r"\{\}", r"(\d{1,6})")
        found = [m for name in files.names if (m := re.fullmatch(pattern, name))]
        return sorted(int(m[1]) if m.groups() else 0 for m in found)


DEEPSEEK = MTPLayout(
    "DeepSeek",
    "model.layers.{}.",
    ("eh_proj", "enorm", "hnorm", "shared_head.norm"),
    "model.layers.{}.",
    zero_first=True,
    ignored=r"model\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight",
)
NORMS = ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")
MIMO = MTPLayout(
    "MiMo", "model.mtp_layers.{}.", NORMS, "model.mtp_layers.{}.", hidden_first=True, zero_first=True
)
SPECULATORS = MTPLayout("speculators", "mtp_layers.{}.", NORMS, "mtp_layers.{}.")
QWEN = MTPLayout(
    "Qwen3-Next",
    "mtp.",
    ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"),
    "mtp.layers.{}.",
    zero_centred=True,
    ignored=r"mtp\.embed_tokens\.weight",
)
LAYOUTS = (DEEPSEEK, MIMO, SPECULATORS, QWEN)


def open_mtp(files: DrafterFiles, fit: TargetFit) -> StoredHead:
    """Open MTP modules. Copies of the target's embedding and output head in the files are ignored."""
    layout = next(layout for layout in LAYOUTS if layout.numbers(files))
    numbers = layout.numbers(files)
    raw: Mapping[str, Any] = files.config
    raw = raw.get("transformer_layer_config") or raw.get("text_config") or raw
    gated = layout in (QWEN, SPECULATORS)
    for number in numbers:
        check_block(files, raw, layout.block.format(number), gated=gated, experts=True)
    names = dict(layout.names(numbers))
    for step, number in enumerate(numbers):
        names |= expert_names(files, raw, f"steps.{step}.block.", layout.block.format(number))
    block = block_config(files, raw, names, "steps.0.block.", len(numbers))
    attention = block.parts(AttentionSpec)[0]
    fit.check(hidden=block.hidden_size, vocab=block.vocab_size)
    if layout is not SPECULATORS:  # whose configuration counts the module's layers
        fit.check_layers(int(raw.get("num_hidden_layers", 0)))
    fit.check_context(block.max_positions)
    if layout is QWEN and any(re.match(r"mtp\.layers\.[1-9]", name) for name in files.names):
        raise refusal(files, "it has several MTP layers after one projection")
    ours: Mapping[str, Any] = files.config.get("soothsay") or {}
    zero_first = bool(ours.get("zero_first", layout.zero_first))
    config = MTPConfig(block, fit.config.num_layers, layout.hidden_first, zero_first)
    starts = {layout.step, layout.block}
    scope = "|".join(re.escape(s.format(number)) for s in sorted(starts) for number in numbers)
    return StoredHead(
        fit,
        f"MTP ({layout.name})",
        lambda: MTPHead(config, fit.kernels_for(block)),
        names,
        scope=f"(?:{scope})",
        ignored=layout.ignored,
        zero_centred=layout.zero_centred or str(raw.get("model_type")).startswith(ZERO_CENTRED),
        reordered=attention if attention.gated or block.parts(ExpertsSpec) else None,
    )


def write_mtp(head: MTPHead, target: str) -> Written:
    """Make config.json and tensors in DeepSeek's layout: modules are layers after the target's last one."""
    c = head.config
    count = c.block.num_layers
    config = {
        **hf_config(c.block),
        "num_hidden_layers": c.target_layers,
        "num_nextn_predict_layers": count,
        "soothsay": {"zero_first": c.zero_first},
    }
    numbers = [c.target_layers + step for step in range(count)]
    return config, _embedding_first(head, DEEPSEEK.names(numbers))


def write_speculators_mtp(head: MTPHead, target: str) -> Written:
    """Make config.json and tensors as vLLM's speculators reads them.

    Raises `DrafterError` for more than one module, and for modules with `zero_first`.
    """
    c = head.config
    if c.block.num_layers != 1 or c.zero_first:
        raise DrafterError(
            f"speculators' MTP has one module and reads every embedding; this one has {c.block.num_layers} "
            f"and zero_first={c.zero_first}: leave the layout at its default"
        )
    config = {
        **speculators_config("mtp", "MTPDraftModel", target),
        "transformer_layer_config": hf_config(c.block),
        "num_nextn_predict_layers": 1,
    }
    return config, _embedding_first(head, SPECULATORS.names([0]))


def _embedding_first(head: MTPHead, names: Names) -> Iterator[tuple[str, Tensor]]:
    """The tensors, with projections changed to read cat[embedding, hidden]."""
    projections = {f"{names[f'steps.{step}.projection'][0]}.weight" for step in range(len(head.steps))}
    for name, tensor in split(head, names, head.config.block):
        if head.config.hidden_first and name in projections:
            tensor = torch.cat(tensor.chunk(2, dim=1)[::-1], dim=1)
        yield name, tensor


FORMAT = HeadFormat(
    open_mtp,
    lambda files: any(layout.numbers(files) for layout in LAYOUTS),
    speculators=("mtp",),
    layouts={"": write_mtp, "speculators": write_speculators_mtp},
)


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

    @cached_property
    def _last(self) -> _LastOutputs:
        return _LastOutputs(self.target.config.block_size)

    def release(self, request: Request) -> None:
        """Forget a request, after its full blocks are complete for other requests."""
        super().release(request)
        self._last.release(request)

    def run(self, batch: DraftPass) -> Outputs:
        """Compute all modules over committed tokens, each after the one before it."""
        if self.block.num_layers == 1:
            return super().run(batch)
        packed, outs = self.pack(batch.rows), list[Tensor]()
        for module in range(self.block.num_layers):
            read = self._last.before(batch, outs[-1], module - 1) if outs else torch.cat(batch.features)
            outs.append(self.run_module(packed, read, module))
        self._last.keep(batch, torch.stack(outs, dim=1))
        return tuple(packed.select_logit_rows(out) for out in outs)

    def run_nodes(self, packed: Batch, read: Outputs) -> Outputs:
        """Compute the modules that predict the next levels; each reads the module before it at the parent.

        `read` begins with the module that predicted the nodes. The last module alone reads itself.
        """
        first = self.block.num_layers - max(len(read) - 1, 1)
        modules = range(first, self.block.num_layers)
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
