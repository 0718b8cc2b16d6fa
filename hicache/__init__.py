"""hicache: a hierarchical KV-cache storage service for LLM inference.

``from hicache import HiCache, CacheSpec, PagedGroup, StateGroup, StateField``. Names are loaded when they are first
used: importing hicache loads neither torch nor gRPC.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hicache.cache import HiCache
    from hicache.errors import ConfigError, HiCacheError, StateNotCommitted, UsageError
    from hicache.policies.prefetch import PrefetchPolicy
    from hicache.policies.snapshot import SnapshotPolicy
    from hicache.sequence import Hit, Request, Restored
    from hicache.spec import CacheSpec, PagedGroup, StateField, StateGroup

__all__ = [
    "CacheSpec",
    "ConfigError",
    "HiCache",
    "HiCacheError",
    "Hit",
    "PagedGroup",
    "PrefetchPolicy",
    "Request",
    "Restored",
    "SnapshotPolicy",
    "StateField",
    "StateGroup",
    "StateNotCommitted",
    "UsageError",
]

_MODULES = {
    "HiCache": "hicache.cache",
    **dict.fromkeys(("ConfigError", "HiCacheError", "StateNotCommitted", "UsageError"), "hicache.errors"),
    "PrefetchPolicy": "hicache.policies.prefetch",
    "SnapshotPolicy": "hicache.policies.snapshot",
    **dict.fromkeys(("Hit", "Request", "Restored"), "hicache.sequence"),
    **dict.fromkeys(("CacheSpec", "PagedGroup", "StateField", "StateGroup"), "hicache.spec"),
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'hicache' has no attribute {name!r}")
    try:
        return getattr(import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            f"hicache.{name} needs torch, which is not installed: pip install 'hicache[engine]'", name="torch"
        ) from error
