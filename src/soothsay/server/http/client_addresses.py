"""Addresses of clients."""

from __future__ import annotations

from ipaddress import IPv6Address, ip_address


def network(address: str) -> str:
    """What an address counts as for limits: itself, or the /64 network of an IPv6 address.

    One client of IPv6 usually has a whole /64. All that is no address counts as one: a proxy may pass on any
    text of a client as its address.
    """
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(parsed, IPv6Address):
        return str(parsed.ipv4_mapped or IPv6Address(int(parsed) >> 64 << 64))
    return address
