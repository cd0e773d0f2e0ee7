"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): features of several layers, an own output head, EAGLE-2's tree.

EAGLE-3.1 is EAGLE-3 with a norm of each layer's feature (`norm_taps="each"`) and a normed output
(`norm_output`). Checkpoints are as SafeAILab, vLLM, SGLang and vLLM's speculators write them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from soothsay.core.batch import Batch
from soothsay.drafters.heads.checkpoints.block_configs import (
    block_config,
    check_block,
    check_one_block,
    hf_config,
    refusal,
    speculators_config,
)
from soothsay.drafters.heads.checkpoints.drafter_files import DrafterFiles
from soothsay.drafters.heads.checkpoints.fit import TARGET_HEAD, TargetFit, draft_vocabulary
from soothsay.drafters.heads.checkpoints.stored_head import (
    HeadFormat,
    Names,
    StoredHead,
    Written,
    block_names,
    split,
)
from soothsay.drafters.heads.recurrent_drafter import ConfidentDrafter
from soothsay.drafters.heads.trained_head import Head, RecurrentHead, TargetEnds, whole_logits
from soothsay.drafters.ops.draft_ops import DraftOps, RecurrentDrafts, RecurrentLayers
from soothsay.errors import DrafterError
from soothsay.model.decoder.blocks import Block
from soothsay.model.decoder.embedding import Embedding
from soothsay.model.decoder.norm import RMSNorm
from soothsay.model.decoder.rope import Rope
from soothsay.model.ops.kernels import Kernels
from soothsay.model.ops.linear import Dense, normal
from soothsay.model.specs.model_spec import ModelSpec

JOINS = "soothsay_joins"
"""The key of config.json for `Eagle3Config.joins`."""

TapNorms = Literal["none", "each", "whole"]
"""What is normed before `fc`: nothing, the feature of each layer, or all of them as one vector."""


@dataclass(frozen=True)
class Eagle3Config:
    """Configuration of EAGLE-3's head."""

    block: ModelSpec
    """The decoder block's. `num_layers` is 1, `vocab_size` is the target's."""

    target_hidden_size: int
    draft_vocab_size: int
    """Number of tokens that the head can draft."""

    taps: tuple[int, ...]
    """Layers of the target whose input the head reads. The number of layers means the last output."""

    norm_before_residual: bool = False
    """Whether the attention's output is added to the normed hidden state instead of the hidden state."""

    own_embedding: bool = False
    """Whether the head has its own embedding instead of the target's."""

    own_head: bool = True
    """Whether the head has its own output matrix instead of the target's rows for its tokens."""

    norm_taps: TapNorms = "none"
    norm_output: bool = False
    """Whether the next row reads the output after the last norm instead of before it."""

    joins: bool = False
    """Whether the block adds to a projection of embedding and state, as in multi-token prediction (arXiv
    2412.19437), instead of the state alone. No published head does."""


