"""BR-131: what is stored outlives the daemon, or goes with it, as the setting says; and nothing else ever goes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from hicache.backends.lock import LOCK_NAME
from hicache.backends.open import open_backend
from hicache.backends.wipe import wipe_store
from hicache.daemon.config import load_config
from hicache.daemon.recovery import open_store
from hicache.errors import ConfigError, StorageInUse
from hicache.outcome import Outcome
from tests.backends.payloads import get, key, payload, put
from tests.daemon.client import Client
from tests.daemon.raw_links import object_key, payload_of
from tests.daemon.rig import START_S, DaemonProcess, DaemonThread, refused_start
from tests.security.master_keys import random_masters

Start = Callable[..., DaemonProcess]
Run = Callable[..., DaemonThread]

PAGE = 64 * 1024
KEYS = [object_key(number) for number in range(8)]
BACKENDS = ["lmdb", "file"]
OURS = {LOCK_NAME}


def store_pages(daemon: DaemonProcess | DaemonThread) -> bytes:
    with Client(daemon.target) as client:
        assert client.put_stream(KEYS, [payload_of(number, PAGE) for number in range(8)]) == [Outcome.OK] * 8
        return client.welcome.store_id


@pytest.fixture
def run(folder: Path) -> Iterator[Run]:
    """Runs daemons in this process, with the opener that the process has; stopped at the end."""
    with ExitStack() as stack:

        def run_one(**settings: object) -> DaemonThread:
            daemon = DaemonThread(folder, open_store, **settings)
            stack.callback(daemon.stop)
            return daemon

        yield run_one


def names_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("backend", BACKENDS)
def test_br_131_what_is_stored_stays_or_goes_at_the_stop_as_the_setting_says(
    run: Run, folder: Path, backend: str
) -> None:
    kept = run(backend=backend)
    first = store_pages(kept)
    kept.stop()
    kept = run(backend=backend)
    with Client(kept.target) as client:
        assert client.present(KEYS) == [True] * 8, "the positive control"
        assert client.welcome.store_id == first
    kept.stop()

    fleeting = run(backend=backend, persist="false")
    with Client(fleeting.target) as client:
        assert client.present(KEYS) == [False] * 8
        assert client.welcome.store_id != first, "whoever knew the store hears that it is another one"
    store_pages(fleeting)
    fleeting.stop()
    assert fleeting.stopped_clean
    assert names_in(folder / "store") == OURS, "neither objects nor the space for them"


@pytest.mark.parametrize("backend", BACKENDS)
def test_br_131_what_a_crash_has_left_goes_at_the_next_start(start: Start, folder: Path, backend: str) -> None:
    crashed = start(backend=backend, persist="false")
    store_pages(crashed)
    crashed.kill()
    assert len(names_in(folder / "store")) > 1
    again = start(backend=backend, persist="false")
    with Client(again.target) as client:
        assert client.present(KEYS) == [False] * 8
    assert store_pages(again)
    again.terminate()
    assert names_in(folder / "store") == OURS


@pytest.mark.parametrize("backend", BACKENDS)
def test_br_131_files_of_others_stay_wherever_they_lie_and_the_next_start_is_none_the_worse(
    run: Run, folder: Path, backend: str
) -> None:
    daemon = run(backend=backend, persist="false")
    store_pages(daemon)
    store = folder / "store"
    foreign = [store / "notes.txt", store / "data.mdb.bak", store / "objects" / "README"]
    if backend == "file":
        foreign += [next((store / "objects").glob("??")) / "not an object"]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("precious")
    outside = folder / "outside"
    outside.mkdir()
    (outside / "kept").write_text("precious")
    (store / "link").symlink_to(outside)
    daemon.stop()
    assert [path.read_text() for path in foreign] == ["precious"] * len(foreign)
    assert (outside / "kept").read_text() == "precious"
    run(backend=backend, persist="false").stop()
    assert [path.read_text() for path in foreign] == ["precious"] * len(foreign)


def test_br_131_a_directory_that_is_no_store_is_not_touched(start: Start, folder: Path) -> None:
    (folder / "store" / "objects" / "00").mkdir(parents=True)
    (folder / "store" / "objects" / "00" / "ab").write_text("looks like an object, and is somebody else's")
    before = names_in(folder / "store")
    code, line = refused_start(start(wait=False, persist="false"))
    assert code == 2
    assert "path" in line
    assert names_in(folder / "store") - OURS == before


def test_br_131_a_store_that_another_daemon_has_open_is_left_alone(start: Start, folder: Path) -> None:
    first = start()
    store_pages(first)
    elsewhere = {"socket": str(folder / "t.sock"), "ready_file": str(folder / "r2")}
    code, line = refused_start(start(wait=False, persist="false", **elsewhere))
    assert code == 1
    assert f"pid {first.process.pid}" in line
    with Client(first.target) as client:
        assert client.get_stream(KEYS, [PAGE] * 8) == [payload_of(number, PAGE) for number in range(8)]


@pytest.mark.parametrize("settings", [{"backend": "file", "file_shared": True}, {"backend": "mooncake"}])
def test_br_131_what_several_share_is_nobodys_to_remove(folder: Path, settings: dict[str, object]) -> None:
    master = {"mooncake_master": "127.0.0.1:1"} if settings["backend"] == "mooncake" else {}
    common = settings | master | {"socket": str(folder / "s.sock")}
    with pytest.raises(ConfigError, match="persist"):
        load_config(None, common | {"persist": False})
    assert load_config(None, common).persist


def test_br_131_a_store_that_others_share_at_that_moment_is_not_wiped(tmp_path: Path) -> None:
    shared = open_backend(f"file://{tmp_path}/store?shared=1", capacity_bytes=1 << 24)
    put(shared, (key(1), b"of all"))
    with pytest.raises(StorageInUse):
        wipe_store(tmp_path / "store")
    assert get(shared, key(1), 6) == (Outcome.OK, b"of all")
    shared.close()
    assert wipe_store(tmp_path / "store")
    assert names_in(tmp_path / "store") <= {LOCK_NAME, "hicache.opening"}
    assert not wipe_store(tmp_path / "store")
    assert not wipe_store(tmp_path / "nowhere")


@pytest.mark.parametrize("backend", BACKENDS)
def test_br_131_a_wipe_that_is_cut_off_anywhere_is_gone_on_with(
    tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However far it came, what is left is a store that opens, without a wrong byte, and can be wiped."""
    for survived in (*range(20), 100, 200, 250, 1000):  # 256 folders go, too
        directory = tmp_path / f"store{survived}"
        store = open_backend(f"{backend}://{directory}", capacity_bytes=1 << 20)
        put(store, *[(key(number), payload(number, 5000)) for number in range(6)])
        store.close()
        with monkeypatch.context() as patched:
            cut_off_after(survived, patched)
            try:
                wipe_store(directory)
            except KilledError:
                is_cut = True
            else:
                is_cut = False
        store = open_backend(f"{backend}://{directory}", capacity_bytes=1 << 20)
        for number in range(6):
            outcome, content = get(store, key(number), 5000)
            assert (outcome, content) == (Outcome.OK, payload(number, 5000)) or outcome is Outcome.ABSENT
        store.close()
        assert wipe_store(directory)
        assert names_in(directory) == OURS
        if not is_cut:
            break
    assert not is_cut
    assert survived > 3


