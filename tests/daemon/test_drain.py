"""Draining: nothing new is begun, what runs or is leased is served, and then the daemon stops with 0."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from hicache.admin.client import Admin
from hicache.admin.lifecycle import DrainRequest
from hicache.admin.verbs import DRAIN
from hicache.backends.faulty import Fault, FaultKind
from hicache.errors import AdminRefused
from hicache.outcome import Outcome
from hicache.wire import hicached_pb2 as pb
from tests.daemon.client import Client, refusal_code
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.raw_links import CALL_S, BulkRefused, Memory, object_key, payload_of
from tests.daemon.rig import DaemonProcess, http_get, wait_until

PAGE = 64 * 1024
KEYS = [object_key(number) for number in range(4)]
Start = Callable[..., DaemonProcess]


def refused_with(call: Callable[[], object]) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return refusal_code(caught.value)


def release(client: Client, lease_id: int) -> bool:
    request = pb.LeaseRequest(session_secret=client.secret, lease_id=lease_id, lease_ms=0)
    return bool(client.stub.Lease(request, timeout=CALL_S).held)


def test_what_is_leased_can_be_had_until_it_is_released_and_nothing_new_begins(start: Start) -> None:
    daemon = start(drain_s=120)
    with Client(daemon.target) as client, Memory(PAGE) as memory:
        region = client.attach(memory).region_id
        client.put_stream(KEYS[:2], [payload_of(number, PAGE) for number in range(2)])
        outcomes, lease_id = client.lookup(KEYS[:1], lease_ms=60_000)
        assert outcomes == [Outcome.OK]
        daemon.process.send_signal(signal.SIGTERM)
        wait_until(lambda: http_get(daemon.ready["http"], "/readyz") == (503, "draining\n"), what="it drains")

        assert refused_with(lambda: client.lookup(KEYS[:1])) == "DRAINING"
        assert refused_with(lambda: Client(daemon.target)) == "DRAINING"
        with pytest.raises(BulkRefused, match="DRAINING"):
            client.put(region, KEYS[2:3], [0], [PAGE])
        assert client.get(region, KEYS[:1], [0], [PAGE]) == [Outcome.OK]
        assert bytes(memory.bytes) == payload_of(0, PAGE)
        assert http_get(daemon.ready["http"], "/healthz")[0] == 200
        assert release(client, lease_id)
        assert daemon.wait_end() == 0
        with pytest.raises(grpc.RpcError) as caught:
            next(client.stream)
        assert refusal_code(caught.value) == "SHUTTING_DOWN"
    assert "not drained" not in daemon.log


def test_the_verb_drains_and_the_process_ends_with_0(start: Start) -> None:
    daemon = start()
    admin = Admin(f"{daemon.settings['socket']}.admin")
    with pytest.raises(AdminRefused, match="within_s = -1"):
        admin.ask(DRAIN, DrainRequest(within_s=-1.0))
    with Client(daemon.target) as client:
        client.put_stream(KEYS[:1], [b"bytes"])
        _, lease_id = client.lookup(KEYS[:1], lease_ms=60_000)
        begun = admin.ask(DRAIN, DrainRequest(within_s=600.0))
        assert (begun.sessions, begun.leases, begun.within_s) == (1, 1, 600.0)
        assert admin.ask(DRAIN, DrainRequest(within_s=600.0)).leases == 1, "twice is no error"
        assert release(client, lease_id)
        assert daemon.wait_end() == 0
    assert not Path(str(daemon.settings["ready_file"])).exists()


def test_sigterm_shortens_a_drain_and_a_lease_that_nobody_releases_is_waited_for_until_then(start: Start) -> None:
    daemon = start(drain_s=0.1)
    with Client(daemon.target) as client:
        client.put_stream(KEYS[:1], [b"bytes"])
        client.lookup(KEYS[:1], lease_ms=60_000)
        Admin(f"{daemon.settings['socket']}.admin").ask(DRAIN, DrainRequest(within_s=3600.0))
        daemon.terminate()
    assert daemon.process.returncode == 0
    assert "not drained in time" in daemon.log


def test_a_put_that_runs_is_finished(start_thread: Callable[..., ThreadedDaemon]) -> None:
    daemon = start_thread(drain_s=60)
    with Client(daemon.target) as client, Memory(PAGE) as memory:
        region = client.attach(memory).region_id
        memory.bytes[:] = payload_of(1, PAGE)
        slow = daemon.backend.arm("put", Fault(FaultKind.LATE))
        running = client.begin(client.put, region, KEYS[:1], [0], [PAGE])
        wait_until(slow.entered.is_set, what="the put runs")
        daemon.begin_drain()
        assert daemon.daemon.drain.held.calls == 1
        assert not running.done()
        slow.release()
        assert running.result(CALL_S) == [Outcome.OK]
        daemon.stop()
    assert daemon.stopped_clean