class Eagle3Layers(Head):
    """The layers of EAGLE-3, which P-EAGLE has too.

    One decoder block's attention reads a token's embedding together with the state before the token. `d2t`
    `[V_draft]` int64: token i of the draft vocabulary is token `i + d2t[i]` of the target's.
    """

    d2t: Tensor

    def __init__(self, config: Eagle3Config, kernels: Kernels):
        super().__init__()
        c = config.block
        self.kernels, self.taps, self.draft_vocabulary = kernels, config.taps, config.draft_vocab_size
        self.norms_residual, self.norms_output = config.norm_before_residual, config.norm_output
        self.owns_head = config.own_head
        self.embedding = (
            Embedding(normal(c.vocab_size, c.hidden_size, std=0.02), 1.0) if config.own_embedding else None
        )
        width = len(config.taps) * config.target_hidden_size
        self.fc: nn.Module = Dense.random(width, c.hidden_size)
        each = config.taps if config.norm_taps == "each" else ()
        self.fc_norm = nn.ModuleList(RMSNorm(config.target_hidden_size, c.norm.eps) for _ in each)
        self.input_norm = RMSNorm(width, c.norm.eps) if config.norm_taps == "whole" else None
        self.embedding_norm = RMSNorm(c.hidden_size, c.norm.eps)
        self.hidden_norm = RMSNorm(c.hidden_size, c.norm.eps)
        self.block = Block(c.layers[0], c.hidden_size, kernels, in_features=2 * c.hidden_size)
        self.norm = RMSNorm(c.hidden_size, c.norm.eps)
        self.join: nn.Module | None = Dense.random(2 * c.hidden_size, c.hidden_size) if config.joins else None
        own = Dense.random(c.hidden_size, config.draft_vocab_size) if config.own_head else nn.Sequential()
        self.head: nn.Module = own
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.rope = Rope(c.rotations[0])

    @property
    def listed(self) -> Tensor:
        """See `Head`."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def borrow(self, shared: TargetEnds) -> None:
        """Take the target's rows for the draft vocabulary, unless the head has its own."""
        if not self.owns_head:
            self.head = Dense(shared.head_rows(self.listed)).requires_grad_(False)

    def fuse(self, taps: Sequence[Tensor], shared: TargetEnds) -> Tensor:
        """Concatenate the layers' inputs, normed if the configuration says so, and project them.

        Returns:
            `[N, H]` float32.
        """
        if self.fc_norm:
            taps = [self._norm(tap, cast(RMSNorm, n)) for tap, n in zip(taps, self.fc_norm, strict=True)]
        read = torch.cat(list(taps), dim=-1)
        if self.input_norm is not None:
            read = self._norm(read, self.input_norm)
        return cast(Tensor, self.fc(read)).float()

    def embed(self, tokens: Tensor, shared: TargetEnds) -> Tensor:
        """Embed tokens, `[N] -> [N, H]` float32."""
        if self.embedding is None:
            return shared.embed(tokens)
        embedded: Tensor = self.embedding(tokens.clamp(max=len(self.embedding.weight) - 1))
        return embedded

    def run_block(self, embedded: Tensor, features: Tensor, batch: Batch, kv: Tensor | None) -> Tensor:
        """See `RecurrentHead.forward`. The output is the next feature, before the last norm or after it."""
        dtype = self.block.dtype
        normed = self.kernels.norm(features, self.hidden_norm, dtype)
        both = torch.cat([self.kernels.norm(embedded, self.embedding_norm, dtype), normed], dim=-1)
        residual = normed.float() if self.norms_residual else features
        if self.join is not None:
            residual = self.join(both).float()
        out: Tensor = self.block(residual, self.rope(batch.positions), batch, kv, both)
        return self._norm(out, self.norm) if self.norms_output else out

    def logits(self, out: Tensor, shared: TargetEnds) -> Tensor:
        """`[M, H] -> [M, V]` float32 in the target's vocabulary; minus infinity outside of `d2t`."""
        return whole_logits(self.head(self.normed(out)).float(), self.listed, shared.vocab_size)

    def normed(self, out: Tensor) -> Tensor:
        """The inputs of the output matrix, of what the block gave: `[M, H] -> [M, H]` float32."""
        return out if self.norms_output else self._norm(out, self.norm)

    def _norm(self, x: Tensor, norm: RMSNorm) -> Tensor:
        return self.kernels.norm(x.float().contiguous(), norm, torch.float32)


