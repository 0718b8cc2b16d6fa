"""What the pool of a Mooncake store holds, as its master tells it now and then."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from hicache.backends.base import Usage
from hicache.backends.mooncake_identity import STORE_ID_STORED_BYTES
from hicache.backends.mooncake_layout import HEADER_BYTES
from hicache.backends.mooncake_master import Master, PoolReading
from hicache.backends.mooncake_settings import MooncakeSettings
from hicache.errors import BackendError, ConfigError
from hicache.notices import Notices


class PoolUsage:
    """Asks the master at most once in ``age_max_s``; while it does not answer the last reading stays. Thread-safe."""

    def __init__(
        self,
        master: Master,
        settings: MooncakeSettings,
        *,
        age_max_s: float,
        clock: Callable[[], float],
        notices: Notices,
    ) -> None:
        """Raises ConfigError where the master does not tell it."""
        self._master = master
        self._age_max_s = age_max_s
        self._clock = clock
        self._notices = notices
        self._lock = threading.Lock()
        self._read_at_s = -math.inf
        self._reading = _first_reading(master, settings)

    def usage(self) -> Usage:
        """Of all users and all copies, without the object that names the store."""
        with self._lock:
            if self._clock() - self._read_at_s >= self._age_max_s:
                self._read_at_s = self._clock()
                try:
                    self._reading = self._master.reading()
                except (OSError, BackendError) as error:
                    self._notices.warning("usage", "the Mooncake master does not tell its usage (%s)", error)
            reading = self._reading
        objects = max(0, reading.objects - 1)
        stored_bytes = max(0, reading.allocated_bytes - STORE_ID_STORED_BYTES)
        payload_bytes = max(0, stored_bytes - objects * HEADER_BYTES)
        return Usage(objects, payload_bytes, stored_bytes, capacity_bytes=max(reading.capacity_bytes, stored_bytes))


def _first_reading(master: Master, settings: MooncakeSettings) -> PoolReading:
    try:
        return master.reading()
    except (OSError, BackendError) as error:
        address = "{}:{}".format(*settings.metrics_address)
        raise ConfigError("mooncake_metrics", address, f"the HTTP address of the master ({error})") from error
