"""One daemon per Unix socket: a lock beside it that names its holder, and the removal of what dead daemons left."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from hicache.backends.lock import own_command
from hicache.errors import ConfigError, StorageInUse

CONNECT_TIMEOUT_S = 1.0

_HOLDER_BYTES_MAX = 4096
_WHAT_WOULD_DO = {
    errno.EADDRINUSE: "a free port",
    errno.EAFNOSUPPORT: "an address that hicached.socket passes (ListenStream=): this service may make no TCP sockets",
}


class SocketLock:
    """Holds the lock file of a socket until ``release``, or until the process ends, however it ends.

    The file stays when the lock goes: removing it would let two daemons lock two files of one name.
    """

    def __init__(self, lock_file: str, socket_file: str) -> None:
        """Raises StorageInUse naming the holder, and ConfigError where the lock file cannot be made."""
        try:
            self._descriptor = os.open(lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise ConfigError("socket", socket_file, f"a path beside which files can be made ({error})") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._descriptor, _HOLDER_BYTES_MAX, 0).decode(errors="replace").strip()
            os.close(self._descriptor)
            raise StorageInUse(socket_file, holder or "another process") from error
        with contextlib.suppress(OSError):  # on a full disk it is held all the same
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"pid {os.getpid()} ({own_command()})\n".encode()[:_HOLDER_BYTES_MAX], 0)

    def release(self) -> None:
        """Lets go of the lock. Call once."""
        os.close(self._descriptor)


def remove_stale_socket(setting: str, path: str) -> None:
    """Removes the socket file of a dead process.

    Raises ConfigError for a file of another kind, which is left alone, and StorageInUse for the socket of a live one.
    Call with the lock held: another hicached cannot be behind it then, but another program may.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(setting, path, "a path that is free or a socket; a file of another kind is there, left alone")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(CONNECT_TIMEOUT_S)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            pass
        except OSError as error:
            # A full backlog or a socket of another type: somebody is there.
            raise StorageInUse(path, f"another program ({error.strerror or error})") from error
        else:
            raise StorageInUse(path, _peer(probe))
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _peer(connected: socket.socket) -> str:
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return f"pid {int.from_bytes(credentials[:4], 'little')}, which is another program"


@contextmanager
def created_with_mode(mode: int) -> Iterator[None]:
    """Files made in this block get no more than ``mode``. Process-wide: only while nothing else makes files."""
    before = os.umask(0o777 & ~mode)
    try:
        yield
    finally:
        os.umask(before)


def listen_unix(setting: str, path: str, *, mode: int, backlog: int = 128) -> socket.socket:
    """A listening Unix socket with exactly ``mode``, in place of a stale one. Raises ConfigError or StorageInUse."""
    remove_stale_socket(setting, path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with created_with_mode(mode):
            listener.bind(path)
        os.chmod(path, mode)
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        raise ConfigError(setting, path, f"a path where a socket can be made ({error.strerror})") from error
    return listener


def listen_tcp(setting: str, host: str, port: int, *, backlog: int) -> socket.socket:
    """A listening TCP socket. Raises ConfigError where the address cannot be bound."""
    check_tcp_free(setting, host, port)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=backlog)


def check_tcp_free(setting: str, host: str, port: int) -> None:
    """Raises ConfigError where a TCP address cannot be bound. gRPC alone may settle for half of a wildcard address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        kind = _WHAT_WOULD_DO.get(error.errno or 0, "an address of this machine")
        raise ConfigError(setting, f"{host}:{port}", f"{kind} ({error.strerror})") from error
