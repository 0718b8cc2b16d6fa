"""What a Mooncake store is opened with, and the url that says it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlencode

from hicache.errors import ConfigError

METRICS_PORT = 9003  # where a master answers HTTP unless it is told otherwise
STAGING_BYTES = 256 << 20
STAGING_BYTES_MIN = 1 << 20
RAM_BYTES_MIN = 1 << 20
PROTOCOLS = ("tcp", "rdma")


@dataclass(frozen=True, slots=True)
class MooncakeSettings:
    """One store. Written as ``mooncake://master?name=value&...`` with the names below."""

    master: str  # host:port of its RPC
    metrics: str = ""  # host:port of its HTTP; empty: METRICS_PORT of the same host
    replicas: int = 1  # copies of each object, on different nodes: as many as there is room for
    soft_pin_s: int = 0  # how long an object is evicted only when nothing else can be; 0: not
    segment_bytes: int = 0  # memory that this process lends to the pool; what lies there ends with it
    ram_bytes: int = 0  # memory of this process for what is read again and again; 0: none
    protocol: str = "tcp"
    devices: str = ""  # network cards for RDMA, separated by commas; empty: all
    staging_bytes: int = STAGING_BYTES  # registered memory through which all objects pass
    call_timeout_s: float = 2.0  # for the first answer of the store; large transfers get longer

    def __post_init__(self) -> None:
        split_address("mooncake_master", self.master)
        if self.metrics:
            split_address("mooncake_metrics", self.metrics)
        at_least = (
            ("replicas", self.replicas, 1),
            ("soft_pin_s", self.soft_pin_s, 0),
            ("segment_bytes", self.segment_bytes, 0),
            ("ram_bytes", self.ram_bytes, 0),
            ("staging_bytes", self.staging_bytes, STAGING_BYTES_MIN),
            ("call_timeout_s", self.call_timeout_s, 0.1),
        )
        for name, value, minimum in at_least:
            if not value >= minimum:
                raise ConfigError(f"mooncake_{name}", value, f"at least {minimum}")
        if 0 < self.ram_bytes < RAM_BYTES_MIN:
            raise ConfigError("mooncake_ram_bytes", self.ram_bytes, f"0, or at least {RAM_BYTES_MIN}")
        if self.protocol not in PROTOCOLS:
            raise ConfigError("mooncake_protocol", self.protocol, f"one of {', '.join(PROTOCOLS)}")

    @property
    def metrics_address(self) -> tuple[str, int]:
        """Where the master answers HTTP."""
        if self.metrics:
            return split_address("mooncake_metrics", self.metrics)
        return split_address("mooncake_master", self.master)[0], METRICS_PORT

    def url(self) -> str:
        """The address that ``parse_url`` reads back to an equal value."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        chosen = {name: value for name, value in dataclasses.asdict(self).items() if value != defaults[name]}
        del chosen["master"]
        return f"mooncake://{self.master}" + (f"?{urlencode(chosen)}" if chosen else "")


def parse_url(url: str) -> MooncakeSettings:
    """The settings of ``mooncake://host:port?name=value&...``. Raises ConfigError with what would be right."""
    master, _, query = url.removeprefix("mooncake://").partition("?")
    kinds = {field.name: _KINDS[str(field.type)] for field in dataclasses.fields(MooncakeSettings)}
    del kinds["master"]
    values: dict[str, Any] = {}  # Any: each kind makes the type of its own field
    try:
        for name, value in parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)):
            values[name] = kinds[name](value)
    except (KeyError, ValueError) as error:
        raise ConfigError("backend", url, f"mooncake://host:port, then ?name=value of {', '.join(kinds)}") from error
    return MooncakeSettings(master, **values)


_KINDS = {"str": str, "int": int, "float": float}


def split_address(setting: str, address: str) -> tuple[str, int]:
    """Host and port. Raises ConfigError."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(setting, address, "host:port")
    return host.strip("[]"), int(port)
