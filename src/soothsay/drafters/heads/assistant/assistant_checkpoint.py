"""Gemma 4's assistants, as transformers writes them."""

from __future__ import annotations

from dataclasses import replace

from soothsay.config import ModelConfig
from soothsay.drafters.heads.assistant.assistant_head import AssistantConfig, AssistantHead
from soothsay.drafters.heads.checkpoints.block_configs import refusal
from soothsay.drafters.heads.checkpoints.drafter_files import DrafterFiles
from soothsay.drafters.heads.checkpoints.fit import Fit
from soothsay.drafters.heads.checkpoints.module_names import Names
from soothsay.drafters.heads.checkpoints.stored_head import StoredHead
from soothsay.errors import ModelError
from soothsay.model.families.parsing import parse_model_config
from soothsay.model.tensor_names import BLOCK_NAMES, FAMILY_NAMES

KINDS = ("gemma4_assistant", "gemma4_unified_assistant")
"""`model_type` of assistants."""


def is_assistant(files: DrafterFiles) -> bool:
    """Whether the files hold an assistant."""
    return files.config.get("model_type") in KINDS


def open_assistant(files: DrafterFiles, fit: Fit) -> StoredHead:
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
        files,
        fit,
        "assistant (Gemma 4)",
        lambda: AssistantHead(config, fit.kernels_for(block)),
        _names(block, clusters > 0),
        ignored=r"lm_head\.weight",
    )


def _block(files: DrafterFiles) -> ModelConfig:
    """The decoder's configuration. Its layers have no keys and values."""
    raw = files.config.get("text_config")
    if raw is None:
        raise refusal(files, "its config.json has no text_config")
    try:
        own = parse_model_config({**raw, "num_kv_shared_layers": 0})
    except ModelError as error:
        raise refusal(files, str(error)) from error
    if own.layer_embedding_size is not None or own.experts is not None or own.wide_shared_kv_layers:
        raise refusal(files, "it has experts, embeddings for each layer, or wide layers")
    # published assistants see one more token than the target's layers do before the last token
    windows = tuple(None if window is None else window + 1 for window in own.windows)
    return replace(own, num_shared_kv_layers=own.num_layers, windows=windows)


def _check_heads(block: ModelConfig, fit: Fit) -> None:
    """Raises `DrafterError` unless the target has layers whose keys and values the assistant can read."""
    sources = fit.config.last_kv_layers
    if fit.config.latent is not None:
        fit.refuse("reads keys and values; the target has latent states")
    for layer, window in enumerate(block.windows):
        kind = "without a window" if window is None else "with a window"
        if (source := sources.get(window is None)) is None:
            fit.refuse(f"reads keys and values of layers {kind}; the target has none")
            return
        mine, theirs = block.heads(layer), fit.config.heads(source)
        if (mine.count, mine.size) != (theirs.count, theirs.size):
            fit.refuse(
                f"reads {mine.count} key-value heads of {mine.size} dimensions in layers {kind}; the target "
                f"has {theirs.count} of {theirs.size}"
            )


def _names(block: ModelConfig, clustered: bool) -> Names:
    own = {**BLOCK_NAMES, **FAMILY_NAMES[block.family], "attention.qkv": ("self_attn.q_proj",)}
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
