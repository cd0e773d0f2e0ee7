"""MTP modules against their formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from test_grown import STRESSES, Make, Oracle, Past, Seen, check_all
from torch import Tensor

from soothsay.drafters.mtp import MTP, MTPConfig, MTPHead
from soothsay.model.kernels import StockKernels
from soothsay.model.transformer import Transformer


def make_head(target: Transformer, modules: int = 1, **changes: bool) -> MTPHead:
    block = replace(target.config, num_layers=modules, windows=(None,) * modules, intermediate_size=80)
    torch.manual_seed(7)
    head = MTPHead(MTPConfig(block, target.config.num_layers, **changes), StockKernels())
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
    """Three modules; every path is computed as a sequence of its own."""

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
        """`[V]` logits behind a sequence whose last `depth` tokens have no features."""
        slots = torch.arange(1, len(tokens))
        embedded, read = self.embed(tokens[1:]), known
        for module in range(min(depth, self.modules - 1) + 1):
            past = Past()
            at = slice(0, len(read))
            out = self.forward(embedded[at], read, slots[at], past, module)
            read = torch.cat([torch.zeros_like(out[:1]), out])  # the next module's, one row behind
        for row in range(len(out), len(slots)):  # the last module goes on by itself
            out = self.forward(embedded[row : row + 1], out[-1:], slots[row : row + 1], past, module)
        return self.logits(out[-1:])[0]


@pytest.mark.parametrize("stress", STRESSES)
def test_guesses_are_the_formula_s(stress: str, tiny: Make) -> None:
    target = tiny(0)
    head = make_head(target)
    check_all(stress, target, head, MTPOracle, lambda t: MTP(t, head), branch=3)


def test_the_other_order_and_no_first_embedding(tiny: Make) -> None:
    target = tiny(0)
    head = make_head(target, hidden_first=True, zero_first=True)
    check_all("at ease", target, head, MiMoOracle, lambda t: MTP(t, head, 2, 3, 3), branch=3)


@pytest.mark.parametrize("stress", [stress for stress in STRESSES if "never" not in stress])
def test_several_modules(stress: str, tiny: Make) -> None:
    target = tiny(0)
    head = make_head(target, modules=3)
    check_all(stress, target, head, SeveralOracle, lambda t: MTP(t, head, 5, 2, 2), branch=2)
