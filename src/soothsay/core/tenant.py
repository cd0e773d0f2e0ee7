"""Tenants: whose request it is. What the engine learns from a tenant's requests serves that tenant alone.

Without torch, so that a server's process can route requests by the digests of their texts. What drafters have
learned are arrays that can be kept. They may come from a stranger.
"""

import hashlib
import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from soothsay.core.arrays import IntArray
from soothsay.errors import DrafterError

K = TypeVar("K")
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

    Keeps at most `MAX_TENANTS` values, see `make_room`. So nobody can drop the values of others by making up
    salts.

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
        self._values[tenant] = value
        make_room(self._values, MAX_TENANTS, lambda one: one.name)


def make_room(
    values: OrderedDict[K, Any],
    most: int,
    name_of: Callable[[K], str],
    size: Callable[[K], int] = lambda _: 1,
) -> None:
    """Drop values until their sizes are `most` together, the oldest of the name with the most first.

    So nobody can drop the values of others.

    Args:
        values: the oldest first; is changed.
        most: limit of the sum of sizes.
        name_of: whose a value is, by its key.
        size: of a value, by its key.
    """
    sizes = Counter[str]()
    for key in values:
        sizes[name_of(key)] += size(key)
    while sizes.total() > most:
        [(name, _)] = sizes.most_common(1)
        oldest = next(key for key in values if name_of(key) == name)
        sizes[name] -= size(oldest)
        del values[oldest]


def first_digest(tenant: Tenant, adapter: str | None = None) -> bytes:
    """The parent of a text's first block: whose text it is, and by which adapter its keys are computed."""
    return hashlib.blake2b(tenant.digest + (adapter or "").encode(), digest_size=16).digest()


def block_digest(parent: bytes, tokens: IntArray) -> bytes:
    """Digest of a full block: of its tokens and, through the parent's digest, of all tokens before it."""
    return hashlib.blake2b(parent + tokens.tobytes(), digest_size=16).digest()


def prefix_digests(
    tenant: Tenant, tokens: IntArray, block_size: int, adapter: str | None = None
) -> Iterator[bytes]:
    """The digests of all full blocks of a tenant's text, the first block's first."""
    parent = first_digest(tenant, adapter)
    for end in range(block_size, len(tokens) + 1, block_size):
        parent = block_digest(parent, tokens[end - block_size : end])
        yield parent


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
