"""Medusa (Cai et al. 2024, arXiv 2401.10774): small heads on one hidden state of the target.

Each head predicts a token one further ahead than the head before it. No head knows what the others predict.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soothsay.config import DType
from soothsay.core.request import Observation, Request
from soothsay.core.tree import DraftTree
from soothsay.drafters.base import Target
from soothsay.drafters.heads.checkpoints.drafter_files import DrafterFiles
from soothsay.drafters.heads.checkpoints.fit import TargetFit
from soothsay.drafters.heads.checkpoints.stored_head import HeadFormat, Names, StoredHead, Written, split
from soothsay.drafters.heads.feature_drafter import LastFeatureDrafter, draft_ready, load_head
from soothsay.drafters.heads.trained_head import Head, TargetEnds
from soothsay.drafters.trees.templates import TreeLayout
from soothsay.errors import DrafterError
from soothsay.model.ops.linear import Dense


@dataclass(frozen=True)
class MedusaConfig:
    """Configuration of Medusa's heads."""

    hidden_size: int
    vocab_size: int
    target_layers: int
    """Number of the target's decoder blocks. The heads read the output of the last one."""

    num_heads: int
    num_layers: int = 1
    """Residual layers of each head."""

    own_heads: bool = False
    """Whether each head has its own output head instead of the target's."""

    def __post_init__(self) -> None:
        """Raise `DrafterError` for impossible numbers."""
        if min(self.num_heads, self.num_layers) < 1:
            raise DrafterError(
                f"medusa with {self.num_heads} heads of {self.num_layers} layers: each must be at least 1"
            )


class ResBlock(nn.Module):
    """`x + silu(linear(x))`. A new one is the identity: training starts from the target's own guess."""

    def __init__(self, size: int):
        super().__init__()
        self.linear: nn.Module = Dense(torch.zeros(size, size), torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        """`[N, H] -> [N, H]` float32."""
        return x + F.silu(cast(Tensor, self.linear(x)).float())


def res_blocks(size: int, count: int) -> nn.Sequential:
    """Some `ResBlock`s in a row."""
    return nn.Sequential(*(ResBlock(size) for _ in range(count)))


class MedusaHead(Head):
    """Heads that read the feature of the token before the root.

    Head k, counted from 0, guesses the token k + 1 places after the root.
    """

    method = "medusa"

    def __init__(self, config: MedusaConfig):
        super().__init__()
        self.config = config
        self.taps = (config.target_layers,)
        c, heads = config, range(config.num_heads)
        self.blocks = nn.ModuleList(res_blocks(c.hidden_size, c.num_layers) for _ in heads)
        own = heads if config.own_heads else ()
        self.lm_heads = nn.ModuleList(Dense.random(c.hidden_size, c.vocab_size) for _ in own)

    def forward(self, features: Tensor) -> Tensor:
        """`[N, H]` normed states of the target -> `[heads, N, H]` float32."""
        return torch.stack([layers(features) for layers in self.blocks])

    def logits(self, hidden: Tensor, index: int, shared: TargetEnds) -> Tensor:
        """Outputs of head `index`, `[M, H]` -> its logits `[M, V]` float32."""
        if not self.config.own_heads:
            return shared.logits(hidden)
        return cast(Tensor, self.lm_heads[index](hidden)).float()

    def guesses(self, features: Tensor, shared: TargetEnds) -> Tensor:
        """Features `[N, H]` -> logits `[N, heads, V]` float32 of all heads. A shared head runs once."""
        hidden = self(features)
        if self.config.own_heads:
            each = [self.logits(rows, index, shared) for index, rows in enumerate(hidden)]
            return torch.stack(each, dim=1)
        logits = shared.logits(hidden.transpose(0, 1).flatten(0, 1))
        return logits.view(len(features), self.config.num_heads, -1)


ORIGINAL = r"(?P<prefix>(?:medusa_head\.)?)(?P<head>\d{1,5})\.(?P<layer>\d{1,5})\.linear\.weight"
VLLM = r"(?P<prefix>(?:medusa_heads\.)?)blocks\.(?P<head>\d{1,5})\.layers\.(?P<layer>\d{1,5})\.weight"


def medusa_names(heads: int, layers: int, in_vllm: bool = False, prefix: str = "") -> Names:
    """The table of names.

    In the authors' layout, each head is a list of its layers and, if it has one, its output head. In vLLM's,
    layers and output heads are in two lists.
    """
    output, layer = ("lm_heads.{}", "blocks.{}.layers.{}") if in_vllm else (f"{{}}.{layers}", "{}.{}.linear")
    names = {f"lm_heads.{i}": (prefix + output.format(i),) for i in range(heads)}
    for i, j in product(range(heads), range(layers)):
        names[f"blocks.{i}.{j}.linear"] = (prefix + layer.format(i, j),)
    return names


def open_medusa(files: DrafterFiles, fit: TargetFit) -> StoredHead:
    """Open Medusa. Heads and layers are counted, since published configurations state wrong numbers."""
    in_vllm = any(re.fullmatch(VLLM, name) for name in files.names)
    found = [m for name in files.names if (m := re.fullmatch(VLLM if in_vllm else ORIGINAL, name))]
    heads = 1 + max(int(m["head"]) for m in found)
    layers = 1 + max(int(m["layer"]) for m in found)
    if heads * layers > 4 * len(found):
        raise DrafterError(
            f"{files.path} has {len(found)} layers of heads, numbered as those of {heads} heads of "
            f"{layers}: the download is incomplete"
        )
    prefix = found[0]["prefix"]
    names = medusa_names(heads, layers, in_vllm, prefix)
    if f"{prefix}token_map" in files.names:
        raise DrafterError(
            f"{files.path} has a token_map: Medusa heads that can say only some tokens are not supported; "
            "take those it was made from"
        )
    hidden, vocab = files.rows(found[0].string), fit.config.vocab_size
    given: dict[str, Tensor] = {}
    output = f"{names['lm_heads.0'][0]}.weight"
    own = output in files.names and not files.config.get("original_lm_head", False)
    rows = files.rows(output) if own else int(files.config.get("vocab_size", vocab))
    fit.check(hidden=hidden, vocab=rows)
    fit.check_layers((files.config.get("soothsay") or {}).get("target_layers", fit.config.num_layers))
    if own and rows < vocab:
        fit.refuse(f"can say {rows:,} tokens; the target has {vocab:,}")
    no_biases = in_vllm and not any(name.endswith(".bias") for name in files.names)
    for i in range(heads):
        output = f"{names[f'lm_heads.{i}'][0]}.weight"
        if own and rows > vocab and output in files.names:  # the rows after them are padding
            given[f"lm_heads.{i}.weight"] = files.read(output)[:vocab]
        if no_biases:
            given |= {f"blocks.{i}.{j}.linear.bias": torch.zeros(hidden) for j in range(layers)}
    config = MedusaConfig(hidden, vocab, fit.config.num_layers, heads, layers, own)
    kind = "vLLM" if in_vllm else "output heads of its own" if own else "the target's output head"
    shared = r"$." if own else rf"{re.escape(prefix)}lm_heads?\.(0\.)?weight"
    return StoredHead(fit, f"Medusa ({kind})", lambda: MedusaHead(config), names, given, ignored=shared)


def write_medusa(head: MedusaHead, target: str) -> Written:
    """Make config.json and tensors as text-generation-inference reads them.

    Heads with their own output heads are its version 1. Heads without are its version 2, which takes heads of
    one layer only.
    """
    c = head.config
    config = {
        **_common_keys(c),
        "base_model_name_or_path": target,
        "medusa_num_heads": c.num_heads,
        "medusa_num_layers": c.num_layers,
    }
    return config, split(head, medusa_names(c.num_heads, c.num_layers))


def write_vllm_medusa(head: MedusaHead, target: str) -> Written:
    """Make config.json and tensors as vLLM reads them.

    Raises `DrafterError` for heads without their own output heads.
    """
    c = head.config
    if not c.own_heads:
        raise DrafterError(
            "vLLM's Medusa has output heads of its own, these share the target's: train them with own heads, "
            "or leave the layout at its default"
        )
    config = {
        **_common_keys(c),
        "truncated_vocab_size": c.vocab_size,
        "num_heads": c.num_heads,
        "num_hidden_layers": c.num_layers,
        "medusa_fc_bias": True,
        "original_lm_head": False,
    }
    return config, split(head, medusa_names(c.num_heads, c.num_layers, in_vllm=True))


def _common_keys(c: MedusaConfig) -> dict[str, Any]:
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": c.hidden_size,
        "vocab_size": c.vocab_size,
        "torch_dtype": "bfloat16",
        "soothsay": {"target_layers": c.target_layers},
    }


