"""Figures that are worked out from others: fairness, wear, regret, and what a load takes beside computing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.admission.replay import TenantResult
from hicache.costs.model import ModelCosts

_DAY_S = 86_400.0
_BREAK_EVEN_TOKENS = [round(256 * 2 ** (step / 2)) for step in range(21)]  # 256 to 262,144


def fairness(tenants: Iterable[TenantResult]) -> float:
    """Jain's index of what share of its prompts each tenant finds: 1 where all find the same, 1/n where one finds all.
    1 where nobody finds anything."""
    shares = [tenant.usable_tokens / tenant.input_tokens for tenant in tenants if tenant.input_tokens]
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


def drive_writes_per_day(size_bytes: float, span_s: float, drive_bytes: float) -> float:
    """How often a drive is overwritten in a day, at the rate of ``size_bytes`` in ``span_s``."""
    return size_bytes / span_s * _DAY_S / drive_bytes if span_s else 0.0


def regret(saved_share: float, bound: Mapping[str, Any]) -> tuple[float, float] | None:
    """What is saved short of Belady's rule, and of what no policy passes, as shares of those; None where nothing can
    be saved. The first is below 0 where a policy saves more than Belady's rule, which counts pages alike."""
    low = bound["belady"]["saved_share"]
    if low <= 0:
        return None
    high = max(low, (bound.get("upper") or bound["ceiling"])["saved_share"])
    return 1 - saved_share / low, 1 - saved_share / high


def break_even(name: str, costs: ModelCosts) -> dict[str, Any]:
    """What the map of loading against computing is drawn from."""
    longest = _BREAK_EVEN_TOKENS[-1]
    return {
        "rig": name,
        "token_bytes": costs.token_bytes,
        "state_bytes": costs.state_bytes,
        "tokens": _BREAK_EVEN_TOKENS,
        "prefill_s": [costs.prefill_s(0, tokens) for tokens in _BREAK_EVEN_TOKENS],
        "tiers": {
            tier: {
                "bytes_per_s": speed.bytes_per_s,
                "latency_s": speed.latency_s,
                "tokens": costs.break_even_tokens(tier, longest=longest),
            }
            for tier, speed in costs.tiers.items()
        },
    }


def gains(row: Mapping[str, Any], computed: Mapping[str, Any], load: str) -> tuple[float, float] | None:
    """Mean TTFT and throughput at saturation, each over that of computing everything; None where one was not run."""
    under, alone = _by_load(row), _by_load(computed)
    if load not in under or load not in alone or "saturated" not in under:
        return None
    ttft = under[load]["ttft_s"]["mean"] / alone[load]["ttft_s"]["mean"]
    return ttft, under["saturated"]["tokens_per_s"] / alone["saturated"]["tokens_per_s"]


def _by_load(row: Mapping[str, Any]) -> dict[str, Any]:
    timed: Sequence[Mapping[str, Any]] = row.get("queueing") or ()
    return {each["load"]: each for each in timed}
