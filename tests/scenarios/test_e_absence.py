"""What is said not to be there is remembered by nobody: not by a client, a daemon, a tier in memory or an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from hicache.backends.ram_tier import SharedRamTier
from hicache.backends.shared_store import SharedStore
from hicache.client import DaemonL3
from hicache.daemon.recovery import open_store
from hicache.directory_config import DirectoryConfig
from hicache.l3 import L3Item
from hicache.outcome import Outcome
from tests.backends import payloads
from tests.backends.fake_mooncake import MIB, Clock, FakeMooncake, open_fake
from tests.client.memory import SmallMemory
from tests.client.support import QUICK, SPEC, get, key, payload, put
from tests.core.memory_l3 import Objects
from tests.core.small_engine import PAGE, Make, by_source, prompt
from tests.daemon.rig import DaemonThread

SIZE = 5000


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path is short enough for Unix sockets."""
    with TemporaryDirectory(prefix="hic") as name:
        yield Path(name)


@pytest.fixture
def connect() -> Iterator[Callable[[str], tuple[DaemonL3, SmallMemory]]]:
    """Clients, each with memory of its own."""
    with ExitStack() as stack:

        def connected(address: str) -> tuple[DaemonL3, SmallMemory]:
            memory = SmallMemory()
            stack.callback(memory.close)
            client = DaemonL3(address, spec=SPEC, memory=memory, settings=QUICK)
            stack.callback(client.close)
            assert client.wait_ready(timeout_s=10)
            return client, memory

        yield connected


@pytest.fixture
def started() -> Iterator[Callable[..., str]]:
    """Starts daemons, each in a folder of its own, and stops them after the test; returns their addresses."""
    with ExitStack() as stack:

        def start(folder: Path, **settings: object) -> str:
            folder.mkdir()
            daemon = DaemonThread(folder, open_store, **settings)
            stack.callback(daemon.stop)
            return f"unix://{daemon.config.socket}"

        yield start


def test_br_071_what_another_client_stores_is_found_by_the_next_lookup(
    folder: Path, connect: Callable[[str], tuple[DaemonL3, SmallMemory]], started: Callable[..., str]
) -> None:
    address = started(folder / "a")
    (asking, _), (storing, memory) = connect(address), connect(address)
    for number in range(20):
        assert asking.lookup([key(number)], timeout_s=10) == [Outcome.ABSENT]
        memory.buffer[:SIZE] = payload(number, SIZE)
        assert put(storing, [L3Item(key(number), 0, SIZE)]) == [Outcome.OK]
        assert asking.lookup([key(number)], timeout_s=10) == [Outcome.OK]


def test_br_071_daemons_on_one_folder_find_what_the_other_has_stored_at_once(
    folder: Path, connect: Callable[[str], tuple[DaemonL3, SmallMemory]], started: Callable[..., str]
) -> None:
    shared = {"backend": "file", "file_shared": True, "path": str(folder / "shared")}
    (first, memory), (second, other) = (connect(started(folder / name, **shared)) for name in ("a", "b"))
    for number in range(20):
        assert [each.lookup([key(number)], timeout_s=10) for each in (first, second)] == [[Outcome.ABSENT]] * 2
        assert get(second, [L3Item(key(number), 0, SIZE)]) == [Outcome.ABSENT]
        memory.buffer[:SIZE] = payload(number, SIZE)
        assert put(first, [L3Item(key(number), 0, SIZE)]) == [Outcome.OK]
        assert second.lookup([key(number)], timeout_s=10) == [Outcome.OK]
        assert get(second, [L3Item(key(number), 0, SIZE)]) == [Outcome.OK]
        assert bytes(other.buffer[:SIZE]) == payload(number, SIZE)


def test_br_071_a_tier_in_memory_before_a_shared_store_hides_nothing_that_others_store() -> None:
    fake = FakeMooncake()
    asking = SharedStore(SharedRamTier(open_fake(fake), capacity_bytes=MIB), object_bytes_max=MIB)
    storing = open_fake(fake)
    name = payloads.key(1)
    for _ in range(3):
        assert asking.lookup([name]) == ([Outcome.ABSENT], 0)
        assert payloads.get(asking, name, SIZE)[0] is Outcome.ABSENT  # type: ignore[arg-type]  # same calls
        assert payloads.put(storing, (name, payloads.payload(1, SIZE))) == [Outcome.OK]
        assert asking.lookup([name]) == ([Outcome.OK], 0)
        for _ in range(3):  # from the third time on out of memory
            assert payloads.get(asking, name, SIZE) == (Outcome.OK, payloads.payload(1, SIZE))  # type: ignore[arg-type]
        storing.delete([name])
    storing.close()
    fake.calls.clear()  # of the one fake client for two
    asking.close()


def test_br_071_an_engine_that_found_nothing_finds_what_another_engine_computes(make: Make) -> None:
    objects: Objects = {}
    asking, storing = make(objects=objects), make(objects=objects)
    for seed in range(3):
        request = asking.cache.match(prompt(4, seed=seed))
        asking.cache.prefetch(request)
        assert asking.cache.wait(request)
        assert asking.cache.load(request) is not None  # nothing
        asking.cache.release(request)
        storing.serve(prompt(4, seed=seed))
        storing.settle()
        assert asking.serve(prompt(4, seed=seed)).by_source == by_source(l3=4 * PAGE)


def test_br_071_what_l3_has_lost_is_not_remembered_as_stored(make: Make) -> None:
    """The reverse: an engine that knows that L3 had a page writes it again once L3 says that it is gone."""
    objects: Objects = {}
    clock = Clock()
    engine = make(objects=objects, clock=clock)
    engine.serve(prompt(4))
    engine.settle()
    stored = set(objects)
    assert stored
    objects.clear()
    clock.now_s += DirectoryConfig((1,), (1,)).l3_confirm_interval_s
    assert engine.serve(prompt(4)).by_source == by_source(l1=4 * PAGE)
    engine.settle()
    assert set(objects) >= stored
    assert make(objects=objects).serve(prompt(4)).by_source == by_source(l3=4 * PAGE)
