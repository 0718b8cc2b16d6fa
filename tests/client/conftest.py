"""What the tests of L3 clients share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from hicache.client import ClientSettings, DaemonL3
from tests.client.memory import SmallMemory
from tests.client.small_daemon import SmallDaemon
from tests.client.support import QUICK, SPEC

ClientFactory = Callable[..., DaemonL3]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path is short enough for Unix sockets."""
    with TemporaryDirectory(prefix="hic") as name:
        yield Path(name)


@pytest.fixture
def memory() -> Iterator[SmallMemory]:
    memory = SmallMemory()
    yield memory
    memory.close()


@pytest.fixture
def daemon(folder: Path) -> Iterator[SmallDaemon]:
    daemon = SmallDaemon(folder).start()
    yield daemon
    daemon.stop()


@pytest.fixture
def new_client(memory: SmallMemory) -> Iterator[ClientFactory]:
    """Makes clients of ``memory``, and closes them before the memory goes."""
    clients: list[DaemonL3] = []

    def make(address: str, *, settings: ClientSettings = QUICK, **changes: Any) -> DaemonL3:
        clients.append(DaemonL3(address, **{"spec": SPEC, "memory": memory, "settings": settings, **changes}))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def client(daemon: SmallDaemon, new_client: ClientFactory) -> DaemonL3:
    """A client that is connected to the small daemon."""
    client = new_client(daemon.address)
    assert client.wait_ready(timeout_s=10)
    return client