class KilledError(BaseException):
    """Stands for SIGKILL between two steps."""


def cut_off_after(steps: int, patched: pytest.MonkeyPatch) -> None:
    left = [steps]
    for name in ("unlink", "rmdir"):
        real = getattr(os, name)

        def step(*arguments: object, real: Callable[..., None] = real, **options: object) -> None:
            if left[0] == 0:
                raise KilledError
            left[0] -= 1
            real(*arguments, **options)

        patched.setattr(os, name, step)


def test_br_131_the_keys_of_an_encrypted_store_go_with_it(run: Run, folder: Path, tmp_path: Path) -> None:
    keys = random_masters(tmp_path)
    daemon = run(persist="false", encryption_keys=keys)
    store_pages(daemon)
    assert list((folder / "store" / "keys").glob("*.key"))
    daemon.stop()
    assert names_in(folder / "store") == OURS
    plain = run(persist="false")  # the choice is free again
    store_pages(plain)


def test_br_131_a_store_that_is_not_removed_in_time_does_not_hold_up_the_stop_and_goes_at_the_next_start(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = run(backend="file", persist="false")
    store_pages(daemon)
    over = threading.Event()

    def hang(directory: Path) -> bool:
        over.wait(START_S)
        return False

    with monkeypatch.context() as patched:
        patched.setattr("hicache.daemon.recovery.wipe_store", hang)
        patched.setattr("hicache.daemon.stopping.STOP_S", 0.0)
        daemon.stop()
        over.set()
    assert daemon.stopped_clean is False
    assert len(names_in(folder / "store")) > 8
    again = run(backend="file", persist="false")
    with Client(again.target) as client:
        assert client.present(KEYS) == [False] * 8
