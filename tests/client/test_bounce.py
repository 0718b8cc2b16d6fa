"""The bounce buffer of a client whose memory cannot be shared: what passes through it, and what if that hangs."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc
import pytest

from hicache.client import DaemonL3
from hicache.client.bounce import LANES, PIECE_BYTES, Bounce
from hicache.l3 import L3Item
from hicache.outcome import Outcome
from tests.client.conftest import ClientFactory
from tests.client.memory import UnshareableMemory
from tests.client.small_daemon import SmallDaemon
from tests.client.support import Answer, get, key, open_descriptors, payload, put, wait_until

MIB = 1 << 20
MEMORY_BYTES = 48 * MIB
GAP_BYTES = 64
OBJECT_BYTES = 1 * MIB - GAP_BYTES
PIECES = 4
ITEMS = [L3Item(key(number), number * MIB, OBJECT_BYTES) for number in range(PIECES * PIECE_BYTES // MIB)]


@pytest.fixture
def memory() -> Iterator[UnshareableMemory]:
    memory = UnshareableMemory(MEMORY_BYTES)
    yield memory
    memory.close()


@pytest.fixture
def client(daemon: SmallDaemon, new_client: ClientFactory) -> DaemonL3:
    client = new_client(daemon.address)
    wait_until(lambda: client.status().bulk == "bounce", what="the registration")
    return client


def have(daemon: SmallDaemon, items: list[L3Item]) -> None:
    for number, item in enumerate(items):
        daemon.objects[item.key] = payload(number, item.size_bytes)


def bytes_of(memory: UnshareableMemory, item: L3Item) -> bytes:
    return bytes(memory.buffer[item.offset : item.offset + item.size_bytes])


def test_pieces_fill_their_ranges_and_no_other_byte(
    daemon: SmallDaemon, client: DaemonL3, memory: UnshareableMemory
) -> None:
    have(daemon, ITEMS)
    del daemon.objects[ITEMS[5].key]
    daemon.objects[ITEMS[9].key] = b"short"
    memory.buffer[:] = b"\xaa" * MEMORY_BYTES
    outcomes = get(client, ITEMS[::-1])[::-1]
    assert len(daemon.requests["get"]) == PIECES
    for number, item in enumerate(ITEMS):
        end = item.offset + item.size_bytes
        assert memory.buffer[end : end + GAP_BYTES] == b"\xaa" * GAP_BYTES
        if number in (5, 9):
            assert outcomes[number] is (Outcome.ABSENT if number == 5 else Outcome.SIZE_MISMATCH)
            assert bytes_of(memory, item) == b"\xaa" * item.size_bytes, (
                "what did not come leaves the caller's bytes alone"
            )
        else:
            assert outcomes[number] is Outcome.OK
            assert bytes_of(memory, item) == payload(number, item.size_bytes)


def test_what_was_put_is_what_lay_there_when_it_was_asked_for(
    daemon: SmallDaemon, client: DaemonL3, memory: UnshareableMemory
) -> None:
    for number, item in enumerate(ITEMS):
        memory.buffer[item.offset : item.offset + item.size_bytes] = payload(number, item.size_bytes)
    assert put(client, ITEMS) == [Outcome.OK] * len(ITEMS)
    assert [daemon.objects[item.key] == payload(number, OBJECT_BYTES) for number, item in enumerate(ITEMS)] == [
        True
    ] * len(ITEMS)
    assert put(client, ITEMS) == [Outcome.EXISTS] * len(ITEMS)


def test_what_is_larger_than_a_lane_goes_through_a_stream(
    daemon: SmallDaemon, client: DaemonL3, memory: UnshareableMemory
) -> None:
    large = L3Item(key(1), MIB, 20 * MIB)
    items = [L3Item(key(0), 0, MIB), large, L3Item(key(2), 30 * MIB, MIB)]
    have(daemon, items)
    assert get(client, items) == [Outcome.OK] * 3
    assert bytes_of(memory, large) == payload(1, large.size_bytes)
    assert daemon.requests["get_stream"] == [[large.key]]


def test_calls_beyond_the_lanes_go_through_streams(daemon: SmallDaemon, client: DaemonL3) -> None:
    have(daemon, ITEMS)
    release = threading.Event()
    daemon.faults.before_bytes = lambda operation: release.wait(30) and None
    answers = [Answer() for _ in range(LANES)]
    callers = [
        threading.Thread(target=client.get, args=([item],), kwargs={"timeout_s": 30.0, "done": answer})
        for item, answer in zip(ITEMS, answers, strict=False)
    ]
    for caller in callers:
        caller.start()
    wait_until(lambda: len(daemon.requests.get("get", [])) == LANES, what="the use of all lanes")
    assert get(client, ITEMS[4:5]) == [Outcome.OK]
    assert daemon.requests["get_stream"] == [[ITEMS[4].key]]
    release.set()
    assert [answer.wait() for answer in answers] == [[Outcome.OK]] * LANES
    for caller in callers:
        caller.join()


def test_a_late_get_is_told_at_once_and_never_writes_where_the_caller_has_gone_on(
    daemon: SmallDaemon, client: DaemonL3, memory: UnshareableMemory
) -> None:
    have(daemon, ITEMS)
    go_on = threading.Event()
    daemon.faults.late = lambda operation: go_on
    memory.buffer[:] = bytes(MEMORY_BYTES)
    assert get(client, ITEMS) == [Outcome.DEADLINE] * len(ITEMS)
    assert client.status().items_in_doubt == 0, "the bytes are the caller's"
    assert client.status().regions_draining == 1
    daemon.faults.late = lambda operation: None
    wait_until(lambda: get(client, ITEMS[:1]) == [Outcome.OK], what="a get beside the one that hangs")
    memory.buffer[:] = bytes(MEMORY_BYTES)
    go_on.set()
    wait_until(lambda: client.status().regions_draining == 0, what="the end of the late get")
    assert bytes(memory.buffer) == bytes(MEMORY_BYTES)
    wait_until(lambda: client.status().bulk == "bounce", what="another registration")
    assert get(client, ITEMS) == [Outcome.OK] * len(ITEMS)


def test_a_lane_that_hangs_is_not_lent_again_before_hicached_lets_go(
    daemon: SmallDaemon, client: DaemonL3, memory: UnshareableMemory
) -> None:
    have(daemon, ITEMS)
    stuck = [threading.Event() for _ in range(LANES)]
    for event in stuck:
        wait_until(lambda: client.status().bulk == "bounce", what="the registration")
        daemon.faults.late = lambda operation, event=event: event
        assert get(client, ITEMS[:1]) == [Outcome.DEADLINE]
    daemon.faults.late = lambda operation: None
    wait_until(lambda: client.status().bulk == "bounce", what="the registration")
    before = len(daemon.requests["get"])
    assert get(client, ITEMS[1:2]) == [Outcome.OK]
    assert len(daemon.requests["get"]) == before, "no lane is free: it goes through a stream"
    stuck[0].set()
    wait_until(lambda: client.status().regions_draining == LANES - 1, what="the end of one")
    assert get(client, ITEMS[2:3]) == [Outcome.OK]
    assert len(daemon.requests["get"]) == before + 1
    assert bytes_of(memory, ITEMS[2]) == payload(2, OBJECT_BYTES)
    for event in stuck:
        event.set()
    wait_until(lambda: client.status().regions_draining == 0, what="the end of all")


def test_a_late_piece_keeps_the_lane_though_the_next_one_is_refused(daemon: SmallDaemon, client: DaemonL3) -> None:
    have(daemon, ITEMS)
    go_on = threading.Event()
    seen: list[str] = []

    def late_then_refused(operation: str) -> threading.Event:
        seen.append(operation)
        daemon.faults.refuse["get"] = (grpc.StatusCode.RESOURCE_EXHAUSTED, "RATE_LIMITED: retry in 5 ms")
        return go_on

    daemon.faults.late = late_then_refused
    for number in range(LANES):
        wait_until(lambda: client.status().bulk == "bounce", what="the registration")
        outcomes = get(client, ITEMS)
        assert len(seen) == number + 1
        assert set(outcomes[: PIECE_BYTES // MIB]) == {Outcome.DEADLINE}
        assert Outcome.OK not in outcomes
        del daemon.faults.refuse["get"]
    daemon.faults.late = lambda operation: None
    wait_until(lambda: client.status().bulk == "bounce", what="the registration")
    assert get(client, ITEMS[:1]) == [Outcome.OK]
    assert daemon.requests["get_stream"] == [[ITEMS[0].key]]
    go_on.set()
    wait_until(lambda: client.status().regions_draining == 0, what="the end of all")


def test_a_get_that_is_not_answered_is_over_at_its_deadline(daemon: SmallDaemon, client: DaemonL3) -> None:
    have(daemon, ITEMS)
    release = threading.Event()
    seen: list[str] = []

    def hang_at_the_second(operation: str) -> None:
        seen.append(operation)
        if len(seen) == 2:
            release.wait(30)

    daemon.faults.before_bytes = hang_at_the_second
    outcomes = get(client, ITEMS, timeout_s=0.5)
    first = outcomes.count(Outcome.OK)
    assert 0 < first < len(ITEMS)
    assert outcomes == [Outcome.OK] * first + [Outcome.DEADLINE] * (len(ITEMS) - first)
    release.set()
    wait_until(lambda: get(client, ITEMS) == [Outcome.OK] * len(ITEMS), what="a get of everything")


def test_a_refusal_costs_the_call_and_no_lane(daemon: SmallDaemon, client: DaemonL3) -> None:
    have(daemon, ITEMS)
    daemon.faults.refuse["get"] = (grpc.StatusCode.RESOURCE_EXHAUSTED, "RATE_LIMITED: retry in 5 ms")
    for _ in range(LANES + 1):
        assert get(client, ITEMS) == [Outcome.REFUSED] * len(ITEMS)
    del daemon.faults.refuse["get"]
    assert get(client, ITEMS) == [Outcome.OK] * len(ITEMS)
    assert "get_stream" not in daemon.requests


def test_outcomes_that_make_no_sense_are_errors_of_their_objects(daemon: SmallDaemon, client: DaemonL3) -> None:
    have(daemon, ITEMS)
    daemon.faults.outcomes = lambda outcomes: bytes([200, *outcomes[1:]])
    assert get(client, ITEMS[:3]) == [Outcome.IO_ERROR, Outcome.OK, Outcome.OK]


def test_a_mistake_on_this_side_costs_no_lane(daemon: SmallDaemon, client: DaemonL3) -> None:
    have(daemon, ITEMS)
    for _ in range(LANES):
        wrong = Answer()
        client.get([L3Item("no bytes", 0, MIB)], timeout_s=5, done=wrong)  # type: ignore[arg-type]
        assert wrong.wait() == [Outcome.UNAVAILABLE]
    wait_until(lambda: client.status().bulk == "bounce", what="the registration")
    assert get(client, ITEMS[:1]) == [Outcome.OK]
    assert "get_stream" not in daemon.requests


def test_a_bounce_buffer_that_hicached_refuses_leaves_streams(daemon: SmallDaemon, new_client: ClientFactory) -> None:
    daemon.faults.refuse_memory = "regions_bytes_max is 5 bytes"
    client = new_client(daemon.address)
    assert client.wait_ready(timeout_s=10)
    assert put(client, ITEMS[:2]) == [Outcome.OK] * 2
    assert (client.status().bulk, client.status().bulk_reason) == ("stream", "regions_bytes_max is 5 bytes")


def test_a_lane_holds_two_of_the_largest_objects_and_closing_gives_everything_back() -> None:
    before = open_descriptors()
    bounce = Bounce(object_bytes_max=30 * MIB + 1)
    assert bounce.lane_bytes >= 60 * MIB + 2
    lanes = [bounce.take() for _ in range(LANES + 1)]
    assert sorted(lane for lane in lanes if lane is not None) == [0, bounce.lane_bytes]
    bounce.close()
    bounce.close()
    assert open_descriptors() == before
