"""What drafters learn from requests, as arrays that can be kept. They may come from a stranger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from soothsay.errors import DrafterError

State = Mapping[str, npt.NDArray[Any]]
"""Arrays by name. What they mean is known to the drafter that made them."""


def read_arrays(kind: str, state: State, **forms: tuple[str, int]) -> list[npt.NDArray[Any]]:
    """Copies of a state's arrays.

    Args:
        kind: of the state.
        state: may come from a stranger.
        forms: the type and the number of dimensions of each array, by name.

    Raises `DrafterError` if an array is missing or has another form.
    """
    arrays = [state.get(name, np.empty(())) for name in forms]
    check_kept(kind, [(array.dtype.name, array.ndim) for array in arrays] == [*forms.values()])
    return [array.astype(dtype) for array, (dtype, _) in zip(arrays, forms.values(), strict=True)]


def check_kept(kind: str, possible: bool) -> None:
    """Raise `DrafterError` for a state that is not possible."""
    if not possible:
        raise DrafterError(f"{kind}: what was kept is damaged, or was made with other options")
