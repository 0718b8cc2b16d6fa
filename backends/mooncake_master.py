"""What the master of a Mooncake store tells over HTTP: how full the pool is, and which objects there are."""

from __future__ import annotations

import http.client
import socket
from dataclasses import dataclass
from typing import Protocol

from hicache.errors import BackendError

READING_TIMEOUT_S = 0.3  # below what the daemon waits for an answer to a simple question
LISTING_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 0.3
LISTING_BYTES_MAX = 1 << 32


@dataclass(frozen=True, slots=True)
class PoolReading:
    """The whole pool, whoever stored what is in it. Copies count."""

    objects: int
    allocated_bytes: int
    capacity_bytes: int


class Master(Protocol):
    """What a backend asks of the master beside the client's calls."""

    def reading(self) -> PoolReading:
        """How full the pool is now. Raises OSError or BackendError."""
        ...

    def names(self) -> list[str]:
        """The names of all objects. Raises OSError or BackendError."""
        ...

    def listens(self) -> bool:
        """Whether somebody accepts connections at the master's address: quick, where a call would hang."""
        ...


class HttpMaster:
    """The master behind two addresses."""

    def __init__(self, rpc: tuple[str, int], metrics: tuple[str, int]) -> None:
        self._rpc = rpc
        self._metrics = metrics

    def reading(self) -> PoolReading:
        """See ``Master.reading``."""
        text = self._get("/metrics", timeout_s=READING_TIMEOUT_S)
        values = dict(line.split(" ", 1) for line in text.splitlines() if line.startswith("master_"))
        try:
            return PoolReading(
                objects=int(float(values["master_key_count"])),
                allocated_bytes=int(float(values["master_allocated_bytes"])),
                capacity_bytes=int(float(values["master_total_capacity_bytes"])),
            )
        except (KeyError, ValueError) as error:
            raise BackendError(f"{self._where()} does not look like a Mooncake master: no {error}") from error

    def names(self) -> list[str]:
        """See ``Master.names``."""
        return self._get("/get_all_keys", timeout_s=LISTING_TIMEOUT_S).split("\n")

    def listens(self) -> bool:
        """See ``Master.listens``."""
        try:
            socket.create_connection(self._rpc, timeout=CONNECT_TIMEOUT_S).close()
        except OSError:
            return False
        return True

    def _get(self, path: str, *, timeout_s: float) -> str:
        connection = http.client.HTTPConnection(*self._metrics, timeout=timeout_s)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read(LISTING_BYTES_MAX)
        except http.client.HTTPException as error:
            raise BackendError(f"{self._where()} does not speak HTTP ({error!r})") from error
        finally:
            connection.close()
        if response.status != 200:
            raise BackendError(f"{self._where()} answered {response.status} to {path}")
        return body.decode(errors="replace")

    def _where(self) -> str:
        return "{}:{}".format(*self._metrics)
