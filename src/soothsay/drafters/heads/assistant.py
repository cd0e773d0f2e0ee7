"""Gemma 4's assistants (Google 2026, "multi-token prediction drafters"): small decoders whose layers attend
to the target's keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from soothsay.config import DType
from soothsay.core.batch import Batch
from soothsay.core.paths import Path as KeyPath
from soothsay.core.request import Request
from soothsay.core.transfer import send
from soothsay.drafters.base import Target
from soothsay.drafters.heads.checkpoints.block_configs import refusal
from soothsay.drafters.heads.checkpoints.drafter_files import DrafterFiles
from soothsay.drafters.heads.checkpoints.fit import TargetFit
from soothsay.drafters.heads.checkpoints.stored_head import HeadFormat, Names, StoredHead
from soothsay.drafters.heads.feature_drafter import StateGrownDrafter, load_head
from soothsay.drafters.heads.trained_head import Head
from soothsay.drafters.trees.growth import ConfidentShape, GrowingTree
from soothsay.errors import DrafterError, ModelError
from soothsay.model.decoder.blocks import Block, Blocks
from soothsay.model.decoder.embedding import Embedding
from soothsay.model.decoder.norm import RMSNorm
from soothsay.model.decoder.rope import Rope
from soothsay.model.families.parsing import parse_model_config
from soothsay.model.ops.kernels import Kernels
from soothsay.model.ops.linear import Dense, normal
from soothsay.model.specs.attention_spec import ANOTHER_MODEL, AttentionSpec, LatentSpec
from soothsay.model.specs.feed_forward_spec import ExpertsSpec
from soothsay.model.specs.model_spec import LayerSpec, ModelSpec
from soothsay.model.weights.hf_names import names_of


@dataclass(frozen=True)
class AssistantConfig:
    """Configuration of an assistant."""

    block: ModelSpec
    """The decoder blocks'. None of them has keys and values of its own."""

    target_hidden_size: int
    target_layers: int

    clusters: int = 0
    """Number of clusters of equal size into which the vocabulary is divided; 0: it is not divided."""

    clusters_read: int = 0
    """Number of clusters whose tokens can be guessed at a row."""

    def __post_init__(self) -> None:
        """Raise `DrafterError` for impossible numbers."""
        tokens, clusters = self.block.vocab_size, self.clusters
        if clusters and (tokens % clusters or not 1 <= self.clusters_read <= clusters):
            raise DrafterError(
                f"assistant with {clusters} clusters (num_centroids) that divide {tokens} tokens, of which "
                f"{self.clusters_read} are read (centroid_intermediate_top_k): that is not possible"
            )


class ClusteredHead(nn.Module):
    """An output head that reads the tokens of a row's best clusters only."""

    def __init__(self, config: AssistantConfig, kernels: Kernels):
        super().__init__()
        c = config.block
        self.kernels, self.count = kernels, config.clusters_read
        self.centroids: nn.Module = Dense.random(c.hidden_size, config.clusters)
        self.table = Embedding(normal(c.vocab_size, c.hidden_size, std=0.02), 1.0)
        # [V] int64: the tokens of the first cluster, of the second, ...
        self.register_buffer("token_ordering", torch.arange(c.vocab_size))
        self.token_ordering: Tensor

    def forward(self, hidden: Tensor) -> Tensor:
        """`[M, H] -> [M, V]` float32; minus infinity for tokens in other clusters."""
        scores: Tensor = self.centroids(hidden)
        best = self.kernels.sampling.largest(scores.float(), self.count)[1]  # [M, count]
        tokens = self.token_ordering.view(scores.shape[1], -1)[best].flatten(1)  # [M, n]
        rows = cast(Tensor, self.table(tokens.flatten())).view(*tokens.shape, -1)
        logits = torch.bmm(rows, hidden.float()[:, :, None])[:, :, 0]
        full = logits.new_full((len(hidden), len(self.token_ordering)), -torch.inf)
        return full.scatter_(1, tokens, logits)


