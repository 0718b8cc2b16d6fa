"""The eviction and write policy of one cache, which may be one object."""

from __future__ import annotations

from hicache.policies.eviction import EvictionFactory
from hicache.policies.eviction_choice import eviction_policy_of
from hicache.policies.own import Continuation, ContinuationEviction
from hicache.policies.write import WritePolicy, write_policy_of


def policies_of(
    eviction: str | EvictionFactory, write_policy: str | WritePolicy
) -> tuple[EvictionFactory, WritePolicy]:
    """Both by name, or as they are. Where both are Continuation they share what they learn. Raises ConfigError."""
    policy = write_policy_of(write_policy)
    if eviction in ("continuation", ContinuationEviction) and isinstance(policy, Continuation):
        return policy.eviction, policy
    return eviction_policy_of(eviction), policy
