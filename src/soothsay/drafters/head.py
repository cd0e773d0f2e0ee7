"""What trained drafters have in common: modules that read the target's features and borrow its ends.

The module that is trained is the one that is served. While it trains its linear layers are `Dense`, in
float32; `serve` gives them the kinds that the target's kernels are fast at.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from soothsay.config import DType, ModelConfig
from soothsay.drafters.base import Target
from soothsay.engine.batch import Batch
from soothsay.errors import DrafterError, ModelError
from soothsay.model.checkpoint import Checkpoint, open_checkpoint
from soothsay.model.kernels import Kernels
from soothsay.model.linear import Dense
from soothsay.model.load import BITS, DTYPES, NumericMode, load_model
from soothsay.model.transformer import Embedding, RMSNorm, Transformer, fuse


class Shared(nn.Module):
    """What heads borrow from their target: its embedding, its last norm and its output head.

    Held by reference and never trained. V is the target's vocabulary, H the size of its hidden states.
    """

    def __init__(
        self,
        embedding: Embedding,
        norm: RMSNorm,
        head: nn.Module,
        kernels: Kernels,
        softcap: float | None = None,
    ):
        super().__init__()
        self.embedding, self.norm, self.head = embedding, norm, head
        self.kernels, self.softcap = kernels, softcap

    @classmethod
    def of(cls, model: Transformer) -> Shared:
        """The ends of `model`."""
        return cls(model.embedding, model.norm, model.head, model.kernels, model.config.logit_softcap)

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.norm.weight.shape[0]

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.embedding.weight.shape[0]

    def embed(self, tokens: Tensor) -> Tensor:
        """`[N] -> [N, H]` float32."""
        embedded: Tensor = self.embedding(tokens)
        return embedded

    def normed(self, hidden: Tensor) -> Tensor:
        """The last layer's output -> what the output head takes: `[N, H] -> [N, H]` float32."""
        return self.kernels.norm(hidden, self.norm, torch.float32)

    def logits(self, hidden: Tensor) -> Tensor:
        """What the output head takes -> logits: `[M, H] -> [M, V]` float32."""
        logits: Tensor = self.head(hidden).float()
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


class Head(nn.Module):
    """A trained drafter's weights and what they compute; `Drafter`s serve it, `soothsay.train` trains it."""

    method: ClassVar[str]
    """Its name in the registry and in checkpoints."""

    taps: tuple[int, ...]
    """Layers of the target whose input it reads; the number of layers means the last one's output."""

    def fuse(self, taps: Sequence[Tensor], shared: Shared) -> Tensor:
        """What it needs to keep of the target's features: `[N, H_target]` for each tap -> `[N, H]` float32.

        Here: the last layer's output behind the last norm, which is what the target's output head reads.
        """
        return shared.normed(taps[0])


class RecurrentHead(Head):
    """A head that continues from its own output, token by token: EAGLE's, EAGLE-3's, MTP's modules.

    Row t reads token t and the feature of token t - 1, stands at position t, and guesses token t + 1. The
    rows of guesses read, in place of a feature, the output of the row before them. There is no row 0.
    """

    config: RecurrentConfig

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Of what its linear layers give, and of its KV."""

    def embed(self, tokens: Tensor, shared: Shared) -> Tensor:
        """`[N] -> [N, H]` float32."""
        return shared.embed(tokens)

    @abstractmethod
    def forward(
        self, embedded: Tensor, features: Tensor, batch: Batch, kv: Tensor | None, step: int = 0
    ) -> Tensor:
        """One pass.

        Args:
            embedded: `[N, H]` float32 of each row's token.
            features: `[N, H]` float32: fused, of the token before, or the output of the row before.
            batch: where the rows stand.
            kv: keys and values of the module, `[2 * H_kv, S, d]`; None: they live within the pass.
            step: which module, where there are several.

        Returns:
            `[N, H]` float32.
        """

    def logits(self, out: Tensor, shared: Shared) -> Tensor:
        """Outputs -> logits of the tokens behind: `[M, H] -> [M, V]` float32."""
        return shared.logits(out)


class RecurrentConfig(Protocol):
    """What all recurrent heads' configurations have."""

    @property
    def block(self) -> ModelConfig:
        """Of the decoder block; `num_layers` is the number of modules, each with keys of its own."""


AnyHead = TypeVar("AnyHead", bound=Head)
ServedHead = TypeVar("ServedHead", bound=Head, covariant=True)


def serve(head: AnyHead, kernels: Kernels, dtype: torch.dtype, bits: int | None = None) -> AnyHead:
    """Make `head` ready to draft: its linear layers in `dtype`, of the kinds that `kernels` are fast at.

    `bits`: round their weights to integers. Changes `head`, which cannot be trained any more, and returns it.
    """
    mode = NumericMode(dtype, bits)
    for name, module in list(head.named_modules()):
        if isinstance(module, Dense):
            weight = mode.convert(name, module.weight.detach())
            bias = None if module.bias is None else module.bias.detach().to(dtype)
            out = torch.float32 if name == "head" else dtype
            head.set_submodule(name, kernels.linear(weight, bias, out))
    fuse(head)
    return head.eval().requires_grad_(False)


