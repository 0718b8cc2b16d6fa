"""The limits that speeds are shown beside."""

from __future__ import annotations

import threading

import pytest

from bench.limits import (
    COPY_BLOCK_BYTES,
    FileCalls,
    MemoryCopy,
    RawConnection,
    daemon_copy_threads,
    raw_socket_addresses,
    serve_raw_sockets,
)
from tests.client.support import wait_until

SMALL = 2 * COPY_BLOCK_BYTES


def test_memory_copies_move_every_byte():
    copies = MemoryCopy(threads=2, working_set_bytes=SMALL)
    for source, target in copies._pairs:
        source[:] = bytes(range(256)) * (SMALL // 256)
        assert source[:] != target[:]
    assert copies.measure(4 * SMALL) > 0
    assert all(source[:] == target[:] for source, target in copies._pairs)


@pytest.mark.parametrize("op", ["get", "put"])
def test_file_calls_run_on_the_given_file_system_and_leave_nothing(tmp_path, op):
    calls = FileCalls(tmp_path, threads=2, working_set_bytes=SMALL)
    assert calls.measure(op, SMALL) > 0
    calls.close()
    assert list(tmp_path.iterdir()) == []


def test_raw_sockets_move_bytes_both_ways(tmp_path):
    threading.Thread(target=serve_raw_sockets, args=(tmp_path,), daemon=True).start()
    tcp = tmp_path / raw_socket_addresses(tmp_path)["tcp"]
    wait_until(tcp.exists, what="the raw server")
    for kind in ("unix", "tcp"):
        connection = RawConnection(kind, tmp_path)
        for op in ("get", "put", "get"):
            connection.move(op, COPY_BLOCK_BYTES + 12_345)
        connection.close()


def test_a_daemon_copies_with_no_more_threads_than_there_are_cores():
    assert daemon_copy_threads(1) == 1
    assert 1 <= daemon_copy_threads(10_000) < 10_000
