"""The L3 contract on a real Mooncake store that an engine joins by itself, with no daemon."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from hicache.connect import open_l3
from hicache.embedded import EmbeddedL3
from hicache.errors import BackendError, ConfigError
from hicache.l3 import L3, L3Item
from hicache.outcome import Outcome
from tests.backends.mooncake_cluster import MIB, MooncakeCluster, require_wheel
from tests.client.contract import MEMORY_BYTES, L3Contract
from tests.client.memory import SmallMemory
from tests.client.support import SPEC, get, key, payload, put

require_wheel()

OBJECT = SPEC.object_bytes[0]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeCluster]:
    with MooncakeCluster(tmp_path_factory.mktemp("mooncake")) as running:
        running.start_node(64 * MIB)
        yield running


def url_of(cluster: MooncakeCluster) -> str:
    return cluster.settings(call_timeout_s=10.0).url()  # other work may hold the machine


def open_here(cluster: MooncakeCluster, memory: SmallMemory, **changes: str) -> L3:
    opened = open_l3(url_of(cluster), spec=SPEC, memory=memory, **changes)  # type: ignore[arg-type]  # by name
    assert opened is not None
    return opened


class TestEmbeddedOnMooncake(L3Contract):
    @pytest.fixture
    def contract_memory(self) -> Iterator[SmallMemory]:
        memory = SmallMemory(MEMORY_BYTES)
        yield memory
        memory.close()

    """Each test is another tenant, so that one store serves all of them."""

    @pytest.fixture
    def join(
        self, contract_memory: SmallMemory, cluster: MooncakeCluster, request: pytest.FixtureRequest
    ) -> Iterator[Callable[[], L3]]:
        opened: list[L3] = []

        def join() -> L3:
            url = url_of(cluster)
            opened.append(EmbeddedL3.open(url, capacity_bytes=0, memory=contract_memory, tenant=request.node.name))
            return opened[-1]

        yield join
        for l3 in opened:
            l3.close()

    @pytest.fixture
    def l3(self, join: Callable[[], L3]) -> L3:
        return join()

    @pytest.fixture
    def other_l3(self, join: Callable[[], L3]) -> L3:
        return join()


@pytest.fixture
def memory() -> Iterator[SmallMemory]:
    memory = SmallMemory()
    yield memory
    memory.close()


def test_what_one_engine_stores_another_one_of_its_tenant_finds_and_nobody_else(
    cluster: MooncakeCluster, memory: SmallMemory
) -> None:
    engines = [open_here(cluster, memory, tenant=tenant) for tenant in ("alice", "alice", "bob")]
    memory.buffer[:OBJECT] = payload(1, OBJECT)
    assert put(engines[0], [L3Item(key(1), 0, OBJECT)]) == [Outcome.OK]
    engines[0].close()
    assert [engine.lookup([key(1)], timeout_s=10) for engine in engines[1:]] == [[Outcome.OK], [Outcome.ABSENT]]
    assert get(engines[1], [L3Item(key(1), OBJECT, OBJECT)]) == [Outcome.OK]
    assert memory.buffer[OBJECT : 2 * OBJECT] == payload(1, OBJECT)
    for engine in engines[1:]:
        engine.close()


def test_what_cannot_be_joined_stops_the_start_and_says_why(cluster: MooncakeCluster, memory: SmallMemory) -> None:
    with pytest.raises(ConfigError, match="asks for no token"):
        open_here(cluster, memory, token="secret")
    with pytest.raises(BackendError, match="no Mooncake master at 127"):
        open_l3("mooncake://127.0.0.1:1", spec=SPEC, memory=memory)
