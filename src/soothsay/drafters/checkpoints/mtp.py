"""MTP modules: DeepSeek-V3's and GLM's layers behind the last, Qwen3-Next's, MiMo's, and speculators'."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from soothsay.drafters.checkpoints.blocks import block_config, check_block, hf_config, refusal
from soothsay.drafters.checkpoints.eagle import speculators_config
from soothsay.drafters.checkpoints.files import DrafterFiles
from soothsay.drafters.checkpoints.fit import Fit
from soothsay.drafters.checkpoints.names import Names, block_names, split
from soothsay.drafters.checkpoints.stored import StoredHead
from soothsay.drafters.mtp import MTPConfig, MTPHead
from soothsay.errors import DrafterError

OURS = ("projection", "embedding_norm", "hidden_norm", "norm")


@dataclass(frozen=True)
class Layout:
    """Where the tensors of a module are; `{}` stands for its number in the file."""

    name: str
    step: str
    """Prefix of the parts in `parts`."""

    parts: tuple[str, str, str, str]
    """The projection, the norms of embedding and hidden state, and the last norm."""

    block: str
    """Prefix of the decoder block."""

    hidden_first: bool = False
    zero_first: bool = False
    zero_centred: bool = False
    ignored: str = "$."

    def names(self, numbers: list[int]) -> Names:
        """Of modules that the file numbers so."""
        names: dict[str, tuple[str, ...]] = {}
        for step, number in enumerate(numbers):
            theirs = self.step.format(number)
            names |= {f"steps.{step}.{o}": (theirs + part,) for o, part in zip(OURS, self.parts, strict=True)}
            names |= block_names(f"steps.{step}.block.", self.block.format(number))
        return names

    def numbers(self, files: DrafterFiles) -> list[int]:
        """Of the modules in a file: none if it is of another layout."""
        pattern = re.escape(f"{self.step}{self.parts[0]}.weight").replace(r"\{\}", r"(\d+)")
        found = [m for name in files.names if (m := re.fullmatch(pattern, name))]
        return sorted(int(m[1]) if m.groups() else 0 for m in found)


DEEPSEEK = Layout(
    "DeepSeek",
    "model.layers.{}.",
    ("eh_proj", "enorm", "hnorm", "shared_head.norm"),
    "model.layers.{}.",
    zero_first=True,
    ignored=r"model\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight",
)
NORMS = ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")
MIMO = Layout(
    "MiMo", "model.mtp_layers.{}.", NORMS, "model.mtp_layers.{}.", hidden_first=True, zero_first=True
)
SPECULATORS = Layout("speculators", "mtp_layers.{}.", NORMS, "mtp_layers.{}.")
QWEN = Layout(
    "Qwen3-Next",
    "mtp.",
    ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"),
    "mtp.layers.{}.",
    zero_centred=True,
    ignored=r"mtp\.embed_tokens\.weight",
)
LAYOUTS = (DEEPSEEK, MIMO, SPECULATORS, QWEN)


def is_mtp(files: DrafterFiles) -> bool:
    """Whether there are MTP modules, perhaps among the tensors of their target."""
    return any(layout.numbers(files) for layout in LAYOUTS)


def open_mtp(files: DrafterFiles, fit: Fit) -> StoredHead:
    """The modules; embedding and output head are the target's."""
    layout = next(layout for layout in LAYOUTS if layout.numbers(files))
    numbers = layout.numbers(files)
    raw: Mapping[str, Any] = files.config
    raw = raw.get("transformer_layer_config") or raw.get("text_config") or raw
    for number in numbers:
        check_block(files, raw, layout.block.format(number))
    names = layout.names(numbers)
    block = block_config(files, raw, names, "steps.0.block.", len(numbers))
    fit.check(hidden=block.hidden_size, vocab=block.vocab_size)
    if layout is not SPECULATORS:  # whose configuration counts the module's layers
        fit.check_layers(int(raw.get("num_hidden_layers", 0)))
    fit.check_context(block.max_positions)
    if layout is QWEN and any(re.match(r"mtp\.layers\.[1-9]", name) for name in files.names):
        raise refusal(files, "it has several MTP layers behind one projection")
    ours: Mapping[str, Any] = files.config.get("soothsay") or {}
    config = MTPConfig(
        block,
        fit.config.num_layers,
        layout.hidden_first,
        bool(ours.get("zero_first", layout.zero_first)),
    )
    starts = {layout.step, layout.block}
    scope = "|".join(re.escape(s.format(number)) for s in sorted(starts) for number in numbers)
    return StoredHead(
        files,
        fit,
        f"MTP ({layout.name})",
        lambda: MTPHead(config, fit.kernels_for(block)),
        names,
        scope=f"(?:{scope})",
        ignored=layout.ignored,
        zero_centred=layout.zero_centred,
    )


def write_mtp(head: MTPHead) -> tuple[dict[str, Any], Iterator[tuple[str, Tensor]]]:
    """config.json and tensors in DeepSeek's layout: layers behind the target's last."""
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


def write_speculators_mtp(head: MTPHead, target: str) -> tuple[dict[str, Any], Iterator[tuple[str, Tensor]]]:
    """config.json and tensors, as vLLM's speculators reads them: one module."""
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
    """Projections that take cat[embedding, hidden]."""
    projections = {f"{names[f'steps.{step}.projection'][0]}.weight" for step in range(len(head.steps))}
    for name, tensor in split(head, names, head.config.block):
        if head.config.hidden_first and name in projections:
            tensor = torch.cat(tensor.chunk(2, dim=1)[::-1], dim=1)
        yield name, tensor
