"""Choosing and opening a store: urls, locks, markers, space."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hicache.backends.file_store import FileBackend
from hicache.backends.lmdb_store import LmdbBackend
from hicache.backends.lock import LOCK_NAME, DirectoryLock
from hicache.backends.marker import MARKER_BYTES, MARKER_NAME, new_marker, read_marker, write_marker
from hicache.backends.open import BACKEND_SCHEMES, open_backend, open_store
from hicache.backends.space import free_bytes, total_bytes
from hicache.errors import ConfigError, StorageInUse
from hicache.outcome import Outcome
from tests.backends.payloads import key, put

MIB = 1 << 20
ROOT = Path(__file__).parents[2]


def test_a_url_chooses_the_backend(tmp_path: Path) -> None:
    for scheme, kind in (("lmdb", LmdbBackend), ("file", FileBackend)):
        backend = open_backend(f"{scheme}://{tmp_path / 'deep' / scheme}", capacity_bytes=8 * MIB)
        assert isinstance(backend, kind)
        assert backend.name == scheme
        assert len(backend.store_id) == 16
        assert put(backend, (key(1), b"x")) == [Outcome.OK]
        backend.close()


@pytest.mark.parametrize(
    "url", ["", "lmdb", "redis://localhost", "lmdb://relative/path", "/plain/path", "lmdb:///p?x=1", "file:///p#x"]
)
def test_a_url_that_names_no_store_is_a_config_error(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_backend(url, capacity_bytes=8 * MIB)
    assert caught.value.setting == "backend"


def test_a_path_that_cannot_be_a_directory_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("a file")
    with pytest.raises(ConfigError, match="plain"):
        open_backend(f"lmdb://{tmp_path / 'plain'}", capacity_bytes=8 * MIB)


def test_a_store_of_another_kind_is_refused_and_kept(tmp_path: Path) -> None:
    open_backend(f"file://{tmp_path}", capacity_bytes=8 * MIB).close()
    with pytest.raises(
        ConfigError, match="of kind lmdb version 2 or 3, but it is file version 2; set backend = 'file'"
    ):
        open_backend(f"lmdb://{tmp_path}", capacity_bytes=8 * MIB)
    open_backend(f"file://{tmp_path}", capacity_bytes=8 * MIB).close()


@pytest.mark.parametrize("raw", [b"", b"{}", b"not json", b'{"kind": "lmdb"'])
def test_a_marker_that_cannot_be_read_is_a_config_error_and_nothing_is_removed(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / MARKER_NAME).write_bytes(raw)
    (tmp_path / "data.mdb").write_bytes(b"whatever it is")
    with pytest.raises(ConfigError, match=MARKER_NAME):
        open_backend(f"lmdb://{tmp_path}", capacity_bytes=8 * MIB)
    assert (tmp_path / "data.mdb").read_bytes() == b"whatever it is"


def test_a_marker_is_read_back(tmp_path: Path) -> None:
    assert read_marker(tmp_path, kind="lmdb", versions=(1,)) is None
    marker = new_marker("lmdb", 1)
    write_marker(tmp_path, new_marker("lmdb", 1))
    write_marker(tmp_path, marker)
    assert (tmp_path / MARKER_NAME).stat().st_size == MARKER_BYTES
    assert read_marker(tmp_path, kind="lmdb", versions=(1,)) == marker
    assert marker.survived()


def test_a_marker_without_a_boot_id_says_nothing_survived() -> None:
    marker = new_marker("lmdb", 1)
    assert not type(marker)(kind="lmdb", version=1, store_id="00", boot_id="", is_clean=False).survived()
    assert type(marker)(kind="lmdb", version=1, store_id="00", boot_id="", is_clean=True).survived()


def test_a_lock_names_its_holder_and_can_be_taken_after_release(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path)
    with pytest.raises(StorageInUse) as caught:
        DirectoryLock(tmp_path)
    assert f"pid {os.getpid()}" in caught.value.holder
    lock.release()
    lock.release()
    DirectoryLock(tmp_path).release()
    assert (tmp_path / LOCK_NAME).exists()


def test_a_lock_file_that_says_nothing_is_still_held(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path)
    os.truncate(tmp_path / LOCK_NAME, 0)
    with pytest.raises(StorageInUse, match="another process"):
        DirectoryLock(tmp_path)
    lock.release()


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
from hicache.backends.open import open_backend
from hicache.errors import ConfigError
from tests.backends.payloads import key, payload, put, get
{body}
"""


