"""A head's checkpoint whose layout is known: checked when it is opened, and loaded into a head."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from soothsay.drafters.heads.checkpoints.drafter_files import WEIGHT_DTYPES, DrafterFiles
from soothsay.drafters.heads.checkpoints.fit import ENDS, TargetFit
from soothsay.drafters.heads.trained_head import Head
from soothsay.errors import DrafterError
from soothsay.model.decoder.attention_layer import KeyCentre
from soothsay.model.decoder.norm import RMSNorm
from soothsay.model.decoder.rope import Rope
from soothsay.model.specs.attention_spec import AttentionSpec
from soothsay.model.specs.model_spec import ModelSpec
from soothsay.model.weights.hf_names import BLOCK_NAMES
from soothsay.model.weights.tensor_names import row_order
from soothsay.model.weights.weight_source import misfit

Names = Mapping[str, tuple[str, ...]]
"""Our module -> names of tensors without `.weight` and `.bias`. Their rows, concatenated, are the module's. A
module that is not in the table has our name in the file. Where one parameter has a name of its own, the entry
is the full name of the parameter -> that of the tensor."""

_PARTS = (
    *("attention.qkv", "attention.o", "attention.q_norm", "attention.k_norm", "attention_norm"),
    *("mlp_norm", "mlp.gate_up", "mlp.down"),
)
BLOCK: Names = {part: BLOCK_NAMES[part] for part in _PARTS}
"""The table of a decoder block of Llama, Qwen2 or Qwen3."""


def block_names(ours: str, theirs: str) -> dict[str, tuple[str, ...]]:
    """`BLOCK` with prefixes. Each prefix ends in a dot or is empty."""
    return {ours + module: tuple(theirs + tensor for tensor in tensors) for module, tensors in BLOCK.items()}


def stored(names: Names, parameter: str) -> list[str]:
    """Names of the tensors that make up `parameter`."""
    if parameter in names:
        return [*names[parameter]]
    module, _, kind = parameter.rpartition(".")
    return [f"{tensor}.{kind}" for tensor in names[module]] if module in names else [parameter]


def split(head: Head, names: Names, block: ModelSpec | None = None) -> Iterator[tuple[str, Tensor]]:
    """Split a head into the tensors of a checkpoint, weights in bfloat16.

    Args:
        head: a head that was not made ready to serve.
        names: the layout's table.
        block: the sizes of queries, keys and values, for heads with attention.

    Raises:
        DrafterError: the head was made ready to serve, so its weights are in its kernels' order.
    """
    for module in head.modules():
        bare = isinstance(module, nn.ModuleList | nn.Sequential | Rope | KeyCentre)  # these have no weights
        served = not bare and not any(module.children())
        if served and not module.state_dict():
            raise DrafterError(f"this {head.method} head was made ready to serve: write it before `serve`")
    for name, value in head.state_dict().items():
        parts = stored(names, name)
        rows = [len(value) // len(parts)] * len(parts)
        if len(parts) == 3 and block is not None:
            attention = block.parts(AttentionSpec)[0]
            kv_heads = attention.kv_heads
            rows = [heads * attention.size for heads in (attention.heads, kv_heads, kv_heads)]
        if value.is_floating_point():
            value = value.to(torch.bfloat16)
        for part, tensor in zip(parts, value.cpu().split(rows), strict=True):
            yield part, tensor.contiguous()


IGNORED = r".*rotary_emb\.inv_freq"
"""Tensors that repeat the configuration."""


Written = tuple[dict[str, Any], Iterable[tuple[str, Tensor]]]
"""The content of a head's config.json, and its tensors by name."""


