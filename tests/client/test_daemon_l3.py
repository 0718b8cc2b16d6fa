"""The client of hicached when the daemon refuses, is gone, and comes back, in this very process."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
import time
import warnings
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
    release = daemon.faults.hang(where="before_reply", operation="lookup", times=10)
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


def test_settings_that_make_no_sense_name_the_setting() -> None:
    with pytest.raises(ConfigError, match="connect_timeout_s"):
        ClientSettings(connect_timeout_s=0)
    with pytest.raises(ConfigError, match="backoff_s_max"):
        ClientSettings(backoff_s=2, backoff_s_max=1)
    with pytest.raises(ConfigError, match="lease_s"):
        ClientSettings(lease_s=-1.0)
