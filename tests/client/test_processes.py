"""The client of a daemon that is a process: killed, stopped, woken, started again."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache.client import ClientState, DaemonL3
from hicache.l3 import L3Item
from hicache.outcome import Outcome
from tests.client.conftest import ClientFactory
from tests.client.support import Answer, client_threads, get, key, put, wait_until

SIZE = 5000


class DaemonProcess:
    """A small daemon in a process of its own, started as often as a test wants."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.address = ""

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.client.small_daemon", "--folder", str(self._folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        (length,) = struct.unpack("<I", self._process.stdout.read(4))
        self.address = self._process.stdout.read(length).decode()

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        if number is signal.SIGKILL:
            self._process.wait()
        if number is signal.SIGSTOP:
            os.waitpid(self._process.pid, os.WUNTRACED)

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                pipe.close()


@pytest.fixture
def process(folder: Path) -> Iterator[DaemonProcess]:
    process = DaemonProcess(folder)
    process.start()
    yield process
    process.end()


@pytest.fixture
def process_client(process: DaemonProcess, new_client: ClientFactory) -> DaemonL3:
    client = new_client(process.address)
    assert client.wait_ready(timeout_s=10)
    assert put(client, [L3Item(key(1), 0, SIZE)]) == [Outcome.OK]
    return client


def seconds_per_call(client: DaemonL3, *, calls: int = 200) -> float:
    """What a call costs while hicached is away; every one of them is UNAVAILABLE."""
    started_s = time.monotonic()
    for _ in range(calls):
        assert client.lookup([key(1)], timeout_s=5) == [Outcome.UNAVAILABLE]
        assert get(client, [L3Item(key(1), 0, SIZE)]) == [Outcome.UNAVAILABLE]
    return (time.monotonic() - started_s) / (2 * calls)


def test_br_038_a_killed_daemon_costs_nothing_and_is_found_within_seconds_of_its_return(
    process: DaemonProcess, process_client: DaemonL3
) -> None:
    process.signal(signal.SIGKILL)
    wait_until(lambda: process_client.status().state is ClientState.UNAVAILABLE)
    assert seconds_per_call(process_client) < 0.001
    process.end()
    process.start()
    wait_until(lambda: process_client.wait_ready(timeout_s=0), timeout_s=5, what="finding the daemon again")
    assert process_client.lookup([key(1)], timeout_s=5) == [Outcome.ABSENT]
    assert not process_client.status().is_degraded


def test_br_038_a_stopped_daemon_holds_the_doubted_items_and_nothing_else(
    process: DaemonProcess, process_client: DaemonL3
) -> None:
    process.signal(signal.SIGSTOP)
    stuck = Answer()
    started_s = time.monotonic()
    process_client.get([L3Item(key(1), 0, SIZE)], timeout_s=0.2, done=stuck)
    assert time.monotonic() - started_s < 2
    wait_until(lambda: process_client.status().state is ClientState.UNAVAILABLE, what="noticing that it is silent")
    assert seconds_per_call(process_client) < 0.001
    assert not stuck.is_there
    assert process_client.status().items_in_doubt == 1
    process.signal(signal.SIGCONT)
    assert stuck.wait() == [Outcome.DEADLINE]
    wait_until(lambda: process_client.wait_ready(timeout_s=0), timeout_s=5, what="finding the daemon again")
    assert get(process_client, [L3Item(key(1), 0, SIZE)]) == [Outcome.OK]
    assert not process_client.status().is_degraded


def test_the_end_of_a_stopped_daemon_gives_the_doubted_items_back(
    process: DaemonProcess, process_client: DaemonL3
) -> None:
    process.signal(signal.SIGSTOP)
    stuck = Answer()
    process_client.put([L3Item(key(2), 0, SIZE), L3Item(key(3), 0, SIZE)], timeout_s=0.1, done=stuck)
    assert process_client.status().items_in_doubt == 2
    process.signal(signal.SIGKILL)
    assert stuck.wait() == [Outcome.DEADLINE] * 2


def test_close_beside_a_stopped_daemon_ends_and_the_doubt_is_told_later(
    process: DaemonProcess, process_client: DaemonL3
) -> None:
    process.signal(signal.SIGSTOP)
    stuck = Answer()
    process_client.get([L3Item(key(1), 0, SIZE)], timeout_s=0.1, done=stuck)
    started_s = time.monotonic()
    process_client.close()
    assert time.monotonic() - started_s < 10
    assert not stuck.is_there
    process.signal(signal.SIGKILL)
    assert stuck.wait() == [Outcome.DEADLINE]
    wait_until(lambda: not client_threads(), what="the end of the threads")
