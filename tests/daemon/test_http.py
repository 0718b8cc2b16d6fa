"""The HTTP side: probes and metrics, for this machine only, and nothing that changes anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.backends.faulty import Fault, FaultKind
from hicache.daemon.http import is_own_host
from tests.daemon.client import Client
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.raw_links import Memory, object_key
from tests.daemon.rig import http_get, wait_until

StartThread = Callable[..., ThreadedDaemon]
ROUTES = ("/", "/metrics", "/healthz", "/readyz", "/v1/status", "/v1/history", "/v1/events")


def test_a_serving_daemon_is_alive_and_ready(daemon: ThreadedDaemon) -> None:
    assert http_get(daemon.ready.http, "/healthz") == (200, "ok\n")
    assert http_get(daemon.ready.http, "/readyz") == (200, "ready\n")
    status, body = http_get(daemon.ready.http, "/metrics")
    assert status == 200
    assert "hicache_ready 1.0" in body


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:80", "10.1.2.3", "[::1]:9470", "[fe80::1]"])
def test_an_honest_host_header_is_served(daemon: ThreadedDaemon, host: str) -> None:
    assert http_get(daemon.ready.http, "/healthz", host=host)[0] == 200


@given(host=st.from_regex(r"[a-z0-9.-]*[g-z][a-z0-9.-]*(:[0-9]{1,5})?", fullmatch=True))
def test_no_name_but_localhost_is_taken_for_this_machine(host: str) -> None:
    assert is_own_host(host) == (host.partition(":")[0] == "localhost")


def test_http_can_be_off_or_on_a_unix_socket(start_thread: StartThread, folder: Path) -> None:
    off = start_thread(http="")
    assert off.ready.http == ""
    off.stop()
    path = str(folder / "h.sock")
    assert start_thread(http=path).ready.http == path


def test_a_daemon_whose_storage_does_not_answer_is_not_healthy_but_says_so_at_once(
    start_thread: StartThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hicache.daemon.parts.STUCK_S", 0.05)
    daemon = start_thread(io_threads=2)
    with Client(daemon.target) as client, Memory(4096) as memory:
        region = client.attach(memory).region_id
        stuck = daemon.backend.arm("put", Fault(FaultKind.LATE))
        for number in range(2):
            client.put(region, [object_key(number)], [0], [8], timeout_s=0.2)
        wait_until(
            lambda: http_get(daemon.ready.http, "/healthz", timeout_s=1.0)[0] == 503, what="the daemon is not healthy"
        )
        assert http_get(daemon.ready.http, "/metrics", timeout_s=1.0)[0] == 200
        stuck.release()
        wait_until(lambda: http_get(daemon.ready.http, "/healthz")[0] == 200, what="the daemon is healthy again")