class Eagle3Head(Eagle3Layers, RecurrentHead):
    """EAGLE-3's head."""

    method = "eagle3"

    def __init__(self, config: Eagle3Config, kernels: Kernels):
        super().__init__(config, kernels)
        self.config = config

    def forward(
        self, embedded: Tensor, features: Tensor, batch: Batch, kv: Tensor | None, step: int = 0
    ) -> Tensor:
        """See `RecurrentHead`."""
        return self.run_block(embedded, features, batch, kv)

    def drafts_at_once(self, shared: TargetEnds, ops: DraftOps) -> RecurrentDrafts | None:
        """See `RecurrentHead`."""
        norms: list[Tensor] = [cast(RMSNorm, norm).weight for norm in self.fc_norm]
        if self.input_norm is not None:
            norms = [self.input_norm.weight]
        tap_norms = torch.cat(norms).detach() if norms else None
        embedding = shared.embedding if self.embedding is None else self.embedding
        layers = RecurrentLayers(
            *(self.block, self.head, self.fc, len(norms) or 1, tap_norms, embedding, self.rope),
            *(self.embedding_norm, self.hidden_norm, self.norm),
            *(self.listed, self.norms_residual, self.norms_output),
            join=self.join,
        )
        return ops.recurrent_drafts(layers)


def eagle3_names(layer: str) -> Names:
    """EAGLE-3's table of names. `layer` is the prefix of the block's tensors and ends in a dot."""
    return {
        "embedding": ("embed_tokens",),
        "head": ("lm_head",),
        **block_names("block.", layer),
        "embedding_norm": (f"{layer}input_layernorm",),
        "hidden_norm": (f"{layer}hidden_norm",),
    }


EAGLE3_IGNORED = r"t2d|embed_tokens\.weight|verifier_(norm|lm_head)\.weight"
"""Tensors of EAGLE-3 that repeat others, or are copies of the target's."""


def open_eagle3(files: DrafterFiles, fit: TargetFit) -> StoredHead:
    """Open EAGLE-3 in the original layout, vLLM's, or speculators'."""
    check_one_block(files)
    parts = eagle3_parts(files, fit)
    return StoredHead(
        fit,
        f"EAGLE-3 ({parts.layout})",
        lambda: Eagle3Head(parts.config, fit.kernels_for(parts.config.block)),
        parts.names,
        parts.given,
        ignored=EAGLE3_IGNORED if parts.config.own_head else rf"{EAGLE3_IGNORED}|lm_head\.weight",
    )


@dataclass(frozen=True)
class Eagle3Parts:
    """What EAGLE-3 and P-EAGLE have in common in their checkpoints."""

    config: Eagle3Config
    layout: str
    names: Names
    given: Mapping[str, Tensor]


def eagle3_parts(files: DrafterFiles, fit: TargetFit, layers: int = 1, residual: bool = True) -> Eagle3Parts:
    """Read the parts that EAGLE-3 and P-EAGLE have in common, and check them.

    Args:
        files: the checkpoint.
        fit: the target.
        layers: number of decoder blocks.
        residual: the default of `norm_before_residual` in speculators' layout.
    """
    speculators = "speculators_model_type" in files.config
    raw = files.config.get("transformer_layer_config", {}) if speculators else files.config
    layer = "midlayer." if "midlayer.hidden_norm.weight" in files.names else "layers.0."
    check_block(files, raw, layer)
    names = eagle3_names(layer)
    block = block_config(files, raw, names, "block.", layers)
    target_size = int(files.config.get("target_hidden_size") or block.hidden_size)
    own = "embed_tokens.weight" in files.names
    fit.check(hidden=target_size, vocab=block.vocab_size)
    if not own:  # the head reads the target's embedding
        fit.check(hidden=block.hidden_size, vocab=block.vocab_size)
    fit.check_context(block.max_positions)
    taps = _taps(files, fit.config.num_layers)
    fit.check_taps(taps)
    given, draft = draft_vocabulary(files, block, fit)
    of_target = bool(files.config.get(TARGET_HEAD))
    if of_target:  # its rows are taken from the target
        fit.check(hidden=block.hidden_size, vocab=block.vocab_size)
    if own and fit.has_embedding(files.read("embed_tokens.weight")):
        own = False
    before_residual = bool(files.config.get("norm_before_residual", speculators and residual))
    joins, whole = bool(files.config.get(JOINS, False)), (block, target_size, draft, taps)
    normed = _tap_norms(files), bool(files.config.get("norm_output", False))
    config = Eagle3Config(*whole, before_residual, own, not of_target, *normed, joins)
    layout = "speculators" if speculators else "original" if layer == "midlayer." else "vLLM"
    return Eagle3Parts(config, layout, names, given)


