"""Choosing and opening a store: urls, locks, markers, space."""

from __future__ import annotations

import os
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
