"""Names of the tensors of a checkpoint for our modules, and the order of their rows."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from soothsay.errors import ModelError
from soothsay.model.specs.attention_spec import AttentionSpec, HeadRotation, LatentSpec
from soothsay.model.specs.feed_forward_spec import ExpertsSpec
from soothsay.model.specs.model_spec import LayerSpec, MixerSpec, ModelSpec
from soothsay.model.specs.state_specs import (
    BesideStatesSpec,
    ConvolutionSpec,
    DeltaSpec,
    KimiDeltaSpec,
    SelectiveSpec,
    StateSpaceSpec,
)
from soothsay.model.weights.checkpoint import Checkpoint
from soothsay.model.weights.hf_names import OUTER_NAMES, names_of


class TensorNames:
    """Maps our module names to the tensor names of a checkpoint. The first of our blocks is `first_layer`."""

    def __init__(self, spec: ModelSpec, checkpoint: Checkpoint, first_layer: int = 0):
        self.spec, self.checkpoint, self.first_layer = spec, checkpoint, first_layer
        self.all = checkpoint.names()
        self._names = names_of(spec.family)
        table = f"{self._names['embedding'][0]}.weight"
        embeddings = [name for name in self.all if name.endswith(table)]
        if not embeddings:
            raise ModelError(f"{checkpoint.path} has no {table}; is it a decoder's checkpoint?")
        self.prefix = min(embeddings, key=len).removesuffix(table)
        self.layers = self.prefix + self._names["layers"][0]
        """What names of blocks begin with."""

    @cached_property
    def encoder(self) -> TensorNames | None:
        """The names of the encoder's tensors, if there is one."""
        source = self.spec.source
        return None if source is None else TensorNames(source.encoder, self.checkpoint)

    def of(self, module: str) -> list[str]:
        """Names of the tensors, without `.weight` and `.bias`, whose rows in order are those of `module`."""
        if self.encoder is not None and module.startswith("encoder."):
            return self.encoder.of(module.removeprefix("encoder."))
        if module == "head":
            if not self.spec.head.tied:
                return [self._head()]
            module = "embedding"
        if module in OUTER_NAMES:
            last = self.spec.num_layers - 1  # BART's last norm is that of its last layer
            return [f"{self.prefix}{name.format(last)}" for name in self._names[module]]
        if module.startswith("stream."):
            _, end, place = module.split(".")
            kind = "altup_projections" if end == "spreading" else "altup_unembed_projections"
            return [f"{self.prefix}{kind}.{place}"]
        number, layer, part = self._place(module)
        names = self._in_block(part, layer)
        mixer = layer.attention
        if part == "attention.qkv" and len(names) == 3 and isinstance(mixer, AttentionSpec):
            names = names[: mixer.projections]
        if part == "attention.relative" and isinstance(mixer, AttentionSpec) and mixer.relative is not None:
            number = mixer.relative.layer
        return [f"{self.layers}.{number}.{name}".removesuffix(".") for name in names]

    def rows(self, module: str, out: int) -> list[int]:
        """How many of the `out` rows of a module each of its tensors has."""
        count = len(self.of(module))
        if module.endswith(".qkv") and count > 1:
            attention = self._place(module)[1].attention
            if isinstance(attention, AttentionSpec):
                return attention.stored_rows
        return [out // count] * count

    def row_order(self, module: str) -> Tensor | None:
        """For each row of a module, its number in the checkpoint; None if the order is the same."""
        if not module.startswith("blocks."):
            return None
        _, layer, part = self._place(module)
        whole, _, own = part.partition(".")
        mixer = layer.attention if isinstance(layer.mixer, BesideStatesSpec) else layer.mixer
        return row_order(mixer, own) if whole == "attention" else None

    @property
    def first_linear(self) -> str:
        """Our name of a linear layer of the first block."""
        first = self.spec.layers[self.first_layer]
        if first.mixer is not None:
            return "blocks.0.attention.o"
        return f"blocks.0.mlp.{'experts.0.' if isinstance(first.mlp, ExpertsSpec) else ''}down"

    def _place(self, module: str) -> tuple[int, LayerSpec, str]:
        """The number of a module's layer, the layer, and the module's name within it."""
        _, block, part = module.split(".", 2)
        number = self.first_layer + int(block)
        return number, self.spec.layers[number], part

    def _head(self) -> str:
        """The innermost output head among those beside the decoder and around it."""
        parts, (head,) = self.prefix.split(".")[:-1], self._names["head"]
        places = [".".join([*parts[:depth], head]) for depth in range(len(parts), 0, -1)]
        held = {name.rpartition(".")[0] for name in self.all if f"{head}." in name}  # plain, or in integers
        return next((place for place in places if place in held), head)

    def _in_block(self, module: str, layer: LayerSpec) -> list[str]:
        names = dict(self._names)
        match layer.mixer:
            case ConvolutionSpec():
                names["attention.o"] = ("conv.out_proj",)
            case KimiDeltaSpec():
                pass
            case DeltaSpec() | StateSpaceSpec() | SelectiveSpec():
                names["attention.o"] = (f"{names['attention.rule'][0]}.out_proj",)
        if module in names:
            return list(names[module])
        start, expert, part = module.rsplit(".", 2)  # mlp.experts.{e}.gate_up or .down
        return [name.format(expert) for name in names[f"{start}.{part}"]]

    def require(self, module: str, suffix: str = "weight") -> list[str]:
        """Full tensor names of `module`. Raises `ModelError` if one is missing."""
        names = [f"{name}.{suffix}" for name in self.of(module)]
        for name in names:
            self.check(name)
        return names

    def check(self, name: str) -> None:
        """Raises `ModelError` if the checkpoint has no tensor `name`."""
        if name not in self.all:
            raise ModelError(
                f"{self.checkpoint.path} has no tensor {name!r}, which {self.spec.family} with this "
                "config.json needs; the download is incomplete, or the configuration belongs to another model"
            )


def row_order(spec: MixerSpec | None, module: str) -> Tensor | None:
    """For each row of a module of a mixer, its number in a checkpoint; None if the order is the same."""
    match spec:
        case AttentionSpec() if module == "qkv":
            return qkv_order(spec)
        case AttentionSpec() if module in ("q_norm", "k_norm") and spec.norms is not None:
            heads = spec.heads if module == "q_norm" else spec.kv_heads
            return _all_heads(spec.rotation, heads if spec.norms.over_heads else 1)
        case LatentSpec() if module in ("q", "q_b"):
            return _all_heads(spec.rotation, spec.heads, spec.plain)
        case LatentSpec() if module == "kv_a":
            return _all_heads(spec.rotation, 1, spec.rank)
        case DeltaSpec() if module in spec.by_key_head:
            return _delta_order(spec, module)
    return None


def qkv_order(spec: AttentionSpec) -> Tensor | None:
    """For each row of `attention.qkv`, its number in a checkpoint: `[(H_q + 2 H_kv) * d]` int64.

    With gates there are `H_q` heads more, after the queries.

    None if the order is the same.

    Example: heads of 8 dimensions, of which 4 rotate.

        checkpoint   0 1 2 3 | 4 5 6 7      pairs (0, 2), (1, 3)
        order        0 1 4 5   2 3 6 7      pairs (0, 2), (1, 3) rotate; (4, 6), (5, 7) turn by 0
        neighbours   0 2 4 5   1 3 6 7      pairs (0, 1), (2, 3) rotate
    """
    order, d, gates = head_order(spec.rotation), spec.size, 0
    if order is None:
        if not spec.gated and not spec.by_key_head:
            return None
        order = torch.arange(d, device="cpu")
    if spec.by_key_head:  # the rows of a key head's queries, of the key, and of its value
        stored = torch.arange(spec.kv_heads * (spec.group + 2), device="cpu")[:, None] * d
        own = stored.view(spec.kv_heads, -1, 1)
        keys, values = own[:, -2] + order, own[:, -1] + torch.arange(d, device="cpu")
        return torch.cat([part.flatten() for part in (own[:, :-2] + order, keys, values)])
    if spec.gated:
        gates = spec.heads
    heads = torch.arange(spec.heads, device="cpu")[:, None] * d
    keys = (2 * gates or spec.heads) * d + torch.arange(spec.kv_heads, device="cpu")[:, None] * d
    values = keys[-1] + d + torch.arange(spec.kv_heads * d, device="cpu")
    # the rows of each query are followed by those of its gate, or all queries by all gates
    queries, after = (heads, spec.heads * d) if spec.gates_apart or not gates else (heads * 2, d)
    gate_rows = (queries[:gates] + after + torch.arange(d, device="cpu")).flatten()
    return torch.cat([(queries + order).flatten(), gate_rows, (keys + order).flatten(), values])


def _delta_order(spec: DeltaSpec, module: str) -> Tensor:
    """For each row of `qkvz` or `gates`, its number in a checkpoint of Qwen3-Next.

    There the rows of each key head's query, key, values and output gates stand together, and so do the gates
    of the heads that share it. llama.cpp keeps that order for gates alone.
    """
    group = spec.value_heads // spec.key_heads
    values = group * spec.value_size
    sizes = [spec.key_size, spec.key_size, values, values] if module == "qkvz" else [group, group]
    rows = torch.arange(spec.key_heads * sum(sizes), device="cpu").view(spec.key_heads, -1)
    return torch.cat([part.flatten() for part in torch.split(rows, sizes, dim=1)])


def _all_heads(rotation: HeadRotation, heads: int, still: int = 0) -> Tensor | None:
    """For each row of some heads, its number in a checkpoint; None if the order is the same.

    The first `still` rows of a head stay in their places.
    """
    order = head_order(rotation)
    if order is None:
        return None
    head = torch.cat([torch.arange(still, device="cpu"), still + order])
    return (torch.arange(heads, device="cpu")[:, None] * len(head) + head).flatten()


def head_order(rotation: HeadRotation) -> Tensor | None:
    """For each dimension of a head, its number in a checkpoint: `[d]` int64. None: the order is the same."""
    size, rotary_dim = rotation.size, rotation.rotated or rotation.size
    rotated = torch.arange(rotary_dim, device="cpu")
    first, second = rotated.view(-1, 2).t() if rotation.neighbours else rotated.view(2, -1)
    rest = torch.arange(rotary_dim, size, device="cpu").view(2, -1)
    order = torch.cat([first, rest[0], second, rest[1]])
    return None if torch.equal(order, torch.arange(size, device="cpu")) else order
