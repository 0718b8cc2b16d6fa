"""Where the ranks of a replica find each other, and how long they wait for each other."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import stat
import threading
import time
from dataclasses import dataclass, fields
from pathlib import Path

from hicache.errors import ConfigError, StorageInUse

UNIX_PATH_BYTES_MAX = 107  # sun_path, less its terminating zero
CONNECT_RETRY_S = 0.02

_EXPECTED = "unix:///path/to/socket, or tcp://host:port where ranks are on other nodes"


@dataclass(frozen=True, slots=True)
class Ranks:
    """The same on the leader, which listens on ``address`` until every rank has come, and on its workers.

    ``unix:///path``: a socket that only this user may open. ``tcp://host:port``: needs a ``token``, a secret of this
    replica, and a network that nobody else listens to: what goes over it is not encrypted.
    """

    address: str
    token: str = ""
    start_timeout_s: float = 120.0  # until every rank has come
    silence_timeout_s: float = 15.0  # a rank that says nothing for so long is lost
    copy_timeout_s: float = (
        30.0  # a rank that has not done a copy by then is lost: longer than the engine's longest step
    )

    def __post_init__(self) -> None:
        for name in ("address", "token"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"ranks.{name}", getattr(self, name), "text")
        if isinstance(self.endpoint, tuple) and not self.token:
            raise ConfigError("ranks.token", "", f"a secret of the replica: {self.address} can be reached by others")
        for setting in fields(self):
            value = getattr(self, setting.name)
            if setting.name.endswith("_s") and not (isinstance(value, int | float) and 0 < value < math.inf):
                raise ConfigError(f"ranks.{setting.name}", value, "seconds, more than 0 and finite")

    @property
    def endpoint(self) -> str | tuple[str, int]:
        """The path of a Unix socket, or host and port. Raises ConfigError."""
        scheme, _, rest = self.address.partition("://")
        if scheme == "unix" and rest.startswith("/") and 1 < len(rest.encode()) <= UNIX_PATH_BYTES_MAX:
            return rest
        host, _, port = rest.rpartition(":")
        if scheme == "tcp" and host and port.isdecimal() and 1 <= int(port) <= 65535:
            return host.strip("[]"), int(port)
        raise ConfigError("ranks.address", self.address, f"{_EXPECTED} (a path of at most {UNIX_PATH_BYTES_MAX} bytes)")


def listen(ranks: Ranks, *, backlog: int) -> socket.socket:
    """A listening socket, in place of what a dead leader left. Raises ConfigError; StorageInUse for a live one."""
    endpoint = ranks.endpoint
    if isinstance(endpoint, tuple):
        try:
            return socket.create_server(endpoint, family=_family(endpoint), backlog=backlog)
        except OSError as error:
            raise ConfigError("ranks.address", ranks.address, f"an address to listen on here ({error})") from error
    _remove_stale(endpoint)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(listener.fileno(), 0o600)  # before the bind: the file never has another mode
        listener.bind(endpoint)
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        raise ConfigError("ranks.address", ranks.address, f"a path to make a socket at ({error.strerror})") from error
    return listener


def stop_listening(ranks: Ranks, listener: socket.socket) -> None:
    """Close the socket, and take its file away: first, since a file of a closed socket may be replaced by anybody."""
    if isinstance(endpoint := ranks.endpoint, str):
        with contextlib.suppress(OSError):
            os.unlink(endpoint)
    listener.close()


def connect(ranks: Ranks, *, until_s: float, given_up: threading.Event) -> socket.socket:
    """Connect to the leader, as soon as it is there. Raises ConfigError when it is not by ``until_s``, or when it was
    ``given_up``."""
    while True:
        try:
            return _connected(ranks.endpoint, timeout_s=max(0.001, until_s - time.monotonic()))
        except OSError as error:
            if time.monotonic() + CONNECT_RETRY_S >= until_s or given_up.wait(CONNECT_RETRY_S):
                expected = f"the address of a leader that waits for its ranks ({error.strerror or error})"
                raise ConfigError("leader.address", ranks.address, expected) from error


def _connected(endpoint: str | tuple[str, int], *, timeout_s: float) -> socket.socket:
    if isinstance(endpoint, tuple):
        return socket.create_connection(endpoint, timeout=timeout_s)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(endpoint)
    except BaseException:
        connection.close()
        raise
    return connection


def _remove_stale(path: str) -> None:
    """Take away the socket of a dead leader. Raises for a live one, and for a file of another kind."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError("ranks.address", f"unix://{path}", "a path that is free; a file of another kind is there")
    try:
        _connected(path, timeout_s=1.0).close()
    except (ConnectionRefusedError, FileNotFoundError):
        Path(path).unlink(missing_ok=True)
    except OSError as error:
        raise StorageInUse(path, f"another process ({error.strerror or error})") from error
    else:
        raise StorageInUse(path, "another leader")


def _family(endpoint: tuple[str, int]) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in endpoint[0] else socket.AF_INET
