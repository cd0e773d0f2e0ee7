"""Makes heads to be trained, of a shape that suits the target, and with weights copied from it.

A head begins as a copy of the target's last block, and passes the target's feature on as it is, or the best
linear prediction of the target's next final state. It needs a fraction of the data that random weights need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soothsay.drafters.heads.block import BlockConfig, BlockHead
from soothsay.drafters.heads.eagle import EagleConfig, EagleHead
from soothsay.drafters.heads.eagle3 import Eagle3Config, Eagle3Head
from soothsay.drafters.heads.hydra import HydraConfig, HydraHead
from soothsay.drafters.heads.medusa import MedusaConfig, MedusaHead
from soothsay.drafters.heads.mtp import MTPConfig, MTPHead, MTPModule
from soothsay.drafters.heads.redrafter import RedrafterConfig, RedrafterHead
from soothsay.drafters.heads.trained_head import TargetEnds
from soothsay.errors import DrafterError
from soothsay.model.decoder.attention_layer import Attention
from soothsay.model.decoder.blocks import Block
from soothsay.model.decoder.feed_forward import FeedForward
from soothsay.model.specs.attention_spec import AttentionSpec, HeadRotation, RopeSpec
from soothsay.model.specs.feed_forward_spec import DenseSpec, ExpertsSpec
from soothsay.model.specs.model_spec import LayerSpec, ModelSpec, NormSpec
from soothsay.model.transformer import Transformer
from soothsay.train.examples import Example
from soothsay.train.features import FeatureStore, LinearGuess, least_squares, linear_guess
from soothsay.train.sequences import Sequences, TrainingKernels, weight_of


def medusa(target: Transformer, heads: int = 4, layers: int = 1, own_heads: bool = False) -> MedusaHead:
    """Make Medusa heads for `heads` draft tokens.

    With `own_heads` each has an output matrix of its own. Else all use the target's.
    """
    c = target.spec
    return MedusaHead(MedusaConfig(c.hidden_size, c.vocab_size, c.num_layers, heads, layers, own_heads))


def hydra(target: Transformer, heads: int = 4, layers: int = 1) -> HydraHead:
    """Make Hydra heads for `heads` draft tokens."""
    return HydraHead(HydraConfig(target.spec.hidden_size, target.spec.num_layers, heads, layers))


@torch.no_grad()
def eagle(target: Transformer) -> EagleHead:
    """Make an EAGLE head: one block of the target's kind."""
    config = EagleConfig(_blocks(target.spec, 1), bias=True, target_layers=target.spec.num_layers)
    head = EagleHead(config, TrainingKernels())
    last = cast(Block, target.blocks[-1])
    block = head.block
    _copy(block.attention, last.attention)
    _copy(block.mlp, last.mlp)
    _copy(cast(nn.Module, block.mlp_norm), cast(nn.Module, last.mlp_norm))
    _add_nothing(block)  # the output at every depth is the feature that was read
    _pass_on(head.fc, parts=2)
    return head


