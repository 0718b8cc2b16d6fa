"""The client of hicached. Importing it loads gRPC, which the core of hicache does without."""

from __future__ import annotations

from hicache.client.daemon_l3 import DaemonL3
from hicache.client.settings import ClientSettings
from hicache.client.status import L3Status, OperationCounts, ProbeReport
from hicache.client.supervisor import ClientState
from hicache.client.watch import Watch, WatchEvent, WatchKind

__all__ = [
    "ClientSettings",
    "ClientState",
    "DaemonL3",
    "L3Status",
    "OperationCounts",
    "ProbeReport",
    "Watch",
    "WatchEvent",
    "WatchKind",
]
