"""The target drafts for itself with some of its layers left out. There is no second model and no second KV.

Draft & Verify (Zhang et al. 2023, arXiv 2309.08168) leaves out a set of layers that was searched for; any
model can do this. LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710) leaves out the last layers; a model must
be trained for this. `soothsay train layer-skip` finds the set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor

from soothsay.core.batch import Rows
from soothsay.core.request import Request
from soothsay.drafters.base import Target, check_at_least_one
from soothsay.drafters.trees.growth import ConfidentShape, GrowingTree, GrownDrafter
from soothsay.drafters.trees.own_kv import pack
from soothsay.errors import DrafterError, ModelError
from soothsay.files import read_json_object, user_path, write_json
from soothsay.model.families.fields import MAX_LAYERS, each, real, whole

METHOD = "layer-skip"
"""Name of the drafter, in the registry and in files."""

DEEPEST = 8
"""The largest draft length that is considered when the best length is chosen."""


_LAYERS, _SHARE = whole(0, MAX_LAYERS), real(0, 1)
"""What a file may hold."""


@dataclass(frozen=True, slots=True)
class SkipSet:
    """A set of layers to leave out, and what it is worth."""

    skip: tuple[int, ...]
    """The layers, ascending."""

    agreement: float
    """Share of tokens that are the same with and without the layers, in 0 to 1."""

    cost: float
    """Cost of a draft token, in passes of the whole model; measured by the weights that are read."""

    def speedup_at(self, depth: int) -> float:
        """Return the expected tokens for the cost of one pass, with `depth` draft tokens in a row.

        Draft tokens are right independently of each other. Their verification costs as much as a pass of one
        row (Leviathan et al. 2022, arXiv 2211.17192).
        """
        tokens = sum(self.agreement**i for i in range(depth + 1))
        return tokens / (1 + depth * self.cost)

    @property
    def depth(self) -> int:
        """The best number of draft tokens in a row, at least 1."""
        return max(range(1, DEEPEST + 1), key=self.speedup_at)

    @property
    def speedup(self) -> float:
        """The expected speed-up at the best depth."""
        return self.speedup_at(self.depth)

    def save(self, directory: Path, num_layers: int) -> None:
        """Write `directory`/config.json, for a model of `num_layers` layers."""
        directory.mkdir(parents=True, exist_ok=True)
        content = {"method": METHOD, "num_layers": num_layers, **asdict(self)}
        write_json(directory / "config.json", content, indent=2)

    @classmethod
    def load(cls, directory: Path, num_layers: int) -> SkipSet:
        """Read what `save` wrote.

        Raises:
            DrafterError: the file is missing or damaged, or is for a model with another number of layers.
        """
        file = directory / "config.json"
        if not file.is_file():
            raise DrafterError(
                f"there is no layer set at {directory}: 'soothsay train layer-skip' writes one"
            )
        try:
            content = read_json_object(file)
            known, skip = _LAYERS.accept(content["num_layers"]), each(_LAYERS).accept(content["skip"])
            found = cls(tuple(skip), _SHARE.accept(content["agreement"]), _SHARE.accept(content["cost"]))
        except (ModelError, ValueError, KeyError) as error:
            raise DrafterError(f"{file} is not what 'soothsay train layer-skip' writes: {error!r}") from None
        if known != num_layers:
            raise DrafterError(f"{file} is of a model with {known} layers, not of one with {num_layers}")
        parse_layers(skip, num_layers)
        return found


def parse_layers(skip: str | int | Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return the layers that `skip` names, ascending, each once.

    Example:
        >>> parse_layers("5, 4", 8), parse_layers(4, 8)
        ((4, 5), (4,))

    Raises:
        DrafterError: `skip` cannot be read, or the model does not have a layer.
    """
    try:
        parts = skip.split(",") if isinstance(skip, str) else [skip] if isinstance(skip, int) else skip
        layers = sorted({int(part) for part in parts})
    except (ValueError, TypeError):
        raise DrafterError(f"{METHOD}(skip={skip!r}) is not understood: write skip=4 or skip='4,5'") from None
    if layers and not 0 <= layers[0] <= layers[-1] < num_layers:
        raise DrafterError(f"{METHOD}(skip={skip!r}): the target has layers 0 to {num_layers - 1}")
    return tuple(layers)


