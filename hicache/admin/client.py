"""A client of the admin API over a Unix socket or TCP: http.client, bounded waits, errors that say what to do."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType, NoneType
from urllib.parse import quote, urlencode

import msgspec

from hicache.admin.verbs import Answer, Body, Verb
from hicache.errors import AdminRefused, ConfigError, DaemonUnreachable

DEFAULT_ADDRESS = "/run/hicached/hicached.sock.admin"
TIMEOUT_S = 10.0
CHUNK_BYTES = 256 * 1024
NO_NAMES: Mapping[str, object] = MappingProxyType({})


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Admin:
    """Asks one daemon. Every call has a connection of its own, so one object serves any number of threads."""

    def __init__(self, address: str = DEFAULT_ADDRESS, *, token: str = "", timeout_s: float = TIMEOUT_S) -> None:
        """``address`` is the path of the admin socket, or ``host:port`` of the daemon's HTTP. Raises ConfigError."""
        host, _, port = address.rpartition(":")
        if not address.startswith("/") and not (host and port.isdecimal() and int(port) < 65_536):
            raise ConfigError(
                "admin", address, "the absolute path of the admin socket, or host:port of hicached's http"
            )
        self.address = address
        self._token = token
        self._timeout_s = timeout_s

    def ask(
        self,
        verb: Verb[Body, Answer],
        body: Body | None = None,
        *,
        names: Mapping[str, object] = NO_NAMES,
        timeout_s: float | None = None,
    ) -> Answer:
        """What the daemon answers. ``names`` fill the path, and the query with the rest.

        ``timeout_s`` bounds the whole call. Raises DaemonUnreachable where nobody answers in time, and AdminRefused
        with the daemon's own words.
        """
        with self.open(verb, body, names=names, timeout_s=timeout_s) as parts:
            raw = b"".join(parts)
        if verb.answer is NoneType:
            return None  # type: ignore[return-value] # Answer is NoneType here
        try:
            return msgspec.json.decode(raw, type=verb.answer)
        except msgspec.MsgspecError as error:
            raise AdminRefused(
                200, f"{self.address} answers {verb.path} with what this hicache cannot read ({error})"
            ) from error

    @contextmanager
    def open(
        self,
        verb: Verb[Body, Answer],
        body: Body | Iterable[bytes] | None = None,
        *,
        names: Mapping[str, object] = NO_NAMES,
        timeout_s: float | None = None,
        silence_s: float | None = None,
    ) -> Iterator[Iterator[bytes]]:
        """The answer part by part, for verbs whose answer is a Stream, within the block.

        ``timeout_s`` bounds the whole call, and with ``silence_s`` only the wait for each part is bounded. An iterable
        of bytes is sent part by part. Raises as ``ask``, within the block, too.
        """
        deadline = (
            None if silence_s is not None else time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        )
        connection = self._connection(silence_s if silence_s is not None else _left_s(deadline))
        try:
            with self._reachable():
                response = self._send(connection, verb, body, names)
                if response.length is None and not response.chunked:  # its head was cut off before it told its length
                    raise ConnectionResetError("the answer ended early")
            if response.status >= 400:
                with self._reachable():
                    raise AdminRefused(response.status, _error_text(response.read(CHUNK_BYTES), response))
            yield self._parts(connection, response, deadline)
        finally:
            connection.close()

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        if self.address.startswith("/"):
            return _UnixConnection(self.address, timeout_s)
        host, _, port = self.address.rpartition(":")
        return http.client.HTTPConnection(host.strip("[]"), int(port), timeout=timeout_s)

    def _send(
        self,
        connection: http.client.HTTPConnection,
        verb: Verb[Body, Answer],
        body: Body | Iterable[bytes] | None,
        names: Mapping[str, object],
    ) -> http.client.HTTPResponse:
        headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {self._token}"} if self._token else {})
        path = verb.path.format(**{name: quote(str(names[name]), safe="") for name in verb.path_names})
        query = {name: value for name, value in names.items() if name not in verb.path_names}
        if query:
            path += "?" + urlencode(query)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a refusal may come before all is sent
            if body is None:
                connection.request(verb.method, path, headers=headers)
            elif isinstance(body, Iterable) and not isinstance(body, dict):
                connection.request(verb.method, path, body=body, headers=headers, encode_chunked=True)
            else:
                headers["Content-Type"] = "application/json"
                connection.request(verb.method, path, body=msgspec.json.encode(body), headers=headers)
        return connection.getresponse()

    def _parts(
        self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse, deadline: float | None
    ) -> Iterator[bytes]:
        while True:
            with self._reachable():
                if deadline is not None and connection.sock is not None:
                    connection.sock.settimeout(_left_s(deadline))
                part = response.read1(CHUNK_BYTES)
                if not part:
                    if response.length:  # the daemon went in the middle
                        raise ConnectionResetError("the answer ended early")
                    return
            yield part

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        try:
            yield
        except (OSError, http.client.HTTPException) as error:
            raise DaemonUnreachable(self.address, _why(error)) from error


def _left_s(deadline: float | None) -> float:
    return max(0.001, (deadline or 0.0) - time.monotonic())


def _why(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such socket: is hicached running, and is this its socket with .admin?"
    if isinstance(error, PermissionError):
        return "this user may not open the socket: ask as root or as hicached's own user"
    if isinstance(error, ConnectionRefusedError):
        return "nobody listens: hicached is not running"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(error) or type(error).__name__


def _error_text(raw: bytes, response: http.client.HTTPResponse) -> str:
    try:
        return str(json.loads(raw)["error"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return f"{response.status} {response.reason}"