@torch.no_grad()
def eagle3(
    target: Transformer,
    examples: Sequence[Example],
    vocabulary: Sequence[int],
    units: int = 0,
    join: bool = False,
) -> Eagle3Head:
    """Make an EAGLE-3.1 head: one block of the target's kind, and an output matrix for `vocabulary` only.

    The weights of its norms bring the numbers of a feature to equal sizes, as measured in `examples`. In real
    models, a few of them are hundreds of times larger than the others. The block adds nothing yet to the best
    linear prediction of the target's next final state from the taps. The output matrix has the target's rows,
    and is not trained.

    With `join`, the prediction is from the final state and the next token's embedding. `fc` predicts the
    final state from the taps, and what the taps know beyond it. So all guesses in a row begin well.

    Args:
        target: the model to draft for.
        examples: the first of them are measured.
        vocabulary: the tokens that it can draft.
        units: of its feed-forward part: those of the target's that have the largest weights; 0: all.
        join: see `Eagle3Config.joins`.
    """
    spec = _blocks(target.spec, 1)
    whole, size = _dense(target.spec).size, target.spec.hidden_size
    config = Eagle3Config(
        block=_with_units(spec, units) if units and units < whole else spec,
        target_hidden_size=size,
        draft_vocab_size=len(vocabulary),
        taps=spread_layers(target.spec.num_layers),
        norm_taps="each",
        own_head=False,
        norm_output=True,
        joins=join,
    )
    head, shared = Eagle3Head(config, TrainingKernels()).to(target.device), TargetEnds.of(target)
    ids = torch.tensor(sorted(vocabulary), device=target.device)
    head.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
    head.borrow(shared)

    def normed(batch: Sequences, states: Tensor) -> Tensor:
        """The taps and the final state of a token, and the embedding of the next one."""
        read = *states[1:], states[0], head.embed(batch.tokens.roll(-1), shared)
        return torch.cat([F.rms_norm(part, part.shape[-1:]) for part in read], -1)

    of_taps = len(config.taps) * size
    linear = linear_guess(FeatureStore(target, config.taps), examples, normed, of_taps + 2 * size)
    norms = *head.fc_norm, head.hidden_norm, head.embedding_norm
    for norm, scale in zip(norms, torch.split(linear.scale, size), strict=True):
        weight_of(norm).copy_(scale)
    head.norm.weight.fill_(linear.size)
    _fit(head, linear, of_taps, size)
    _begin_with_block(head.block, cast(Block, target.blocks[-1]))
    return head


KNOWN_BEYOND = 0.1
"""Ridge of what `fc` adds to the final state that it predicts. With less, features look less like states, and
their norms no longer fit."""


def _fit(head: Eagle3Head, linear: LinearGuess, of_taps: int, size: int) -> None:
    """Fit `fc` of a head, and `join` if it has one, where `linear` read taps, state and embedding."""
    taps, state = slice(of_taps), slice(of_taps, of_taps + size)
    token, inputs = slice(of_taps + size, None), linear.inputs[taps, taps]
    if head.join is None:
        weight_of(head.fc).copy_(least_squares(inputs, linear.products[taps]))
        return
    both = torch.cat([torch.arange(len(linear.inputs))[part] for part in (token, state)])
    join = least_squares(linear.inputs[both][:, both], linear.products[both])
    weight_of(head.join).copy_(join)
    of_token, of_state = torch.split(join, size, dim=1)
    guess = least_squares(inputs, linear.inputs[taps, state])
    wanted = least_squares(inputs, linear.products[taps] - linear.inputs[taps, token] @ of_token.t())
    lacking = wanted - of_state @ guess
    beyond = least_squares(of_state.t() @ of_state, of_state.t() @ lacking, KNOWN_BEYOND).t()
    weight_of(head.fc).copy_((guess + beyond) / head.hidden_norm.weight[:, None])


def _with_units(spec: ModelSpec, units: int) -> ModelSpec:
    """The same blocks with feed-forward parts of `units` units."""
    layers = tuple(replace(one, mlp=replace(cast(DenseSpec, one.mlp), size=units)) for one in spec.layers)
    return replace(spec, layers=layers)


def _begin_with_block(block: Block, last: Block) -> None:
    """Let a block that reads two parts read each as the target's `last` block does, and add nothing yet."""
    for name, value in block.state_dict().items():
        same = last.state_dict().get(name)
        if same is not None and same.shape == value.shape:
            value.copy_(same)
    weight = weight_of(cast(Attention, last.attention).qkv).float()
    weight_of(cast(Attention, block.attention).qkv).copy_(torch.cat([weight, weight], dim=1) / 2)
    mlp, theirs = cast(FeedForward, block.mlp), last.mlp
    units = weight_of(mlp.down).shape[1]
    if isinstance(theirs, FeedForward) and len(weight_of(theirs.gate_up)) > 2 * units:
        gate, up = weight_of(theirs.gate_up).float().chunk(2)
        sizes = gate.norm(dim=1) * up.norm(dim=1) * weight_of(theirs.down).float().norm(dim=0)
        kept = sizes.topk(units).indices.sort().values
        weight_of(mlp.gate_up).copy_(torch.cat([gate[kept], up[kept]]))
    _add_nothing(block)


