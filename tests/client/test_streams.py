"""The client of hicached where objects go through streams: cut off, late, wrong, refused."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import grpc

from hicache.client import DaemonL3
from hicache.l3 import L3Item
from hicache.outcome import Outcome
from hicache.wire.bulk import BULK_CONNECTIONS_PER_SESSION_MAX, BULK_OBJECT
from tests.client.conftest import ClientFactory
from tests.client.memory import SmallMemory
from tests.client.small_daemon import MIB, SmallDaemon
from tests.client.support import (
    Answer,
    get,
    key,
    open_descriptors,
    payload,
    put,
    wait_until,
)

SIZE = 5000


def stream_client(folder: Path, new_client: ClientFactory) -> tuple[SmallDaemon, DaemonL3]:
    daemon = SmallDaemon(folder, has_memory_socket=False).start()
    client = new_client(daemon.address)
    assert client.wait_ready(timeout_s=10)
    wait_until(lambda: not daemon.bulk_connections, what="the end of the connection that tried the bulk socket")
    return daemon, client


def objects_of(daemon: SmallDaemon, count: int, *, size: int = SIZE) -> list[L3Item]:
    """So many objects in the daemon, and where they belong here."""
    for number in range(count):
        daemon.objects[key(number)] = payload(number, size)
    return [L3Item(key(number), number * size, size) for number in range(count)]


def test_a_stream_that_is_cut_off_loses_what_had_not_come_and_keeps_the_rest(
    folder: Path, new_client: ClientFactory
) -> None:
    daemon, client = stream_client(folder, new_client)
    items = objects_of(daemon, 3)
    daemon.faults.objects = lambda objects: [*objects[:-1], objects[-1][:100]]
    daemon.faults.objects_end = lambda: False
    assert get(client, items) == [Outcome.OK, Outcome.OK, Outcome.UNAVAILABLE]
    daemon.faults.objects, daemon.faults.objects_end = (lambda objects: objects), (lambda: True)
    wait_until(lambda: get(client, items) == [Outcome.OK] * 3, what="another connection")
    daemon.stop()


def test_a_stream_that_never_ends_is_over_at_the_deadline_and_what_came_counts(
    folder: Path, new_client: ClientFactory
) -> None:
    daemon, client = stream_client(folder, new_client)
    items = objects_of(daemon, 2)
    release = threading.Event()
    daemon.faults.objects = lambda objects: objects[:1]
    daemon.faults.objects_end = lambda: release.wait(30)
    assert get(client, items, timeout_s=0.3) == [Outcome.OK, Outcome.DEADLINE]
    release.set()
    daemon.stop()


def test_after_the_deadline_a_late_stream_writes_nothing_here(
    folder: Path, new_client: ClientFactory, memory: SmallMemory
) -> None:
    daemon, client = stream_client(folder, new_client)
    [item] = objects_of(daemon, 1)
    release, sent = threading.Event(), threading.Event()

    def late(objects: list[bytes]) -> list[bytes]:
        release.wait(30)
        return objects

    daemon.faults.objects = late
    daemon.faults.objects_end = lambda: bool(sent.set()) or True
    assert get(client, [item], timeout_s=0.2) == [Outcome.DEADLINE]
    memory.buffer[:SIZE] = b"\xaa" * SIZE
    release.set()
    wait_until(lambda: not daemon.bulk_connections, what="the daemon's side of the connection has ended")
    assert memory.buffer[:SIZE] == b"\xaa" * SIZE
    daemon.stop()


def test_wrong_bytes_spoil_their_object_alone(folder: Path, new_client: ClientFactory) -> None:
    daemon, client = stream_client(folder, new_client)
    items = objects_of(daemon, 2)
    daemon.faults.objects = lambda objects: [objects[0][:20] + b"\xff" + objects[0][21:], objects[1]]
    assert get(client, items) == [Outcome.IO_ERROR, Outcome.OK]
    daemon.stop()


def test_streams_that_are_given_up_end_at_the_daemon_too_and_leave_nothing_here(
    folder: Path, new_client: ClientFactory
) -> None:
    daemon, client = stream_client(folder, new_client)
    [item] = objects_of(daemon, 1, size=MIB)
    nonsense = BULK_OBJECT.pack(77, Outcome.OK)
    daemon.faults.objects = lambda objects: [nonsense, *objects]
    threads_before, open_before = threading.active_count(), open_descriptors()
    for _ in range(50):
        assert get(client, [item]) == [Outcome.IO_ERROR]
    wait_until(lambda: not daemon.bulk_connections, what="the end of the daemon's side")
    wait_until(lambda: threading.active_count() <= threads_before, what="the end of the daemon's threads")
    assert open_descriptors() == open_before
    daemon.stop()


def test_calls_share_a_bounded_number_of_connections(folder: Path, new_client: ClientFactory) -> None:
    daemon, client = stream_client(folder, new_client)
    items = objects_of(daemon, 1)
    for _ in range(3):
        assert get(client, items) == [Outcome.OK]
    assert len(daemon.bulk_connections) == 1, "one connection serves one call after another"
    release = threading.Event()

    def end_the_connection() -> bool:
        release.wait(30)
        return False

    daemon.faults.objects = lambda objects: []  # nothing comes: every connection stays in use
    daemon.faults.objects_end = end_the_connection
    answers = [Answer() for _ in range(BULK_CONNECTIONS_PER_SESSION_MAX)]
    callers = [
        threading.Thread(target=client.get, args=(items,), kwargs={"timeout_s": 30.0, "done": answer})
        for answer in answers
    ]
    for caller in callers:
        caller.start()
    wait_until(lambda: len(daemon.requests["get_stream"]) == 3 + len(answers), what="all of them are asked")
    assert get(client, items, timeout_s=0.2) == [Outcome.DEADLINE], "it waited for a connection"
    assert len(daemon.bulk_connections) == BULK_CONNECTIONS_PER_SESSION_MAX
    assert len(daemon.requests["get_stream"]) == 3 + len(answers)
    release.set()
    for caller in callers:
        caller.join()
    assert [answer.wait() for answer in answers] == [[Outcome.UNAVAILABLE]] * len(answers)
    daemon.stop()


def test_a_refused_bulk_connection_is_a_refusal_of_the_call(folder: Path, new_client: ClientFactory) -> None:
    daemon, client = stream_client(folder, new_client)
    items = objects_of(daemon, 1)
    daemon.faults.refuse["bulk"] = (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_CALLS: so many at a time")
    assert get(client, items) == [Outcome.UNAVAILABLE]
    assert client.status().refusals == {"TOO_MANY_CALLS": 1}
    del daemon.faults.refuse["bulk"]
    assert get(client, items) == [Outcome.OK]
    daemon.stop()


def test_a_probe_says_that_the_bulk_socket_is_out_of_reach(folder: Path, new_client: ClientFactory) -> None:
    daemon, client = stream_client(folder, new_client)
    assert client.probe(timeout_s=5).bulk == "stream"
    os.unlink(daemon.bulk_path)
    report = client.probe(timeout_s=5)
    assert (report.is_ok, report.code) == (False, "BULK_LOST")
    assert "bulk socket" in report.detail
    daemon.stop()


def test_close_ends_a_stream_that_runs(folder: Path, new_client: ClientFactory) -> None:
    daemon, client = stream_client(folder, new_client)
    items = objects_of(daemon, 1)
    release, begun = threading.Event(), threading.Event()

    def hang_on(objects: list[bytes]) -> list[bytes]:
        begun.set()
        release.wait(30)
        return objects

    daemon.faults.objects = hang_on
    answer = Answer()
    caller = threading.Thread(target=client.get, args=(items,), kwargs={"timeout_s": 30.0, "done": answer})
    caller.start()
    assert begun.wait(10)
    client.close()
    caller.join(10)
    assert answer.wait() == [Outcome.UNAVAILABLE]
    release.set()
    daemon.stop()


def test_what_hicached_has_already_costs_no_bytes_over_a_stream(folder: Path, new_client: ClientFactory) -> None:
    daemon, client = stream_client(folder, new_client)
    items = [L3Item(key(number), number * SIZE, SIZE) for number in range(3)]
    assert put(client, items[:2]) == [Outcome.OK, Outcome.OK]
    assert put(client, items[:2]) == [Outcome.EXISTS, Outcome.EXISTS]
    assert put(client, items) == [Outcome.EXISTS, Outcome.EXISTS, Outcome.OK]
    daemon.stop()
