"""Where hicached listens, as users write it, and as gRPC wants it."""

from __future__ import annotations

from dataclasses import dataclass

from hicache.errors import ConfigError
from hicache.wire import hicached_pb2 as wire
from hicache.wire.protocol import channel_options

UNIX_PATH_BYTES_MAX = 107  # sun_path, less its terminating zero
RECONNECT_MS = 100


@dataclass(frozen=True, slots=True)
class DaemonAddress:
    """``text`` is what the user wrote; ``target`` what gRPC connects to."""

    text: str
    target: str
    is_local: bool  # a Unix socket: memory can be shared over it

    def bulk_address(self, welcome: wire.Welcome) -> str | tuple[str, int]:
        """Where the bulk socket is: a path, or host and port."""
        if self.is_local:
            return welcome.bulk_socket
        return self.target.rpartition(":")[0].strip("[]"), welcome.bulk_port

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
        return options


def parse_address(text: str) -> DaemonAddress:
    """``unix:///path`` or ``tcp://host:port``. Raises ConfigError for anything else."""
    scheme, separator, rest = text.partition("://")
    if separator and scheme == "unix":
        return _unix(text, path=rest)
    if separator and scheme == "tcp":
        return _tcp(text, host_and_port=rest)
    raise ConfigError("l3", text, "unix:///path/to/socket or tcp://host:port")


def _unix(text: str, *, path: str) -> DaemonAddress:
    if not path.startswith("/") or path == "/":
        raise ConfigError("l3", text, "an absolute path after unix://, as in unix:///run/hicached.sock")
    if len(path.encode()) > UNIX_PATH_BYTES_MAX:
        raise ConfigError("l3", text, f"a socket path of at most {UNIX_PATH_BYTES_MAX} bytes")
    return DaemonAddress(text, target=f"unix:{path}", is_local=True)


def _tcp(text: str, *, host_and_port: str) -> DaemonAddress:
    host, separator, port = host_and_port.rpartition(":")
    if not separator or not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ConfigError("l3", text, "tcp://host:port with a port of 1 to 65535")
    return DaemonAddress(text, target=host_and_port, is_local=False)
