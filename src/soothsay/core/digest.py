"""Digests of full blocks of tokens. Without torch, so that a server's process can route requests by them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from soothsay.core.arrays import IntArray
from soothsay.core.tenant import Tenant


def block_digest(parent: bytes, tokens: IntArray) -> bytes:
    """Digest of a full block: of its tokens and, through the parent's digest, of all tokens before it."""
    return hashlib.blake2b(parent + tokens.tobytes(), digest_size=16).digest()


def prefix_digests(tenant: Tenant, tokens: IntArray, block_size: int) -> Iterator[bytes]:
    """The digests of all full blocks of a tenant's text, the first block's first."""
    parent = tenant.digest
    for end in range(block_size, len(tokens) + 1, block_size):
        parent = block_digest(parent, tokens[end - block_size : end])
        yield parent
