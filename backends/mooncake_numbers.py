"""How it stands with a Mooncake store: what /metrics shows of its breakers, its nodes and its calls."""

from __future__ import annotations

from collections.abc import Iterator

from hicache.backends.base import Number
from hicache.backends.mooncake_link import Link
from hicache.breaker import BreakerState, BreakerStatus


def mooncake_numbers(link: Link, puts: BreakerStatus) -> Iterator[Number]:
    """``puts`` is the breaker in front of puts alone, which opens when nodes do not take them."""
    master = link.status()
    yield Number(
        "hicache_mooncake_breaker_open", "1 while the master is not asked.", master.state is not BreakerState.CLOSED
    )
    yield Number("hicache_mooncake_put_breaker_open", "1 while nothing is put.", puts.state is not BreakerState.CLOSED)
    yield Number("hicache_mooncake_silent_nodes", "Nodes that are not read from.", len(link.suspects()))
    yield Number("hicache_mooncake_running_calls", "Calls that have not come back.", link.running)
    yield Number("hicache_mooncake_staging_free_bytes", "Registered memory that is free.", link.staging_free_bytes)
    counters = (
        ("hicache_mooncake_breaker_opened", "How often the master began not to answer.", master.opened),
        ("hicache_mooncake_failed_calls", "Calls that the master did not answer.", master.failures),
        ("hicache_mooncake_rejected_calls", "Calls that were not made while it does not.", master.rejected),
        ("hicache_mooncake_put_breaker_opened", "How often puts were stopped.", puts.opened),
    )
    for name, description, value in counters:
        yield Number(name, description, value, is_counter=True)
