"""Chooses what serves as L3 by the scheme of its address."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.errors import ConfigError
from hicache.l3 import L3
from hicache.shared_memory import SharedMemory
from hicache.spec import CacheSpec
from hicache.tenancy import DEFAULT_TENANT

if TYPE_CHECKING:
    from hicache.client.fault import Fault

DAEMON_SCHEMES = ("unix", "tcp", "tls")
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
    deployment: str = "",
    salt: bytes | None = None,
    asks_first: bool = False,
) -> L3 | None:
    """L3 at ``address``, or None without one.

    - ``unix:///run/hicached.sock``, ``tls://host:port?ca=FILE``, ``tcp://host:port``: hicached, which ``token`` is for.
      Connects in the background: a daemon that is away now is used as soon as it is there.
    - ``lmdb:///path``, ``file:///path``: a backend in this process, of ``capacity_bytes``, for ``tenant``. Raises
      StorageInUse and BackendError where it cannot be opened.
    - ``mooncake://host:port?name=value``: a client of a Mooncake store in this process, which shares it with all others
      and has the capacity of its nodes. Settings: docs/mooncake.md, without their prefix. Do not fork afterwards.

    ``memory`` must live until the L3 is closed. Raises ConfigError for every other address.

    With a ``deployment``, hicached compares the spec and the ``salt`` with those of the other engines that name it.
    With that, or where it ``asks_first``, this waits for hicached's first answer, ``connect_timeout_s`` at most, and
    raises ConfigError when that is a lasting refusal, whatever it is about. A daemon that does not answer now may still
    refuse later, which ``status()`` shows.
    """
    if deployment:
        _check_deployment(address, deployment)
    if address is None:
        return None
    scheme = address.partition("://")[0] if "://" in address else ""
    if scheme in DAEMON_SCHEMES:
        from hicache.client import DaemonL3  # gRPC is loaded only where a daemon is asked for

        client = DaemonL3(address, spec=spec, memory=memory, token=token, deployment=deployment, salt=salt)
        fault = client.wait_first_answer() if deployment or asks_first else None
        if fault is not None and fault.is_lasting:
            client.close()
            raise _refused(fault, address, deployment)
        return client
    if scheme in EMBEDDED_SCHEMES:
        from hicache.backends.namespaces import namespace_tag
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
            namespace_tag=namespace_tag(spec.namespace),
        )
    raise ConfigError(
        "l3",
        address,
        "unix:///path/to/socket, tls://host:port?ca=FILE, tcp://host:port, lmdb:///path, file:///path, "
        "mooncake://host:port, or none for no L3",
    )


def _check_deployment(address: str | None, deployment: str) -> None:
    """A name that nobody would check promises what is not."""
    from hicache.wire.protocol import DEPLOYMENT_CHARS_MAX

    if len(deployment) > DEPLOYMENT_CHARS_MAX or not deployment.isprintable():
        raise ConfigError("deployment", deployment, f"at most {DEPLOYMENT_CHARS_MAX} printable characters")
    if address is None or not address.startswith(tuple(f"{scheme}://" for scheme in DAEMON_SCHEMES)):
        raise ConfigError(
            "deployment",
            deployment,
            f"none with l3 = {address!r}: only hicached (unix://, tls://, tcp://) compares its engines",
        )


def _refused(fault: Fault, address: str, deployment: str) -> ConfigError:
    from hicache.wire.protocol import RefusalCode

    match fault.code:
        case RefusalCode.DEPLOYMENT_MISMATCH:
            expected = f"the cache description and salt of its other engines; {fault.detail} (theirs != this engine's)"
            return ConfigError("deployment", deployment, expected)
        case RefusalCode.BAD_TOKEN:
            return ConfigError("token", "...", f"one that hicached at {address} knows ({fault.detail})")
        case _:
            return ConfigError("l3", address, f"a hicached that serves this engine, which refused it: {fault}")
