"""Formulas of all trained heads, from their raw weights: the reference of tests of drafting and training.

Each formula computes whole sequences with dense attention and caches nothing. Heads that read their own
output have an `Oracle` each, in float64; the other heads have a function. The `make_*` functions build heads
with random weights.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tiny import TINY, adapted
from torch import Tensor, nn

from soothsay import DraftTree
from soothsay.core.batch import Batch, Rows
from soothsay.core.request import Request
from soothsay.drafters.heads.block import BlockConfig, BlockHead
from soothsay.drafters.heads.eagle import EagleConfig, EagleHead
from soothsay.drafters.heads.eagle3 import Eagle3Config, Eagle3Head
from soothsay.drafters.heads.hydra import HydraHead
from soothsay.drafters.heads.medusa import MedusaHead
from soothsay.drafters.heads.mtp import MTPConfig, MTPHead
from soothsay.drafters.heads.redrafter import RedrafterConfig, RedrafterHead
from soothsay.drafters.heads.trained_head import Head
from soothsay.model.ops.kernels import Kernels, StockKernels
from soothsay.model.specs.attention_spec import AttentionSpec
from soothsay.model.specs.model_spec import ModelSpec
from soothsay.model.transformer import Transformer

VOCAB = TINY.vocab_size


def randomize(head: nn.Module, seed: int = 0) -> nn.Module:
    """Replace the weights that training starts from by random ones that affect the outputs."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in head.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            if "norm" in name:
                parameter.copy_(1 + 0.2 * noise)
            else:
                parameter.copy_(noise * (2.0 / parameter.shape[-1] ** 0.5))
    return head.requires_grad_(False)


def taps_of(target: Transformer, tokens: Sequence[int], taps: Sequence[int]) -> tuple[Tensor, ...]:
    """Compute the features of a sequence, `[n, H]` for each tap, in one pass."""
    batch = Batch.pack([Rows(np.array(tokens), 0)], group=target.spec.group, windows=target.spec.windows)
    return target(batch, taps=taps)[1]


def rms_norm(x: Tensor, norm: Any) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


@dataclass(frozen=True)
class Seen:
    """One proposed tree, with the state of its request at that time."""

    request: Request
    tokens: list[int]
    max_nodes: int
    max_depth: int
    first_key: int | None  # None: the drafter knew nothing yet
    tree: DraftTree


class Oracle(ABC):
    """The formula of a head with one decoder block, from its raw weights in float64."""

    def __init__(self, head: Head, target: Transformer):
        self.config = head.config.block  # type: ignore[attr-defined]
        self.weights = {name: value.double() for name, value in head.state_dict().items()}
        self.target = {name: value.double() for name, value in target.state_dict().items()}
        self.taps = head.taps

    @abstractmethod
    def features(self, taps: Sequence[Tensor]) -> Tensor: ...

    @abstractmethod
    def forward(self, embedded: Tensor, features: Tensor, positions: Tensor, past: Past) -> Tensor: ...

    @abstractmethod
    def logits(self, out: Tensor) -> Tensor: ...

    def embed(self, tokens: Sequence[int]) -> Tensor:
        return self.target["embedding.weight"][list(tokens)]

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.config.norm.eps).sqrt() * weight

    def attention(self, x: Tensor, positions: Tensor, past: Past, name: str = "block.attention.") -> Tensor:
        """Compute attention. Each row sees `past`, itself and the rows before it."""
        c, weights = self.config, self.weights
        qkv = x @ weights[name + "qkv.weight"].T
        if name + "qkv.bias" in weights:
            qkv = qkv + weights[name + "qkv.bias"]
        own = c.first(AttentionSpec)
        heads, theta = qkv.view(len(x), -1, own.size), own.rotation.rope.theta
        q, k, v = heads.split([own.heads, own.kv_heads, own.kv_heads], dim=1)
        past.add(rotate(k, positions, theta), v)
        q = rotate(q, positions, theta)
        k, v = past.keys.repeat_interleave(c.group, 1), past.values.repeat_interleave(c.group, 1)
        scores = torch.einsum("thd,shd->hts", q, k) / math.sqrt(own.size)
        rows, keys = scores.shape[1:]
        hidden = torch.arange(keys)[None] > torch.arange(keys - rows, keys)[:, None]
        weighed = scores.masked_fill(hidden, -math.inf).softmax(-1)
        return torch.einsum("hts,shd->thd", weighed, v).flatten(1) @ weights[name + "o.weight"].T

    def mlp(self, x: Tensor, name: str = "block.mlp.") -> Tensor:
        gate, up = (x @ self.weights[name + "gate_up.weight"].T).chunk(2, dim=-1)
        return (gate * gate.sigmoid() * up) @ self.weights[name + "down.weight"].T

    def output(self, tokens: Sequence[int], taps: Sequence[Tensor]) -> Tensor:
        """Compute the output `[1, H]` at the last token. Only the first `len(taps[0])` tokens have taps.

        The rows after the taps end read the output of the row before.
        """
        known, past = self.features([tap.double() for tap in taps]), Past()
        slots = torch.arange(len(tokens))
        read = slots[1 : len(known) + 1]
        out = self.forward(self.embed([tokens[slot] for slot in read]), known, read, past)[-1:]
        for slot in slots[len(known) + 1 :]:
            out = self.forward(self.embed([tokens[slot]]), out, slot[None], past)
        return out

    def tree(self, seen: Seen, taps: Sequence[Tensor]) -> dict[int, Tensor]:
        """Compute the logits `[V]` at each node with children, as in the paper, without a cache."""
        assert seen.first_key is not None
        slots = torch.arange(seen.first_key, len(seen.tokens))
        features = self.features([tap.double() for tap in taps])
        past = Past()
        tokens = [seen.tokens[slot] for slot in slots]
        outs = {0: (self.forward(self.embed(tokens), features[slots - 1], slots, past)[-1:], past)}
        for node in range(1, len(seen.tree)):
            if seen.tree.children[node]:
                above, past = outs[seen.tree.parents[node]]
                past = copy.copy(past)
                at = torch.tensor([len(seen.tokens) - 1 + seen.tree.depths[node]])
                embedded = self.embed([seen.tree.tokens[node]])
                outs[node] = self.forward(embedded, above, at, past), past
        return {node: self.logits(out)[0] for node, (out, _) in outs.items()}


