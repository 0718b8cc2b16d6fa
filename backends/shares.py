"""Who gives up how much when a store is full: as water finds its level, those who have most give first."""

from __future__ import annotations

from collections.abc import Collection, Mapping


def gives(
    used_bytes: Mapping[bytes, int],
    weights: Mapping[bytes, float],
    *,
    shortfall_bytes: int,
    spent: Collection[bytes] = (),
) -> list[tuple[bytes, int]]:
    """How many bytes which tenants should give up, fullest first, so that ``shortfall_bytes`` become free.

    A tenant's share is its weight's part of what will be left. What others leave unused of theirs may be borrowed, so
    what is left is levelled: after giving, the givers have equally much for their weight. Tenants at or below their
    share give nothing. ``spent`` have nothing to give; then the others give more, but never below their share, and the
    sum may be less than what is short.
    """
    left_bytes = max(0, sum(used_bytes.values()) - shortfall_bytes)
    if not used_bytes:
        return []
    share_level = left_bytes / sum(weights[tenant] for tenant in used_bytes)
    givers = sorted(
        ((used_bytes[tenant] / weights[tenant], tenant) for tenant in used_bytes if tenant not in spent), reverse=True
    )
    level = max(share_level, _level(givers, weights, shortfall_bytes))
    # Rounded, not up: who is exactly at its share gives nothing, whatever the division made of it.
    amounts = [(tenant, round((fullness - level) * weights[tenant])) for fullness, tenant in givers]
    return [(tenant, amount) for tenant, amount in amounts if amount > 0]


def _level(givers: list[tuple[float, bytes]], weights: Mapping[bytes, float], shortfall_bytes: int) -> float:
    """Bytes for a weight of 1 that the fullest come down to when only they give."""
    weight = volume = level = 0.0
    for fullness, tenant in givers:
        if weight and level >= fullness:
            break
        weight += weights[tenant]
        volume += fullness * weights[tenant]
        level = (volume - shortfall_bytes) / weight
    return level