@torch.no_grad()
def mtp(target: Transformer, modules: int = 1) -> MTPHead:
    """Make MTP modules for a target that was trained without them."""
    config = MTPConfig(_blocks(target.spec, modules), target.spec.num_layers)
    head = MTPHead(config, TrainingKernels())
    for step in head.steps:
        module = cast(MTPModule, step)
        _copy(module.block, target.blocks[-1])
        _copy(module.norm, target.norm)
        _pass_on(module.projection, parts=2)
    return head


@torch.no_grad()
def block(
    target: Transformer,
    examples: Sequence[Example],
    size: int = 6,
    layers: int = 1,
    cell: int = 256,
    shortlist: Sequence[int] = (),
) -> BlockHead:
    """Make a head that drafts in one pass through blocks of the target's kind, which add nothing yet.

    Its first guess begins near the best linear prediction of the target's next final state, the others near
    the mean of all such predictions.

    Args:
        target: the model to draft for.
        examples: the features of the first of them are measured.
        size: number of guesses in a row.
        layers: number of blocks.
        cell: units of the cell that refines guesses; 0: there is none.
        shortlist: tokens that it guesses; empty: all.
    """
    config = BlockConfig(
        block=_blocks(target.spec, layers),
        target_hidden_size=target.spec.hidden_size,
        taps=spread_layers(target.spec.num_layers),
        size=size,
        cell_size=cell,
        shortlist_size=len(shortlist),
        scaled_taps=True,
    )
    head = BlockHead(config, TrainingKernels()).to(target.device)
    linear = _begin_with_linear_guess(head, target, examples, shortlist)
    of_taps = len(linear.scale)
    weight_of(head.fc).copy_(linear.weight[:, :of_taps])
    head.feature_norm.weight.fill_(linear.size_of(linear.weight[:, :of_taps]))
    head.queries[:, 0] = linear.mean[of_taps:]
    head.queries[:, 1] = weight_of(head.fc) @ linear.mean[:of_taps]
    own = torch.eye(config.block.hidden_size, device=target.device)
    weight_of(head.projection).copy_(torch.cat([linear.weight[:, of_taps:], own], dim=1))
    for block, last in zip(head.blocks, target.blocks[-layers:], strict=True):
        _copy(block, last)
        _add_nothing(cast(Block, block))
    return head


@torch.no_grad()
def redrafter(
    target: Transformer,
    examples: Sequence[Example],
    size: int = 5,
    hidden: int = 512,
    cell: int = 256,
    shortlist: Sequence[int] = (),
) -> RedrafterHead:
    """Make a head of one look and a recurrent cell, which refines nothing yet.

    Its guesses begin near the best linear prediction of the target's next final state.

    Args:
        target: the model to draft for.
        examples: the features of the first of them are measured.
        size: number of guesses in a row.
        hidden: units between features and guesses.
        cell: units of the cell.
        shortlist: tokens that it guesses; empty: all.
    """
    config = RedrafterConfig(
        target_hidden_size=target.spec.hidden_size,
        vocab_size=target.spec.vocab_size,
        taps=spread_layers(target.spec.num_layers),
        size=size,
        hidden_size=hidden,
        cell_size=cell,
        shortlist_size=len(shortlist),
        norm_eps=target.spec.norm.eps,
    )
    head = RedrafterHead(config).to(target.device)
    linear = _begin_with_linear_guess(head, target, examples, shortlist)
    weight_of(head.look)[-config.target_hidden_size :] = linear.weight
    return head