@dataclass(eq=False)
class StoredHead:
    """The head in a directory. Its tensors are checked on construction, and not read.

    Raises `DrafterError` for tensors that are missing, have another shape, or would not be used.
    """

    fit: TargetFit
    """The target that it was checked against, and its files."""

    layout: str
    """Name of the layout, for people."""

    make: Callable[[], Head]
    """Makes a head with the checkpoint's configuration and any weights."""

    names: Names
    given: Mapping[str, Tensor] = field(default_factory=dict)
    """Values of parameters that are not in the files as we need them."""

    scope: str = ""
    """Pattern for the beginning of its tensors' names. Other tensors in the same files are not checked."""

    ignored: str = "$."
    """Pattern for names of tensors that may be there and are not used: copies of the target's."""

    zero_centred: bool = False
    """Whether weights of norms are stored minus 1."""

    reordered: AttentionSpec | None = None
    """The attention of its blocks, if the rows of their products may be stored in another order."""

    files: DrafterFiles = field(init=False)
    head: Head = field(init=False)
    """The head, without values before `load`."""

    def __post_init__(self) -> None:
        self.files = self.fit.files
        with torch.device("meta"):
            self.head = self.make()
        used = {name for parameter in self.head.state_dict() for name in self._check(parameter)}
        if self.fit.view is not None:
            used |= ENDS
        for name in sorted(self.files.names - used):
            known = re.fullmatch(self.ignored, name) or re.fullmatch(IGNORED, name)
            if re.match(self.scope, name) and not known:
                raise DrafterError(
                    f"{self.files.path} looks like {self.layout}, but has a tensor {name!r}, which soothsay "
                    "would leave out: it is another kind of drafter, and not supported"
                )

    @property
    def method(self) -> str:
        """The method's name in the registry."""
        return self.head.method

    @property
    def parameters(self) -> int:
        """Number of the head's own weights."""
        return sum(parameter.numel() for parameter in self.head.parameters())

    @property
    def draft_vocabulary(self) -> int | None:
        """Number of tokens that the head can draft, if its output head is for a part of the vocabulary."""
        return self.head.draft_vocabulary

    @property
    def dtype(self) -> str:
        """The dtype in which most of the weights are stored."""
        kinds: Counter[str] = Counter()
        for parameter, held in self.head.named_parameters():
            if parameter in self.given:
                continue
            kinds[str(self.files.dtype(stored(self.names, parameter)[0]))] += held.numel()
        return kinds.most_common(1)[0][0].removeprefix("torch.")

    def load(self) -> Head:
        """Read the weights, and return the head with float32 weights."""
        modules = dict(self.head.named_modules())
        for parameter, held in list(self.head.state_dict().items()):
            path, _, kind = parameter.rpartition(".")
            value = self._value(parameter).to(held.dtype, copy=True)
            order = row_order(self.reordered, path.rpartition(".attention.")[2])
            if order is not None:
                value = value[order]
            if self.zero_centred and isinstance(modules[path], RMSNorm):
                value += 1
            is_weight = held.is_floating_point()
            setattr(modules[path], kind, nn.Parameter(value) if is_weight else value)
        self.head.bits = self.files.bits
        return self.head

    def _value(self, parameter: str) -> Tensor:
        if parameter in self.given:
            return self.given[parameter]
        parts = [self.files.read(name) for name in stored(self.names, parameter)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _check(self, parameter: str) -> list[str]:
        """Names of a parameter's tensors. Raises `DrafterError` if one is missing or has another shape."""
        expected, parts = self.head.state_dict()[parameter], stored(self.names, parameter)
        if parameter in self.given:
            return parts
        for name in parts:
            if name not in self.files.names:
                raise DrafterError(
                    f"{self.files.path} looks like {self.layout}, but has no tensor {name!r}: the download "
                    "is incomplete, or it is another kind of drafter"
                )
            dtype = self.files.dtype(name)
            if expected.is_floating_point() and dtype not in WEIGHT_DTYPES:
                raise DrafterError(
                    f"{self.files.path}: {name} is stored as {dtype}: quantized drafters are not read; take "
                    "the one that it was made from"
                )
        if wrong := misfit(parts, [self.files.shape(name) for name in parts], expected):
            raise DrafterError(f"{self.files.path}: {wrong}")
        return parts


Opener = Callable[[DrafterFiles, TargetFit], StoredHead]
"""Opens the head in some files. Raises `DrafterError`."""


@dataclass(frozen=True)
class HeadFormat:
    """How the heads of a method are stored."""

    open: Opener

    looks_like: Callable[[DrafterFiles], bool] = lambda files: False
    """Whether tensors look like this method's, where the configuration does not say the method."""

    own: bool = False
    """Whether config.json states the method as `soothsay_method`."""

    speculators: tuple[str, ...] = ()
    """What config.json states as `speculators_model_type`."""

    fills_masks: bool = False

    reads_last: bool = False
    """Whether heads read the feature of the last token alone, so that they draft for encoder-decoders too."""

    layouts: Mapping[str, Callable[[Any, str], Written]] = field(default_factory=dict)
    """Writers of a head for the model of a name, by layout; "" is the layout that most engines read."""

    integers: bool = False
    """Whether the layout "" may be written with matrices in integers, which take less space."""
