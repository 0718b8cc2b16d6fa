"""The settings of hicached: a TOML file and flags with the same names, checked one by one and against each other."""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from hicache.backends.file_settings import DIRECT_READS, FileSettings
from hicache.backends.mooncake_settings import PROTOCOLS, STAGING_BYTES, MooncakeSettings
from hicache.backends.tenant_limits import PIN_SHARE, PINNED_OBJECTS_MAX
from hicache.daemon.config_checks import AT_MOST, check_together
from hicache.daemon.settings import (
    Address,
    HostPort,
    Parser,
    choice,
    count,
    file_mode,
    file_path,
    find_credential,
    flag,
    number,
    parse_address,
    parse_tcp,
    remote_address,
    required_path,
    secret_file,
    size,
    socket_path,
    tcp_address,
    tcp_or_unix_address,
    text,
)
from hicache.daemon.tenants import PARSERS, TTL_S_MAX, TenantSettings
from hicache.errors import ConfigError
from hicache.wire.protocol import PING_INTERVAL_MS_MIN

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

FILE_BYTES_MAX = MIB  # of the configuration


T = TypeVar("T")

NO_ENVIRONMENT: Mapping[str, str] = MappingProxyType({})


def _setting(default: T, parse: Callable[[str, object], object], description: str) -> T:
    metadata = {"parse": parse, "description": description}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class DaemonConfig:
    """Every setting with its default, in the order of the documentation. Built by ``load_config``, which checks it."""

    socket: str = _setting("/run/hicached/hicached.sock", socket_path, "Unix socket of the gRPC service")
    socket_mode: str = _setting("0600", file_mode, "permission bits of the Unix sockets")
    listen: str = _setting("", tcp_address, "TCP address of the gRPC service; empty: none; needs tenants_file")
    bulk_listen: str = _setting(
        "", tcp_address, "TCP address of the bulk socket; empty: host of listen and the next port; needs listen"
    )
    listen_plaintext: bool = _setting(
        False,
        flag,
        "listen without TLS at an address that other machines reach: tokens and bytes can be read on the way",
    )
    tls_certificate: str = _setting(
        "", secret_file, "PEM file: certificate chain for listen and bulk_listen; empty: no TLS"
    )
    tls_key: str = _setting("", secret_file, "PEM file: private key of tls_certificate")
    tls_client_ca: str = _setting("", secret_file, "PEM file: CAs of the certificates that clients need")
    tls_clients: str = _setting(
        "certificate", choice("certificate", "token"), "what clients over TLS show: a certificate too, or a token alone"
    )
    http: str = _setting(
        "127.0.0.1:9470",
        tcp_or_unix_address,
        "address or Unix socket of the status page, /metrics, /healthz, /readyz; empty: none",
    )
    backend: str = _setting("lmdb", choice("lmdb", "file", "mooncake"), "what objects are stored in")
    path: str = _setting("/var/lib/hicached", required_path, "directory of the stored objects")
    persist: bool = _setting(True, flag, "what is stored is there after the next start; false: it goes with the daemon")
    capacity_bytes: int = _setting(10 * GIB, size(MIB), "space for objects, with headers and rounding")
    high_watermark: float = _setting(0.95, number(0.01, 1.0), "share of the capacity at which eviction starts")
    low_watermark: float = _setting(0.90, number(0.01, 1.0), "share of the capacity at which eviction stops")
    free_space_floor_bytes: int = _setting(GIB, size(0), "free space on the medium below which nothing is stored")
    objects_max: int = _setting(
        0, count(0, 1 << 30), "most objects, 120 bytes of memory each; 0: what the capacity holds, 2^24 at most"
    )
    encryption_keys: str = _setting(
        "", secret_file, "file with the keys that stored objects are encrypted under; empty: plain"
    )
    file_shared: bool = _setting(False, flag, "several daemons use the directory of the file backend at a time")
    file_fsync: bool = _setting(False, flag, "the file backend acknowledges what is on the medium only")
    file_direct: str = _setting("auto", choice(*DIRECT_READS), "whether the file backend reads past the page cache")
    mooncake_master: str = _setting("", remote_address, "host:port of the Mooncake master; needed for mooncake")
    mooncake_metrics: str = _setting("", remote_address, "host:port of its HTTP; empty: port 9003 of the same host")
    mooncake_replicas: int = _setting(1, count(1, 64), "copies of each object, on different nodes")
    mooncake_soft_pin_s: int = _setting(
        0, count(0, 86_400), "how long an object is evicted last; 0: no longer than others"
    )
    mooncake_segment_bytes: int = _setting(0, size(0), "memory that this daemon lends to the pool")
    mooncake_ram_bytes: int = _setting(GIB, size(0), "memory for what is read again and again; 0: none")
    mooncake_protocol: str = _setting("tcp", choice(*PROTOCOLS), "how bytes travel between the nodes")
    mooncake_devices: str = _setting("", text, "network cards for rdma, separated by commas; empty: all")
    tenants_file: str = _setting(
        "", secret_file, "tenants and their tokens; empty: one tenant, default, without a token"
    )
    operators_file: str = _setting("", secret_file, "who may use the admin API beside root and the daemon's user")
    quota_bytes: int = _setting(0, PARSERS["quota_bytes"], "space of each tenant, as stored; 0: no quota")
    quota_objects: int = _setting(0, PARSERS["quota_objects"], "objects of each tenant; 0: no quota")
    ttl_s: float = _setting(0.0, PARSERS["ttl_s"], "how long an unused object is kept; 0: until it is evicted")
    pinned_objects_max: int = _setting(
        PINNED_OBJECTS_MAX, PARSERS["pinned_objects_max"], "objects that each tenant may pin; 0: none"
    )
    pin_share: float = _setting(PIN_SHARE, number(0, 0.5), "share of the capacity that all pins protect at most")
    pin_s_max: float = _setting(86_400.0, number(1, TTL_S_MAX), "longest pin; a longer request is cut to it")
    calls_per_s_max: float = _setting(0.0, PARSERS["calls_per_s_max"], "calls a second of each tenant; 0: any number")
    bytes_per_s_max: int = _setting(0, PARSERS["bytes_per_s_max"], "payload a second of each tenant; 0: any amount")
    object_bytes_max: int = _setting(64 * MIB, size(1), "largest object")
    batch_keys_max: int = _setting(16_384, count(1, 100_000), "most keys in one call")
    batch_bytes_max: int = _setting(256 * MIB, size(1), "most payload in one call")
    session_inflight_bytes_max: int = _setting(512 * MIB, size(1), "most payload that one session moves at a time")
    inflight_bytes_max: int = _setting(GIB, size(1), "most payload that all sessions move at a time")
    regions_bytes_max: int = _setting(0, size(0), "most memory of clients that is mapped; 0: what the machine has")
    tenant_regions_bytes_max: int = _setting(0, size(0), "that of one tenant; 0: half with several tenants, else all")
    sessions_max: int = _setting(64, count(1, 4096), "most clients at a time")
    tenant_sessions_max: int = _setting(
        0, count(0, 4096), "those of one tenant; 0: half of sessions_max with several tenants, else all"
    )
    session_keepalive_s: float = _setting(
        20.0, number(PING_INTERVAL_MS_MIN / 1000, 3600), "silence after which a client is pinged, and dropped if mute"
    )
    lease_ms_max: int = _setting(60_000, count(1, 3_600_000), "longest lease; a longer request is cut to it")
    call_timeout_s_max: float = _setting(60.0, number(0.1, 3600), "longest time for one call")
    drain_s: float = _setting(
        2.0, number(0, 3600), "how long a stop waits for what runs and for leases; new work is refused meanwhile"
    )
    io_threads: int = _setting(4, count(1, 64), "threads that read from and write to the backend")
    log_level: str = _setting(
        "info", choice("debug", "info", "warning", "error"), "least important level that is logged"
    )
    log_format: str = _setting("console", choice("console", "json"), "how log lines look")
    metrics_tenants_max: int = _setting(
        20, count(0, 4096), "tenants with labels of their own in metrics; the others are one, other"
    )
    trace_file: str = _setting("", file_path, "file that gets a trace of all lookups, without keys; empty: none")
    trace_bytes_max: int = _setting(256 * MIB, size(1), "size at which the trace ends")
    trace_block_tokens: int = _setting(64, count(1, 65_536), "tokens of a page of the clients, for the trace")
    ready_file: str = _setting("", file_path, "JSON file with pid and addresses, written when ready; empty: none")

    @property
    def listen_address(self) -> HostPort | None:
        """The TCP address of the gRPC service, or None."""
        return parse_tcp("listen", self.listen)

    @property
    def bulk_listen_address(self) -> HostPort | None:
        """The TCP address of the bulk socket, or None."""
        listen = self.listen_address
        if listen is None or self.bulk_listen:
            return parse_tcp("bulk_listen", self.bulk_listen)
        return HostPort(listen.host, listen.port + 1 if listen.port else 0)

    @property
    def http_address(self) -> Address:
        """Where HTTP is served, or None."""
        return parse_address("http", self.http)

    @property
    def tenant_defaults(self) -> TenantSettings:
        """The settings of a tenant that has none of its own."""
        return TenantSettings(**{name: getattr(self, name) for name in PARSERS if name != "weight"})

    @property
    def memory_socket(self) -> str:
        """The Unix socket that takes memory of clients."""
        return self.socket + ".memory"

    @property
    def bulk_socket(self) -> str:
        """The Unix socket on which objects move."""
        return self.socket + ".bulk"

    @property
    def admin_socket(self) -> str:
        """The Unix socket of the admin API."""
        return self.socket + ".admin"

    @property
    def lock_file(self) -> str:
        """The file whose lock says who owns the socket."""
        return self.socket + ".lock"

    @property
    def socket_mode_bits(self) -> int:
        """``socket_mode`` as a number."""
        return int(self.socket_mode, 8)

    @property
    def is_shared(self) -> bool:
        """Whether others change what is stored, too."""
        return self.backend == "mooncake" or (self.backend == "file" and self.file_shared)

    @property
    def backend_url(self) -> str:
        """The address that ``open_backend`` takes."""
        if self.backend == "lmdb":
            return f"lmdb://{self.path}"
        if self.backend == "file":
            settings = FileSettings(shared=self.file_shared, fsync=self.file_fsync, direct=self.file_direct)
            return settings.url(self.path)
        return MooncakeSettings(
            self.mooncake_master,
            metrics=self.mooncake_metrics,
            replicas=self.mooncake_replicas,
            soft_pin_s=self.mooncake_soft_pin_s,
            segment_bytes=self.mooncake_segment_bytes,
            ram_bytes=self.mooncake_ram_bytes,
            protocol=self.mooncake_protocol,
            devices=self.mooncake_devices,
            staging_bytes=max(STAGING_BYTES, 4 * self.object_bytes_max),
        ).url()