class AssistantHead(Head):
    """Continues from the target's last normed output, or from its own output, token by token.

    A row reads a token and the output of the row before. All rows of a draft stand at the position of the
    last committed token, and attend to the target's keys and values of the tokens before it.
    """

    method = "assistant"

    def __init__(self, config: AssistantConfig, kernels: Kernels):
        super().__init__()
        c = config.block
        self.config, self.kernels, self.taps = config, kernels, (config.target_layers,)
        self.pre_projection: nn.Module = Dense.random(2 * config.target_hidden_size, c.hidden_size)
        self.blocks = Blocks(
            Block(layer, c.hidden_size, kernels, c.rope_number(i)) for i, layer in enumerate(c.layers)
        )
        self.norm = RMSNorm(c.hidden_size, c.norm.eps)
        self.post_projection: nn.Module = Dense.random(c.hidden_size, config.target_hidden_size)
        self.head: nn.Module = (
            ClusteredHead(config, kernels) if config.clusters else Dense.random(c.hidden_size, c.vocab_size)
        )
        self.ropes = nn.ModuleList(Rope(rotation) for rotation in c.rotations)

    def forward(
        self, embedded: Tensor, states: Tensor, batch: Batch, kv: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Run one pass.

        Args:
            embedded: `[N, H_target]` float32, the target's embedding of each row's token.
            states: `[N, H_target]` float32, the target's last normed output or the output of the row before.
            batch: the rows' places.
            kv: keys and values of the target, `[2 * H_kv, S, d]` for each block.

        Returns:
            `[N, H_target]` outputs that the next rows read, and `[N, V]` logits; float32.
        """
        x = cast(Tensor, self.pre_projection(torch.cat([embedded, states], dim=-1))).float()
        ropes, last = [rope(batch.positions) for rope in self.ropes], len(self.blocks)
        x = self.blocks(x, ropes, batch, kv, range(last))[last]
        hidden = self.kernels.norm(x, self.norm, torch.float32)
        return self.post_projection(hidden).float(), self.head(hidden).float()


KINDS = ("gemma4_assistant", "gemma4_unified_assistant")
"""`model_type` of assistants."""


def open_assistant(files: DrafterFiles, fit: TargetFit) -> StoredHead:
    """Open an assistant."""
    raw = files.config
    block = _block(files)
    fit.check(hidden=int(raw.get("backbone_hidden_size", 1536)), vocab=block.vocab_size)
    if block.vocab_size != fit.config.vocab_size:
        fit.refuse(f"has {block.vocab_size:,} tokens; the target's vocabulary has {fit.config.vocab_size:,}")
    _check_heads(block, fit)
    fit.check_context(block.max_positions)
    clusters, read = 0, 0
    if raw.get("use_ordered_embeddings", False):
        clusters, read = int(raw.get("num_centroids", 2048)), int(raw.get("centroid_intermediate_top_k", 32))
    config = AssistantConfig(block, fit.config.hidden_size, fit.config.num_layers, clusters, read)
    return StoredHead(
        fit,
        "assistant (Gemma 4)",
        lambda: AssistantHead(config, fit.kernels_for(block)),
        _names(block, clusters > 0),
        ignored=r"lm_head\.weight",
    )


def _block(files: DrafterFiles) -> ModelSpec:
    """The decoder's configuration. Its layers have no keys and values."""
    raw = files.config.get("text_config")
    if raw is None:
        raise refusal(files, "its config.json has no text_config")
    try:
        own = parse_model_config({**raw, "num_kv_shared_layers": 0})
    except ModelError as error:
        raise refusal(files, str(error)) from error
    if own.embedding.layers is not None or own.parts(ExpertsSpec) or raw.get("use_double_wide_mlp"):
        raise refusal(files, "it has experts, embeddings for each layer, or wide layers")

    def reading(layer: LayerSpec) -> LayerSpec:
        if not isinstance(layer.mixer, AttentionSpec):
            return layer
        # published assistants see one more token than the target's layers do before the last token
        window = None if layer.window is None else layer.window + 1
        return replace(layer, mixer=replace(layer.mixer, reads=ANOTHER_MODEL, window=window))

    return own.with_layers(reading)


def _check_heads(block: ModelSpec, fit: TargetFit) -> None:
    """Raises `DrafterError` unless the target has layers whose keys and values the assistant can read."""
    sources = fit.config.last_kv_layers
    if fit.config.parts(LatentSpec):
        fit.refuse("reads keys and values; the target has latent states")
    for mine in block.parts(AttentionSpec).values():
        kind = "without a window" if mine.window is None else "with a window"
        if (source := sources.get(mine.window is None)) is None:
            fit.refuse(f"reads keys and values of layers {kind}; the target has none")
            return
        theirs = fit.config.parts(AttentionSpec)[source]
        if (mine.kv_heads, mine.size) != (theirs.kv_heads, theirs.size):
            fit.refuse(
                f"reads {mine.kv_heads} key-value heads of {mine.size} dimensions in layers {kind}; the "
                f"target has {theirs.kv_heads} of {theirs.size}"
            )


def _names(block: ModelSpec, clustered: bool) -> Names:
    own = {**names_of(block.family), "attention.qkv": ("self_attn.q_proj",)}
    names: dict[str, tuple[str, ...]] = {"norm": ("model.norm",)}
    for layer in range(block.num_layers):
        names |= {
            f"blocks.{layer}.{module}": tuple(f"model.layers.{layer}.{t}".removesuffix(".") for t in tensors)
            for module, tensors in own.items()
        }
    if clustered:
        table = {"head.table": ("model.embed_tokens",), "head.centroids": ("masked_embedding.centroids",)}
        return names | table | {"head": ("masked_embedding",)}
    return names | {"head": ("model.embed_tokens",)}


FORMAT = HeadFormat(open_assistant, lambda files: files.config.get("model_type") in KINDS)


class Assistant(StateGrownDrafter[AssistantHead]):
    """Drafts with a small decoder that has no keys and values of its own.

    Each of its layers attends to those of one of the target's layers. So nothing is computed for a prompt.
    For each request, only the target's last output is kept. It drafts if all committed tokens but the last
    have the target's KV.

    Args:
        target: the model to draft for.
        model: a checkpoint's directory, or a head; empty: `drafters/assistant` beside the target's weights.
        depth: number of tokens that are drafted in a row.
        width: nodes of each level that are expanded; None: as many as the largest tree has room for.
        branch: likeliest tokens that are added below each of them; None: one more than `width`.
        dtype: element type of the assistant, as in `LLM`; "auto" is the target's.
    """

    def __init__(
        self,
        target: Target,
        model: str | Path | AssistantHead = "",
        depth: int = 6,
        width: int | None = None,
        branch: int | None = None,
        dtype: DType = "auto",
    ):
        shape = ConfidentShape.within("assistant", target, depth, width, branch)
        super().__init__(target, load_head(AssistantHead, model, target, dtype), shape)
        pool = target.pool
        block, sources = self.head.config.block, target.model.spec.last_kv_layers
        needed = [sources[window is None] for window in block.windows]
        if not all(layer in target.model.own.layers for layer in needed):
            raise DrafterError("assistant reads keys and values that another stage of the model has")
        self.kv = [pool.kv(layer) for layer in needed]

    def ready(self, request: Request) -> bool:
        """Return whether the root can be computed, see `Expander`."""
        return request.num_pending == 1 and request.length > 1 and super().ready(request)

    @torch.inference_mode()
    def expand(self, growing: Sequence[GrowingTree], above: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the frontiers: logits `[M, V]`, and outputs `[M, H_target]`, which are the states."""
        batch = self.lay_out(growing)
        states, logits = self.head(self.shared.embed(batch.tokens), above, batch, self.kv)
        return logits, states

    def lay_out(self, growing: Sequence[GrowingTree]) -> Batch:
        """Lay out the frontiers as rows of a pass. Rows see all KV of their request, and no other row."""
        size, block = self.target.config.block_size, self.head.config.block
        paths, positions, count = list[KeyPath](), list[int](), 0
        for g in growing:
            known = g.request.length - 1  # tokens with KV
            offsets, rows = np.arange(known), range(count, count := count + len(g.frontier))
            keys = g.request.table[offsets // size] * size + offsets % size
            paths.append(KeyPath(rows, np.full(len(rows), known - 1), keys))
            positions += [known] * len(rows)
        device = self.target.model.device
        rows_of_all = torch.arange(count, device=device)
        return Batch(
            tokens=send([token for g in growing for token in g.frontier_tokens], device),
            positions=send(positions, device),
            slots=rows_of_all,  # nothing is written
            logit_rows=rows_of_all,
            asked=(),
            paths=tuple(paths),
            num_slots=0,
            group=block.group,
            windows=block.windows,
        )