FORMAT = HeadFormat(
    open_medusa,
    lambda files: any(re.fullmatch(pattern, name) for name in files.names for pattern in (ORIGINAL, VLLM)),
    layouts={"": write_medusa, "vllm": write_vllm_medusa},
    reads_last=True,
)


class Medusa(LastFeatureDrafter[MedusaHead]):
    """Makes trees of the likeliest tokens of Medusa's heads.

    Args:
        target: the model to draft for.
        model: a directory with the heads, or a `MedusaHead`; "" is `drafters/medusa` beside the target.
        nodes: of the largest tree, the root not counted; `EngineConfig.max_tree` may allow fewer.
        branch: likeliest tokens of each head that may be in the tree.
        tree: "best-first" chooses nodes in each step by the heads' probabilities, "static" takes one tree for
            all steps, and "measured" fits that tree to the acceptance so far.
        dtype: element type of the heads' linear layers; "auto" is the target's.
    """

    def __init__(
        self,
        target: Target,
        model: str | Path | MedusaHead = "",
        nodes: int = 63,
        branch: int = 10,
        tree: str = "best-first",
        dtype: DType = "auto",
    ):
        super().__init__(target, load_head(MedusaHead, model, target, dtype))
        depth, ops = self.head.config.num_heads, target.model.kernels.sampling
        self.layout = TreeLayout(tree, depth, branch, nodes, ops)
        self.max_nodes = 1 + nodes

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """Return a tree for each request whose feature is known, and the root alone for the others."""
        return draft_ready(requests, self.ready, self._draft)

    def _draft(self, ready: Sequence[Request]) -> list[DraftTree]:
        logits = self.head.guesses(self.features(ready), self.shared)  # [R, heads, V]
        return self.layout.trees(ready, logits.flatten(0, 1), [self.head.config.num_heads] * len(ready))

    def observe(self, observations: Sequence[Observation]) -> None:
        """Keep the features that the heads read next, and count which tokens were right."""
        super().observe(observations)
        self.layout.observe(observations)

    def release(self, request: Request) -> None:
        """Forget a request."""
        super().release(request)
        self.layout.release(request)
