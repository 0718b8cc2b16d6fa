"""What the caches of an engine are told beside their memory: each setting once, with what it is for."""

from __future__ import annotations

from typing import TypedDict

from hicache.policies.eviction import EvictionFactory
from hicache.policies.prefetch import PrefetchPolicy
from hicache.policies.read import ReadFactory
from hicache.policies.snapshot import SnapshotPolicy
from hicache.policies.write import WritePolicy


class FrontSettings(TypedDict, total=False):
    """Of every cache.

    ``prefetch`` says how long requests wait for L3. ``write_policy`` is ``write_through``, ``write_through_selective``,
    ``write_back``, or one of hicache.policies.write; ``eviction`` a name of hicache.policies.eviction_choice, or what
    makes such policies; ``read_policy`` a name of hicache.policies.read, or what makes one of costs (docs/policies.md).
    """

    prefetch: PrefetchPolicy | None
    write_policy: str | WritePolicy
    eviction: str | EvictionFactory
    read_policy: str | ReadFactory


class CacheSettings(FrontSettings, total=False):
    """Of a HiCache.

    ``double_buffering`` says that the engine reads states from ``Request.state_source``: they are not copied within L1
    then. ``layerwise`` says that its forward calls ``wait_layer`` for each layer: ``load`` returns when the copies are
    on their way then. ``snapshot_policy``: where states are kept.
    """

    snapshot_policy: SnapshotPolicy | None
    double_buffering: bool
    layerwise: bool


class SlotSettings(FrontSettings, total=False):
    """Of a SlotCache.

    ``one_numbering``: slot ``n`` of all groups is the same memory, which belongs to one of them at a time.
    ``tells_changes``: see ``SlotCache.take_changes``.
    """

    one_numbering: bool
    tells_changes: bool
