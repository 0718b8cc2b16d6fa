"""Policies: small interchangeable decisions, the same classes in production and in the benchmarks."""

from __future__ import annotations

from typing import TypeVar

from hicache.errors import ConfigError

Policy = TypeVar("Policy")


def policy_of(setting: str, policy: Policy | None, kind: type[Policy]) -> Policy:
    """``policy``, or for None one with the defaults of its ``kind``. Raises ConfigError for anything else."""
    if policy is None:
        return kind()
    if not isinstance(policy, kind):
        raise ConfigError(setting, policy, f"a {kind.__name__}, or None for its defaults")
    return policy
