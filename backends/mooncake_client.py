"""The client of the Mooncake wheel: what we call of it, and how it is set up."""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hicache.backends.mooncake_settings import MooncakeSettings, split_address
from hicache.errors import BackendError, ConfigError

_MILLISECONDS = 1000
# Read by the wheel from the environment; what the user has set goes first. Without them a hung node blocks a call for
# 60 s and a set-up without a master for 90 s (measured, docs/mooncake.md).
ENVIRONMENT: Mapping[str, str] = {
    "MC_TCP_STATUS_TIMEOUT_SEC": "2",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_RPC_TIMEOUT_MS": "2000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "1000",
    "MC_LOG_LEVEL": "WARNING",
    "GLOG_minloglevel": "1",
}


class BufferDescriptor(Protocol):
    """Where one copy of an object lies."""

    transport_endpoint: str
    size: int


class MemoryDescriptor(Protocol):
    """A copy in memory."""

    buffer_descriptor: BufferDescriptor


class ReplicaDescriptor(Protocol):
    """One copy of an object."""

    def is_memory_replica(self) -> bool: ...

    def get_memory_descriptor(self) -> MemoryDescriptor: ...


class StoreClient(Protocol):
    """What we call of ``MooncakeDistributedStore``. Thread-safe, blocking; batches answer with a code for each key.

    The pointers are to registered memory. Nothing may be called after ``close``: a put then kills the process.
    """

    def register_buffer(self, address: int, size: int, /) -> int: ...

    def unregister_buffer(self, address: int, /) -> int: ...

    def batch_put_from(
        self, names: Sequence[str], addresses: Sequence[int], sizes: Sequence[int], config: object, /
    ) -> list[int]: ...

    def batch_get_into(self, names: Sequence[str], addresses: Sequence[int], sizes: Sequence[int], /) -> list[int]: ...

    def batch_is_exist(self, names: Sequence[str], /) -> list[int]: ...

    def batch_remove(self, names: Sequence[str], force: bool, /) -> list[int]: ...

    def batch_get_replica_desc(self, names: Sequence[str], /) -> Mapping[str, Sequence[ReplicaDescriptor]]: ...

    def get_hostname(self) -> str: ...

    def close(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Connection:
    """A client that has joined a store, and the configurations for its puts."""

    client: StoreClient
    put_config: object
    id_config: object  # for the object that names the store: never evicted


def connect(settings: MooncakeSettings) -> Connection:
    """Join the store. Raises ConfigError where the wheel is missing, BackendError where no master answers (4 s).

    Sets the variables of ENVIRONMENT that are not set, for this process: the wheel takes its timeouts from there.
    """
    local_host = _local_host(settings.master)
    os.environ.setdefault("MC_TCP_BIND_ADDRESS", local_host)
    wheel = load_wheel()
    client = wheel.MooncakeDistributedStore()
    code = client.setup(
        local_host,
        "P2PHANDSHAKE",
        settings.segment_bytes,
        0,  # bytes for calls that copy, of which we make none
        settings.protocol,
        settings.devices,
        settings.master,
    )
    if code != 0:
        raise BackendError(f"no Mooncake master at {settings.master} took this client in (code {code})")
    return Connection(client, _put_config(wheel, settings, client.get_hostname()), _id_config(wheel, settings))


def load_wheel() -> Any:  # Any: the wheel has no types
    """The wheel's module, with the environment that it reads when it is loaded.

    Raises ConfigError that says what to install, libraries of the system included.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        needed = "pip install 'hicache[mooncake]' and apt-get install libibverbs1 libnuma1 libcurl4"
        raise ConfigError("backend", "mooncake", f"{needed} ({error})") from error


def _put_config(wheel: Any, settings: MooncakeSettings, own_segment: str) -> object:  # Any: as above
    config = wheel.ReplicateConfig()
    config.replica_num = settings.replicas
    if settings.soft_pin_s:
        config.soft_pin_action = wheel.SoftPinAction.ENABLE
        config.soft_pin_ttl_ms = settings.soft_pin_s * _MILLISECONDS
    if settings.segment_bytes:
        config.preferred_segment = own_segment
    return config


def _id_config(wheel: Any, settings: MooncakeSettings) -> object:  # Any: as above
    config = wheel.ReplicateConfig()
    config.replica_num = settings.replicas
    config.with_hard_pin = True
    return config


def _local_host(master: str) -> str:
    """The address by which this machine reaches the master, and so the one by which other nodes reach this machine."""
    host, port = split_address("mooncake_master", master)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise BackendError(f"there is no way to the Mooncake master at {master} ({error})") from error
