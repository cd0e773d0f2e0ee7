"""Drafters to be trained: of a shape that suits a target, and beginning with what the target knows.

A head that begins as a copy of its target's last block, reading the target's feature as it is, needs a
fraction of the data that a random one needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from soothsay.config import ModelConfig
from soothsay.drafters.block import BlockConfig, BlockHead
from soothsay.drafters.eagle import EagleConfig, EagleHead
from soothsay.drafters.eagle3 import Eagle3Config, Eagle3Head
from soothsay.drafters.hydra import HydraConfig, HydraHead
from soothsay.drafters.medusa import MedusaConfig, MedusaHead
from soothsay.drafters.mtp import MTPConfig, MTPHead, MTPModule
from soothsay.errors import TrainingError
from soothsay.model.transformer import Block, FeedForward, Transformer
from soothsay.train.data import Example
from soothsay.train.sequences import TrainingKernels, weight_of


def medusa(target: Transformer, heads: int = 4, layers: int = 1, own_heads: bool = False) -> MedusaHead:
    """`heads` guesses; with `own_heads` each has an output matrix of its own, else the target's."""
    return MedusaHead(
        MedusaConfig(
            hidden_size=target.config.hidden_size,
            target_layers=target.config.num_layers,
            num_heads=heads,
            num_layers=layers,
            own_heads=own_heads,
            vocab_size=target.config.vocab_size,
        )
    )


def hydra(target: Transformer, heads: int = 4, layers: int = 1) -> HydraHead:
    """`heads` guesses."""
    return HydraHead(HydraConfig(target.config.hidden_size, target.config.num_layers, heads, layers))


@torch.no_grad()
def eagle(target: Transformer) -> EagleHead:
    """One block of the target's kind."""
    config = EagleConfig(_blocks(target.config, 1), bias=True, target_layers=target.config.num_layers)
    head = EagleHead(config, TrainingKernels())
    last = cast(Block, target.blocks[-1])
    block = head.block
    _copy(block.attention, last.attention)
    _copy(block.mlp, last.mlp)
    _copy(block.mlp_norm, last.mlp_norm)
    # a guess is the feature itself, however deep it goes
    weight_of(block.attention.o).zero_()
    weight_of(cast(FeedForward, block.mlp).down).zero_()
    _pass_on(head.fc, parts=2)
    return head


@torch.no_grad()
def eagle3(target: Transformer, vocabulary: Sequence[int]) -> Eagle3Head:
    """One block of the target's kind, and an output matrix for the tokens in `vocabulary` alone."""
    config = Eagle3Config(
        block=_blocks(target.config, 1),
        target_hidden_size=target.config.hidden_size,
        draft_vocab_size=len(vocabulary),
        taps=three_layers(target.config.num_layers),
    )
    head = Eagle3Head(config, TrainingKernels())
    ids = torch.tensor(sorted(vocabulary))
    head.d2t.copy_(ids - torch.arange(len(ids)))
    last = cast(Block, target.blocks[-1])
    _copy(head.block.attention.o, last.attention.o)
    _copy(head.block.mlp, last.mlp)
    _copy(head.block.mlp_norm, last.mlp_norm)
    _copy(head.norm, target.norm)
    weight = weight_of(last.attention.qkv).float()
    weight_of(head.block.attention.qkv).copy_(torch.cat([weight, weight], dim=1) / 2)
    weight_of(head.head).copy_(weight_of(target.head)[ids.to(target.device)])
    _pass_on(head.fc, parts=3)
    return head


@torch.no_grad()
def mtp(target: Transformer, modules: int = 1) -> MTPHead:
    """Modules for a target that was trained without."""
    config = MTPConfig(_blocks(target.config, modules), target.config.num_layers)
    head = MTPHead(config, TrainingKernels())
    for step in head.steps:
        module = cast(MTPModule, step)
        _copy(module.block, target.blocks[-1])
        _copy(module.norm, target.norm)
        _pass_on(module.projection, parts=2)
    return head


@torch.no_grad()
def block(target: Transformer, size: int = 6, layers: int = 1, markov_rank: int = 32) -> BlockHead:
    """`size` guesses in one pass through `layers` blocks of the target's kind."""
    config = BlockConfig(
        block=_blocks(target.config, layers),
        target_hidden_size=target.config.hidden_size,
        taps=three_layers(target.config.num_layers),
        size=size,
        markov_rank=markov_rank,
    )
    head = BlockHead(config, TrainingKernels())
    for own, theirs in zip(head.blocks, target.blocks[-layers:], strict=True):
        _copy(own, theirs)
    _copy(head.norm, target.norm)
    _pass_on(head.fc, parts=3)
    _pass_on(head.projection, parts=2)
    return head


def three_layers(layers: int) -> tuple[int, ...]:
    """The layers whose inputs EAGLE-3 reads: low, middle and high (Li et al. 2025, arXiv 2503.01840)."""
    return tuple(sorted({min(2, layers), layers // 2, max(layers - 3, 0)}))


def common_tokens(examples: Iterable[Example], count: int, vocab_size: int) -> list[int]:
    """The `count` tokens that are said most often in answers, in order of their ids."""
    if not 0 < count <= vocab_size:
        raise TrainingError(f"a draft vocabulary of {count} tokens is not possible: 1 to {vocab_size}")
    counts: Counter[int] = Counter()
    for example in examples:
        counts.update(np.asarray(example.tokens)[example.answer].tolist())
    said = [token for token, _ in counts.most_common(count)]
    others = (token for token in range(vocab_size) if token not in counts)
    said += [token for token, _ in zip(others, range(count - len(said)), strict=False)]
    return sorted(said)


def draft_config(
    target: dict[str, Any], layers: int, hidden: int, heads: int, intermediate: int
) -> dict[str, Any]:
    """The config.json of a smaller model of the target's family, with one key head to two query heads."""
    if hidden % heads:
        raise TrainingError(f"a hidden size of {hidden} does not divide into {heads} heads")
    return {
        **target,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "head_dim": hidden // heads,
    }


def _blocks(target: ModelConfig, layers: int) -> ModelConfig:
    return replace(
        target,
        num_layers=layers,
        windows=(None,) * layers,
        local_rope=None,
        sparse_layers=(),
        num_experts=0,
        tie_embeddings=False,
    )


def _copy(own: nn.Module, theirs: nn.Module) -> None:
    """The weights of a module of the same shape."""
    own.load_state_dict(theirs.state_dict())


def _pass_on(linear: nn.Module, parts: int) -> None:
    """Give the last of the `parts` that are put together as it is, and a little of the others."""
    weight = weight_of(linear)
    size = weight.shape[0]
    weight *= 0.2
    weight[:, (parts - 1) * size :] += torch.eye(size, weight.shape[1] - (parts - 1) * size)