class LayerSkip(GrownDrafter[None]):
    """Drafts with some of the target's layers, its last norm and its output head.

    It reads and writes the target's own KV, and keeps nothing of a request. All committed tokens but the last
    have the target's KV, so only the root and the nodes are computed. Where more tokens wait for their KV (a
    prompt, or after a preemption), it proposes nothing.

    Why writing is safe: the root and the nodes write to the slots of the last token and after. The target's
    next pass writes these slots again, layer by layer, before it reads them. Nodes that are not verified
    leave values after the end of the context, which nobody reads. Shared blocks are never written to: only
    blocks are shared that are full of tokens with KV, and the last token has none.

    Args:
        target: the model to draft for.
        model: a directory with a layer set that was searched for; empty: `drafters/layer-skip` beside the
            target's weights, and if there is none, every other layer of the middle half is left out.
        skip: the layers to leave out, as `4`, `(4, 5)` or `"4,5"`, in place of the searched ones.
        exit: the number of layers to run, the first ones, in place of leaving out others.
        depth: number of tokens that are drafted in a row; 0: the number that the search found best, or 3.
        width: nodes of each level that are expanded; 1 gives a chain.
        branch: likeliest tokens that are added below each of them.

    Raises:
        DrafterError: the target does not have a layer, the layer set is another model's, a number is out of
            range, or more than one option names layers.
    """

    def __init__(
        self,
        target: Target,
        model: str | Path = "",
        skip: str | int | Sequence[int] = "",
        exit: int = 0,
        depth: int = 0,
        width: int = 1,
        branch: int = 1,
    ):
        check_at_least_one(METHOD, width=width, branch=branch)
        num_layers = target.model.spec.num_layers
        if depth < 0 or not 0 <= exit <= num_layers:
            raise DrafterError(
                f"{METHOD}(exit={exit}, depth={depth}): neither can be below 0, nor exit above the target's "
                f"{num_layers} layers"
            )
        if (skip != "") + (exit > 0) + (str(model) != "") > 1:
            raise DrafterError(f"{METHOD}(model={model}, skip={skip}, exit={exit}): give only one of them")
        found = _searched(model, target) if skip == "" and not exit else None
        if found is not None:
            skipped, depth = found.skip, depth or found.depth
        elif exit:
            skipped = tuple(range(exit, num_layers))
        elif skip != "":
            skipped = parse_layers(skip, num_layers)
        else:
            skipped = tuple(range(num_layers // 4 + 1, num_layers - num_layers // 4, 2))
        super().__init__(target, ConfidentShape(depth or 3, width, branch))
        self.layers = tuple(i for i in range(num_layers) if i not in skipped)
        self.pool = target.pool

    def ready(self, request: Request) -> bool:
        """Return whether all committed tokens but the last have the target's KV, see `Expander`."""
        return request.num_pending == 1

    def expand_roots(self, growing: Sequence[GrowingTree]) -> tuple[Tensor, None]:
        """Compute the roots, see `Expander`. Nodes have no state but their KV."""
        rows = []
        for g in growing:
            tokens = g.request.tokens
            own = tokens[-1:], len(tokens) - 1, g.request.table, g.expanded
            rows.append(Rows(*own, state=g.request.state, source=g.request.num_source))
        return self._logits(rows), None

    def expand_nodes(self, growing: Sequence[GrowingTree], states: None) -> tuple[Tensor, None]:
        """Compute the frontiers, see `Expander`."""
        return self._logits([g.frontier_rows() for g in growing]), None

    def _logits(self, rows: Sequence[Rows]) -> Tensor:
        """Compute a pass through the layers that are left; `[M, V]` logits of its logit rows."""
        packed = pack(rows, self.target, self.target.model.spec)
        hidden: Tensor = self.target.model(packed, self.pool, layers=self.layers)[0]
        return self.target.model.logits(packed.select_logit_rows(hidden))


def skip_directory(model: Path) -> Path:
    """Return where the layer set of the model at `model` is kept."""
    return model / "drafters" / METHOD


def _searched(model: str | Path, target: Target) -> SkipSet | None:
    """Return the layer set at `model`, or beside the target; None if none is named and none is there."""
    named = str(model) != ""
    directory = user_path(model) if named else target.path and skip_directory(target.path)
    if directory is None or not (named or directory.is_dir()):
        return None
    return SkipSet.load(directory, target.model.spec.num_layers)
