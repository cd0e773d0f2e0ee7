"""Loads the trained heads that drafters name, and the bases of drafters whose head reads the target's
features.

Linear layers are converted to the kinds that the target's kernels are fast at. A head usually reads whole
features, and shares the target's embedding, last norm and output head. A head with a `FeatureView` reads a
part of each feature, and brings its own embedding, last norm and output head.

A `FeatureDrafter` has KV of its own, and its head reads the feature of every token. A `LastFeatureDrafter`
has none, and its head reads the feature of the last token.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from soothsay.config import DType
from soothsay.core.batch import Batch, Rows
from soothsay.core.request import Observation, Request
from soothsay.core.tree import DraftTree
from soothsay.drafters.base import Drafter, LevelwiseDrafter, Target
from soothsay.drafters.heads.checkpoints.fit import FeatureView
from soothsay.drafters.heads.checkpoints.head_directory import open_head
from soothsay.drafters.heads.trained_head import Head, TargetEnds
from soothsay.drafters.places import drafter_directory
from soothsay.drafters.trees.growth import GrowingTree, GrownDrafter, TreeShape, parent_rows
from soothsay.drafters.trees.own_kv import DraftPass, FeatureKV, own_pool, pack
from soothsay.errors import DrafterError
from soothsay.model.decoder.blocks import record
from soothsay.model.ops.kernels import Kernels
from soothsay.model.ops.linear import Dense
from soothsay.model.specs.model_spec import ModelSpec
from soothsay.model.weights.numeric_mode import BITS, DTYPES, NumericMode
from soothsay.processors import one_torch_thread

AnyModule = TypeVar("AnyModule", bound=nn.Module)
AnyHead = TypeVar("AnyHead", bound=Head)
ServedHead = TypeVar("ServedHead", bound=Head, covariant=True)


def serve(
    head: AnyModule,
    kernels: Kernels,
    dtype: torch.dtype,
    bits: int | None = None,
    output_bits: int | None = None,
) -> AnyModule:
    """Make a head ready to draft: convert its linear layers to the kinds that `kernels` are fast at.

    Args:
        head: is changed in place; it can no longer be trained or written. It may be a whole model.
        kernels: the target's.
        dtype: what the linear layers compute in.
        bits: round their weights to integers of this size; None: do not round.
        output_bits: the same for its output head, which a draft reads most; None: as for the others.

    Returns:
        `head`.
    """
    inner, output = NumericMode(dtype, bits), NumericMode(dtype, output_bits or bits, coarse=True)
    for name, module in list(head.named_modules()):
        if isinstance(module, Dense):
            is_output = name.split(".")[-1] == "head"
            weight = (output if is_output else inner).convert(name, module.weight.detach())
            bias = None if module.bias is None else module.bias.detach().to(dtype)
            out = torch.float32 if is_output else dtype
            head.set_submodule(name, kernels.linear(weight, bias, out))
    record(head)
    return head.eval().requires_grad_(False)


@dataclass(frozen=True)
class Served(Generic[ServedHead]):
    """A head that is ready to draft for a target."""

    head: ServedHead
    shared: TargetEnds
    """The embedding, last norm and output head that the head works with."""

    view: FeatureView | None = None
    """None: the head reads whole features."""

    def fuse(self, taps: Sequence[Tensor]) -> Tensor:
        """The part of the target's features to keep: `[N, H_target]` for each tap -> `[N, H]` float32."""
        return self.head.fuse(taps if self.view is None else self.view.cut(taps), self.shared)


@one_torch_thread()
def load_head(
    kind: type[AnyHead], model: str | Path | Head, target: Target, dtype: DType = "auto"
) -> Served[AnyHead]:
    """Load a head and make it ready to draft for `target`.

    Args:
        kind: the class of the method's heads.
        model: see `find_head`. A head that is given as an object is changed, see `serve`.
        target: the model to draft for.
        dtype: what the head's linear layers compute in. "auto" is the target's dtype. If the target's weights
            are integers of any size, "auto" is int8, or the integers that the head is stored in: a head is
            small, and better guesses are worth 8 bits. A draft reads its output matrix again for each level,
            so this has 4 bits: drafts are up to 1% worse, and take 6 to 12% less time (docs/log.md).

    Raises:
        DrafterError: the dtype is unknown, or as `find_head` raises.
    """
    known = ("auto", *DTYPES, *BITS)
    if dtype not in known:
        raise DrafterError(f"{kind.method}(dtype={dtype}) is unknown; choose {', '.join(known)}")
    head, view = find_head(kind, model, target)
    verifier = target.model
    bits, output_bits = BITS.get(dtype), None
    if dtype == "auto" and verifier.bits is not None:
        bits, output_bits = head.bits or 8, 4
    shared = TargetEnds.of(verifier) if view is None else view.ends(verifier)
    with torch.no_grad():
        head.to(verifier.device).borrow(shared)
    served = serve(head, verifier.kernels, DTYPES.get(dtype, verifier.dtype), bits, output_bits)
    return Served(served, shared, view)


def find_head(
    kind: type[AnyHead], model: str | Path | Head, target: Target
) -> tuple[AnyHead, FeatureView | None]:
    """Read the trained head that `model` names, and its view of the target's features if it has one.

    Args:
        kind: the class of the method's heads.
        model: a checkpoint's directory, or a head; empty: the directory `drafters/METHOD` beside the target's
            weights. For MTP modules the target's own checkpoint is the second choice.
        target: the model to draft for.

    Raises:
        DrafterError: the head is not there, damaged, another method's, or does not fit the target.
    """
    if isinstance(model, Head):
        head, view = model, None
    else:
        with open_head(drafter_directory(kind.method, str(model), target), target) as stored:
            head, view = stored.load(), stored.fit.view
    if not isinstance(head, kind):
        raise DrafterError(
            f"{model} is a head of {head.method}, not of {kind.method}: choose drafter {head.method}"
        )
    return head, view


