"""SIGHUP gives the store the capacity of the configuration file, while it serves."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hicache.daemon.config import DaemonConfig
from hicache.daemon.reload import Reloader
from hicache.daemon.service_manager import ServiceManager
from hicache.outcome import Outcome
from tests.daemon.client import Client
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.raw_links import object_key, payload_of
from tests.daemon.rig import DaemonProcess, wait_until

MIB = 1 << 20
KEYS = [object_key(number) for number in range(40)]
Start = Callable[..., DaemonProcess]


@pytest.mark.parametrize("backend", ["lmdb", "file"])
def test_a_changed_capacity_is_taken_at_sighup_and_a_wrong_one_is_not(start: Start, folder: Path, backend: str) -> None:
    settings = folder / "hicached.toml"
    settings.write_text('capacity_bytes = "24MiB"\nobject_bytes_max = "2MiB"\n')
    daemon = start(config=str(settings), capacity_bytes=None, backend=backend)

    def resize(text: str, expected_mib: int) -> None:
        settings.write_text(f'capacity_bytes = "{text}"\nobject_bytes_max = "2MiB"\n')
        hang_up(daemon)
        assert client.stats().capacity_bytes == expected_mib * MIB

    with Client(daemon.target) as client:
        payloads = [payload_of(number, MIB) for number in range(40)]
        client.put_stream(KEYS[:16], payloads[:16])
        resize("48MiB", 48)
        assert client.put_stream(KEYS[16:], payloads[16:]) == [Outcome.OK] * 24
        assert client.get_stream(KEYS, [MIB] * 40) == payloads
        resize("12MiB", 12)
        found = client.get_stream(KEYS, [MIB] * 40)
        kept = [number for number, content in enumerate(found) if content is not Outcome.ABSENT]
        assert len(kept) in (9, 10), "down to the low watermark"
        assert client.get_stream([KEYS[number] for number in kept], [MIB] * len(kept)) == [
            payloads[number] for number in kept
        ]
        resize("1MiB", 12)
        assert "expected" in daemon.log
        resize("1000000TiB" if backend == "file" else "100TiB", 12)
    assert daemon.process.poll() is None


def hang_up(daemon: DaemonProcess) -> None:
    """SIGHUP, and wait until the log says what came of it."""
    lines = daemon.log.count("reloaded")
    daemon.process.send_signal(signal.SIGHUP)
    wait_until(lambda: daemon.log.count("reloaded") > lines, what="SIGHUP is answered in the log")


def test_a_signal_that_finds_no_thread_or_ends_in_a_mistake_leaves_the_next_one_heard(
    daemon: ThreadedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = ["hicached-reload-0"]
    start = threading.Thread.start

    def start_unless_missing(thread: threading.Thread) -> None:
        if thread.name in missing:
            missing.remove(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_unless_missing)
    tries = 0

    def reread() -> DaemonConfig:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise RuntimeError("nobody thought of this")
        return DaemonConfig(capacity_bytes=96 * MIB)

    async def signal_until_it_is_done() -> None:
        asked = asyncio.Event()
        reloader = Reloader(daemon.config, reread, [], store=daemon.store, manager=ServiceManager({}))
        reloading = asyncio.create_task(reloader.reload_when_asked(asked))
        while daemon.store.usage().capacity_bytes != 96 * MIB:
            asked.set()
            await asyncio.wait({reloading}, timeout=0.01)
            assert not reloading.done()
        reloading.cancel()
        await asyncio.gather(reloading, return_exceptions=True)

    asyncio.run(signal_until_it_is_done())