FIELDS = {field.name: field for field in dataclasses.fields(DaemonConfig)}


def describe(name: str) -> str:
    """What a setting is for, in one line."""
    return str(FIELDS[name].metadata["description"])


def load_config(
    file: str | None, flags: Mapping[str, object], environment: Mapping[str, str] = NO_ENVIRONMENT
) -> DaemonConfig:
    """Settings from ``file`` (None: none), overridden by ``flags`` (values of None are absent), checked.

    ``environment`` tells where the service manager has put credentials.

    Raises ConfigError with the setting, the value and what would be right.
    """
    given = _read_toml(file) if file is not None else {}
    given |= {name: value for name, value in flags.items() if value is not None}
    values: dict[str, Any] = {}  # Any: each parser returns the type of its own field
    for name, value in given.items():
        if name not in FIELDS:
            raise ConfigError(name, value, _known_settings(name))
        parse: Parser = FIELDS[name].metadata["parse"]
        values[name] = parse(name, value)
        if parse is secret_file:
            values[name] = find_credential(name, values[name], environment)
    config = _fit_defaults(DaemonConfig(**values), given=frozenset(values))
    check_together(config)
    return config


def to_toml(config: DaemonConfig) -> str:
    """The settings as a TOML file that ``load_config`` reads back to an equal value."""
    lines = []
    for name in FIELDS:
        value = getattr(config, name)
        written = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
        lines.append(f"# {describe(name)}\n{name} = {written}\n")
    return "\n".join(lines)