class FeatureDrafter(LevelwiseDrafter, Generic[ServedHead]):
    """Keeps the features of committed tokens, and computes their rows when blocks need them.

    Args:
        target: the model to draft for.
        served: the head, ready to draft.
        block: describes the head's decoder blocks.
        scratch: slots after the target's that the head needs.
    """

    trained = True

    def __init__(self, target: Target, served: Served[ServedHead], block: ModelSpec, scratch: int = 0):
        self.target, self.served, self.taps = target, served, served.head.taps
        self.head, self.shared, self.block = served.head, served.shared, block
        self.kv = FeatureKV(target, own_pool(target, block, served.head.dtype, scratch))

    def pack(self, rows: Sequence[Rows]) -> Batch:
        """Lay out a pass of the head."""
        return pack(rows, self.target, self.block)

    def keep(self, taps: Sequence[Tensor]) -> Tensor:
        """What is kept of the target's features until their rows are computed, `[N, ...]` float32."""
        return self.served.fuse(taps)

    @abstractmethod
    def run(self, batch: DraftPass) -> Sequence[Tensor]:
        """Compute a pass over committed tokens, and what comes after them if roots are among them."""

    def observe(self, observations: Sequence[Observation]) -> None:
        """Keep the features that the next rows read."""
        for batch in self.kv.observe(observations, self.keep):
            self.run(batch)

    def num_known(self, request: Request, blocks: Sequence[int]) -> int:
        """The blocks that the head has read too: without a text's beginning, it hardly drafts right."""
        return self.kv.num_held(request, blocks)

    @torch.inference_mode()
    def release(self, request: Request) -> None:
        """Forget a request, after its full blocks are complete for other requests."""
        for batch in self.kv.close(request):
            self.run(batch)

    def reset(self) -> None:
        """Forget what was computed for other requests."""
        self.kv.reset()

    def ready(self, request: Request) -> bool:
        """Return whether all features up to the root are known, see `Expander`."""
        return self.kv.ready(request)


class LastFeatureDrafter(Drafter, Generic[ServedHead]):
    """Keeps the feature of the token before each request's root. It has no KV.

    Args:
        target: the model to draft for.
        served: the head, ready to draft.
    """

    trained = True

    def __init__(self, target: Target, served: Served[ServedHead]):
        self.target, self.served, self.taps = target, served, served.head.taps
        self.head, self.shared = served.head, served.shared
        self.kept: dict[Request, tuple[int, Tensor]] = {}  # tokens that were shown; [H] of the last of them

    def observe(self, observations: Sequence[Observation]) -> None:
        """Keep the feature of the last token that a step commits."""
        rows = [seen.committed_rows for seen in observations]
        taps = [
            torch.stack([tap[own[-1]] for tap, own in zip(layer, rows, strict=True)])
            for layer in zip(*(seen.taps for seen in observations), strict=True)
        ]
        for seen, own, feature in zip(observations, rows, self.served.fuse(taps), strict=True):
            self.kept[seen.request] = seen.start + len(own), feature

    def release(self, request: Request) -> None:
        """Forget a request."""
        self.kept.pop(request, None)

    def ready(self, request: Request) -> bool:
        """Return whether the feature of the token before the root is known, see `Expander`."""
        return request in self.kept and self.kept[request][0] == request.length - 1

    def features(self, requests: Sequence[Request]) -> Tensor:
        """The features of requests that are ready, `[R, H]` float32."""
        return torch.stack([self.kept[request][1] for request in requests])


class StateGrownDrafter(LastFeatureDrafter[ServedHead], GrownDrafter[Tensor]):
    """Grows trees with a head that has no KV: a node's logits follow from its token and its parent's state.

    The state of a root's parent is the feature of the token before the root.

    Args:
        target: the model to draft for.
        served: the head, ready to draft.
        shape: which nodes a tree gets.
    """

    def __init__(self, target: Target, served: Served[ServedHead], shape: TreeShape):
        LastFeatureDrafter.__init__(self, target, served)
        GrownDrafter.__init__(self, target, shape)

    @abstractmethod
    def expand(self, growing: Sequence[GrowingTree], above: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the frontiers from `[M, n]` states of their parents: logits `[M, V]`, and their states."""

    def expand_roots(self, growing: Sequence[GrowingTree]) -> tuple[Tensor, Tensor]:
        """See `Expander`."""
        return self.expand(growing, self.features([g.request for g in growing]))

    def expand_nodes(self, growing: Sequence[GrowingTree], states: Tensor) -> tuple[Tensor, Tensor]:
        """See `Expander`."""
        return self.expand(growing, states.index_select(0, parent_rows(growing, states.device)))


def draft_ready(
    requests: Sequence[Request],
    ready: Callable[[Request], bool],
    draft: Callable[[Sequence[Request]], list[DraftTree]],
) -> list[DraftTree]:
    """Return the trees that `draft` makes for requests that are ready, and the root alone for the others."""
    trees = {request: DraftTree(request.last_token) for request in requests}
    if can := [request for request in requests if request.max_nodes > 1 and ready(request)]:
        trees.update(zip(can, draft(can), strict=True))
    return [*trees.values()]
