"""A set of layers that a model leaves out to draft for itself, as `soothsay train layer-skip` writes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from soothsay.errors import DrafterError, ModelError
from soothsay.files import read_json_object, write_json
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