@dataclass
class Past:
    """Keys and values so far, `[S, H_kv, d]`."""

    keys: Tensor | None = None
    values: Tensor | None = None

    def add(self, keys: Tensor, values: Tensor) -> None:
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys])
        self.values = values if self.values is None else torch.cat([self.values, values])


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate `[T, H, d]`: dimensions i and i + d / 2 are the parts of a complex number."""
    half = x.shape[-1] // 2
    angles = positions[:, None].double() / theta ** (torch.arange(half).double() / half)
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]
    turned = torch.complex(x[..., :half], x[..., half:]) * turns
    return torch.cat([turned.real, turned.imag], dim=-1)


def make_eagle_head(
    target: Transformer, *, bias: bool = True, kernels: Kernels | None = None, **changes: Any
) -> EagleHead:
    block = adapted(target.spec, num_layers=1, windows=(None,), **changes)
    torch.manual_seed(5)
    head = EagleHead(EagleConfig(block, bias, target.spec.num_layers), kernels or StockKernels())
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.normal_(1, 0.2) if "norm" in name else parameter.mul_(0.7)
            if "bias" in name:
                parameter.normal_(std=0.2)
    return head


class EagleOracle(Oracle):
    def features(self, taps: Sequence[Tensor]) -> Tensor:
        return self.norm(taps[0], self.target["norm.weight"])

    def forward(self, embedded: Tensor, features: Tensor, positions: Tensor, past: Past) -> Tensor:
        x = torch.cat([embedded, features], -1) @ self.weights["fc.weight"].T
        x = x + self.weights.get("fc.bias", 0)
        x = x + self.attention(x, positions, past)
        return x + self.mlp(self.norm(x, self.weights["block.mlp_norm.weight"]))

    def logits(self, out: Tensor) -> Tensor:
        return out @ self.target["head.weight"].T


TAPS = (0, 1, 2)
SAYS = [t for t in range(VOCAB) if t % 3]  # the draft vocabulary


def make_eagle3_head(
    target: Transformer,
    hidden: int = 64,
    says: Sequence[int] = SAYS,
    kernels: Kernels | None = None,
    **changes: Any,
) -> Eagle3Head:
    block = adapted(target.spec, num_layers=1, windows=(None,), hidden_size=hidden, intermediate_size=80)
    config = Eagle3Config(block, target.spec.hidden_size, len(says), TAPS, own_embedding=True)
    torch.manual_seed(6)
    head = Eagle3Head(replace(config, **changes), kernels or StockKernels())
    head.d2t = torch.tensor(says) - torch.arange(len(says))
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.normal_(1, 0.2) if "norm" in name else parameter.mul_(1.2)
    return head


class Eagle3Oracle(Oracle):
    norm_before_residual = False

    def features(self, taps: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(taps), -1) @ self.weights["fc.weight"].T

    def embed(self, tokens: Sequence[int]) -> Tensor:
        own = self.weights.get("embedding.weight")
        return super().embed(tokens) if own is None else own[list(tokens)]

    def forward(self, embedded: Tensor, features: Tensor, positions: Tensor, past: Past) -> Tensor:
        normed = self.norm(features, self.weights["hidden_norm.weight"])
        both = torch.cat([self.norm(embedded, self.weights["embedding_norm.weight"]), normed], -1)
        x = (normed if self.norm_before_residual else features) + self.attention(both, positions, past)
        return x + self.mlp(self.norm(x, self.weights["block.mlp_norm.weight"]))

    def logits(self, out: Tensor) -> Tensor:
        own = self.head_input(out) @ self.weights["head.weight"].T
        full = torch.full((len(out), VOCAB), -math.inf, dtype=torch.float64)
        for i, offset in enumerate(self.weights["d2t"].long().tolist()):
            full[:, i + offset] = own[:, i]
        return full

    def head_input(self, out: Tensor) -> Tensor:
        return self.norm(out, self.weights["norm.weight"])


class NormedResidual(Eagle3Oracle):
    norm_before_residual = True


class Eagle31Oracle(Eagle3Oracle):
    """A norm of each tap, and outputs that are normed before the next row reads them."""

    def features(self, taps: Sequence[Tensor]) -> Tensor:
        return super().features(
            [self.norm(x, self.weights[f"fc_norm.{i}.weight"]) for i, x in enumerate(taps)]
        )

    def forward(self, embedded: Tensor, features: Tensor, positions: Tensor, past: Past) -> Tensor:
        out = super().forward(embedded, features, positions, past)
        return self.norm(out, self.weights["norm.weight"])

    def head_input(self, out: Tensor) -> Tensor:
        return out


def make_mtp_head(
    target: Transformer, modules: int = 1, kernels: Kernels | None = None, **changes: bool
) -> MTPHead:
    block = adapted(target.spec, num_layers=modules, windows=(None,) * modules, intermediate_size=80)
    torch.manual_seed(7)
    head = MTPHead(MTPConfig(block, target.spec.num_layers, **changes), kernels or StockKernels())
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.normal_(1, 0.2) if "norm" in name else parameter.mul_(1.3)
    return head


class MTPOracle(Oracle):
    hidden_first = zero_first = False

    def features(self, taps: Sequence[Tensor]) -> Tensor:
        return self.norm(taps[0], self.target["norm.weight"])

    def forward(
        self, embedded: Tensor, features: Tensor, positions: Tensor, past: Past, module: int = 0
    ) -> Tensor:
        name = f"steps.{module}."
        if self.zero_first:
            embedded = embedded * (positions != 1)[:, None]
        parts = [
            self.norm(embedded, self.weights[name + "embedding_norm.weight"]),
            self.norm(features, self.weights[name + "hidden_norm.weight"]),
        ]
        both = torch.cat(parts[::-1] if self.hidden_first else parts, -1)
        x = both @ self.weights[name + "projection.weight"].T
        name += "block."
        normed = self.norm(x, self.weights[name + "attention_norm.weight"])
        x = x + self.attention(normed, positions, past, name + "attention.")
        x = x + self.mlp(self.norm(x, self.weights[name + "mlp_norm.weight"]), name + "mlp.")
        return self.norm(x, self.weights[f"steps.{module}.norm.weight"])

    def logits(self, out: Tensor) -> Tensor:
        return out @ self.target["head.weight"].T


class MiMoOracle(MTPOracle):
    hidden_first = zero_first = True


class SeveralOracle(MTPOracle):
    """The formula of three modules. Each path is computed as a separate sequence."""

    modules = 3

    def tree(self, seen: Seen, taps: Sequence[Tensor]) -> dict[int, Tensor]:
        known = self.features([tap.double() for tap in taps])[: len(seen.tokens) - 1]
        found = {}
        for node, children in enumerate(seen.tree.children):
            if node == 0 or children:
                drafted = [seen.tree.tokens[n] for n in seen.tree.path(node)[1:]]
                found[node] = self.path([*seen.tokens, *drafted], known, len(drafted))
        return found

    def path(self, tokens: list[int], known: Tensor, depth: int) -> Tensor:
        """Compute the logits `[V]` after a sequence whose last `depth` tokens have no features."""
        slots = torch.arange(1, len(tokens))
        embedded, read = self.embed(tokens[1:]), known
        for module in range(min(depth, self.modules - 1) + 1):
            past = Past()
            at = slice(0, len(read))
            out = self.forward(embedded[at], read, slots[at], past, module)
            read = torch.cat([torch.zeros_like(out[:1]), out])  # the next module's input, shifted by one row
        for row in range(len(out), len(slots)):  # the last module continues with its own outputs
            out = self.forward(embedded[row : row + 1], out[-1:], slots[row : row + 1], past, module)
        return self.logits(out[-1:])[0]


def medusa_logits(head: MedusaHead, target: Transformer, feature: Tensor) -> Tensor:
    """Compute the logits `[heads, V]` from the last layer's raw state, by the paper's formula."""
    weights = head.state_dict()
    out = []
    for k in range(head.config.num_heads):
        x = rms_norm(feature, target.norm)
        for j in range(head.config.num_layers):
            x = x + silu(
                weights[f"blocks.{k}.{j}.linear.weight"] @ x + weights[f"blocks.{k}.{j}.linear.bias"]
            )
        own = head.config.own_heads
        out.append((weights[f"lm_heads.{k}.weight"] if own else target.head.weight) @ x)
    return torch.stack(out)


def hydra_logits(head: HydraHead, target: Transformer, feature: Tensor, path: list[int]) -> Tensor:
    """Compute the logits `[V]` after `path`, which begins with the root, from the last layer's raw state."""
    weights, k = head.state_dict(), len(path) - 1
    x = torch.cat([rms_norm(feature, target.norm), *(target.embedding.weight[token] for token in path)])
    x = weights[f"inputs.{k}.weight"] @ x + weights[f"inputs.{k}.bias"]
    for j in range(head.config.num_layers):
        x = x + silu(weights[f"blocks.{k}.{j}.linear.weight"] @ x + weights[f"blocks.{k}.{j}.linear.bias"])
    return target.head.weight @ x


