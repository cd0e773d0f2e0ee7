"""DFlash and its kin: a block of masks after the last token is filled in one pass.

DFlash (2026, arXiv 2602.06036), DFlash2, DSpark, xPress and JetSpec (2026, arXiv 2606.18394) are read as
z-lab, DeepSpec, vLLM, SGLang and speculators write them. The tensors say which method it is. Keys of the
configuration stand at the top, in `dflash_config` or in `dspark_config`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from soothsay.config import DType
from soothsay.core.request import Request
from soothsay.core.transfer import send
from soothsay.drafters.base import Target, check_at_least_one
from soothsay.drafters.heads.checkpoints.block_configs import block_config, check_block, refusal
from soothsay.drafters.heads.checkpoints.drafter_files import DrafterFiles
from soothsay.drafters.heads.checkpoints.fit import TargetFit, draft_vocabulary, mask_token
from soothsay.drafters.heads.checkpoints.stored_head import BLOCK, HeadFormat, Names, StoredHead, block_names
from soothsay.drafters.heads.dflash_head import DFlashConfig, DFlashHead
from soothsay.drafters.heads.draft_blocks import BlockPacker, RowVisibility
from soothsay.drafters.heads.feature_drafter import load_head
from soothsay.drafters.heads.one_pass_drafter import OnePassDrafter, PathRows
from soothsay.drafters.heads.path_heads import PathHead, path_head_of
from soothsay.drafters.trees.own_kv import DraftPass
from soothsay.errors import DrafterError

Options = Mapping[str, Any]

ENCODERS = (("fc", "hidden_norm"), ("encoder.fc", "encoder.output_norm_enc"))
"""Names of the projection of features and of its norm."""

IGNORED = r"t2d|(embed_tokens|lm_head|verifier_norm|verifier_lm_head|confidence_head\.proj)\.(weight|bias)"
"""Copies of the target's tensors, and DSpark's estimate of acceptance. soothsay counts acceptance instead."""


def open_dflash(files: DrafterFiles, fit: TargetFit) -> StoredHead:
    """Open a head that fills a block of masks."""
    config = files.config
    raw = _block_options(config)
    options = {**config, **config.get("dspark_config", {}), **config.get("dflash_config", {})}
    layer = "model.layers." if "model.layers.0.input_layernorm.weight" in files.names else "layers."
    count = _size(files, raw, "num_hidden_layers")
    files.check_count(count, "decoder blocks")
    for number in range(count):
        check_block(files, raw, f"{layer}{number}.")
    if (files.path / "mask_embedding.pt").exists():
        raise refusal(files, "its masks have an embedding of their own (mask_embedding.pt)")
    block = block_config(files, raw, block_names("blocks.0.", f"{layer}0."), "blocks.0.", count)
    fit.check(hidden=block.hidden_size, vocab=block.vocab_size)
    fit.check_context(block.max_positions)
    if "num_target_layers" in options:
        fit.check_layers(options["num_target_layers"])
    given, guessed = draft_vocabulary(files, block, fit) if "d2t" in files.names else ({}, 0)
    if not guessed and config.get("draft_vocab_size", block.vocab_size) != block.vocab_size:
        raise DrafterError(
            f"{files.path} guesses {config['draft_vocab_size']:,} tokens of {block.vocab_size:,}, and has no "
            "d2t that says which: the download is incomplete"
        )
    encoder = next((both for both in ENCODERS if f"{both[1]}.weight" in files.names), ENCODERS[0])
    convolved = f"{layer}0.attention_conv.base_kernel" in files.names
    correction = path_head_of(files, options, block, guessed or min(block.vocab_size, fit.config.vocab_size))
    head = DFlashConfig(
        block=block,
        taps=_taps(options, fit, count),
        size=int(options.get("block_size", 16)),
        mask=mask_token(files, options),
        sights=_sights(files, raw, options, count),
        begins_at_root=correction.begins_at_root,
        guessed=guessed,
        convolution=(_size(files, options, "conv_kernel_size"), _size(files, options, "conv_group_size"))
        if convolved
        else None,
        embedding_scale=options.get("input_embedding_scale", 1.0 if _is_speculators(config) else None),
        logit_scale=options.get("output_multiplier", 1.0),
        logit_softcap=options.get("final_logit_softcapping"),
    )
    fit.check_taps(head.taps)
    return StoredHead(
        fit,
        f"{correction.method or ('DFlash2' if convolved else 'DFlash')} "
        f"({'speculators' if _is_speculators(config) else 'original'})",
        lambda: DFlashHead(head, fit.kernels_for(block), correction.make(head.size)),
        {**dflash_names(count, layer, encoder), **correction.names},
        {**given, **correction.given},
        ignored=IGNORED,
    )


def _is_speculators(config: Options) -> bool:
    """Whether the configuration is the package speculators'."""
    return "transformer_layer_config" in config


