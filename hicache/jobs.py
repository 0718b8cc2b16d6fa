"""Jobs: what the directory wants done with bytes, as plain values that can be sent to another process."""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

import msgspec

from hicache.outcome import Outcome


class CopyKind(StrEnum):
    """Which way a copy goes."""

    BACKUP = "backup"  # L1 -> L2
    LOAD = "load"  # L2 -> L1
    SNAPSHOT = "snapshot"  # L1 -> L1: the live state slot into a snapshot slot
    RESTORE = "restore"  # L1 -> L1: a snapshot slot into a live slot, transient fields emptied
    RESET = "reset"  # a live state slot emptied, all fields; source equals target
    CLEAR = "clear"  # the transient fields of a live state slot emptied; source equals target
    ARRIVE = "arrive"  # nothing is copied: done when what was loaded by layer before has arrived, with the same items


class CopyItem(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One page or state slot of one group. Slots are indices into the group's pool of the tier."""

    group: int
    source: int
    target: int


class TransferItem(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One object between L2 and L3. ``block_key`` and ``group`` name it; each rank adds its shard."""

    group: int
    block_key: bytes
    slot: int


class LookupItem(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One object to ask L3 for: each rank for its own shards."""

    group: int
    block_key: bytes


class CopyJob(msgspec.Struct, frozen=True, tag=True):
    """Move pages or states within this engine. LOAD into a state group's slot empties its transient fields.

    A LOAD ``beside_compute`` is for slots that nobody computes on before it is answered: it starts in its turn, and no
    step waits for its end.
    A LOAD ``by_layer`` is done when it is certain to come, and compute waits for each layer: its sources and targets
    are in use until an ARRIVE that was emitted after that is done.
    """

    job_id: int
    kind: CopyKind
    items: tuple[CopyItem, ...]
    beside_compute: bool = False
    by_layer: bool = False


class FetchJob(msgspec.Struct, frozen=True, tag=True):
    """L3 -> L2."""

    job_id: int
    items: tuple[TransferItem, ...]


class StoreJob(msgspec.Struct, frozen=True, tag=True):
    """L2 -> L3."""

    job_id: int
    items: tuple[TransferItem, ...]


class LookupJob(msgspec.Struct, frozen=True, tag=True):
    """Which objects does L3 hold? Each rank asks its own L3 for what it would fetch."""

    job_id: int
    items: tuple[LookupItem, ...]


Job: TypeAlias = CopyJob | FetchJob | StoreJob | LookupJob


class Completion(msgspec.Struct, frozen=True):
    """What became of a job on one rank: an outcome for each item. Sent once, when the rank touches no byte any more;
    of a LOAD by layer, when its bytes are certain to come."""

    job_id: int
    outcomes: tuple[Outcome, ...]
    seconds: float = 0.0  # how long the rank worked on it