def _read_toml(file: str) -> dict[str, object]:
    try:
        with open(file, "rb") as source:
            raw = source.read(FILE_BYTES_MAX + 1)
        if len(raw) > FILE_BYTES_MAX:
            raise ConfigError("config", file, f"a file of at most {FILE_BYTES_MAX} bytes")
        return tomllib.loads(raw.decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError("config", file, f"a readable file ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("config", file, f"a TOML file ({error})") from error


def _known_settings(name: str) -> str:
    close = difflib.get_close_matches(name, FIELDS, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"a known setting; {hint}the settings are {', '.join(FIELDS)}"


def _fit_defaults(config: DaemonConfig, *, given: frozenset[str]) -> DaemonConfig:
    """Defaults give way to what was set, so that one bound can be changed alone."""
    fitted = {name: getattr(config, name) for pair in AT_MOST for name in pair}
    for name in ("object_bytes_max", "session_inflight_bytes_max"):
        if name not in given:
            uppers = ("batch_bytes_max", "session_inflight_bytes_max", "inflight_bytes_max")
            ceilings = [fitted[upper] for upper in uppers if upper in given and upper != name]
            if name == "object_bytes_max":
                ceilings.append(fitted["capacity_bytes"])
            fitted[name] = min([fitted[name], *ceilings])
    for lower, upper in AT_MOST[:3]:
        if upper not in given:
            fitted[upper] = max(fitted[upper], fitted[lower])
    return dataclasses.replace(config, **fitted)
