"""Which drafters can be had for a target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from soothsay.errors import DrafterError

if TYPE_CHECKING:
    from soothsay.drafters import Drafter, Target


def try_drafters(target: Target, names: Sequence[str] = ()) -> dict[str, Drafter | DrafterError]:
    """Drafters of the registry, all unless `names` says which, built for `target` without options, or why
    that cannot be.

    Those that need a file of their own say so.
    """
    from soothsay.drafters import REGISTRY, build_drafter

    built: dict[str, Drafter | DrafterError] = {}
    for name in names or REGISTRY:
        try:
            built[name] = build_drafter(name, target)
        except DrafterError as error:
            built[name] = error
    return built
