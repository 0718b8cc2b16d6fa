"""What can be set about a client of hicached, with the values that suit a daemon on the same node."""

from __future__ import annotations

from dataclasses import dataclass, field

from hicache.breaker import BreakerLimits
from hicache.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Seconds throughout."""

    lease_s: float = 5.0  # how long a looked-up object is protected from eviction; hicached may allow less
    connect_timeout_s: float = 2.0  # for a session, and again for its memory or its bulk socket
    ping_timeout_s: float = 2.0  # a daemon that answers nothing for so long has lost its session
    heartbeat_s: float = 5.0  # an idle session is pinged so often
    report_s: float = 10.0  # hicached is told so often how full the tiers of this engine are
    backoff_s: float = 0.05  # before the second attempt to connect; doubles with every further one
    backoff_s_max: float = 1.0  # so a daemon that comes back is found within about a second
    refused_retry_s: float = 30.0  # a refusal lasts until somebody changes something
    close_timeout_s: float = 5.0  # how long `close` waits for bytes that hicached may still touch
    notice_interval_s: float = 60.0  # a kind of fault is logged once per so long
    breaker: BreakerLimits = field(default_factory=BreakerLimits)

    def __post_init__(self) -> None:
        for setting in self.__dataclass_fields__:
            value = getattr(self, setting)
            if setting != "breaker" and setting != "lease_s" and value <= 0:
                raise ConfigError(f"l3.{setting}", value, "seconds above 0")
        if self.lease_s < 0:
            raise ConfigError("l3.lease_s", self.lease_s, "seconds, or 0 for no lease")
        if self.backoff_s_max < self.backoff_s:
            raise ConfigError("l3.backoff_s_max", self.backoff_s_max, f"at least backoff_s = {self.backoff_s}")