def _begin_with_linear_guess(
    head: BlockHead | RedrafterHead,
    target: Transformer,
    examples: Sequence[Example],
    shortlist: Sequence[int],
) -> LinearGuess:
    """Give a head its shortlist, and the sizes of the best linear guess. Its cell refines nothing yet."""
    if shortlist:
        head.shortlist = torch.tensor(sorted(shortlist), device=target.device)
    shared = TargetEnds.of(target)
    head.borrow(shared)

    def taps_and_root(batch: Sequences, states: Tensor) -> Tensor:
        """The taps of a token, and the normed embedding of the next one."""
        return torch.cat([*states[1:], head.embedded(batch.tokens.roll(-1), shared)], -1)

    of_taps = len(head.taps) * target.spec.hidden_size
    linear = linear_guess(FeatureStore(target, head.taps), examples, taps_and_root, of_taps)
    cast(Tensor, head.tap_scale).copy_(linear.scale)
    head.norm.weight.fill_(linear.size)
    if head.refiner is not None:
        weight_of(head.refiner.out).zero_()
    return linear


def spread_layers(layers: int) -> tuple[int, ...]:
    """The layers whose inputs new heads read: the last one, and a third and two thirds of all before it."""
    return tuple(sorted({max(layers - 1 - k * layers // 3, 0) for k in range(3)}))


def taps_of(method: str, layers: int) -> tuple[int, ...]:
    """The layers whose inputs a new head of this method reads, for a target with so many layers."""
    return spread_layers(layers) if method in ("eagle3", "block", "redrafter") else (layers,)


def _blocks(target: ModelSpec, layers: int) -> ModelSpec:
    """The configuration of `layers` dense blocks of the target's size, without windows. Whole heads rotate.

    Raises `DrafterError` for a target whose blocks heads do not have.
    """
    if not all(_is_common(layer) for layer in target.layers):
        raise DrafterError(
            f"no head is made of blocks as family {target.family!r} has them; train medusa or hydra, which "
            "have no blocks"
        )
    attention, layer = target.first(AttentionSpec), target.layers[0]
    rope = target.rotation.rope
    rope = RopeSpec(rope.theta) if rope.kind == "longrope" else rope
    mixer = replace(attention, window=None, rotation=HeadRotation(rope, attention.size))
    own = LayerSpec(mixer, _dense(target), NormSpec(target.norm.eps), post_norms=layer.post_norms)
    head = replace(target.head, tied=False)
    return replace(target, layers=(own,) * layers, head=head, residual_multiplier=1.0)


def _is_common(layer: LayerSpec) -> bool:
    """Whether a layer computes no more than Llama's and Gemma's do, but perhaps for experts."""
    c, mlp = layer.mixer, layer.mlp.expert if isinstance(layer.mlp, ExpertsSpec) else layer.mlp
    if not isinstance(c, AttentionSpec) or not isinstance(mlp, DenseSpec) or not mlp.gated:
        return False
    usual = AttentionSpec(
        *(c.heads, c.kv_heads, c.rotation, c.scale, c.window, c.softcap, c.norms, c.bias, c.o_bias)
    )
    norms = c.norms is None or not (c.norms.over_heads or c.norms.values or c.norms.last)
    around = LayerSpec(c, layer.mlp, NormSpec(layer.norm.eps), post_norms=layer.post_norms)
    return norms and c == usual and layer == around and mlp.multipliers is None


def _dense(target: ModelSpec) -> DenseSpec:
    """A dense part of a model; without one, a part of as many units as a row's experts have."""
    if target.parts(DenseSpec):
        return target.first(DenseSpec)
    mixture = target.first(ExpertsSpec)
    shared = 0 if mixture.shared is None else mixture.shared.size
    return replace(mixture.expert, size=mixture.routing.chosen * mixture.expert.size + shared)


def _copy(own: nn.Module, theirs: nn.Module) -> None:
    """Copy the weights of a module of the same shape."""
    own.load_state_dict(theirs.state_dict())


def _add_nothing(block: Block) -> None:
    """Let a block pass on what it reads, until it is trained."""
    weight_of(block.attention.o).zero_()
    weight_of(cast(FeedForward, block.mlp).down).zero_()


def _pass_on(linear: nn.Module, parts: int) -> None:
    """Let a layer pass on the last of its `parts` inputs as it is, and only a little of the others."""
    weight = weight_of(linear)
    size = weight.shape[0]
    weight *= 0.2
    own = weight[:, (parts - 1) * size :]
    own += torch.eye(*own.shape, device=own.device)
