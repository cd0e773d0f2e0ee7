"""What drafters learn from requests, seen as something that can be kept: the ground type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy.typing as npt

from soothsay.core.tenant import Tenant

State = Mapping[str, npt.NDArray[Any]]
"""Arrays by name. What they mean is known to the `Learned` that made them."""


class Learned(Protocol):
    """What a drafter has learned from the requests of each tenant.

    Attributes:
        kind: names the form of the state, such as "suffix". It is a part of file names.
        identity: whatever the state would be wrong without, such as the vocabulary. States of another
            identity are not restored.
    """

    @property
    def kind(self) -> str: ...  # noqa: D102

    @property
    def identity(self) -> str: ...  # noqa: D102

    def tenants(self) -> Iterable[Tenant]:
        """The tenants that something is known of."""

    def state(self, tenant: Tenant) -> State:
        """What was learned from a tenant's requests, as arrays. Empty: nothing."""

    def restore(self, tenant: Tenant, state: State) -> None:
        """Take over what `state` returned, in addition to what is known of the tenant.

        Several engines may have learned from a tenant, and parts of it the same: nothing counts twice. Where
        not all fits, the older part makes room. Arrays may come from a stranger, so all are checked first.

        Raises `DrafterError` if an array is missing or impossible. Then nothing has changed.
        """
