"""The listening sockets of hicached: those that a service manager passed it, and otherwise its own."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass

from hicache.daemon.settings import HostPort
from hicache.daemon.socket_lock import listen_tcp, listen_unix
from hicache.errors import ConfigError

LISTEN_FDS_START = 3
INHERITED_MAX = 32  # more are no sockets of ours
NAMES = ("socket", "memory", "bulk", "admin", "listen", "bulk_listen", "http")


@dataclass(frozen=True, slots=True)
class Inherited:
    """A listening socket that was passed, the name that its unit gives it, and where it listens."""

    listener: socket.socket
    name: str
    address: str


def inherited_sockets(environment: Mapping[str, str], *, first_fd: int = LISTEN_FDS_START) -> list[Inherited]:
    """What LISTEN_FDS, LISTEN_PID and LISTEN_FDNAMES say was passed to this process (sd_listen_fds(3)).

    Raises ConfigError for what cannot be used. The descriptors are not for children of this process.
    """
    if environment.get("LISTEN_PID") != str(os.getpid()):
        return []
    told = environment.get("LISTEN_FDS", "")
    if not told.isdecimal() or int(told) > INHERITED_MAX:
        raise ConfigError("LISTEN_FDS", told, f"a number of sockets up to {INHERITED_MAX}")
    names = environment.get("LISTEN_FDNAMES", "").split(":")
    names += [""] * (int(told) - len(names))
    return [_inherit(first_fd + number, names[number]) for number in range(int(told))]


def _inherit(fd: int, name: str) -> Inherited:
    expected = "a listening stream socket (ListenStream= with Accept=no)"
    try:
        os.set_inheritable(fd, False)
        listener = socket.socket(fileno=fd)
    except OSError as error:
        raise ConfigError("LISTEN_FDS", f"descriptor {fd} {name}", f"{expected} ({error.strerror})") from error
    if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        raise ConfigError("LISTEN_FDS", f"descriptor {fd} {name}", expected)
    return Inherited(listener, name, address_of(listener))


def address_of(listener: socket.socket) -> str:
    """The path of a Unix socket, or host and port."""
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return os.fsdecode(name)
    return str(HostPort(name[0], name[1]))


class Listeners:
    """Hands out each socket once, and closes it at the stop; files of its own sockets are removed, passed ones stay."""

    def __init__(self, inherited: list[Inherited], stages: AsyncExitStack, *, mode: int) -> None:
        """``mode`` are the permission bits of own Unix sockets; those of passed ones are set by who made them."""
        self._inherited = list(inherited)
        self._stages = stages
        self._mode = mode
        self.files = SocketFiles()
        for passed in inherited:
            stages.callback(passed.listener.close)

    def unix(self, name: str, path: str, *, backlog: int, setting: str = "socket") -> socket.socket:
        """The socket at ``path``, or what was passed under ``name``. Raises ConfigError or StorageInUse."""
        if (passed := self.passed(name, path)) is not None:
            passed.listen(backlog)
            return passed
        listener = listen_unix(setting, path, mode=self._mode, backlog=backlog)
        self.files.note(path)
        self._stages.callback(self.files.remove, path)
        self._stages.callback(listener.close)
        return listener

    def tcp(self, name: str, address: HostPort, *, backlog: int) -> socket.socket:
        """The socket at ``address``, or what was passed under ``name``. Raises ConfigError."""
        if (passed := self.passed(name, str(address))) is not None:
            passed.listen(backlog)
            return passed
        listener = listen_tcp(name, address.host, address.port, backlog=backlog)
        self._stages.callback(listener.close)
        return listener

    def passed(self, name: str, address: str) -> socket.socket | None:
        """What was passed under ``name``, or listens at ``address``; None: it is to be made."""
        for passed in self._inherited:
            if passed.name == name or (passed.name not in NAMES and passed.address == address):
                self._inherited.remove(passed)
                if passed.listener.family == socket.AF_UNIX:
                    self.files.note(passed.address)
                return passed.listener
        return None

    def check_all_used(self) -> None:
        """Raises ConfigError for a passed socket that no setting names: nobody would ever answer there."""
        for passed in self._inherited:
            expected = (
                f"an address that a setting names (listen, bulk_listen, http, socket and what is beside it), or "
                f"FileDescriptorName= one of {', '.join(NAMES)}"
            )
            raise ConfigError("LISTEN_FDS", f"{passed.name or 'a socket'} at {passed.address}", expected)


class SocketFiles:
    """The files of Unix sockets, by which clients find them: nobody can connect to one whose file is gone."""

    def __init__(self) -> None:
        self._files: dict[str, os.stat_result] = {}

    def note(self, path: str) -> None:
        """A socket listens at ``path``."""
        # It was passed by somebody who sees other folders than we do, or has an abstract name and no file.
        with contextlib.suppress(OSError, ValueError):
            self._files[path] = os.stat(path)

    def remove(self, path: str) -> None:
        """It does not any more. What somebody else has made in its place stays."""
        if (found := self._files.pop(path, None)) is not None and _is_there(path, found):
            os.unlink(path)

    @contextlib.contextmanager
    def keeping_others(self) -> Iterator[None]:
        """Within it a library may remove files of these sockets, as gRPC does with its own, whoever made what is there:
        what somebody else has made is put back."""
        others = [path for path, found in self._files.items() if os.path.exists(path) and not _is_there(path, found)]
        kept: list[tuple[str, str]] = []
        for path in others:
            aside = f"{path}.kept"
            with contextlib.suppress(OSError):
                os.unlink(aside)  # left by a kill at this point
            with contextlib.suppress(OSError):
                os.link(path, aside)
                kept.append((aside, path))
        try:
            yield
        finally:
            for aside, path in kept:
                with contextlib.suppress(OSError):
                    os.rename(aside, path)  # does nothing where both are the same file
                    os.unlink(aside)

    def problem(self) -> str:
        """Why clients cannot connect, for people; empty: they can."""
        for path, found in list(self._files.items()):
            if not _is_there(path, found):
                return (
                    f"the socket {path} is gone, or another is there: clients cannot connect any more. Was it removed "
                    "with old files? Restart hicached, with hicached.socket where systemd made it"
                )
        return ""


def _is_there(path: str, found: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(path), found)
    except OSError:
        return False
