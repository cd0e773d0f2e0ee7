"""Tenants: what they share (nothing), and whose values are dropped when there are too many."""

from __future__ import annotations

from soothsay.core.tenant import EVERYBODY, MAX_TENANTS, PerTenant, Tenant


def test_digests_tell_tenants_apart() -> None:
    tenants = [EVERYBODY, Tenant("a"), Tenant("b"), Tenant("a", "b"), Tenant("ab"), Tenant("", "ab")]
    assert len({tenant.digest for tenant in tenants}) == len(tenants)
    assert Tenant("a", "b").digest == Tenant("a", "b").digest


def test_each_tenant_has_a_value_of_its_own() -> None:
    lists = PerTenant[list[int]](list)
    lists[Tenant("a")].append(1)
    assert lists[Tenant("a")] == [1]
    assert lists[Tenant("b")] == lists[Tenant("a", "salt")] == []


def test_the_least_recently_used_is_dropped() -> None:
    lists = PerTenant[list[int]](list)
    for number in range(MAX_TENANTS):
        lists[Tenant(str(number))].append(number)
    assert lists[Tenant("0")] == [0]
    assert lists[Tenant("new")] == []
    assert len(lists) == MAX_TENANTS
    assert lists[Tenant("0")] == [0]
    assert lists[Tenant("1")] == [], "it was used least recently"


def test_nobody_drops_the_values_of_others_by_making_up_salts() -> None:
    lists = PerTenant[list[int]](list)
    lists[Tenant("honest")].append(1)
    for number in range(10 * MAX_TENANTS):
        lists[Tenant("greedy", str(number))].append(number)
    assert len(lists) == MAX_TENANTS
    assert lists[Tenant("honest")] == [1]
    assert lists[Tenant("greedy", str(10 * MAX_TENANTS - 1))] == [10 * MAX_TENANTS - 1]
