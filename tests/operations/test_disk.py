"""The disk under a running daemon is unplugged, replaced, or turns read-only: misses, and health that says so."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hicache.backends.lock import DirectoryLock
from hicache.outcome import Outcome
from tests.backends.payloads import payload
from tests.cli.conftest import store
from tests.daemon.client import Client
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.raw_links import object_key
from tests.daemon.rig import DaemonProcess, wait_health

SIZE = 5000


@pytest.mark.parametrize("backend", ["lmdb", "file"])
@pytest.mark.parametrize("becomes", ["gone", "empty", "another"])
def test_a_directory_that_is_replaced_is_misses_and_health_says_so(
    backend: str, becomes: str, start_thread: Callable[..., ThreadedDaemon], folder: Path
) -> None:
    daemon = start_thread(backend=backend)
    with Client(daemon.target) as client:
        keys = store(client, range(4), SIZE)
        assert wait_health(daemon.ready.http, 200) == "ok\n"
        (folder / "store").rename(folder / "unplugged")
        if becomes == "empty":
            (folder / "store").mkdir()
        elif becomes == "another":
            shutil.copytree(folder / "unplugged", folder / "store")
        assert "another directory is there" in wait_health(daemon.ready.http, 503)
        found = client.get_stream(keys, [SIZE] * 4)
        right = [payload(number, SIZE) for number in range(4)]
        assert all(one in (good, Outcome.ABSENT, Outcome.IO_ERROR) for one, good in zip(found, right, strict=True))
        [outcome] = client.put_stream([object_key(50)], [payload(50, SIZE)])
        assert outcome in (Outcome.OK, Outcome.IO_ERROR)
        shutil.rmtree(folder / "store", ignore_errors=True)
        (folder / "unplugged").rename(folder / "store")
        assert wait_health(daemon.ready.http, 200) == "ok\n", "it is back where it was"
        assert client.put_stream([object_key(60)], [payload(60, SIZE)]) == [Outcome.OK]
        assert client.get_stream([object_key(60)], [SIZE]) == [payload(60, SIZE)]
    daemon.stop()
    again = start_thread(backend=backend)
    with Client(again.target) as client:
        assert client.get_stream([object_key(60)], [SIZE]) == [payload(60, SIZE)]


@pytest.mark.parametrize("backend", ["lmdb", "file"])
def test_a_daemon_whose_directory_is_gone_stops_and_starts_again(
    backend: str, start: Callable[..., DaemonProcess], folder: Path
) -> None:
    daemon = start(backend=backend)
    with Client(daemon.target) as client:
        store(client, range(3), SIZE)
    shutil.rmtree(folder / "store")
    wait_health(daemon.ready["http"], 503)
    assert daemon.process.poll() is None, "it goes on"
    daemon.terminate()
    assert "Traceback" not in daemon.log
    again = start(backend=backend)
    with Client(again.target) as client:
        assert client.present([object_key(0)]) == [False]
        store(client, range(3), SIZE)
    wait_health(again.ready["http"], 200)


@pytest.mark.parametrize("backend", ["lmdb", "file"])
def test_a_file_system_that_turns_read_only_is_told(
    backend: str, start_thread: Callable[..., ThreadedDaemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = start_thread(backend=backend)
    with Client(daemon.target) as client:
        store(client, range(1), SIZE)
        monkeypatch.setattr(os, "access", lambda *_: False)
        assert "is its file system read-only?" in wait_health(daemon.ready.http, 503)
        assert client.get_stream([object_key(0)], [SIZE]) == [payload(0, SIZE)], "what is there is served"
    monkeypatch.undo()
    assert wait_health(daemon.ready.http, 200) == "ok\n"


def test_a_medium_that_only_answers_with_errors_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = DirectoryLock(tmp_path)
    assert lock.problem() == ""
    real_stat = os.stat

    def failing(path: object, *arguments: object, **keywords: object) -> os.stat_result:
        if str(path).startswith(str(tmp_path)):
            raise OSError(5, "Input/output error")
        return real_stat(path, *arguments, **keywords)  # type: ignore[arg-type]  # as it was called

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", failing)
        assert lock.problem().endswith("cannot be read: Input/output error")
    lock.release()
    assert "is gone" in lock.problem()
