"""What files need beyond the contract: failing system calls, dead and live writers, strange names."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache.backends.base import PutItem
from hicache.backends.file_calls import FileCalls
from hicache.backends.file_layout import FAN_OUT, HEADER_BYTES, ObjectHeader, decode_header, key_of_name, object_path
from hicache.backends.file_settings import FileSettings
from hicache.backends.file_store import FileBackend
from hicache.backends.file_writer import WriterFolder
from hicache.backends.store import ObjectStore
from hicache.outcome import Outcome
from tests.backends.file_faults import BlockingCalls, FailingCalls
from tests.backends.payloads import get, key, payload, put, scanned
from tests.backends.tampering import files_under

MIB = 1 << 20
CAPACITY_BYTES = 16 * MIB


@pytest.fixture
def calls() -> FailingCalls:
    return FailingCalls()


@pytest.fixture
def backend(directory: Path, calls: FailingCalls) -> Iterator[FileBackend]:
    backend = FileBackend.open(directory, capacity_bytes=CAPACITY_BYTES, calls=calls)
    yield backend
    calls.arm("", 0)
    backend.close()


def files_of(directory: Path) -> list[Path]:
    """Objects and unfinished files."""
    unfinished = [path for path in files_under(directory / "unfinished") if path.suffix != ".alive"]
    return files_under(directory / "objects") + unfinished


@pytest.mark.parametrize("at", range(2))
def test_a_short_read_is_completed(backend: FileBackend, calls: FailingCalls, at: int) -> None:
    content = payload(1, 2 << 20)
    put(backend, (key(1), content))
    calls.arm("read", at, is_short=True)
    assert get(backend, key(1), len(content)) == (Outcome.OK, content)


@pytest.mark.parametrize(("call", "at"), [("open", 0), ("read", 0), ("read", 1)])
def test_a_read_error_drops_nothing(backend: FileBackend, calls: FailingCalls, call: str, at: int) -> None:
    content = payload(1, 2 << 20)
    put(backend, (key(1), content))
    calls.arm(call, at)
    assert get(backend, key(1), len(content))[0] is Outcome.IO_ERROR
    assert get(backend, key(1), len(content)) == (Outcome.OK, content)


def test_a_delete_that_can_neither_move_nor_unlink_says_so_and_keeps_the_object(
    backend: FileBackend, calls: FailingCalls
) -> None:
    put(backend, (key(1), b"a"), (key(2), b"b"))
    calls.arm("rename", 0)
    calls.arm_too("remove", 0)
    assert backend.delete([key(1), key(2)]) == [Outcome.IO_ERROR, Outcome.OK]
    assert backend.contains([key(1), key(2)]) == [True, False]
    assert backend.usage().objects == 1


def test_a_delete_that_cannot_move_the_file_unlinks_it(
    backend: FileBackend, calls: FailingCalls, directory: Path
) -> None:
    put(backend, (key(1), b"a"))
    calls.arm("rename", 0)
    assert backend.delete([key(1)]) == [Outcome.OK]
    assert files_of(directory) == []


def inode_of(directory: Path, name: bytes) -> int:
    return os.stat(object_path(str(directory / "objects"), name)).st_ino


def test_the_file_of_a_removed_object_is_written_again(backend: FileBackend, directory: Path) -> None:
    put(backend, (key(1), payload(1, 100_000)))
    inode = inode_of(directory, key(1))
    backend.delete([key(1)])
    assert backend.usage().stored_bytes == 0
    put(backend, (key(2), payload(2, 100_001)), (key(3), payload(3, 100_000)))
    assert inode_of(directory, key(3)) == inode
    assert inode_of(directory, key(2)) != inode
    assert get(backend, key(3), 100_000) == (Outcome.OK, payload(3, 100_000))
    assert get(backend, key(1), 100_000)[0] is Outcome.ABSENT


def test_spare_files_are_bounded_and_give_way_to_objects(directory: Path) -> None:
    backend = FileBackend.open(directory, capacity_bytes=4 * MIB)
    numbers = range(39)
    put(backend, *[(key(number), payload(number, 100_000)) for number in numbers])
    backend.delete([key(number) for number in numbers])
    assert 0 < sum(path.stat().st_size for path in files_of(directory)) <= 4 * MIB // 3 + 4096 * 39
    put(backend, *[(key(number), payload(number, 90_000)) for number in range(100, 142)])
    on_disk = sum(path.stat().st_size for path in files_of(directory))
    assert backend.usage().stored_bytes <= on_disk + 4096 * 42
    assert on_disk <= 4 * MIB
    backend.close()
    assert list((directory / "unfinished").iterdir()) == []


def test_a_put_on_a_full_disk_gives_the_spare_files_up_and_tries_again(
    backend: FileBackend, calls: FailingCalls, directory: Path
) -> None:
    put(backend, (key(1), payload(1, 100_000)))
    backend.delete([key(1)])
    assert len(files_of(directory)) == 1
    calls.arm("write", 0, errno.ENOSPC)
    assert put(backend, (key(2), payload(2, 5000))) == [Outcome.OK]
    assert len(files_of(directory)) == 1


def test_a_file_that_is_being_read_is_not_written_again(directory: Path) -> None:
    calls = BlockingCalls("read")
    backend = FileBackend.open(directory, capacity_bytes=CAPACITY_BYTES, calls=calls)
    put(backend, (key(1), payload(1, 3 * MIB)))
    found: list[tuple[Outcome, bytes]] = []
    reader = threading.Thread(target=lambda: found.append(get(backend, key(1), 3 * MIB)))
    reader.start()
    assert calls.is_midway.wait(timeout=30)
    assert backend.delete([key(1)]) == [Outcome.OK]
    assert put(backend, (key(2), payload(2, 3 * MIB)), (key(1), payload(1, 3 * MIB))) == [Outcome.OK] * 2
    calls.go_on.set()
    reader.join(timeout=30)
    assert found == [(Outcome.OK, payload(1, 3 * MIB))]
    backend.close()


def test_a_writer_holds_its_lock_as_long_as_it_lives(tmp_path: Path) -> None:
    writer = WriterFolder(tmp_path, FileCalls())
    assert list(tmp_path.iterdir()) == []
    writer.new_path()
    (alive,) = tmp_path.glob("*.alive")
    with alive.open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    writer.close()


def test_files_that_are_none_of_ours_are_neither_told_nor_touched(directory: Path) -> None:
    backend = FileBackend.open(directory, capacity_bytes=CAPACITY_BYTES)
    put(backend, (key(1), b"ours"))
    folder = Path(object_path(str(directory / "objects"), key(1))).parent
    backend.close()
    (folder / "README.md").write_text("not an object")
    (directory / "objects" / "notes").write_text("not a folder")
    backend = FileBackend.open(directory, capacity_bytes=CAPACITY_BYTES)
    assert [stored.key for stored in scanned(backend)] == [key(1)]
    assert backend.usage().objects == 1
    backend.close()
    assert (folder / "README.md").exists()


def test_a_file_removed_by_hand_is_absent(directory: Path) -> None:
    backend = FileBackend.open(directory, capacity_bytes=CAPACITY_BYTES)
    put(backend, (key(1), b"ours"))
    os.unlink(object_path(str(directory / "objects"), key(1)))
    assert get(backend, key(1), 4)[0] is Outcome.ABSENT
    assert put(backend, (key(1), b"ours")) == [Outcome.OK]
    backend.close()


def test_folders_are_bounded_and_names_come_back_as_keys() -> None:
    folders = set()
    for number in range(2000):
        _, folder, name = object_path("root", key(number)).split("/")
        folders.add(folder)
        assert key_of_name(name) == key(number)
    assert 240 <= len(folders) <= FAN_OUT
    for length in (1, 127, 128):
        assert key_of_name(object_path("root", b"\xff" * length).rsplit("/", 1)[1]) == b"\xff" * length
    assert len(object_path("root", b"\xff" * 128).rsplit("/", 1)[1]) <= 255
    for name in ("README.md", "a", "AEBAG", "aebag======", "", "x" * 255, "FF", "ff ff ", "f" * 254 + "g"):
        assert key_of_name(name) is None


def test_a_header_fills_its_block_and_any_damage_shows() -> None:
    header = ObjectHeader(key(1), 12345, 2**64 - 1)
    raw = header.encode()
    assert len(raw) == HEADER_BYTES
    assert decode_header(raw) == header
    for position in range(34 + len(key(1))):
        assert decode_header(raw[:position] + bytes([raw[position] ^ 1]) + raw[position + 1 :]) is None
    assert decode_header(raw[:100]) is None


def test_a_walk_passes_over_what_has_gone_since_it_was_listed(backend: FileBackend) -> None:
    """Otherwise it would be an object of a namespace that nobody knows."""
    keys = [key(number) for number in range(3)]
    for number in range(3):
        put(backend, (keys[number], payload(number, 100)))
    tag_of = backend._files.namespace_tag

    def late(path: str, its_key: bytes) -> int | None:
        if its_key == keys[1]:
            os.unlink(path)
        return tag_of(path, its_key)

    backend._files.namespace_tag = late  # type: ignore[method-assign]
    assert {walked.key for batch in backend.walk() for walked in batch} == {keys[0], keys[2]}


def test_what_was_deleted_and_may_come_back_after_a_power_loss_gives_its_space_back_once(tmp_path: Path) -> None:
    """A delete whose name could not be synced is IO_ERROR, so the store believes in it until it is asked for again."""
    calls = FailingCalls()
    settings = FileSettings(fsync=True)
    backend = FileBackend.open(tmp_path, capacity_bytes=CAPACITY_BYTES, settings=settings, calls=calls)
    store = ObjectStore(backend, object_bytes_max=MIB, free_space_floor_bytes=0)
    assert store.put([PutItem(key(number), memoryview(b"bytes")) for number in (1, 2)]) == [Outcome.OK] * 2
    calls.arm("sync_folder", 0)
    assert store.delete([key(2)]) == [Outcome.IO_ERROR]
    assert store.delete([key(2)]) == [Outcome.ABSENT]
    assert backend.usage().objects == store.stats().resident.objects == 1
    store.close()