@dataclass(frozen=True)
class Origin:
    """The model that heads are made for: the target, or the small one that `soothsay grow` made it from.

    A grown target computes what the small model does, in the first dimensions of its stream; so the small
    model's heads serve it, with the small model's embedding, last norm and output head.
    """

    config: ModelConfig
    shared: Shared
    layers: tuple[int, ...]
    """For each of its layers, and for its output, the target's layer with the same input."""

    scale: float = 1.0
    """What its stream is multiplied by in the target."""

    @classmethod
    def of(cls, target: Target) -> Origin:
        """Find it by the target's config.json.

        Raises `DrafterError` where that names a small model which is not there.
        """
        model = target.model
        grown_from = _grown_from(target.path)
        if grown_from is None:
            return cls(model.config, Shared.of(model), tuple(range(model.config.num_layers + 1)))
        plain: DType = "bfloat16" if model.dtype is torch.bfloat16 else "float32"
        dtype: DType = plain if model.bits is None else "int8"
        small = load_model(_open_small(target, grown_from), dtype, model.device)
        return cls(
            small.config,
            Shared.of(small),
            (*grown_from["layers"], model.config.num_layers),
            model.embedding.scale / small.embedding.scale,
        )

    def taps(self, taps: Sequence[int]) -> tuple[int, ...]:
        """The target's layers in place of its own."""
        return tuple(self.layers[tap] for tap in taps)

    def cut(self, taps: Sequence[Tensor]) -> list[Tensor]:
        """Its features from the target's, `[N, H_target] -> [N, H]` each."""
        size = self.config.hidden_size
        if self.scale == 1.0:
            return [tap[:, :size].contiguous() for tap in taps]
        return [tap[:, :size] / self.scale for tap in taps]


def shared_of(target: Target) -> Shared:
    """What heads borrow where they draft for `target`; see `Origin`."""
    return Origin.of(target).shared


def _grown_from(path: Path | None) -> dict[str, Any] | None:
    """What `soothsay grow` noted in a model's config.json, if it made the model."""
    if path is None or not (path / "config.json").is_file():
        return None
    noted: dict[str, Any] | None = json.loads((path / "config.json").read_text("utf-8")).get("grown_from")
    return noted


def _open_small(target: Target, grown_from: Mapping[str, Any]) -> Checkpoint:
    """The model that the target was grown from. Raises `DrafterError` where it is not there any more."""
    name = grown_from["model"]
    try:
        return open_checkpoint(name)
    except ModelError as error:
        raise DrafterError(
            f"{target.path} was grown from {name}, whose drafters serve it, with its embedding and output "
            f"head: {error}"
        ) from error


@dataclass(frozen=True)
class Served(Generic[ServedHead]):
    """A head that is ready to draft for a target."""

    head: ServedHead
    origin: Origin

    @property
    def shared(self) -> Shared:
        """What it borrows."""
        return self.origin.shared

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's layers whose input it reads."""
        return self.origin.taps(self.head.taps)

    def fuse(self, taps: Sequence[Tensor]) -> Tensor:
        """What it keeps of the target's features: `[N, H_target]` for each tap -> `[N, H]` float32."""
        return self.head.fuse(self.origin.cut(taps), self.shared)


def load_head(
    kind: type[AnyHead], model: str | Path | Head, target: Target, dtype: DType = "auto"
) -> Served[AnyHead]:
    """Make a head ready to draft for `target`; one that is given as such is changed, see `serve`.

    `dtype` is what its linear layers compute in; "auto": the target's, but int8 for any integers: a head is
    small, and its guesses are worth eight bits. Raises `DrafterError` for an unknown one, and as `find_head`
    does.
    """
    known = ("auto", *DTYPES, *BITS)
    if dtype not in known:
        raise DrafterError(f"{kind.method}(dtype={dtype}) is unknown; choose {', '.join(known)}")
    head, own = find_head(kind, model, target), target.model.dtype
    bits = BITS.get(dtype)
    if dtype == "auto" and target.model.bits is not None:
        bits = 8
    ready = serve(head.to(target.model.device), target.model.kernels, DTYPES.get(dtype, own), bits)
    return Served(ready, Origin.of(target))


def find_head(kind: type[AnyHead], model: str | Path | Head, target: Target) -> AnyHead:
    """The trained head that `model` names.

    Args:
        kind: which method's.
        model: a checkpoint's directory, or a head; empty: the directory `drafters/<method>` beside the
            weights of the target or of what it was grown from; of MTP modules, their own checkpoint, too.
        target: the model to draft for.

    Raises:
        DrafterError: it is not there, damaged, another method's, or does not fit the target.
    """
    if isinstance(model, Head):
        head = model
    else:
        from soothsay.drafters.checkpoints import read_head  # which knows all the heads, and so imports this

        head = read_head(drafter_directory(kind.method, str(model), target), target)
    if not isinstance(head, kind):
        raise DrafterError(
            f"{model} is a head of {head.method}, not of {kind.method}: choose drafter {head.method}"
        )
    return head


def drafter_places(target: Target) -> list[Path]:
    """Where drafters of a target are kept, the place to look in first before the others: `drafters` beside
    its weights, and beside those of the model that it was grown from. None if it has no directory.

    Raises `DrafterError` if the model that it was grown from is not there any more.
    """
    if target.path is None:
        return []
    grown_from = _grown_from(target.path)
    models = [target.path] if grown_from is None else [target.path, _open_small(target, grown_from).path]
    return [model / "drafters" for model in models]


def drafter_directory(method: str, model: str, target: Target) -> Path:
    """Where the drafter is: at `model`, or if that is empty in `drafters/<method>` beside the target's
    weights or those of the model that it was grown from.

    Raises `DrafterError` if none is there.
    """
    if model:
        return Path(model).expanduser()
    places = drafter_places(target)
    if not places:
        raise DrafterError(
            f"no model is named for {method}, and the target has no directory to look in: write "
            f"{method}(model=...)"
        )
    for place in places:
        if (place / method).is_dir():
            return place / method
    if method == "mtp":
        return places[-1].parent
    looked = " or ".join(str(place / method) for place in places)
    raise DrafterError(f"there is no drafter at {looked}: train one, or name one, {method}(model=...)")
