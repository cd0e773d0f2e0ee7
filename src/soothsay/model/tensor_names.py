"""Names of the tensors of a checkpoint for our modules."""

from __future__ import annotations

from torch import Tensor

from soothsay.errors import ModelError
from soothsay.model.checkpoint import Checkpoint
from soothsay.model.head_order import row_order
from soothsay.model.hf_names import OUTER_NAMES, names_of
from soothsay.model.specs.attention_spec import AttentionSpec
from soothsay.model.specs.feed_forward_spec import ExpertsSpec
from soothsay.model.specs.model_spec import LayerSpec, ModelSpec
from soothsay.model.specs.state_specs import BesideStatesSpec, ConvolutionSpec, DeltaSpec, StateSpaceSpec


class TensorNames:
    """Maps our module names to the tensor names of a checkpoint. The first of our blocks is `first_layer`."""

    def __init__(self, spec: ModelSpec, checkpoint: Checkpoint, first_layer: int = 0):
        self.config, self.checkpoint, self.first_layer = spec, checkpoint, first_layer
        self.all = checkpoint.names()
        self._names = names_of(spec.family)
        table = f"{self._names['embedding'][0]}.weight"
        embeddings = [name for name in self.all if name.endswith(table)]
        if not embeddings:
            raise ModelError(f"{checkpoint.path} has no {table}; is it a decoder's checkpoint?")
        self.prefix = min(embeddings, key=len).removesuffix(table)

    def of(self, module: str) -> list[str]:
        """Names of the tensors, without `.weight` and `.bias`, whose rows in order are those of `module`."""
        if module == "head":
            if not self.config.head.tied:
                return [self._head()]
            module = "embedding"
        if module in OUTER_NAMES:
            return [f"{self.prefix}{name}" for name in self._names[module]]
        if module.startswith("stream."):
            _, end, place = module.split(".")
            kind = "altup_projections" if end == "spreading" else "altup_unembed_projections"
            return [f"{self.prefix}{kind}.{place}"]
        number, layer, part = self._place(module)
        names = self._in_block(part, layer)
        mixer = layer.attention
        if part == "attention.qkv" and len(names) == 3 and isinstance(mixer, AttentionSpec):
            names = names[: mixer.projections]
        return [f"{self.prefix}layers.{number}.{name}".removesuffix(".") for name in names]

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
        first = self.config.layers[self.first_layer]
        if first.mixer is not None:
            return "blocks.0.attention.o"
        return f"blocks.0.mlp.{'experts.0.' if isinstance(first.mlp, ExpertsSpec) else ''}down"

    def _place(self, module: str) -> tuple[int, LayerSpec, str]:
        """The number of a module's layer, the layer, and the module's name within it."""
        _, block, part = module.split(".", 2)
        number = self.first_layer + int(block)
        return number, self.config.layers[number], part

    def _head(self) -> str:
        """The innermost `lm_head` among those beside the decoder and around it."""
        parts = self.prefix.split(".")[:-1]
        places = [".".join([*parts[:depth], "lm_head"]) for depth in range(len(parts), 0, -1)]
        held = {name.rpartition(".")[0] for name in self.all if "lm_head." in name}  # plain, or in integers
        return next((place for place in places if place in held), "lm_head")

    def _in_block(self, module: str, layer: LayerSpec) -> list[str]:
        names = dict(self._names)
        match layer.mixer:
            case ConvolutionSpec():
                names["attention.o"] = ("conv.out_proj",)
            case DeltaSpec():
                names["attention.o"] = (f"{names['attention.recurrence'][0]}.out_proj",)
            case StateSpaceSpec():
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
                f"{self.checkpoint.path} has no tensor {name!r}, which {self.config.family} with this "
                "config.json needs; the download is incomplete, or the configuration belongs to another model"
            )