def _block_options(config: Options) -> dict[str, Any]:
    """The keys for the decoder blocks. They are always read as Qwen3's, as z-lab and speculators do."""
    raw = config.get("transformer_layer_config", config)
    ropes = raw.get("rope_parameters", {})
    if "sliding_attention" in ropes:  # one for each kind of layer: all layers rotate alike
        raw = {**raw, "rope_parameters": ropes["sliding_attention"]}
    return {**raw, "model_type": "qwen3"}


def dflash_names(count: int, layer: str = "layers.", encoder: tuple[str, str] = ENCODERS[0]) -> Names:
    """The table of all modules but the path head.

    Args:
        count: number of decoder blocks.
        layer: the beginning of their tensors' names, which ends in a dot.
        encoder: names of the projection of features and of its norm.
    """
    fc, norm = encoder
    names: dict[str, tuple[str, ...]] = {"fc": (fc,), "feature_norm": (norm,), "head": ("lm_head",)}
    for number in range(count):
        ours, theirs = f"blocks.{number}.", f"{layer}{number}."
        q, k, v = BLOCK["attention.qkv"]
        names |= block_names(ours, theirs)
        names |= {f"{ours}attention.q": (theirs + q,), f"{ours}attention.kv": (theirs + k, theirs + v)}
        for part in ("attention_conv", "mlp_conv"):
            names |= {
                f"{ours}{part}": (theirs + part,),
                f"{ours}{part}.kernel_projection": (f"{theirs}{part}.kernel_projection",),
            }
    return names


