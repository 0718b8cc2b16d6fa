"""How full engines say that their own tiers are: L1 in GPU memory and L2 in host memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hicache.daemon.refusals import Refusal
from hicache.wire import hicached_pb2 as pb
from hicache.wire.protocol import RefusalCode

TIERS = ("l1", "l2")
CAPACITY_BYTES_MAX = 1 << 50  # of one engine; sums of all sessions stay exact in JSON


@dataclass(frozen=True, slots=True)
class TierFill:
    """``0 <= used_bytes <= capacity_bytes``, of one engine or of several."""

    used_bytes: int
    capacity_bytes: int
    engines: int = 1


def read_fills(reported: Iterable[pb.TierFill]) -> dict[str, TierFill]:
    """By tier. Raises Refusal(MALFORMED) for what cannot be."""
    fills: dict[str, TierFill] = {}
    for tier in reported:
        if tier.name not in TIERS or tier.name in fills:
            raise Refusal(RefusalCode.MALFORMED, f"tiers are {' and '.join(TIERS)}, each once, not {tier.name[:16]!r}")
        if not tier.used_bytes <= tier.capacity_bytes <= CAPACITY_BYTES_MAX:
            text = f"{tier.used_bytes} of {tier.capacity_bytes} bytes used: expected at most {CAPACITY_BYTES_MAX}"
            raise Refusal(RefusalCode.MALFORMED, text)
        fills[tier.name] = TierFill(tier.used_bytes, tier.capacity_bytes)
    return fills


def sum_fills(reports: Iterable[Mapping[str, TierFill]]) -> dict[str, TierFill]:
    """Those of all engines together, from the fastest tier."""
    sums: dict[str, TierFill] = {}
    for report in reports:
        for name, fill in report.items():
            so_far = sums.get(name, TierFill(0, 0, 0))
            sums[name] = TierFill(
                so_far.used_bytes + fill.used_bytes,
                so_far.capacity_bytes + fill.capacity_bytes,
                so_far.engines + fill.engines,
            )
    return {name: sums[name] for name in TIERS if name in sums}
