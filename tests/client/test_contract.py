"""The L3 contract, for hicached through memory, through streams and over TCP, and for a backend in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from hicache.backends.base import GetItem, PutItem
from hicache.client import DaemonL3
from hicache.embedded import EmbeddedL3
from hicache.l3 import L3
from hicache.outcome import Outcome
from tests.client.contract import MEMORY_BYTES, L3Contract
from tests.client.memory import SmallMemory, UnshareableMemory
from tests.client.small_daemon import SmallDaemon
from tests.client.support import QUICK, SPEC


class DaemonContract(L3Contract):
    """Fixtures for a client of a small daemon."""

    bulk = "stream"

    @pytest.fixture
    def small_daemon(self, folder: Path) -> Iterator[SmallDaemon]:
        daemon = self.make_daemon(folder).start()
        yield daemon
        daemon.stop()

    @pytest.fixture
    def contract_memory(self) -> Iterator[SmallMemory]:
        memory = SmallMemory(MEMORY_BYTES)
        yield memory
        memory.close()

    @pytest.fixture
    def l3(self, small_daemon: SmallDaemon, contract_memory: SmallMemory) -> Iterator[L3]:
        client = DaemonL3(small_daemon.address, spec=SPEC, memory=contract_memory, settings=QUICK)
        assert client.wait_ready(timeout_s=10)
        assert client.status().bulk == self.bulk
        yield client
        client.close()

    @pytest.fixture
    def other_l3(self, small_daemon: SmallDaemon, contract_memory: SmallMemory) -> Iterator[L3]:
        client = DaemonL3(small_daemon.address, spec=SPEC, memory=contract_memory, settings=QUICK)
        assert client.wait_ready(timeout_s=10)
        yield client
        client.close()

    def make_daemon(self, folder: Path) -> SmallDaemon:
        return SmallDaemon(folder)


class TestDaemonThroughRegisteredMemory(DaemonContract):
    bulk = "memory"


class TestDaemonWithoutMemorySocket(DaemonContract):
    def make_daemon(self, folder: Path) -> SmallDaemon:
        return SmallDaemon(folder, has_memory_socket=False)


class TestDaemonOverTcp(DaemonContract):
    def make_daemon(self, folder: Path) -> SmallDaemon:
        return SmallDaemon(folder, tcp=True)


class TestDaemonWithMemoryThatCannotBeShared(DaemonContract):
    bulk = "bounce"

    @pytest.fixture
    def contract_memory(self) -> Iterator[SmallMemory]:
        memory = UnshareableMemory(MEMORY_BYTES)
        yield memory
        memory.close()


class DictStore:
    """A small ObjectStore without a medium, shared by every client that is given the same dict.

    ``leases`` has what is leased, by number.
    """

    def __init__(self, objects: dict[bytes, bytes]) -> None:
        self.objects = objects
        self.is_closed = False
        self.leases: dict[int, list[bytes]] = {}
        self._leases_given = 0

    def lookup(self, keys: Sequence[bytes], *, lease_s: float = 0.0) -> tuple[list[Outcome], int]:
        outcomes = [Outcome.OK if key in self.objects else Outcome.ABSENT for key in keys]
        leased = [key for key in keys if key in self.objects]
        if lease_s <= 0 or not leased:
            return outcomes, 0
        self._leases_given += 1
        self.leases[self._leases_given] = leased
        return outcomes, self._leases_given

    def release(self, lease_id: int) -> bool:
        return self.leases.pop(lease_id, None) is not None

    def get_into(self, items: Sequence[GetItem]) -> list[Outcome]:
        return [self._get_one(item) for item in items]

    def put(self, items: Sequence[PutItem]) -> list[Outcome]:
        return [self._put_one(item) for item in items]

    def close(self) -> None:
        self.is_closed = True

    def _get_one(self, item: GetItem) -> Outcome:
        payload = self.objects.get(item.key)
        if payload is None:
            return Outcome.ABSENT
        if len(payload) != len(item.target):
            return Outcome.SIZE_MISMATCH
        item.target[:] = payload
        return Outcome.OK

    def _put_one(self, item: PutItem) -> Outcome:
        if item.key in self.objects:
            return Outcome.EXISTS
        self.objects[item.key] = bytes(item.payload)
        return Outcome.OK


class TestEmbeddedOnADict(L3Contract):
    @pytest.fixture
    def contract_memory(self) -> Iterator[SmallMemory]:
        memory = SmallMemory(MEMORY_BYTES)
        yield memory
        memory.close()

    @pytest.fixture
    def store(self) -> DictStore:
        return DictStore({})

    @pytest.fixture
    def l3(self, store: DictStore, contract_memory: SmallMemory) -> Iterator[L3]:
        l3 = EmbeddedL3(store, memory=contract_memory)
        yield l3
        l3.close()
        assert store.is_closed

    @pytest.fixture
    def other_l3(self, store: DictStore, contract_memory: SmallMemory) -> Iterator[L3]:
        l3 = EmbeddedL3(DictStore(store.objects), memory=contract_memory)
        yield l3
        l3.close()
