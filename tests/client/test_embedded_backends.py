"""The L3 contract for the real backends opened in this process, and what survives their being closed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache.connect import open_l3
from hicache.embedded import EmbeddedL3
from hicache.errors import ConfigError, StorageInUse
from hicache.l3 import L3, L3Item
from hicache.outcome import Outcome
from tests.client.contract import MEMORY_BYTES, L3Contract
from tests.client.memory import SmallMemory
from tests.client.support import SPEC, get, key, payload, put

CAPACITY_BYTES = 64 << 20


class EmbeddedContract(L3Contract):
    """Fixtures for a backend in a fresh directory."""

    scheme = ""

    @pytest.fixture
    def contract_memory(self) -> Iterator[SmallMemory]:
        memory = SmallMemory(MEMORY_BYTES)
        yield memory
        memory.close()

    @pytest.fixture
    def l3(self, contract_memory: SmallMemory, tmp_path: Path) -> Iterator[EmbeddedL3]:
        l3 = EmbeddedL3.open(f"{self.scheme}://{tmp_path}/store", capacity_bytes=CAPACITY_BYTES, memory=contract_memory)
        yield l3
        l3.close()

    @pytest.fixture
    def other_l3(self, l3: L3) -> L3:
        """The store belongs to one process, so whoever else stores into it does so through the same L3."""
        return l3


class TestEmbeddedOnLmdb(EmbeddedContract):
    scheme = "lmdb"


class TestEmbeddedOnFiles(EmbeddedContract):
    scheme = "file"


@pytest.mark.parametrize("scheme", ["lmdb", "file"])
def test_what_was_stored_is_there_after_the_engine_was_restarted(
    scheme: str, memory: SmallMemory, tmp_path: Path
) -> None:
    size = SPEC.object_bytes[0]
    address = f"{scheme}://{tmp_path}/store"
    first = open_l3(address, spec=SPEC, memory=memory, capacity_bytes=CAPACITY_BYTES)
    assert first is not None
    memory.buffer[:size] = payload(1, size)
    assert put(first, [L3Item(key(1), 0, size)]) == [Outcome.OK]
    with pytest.raises(StorageInUse):
        open_l3(address, spec=SPEC, memory=memory, capacity_bytes=CAPACITY_BYTES)
    first.close()
    second = open_l3(address, spec=SPEC, memory=memory, capacity_bytes=CAPACITY_BYTES)
    assert second is not None
    assert get(second, [L3Item(key(1), size, size)]) == [Outcome.OK]
    assert memory.buffer[size : 2 * size] == payload(1, size)
    second.close()


def test_a_capacity_that_cannot_be_stops_the_start(memory: SmallMemory, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        open_l3(f"lmdb://{tmp_path}/store", spec=SPEC, memory=memory, capacity_bytes=0)
