"""What simulated lives come to."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Tally:
    """What has happened in one life, or in many."""

    served: int = 0
    aborted: int = 0
    restored_tokens: int = 0
    from_l3_tokens: int = 0
    daemon_kills: int = 0
    daemon_stops: int = 0
    failed_starts: int = 0  # of daemons
    power_losses: int = 0
    engine_kills: int = 0
    connections_broken: int = 0
    calls_lost: int = 0
    disk_faults: int = 0
    bits_flipped: int = 0
    observed: int = 0  # prefixes that an observer checked while others changed them
    audits: int = 0  # readings of all counters of one moment
    reloads: int = 0
    scrubbed: int = 0  # objects
    dropped: int = 0
    watched: int = 0  # events
    operated: int = 0  # lookups, pins and deletes of a neighbour
    streams_broken: int = 0
    replicas: int = 0  # of several ranks
    rank_kills: int = 0
    ranks_lost: int = 0
    ranks_stopped: int = 0
    shards_failed: int = 0  # objects that failed for one rank alone
    links_cut: int = 0
    steps: int = 0
    lives: int = 0
    traces: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
