"""Eviction policies by name."""

from __future__ import annotations

from functools import partial
from typing import Any

from hicache.errors import ConfigError
from hicache.policies.eviction import Describe, EvictionFactory, EvictionPolicy, Lru
from hicache.policies.eviction_kinds import Fifo, Gdsf, Lfu, Marconi, TailTrim, Ttl
from hicache.policies.eviction_queues import Arc, RandomLeaf, S3Fifo, Sieve, Slru
from hicache.policies.own import ContinuationEviction


def lru(items: Describe[Any]) -> EvictionPolicy[Any]:
    """Least recently used first."""
    return Lru(items.last_use)


EVICTION_POLICIES: dict[str, EvictionFactory] = {
    "lru": lru,
    "fifo": Fifo,
    "lfu": Lfu,
    "slru": Slru,
    "s3_fifo": S3Fifo,
    "sieve": Sieve,
    "arc": Arc,
    "gdsf": Gdsf,
    "lfu_da": partial(Gdsf, prefill=None),
    "marconi": Marconi,
    "ttl": Ttl,
    "tail_trim": TailTrim,
    "random_leaf": RandomLeaf,
    "continuation": ContinuationEviction,
}


def eviction_policy_of(choice: str | EvictionFactory) -> EvictionFactory:
    """What makes policies of that name, or ``choice`` itself, with parameters bound. Raises ConfigError."""
    if isinstance(choice, str) and choice in EVICTION_POLICIES:
        return EVICTION_POLICIES[choice]
    if isinstance(choice, str) or not callable(choice):
        raise ConfigError(
            "eviction", choice, f"{', '.join(EVICTION_POLICIES)}, or a class of hicache.policies with its parameters"
        )
    return choice
