"""What settings of hicached must be to each other."""

from __future__ import annotations

import ipaddress
import os
from typing import TYPE_CHECKING

from hicache.errors import ConfigError
from hicache.wire.protocol import MESSAGE_BYTES_MAX, message_bytes_needed

if TYPE_CHECKING:  # which imports this
    from hicache.daemon.config import DaemonConfig

# The left bound must not exceed the right one: what one lets through, the other could never.
AT_MOST = (
    ("object_bytes_max", "batch_bytes_max"),
    ("object_bytes_max", "session_inflight_bytes_max"),
    ("session_inflight_bytes_max", "inflight_bytes_max"),
    ("object_bytes_max", "capacity_bytes"),
)


def check_together(config: DaemonConfig) -> None:
    """Raises ConfigError with the setting that contradicts another one, and what would be right."""
    if config.low_watermark >= config.high_watermark:
        raise ConfigError(
            "low_watermark", config.low_watermark, f"less than high_watermark, which is {config.high_watermark}"
        )
    if config.backend == "mooncake" and not config.mooncake_master:
        raise ConfigError("mooncake_master", config.mooncake_master, "host:port of the master when backend is mooncake")
    if config.file_shared and config.backend != "file":
        raise ConfigError("file_shared", True, f"false, or backend = 'file' instead of {config.backend!r}")
    if config.listen and not config.tenants_file:
        raise ConfigError(
            "listen", config.listen, 'tenants_file to be set as well (a TCP port is open to others), or listen = ""'
        )
    _check_bulk_listen(config)
    _check_tls(config)
    if config.encryption_keys and config.is_shared:
        expected = '"", since other daemons that share the store would go on with a key that is dropped here'
        raise ConfigError("encryption_keys", config.encryption_keys, expected)
    if not config.persist and config.is_shared:
        raise ConfigError("persist", False, "true, since what is stored belongs to all that share the store")
    for lower, upper in AT_MOST:
        _check_at_most(config, lower, upper)
    _check_at_most(config, "tenant_sessions_max", "sessions_max")
    if config.regions_bytes_max:
        _check_at_most(config, "tenant_regions_bytes_max", "regions_bytes_max")
    needed = message_bytes_needed(batch_keys_max=config.batch_keys_max)
    if needed > MESSAGE_BYTES_MAX:
        raise ConfigError(
            "batch_keys_max",
            config.batch_keys_max,
            f"so few keys that a message stays within {MESSAGE_BYTES_MAX} bytes",
        )
    _check_paths(config)


def _check_tls(config: DaemonConfig) -> None:
    files = {name: getattr(config, name) for name in ("tls_certificate", "tls_key", "tls_client_ca")}
    if not config.tls_certificate:
        for name, file in files.items():
            if file:
                raise ConfigError(name, file, f'tls_certificate to be set as well, or {name} = ""')
        addresses = {"listen": config.listen_address, "bulk_listen": config.bulk_listen_address}
        for name, address in addresses.items():
            if (
                address is not None
                and not ipaddress.ip_address(address.host).is_loopback
                and not config.listen_plaintext
            ):
                expected = "tls_certificate and tls_key to be set, a loopback address, or listen_plaintext = true"
                raise ConfigError(name, str(address), expected)
        return
    if not config.listen:
        raise ConfigError(
            "tls_certificate", config.tls_certificate, 'listen to be set as well, or tls_certificate = ""'
        )
    if config.listen_plaintext:
        raise ConfigError("listen_plaintext", True, "false where there is a tls_certificate")
    if not config.tls_key:
        raise ConfigError("tls_key", "", "the PEM file with the private key of tls_certificate")
    if bool(config.tls_client_ca) != (config.tls_clients == "certificate"):
        expected = "the PEM file of the CAs of clients, or tls_clients = 'token' and no tls_client_ca"
        raise ConfigError("tls_client_ca", config.tls_client_ca, expected)


def _check_bulk_listen(config: DaemonConfig) -> None:
    listen, bulk = config.listen_address, config.bulk_listen_address
    if listen is None and bulk is not None:
        raise ConfigError("bulk_listen", config.bulk_listen, 'listen to be set as well, or bulk_listen = ""')
    if bulk is not None and bulk.port > 65_535:
        raise ConfigError("bulk_listen", "", f"an address, since listen = {config.listen!r} has no next port")
    if bulk is not None and bulk == listen and bulk.port:
        raise ConfigError("bulk_listen", config.bulk_listen, f"an address with a port other than that of {listen}")


def _check_at_most(config: DaemonConfig, lower: str, upper: str) -> None:
    if getattr(config, lower) > getattr(config, upper):
        raise ConfigError(lower, getattr(config, lower), f"at most {upper}, which is {getattr(config, upper)}")


def _check_paths(config: DaemonConfig) -> None:
    if not os.path.isdir(os.path.dirname(config.socket)):
        folder = os.path.dirname(config.socket)
        raise ConfigError("socket", config.socket, f"a path in a directory that exists (mkdir -p {folder})")
    if config.ready_file and (
        os.path.isdir(config.ready_file) or not os.path.isdir(os.path.dirname(os.path.abspath(config.ready_file)))
    ):
        raise ConfigError("ready_file", config.ready_file, "a file in a directory that exists")
    taken = {
        config.socket: "socket",
        config.memory_socket: "the memory socket",
        config.bulk_socket: "the bulk socket",
        config.admin_socket: "the admin socket",
        config.lock_file: "the lock file",
    }
    for name in ("http", "path", "ready_file", "tenants_file"):
        value = getattr(config, name)
        if value in taken:
            raise ConfigError(name, value, f"another path than that of {taken[value]}")
        if value.startswith("/"):
            taken[value] = name
