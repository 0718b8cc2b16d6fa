"""Objects go in and come out again: through registered memory and through streams, on both backends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hicache.outcome import Outcome
from tests.daemon.client import Client
from tests.daemon.raw_links import Memory, object_key, payload_of
from tests.daemon.rig import DaemonProcess, wait_until

PAGE = 64 * 1024
MIB = 1 << 20

Start = Callable[..., DaemonProcess]


@pytest.mark.parametrize("backend", ["lmdb", "file"])
def test_what_was_put_out_of_memory_is_got_back_into_other_pages(start: Start, backend: str) -> None:
    keys = [object_key(number) for number in range(8)]
    with Client(start(backend=backend).target) as client, Memory(16 * PAGE) as memory:
        region = client.attach(memory).region_id
        memory.bytes[: 8 * PAGE] = b"".join(payload_of(number, PAGE) for number in range(8))

        assert client.put(region, keys, [n * PAGE for n in range(8)], [PAGE] * 8) == [Outcome.OK] * 8
        assert client.lookup(keys)[0] == [Outcome.OK] * 8
        targets = [(15 - n) * PAGE for n in range(8)]
        assert client.get(region, keys, targets, [PAGE] * 8) == [Outcome.OK] * 8

        for number, target in enumerate(targets):
            assert memory.bytes[target : target + PAGE] == payload_of(number, PAGE)
        stats = client.stats()
        assert (stats.tenant_objects, stats.tenant_used_bytes, stats.objects) == (8, 8 * PAGE, 8)


@pytest.mark.parametrize("backend", ["lmdb", "file"])
def test_what_was_put_by_stream_is_got_by_stream_and_into_memory(start: Start, backend: str) -> None:
    keys = [object_key(number) for number in range(3)]
    payloads = [payload_of(1, 1), payload_of(2, 3 * MIB + 17), payload_of(3, MIB)]
    with Client(start(backend=backend).target) as client, Memory(8 * MIB) as memory:
        assert client.put_stream(keys, payloads) == [Outcome.OK] * 3
        assert client.get_stream(keys, [len(payload) for payload in payloads]) == payloads

        region = client.attach(memory).region_id
        assert client.get(region, keys[1:2], [5], [len(payloads[1])]) == [Outcome.OK]
        assert memory.bytes[5 : 5 + len(payloads[1])] == payloads[1]


def test_a_second_put_of_a_key_costs_no_copy(client: Client) -> None:
    assert client.put_stream([object_key(1)], [b"first"]) == [Outcome.OK]
    assert client.put_stream([object_key(1)], [b"other"]) == [Outcome.EXISTS]
    assert client.get_stream([object_key(1)], [5]) == [b"first"]


def test_a_deleted_object_is_gone(client: Client) -> None:
    client.put_stream([object_key(1)], [b"bytes"])
    assert client.delete([object_key(1), object_key(2)]) == [Outcome.OK, Outcome.ABSENT]
    assert client.present([object_key(1)]) == [False]


def test_each_item_has_its_own_outcome(client: Client, memory: Memory) -> None:
    region = client.attach(memory).region_id
    client.put_stream([object_key(1), object_key(2)], [b"12345678", b"1234"])
    keys = [object_key(number) for number in (1, 2, 3, 1)]

    outcomes = client.get(region, keys, [0, 100, 200, 4 << 20], [8, 8, 8, 8])

    assert outcomes == [Outcome.OK, Outcome.SIZE_MISMATCH, Outcome.ABSENT, Outcome.BAD_RANGE]
    assert memory.bytes[:8] == b"12345678"
    assert client.get_stream(keys[:3], [8, 8, 8]) == [b"12345678", Outcome.SIZE_MISMATCH, Outcome.ABSENT]


def test_an_empty_batch_is_answered_with_nothing(client: Client, memory: Memory) -> None:
    region = client.attach(memory).region_id
    assert client.lookup([]) == ([], 0)
    assert client.get(region, [], [], []) == []
    assert client.get_stream([], []) == []


def test_two_attached_regions_are_told_apart(client: Client, memory: Memory) -> None:
    with Memory(PAGE) as other:
        first, second = client.attach(memory).region_id, client.attach(other).region_id
        client.put_stream([object_key(1)], [b"bytes"])
        assert client.get(second, [object_key(1)], [7], [5]) == [Outcome.OK]
        assert first != second
        assert other.bytes[7:12] == b"bytes"
        assert memory.bytes[7:12] == bytes(5)


def test_what_one_of_two_daemons_on_a_folder_stores_the_other_serves(start: Start, folder: Path) -> None:
    keys = [object_key(number) for number in range(4)]
    shared = {"backend": "file", "file_shared": "true", "path": str(folder / "shared")}
    first = start(**shared)
    second = start(**shared, socket=str(folder / "2.sock"), ready_file=str(folder / "2.json"))
    with Client(first.target) as writer, Client(second.target) as reader:
        assert reader.lookup(keys)[0] == [Outcome.ABSENT] * 4
        assert writer.put_stream(keys, [payload_of(number, PAGE) for number in range(4)]) == [Outcome.OK] * 4
        outcomes, lease_id = reader.lookup(keys, lease_ms=1000)
        assert outcomes == [Outcome.OK] * 4
        assert reader.lease(lease_id, lease_ms=1000)
        assert reader.get_stream(keys, [PAGE] * 4) == [payload_of(number, PAGE) for number in range(4)]
        assert reader.delete(keys[:1]) == [Outcome.OK]
        assert writer.lookup(keys)[0] == [Outcome.ABSENT] + [Outcome.OK] * 3
        second.process.kill()
        second.process.wait()
        assert writer.get_stream(keys[1:], [PAGE] * 3) == [payload_of(number, PAGE) for number in range(1, 4)]
        wait_until(lambda: writer.stats().objects == 3, what="what the dead one deleted is counted")
