"""Daemons for the tests of this folder; every one is stopped at the end of its test."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from hicache.backends.faulty import FaultyBackend
from hicache.backends.open import open_backend
from hicache.backends.store import ObjectStore
from hicache.backends.tenant_limits import StoreLimits
from hicache.daemon.config import DaemonConfig
from hicache.daemon.recovery import OpenedStore
from hicache.daemon.store_look import StoreLook
from hicache.outcome import Outcome
from tests.daemon.client import Client
from tests.daemon.raw_links import Memory, object_key
from tests.daemon.rig import ALICE, BOB, DaemonProcess, DaemonThread


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a name short enough for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="hd-") as path:
        yield Path(path)


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., DaemonProcess]]:
    """Starts daemon processes; settings are keywords. ``wait=False`` does not wait until it is ready."""
    running: list[DaemonProcess] = []

    def start_one(*, wait: bool = True, environment: dict[str, str] | None = None, **settings: object) -> DaemonProcess:
        daemon = DaemonProcess(folder, environment=environment, **settings)
        running.append(daemon)
        return daemon.wait_ready() if wait else daemon

    yield start_one
    for daemon in running:
        daemon.close()


class FaultyStoreOpener:
    """Opens the real store over a backend that fails on command, and keeps hold of that backend."""

    def __init__(self) -> None:
        self.backend: FaultyBackend | None = None
        self.store: ObjectStore | None = None

    def __call__(self, config: DaemonConfig, limits: StoreLimits) -> OpenedStore:
        inner = open_backend(
            config.backend_url, capacity_bytes=config.capacity_bytes, encryption_keys=config.encryption_keys
        )
        self.backend = FaultyBackend(inner)
        store = ObjectStore(
            self.backend,
            object_bytes_max=config.object_bytes_max,
            high_watermark=config.high_watermark,
            low_watermark=config.low_watermark,
            free_space_floor_bytes=config.free_space_floor_bytes,
            limits=limits,
            keys=getattr(inner, "keys", None),  # of a backend that encrypts
        )
        self.store = store
        return OpenedStore(store, store.store_id, StoreLook.at(store))


class ThreadedDaemon(DaemonThread):
    """A daemon in this process, with its store and backend at hand."""

    def __init__(self, folder: Path, *, environment: dict[str, str] | None = None, **settings: object) -> None:
        opener = FaultyStoreOpener()
        super().__init__(folder, opener, environment=environment, **settings)
        assert opener.backend is not None
        assert opener.store is not None
        self.backend = opener.backend
        self.store = opener.store

    def stop(self, *, release_faults: bool = True) -> None:
        if release_faults and hasattr(self, "backend"):
            self.backend.disarm()
        super().stop()


@pytest.fixture
def start_thread(folder: Path) -> Iterator[Callable[..., ThreadedDaemon]]:
    """Starts daemons in threads of this process; settings are keywords."""
    with ExitStack() as stack:

        def start_one(**settings: object) -> ThreadedDaemon:
            daemon = ThreadedDaemon(folder, **settings)
            stack.callback(daemon.stop)
            return daemon

        yield start_one


@pytest.fixture
def daemon(start_thread: Callable[..., ThreadedDaemon]) -> ThreadedDaemon:
    """One daemon in this process with small settings."""
    return start_thread()


@pytest.fixture
def client(daemon: ThreadedDaemon) -> Iterator[Client]:
    """A session with ``daemon``."""
    with Client(daemon.target) as connected:
        yield connected


@pytest.fixture
def memory() -> Iterator[Memory]:
    """4 MiB of client memory."""
    with Memory(4 << 20) as mapped:
        yield mapped


@pytest.fixture
def bystander(daemon: ThreadedDaemon) -> Iterator[Client]:
    """Another client with an object; it must be served before and after whatever happens to the one under test."""
    with Client(daemon.target, name="bystander") as other:
        assert other.put_stream([object_key(99)], [b"mine"]) == [Outcome.OK]
        yield other
        assert other.get_stream([object_key(99)], [4]) == [b"mine"]


@pytest.fixture
def two_tenants(folder: Path) -> str:
    """A file with the tenants alice and bob."""
    file = folder / "tenants"
    file.write_text(f"alice {ALICE}\nbob {BOB}\n")
    file.chmod(0o600)
    return str(file)