def _taps(options: Options, fit: TargetFit, count: int) -> tuple[int, ...]:
    """The layers of the target whose inputs the head reads. By default they are spread over the target."""
    if "target_layer_ids" in options:  # i means the output of layer i; -1 is the embedding
        return tuple(i + 1 for i in options["target_layer_ids"])
    if "aux_hidden_state_layer_ids" in options:  # i means the input of layer i
        return tuple(options["aux_hidden_state_layer_ids"])
    layers = fit.config.num_layers
    if count == 1:
        return (layers // 2 + 1,)
    return tuple(round(1 + i * (layers - 4) / (count - 1)) + 1 for i in range(count))


def _sights(files: DrafterFiles, raw: Options, options: Options, count: int) -> tuple[RowVisibility, ...]:
    """Which rows see which, for each decoder block."""
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    slides = [kind == "sliding_attention" for kind in raw.get("layer_types", [])]
    if not slides:
        slides = [window is not None and i >= raw.get("max_window_layers", 28) for i in range(count)]
    if len(slides) != count:
        raise DrafterError(f"{files.path}: layer_types has {len(slides)} entries for {count} blocks")
    if _is_speculators(options):
        both = options.get("sliding_window_non_causal", options.get("speculators_model_type") == "dflash2")
        narrow = RowVisibility(window is not None and not both, window, window is not None)
        return tuple(narrow if slide else RowVisibility() for slide in slides)
    causal = options.get("is_causal", options.get("causal"))
    return tuple(
        RowVisibility(slide if causal is None else causal, window if slide else None) for slide in slides
    )


def _size(files: DrafterFiles, options: Options, key: str) -> int:
    if key not in options:
        raise DrafterError(f"{files.path / 'config.json'} has no {key}; it is damaged, or of another kind")
    return int(options[key])


FORMAT = HeadFormat(
    open_dflash,
    lambda files: any(f"{norm}.weight" in files.names for _, norm in ENCODERS),
    speculators=("dflash", "dflash2", "dspark", "xpress"),
    fills_masks=True,
)


class DFlash(OnePassDrafter[DFlashHead]):
    """Fills a block of masks in one pass over the target's features, and makes trees of the likeliest tokens.

    Keys and values of committed tokens come from features alone. Those of the block are kept in scratch
    slots during the pass. Without a path head, the tree is the best one by the probabilities of the depths.
    With one (DFlash2, DSpark, xPress), it grows level by level, and each node's tokens are guessed by its
    path.

    Args:
        target: the model to draft for.
        model: a checkpoint's directory, or a head; empty: `drafters/dflash` beside the target's weights.
        nodes: of the largest tree, the root not counted; `EngineConfig.max_tree` may allow fewer.
        branch: likeliest tokens at each depth, or below each node, that may be in the tree.
        width: nodes of each level that are expanded, where the tree grows level by level; None: an eighth of
            the largest tree, and at least 4.
        dtype: what the head computes in, as in `LLM`; "auto": see `load_head`.
    """

    def __init__(
        self,
        target: Target,
        model: str | Path | DFlashHead = "",
        nodes: int = 63,
        branch: int = 8,
        width: int | None = None,
        dtype: DType = "auto",
    ):
        width = max(target.config.max_tree // 8, 4) if width is None else width
        check_at_least_one("dflash", nodes=nodes, branch=branch, width=width)
        served = load_head(DFlashHead, model, target, dtype)
        head, c = served.head, served.head.config
        rows = max(target.config.max_rows, 1 + c.size)  # a pass has room for a block and a token before it
        shape = c.num_guesses, nodes, branch, None if head.path_head is None else width
        super().__init__(target, served, c.block, *shape, rows)
        self.kv.max_rows, self.path_head = rows, head.path_head or PathHead()
        self.packer = BlockPacker(target, c.size, c.mask, c.sights, c.block.group)

    def predict(self, requests: Sequence[Request]) -> PathRows:
        """See `OnePassDrafter`."""
        blocks = torch.stack(self.outputs(dict.fromkeys(requests, self.head.config.size)))  # [R, B, H]
        read, device = self.path_head.read(blocks), blocks.device
        roots = send([int(r.tokens[-1]) for r in requests], device)
        before = send([int(r.tokens[max(len(r.tokens) - 2, 0)]) for r in requests], device)
        return PathRows(
            self.head.logits(self._guessing(blocks, requests), self.shared),
            self._guessing(read, requests),
            self.places(requests),
            self.path_head.begin(read, roots, before),
        )

    def correct(self, rows: PathRows, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """See `OnePassDrafter`."""
        return self.path_head.step(rows.logits, rows.read, tokens, rows.states)

    def _guessing(self, blocks: Tensor, requests: Sequence[Request]) -> Tensor:
        """The rows that guess, as many as trees have room for: `[R, B, n] -> [D_1 + D_2 + ..., n]`."""
        first = self.head.config.size - self.head.config.num_guesses
        depths = [self.depth_for(request) for request in requests]
        return torch.cat([block[first : first + d] for block, d in zip(blocks, depths, strict=True)])

    def run(self, batch: DraftPass) -> list[Tensor]:
        """Compute a pass: `[B, H]` normed outputs of each block."""
        place = self.packer.pack(batch.rows)
        embedded = self.head.embed(place.tokens, self.shared)
        return [*self.head(torch.cat(batch.features), embedded, place, self.kv.pool.layers)]
