"""Transfers without an answer, or with a late one: their memory is held until hicached lets go of it."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path

import grpc
import pytest

from hicache.client import DaemonL3
from hicache.l3 import L3Item
from hicache.outcome import Outcome
from hicache.wire import hicached_pb2 as wire
from tests.client.conftest import ClientFactory
from tests.client.memory import SmallMemory
from tests.client.small_daemon import MIB, SmallDaemon
from tests.client.support import (
    QUICK,
    Answer,
    client_threads,
    get,
    key,
    payload,
    put,
    wait_until,
)

SIZE = 5000


def test_br_036_a_late_get_lands_only_in_memory_that_is_still_held(
    daemon: SmallDaemon, client: DaemonL3, memory: SmallMemory
) -> None:
    daemon.objects[key(1)] = payload(1, SIZE)
    release = daemon.faults.hang(where="before_bytes", operation="get")
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


def test_br_036_fifty_others_go_on_beside_a_get_that_is_never_answered(
    daemon: SmallDaemon, client: DaemonL3, memory: SmallMemory
) -> None:
    for number in range(51):
        daemon.objects[key(number)] = payload(number, SIZE)
    release = daemon.faults.hang(where="before_bytes", operation="get")
    stuck = Answer()
    client.get([L3Item(key(0), 0, SIZE)], timeout_s=0.2, done=stuck)
    for number in range(1, 51):
        assert get(client, [L3Item(key(number), number * SIZE, SIZE)]) == [Outcome.OK]
        assert memory.buffer[number * SIZE : (number + 1) * SIZE] == payload(number, SIZE)
    assert not stuck.is_there
    wait_until(lambda: client.status().bulk == "memory", what="registering the memory anew")
    assert not stuck.is_there
    release.set()
    assert stuck.wait() == [Outcome.DEADLINE]


def test_a_late_put_holds_its_source_until_hicached_has_read_it(
    daemon: SmallDaemon, client: DaemonL3, memory: SmallMemory
) -> None:
    memory.buffer[:SIZE] = payload(1, SIZE)
    release = daemon.faults.hang(where="before_bytes", operation="put")
    answer = Answer()
    client.put([L3Item(key(1), 0, SIZE)], timeout_s=0.2, done=answer)
    wait_until(lambda: client.status().items_in_doubt == 1)
    assert not answer.is_there
    release.set()
    assert answer.wait() == [Outcome.DEADLINE]
    assert daemon.objects[key(1)] == payload(1, SIZE)


def test_br_036_an_answer_that_comes_too_late_is_not_an_answer(daemon: SmallDaemon, client: DaemonL3) -> None:
    daemon.objects[key(1)] = payload(1, SIZE)
    release = daemon.faults.hang(where="before_reply", operation="get")
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
    release = daemon.faults.hang(where="before_bytes", operation="get")
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
    release = daemon.faults.hang(where="before_reply", operation="get")
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
