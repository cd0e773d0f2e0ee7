"""Try which drafters can be built for a target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from soothsay.errors import DrafterError

if TYPE_CHECKING:
    from soothsay.drafters.base import Drafter, Target


def try_drafters(target: Target, names: Sequence[str] = ()) -> dict[str, Drafter | DrafterError]:
    """Build drafters of the registry for `target`, without options.

    Args:
        target: the model to draft for.
        names: which drafters; empty: all.

    Returns:
        For each name, the drafter or the error that says why it cannot be built.
    """
    from soothsay.drafters.registry import REGISTRY, build_drafter

    built: dict[str, Drafter | DrafterError] = {}
    for name in names or REGISTRY:
        try:
            built[name] = build_drafter(name, target)
        except DrafterError as error:
            built[name] = error
    return built