def write_eagle3(head: Eagle3Head, target: str) -> Written:
    """Make config.json and tensors as SafeAILab's code, SGLang and vLLM read them.

    config.json states the taps twice: vLLM numbers layers by their inputs, SGLang by their outputs.
    """
    c = head.config
    config = {
        **hf_config(c.block),
        "architectures": ["LlamaForCausalLMEagle3"],
        "target_hidden_size": c.target_hidden_size,
        "draft_vocab_size": c.draft_vocab_size,
        **_flags(c),
        "eagle_aux_hidden_state_layer_ids": list(c.taps),
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in c.taps],
        },
    }
    return config, _eagle3_tensors(head, "midlayer.")


def write_speculators_eagle3(head: Eagle3Head, target: str) -> Written:
    """Make config.json and tensors as vLLM's speculators reads them."""
    c = head.config
    config = {
        **speculators_config("eagle3", "Eagle3Speculator", target),
        "transformer_layer_config": hf_config(c.block),
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": None if c.target_hidden_size == c.block.hidden_size else c.target_hidden_size,
        **_flags(c),
        "eagle_aux_hidden_state_layer_ids": list(c.taps),
    }
    return config, _eagle3_tensors(head, "layers.0.")


def _eagle3_tensors(head: Eagle3Head, layer: str) -> Iterator[tuple[str, Tensor]]:
    whole = head.config.draft_vocab_size == head.config.block.vocab_size
    for name, tensor in split(head, eagle3_names(layer), head.config.block):
        if name != "d2t" or not whole:
            yield name, tensor
    if not whole:
        t2d = torch.zeros(head.config.block.vocab_size, dtype=torch.bool)
        t2d[head.listed.cpu()] = True
        yield "t2d", t2d


def _flags(config: Eagle3Config) -> dict[str, bool]:
    """The keys of config.json that say what is normed, as vLLM and speculators read them, and our own."""
    return {
        **({} if config.own_head else {TARGET_HEAD: True}),
        **({JOINS: True} if config.joins else {}),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_taps == "whole",
        "fc_norm": config.norm_taps == "each",
        "norm_output": config.norm_output,
    }


def _tap_norms(files: DrafterFiles) -> TapNorms:
    """What is normed before `fc`. Raises `DrafterError` if the configuration says two things."""
    each, whole = (bool(files.config.get(key, False)) for key in ("fc_norm", "norm_before_fc"))
    if each and whole:
        raise DrafterError(
            f"{files.path}: config.json sets fc_norm and norm_before_fc, and a head has one: it is damaged"
        )
    return "each" if each else "whole" if whole else "none"


def _taps(files: DrafterFiles, layers: int) -> tuple[int, ...]:
    """The layers of the target whose inputs the head reads."""
    config = files.config
    nested: Mapping[str, Any] = config.get("eagle_config") or {}
    if not nested.get("use_aux_hidden_state", True):
        raise refusal(files, "it reads the target's last layer only (use_aux_hidden_state is false)")
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    if ids:  # vLLM: i means the input of layer i
        return tuple(int(i) for i in ids)
    ids = nested.get("eagle_aux_hidden_state_layer_ids")
    if ids:  # SGLang: i means the output of layer i
        return tuple(int(i) + 1 for i in ids)
    return 2, layers // 2, layers - 3


FORMAT = HeadFormat(
    open_eagle3,
    lambda files: not files.names.isdisjoint(("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight")),
    speculators=("eagle3",),
    layouts={"": write_eagle3, "speculators": write_speculators_eagle3},
    integers=True,
)


class Eagle3(ConfidentDrafter):
    """EAGLE-3: a head over features of several layers. Its output head may have the frequent tokens only."""

    method, kind = "eagle3", Eagle3Head
