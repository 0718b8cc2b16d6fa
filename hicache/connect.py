"""Chooses what serves as L3 by the scheme of its address."""

from __future__ import annotations

from hicache.errors import ConfigError
from hicache.l3 import L3
from hicache.shared_memory import SharedMemory
from hicache.spec import CacheSpec
from hicache.tenancy import DEFAULT_TENANT

DAEMON_SCHEMES = ("unix", "tcp")
EMBEDDED_SCHEMES = ("lmdb", "file", "mooncake")
CAPACITY_BYTES_DEFAULT = 10 * 1024**3


def open_l3(
    address: str | None,
    *,
    spec: CacheSpec,
    memory: SharedMemory,
    token: str = "",
    capacity_bytes: int = CAPACITY_BYTES_DEFAULT,
    tenant: str = DEFAULT_TENANT,
) -> L3 | None:
    """L3 at ``address``, or None without one.

    - ``unix:///run/hicached.sock``, ``tcp://host:port``: hicached, which ``token`` is for. Connects in the background:
      a daemon that is away now is used as soon as it is there.
    - ``lmdb:///path``, ``file:///path``: a backend in this process, of ``capacity_bytes``, for ``tenant``. Raises
      StorageInUse and BackendError where it cannot be opened.
    - ``mooncake://host:port?name=value``: a client of a Mooncake store in this process, which shares it with all others
      and has the capacity of its nodes. Settings: docs/mooncake.md, without their prefix. Do not fork afterwards.

    ``memory`` must live until the L3 is closed. Raises ConfigError for every other address.
    """
    if address is None:
        return None
    scheme = address.partition("://")[0] if "://" in address else ""
    if scheme in DAEMON_SCHEMES:
        from hicache.client import DaemonL3  # gRPC is loaded only where a daemon is asked for

        return DaemonL3(address, spec=spec, memory=memory, token=token)
    if scheme in EMBEDDED_SCHEMES:
        from hicache.embedded import EmbeddedL3

        if token:
            raise ConfigError(
                "token", "...", f"none: {scheme}:// is a backend in this process, which asks for no token"
            )
        return EmbeddedL3.open(
            address,
            capacity_bytes=capacity_bytes,
            memory=memory,
            tenant=tenant,
            object_bytes_max=spec.object_bytes_max,
        )
    raise ConfigError(
        "l3",
        address,
        "unix:///path/to/socket, tcp://host:port, lmdb:///path, file:///path, mooncake://host:port, or none for no L3",
    )
