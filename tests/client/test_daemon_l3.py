"""The client of hicached when the daemon is slow, wrong, or gone, in this very process."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import threading
import time
import warnings
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from hicache.breaker import BreakerLimits
from hicache.client import ClientSettings, ClientState, DaemonL3
from hicache.client.address import parse_address
from hicache.client.fault import Fault, call
from hicache.client.session import Identity, Session
from hicache.client.stream import through_stream
from hicache.client.supervisor import LINKS_DRAINING_MAX
from hicache.client.transfer import Direction, Transfer
from hicache.errors import ConfigError
from hicache.l3 import L3Item
from hicache.outcome import Outcome
from hicache.spec import CacheSpec, PagedGroup
from hicache.wire import hicached_pb2 as wire
from hicache.wire.bulk import BULK_CONNECTIONS_PER_SESSION_MAX, BULK_OBJECT
from tests.client.conftest import ClientFactory
from tests.client.memory import SmallMemory
from tests.client.small_daemon import MIB, SmallDaemon
from tests.client.support import (
    QUICK,
    SPEC,
    Answer,
    client_threads,
    get,
    key,
    open_descriptors,
    payload,
    put,
    wait_until,
)

SIZE = 5000


def hang(daemon: SmallDaemon, *, where: str, operation: str, times: int = 1) -> threading.Event:
    """Make the next ``times`` calls of ``operation`` stand still until the event is set."""
    release = threading.Event()
    left = [times]

    def stand_still(name: str) -> None:
        if name == operation and left[0]:
            left[0] -= 1
            release.wait(30)

    setattr(daemon.faults, where, stand_still)
    return release


# A transfer without an answer


def test_a_late_get_lands_only_in_memory_that_is_still_held(
    daemon: SmallDaemon, client: DaemonL3, memory: SmallMemory
) -> None:
    daemon.objects[key(1)] = payload(1, SIZE)
    release = hang(daemon, where="before_bytes", operation="get")
    at_done: list[bytes] = []
    answer = Answer(on_done=lambda: at_done.append(bytes(memory.buffer[:SIZE])))
    started_s = time.monotonic()
    client.get([L3Item(key(1), 0, SIZE)], timeout_s=0.2, done=answer)
    assert time.monotonic() - started_s < 2, "the caller got its thread back at the deadline"
    wait_until(lambda: client.status().items_in_doubt == 1)
    assert not answer.is_there
    release.set()
    assert answer.wait() == [Outcome.DEADLINE]
    assert at_done == [payload(1, SIZE)], "the late bytes were there before the memory was given back"
    assert client.status().items_in_doubt == 0


def test_fifty_others_go_on_beside_a_get_that_is_never_answered(
    daemon: SmallDaemon, client: DaemonL3, memory: SmallMemory
) -> None:
    for number in range(51):
        daemon.objects[key(number)] = payload(number, SIZE)
    release = hang(daemon, where="before_bytes", operation="get")
    stuck = Answer()
    client.get([L3Item(key(0), 0, SIZE)], timeout_s=0.2, done=stuck)
    for number in range(1, 51):
        assert get(client, [L3Item(key(number), number * SIZE, SIZE)]) == [Outcome.OK]
        assert memory.buffer[number * SIZE : (number + 1) * SIZE] == payload(number, SIZE)
    assert not stuck.is_there
    assert client.status().bulk == "memory", "the memory was registered anew"
    release.set()
    assert stuck.wait() == [Outcome.DEADLINE]


def test_a_late_put_holds_its_source_until_hicached_has_read_it(
    daemon: SmallDaemon, client: DaemonL3, memory: SmallMemory
) -> None:
    memory.buffer[:SIZE] = payload(1, SIZE)
    release = hang(daemon, where="before_bytes", operation="put")
    answer = Answer()
    client.put([L3Item(key(1), 0, SIZE)], timeout_s=0.2, done=answer)
    wait_until(lambda: client.status().items_in_doubt == 1)
    assert not answer.is_there
    release.set()
    assert answer.wait() == [Outcome.DEADLINE]
    assert daemon.objects[key(1)] == payload(1, SIZE)


def test_an_answer_that_comes_too_late_is_not_an_answer(daemon: SmallDaemon, client: DaemonL3) -> None:
    daemon.objects[key(1)] = payload(1, SIZE)
    release = hang(daemon, where="before_reply", operation="get")
    answer = Answer()
    client.get([L3Item(key(1), 0, SIZE)], timeout_s=0.2, done=answer)
    assert answer.wait() == [Outcome.DEADLINE], "no transfer touched the memory any more, so it ended at once"
    release.set()
    assert get(client, [L3Item(key(1), 0, SIZE)]) == [Outcome.OK]
    assert len(answer.calls) == 1


def test_an_object_that_hicached_itself_calls_late_is_in_doubt_although_there_is_an_answer(
    daemon: SmallDaemon, client: DaemonL3, memory: SmallMemory
) -> None:
    daemon.objects[key(1)] = payload(1, SIZE)
    go_on = threading.Event()
    daemon.faults.late = lambda operation: go_on
    at_done: list[bytes] = []
    answer = Answer(on_done=lambda: at_done.append(bytes(memory.buffer[:SIZE])))
    client.get([L3Item(key(1), 0, SIZE)], timeout_s=5, done=answer)
    assert not answer.is_there
    assert client.status().items_in_doubt == 1
    go_on.set()
    assert answer.wait() == [Outcome.DEADLINE]
    assert at_done == [payload(1, SIZE)]


def test_a_transfer_that_fails_inside_the_daemon_is_in_doubt_until_it_lets_go(
    daemon: SmallDaemon, client: DaemonL3
) -> None:
    daemon.objects[key(1)] = payload(1, SIZE)
    daemon.faults.refuse["get"] = (grpc.StatusCode.INTERNAL, "something broke")
    assert get(client, [L3Item(key(1), 0, SIZE)]) == [Outcome.UNAVAILABLE]
    del daemon.faults.refuse["get"]
    wait_until(lambda: client.status().bulk == "memory")
    assert get(client, [L3Item(key(1), 0, SIZE)]) == [Outcome.OK]


def test_batches_of_one_call_are_told_together_and_what_was_answered_counts(
    folder: Path, new_client: ClientFactory
) -> None:
    limits = wire.Limits(object_bytes_max=SIZE, batch_keys_max=2, batch_bytes_max=MIB, lease_ms_max=1)
    daemon = SmallDaemon(folder, limits=limits).start()
    client = new_client(daemon.address)
    assert client.wait_ready(timeout_s=10)
    for number in range(6):
        daemon.objects[key(number)] = payload(number, SIZE)
    seen = [0]
    release = threading.Event()

    def hang_second_batch(operation: str) -> None:
        seen[0] += operation == "get"
        if seen[0] == 2:
            release.wait(30)

    daemon.faults.before_bytes = hang_second_batch
    answer = Answer()
    client.get([L3Item(key(number), number * SIZE, SIZE) for number in range(6)], timeout_s=0.3, done=answer)
    assert not answer.is_there
    release.set()
    assert answer.wait() == [Outcome.OK] * 2 + [Outcome.DEADLINE] * 4
    assert seen[0] == 2, "nothing was sent after the batch that was not answered"
    daemon.stop()


def test_a_mistake_on_this_side_is_a_miss_whose_bytes_are_in_doubt_until_hicached_lets_go(
    daemon: SmallDaemon, client: DaemonL3
) -> None:
    answer = Answer()
    client.get([L3Item("no bytes", 0, SIZE)], timeout_s=5, done=answer)  # type: ignore[arg-type]
    assert answer.wait() == [Outcome.UNAVAILABLE]
    wait_until(lambda: client.status().bulk == "memory")
    assert put(client, [L3Item(key(1), 0, SIZE)]) == [Outcome.OK]


def test_a_refused_transfer_is_told_at_once_and_remembered(daemon: SmallDaemon, client: DaemonL3) -> None:
    daemon.faults.refuse["put"] = (grpc.StatusCode.RESOURCE_EXHAUSTED, "BATCH_TOO_LARGE: not so many")
    assert put(client, [L3Item(key(1), 0, SIZE)]) == [Outcome.REFUSED]
    status = client.status()
    assert status.refusals == {"BATCH_TOO_LARGE": 1}
    assert status.bulk == "memory"
    assert not status.is_degraded


def test_close_says_what_is_in_doubt_and_tells_it_only_when_it_is_over(
    daemon: SmallDaemon, new_client: ClientFactory, caplog: pytest.LogCaptureFixture
) -> None:
    client = new_client(daemon.address, settings=dataclasses.replace(QUICK, close_timeout_s=0.1))
    assert client.wait_ready(timeout_s=10)
    daemon.objects[key(1)] = payload(1, SIZE)
    release = hang(daemon, where="before_bytes", operation="get")
    answer = Answer()
    client.get([L3Item(key(1), 0, SIZE)], timeout_s=0.1, done=answer)
    started_s = time.monotonic()
    client.close()
    assert time.monotonic() - started_s < 5
    assert not answer.is_there
    assert client.status().items_in_doubt == 1
    assert "may still touch 1 objects" in caplog.text
    release.set()
    assert answer.wait() == [Outcome.DEADLINE]
    wait_until(lambda: not client_threads(), what="the end of the threads")


def test_close_ends_a_call_that_runs_and_done_is_still_called(daemon: SmallDaemon, client: DaemonL3) -> None:
    release = hang(daemon, where="before_reply", operation="get")
    answer = Answer()
    caller = threading.Thread(
        target=client.get, args=([L3Item(key(1), 0, SIZE)],), kwargs={"timeout_s": 30.0, "done": answer}
    )
    caller.start()
    wait_until(lambda: bool(daemon.requests.get("get")))
    client.close()
    caller.join(5)
    assert not caller.is_alive()
    assert answer.wait() == [Outcome.UNAVAILABLE]
    release.set()


# The daemon comes, goes, and comes back


def test_without_a_daemon_the_engine_starts_and_calls_cost_nothing(folder: Path, new_client: ClientFactory) -> None:
    started_s = time.monotonic()
    client = new_client(f"unix://{folder}/hicached.sock")
    assert client.lookup([key(1)], timeout_s=10) == [Outcome.UNAVAILABLE]
    assert get(client, [L3Item(key(1), 0, SIZE)]) == [Outcome.UNAVAILABLE]
    assert time.monotonic() - started_s < 1
    wait_until(lambda: client.status().state is ClientState.UNAVAILABLE)
    assert client.status().is_degraded


def test_a_daemon_that_starts_later_is_used_as_soon_as_it_is_there(folder: Path, new_client: ClientFactory) -> None:
    client = new_client(f"unix://{folder}/hicached.sock")
    wait_until(lambda: client.status().state is ClientState.UNAVAILABLE)
    daemon = SmallDaemon(folder).start()
    assert client.wait_ready(timeout_s=5)
    assert put(client, [L3Item(key(1), 0, SIZE)]) == [Outcome.OK]
    daemon.stop()


def test_a_restarted_daemon_is_found_again_with_its_memory(folder: Path, daemon: SmallDaemon, client: DaemonL3) -> None:
    assert put(client, [L3Item(key(1), 0, SIZE)]) == [Outcome.OK]
    daemon.stop()
    wait_until(lambda: client.status().state is ClientState.UNAVAILABLE)
    assert client.lookup([key(1)], timeout_s=10) == [Outcome.UNAVAILABLE]
    again = SmallDaemon(folder, objects=daemon.objects).start()
    wait_until(lambda: client.wait_ready(timeout_s=0), timeout_s=5)
    assert client.status().sessions_opened == 2
    assert get(client, [L3Item(key(1), 0, SIZE)]) == [Outcome.OK]
    assert client.status().bulk == "memory"
    again.stop()


def test_a_session_that_the_daemon_has_forgotten_is_opened_anew(daemon: SmallDaemon, client: DaemonL3) -> None:
    daemon.sessions.clear()
    assert client.lookup([key(1)], timeout_s=10) == [Outcome.UNAVAILABLE]
    wait_until(lambda: client.status().sessions_opened == 2 and client.wait_ready(timeout_s=0))
    assert client.lookup([key(1)], timeout_s=10) == [Outcome.ABSENT]


def test_an_idle_session_that_the_daemon_has_forgotten_is_noticed_by_the_heartbeat(
    daemon: SmallDaemon, client: DaemonL3
) -> None:
    daemon.sessions.clear()
    wait_until(lambda: client.status().sessions_opened == 2, what="a new session without any call")


def test_when_the_medium_hangs_calls_soon_cost_nothing_and_it_comes_back(
    daemon: SmallDaemon, new_client: ClientFactory
) -> None:
    client = new_client(daemon.address)
    assert client.wait_ready(timeout_s=10)
    release = hang(daemon, where="before_reply", operation="lookup", times=10)
    for _ in range(QUICK.breaker.consecutive_failures_max):
        assert client.lookup([key(1)], timeout_s=0.05) == [Outcome.DEADLINE]
    started_s = time.monotonic()
    outcomes = [client.lookup([key(1)], timeout_s=5)[0] for _ in range(100)]
    assert outcomes.count(Outcome.UNAVAILABLE) == 100
    assert time.monotonic() - started_s < 0.05 * 5
    assert client.status().is_degraded
    release.set()
    wait_until(lambda: client.lookup([key(1)], timeout_s=5) == [Outcome.ABSENT])
    assert not client.status().is_degraded


def test_memory_that_hicached_refuses_is_moved_through_streams(
    daemon: SmallDaemon, new_client: ClientFactory, caplog: pytest.LogCaptureFixture
) -> None:
    daemon.faults.refuse_memory = "not sealed"
    client = new_client(daemon.address)
    assert client.wait_ready(timeout_s=10)
    assert put(client, [L3Item(key(1), 0, SIZE)]) == [Outcome.OK]
    assert (client.status().bulk, client.status().bulk_reason) == ("stream", "not sealed")
    assert "not sealed" in caplog.text


def test_a_region_that_hicached_has_let_go_of_is_registered_anew(daemon: SmallDaemon, client: DaemonL3) -> None:
    daemon.objects[key(1)] = payload(1, SIZE)
    daemon.faults.refuse["get"] = (grpc.StatusCode.INVALID_ARGUMENT, "UNKNOWN_REGION: detached")
    assert get(client, [L3Item(key(1), 0, SIZE)]) == [Outcome.UNAVAILABLE]
    del daemon.faults.refuse["get"]
    wait_until(lambda: client.status().bulk == "memory")
    assert get(client, [L3Item(key(1), 0, SIZE)]) == [Outcome.OK]


def test_a_call_on_a_session_that_was_just_closed_was_never_sent(daemon: SmallDaemon) -> None:
    session = Session.open(
        parse_address(daemon.address), Identity.of(SPEC, token=""), timeout_s=10, on_end=lambda: None
    )
    assert isinstance(session, Session)
    session.close()
    fault = call(session.stub.Stats, wire.StatsRequest(), timeout_s=5)
    assert isinstance(fault, Fault)
    assert fault.leaves_bytes_alone
    transfer = Transfer(Direction.GET, [L3Item(key(1), 0, 10)], timeout_s=5, done=Answer())
    assert through_stream(session, memoryview(bytearray(10)), transfer) == fault


def test_no_more_registrations_are_left_draining_than_the_bound_and_bulk_goes_on(
    daemon: SmallDaemon, new_client: ClientFactory
) -> None:
    trusting = BreakerLimits(consecutive_failures_max=100, window_calls=100)
    client = new_client(daemon.address, settings=dataclasses.replace(QUICK, breaker=trusting))
    daemon.objects[key(1)] = payload(1, SIZE)
    go_on = threading.Event()
    daemon.faults.late = lambda operation: go_on
    stuck = [Answer() for _ in range(LINKS_DRAINING_MAX)]
    for number, answer in enumerate(stuck):
        wait_until(lambda: client.status().bulk == "memory")
        client.get([L3Item(key(1), number * SIZE, SIZE)], timeout_s=5, done=answer)
    assert client.status().regions_draining == LINKS_DRAINING_MAX
    wait_until(lambda: get(client, [L3Item(key(1), 20 * SIZE, SIZE)]) == [Outcome.OK], what="a get through streams")
    assert client.status().bulk == "stream"
    go_on.set()
    assert [answer.wait() for answer in stuck] == [[Outcome.DEADLINE]] * LINKS_DRAINING_MAX
    daemon.faults.late = lambda operation: None
    wait_until(lambda: client.status().bulk == "memory")


# Refusals and limits


def test_a_wrong_token_is_said_once_seen_in_the_status_and_cured_without_a_restart(
    daemon: SmallDaemon, new_client: ClientFactory, caplog: pytest.LogCaptureFixture
) -> None:
    daemon.token = "right"
    client = new_client(daemon.address, token="wrong")
    wait_until(lambda: len(daemon.requests.get("session", [])) >= 3, what="a third attempt")
    status = client.status()
    assert (status.state, status.refusal) == (ClientState.REFUSED, "BAD_TOKEN")
    assert client.lookup([key(1)], timeout_s=1) == [Outcome.UNAVAILABLE]
    assert caplog.text.count("BAD_TOKEN") == 1
    daemon.token = "wrong"
    assert client.wait_ready(timeout_s=5)
    assert client.status().refusal == ""


def test_objects_above_the_limit_of_the_daemon_are_found_out_when_connecting(
    folder: Path, new_client: ClientFactory
) -> None:
    big = CacheSpec("big", "1", (PagedGroup("full", tuple(range(64)), heads=64, head_dim=128, dtype="float32"),))
    limits = wire.Limits(object_bytes_max=MIB, batch_keys_max=9, batch_bytes_max=MIB)
    daemon = SmallDaemon(folder, limits=limits).start()
    client = new_client(daemon.address, spec=big)
    wait_until(lambda: client.status().state is ClientState.REFUSED)
    assert client.status().refusal == "OBJECT_TOO_LARGE"
    assert str(MIB) in client.status().reason
    daemon.stop()


def test_batches_are_cut_to_the_limits_on_keys_and_on_bytes(folder: Path, new_client: ClientFactory) -> None:
    limits = wire.Limits(object_bytes_max=2 * SIZE, batch_keys_max=1000, batch_bytes_max=3 * SIZE, lease_ms_max=2000)
    daemon = SmallDaemon(folder, limits=limits).start()
    client = new_client(daemon.address)
    assert client.wait_ready(timeout_s=10)
    assert client.lookup([key(number) for number in range(2500)], timeout_s=10) == [Outcome.ABSENT] * 2500
    lookups = daemon.requests["lookup"]
    assert [len(request.keys) // request.key_bytes for request in lookups] == [1000, 1000, 500]  # type: ignore[attr-defined]
    items = [L3Item(key(number), number * SIZE, SIZE) for number in range(7)]
    assert put(client, [*items, L3Item(key(8), 0, 2 * SIZE + 1)]) == [Outcome.OK] * 7 + [Outcome.TOO_LARGE]
    assert [len(keys) for keys in daemon.requests["put"]] == [3, 3, 1]  # type: ignore[arg-type]
    daemon.stop()


def test_a_looked_up_object_is_leased_for_as_long_as_both_sides_want(
    daemon: SmallDaemon, new_client: ClientFactory
) -> None:
    for lease_s, lease_ms in ((5.0, 5000), (3600.0, 60_000), (0.0, 0)):
        client = new_client(daemon.address, settings=dataclasses.replace(QUICK, lease_s=lease_s))
        assert client.wait_ready(timeout_s=10)
        client.lookup([key(1)], timeout_s=10)
        assert daemon.requests["lookup"][-1].lease_ms == lease_ms  # type: ignore[attr-defined]


def test_an_object_that_is_gone_between_lookup_and_get_is_a_miss(daemon: SmallDaemon, client: DaemonL3) -> None:
    daemon.objects[key(1)] = payload(1, SIZE)
    daemon.objects[key(2)] = payload(2, SIZE)
    assert client.lookup([key(1), key(2)], timeout_s=10) == [Outcome.OK, Outcome.OK]
    del daemon.objects[key(2)]
    items = [L3Item(key(1), 0, SIZE), L3Item(key(2), SIZE, SIZE)]
    assert get(client, items) == [Outcome.OK, Outcome.ABSENT]
    assert not client.status().is_degraded


def test_a_64_mib_object_goes_through_memory_and_through_the_bulk_socket(folder: Path) -> None:
    size = 64 * MIB
    for has_memory_socket in (True, False):
        memory = SmallMemory(2 * size)
        daemon = SmallDaemon(folder, has_memory_socket=has_memory_socket).start()
        client = DaemonL3(daemon.address, spec=SPEC, memory=memory, settings=QUICK)
        assert client.wait_ready(timeout_s=10)
        memory.buffer[:size] = payload(1, size)
        assert put(client, [L3Item(key(1), 0, size)], timeout_s=30) == [Outcome.OK]
        assert get(client, [L3Item(key(1), size, size)], timeout_s=30) == [Outcome.OK]
        assert memory.buffer[size:] == memory.buffer[:size]
        client.close()
        daemon.stop()
        memory.close()


def test_an_outcome_from_a_newer_daemon_is_an_error(daemon: SmallDaemon, client: DaemonL3) -> None:
    daemon.objects[key(1)] = payload(1, SIZE)
    daemon.faults.outcomes = lambda _: b"\xc8"
    assert get(client, [L3Item(key(1), 0, SIZE)]) == [Outcome.IO_ERROR]


# Streams


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


# What is left behind


def test_after_close_no_thread_descriptor_or_mapping_is_left(daemon: SmallDaemon, memory: SmallMemory) -> None:
    def use_and_close() -> None:
        client = DaemonL3(daemon.address, spec=SPEC, memory=memory, settings=QUICK)
        assert client.wait_ready(timeout_s=10)
        put(client, [L3Item(key(1), 0, SIZE)])
        get(client, [L3Item(key(1), SIZE, SIZE)])
        client.probe()
        client.close()
        wait_until(lambda: not daemon.sessions, what="the end of the session at the daemon")

    use_and_close()  # gRPC and the daemon, which is in this process, open what they keep
    wait_until(lambda: not client_threads())
    before = open_descriptors()
    for _ in range(5):
        use_and_close()
    wait_until(lambda: not client_threads())
    wait_until(lambda: open_descriptors() <= before, what="the end of every descriptor")


def test_a_forked_child_has_no_l3_and_harms_its_parent_in_nothing(daemon: SmallDaemon, client: DaemonL3) -> None:
    assert put(client, [L3Item(key(1), 0, SIZE)]) == [Outcome.OK]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of a fork beside threads: our point
        child = os.fork()
    if child == 0:
        outcomes = client.lookup([key(1)], timeout_s=5)
        client.close()
        os._exit(0 if outcomes == [Outcome.UNAVAILABLE] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert get(client, [L3Item(key(1), 0, SIZE)]) == [Outcome.OK]


def test_a_process_that_forgets_to_close_still_ends(daemon: SmallDaemon) -> None:
    script = (
        "import sys; from hicache.client import DaemonL3; from tests.client.support import SPEC;"
        "from tests.client.memory import SmallMemory;"
        f"client = DaemonL3({daemon.address!r}, spec=SPEC, memory=SmallMemory());"
        "sys.exit(0 if client.wait_ready(timeout_s=10) else 1)"
    )
    ended = subprocess.run([sys.executable, "-c", script], timeout=30, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


# Start-up checks


def test_a_probe_says_who_serves_and_how(daemon: SmallDaemon, client: DaemonL3) -> None:
    report = client.probe(timeout_s=5)
    assert (report.is_ok, report.code, report.tenant, report.bulk) == (True, "OK", "default", "memory")
    assert report.store_id == b"s" * 16


def test_a_probe_with_a_wrong_token_says_so(daemon: SmallDaemon, new_client: ClientFactory) -> None:
    daemon.token = "right"
    report = new_client(daemon.address, token="wrong").probe(timeout_s=5)
    assert (report.is_ok, report.code, report.is_lasting) == (False, "BAD_TOKEN", True)
    assert "no tenant has this token" in report.detail


def test_a_probe_of_nothing_says_where_nothing_is(folder: Path, new_client: ClientFactory) -> None:
    report = new_client(f"unix://{folder}/nobody.sock").probe(timeout_s=5)
    assert not report.is_ok
    assert not report.is_lasting
    assert "nobody.sock" in report.detail


def test_a_probe_of_a_silent_socket_ends_at_its_deadline(folder: Path, new_client: ClientFactory) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"{folder}/silent.sock")
        silent.listen(8)
        started_s = time.monotonic()
        report = new_client(f"unix://{folder}/silent.sock").probe(timeout_s=0.3)
        assert time.monotonic() - started_s < 3
        assert (report.is_ok, report.code) == (False, "NO_WELCOME")


def test_a_probe_of_another_service_says_that_it_is_not_hicached(folder: Path, new_client: ClientFactory) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    server.add_insecure_port(f"unix:{folder}/other.sock")
    server.start()
    report = new_client(f"unix://{folder}/other.sock").probe(timeout_s=5)
    assert (report.is_ok, report.code, report.is_lasting) == (False, "NOT_HICACHED", True)
    server.stop(grace=0).wait(5)


def test_settings_that_make_no_sense_name_the_setting() -> None:
    with pytest.raises(ConfigError, match="connect_timeout_s"):
        ClientSettings(connect_timeout_s=0)
    with pytest.raises(ConfigError, match="backoff_s_max"):
        ClientSettings(backoff_s=2, backoff_s_max=1)
    with pytest.raises(ConfigError, match="lease_s"):
        ClientSettings(lease_s=-1.0)
