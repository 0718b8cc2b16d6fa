"""What a daemon tells about itself: the answers of GET /v1/status and /v1/history, and the events of /v1/events.

None is what is not known.
"""

from __future__ import annotations

import msgspec

FORMAT = 1  # of all three; a field that is added does not change it

TENANTS_SHOWN = 32
NAMESPACES_SHOWN = 32
SLOWEST_SHOWN = 10
ERRORS_SHOWN = 32
WINDOW_S = 3600  # "the last hour"
SAMPLE_S = 10
SAMPLES_MAX = WINDOW_S // SAMPLE_S


class Tier(msgspec.Struct, frozen=True, kw_only=True):
    """How full one tier is."""

    name: str  # l1, l2: sums of what engines reported; ram: in front of a shared store; l3: the store
    used_bytes: int  # with overhead
    capacity_bytes: int
    objects: int | None = None
    engines: int | None = None  # that reported; None where the tier is the daemon's own


class Lookups(msgspec.Struct, frozen=True, kw_only=True):
    """What engines asked for in the last hour, in objects."""

    asked: int
    found: int
    hit_rate: float | None  # found / asked
    ceiling: float | None  # the hit rate of a store that never forgot anything, estimated


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Payload that was moved in the last hour; ``_per_s``: in the last seconds."""

    read_bytes: int
    written_bytes: int
    evicted_bytes: int  # as stored
    read_bytes_per_s: float
    written_bytes_per_s: float


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """How long calls of the last hour took; None where there was none."""

    kind: str  # lookup, get, put
    calls: int
    p50_s: float | None
    p99_s: float | None


class TenantUse(msgspec.Struct, frozen=True, kw_only=True):
    """What one tenant has; 0 as a quota: none."""

    name: str
    used_bytes: int  # with overhead
    quota_bytes: int
    objects: int
    quota_objects: int
    pinned_bytes: int
    evicted_objects: int  # since the start
    sessions: int


class SessionCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Clients that are connected, and what they have under way."""

    open: int
    limit: int
    inflight_bytes: int
    inflight_waiting: int  # transfers that wait for room


class LoopDelay(msgspec.Struct, frozen=True, kw_only=True):
    """The longest that the event loop was late in the last hour: whatever it answers waited for that long."""

    longest_s: float
    core_wait_s: float  # of that, how long its thread could run and had no core; the rest is the daemon's own


class Namespace(msgspec.Struct, frozen=True, kw_only=True):
    """A namespace that a client said hello with since the start."""

    digest: str  # in hexadecimal
    tenant: str
    model: str


class SlowObject(msgspec.Struct, frozen=True, kw_only=True):
    """One of the slowest objects of the last hour: the largest of those that were moved together."""

    at_s: float  # since the epoch
    kind: str  # get, put
    seconds: float  # in the store, for all of them
    size_bytes: int  # of this object
    objects: int  # moved together
    tenant: str
    key: str  # a short hash of the key, the same for the same object


class ErrorCount(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong in the last hour."""

    of: str  # what was counted, such as "put objects"
    reason: str
    count: int


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """All that the page, ``hicache status`` and ``hicache top`` show."""

    format: int = FORMAT
    version: str
    backend: str
    state: str  # starting, recovering, ready, draining, stopping
    at_s: float  # since the epoch
    uptime_s: float
    window_s: float  # how much of the last hour the figures "of the last hour" cover
    store_age_s: float | None  # since the store last said how full it is; None: never yet
    tiers: list[Tier]
    lookups: Lookups
    traffic: Traffic
    latency: list[Latency]
    sessions: SessionCounts
    loop_delay: LoopDelay
    tenants: list[TenantUse]  # the fullest TENANTS_SHOWN
    tenant_count: int
    namespaces: list[Namespace]  # the latest NAMESPACES_SHOWN
    namespace_count: int
    slowest: list[SlowObject]
    errors: list[ErrorCount]  # the most frequent ERRORS_SHOWN


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """SAMPLE_S of the history: rates and quantiles of that time, levels at its end."""

    at_s: float  # since the epoch, at its end
    read_bytes_per_s: float
    written_bytes_per_s: float
    hit_rate: float | None
    ceiling: float | None
    lookup_p50_s: float | None
    lookup_p99_s: float | None
    get_p50_s: float | None
    get_p99_s: float | None
    put_p50_s: float | None
    put_p99_s: float | None
    used_bytes: int
    sessions: int
    errors: int


class History(msgspec.Struct, frozen=True, kw_only=True):
    """The last hour, oldest first: at most SAMPLES_MAX."""

    format: int = FORMAT
    sample_s: int = SAMPLE_S
    samples: list[Sample]
