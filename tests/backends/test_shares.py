"""Who gives up how much: the rule alone, for any tenants, weights and shortfalls."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.backends.shares import gives
from hicache.backends.tenant_limits import StoreLimits, TenantLimits

A, B, C = b"a", b"b", b"c"
EQUAL = {A: 1.0, B: 1.0, C: 1.0}


@pytest.mark.parametrize(
    ("used_bytes", "shortfall_bytes", "expected"),
    [
        ({A: 50, B: 30, C: 10}, 10, [(A, 10)]),
        ({A: 50, B: 45, C: 10}, 15, [(A, 10), (B, 5)]),
        ({A: 30, B: 30, C: 30}, 30, [(C, 10), (B, 10), (A, 10)]),
        ({A: 30, B: 30, C: 31}, 1, [(C, 1)]),
        ({A: 90}, 10, [(A, 10)]),
        ({A: 10, B: 10, C: 1}, 1, [(B, 1)]),
        ({A: 90}, 200, [(A, 90)]),
        ({}, 10, []),
    ],
)
def test_the_fullest_come_down_to_one_level(
    used_bytes: dict[bytes, int], shortfall_bytes: int, expected: list[tuple[bytes, int]]
) -> None:
    assert gives(used_bytes, EQUAL, shortfall=shortfall_bytes) == expected


def test_a_weight_of_two_has_two_shares() -> None:
    weights = {A: 2.0, B: 1.0}
    assert gives({A: 60, B: 40}, weights, shortfall=10) == [(B, 10)]
    assert gives({A: 80, B: 40}, weights, shortfall=30) == [(B, 10), (A, 20)]


def test_who_has_nothing_to_give_is_made_up_for_by_others_but_not_below_their_share() -> None:
    assert gives({A: 60, B: 40, C: 20}, EQUAL, shortfall=30, spent={A}) == [(B, 10)]
    assert gives({A: 60, B: 40, C: 20}, EQUAL, shortfall=30, spent={A, B}) == []


TENANTS = st.dictionaries(
    st.binary(min_size=1, max_size=1),
    st.tuples(st.integers(0, 10**9), st.sampled_from([0.1, 0.5, 1.0, 1.5, 3.0, 7.0])),
    min_size=1,
    max_size=8,
)


@given(tenants=TENANTS, part=st.floats(0, 1))
def test_what_is_short_is_given_by_those_above_their_share_and_leaves_them_level(
    tenants: dict[bytes, tuple[int, float]], part: float
) -> None:
    used_bytes = {tenant: used for tenant, (used, _) in tenants.items()}
    weights = {tenant: weight for tenant, (_, weight) in tenants.items()}
    shortfall_bytes = int(sum(used_bytes.values()) * part)
    amounts = dict(gives(used_bytes, weights, shortfall=shortfall_bytes))
    assert abs(sum(amounts.values()) - shortfall_bytes) <= len(tenants)

    level = (sum(used_bytes.values()) - shortfall_bytes) / sum(weights.values())
    left = {tenant: used_bytes[tenant] - amounts.get(tenant, 0) for tenant in tenants}
    for tenant, amount in amounts.items():
        assert used_bytes[tenant] > level * weights[tenant] - 1, "at or below its share"
        assert amount <= used_bytes[tenant]
        assert left[tenant] >= level * weights[tenant] - 1, "given below its share"
    if amounts:
        givers = [left[tenant] / weights[tenant] for tenant in amounts]
        slack = 1 / min(weights.values())
        assert max(givers) - min(givers) <= 2 * slack
        assert all(left[tenant] / weights[tenant] <= max(givers) + slack for tenant in tenants)


@given(weights=st.lists(st.floats(0.1, 100), min_size=1, max_size=6), pin_share=st.floats(0.01, 0.5))
def test_pins_of_all_tenants_together_stay_within_their_part_and_of_each_within_its_share(
    weights: list[float], pin_share: float
) -> None:
    by_tenant = {bytes([number]): TenantLimits(weight=weight) for number, weight in enumerate(weights)}
    limits = StoreLimits(by_tenant=by_tenant, pin_share=pin_share)
    parts = {tenant: limits.pinned_bytes_max(tenant, capacity_bytes=10**12) for tenant in by_tenant}
    assert sum(parts.values()) <= pin_share * 10**12 + len(parts)
    for tenant, part in parts.items():
        assert part <= 10**12 * pin_share * by_tenant[tenant].weight / sum(weights) + 1
