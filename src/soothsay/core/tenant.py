"""Tenants: whose request it is. What the engine learns from a tenant's requests serves that tenant alone."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

MAX_TENANTS = 32
"""Number of tenants whose values a `PerTenant` keeps. A drafter's value takes up to some 20 MB."""


class Tenant(NamedTuple):
    """Whose request it is. Tenants share no prefixes, drafts, statistics or grammars."""

    name: str = ""  # on a server, the digest of an API key
    salt: str = ""  # keeps requests of one name apart, as vLLM's `cache_salt` does

    @property
    def digest(self) -> bytes:
        """16 bytes that identify the tenant."""
        return hashlib.blake2b(json.dumps([self.name, self.salt]).encode(), digest_size=16).digest()


EVERYBODY = Tenant()
"""The tenant of requests that name none."""


class PerTenant(Generic[T]):
    """One value for each tenant, made when it is first asked for.

    Keeps at most `MAX_TENANTS` values. A further tenant replaces the least recently used one of the name with
    the most values. So nobody can drop the values of others by making up salts.

    Args:
        make: returns the first value of a tenant.
    """

    def __init__(self, make: Callable[[], T]):
        self._make = make
        self._values: OrderedDict[Tenant, T] = OrderedDict()  # the least recently used first

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._values)

    def __contains__(self, tenant: object) -> bool:
        return tenant in self._values

    def __getitem__(self, tenant: Tenant) -> T:
        value = self._values.get(tenant)
        if value is None:
            value = self[tenant] = self._make()
        self._values.move_to_end(tenant)
        return value

    def __setitem__(self, tenant: Tenant, value: T) -> None:
        if tenant not in self._values and len(self._values) >= MAX_TENANTS:
            self._drop_one()
        self._values[tenant] = value

    def _drop_one(self) -> None:
        counts = Counter(tenant.name for tenant in self._values)
        most = max(counts.values())
        del self._values[next(tenant for tenant in self._values if counts[tenant.name] == most)]
