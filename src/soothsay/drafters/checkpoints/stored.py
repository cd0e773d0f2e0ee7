"""A drafter's checkpoint that was recognized: what it is, and its way into a head."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from soothsay.drafters.checkpoints.files import DrafterFiles
from soothsay.drafters.checkpoints.fit import Fit
from soothsay.drafters.checkpoints.names import Names, stored
from soothsay.drafters.eagle3 import Eagle3Head
from soothsay.drafters.head import Head
from soothsay.errors import DrafterError
from soothsay.model.transformer import RMSNorm

IGNORED = r".*rotary_emb\.inv_freq"
"""Tensors that say nothing: computed from the configuration."""

PLAIN = (torch.float32, torch.float16, torch.bfloat16)
"""What weights may be stored in."""


@dataclass(eq=False)
class StoredHead:
    """What a directory holds. Building one checks its tensors, and reads none.

    Raises `DrafterError` for tensors that are missing, of another shape, or of no use.
    """

    files: DrafterFiles
    fit: Fit
    """The model that it was checked against."""

    layout: str
    """Whose it is, for people."""

    make: Callable[[], Head]
    """Makes a head of its configuration, with any weights."""

    names: Names
    given: Mapping[str, Tensor] = field(default_factory=dict)
    """Values of parameters that the files do not have, or not so."""

    scope: str = ""
    """A pattern of how tensors begin that belong to it; others in the same files are not looked at."""

    ignored: str = "$."
    """A pattern of tensors that may be there, and that the target's own stand for."""

    zero_centred: bool = False
    """Whether norms are stored as w - 1."""

    head: Head = field(init=False)
    """With shapes, and without values."""

    def __post_init__(self) -> None:
        with torch.device("meta"):
            self.head = self.make()
        used = {name for parameter in self.head.state_dict() for name in self._check(parameter)}
        for name in sorted(self.files.names - used):
            known = re.fullmatch(self.ignored, name) or re.fullmatch(IGNORED, name)
            if re.match(self.scope, name) and not known:
                raise DrafterError(
                    f"{self.files.path} looks like {self.layout}, but has a tensor {name!r}, which soothsay "
                    "would leave out: it is another kind of drafter, and not supported"
                )

    @property
    def method(self) -> str:
        """Its drafter's name in the registry."""
        return self.head.method

    @property
    def parameters(self) -> int:
        """Weights of its own."""
        return sum(parameter.numel() for parameter in self.head.parameters())

    @property
    def draft_vocabulary(self) -> int | None:
        """Tokens that it can say, where it has an output head of its own for some of the target's."""
        return self.head.config.draft_vocab_size if isinstance(self.head, Eagle3Head) else None

    @property
    def dtype(self) -> str:
        """What most of its weights are stored in."""
        kinds: Counter[str] = Counter()
        for parameter, held in self.head.named_parameters():
            if parameter in self.given:
                continue
            kinds[str(self.files.dtype(stored(self.names, parameter)[0]))] += held.numel()
        return kinds.most_common(1)[0][0].removeprefix("torch.")

    def load(self) -> Head:
        """The head, its weights in float32.

        Raises `DrafterError` for weights that are no floating-point numbers.
        """
        modules = dict(self.head.named_modules())
        for parameter, held in list(self.head.state_dict().items()):
            path, _, kind = parameter.rpartition(".")
            value = self._value(parameter).to(held.dtype, copy=True)
            if self.zero_centred and isinstance(modules[path], RMSNorm):
                value += 1
            is_weight = held.is_floating_point()
            setattr(modules[path], kind, nn.Parameter(value) if is_weight else value)
        return self.head

    def _value(self, parameter: str) -> Tensor:
        if parameter in self.given:
            return self.given[parameter]
        parts = [self.files.read(name) for name in stored(self.names, parameter)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _check(self, parameter: str) -> list[str]:
        """The tensors of `parameter`, which are there and of the right shapes."""
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
            if expected.is_floating_point() and dtype not in PLAIN:
                raise DrafterError(
                    f"{self.files.path}: {name} is stored as {dtype}: quantized drafters are not read; take "
                    "the one that it was made from"
                )
        shapes = [self.files.shape(name) for name in parts]
        rows, rest = sum(sum(shape[:1]) for shape in shapes), {shape[1:] for shape in shapes}
        if rows != expected.shape[0] or rest != {tuple(expected.shape[1:])}:
            held = ", ".join(f"{name} {list(shape)}" for name, shape in zip(parts, shapes, strict=True))
            together = " together" if len(parts) > 1 else ""
            raise DrafterError(
                f"{self.files.path}: {held}: by config.json it should be {list(expected.shape)}{together}"
            )
        return parts
