"""Who gives up how much when a store is full: as water finds its level, those who have most give first."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import islice


def gives(
    used: Mapping[bytes, int],
    weights: Mapping[bytes, float],
    *,
    shortfall: int,
    spent: Collection[bytes] = (),
) -> list[tuple[bytes, int]]:
    """How much which tenants should give up, fullest first, so that ``shortfall`` is free: bytes, or objects.

    A tenant's share is its weight's part of what will be left. What others leave unused of theirs may be borrowed, so
    what is left is levelled: after giving, the givers have equally much for their weight. Tenants at or below their
    share give nothing. ``spent`` have nothing to give; then the others give more, but never below their share, and the
    sum may be less than what is short.
    """
    left = max(0, sum(used.values()) - shortfall)
    if not used:
        return []
    share_level = left / sum(weights[tenant] for tenant in used)
    givers = sorted(((used[tenant] / weights[tenant], tenant) for tenant in used if tenant not in spent), reverse=True)
    fair_level = _level(givers, weights, shortfall)
    level = max(share_level, fair_level)
    # Rounded, not up: who is exactly at its share gives nothing, whatever the division made of it.
    amounts = {tenant: round((fullness - level) * weights[tenant]) for fullness, tenant in givers if fullness > level}
    if fair_level > share_level:  # nobody is near its share: what rounding left short comes from the fullest
        for tenant in islice(amounts, max(0, shortfall - sum(amounts.values()))):
            amounts[tenant] += 1
    return [(tenant, amount) for tenant, amount in amounts.items() if amount > 0]


def _level(givers: list[tuple[float, bytes]], weights: Mapping[bytes, float], shortfall: int) -> float:
    """What a weight of 1 has that the fullest come down to when only they give."""
    weight = volume = level = 0.0
    for fullness, tenant in givers:
        if weight and level >= fullness:
            break
        weight += weights[tenant]
        volume += fullness * weights[tenant]
        level = (volume - shortfall) / weight
    return level
