"""hicache: a hierarchical KV-cache storage service for LLM inference.

``from hicache import HiCache, CacheSpec, PagedGroup, StateGroup, StateField``. Names are loaded when they are first
used: importing hicache loads neither torch nor gRPC.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hicache.cache import HiCache
    from hicache.errors import ConfigError, HiCacheError, RankLost, StateNotCommitted, UsageError
    from hicache.policies.prefetch import PrefetchPolicy
    from hicache.policies.snapshot import SnapshotPolicy
    from hicache.ranks.settings import Ranks
    from hicache.ranks.worker import RankWorker
    from hicache.sequence import Hit, Request, Restored, Stored
    from hicache.slot_cache import SlotCache, SlotRequest
    from hicache.slot_directory import Step
    from hicache.slot_request import SlotLoad, SlotSave
    from hicache.spec import CacheSpec, HeadSplit, PagedGroup, StateField, StateGroup

__all__ = [
    "CacheSpec",
    "ConfigError",
    "HeadSplit",
    "HiCache",
    "HiCacheError",
    "Hit",
    "PagedGroup",
    "PrefetchPolicy",
    "RankLost",
    "RankWorker",
    "Ranks",
    "Request",
    "Restored",
    "SlotCache",
    "SlotLoad",
    "SlotRequest",
    "SlotSave",
    "SnapshotPolicy",
    "StateField",
    "StateGroup",
    "StateNotCommitted",
    "Step",
    "Stored",
    "UsageError",
]

_MODULES = {
    "HiCache": "hicache.cache",
    **dict.fromkeys(("ConfigError", "HiCacheError", "RankLost", "StateNotCommitted", "UsageError"), "hicache.errors"),
    "RankWorker": "hicache.ranks.worker",
    "Ranks": "hicache.ranks.settings",
    **dict.fromkeys(("Hit", "Request", "Restored", "Stored"), "hicache.sequence"),
    "PrefetchPolicy": "hicache.policies.prefetch",
    **dict.fromkeys(("SlotCache", "SlotRequest"), "hicache.slot_cache"),
    **dict.fromkeys(("SlotLoad", "SlotSave"), "hicache.slot_request"),
    "Step": "hicache.slot_directory",
    "SnapshotPolicy": "hicache.policies.snapshot",
    **dict.fromkeys(("CacheSpec", "HeadSplit", "PagedGroup", "StateField", "StateGroup"), "hicache.spec"),
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
