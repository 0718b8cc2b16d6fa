"""A probe says who serves, how, and what is in the way."""

from __future__ import annotations

import socket
import time
from concurrent import futures
from pathlib import Path

import grpc

from hicache.client import DaemonL3
from tests.client.conftest import ClientFactory
from tests.client.small_daemon import SmallDaemon


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
