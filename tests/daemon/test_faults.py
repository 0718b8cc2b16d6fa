"""Faults of the store as a client meets them: rotten bytes, racing writers, eviction under its feet."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hicache.outcome import Outcome
from tests.daemon.client import Client
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.raw_links import Memory, object_key, payload_of
from tests.daemon.rig import DaemonProcess, scrape

Start = Callable[..., DaemonProcess]
StartThread = Callable[..., ThreadedDaemon]

PAGE = 64 * 1024
KEYS = [object_key(number) for number in range(4)]


def damage(folder: Path, payload: bytes, change: Callable[[bytes], bytes]) -> None:
    """Finds a piece of ``payload`` in the files below ``folder``, and replaces it by ``change(piece)``."""
    piece = payload[1000:3000]
    for path in folder.rglob("*"):
        if path.is_file() and (at := path.read_bytes().find(piece)) >= 0:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(change(piece))
            return
    raise AssertionError(f"the payload is in no file below {folder}")


@pytest.mark.parametrize("backend", ["lmdb", "file"])
@pytest.mark.parametrize(
    "change",
    [lambda piece: bytes([piece[0] ^ 1]) + piece[1:], lambda piece: bytes(len(piece))],
    ids=["one bit", "zeroed"],
)
def test_br_076_rotten_bytes_are_a_counted_miss_and_are_removed(
    start: Start, folder: Path, backend: str, change: Callable[[bytes], bytes]
) -> None:
    payloads = [random.Random(number).randbytes(PAGE) for number in range(4)]
    daemon = start(backend=backend)
    with Client(daemon.target) as client:
        assert client.put_stream(KEYS, payloads) == [Outcome.OK] * 4
    daemon.terminate()
    damage(folder / "store", payloads[1], change)

    daemon = start(backend=backend)
    with Client(daemon.target) as client, Memory(4 * PAGE) as memory:
        region = client.attach(memory).region_id
        outcomes = client.get(region, KEYS, [n * PAGE for n in range(4)], [PAGE] * 4)
        assert outcomes == [Outcome.OK, Outcome.CORRUPT, Outcome.OK, Outcome.OK]
        assert scrape(daemon.ready["http"])['hicache_store_removed_objects_total{reason="corrupt"}'] == 1
        assert client.present(KEYS) == [True, False, True, True]
        assert client.put_stream(KEYS[1:2], payloads[1:2]) == [Outcome.OK]
        assert client.get_stream(KEYS[1:2], [PAGE]) == [payloads[1]]


def test_br_076_objects_that_changed_places_are_misses(start: Start, folder: Path) -> None:
    payloads = [random.Random(number).randbytes(PAGE) for number in range(2)]
    daemon = start(backend="file")
    with Client(daemon.target) as client:
        client.put_stream(KEYS[:2], payloads)
    daemon.terminate()
    holding = [
        next(path for path in (folder / "store").rglob("*") if path.is_file() and payload in path.read_bytes())
        for payload in payloads
    ]
    first, second = (path.read_bytes() for path in holding)
    holding[0].write_bytes(second)
    holding[1].write_bytes(first)

    daemon = start(backend="file")
    with Client(daemon.target) as client:
        results = client.get_stream(KEYS[:2], [PAGE] * 2)
        assert not set(results) & {Outcome.OK, *payloads}
        assert client.present(KEYS[:2]) == [False, False]


def test_br_077_many_clients_putting_the_same_pages_all_succeed_and_write_once(daemon: ThreadedDaemon) -> None:
    pages, clients = 50, 12
    keys = [object_key(number) for number in range(pages)]
    size = 4096

    def put_all(seed: int) -> list[Outcome]:
        order = random.Random(seed).sample(range(pages), pages)
        with Client(daemon.target) as client, Memory(pages * size) as memory:
            region = client.attach(memory).region_id
            for number in range(pages):
                memory.bytes[number * size : (number + 1) * size] = payload_of(number, size)
            return client.put(region, [keys[n] for n in order], [n * size for n in order], [size] * pages)

    with ThreadPoolExecutor(clients) as pool:
        outcomes = [outcome for result in pool.map(put_all, range(clients)) for outcome in result]

    assert set(outcomes) <= {Outcome.OK, Outcome.EXISTS}
    assert outcomes.count(Outcome.OK) == pages
    assert scrape(daemon.ready.http)["hicache_store_written_bytes_total"] == pages * size
    assert daemon.metric("hicache_storage_errors_total") == 0
    with Client(daemon.target) as client:
        assert client.get_stream(keys, [size] * pages) == [payload_of(number, size) for number in range(pages)]


def test_br_077_a_key_that_is_twice_in_one_batch_is_stored_once(client: Client, memory: Memory) -> None:
    region = client.attach(memory).region_id
    memory.bytes[:16] = b"first...second.."
    outcomes = client.put(region, [KEYS[0], KEYS[0]], [0, 8], [8, 8])
    assert outcomes == [Outcome.OK, Outcome.EXISTS]
    assert client.put_stream([KEYS[1], KEYS[1]], [b"same", b"same"]) == [Outcome.OK, Outcome.EXISTS]
    assert client.get_stream([KEYS[0]], [8]) == [b"first..."]


@pytest.fixture
def tight(start_thread: StartThread) -> ThreadedDaemon:
    """A daemon whose store holds about 100 pages."""
    return start_thread(capacity_bytes="8MiB", object_bytes_max=PAGE)


class Flood:
    """Another client that fills the store with new pages, so that old ones have to go."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._next = 1000

    def put_pages(self, count: int) -> None:
        for _ in range(count):
            outcomes = self._client.put_stream([object_key(self._next)], [payload_of(self._next, PAGE)])
            assert outcomes[0] in (Outcome.OK, Outcome.NO_SPACE)
            self._next += 1


def test_the_store_never_grows_beyond_its_capacity(tight: ThreadedDaemon) -> None:
    with Client(tight.target) as client:
        flood = Flood(client)
        for _ in range(10):
            flood.put_pages(40)
            stats = client.stats()
            assert 0 < stats.used_bytes <= stats.capacity_bytes == 8 << 20
    samples = scrape(tight.ready.http)
    assert samples['hicache_store_removed_objects_total{reason="evicted"}'] > 200
    assert samples["hicache_store_eviction_failures_total"] == 0
