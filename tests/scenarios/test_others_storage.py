"""What others met on the medium under their store: disks that fail, fill up, freeze, and people and programs that clean
up there."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hicache.backends.file_settings import FileSettings
from hicache.backends.file_shared import SETTLE_INTERVAL_S, SharedFileBackend
from hicache.backends.file_store import FileBackend
from hicache.backends.lmdb_slab import SLAB_NAME
from hicache.backends.open import open_backend
from hicache.memory_limits import total_memory_bytes
from hicache.outcome import Outcome
from tests.backends.file_faults import FailingCalls
from tests.backends.payloads import get, key, payload, put
from tests.backends.store_rig import OBJECT_BYTES, Rig, fill
from tests.daemon.client import Client
from tests.daemon.raw_links import object_key, payload_of
from tests.daemon.rig import DaemonProcess, http_get, refused_start, scrape, wait_health, wait_until
from tests.engine.test_l2 import write_cgroup
from tests.scenarios.mounts import MIB, drop_from_cache, ext4, mounted, tmpfs

Start = Callable[..., DaemonProcess]

PAGE = 64 * 1024
BACKENDS = ["lmdb", "file"]


@pytest.fixture
def tmp_path(folder: Path) -> Path:
    """Outside of the folders of pytest, which its next runs remove: a mount outlives a test that is killed."""
    return folder


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """An object store over files."""
    rig = Rig(tmp_path / "store")
    yield rig
    rig.store.close()


def store(client: Client, numbers: range, size: int = PAGE) -> list[Outcome]:
    keys = [object_key(number) for number in numbers]
    return client.put_stream(keys, [payload_of(number, size) for number in numbers])


def right(client: Client, numbers: range, size: int = PAGE) -> int:
    """How many come back; fails the test for a wrong one."""
    count = 0
    for number, found in zip(
        numbers, client.get_stream([object_key(number) for number in numbers], [size] * len(numbers)), strict=True
    ):
        assert isinstance(found, Outcome) or found == payload_of(number, size)
        count += not isinstance(found, Outcome)
    return count


def object_files(root: Path) -> list[Path]:
    return [path for path in (root / "objects").rglob("*") if path.is_file()]


@pytest.mark.parametrize("way", ["get", "put", "delete"])
def test_ot_020_the_space_of_objects_that_somebody_else_removed_is_given_back(rig: Rig, way: str) -> None:
    fill(rig, 80)
    for path in object_files(rig.directory)[:60]:
        path.unlink()
    left = len(object_files(rig.directory))
    if way == "get":
        assert [rig.get(number) for number in range(80)].count(Outcome.ABSENT) == 60
    elif way == "delete":
        assert rig.store.delete(list(map(key, range(80)))).count(Outcome.ABSENT) == 60
        left = 0
    else:
        assert rig.put(*range(100, 170)) == [Outcome.OK] * 70
        assert [rig.get(number) for number in range(80)].count(Outcome.OK) <= left
        left = len(object_files(rig.directory))
    usage = rig.store.usage()
    assert (usage.objects, usage.stored_bytes) == (left, left * (OBJECT_BYTES + 4096))
    assert rig.store.stats().resident.objects == left
    rig.store.delete(list(map(key, range(200))))
    assert rig.store.usage().stored_bytes == 0
    fill(rig, 80)
    assert rig.present(*range(80)) == list(range(80)), "as much fits as at first"


def test_ot_020_an_object_that_was_dropped_as_corrupt_gives_its_space_back_once(rig: Rig) -> None:
    """Whoever deletes it just then finds it gone, too."""
    fill(rig, 3)
    path = Path(rig.files.tree.path_of(key(1)))
    path.write_bytes(b"x" * path.stat().st_size)
    assert get(rig.files, key(1), OBJECT_BYTES)[0] is Outcome.CORRUPT  # beside the store
    assert rig.store.delete([key(1)]) == [Outcome.ABSENT]
    assert rig.store.usage().objects == 2
    assert rig.put(1) == [Outcome.OK]
    Path(rig.files.tree.path_of(key(1))).unlink()
    assert rig.get(1) is Outcome.ABSENT
    assert rig.store.usage().objects == 2


def test_ot_020_an_object_that_is_removed_between_its_put_and_its_entry_gives_its_space_back_once(rig: Rig) -> None:
    """As when a namespace is dropped while one of its objects is being written: it is deleted twice."""
    fill(rig, 3)
    assert rig.files.delete([key(1)]) == [Outcome.OK]  # beside the store, which has it in its index
    assert rig.store.delete([key(1)]) == [Outcome.ABSENT]
    assert rig.store.usage().objects == rig.files.count().objects == 2


def test_ot_020_a_shared_folder_that_was_cleaned_up_takes_as_much_as_before(tmp_path: Path) -> None:
    capacity_bytes = 64 * (1 << 20)
    shared = SharedFileBackend.open(tmp_path, capacity_bytes=capacity_bytes, settings=FileSettings(shared=True))
    items = [(key(number), payload(number, MIB)) for number in range(50)]
    assert put(shared, *items) == [Outcome.OK] * 50
    for path in object_files(tmp_path):
        path.unlink()
    shared.keep_up()
    assert shared.usage().objects == 50, "nobody has said that they are gone"
    shared._settled_at_s -= SETTLE_INTERVAL_S
    shared.keep_up()
    assert shared.usage().objects == 0
    assert put(shared, *items[:40]) == [Outcome.OK] * 40
    shared.close()


@pytest.mark.parametrize("is_shared", [False, True])
def test_ot_021_folders_that_somebody_has_cleaned_up_are_made_again(tmp_path: Path, is_shared: bool) -> None:
    """All of them, the lock of the writer as well: it is told from a dead one all the same."""
    name = f"file://{tmp_path}?shared=1" if is_shared else f"file://{tmp_path}"
    backend = open_backend(name, capacity_bytes=64 * MIB)
    assert put(backend, (key(1), b"first"), (key(2), b"second")) == [Outcome.OK] * 2
    assert backend.delete([key(1)]) == [Outcome.OK]  # there is a spare file
    for path in (tmp_path / "unfinished").iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert backend.delete([key(2)]) == [Outcome.OK], "what can be unlinked is deleted"
    assert not object_files(tmp_path)
    assert put(backend, (key(3), b"third")) == [Outcome.OK]
    shutil.rmtree(tmp_path / "objects")
    assert get(backend, key(3), 5)[0] is Outcome.ABSENT
    assert list(backend.scan()) == list(backend.walk()) == []
    assert put(backend, (key(4), b"fourth")) == [Outcome.OK]
    assert get(backend, key(4), 6) == (Outcome.OK, b"fourth")
    assert backend.problem() == ""
    assert len(list((tmp_path / "unfinished").glob("*.alive"))) == 1
    backend.close()
    assert not list((tmp_path / "unfinished").glob("*-*"))


def test_ot_021_the_others_count_what_a_writer_has_stored_once_when_its_report_was_cleaned_up(tmp_path: Path) -> None:
    settings = FileSettings(shared=True)
    writer, other = (SharedFileBackend.open(tmp_path, capacity_bytes=64 * MIB, settings=settings) for _ in range(2))
    assert put(writer, *((key(number), payload(number, MIB)) for number in range(40))) == [Outcome.OK] * 40
    assert writer.delete([key(0)]) == [Outcome.OK]
    other.keep_up()
    for path in (tmp_path / "unfinished").iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    other.keep_up()
    assert put(writer, (key(100), payload(100, MIB))) == [Outcome.OK]
    other.keep_up()
    assert other.usage().objects == 40
    assert put(other, (key(200), payload(200, MIB))) == [Outcome.OK], "and nothing was evicted for it"
    assert len(object_files(tmp_path)) == 41
    writer.close()
    other.close()


def test_ot_021_what_a_writer_left_whose_lock_was_cleaned_up_goes_at_the_next_start(tmp_path: Path) -> None:
    FileBackend.open(tmp_path, capacity_bytes=64 * MIB).close()
    left = tmp_path / "unfinished" / "4711-0123abcd"
    left.mkdir(parents=True)
    (left / "0").write_bytes(b"half an object")
    foreign = tmp_path / "unfinished" / "my-photos"
    foreign.mkdir()
    backend = FileBackend.open(tmp_path, capacity_bytes=64 * MIB)
    assert backend.orphans_removed == 1
    assert not left.exists()
    assert foreign.exists()
    backend.close()


def test_ot_022_a_file_system_that_stops_writing_shows_in_health_and_stops_no_read(
    start: Start, tmp_path: Path
) -> None:
    """It does so by itself after an error, and says all the while that it can be written. (Of LMDB, memory takes the
    puts: its files have their blocks.)"""
    with ext4(tmp_path / "medium", size_bytes=160 * MIB, options="errors=remount-ro") as disk:
        daemon = start(backend="file", path=disk.folder / "store")
        with Client(daemon.target) as client:
            assert store(client, range(8)) == [Outcome.OK] * 8
            assert http_get(daemon.ready["http"], "/healthz")[0] == 200
            disk.fail_inside()
            assert store(client, range(8, 16)) == [Outcome.IO_ERROR] * 8
            assert right(client, range(8)) == 8
            assert "read-only" in wait_health(daemon.ready["http"], 503).lower()
        daemon.terminate()
        assert daemon.process.returncode == 0
        assert "Traceback" not in daemon.log


def test_ot_023_objects_on_another_disk_than_the_rest_are_an_unhealthy_store_and_no_slow_one(
    start: Start, tmp_path: Path
) -> None:
    with tmpfs(tmp_path / "other", "size=64m"):
        start(backend="file", path=tmp_path / "store").close()
        (tmp_path / "store" / "objects").rmdir()
        (tmp_path / "store" / "objects").symlink_to(tmp_path / "other")
        daemon = start(backend="file", path=tmp_path / "store")
        with Client(daemon.target) as client:
            assert store(client, range(4)) == [Outcome.IO_ERROR] * 4
            assert "Invalid cross-device link" in wait_health(daemon.ready["http"], 503)
        assert scrape(daemon.ready["http"])["hicache_store_used_bytes"] == 0
        daemon.close()


def test_ot_024_without_inodes_the_store_lives_on_what_it_has(start: Start, tmp_path: Path) -> None:
    """An object takes one, and so much is what the eviction of another gives back."""
    with tmpfs(tmp_path / "medium", "size=200m,nr_inodes=400") as medium:
        daemon = start(backend="file", path=medium / "store", object_bytes_max="1MiB")
        with Client(daemon.target) as client:
            for number in range(300):
                assert store(client, range(number, number + 1), 10_000 + number % 7) == [Outcome.OK]
            assert right(client, range(299, 300), 10_000 + 299 % 7) == 1
            files = object_files(medium / "store")
            samples = scrape(daemon.ready["http"])
            assert samples["hicache_store_objects"] == len(files) < 200
        assert "all of its 400 inodes are taken" in daemon.log
        daemon.close()


def test_ot_025_an_object_that_the_medium_fails_to_read_twice_is_dropped_and_its_file_not_used_again(
    tmp_path: Path,
) -> None:
    calls = FailingCalls()
    backend = FileBackend.open(tmp_path, capacity_bytes=64 * MIB, calls=calls)
    put(backend, (key(1), payload(1, MIB)), (key(2), payload(2, MIB)))
    calls.arm("read", 0, errno.EIO)
    assert get(backend, key(1), MIB)[0] is Outcome.IO_ERROR
    assert get(backend, key(1), MIB) == (Outcome.OK, payload(1, MIB)), "it may have been a moment's"
    calls.arm("read", 0, errno.EIO)
    assert get(backend, key(1), MIB)[0] is Outcome.CORRUPT
    assert backend.contains([key(1), key(2)]) == [False, True]
    assert backend.usage().objects == 1
    assert backend.spares.total_bytes == 0
    assert put(backend, (key(1), payload(1, MIB))) == [Outcome.OK]
    calls.arm("read", 0, errno.EIO)
    assert get(backend, key(1), MIB)[0] is Outcome.IO_ERROR, "it is another file"
    backend.close()


def test_ot_025_bad_sectors_under_files_cost_the_objects_on_them(start: Start, tmp_path: Path) -> None:
    with ext4(tmp_path / "medium", size_bytes=96 * MIB, options="errors=continue") as disk:
        daemon = start(backend="file", path=disk.folder / "store", object_bytes_max="1MiB")
        with Client(daemon.target) as client:
            assert store(client, range(40), MIB) == [Outcome.OK] * 40
            drop_from_cache(object_files(disk.folder / "store"))
            disk.lose_from(40 * MIB)
            readable = [right(client, range(40), MIB) for _ in range(3)]
            assert 0 < readable[2] <= readable[1] <= readable[0] < 40
            assert readable[2] <= sum(client.present([object_key(number) for number in range(40)])) < 40
        assert daemon.process.poll() is None
        disk.whole_again(96 * MIB)
        daemon.close()


def test_ot_025_bad_sectors_under_a_mapped_store_cost_the_objects_on_them(start: Start, tmp_path: Path) -> None:
    settings: dict[str, object] = {"backend": "lmdb", "path": tmp_path / "store", "object_bytes_max": "1MiB"}
    daemon = start(**settings)
    with Client(daemon.target) as client:
        assert store(client, range(40), MIB) == [Outcome.OK] * 40
    daemon.close()
    with ext4(tmp_path / "medium", size_bytes=160 * MIB, options="errors=continue") as disk:
        slab = tmp_path / "store" / SLAB_NAME
        shutil.move(slab, disk.folder / SLAB_NAME)
        slab.symlink_to(disk.folder / SLAB_NAME)
        daemon = start(**settings)
        drop_from_cache([disk.folder / SLAB_NAME])
        disk.lose_from(30 * MIB)
        with Client(daemon.target) as client:
            readable = right(client, range(40), MIB)
            assert 0 < readable < 40
            assert sum(client.present([object_key(number) for number in range(40)])) == readable
            assert store(client, range(100, 140), MIB) == [Outcome.OK] * 40, "a sector that is written is a good one"
            assert right(client, range(100, 140), MIB) > 20
        assert daemon.process.poll() is None
        daemon.close()


def test_ot_026_a_frozen_file_system_holds_up_who_writes_and_nobody_else(start: Start, tmp_path: Path) -> None:
    """With files; one of LMDB, which is mapped, holds up the whole process (docs/hicached.md)."""
    with ext4(tmp_path / "medium", size_bytes=160 * MIB, options="defaults") as disk:
        daemon = start(backend="file", path=disk.folder / "store")
        with Client(daemon.target) as client, Client(daemon.target) as other:
            assert store(client, range(4)) == [Outcome.OK] * 4
            with disk.frozen():
                writing = client.begin(store, client, range(4, 5))
                wait_until(lambda: scrape(daemon.ready["http"])["hicache_storage_busy_threads"] > 0, what="it waits")
                assert other.present([object_key(number) for number in range(4)]) == [True] * 4
                assert right(other, range(4)) == 4
                assert http_get(daemon.ready["http"], "/healthz")[0] == 200
                assert not writing.done()
            assert writing.result(30) == [Outcome.OK]
        daemon.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_ot_027_a_store_in_the_layer_of_an_image_is_read_and_written_over_it(
    start: Start, tmp_path: Path, backend: str
) -> None:
    lower, layers, merged = tmp_path / "image", tmp_path / "layers", tmp_path / "merged"
    daemon = start(backend=backend, path=lower / "store", capacity_bytes="16MiB", object_bytes_max="1MiB")
    with Client(daemon.target) as client:
        assert store(client, range(8)) == [Outcome.OK] * 8
    daemon.close()
    with tmpfs(layers, "size=128m"):
        (layers / "upper").mkdir()
        (layers / "work").mkdir()
        options = f"lowerdir={lower},upperdir={layers}/upper,workdir={layers}/work"
        with mounted(merged, "-t", "overlay", "-o", options, "overlay"):
            for begin in (100, 400):
                daemon = start(backend=backend, path=merged / "store", capacity_bytes="16MiB", object_bytes_max="1MiB")
                with Client(daemon.target) as client:
                    assert right(client, range(8)) == (8 if begin == 100 else 0)
                    assert store(client, range(begin, begin + 260)) == [Outcome.OK] * 260, "some go for others"
                    present = client.present([object_key(number) for number in range(begin, begin + 260)])
                    assert right(client, range(begin, begin + 260)) == sum(present) > 180
                    assert http_get(daemon.ready["http"], "/healthz")[0] == 200
                daemon.close()
                assert daemon.process.returncode == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_ot_028_a_store_that_comes_back_with_half_of_its_capacity_keeps_what_was_used_last(
    start: Start, tmp_path: Path, backend: str
) -> None:
    """And never less than fits: what two wrote into one folder is not thrown away at the start."""
    settings = {"backend": backend, "path": tmp_path / "store", "object_bytes_max": "1MiB"}
    daemon = start(capacity_bytes="32MiB", **settings)
    with Client(daemon.target) as client:
        assert store(client, range(28), MIB - PAGE) == [Outcome.OK] * 28
    daemon.close()
    daemon = start(capacity_bytes="16MiB", **settings)
    with Client(daemon.target) as client:
        assert right(client, range(27, 28), MIB - PAGE) == 1
        assert store(client, range(100, 104), MIB - PAGE) == [Outcome.OK] * 4
        assert right(client, range(100, 104), MIB - PAGE) == 4
        samples = scrape(daemon.ready["http"])
        assert samples["hicache_store_used_bytes"] <= samples["hicache_store_capacity_bytes"] == 16 * MIB
        kept = sum(client.present([object_key(number) for number in range(28)]))
        assert 8 <= kept <= 13
    daemon.close()


def test_ot_029_a_new_object_is_not_the_first_to_go(rig: Rig) -> None:
    """Also when the clock stood in the future while the others were stored."""
    rig.clock.now_s = 5_000_000_000.0
    fill(rig)
    rig.clock.now_s = 1_000.0
    assert rig.put(*range(100, 105)) == [Outcome.OK] * 5
    assert rig.put(*range(105, 110)) == [Outcome.OK] * 5
    assert rig.present(*range(100, 110)) == list(range(100, 110))
    rig.store.close()
    rig.open()  # by the times that the files have
    assert rig.put(*range(110, 125)) == [Outcome.OK] * 15
    assert rig.present(*range(110, 125)) == list(range(110, 125))


def test_ot_030_the_memory_of_a_container_is_what_counts(tmp_path: Path) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 1048576 kB\nMemAvailable: 524288 kB\n")
    (proc / "self" / "cgroup").write_text("0::/\n")
    assert total_memory_bytes(proc, cgroups) == 1 << 30
    write_cgroup(cgroups, memory__max=str(256 << 20))
    assert total_memory_bytes(proc, cgroups) == 256 << 20
    write_cgroup(cgroups, memory__max="max")
    assert total_memory_bytes(proc, cgroups) == 1 << 30


@pytest.mark.parametrize("backend", BACKENDS)
def test_ot_031_a_path_that_cannot_be_is_told_in_one_line(start: Start, tmp_path: Path, backend: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "x")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in ("file", "file/x", "dangling", "loop", "x" * 300)[BACKENDS.index(backend) :: 2]:
        is_refused(start, backend, tmp_path / path)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ot_031_a_file_system_that_takes_nothing_is_told_in_one_line(
    start: Start, tmp_path: Path, backend: str
) -> None:
    with tmpfs(tmp_path / "ro", "size=64m,ro") as ro, tmpfs(tmp_path / "full", "size=200m,nr_inodes=3") as full:
        for path in (ro, ro / "x", full / "store")[BACKENDS.index(backend) :: 2]:
            is_refused(start, backend, path)
        assert os.listdir(ro) == []


def is_refused(start: Start, backend: str, path: Path) -> None:
    code, line = refused_start(start(wait=False, backend=backend, path=path))
    assert (code, f"path = '{path}': expected a directory that can be written" in line) == (2, True), line
