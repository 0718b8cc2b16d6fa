"""Where hicached listens, as users write it, and as gRPC wants it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from urllib.parse import parse_qsl

import grpc

from hicache.client.tls import TlsFiles
from hicache.errors import ConfigError
from hicache.wire import hicached_pb2 as wire
from hicache.wire.protocol import channel_options

UNIX_PATH_BYTES_MAX = 107  # sun_path, less its terminating zero
RECONNECT_MS = 100
_TLS_FIELDS = ("ca", "certificate", "key", "name")


@dataclass(frozen=True, slots=True)
class DaemonAddress:
    """``text`` is what the user wrote; ``target`` what gRPC connects to."""

    text: str
    target: str
    is_local: bool  # a Unix socket: memory can be shared over it
    tls: TlsFiles | None = None

    @property
    def host_and_port(self) -> tuple[str, int]:
        """Of an address over TCP."""
        host, _, port = self.target.rpartition(":")
        return host.strip("[]"), int(port)

    def open_channel(self) -> grpc.Channel:
        """A channel for one session. Raises TlsUnusable."""
        if self.tls is None:
            return grpc.insecure_channel(self.target, options=self.channel_options)
        return grpc.secure_channel(self.target, self.tls.credentials(), options=self.channel_options)

    def open_idle_channel(self) -> grpc.Channel:
        """A channel that nothing is called on, and that never connects.

        As long as there is one, gRPC keeps what it needs to make others. Without any, it begins anew with the next one,
        and aborts the process where that finds no descriptor.
        """
        return grpc.insecure_channel(self.target, options=self.channel_options)

    def bulk_address(self, welcome: wire.Welcome) -> str | tuple[str, int]:
        """Where the bulk socket is: a path, or host and port."""
        if self.is_local:
            return welcome.bulk_socket
        return self.host_and_port[0], welcome.bulk_port

    @property
    def peer_socket(self) -> str:
        """Where a process on the same node can ask for a ticket that says whose it is."""
        return self.target.removeprefix("unix:") + ".bulk"

    @property
    def channel_options(self) -> list[tuple[str, str | int]]:
        """The protocol's options, and those that make every channel start afresh.

        A channel lives for one session. Subchannels are not shared, since a fresh attempt must not inherit the backoff
        of the one before; nothing is retried below us, since only we know whether a call may be repeated; a proxy
        from the environment never sits between an engine and its daemon.
        """
        options: list[tuple[str, str | int]] = [
            *channel_options(),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_retries", 0),
            ("grpc.enable_http_proxy", 0),
            ("grpc.initial_reconnect_backoff_ms", RECONNECT_MS),
            ("grpc.max_reconnect_backoff_ms", 10 * RECONNECT_MS),
        ]
        if self.is_local:
            options.append(("grpc.default_authority", "localhost"))
        if self.tls is not None and self.tls.server_name:
            options.append(("grpc.ssl_target_name_override", self.tls.server_name))
        return options


def parse_address(text: str) -> DaemonAddress:
    """``unix:///path``, ``tcp://host:port``, or ``tls://host:port?ca=FILE`` with ``&certificate=FILE&key=FILE`` where
    hicached wants certificates, and ``&name=NAME`` where its own has another name than the host.

    Raises ConfigError for anything else. Files are read when they are needed.
    """
    scheme, separator, rest = text.partition("://")
    if separator and scheme == "unix":
        return _unix(text, path=rest)
    if separator and scheme == "tcp":
        return _tcp(text, host_and_port=rest)
    if separator and scheme == "tls":
        host_and_port, _, query = rest.partition("?")
        return replace(_tcp(text, host_and_port=host_and_port), tls=_tls_files(text, query))
    raise ConfigError("l3", text, "unix:///path/to/socket, tcp://host:port or tls://host:port?ca=FILE")


def _tls_files(text: str, query: str) -> TlsFiles:
    try:
        given = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query), max_num_fields=len(_TLS_FIELDS))
    except ValueError as error:
        raise ConfigError("l3", text, f"NAME=VALUE behind the ?, joined by & ({error})") from error
    values = dict(given)
    unknown = [name for name in values if name not in _TLS_FIELDS]
    if unknown or len(values) < len(given) or not all(values.values()):
        raise ConfigError("l3", text, f"each of {', '.join(_TLS_FIELDS)} at most once behind the ?, with a value")
    if "ca" not in values:
        raise ConfigError("l3", text, "ca=FILE behind the ?, the CA that has signed the certificate of hicached")
    if "key" in values and "certificate" not in values:
        raise ConfigError("l3", text, "certificate=FILE beside the key")
    certificate = values.get("certificate", "")
    return TlsFiles(values["ca"], certificate, values.get("key", certificate), values.get("name", ""))


def _unix(text: str, *, path: str) -> DaemonAddress:
    if not path.startswith("/") or path == "/":
        raise ConfigError("l3", text, "an absolute path after unix://, as in unix:///run/hicached.sock")
    if len(path.encode()) > UNIX_PATH_BYTES_MAX:
        raise ConfigError("l3", text, f"a socket path of at most {UNIX_PATH_BYTES_MAX} bytes")
    return DaemonAddress(text, target=f"unix:{path}", is_local=True)


def _tcp(text: str, *, host_and_port: str) -> DaemonAddress:
    host, separator, port = host_and_port.rpartition(":")
    if not separator or not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ConfigError("l3", text, "host:port behind the ://, with a port of 1 to 65535")
    return DaemonAddress(text, target=host_and_port, is_local=False)