def run_limited(limit_bytes: int, body: str) -> str:
    """Run code in a process whose files may not grow beyond a size; returns what it prints."""
    code = LIMITED.format(limit=limit_bytes, body=body)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_br_086_a_map_that_cannot_get_its_space_is_a_config_error_and_no_signal(tmp_path: Path) -> None:
    body = f"""
for _ in range(2):
    try:
        open_backend("lmdb://{tmp_path}", capacity_bytes=64 << 20)
    except ConfigError as error:
        print(error)
backend = open_backend("lmdb://{tmp_path}", capacity_bytes=4 << 20)
print(put(backend, (key(1), payload(1, 1 << 20))), backend.usage().objects)
backend.close()
"""
    lines = run_limited(32 << 20, body).splitlines()
    assert lines[0].startswith("capacity_bytes = 67108864: expected a capacity that fits")
    assert lines[1] == lines[0] or lines[1].startswith("capacity_bytes = 67108864")
    assert lines[2] == "[<Outcome.OK: 0>] 1"


def test_br_074_a_file_that_cannot_grow_is_no_space_and_leaves_no_trace(tmp_path: Path) -> None:
    body = f"""
backend = open_backend("file://{tmp_path}", capacity_bytes=64 << 20)
print(put(backend, (key(1), payload(1, 3 << 20)), (key(2), payload(2, 1 << 20))))
print(backend.usage().objects, get(backend, key(1), 3 << 20)[0], get(backend, key(2), 1 << 20)[0])
backend.close()
"""
    lines = run_limited(2 << 20, body).splitlines()
    assert lines[0] == "[<Outcome.NO_SPACE: 6>, <Outcome.OK: 0>]"
    assert lines[1] == "1 2 0"
    files = [path for path in (tmp_path / "objects").rglob("*") if path.is_file()]
    assert len(files) == 1
    assert list((tmp_path / "unfinished").iterdir()) == []


FULL_DISK = """
import os, sys
from pathlib import Path
from hicache.backends.open import open_backend
from hicache.errors import ConfigError
from hicache.outcome import Outcome
from tests.backends.payloads import key, payload, put, get
scheme, root = sys.argv[1], Path(sys.argv[2])
try:
    open_backend(f"{scheme}://{root}/store", capacity_bytes=1 << 30)
except ConfigError as error:
    print("refused", error.setting)
backend = open_backend(f"{scheme}://{root}/store", capacity_bytes=24 << 20)
fd = os.open(root / "filler", os.O_WRONLY | os.O_CREAT)
try:
    while True:
        os.write(fd, bytes(1 << 20))
except OSError as error:
    print("disk full", error.errno)
outcomes = [put(backend, (key(number), payload(number, 1 << 20)))[0] for number in range(40)]
print("stored", outcomes.count(Outcome.OK), "refused", outcomes.count(Outcome.NO_SPACE))
stored = [number for number, outcome in enumerate(outcomes) if outcome is Outcome.OK]
print("intact", all(get(backend, key(n), 1 << 20) == (Outcome.OK, payload(n, 1 << 20)) for n in stored))
print("deleted", backend.delete([key(n) for n in stored]).count(Outcome.OK) == len(stored))
survivor = stored[:1] or [1000]
put(backend, (key(survivor[0]), payload(survivor[0], 1 << 20)))
backend.close()
backend = open_backend(f"{scheme}://{root}/store", capacity_bytes=24 << 20)
print("reopened", backend.usage().objects == len(stored[:1]))
os.close(fd)
os.unlink(root / "filler")
print("again", put(backend, (key(99), b"works"))[0].name)
backend.close()
"""


@pytest.mark.parametrize(("scheme", "stored"), [("lmdb", range(24, 25)), ("file", range(1))])
def test_br_086_a_disk_that_others_fill_costs_puts_and_nothing_else(tmp_path: Path, scheme: str, stored: range) -> None:
    """On a tmpfs of 64 MiB of its own; needs user namespaces, or root."""
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare(1)")
    flags = "-m" if os.geteuid() == 0 else "-Urm"
    script = f'mount -t tmpfs -o size=64m tmpfs "{tmp_path}" || exit 77; exec "$@"'
    command = ["unshare", flags, "sh", "-c", script, "sh", sys.executable, "-c", FULL_DISK, scheme, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("no tmpfs can be mounted here")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["refused capacity_bytes", "disk full 28"]
    assert int(lines[2].split()[1]) in stored
    assert lines[3:] == ["intact True", "deleted True", "reopened True", "again OK"]


@pytest.mark.parametrize("scheme", BACKEND_SCHEMES)
def test_a_floor_that_the_file_system_cannot_keep_is_refused_and_nothing_is_taken(tmp_path: Path, scheme: str) -> None:
    floor_bytes = total_bytes(tmp_path)
    free_before = free_bytes(tmp_path)
    with pytest.raises(ConfigError, match="free_space_floor_bytes"):
        open_store(
            f"{scheme}://{tmp_path}/store",
            capacity_bytes=64 << 20,
            object_bytes_max=1 << 20,
            free_space_floor_bytes=floor_bytes,
        )
    assert free_before - free_bytes(tmp_path) < 32 << 20  # others write there too
    store = open_store(
        f"{scheme}://{tmp_path}/store", capacity_bytes=16 << 20, object_bytes_max=1 << 20, free_space_floor_bytes=0
    )
    store.close()