def make_block_head(
    size: int = 4,
    layers: int = 2,
    rank: int = 0,
    cell: int = 0,
    kernels: Kernels | None = None,
    shortlist: Sequence[int] = (),
    **changes: object,
) -> BlockHead:
    block = adapted(TINY, num_layers=layers, windows=(None,) * layers, **changes)
    numbers: dict[str, Any] = {"cell_size": cell, "scaled_taps": cell > 0, "shortlist_size": len(shortlist)}
    config = BlockConfig(block, TINY.hidden_size, (0, 2), size, rank, **numbers)
    head = BlockHead(config, kernels or StockKernels())
    if shortlist:
        head.shortlist = torch.tensor(shortlist)
    return head


def make_redrafter_head(size: int = 3, shortlist: Sequence[int] = ()) -> RedrafterHead:
    head = RedrafterHead(RedrafterConfig(TINY.hidden_size, VOCAB, (0, 2), size, 32, 16, len(shortlist)))
    if shortlist:
        head.shortlist = torch.tensor(shortlist)
    return head


def redrafter_outputs(head: RedrafterHead, target: Transformer, taps: Tensor, root: int) -> Tensor:
    """Compute the outputs `[size, H]` before they are refined. `taps` `[taps * H]` precede the root."""
    w = head.state_dict()
    seen = torch.cat([taps * w["tap_scale"], rms_norm(target.embedding.weight[root], head.embedding_norm)])
    h = head.config.hidden_size
    looked = w["look.weight"] @ seen
    made = w["guesses.weight"] @ (silu(looked[:h]) * looked[h : 2 * h])
    return rms_norm(made.view(head.config.size, -1) + looked[2 * h :], head.norm)


