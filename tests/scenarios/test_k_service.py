"""BR-119: a long start is borne as long as it gets on, a hang is not, and what is slow does not starve the watchdog."""

from __future__ import annotations

import math
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hicache.backends import space
from hicache.backends.faulty import Fault, FaultKind
from hicache.backends.progress import tell_progress, told_of_progress
from hicache.daemon.recovery import PROGRESS_PATIENCE_S, RecoveryProgress
from hicache.daemon.service_manager import ServiceManager
from hicache.daemon.watchdog import FEEDS_PER_PERIOD
from tests.daemon.client import Client
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.raw_links import object_key
from tests.daemon.rig import START_S
from tests.systemd.manager import ROOT, unit_directives

SERVICE = ROOT / "systemd/hicached.service"
[START_TIMEOUT_S] = map(float, unit_directives(SERVICE, "TimeoutStartSec"))


class PatientManager(ServiceManager):
    """A service manager with a clock of its own, which gives a start up as systemd does."""

    def __init__(self) -> None:
        super().__init__({})
        self.now_s = 0.0
        self.gives_up_at_s = START_TIMEOUT_S

    def busy(self, status: str, *, within_s: float) -> None:
        self.gives_up_at_s = max(self.gives_up_at_s, self.now_s + within_s)

    def go_on(self, seconds: float) -> bool:
        """Whether the start is still let alone after that."""
        self.now_s += seconds
        return self.now_s <= self.gives_up_at_s


def test_br_119_a_recovery_of_any_length_is_borne_while_it_gets_on_and_given_up_when_it_hangs() -> None:
    manager = PatientManager()
    progress = RecoveryProgress(manager, clock=lambda: manager.now_s)
    with told_of_progress(progress):
        while manager.now_s < 100 * START_TIMEOUT_S:
            tell_progress(1)
            assert manager.go_on(PROGRESS_PATIENCE_S * 0.9), "each piece in less than the patience"
        hangs_from_s = manager.now_s
        while manager.go_on(1):
            assert manager.now_s < hangs_from_s + 2 * PROGRESS_PATIENCE_S, "a hang is given up"
    silent = PatientManager()
    assert not silent.go_on(200), "the control: without a word 200 s are too long"


def test_br_119_space_that_the_file_system_has_to_write_is_taken_in_pieces_that_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space, "PIECE_BYTES", 4096)
    file = tmp_path / "slab"
    file.write_bytes(b"kept")
    told: list[int] = []
    with told_of_progress(told.append):
        space.take_space(file, 10 * 4096 + 1, capacity_bytes=10 * 4096, restore_bytes=4)
    assert told == [0] * 11
    assert file.stat().st_size == 10 * 4096 + 1
    assert file.stat().st_blocks * 512 >= 10 * 4096 + 1
    assert file.read_bytes()[:4] == b"kept"


class Heard:
    """What a daemon in this process says to its service manager."""

    def __init__(self, folder: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(folder / "notify"))
        self.environment = {"NOTIFY_SOCKET": str(folder / "notify"), "WATCHDOG_USEC": "600000"}

    def feeds(self, count: int) -> None:
        """Waits for so many from now on."""
        self._socket.setblocking(False)
        while self._receive():
            pass
        self._socket.settimeout(START_S)
        while count:
            count -= "WATCHDOG=1" in self._receive()

    def is_silent(self, *, for_s: float) -> bool:
        """Whether nothing more is said, after what is on its way."""
        self._socket.setblocking(False)
        while self._receive():
            pass
        self._socket.settimeout(for_s)
        return not self._receive()

    def _receive(self) -> str:
        try:
            return self._socket.recv(4096).decode()
        except (BlockingIOError, TimeoutError):
            return ""

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def heard(folder: Path) -> Iterator[Heard]:
    manager = Heard(folder)
    yield manager
    manager.close()


def test_br_119_a_medium_that_holds_up_every_thread_and_probe_does_not_starve_the_watchdog(
    start_thread: Callable[..., ThreadedDaemon], heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A probe of the storage takes longer than the watchdog waits: a feed does not wait for it."""
    monkeypatch.setattr("hicache.daemon.storage.PROBE_TIMEOUT_S", START_S)
    daemon = start_thread(environment=heard.environment)
    with Client(daemon.target) as client:
        client.put_stream([object_key(1)], [b"x"])
        held = daemon.backend.arm("get_into", Fault(FaultKind.LATE))
        reads = [client.begin(client.get_stream, [object_key(1)], [1]) for _ in range(4)]
        assert held.entered.wait(START_S)
        probing, answer = threading.Event(), threading.Event()
        usage = daemon.store.usage

        def slow_usage() -> object:
            probing.set()
            answer.wait(START_S)
            return usage()

        monkeypatch.setattr(daemon.store, "usage", slow_usage)
        assert probing.wait(START_S)
        heard.feeds(3 * FEEDS_PER_PERIOD)
        assert not answer.is_set()
        answer.set()
        held.release()
        assert [read.result() for read in reads] == [[b"x"]] * 4


def test_br_119_a_loop_that_is_held_up_for_most_of_a_period_is_fed_in_time_and_one_that_hangs_is_not_fed(
    start_thread: Callable[..., ThreadedDaemon], heard: Heard
) -> None:
    held_up_share = 1.5 / 2  # 1.5 s with WatchdogSec=2
    assert 1 / FEEDS_PER_PERIOD + held_up_share < 1
    daemon = start_thread(environment=heard.environment)
    heard.feeds(2)
    stuck, over = threading.Event(), threading.Event()

    def hang() -> None:
        stuck.set()
        over.wait(START_S)

    hanging = threading.Thread(target=daemon.call, args=(hang,))
    hanging.start()
    assert stuck.wait(START_S)
    assert heard.is_silent(for_s=0.2)
    over.set()
    hanging.join()
    heard.feeds(2)


def test_br_119_the_unit_lets_a_start_ask_for_time_and_the_watchdog_is_fed_at_most_at_half_its_period() -> None:
    assert unit_directives(SERVICE, "Type") == ["notify"]
    assert math.isfinite(START_TIMEOUT_S)
    assert FEEDS_PER_PERIOD >= 2
    assert ServiceManager({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": str(os.getpid())}).watchdog_s == 2