def cell_path(
    head: RedrafterHead | BlockHead, target: Transformer, outputs: Tensor, path: Sequence[int]
) -> Tensor:
    """Compute the logits `[V]` after a path that begins with the root."""
    w, state = head.state_dict(), None
    for output, token in zip(outputs, path, strict=False):
        embedded = rms_norm(target.embedding.weight[token], head.embedding_norm)
        sums = w["refiner.read.weight"] @ output + w["refiner.token.weight"] @ embedded
        state = silu(sums if state is None else sums + w["refiner.carry.weight"] @ state)
    last = outputs[len(path) - 1] + w["refiner.out.weight"] @ state
    return listed_logits(head, target, last[None])[0]


def listed_logits(head: RedrafterHead | BlockHead, target: Transformer, outputs: Tensor) -> Tensor:
    """Compute the logits `[N, V]` of outputs `[N, H]`: minus infinity for tokens outside of the list."""
    logits = outputs @ target.head.weight.t()
    if head.shortlist is not None:
        others = [token for token in range(VOCAB) if token not in head.shortlist]
        logits[:, others] = -torch.inf
    return logits


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate `[N, heads, d]` by positions: dimension i together with i + d / 2."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * 10_000.0 ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


def dense_block(
    w: dict[str, Tensor],
    at: str,
    c: ModelSpec,
    x: Tensor,
    positions: Tensor,
    inputs: Tensor | None = None,
) -> Tensor:
    """Compute a decoder block over rows `[N, H]`. Each row sees itself and all rows before it.

    Attention reads the normed rows, or `inputs` in their place.
    """

    def normed(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + c.norm.eps).sqrt() * w[f"{at}.{name}.weight"]

    own = c.first(AttentionSpec)
    n, d = len(x), own.size
    read = normed(x, "attention_norm") if inputs is None else inputs
    qkv = (read @ w[f"{at}.attention.qkv.weight"].t()).view(n, -1, d)
    q, k, v = qkv.split([own.heads, own.kv_heads, own.kv_heads], dim=1)
    if own.norms is not None:
        q, k = normed(q, "attention.q_norm"), normed(k, "attention.k_norm")
    q, k = rotated(q, positions), rotated(k, positions)
    k, v = (part.repeat_interleave(c.group, dim=1) for part in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(d)
    scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
    out = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(n, -1)
    x = x + out @ w[f"{at}.attention.o.weight"].t()
    gate, up = (normed(x, "mlp_norm") @ w[f"{at}.mlp.gate_up.weight"].t()).chunk(2, dim=-1)
    return x + (silu(gate) * up) @ w[f"{at}.mlp.down.weight"].t()


def block_logits(
    head: BlockHead, target: Transformer, tokens: Sequence[int], depth: int, first: int = 1
) -> Tensor:
    """Compute the logits `[depth, V]` after `tokens`, before the correction. See `block_outputs`."""
    return listed_logits(head, target, block_outputs(head, target, tokens, depth, first))


def block_outputs(
    head: BlockHead, target: Transformer, tokens: Sequence[int], depth: int, first: int = 1
) -> Tensor:
    """Compute the normed outputs `[depth, H]` after `tokens`.

    The rows are the tokens from `first` on, each beside the feature of the token before it, and then
    `depth - 1` learned rows.
    """
    w, c = head.state_dict(), head.config.block
    seen = torch.cat(taps_of(target, tokens[:-1], head.taps), dim=-1)
    states = (seen * w["tap_scale"] if "tap_scale" in w else seen) @ w["fc.weight"].t()
    embedded = target.embedding.weight[tokens[first:]]
    queries = w["queries"][: depth - 1]
    rows = torch.cat(
        [
            rms_norm(torch.cat([embedded, queries[:, 0]]), head.embedding_norm),
            rms_norm(torch.cat([states[first - 1 :], queries[:, 1]]), head.feature_norm),
        ],
        dim=-1,
    )
    x = rows @ w["projection.weight"].t()
    for layer in range(c.num_layers):
        x = dense_block(w, f"blocks.{layer}", c, x, first + torch.arange(len(x)))
    return rms_norm(x[-depth:], head.norm)


def block_correction(head: BlockHead, token: int) -> Tensor | float:
    """Compute the correction `[V]` that is added to the logits after `token`."""
    w, c = head.state_dict(), head.config.block
    if not head.config.markov_rank:
        return 0.0
    known = list(range(c.vocab_size)) if head.shortlist is None else head.shortlist.tolist()
    added = torch.zeros(c.vocab_size)
    if token in known:
        added[known] = w["markov_out.weight"] @ w["markov_in.weight"][known.index(token)]
    return added
