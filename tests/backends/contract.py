"""What every backend promises: one class of tests that each of them inherits."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random

import pytest

from hicache.backends.base import PHYSICAL_KEY_BYTES_MAX, Backend, PutItem
from hicache.backends.lock import LOCK_NAME, OPENING_NAME
from hicache.errors import BackendError, ConfigError, StorageInUse
from hicache.outcome import Outcome
from hicache.tenancy import physical_key, tenant_digest
from tests.backends.contract_full import MIB, FullContract, Opener
from tests.backends.payloads import get, get_many, key, payload, put, scanned
from tests.backends.tampering import files_under, flip_bit, zero_block


class BackendContract(FullContract):
    """Inherit and say how to open a store and how to damage a closed one."""

    def open(self, directory: Path, *, capacity_bytes: int) -> Backend:
        """Open the store under test."""
        raise NotImplementedError

    def swap(self, directory: Path, first: bytes, second: bytes) -> None:
        """On the medium, let each of two objects of equal size have the bytes of the other."""
        raise NotImplementedError

    def cut_short(self, directory: Path, name: bytes) -> None:
        """On the medium, take the end of an object away."""
        raise NotImplementedError

    def overwrite(self, directory: Path, name: bytes, content: bytes, *, at: int, count: int) -> None:
        """On the medium, change one bit of the payload ``content``, or ``count`` bytes to zeros."""
        if count == 1:
            flip_bit(directory, content, at=at)
        else:
            zero_block(directory, content, at=at)

    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        return tmp_path / "store"

    @pytest.fixture
    def reopen(self, directory: Path) -> Iterator[Opener]:
        """Opens the store; closes the one that was open before."""
        opened: list[Backend] = []

        def open_again(capacity_bytes: int = 8 * MIB) -> Backend:
            for backend in opened:
                backend.close()
            opened.append(self.open(directory, capacity_bytes=capacity_bytes))
            return opened[-1]

        yield open_again
        for backend in opened:
            backend.close()

    @pytest.fixture
    def backend(self, reopen: Opener) -> Backend:
        return reopen()

    def test_what_was_put_is_got(self, backend: Backend) -> None:
        sizes = [1, 100, 4080, 4096, 65535, 65536, 65537, 69615, 69616, 69617, 300_001, MIB]
        objects = [(key(number), payload(number, size)) for number, size in enumerate(sizes)]
        assert put(backend, *objects) == [Outcome.OK] * len(sizes)
        found = get_many(backend, [(name, len(content)) for name, content in objects])
        assert found == [(Outcome.OK, content) for _, content in objects]

    def test_an_object_of_64_mib_is_stored_whole(self, reopen: Opener) -> None:
        backend = reopen(80 * MIB)
        content = payload(1, 64 * MIB)
        assert put(backend, (key(1), content)) == [Outcome.OK]
        assert get(backend, key(1), len(content)) == (Outcome.OK, content)

    def test_an_unknown_key_is_absent_everywhere(self, backend: Backend) -> None:
        put(backend, (key(1), b"x"))
        assert get(backend, key(2), 1)[0] is Outcome.ABSENT
        assert backend.contains([key(1), key(2)]) == [True, False]
        assert backend.delete([key(2)]) == [Outcome.ABSENT]

    def test_a_target_of_another_size_is_a_mismatch_and_drops_nothing(self, backend: Backend) -> None:
        put(backend, (key(1), payload(1, 1000)))
        assert get(backend, key(1), 999)[0] is Outcome.SIZE_MISMATCH
        assert get(backend, key(1), 1001)[0] is Outcome.SIZE_MISMATCH
        assert get(backend, key(1), 1000) == (Outcome.OK, payload(1, 1000))

    def test_the_first_write_wins(self, backend: Backend) -> None:
        assert put(backend, (key(1), b"first")) == [Outcome.OK]
        assert put(backend, (key(1), b"second")) == [Outcome.EXISTS]
        assert get(backend, key(1), 5) == (Outcome.OK, b"first")
        assert backend.usage().objects == 1

    def test_the_first_write_wins_within_one_batch(self, backend: Backend) -> None:
        outcomes = put(backend, (key(1), b"first"), (key(2), b"other"), (key(1), b"second"))
        assert outcomes == [Outcome.OK, Outcome.OK, Outcome.EXISTS]
        assert get(backend, key(1), 5) == (Outcome.OK, b"first")
        assert backend.usage().objects == 2

    def test_an_empty_payload_and_keys_of_wrong_length_are_refused(self, backend: Backend) -> None:
        too_long = b"k" * (PHYSICAL_KEY_BYTES_MAX + 1)
        outcomes = put(backend, (key(1), b""), (b"", b"x"), (too_long, b"x"), (key(2), b"fine"))
        assert outcomes == [Outcome.REFUSED, Outcome.REFUSED, Outcome.REFUSED, Outcome.OK]
        assert backend.contains([key(1), b"", too_long, key(2)]) == [False, False, False, True]
        assert get(backend, too_long, 1)[0] is Outcome.ABSENT
        assert backend.delete([b"", too_long]) == [Outcome.ABSENT, Outcome.ABSENT]

    def test_keys_of_every_allowed_length_are_kept_apart(self, backend: Backend) -> None:
        names = [bytes([0x5A]) * length for length in range(1, PHYSICAL_KEY_BYTES_MAX + 1)]
        names += [b"\0", b"\0\0", b"/", b"..", b"\xff" * PHYSICAL_KEY_BYTES_MAX]
        assert put(backend, *[(name, name) for name in names[:64]]) == [Outcome.OK] * 64
        assert put(backend, *[(name, name) for name in names[-6:]]) == [Outcome.OK] * 6
        for name in names[:64] + names[-6:]:
            assert get(backend, name, len(name)) == (Outcome.OK, name)

    def test_a_view_of_a_larger_buffer_is_a_payload_and_a_target(self, backend: Backend) -> None:
        memory = bytearray(payload(1, 3 * 4096))
        backend.put([PutItem(key(1), memoryview(memory)[4096:8192])])
        memory[:4096] = bytes(4096)
        assert get(backend, key(1), 4096) == (Outcome.OK, payload(1, 3 * 4096)[4096:8192])

    def test_delete_gives_the_space_back(self, backend: Backend) -> None:
        before = backend.usage()
        put(backend, (key(1), payload(1, 100_000)), (key(2), payload(2, 5)))
        assert backend.delete([key(1), key(2), key(1)]) == [Outcome.OK, Outcome.OK, Outcome.ABSENT]
        assert backend.usage() == before
        assert get(backend, key(1), 100_000)[0] is Outcome.ABSENT

    def test_usage_counts_payload_and_what_it_takes(self, backend: Backend) -> None:
        sizes = [1, 5000, 70_000]
        put(backend, *[(key(size), payload(size, size)) for size in sizes])
        usage = backend.usage()
        assert (usage.objects, usage.payload_bytes) == (3, sum(sizes))
        assert usage.stored_bytes == sum(backend.stored_bytes(size) for size in sizes)
        assert usage.payload_bytes <= usage.stored_bytes <= usage.capacity_bytes

    def test_scan_tells_every_object_once(self, backend: Backend) -> None:
        put(backend, *[(key(number), payload(number, 10 + number)) for number in range(40)])
        backend.delete([key(number) for number in range(0, 40, 2)])
        told = {stored.key: stored.size_bytes for stored in scanned(backend)}
        assert told == {key(number): 10 + number for number in range(1, 40, 2)}
        assert len(scanned(backend)) == 20

    def test_times_of_use_are_told_by_scan_after_a_restart(self, reopen: Opener) -> None:
        backend = reopen()
        put(backend, (key(1), b"a"), (key(2), b"b"))
        backend.touch([(key(1), 2_000_000_000.0), (key(2), 1_000_000_000.0), (key(3), 5.0)])
        told = {stored.key: stored.used_at_s for stored in scanned(reopen())}
        assert told == {key(1): pytest.approx(2_000_000_000.0), key(2): pytest.approx(1_000_000_000.0)}

    def test_br_061_usage_and_content_are_the_same_after_a_restart(self, reopen: Opener) -> None:
        backend = reopen()
        objects = [(key(number), payload(number, 50_000 + number)) for number in range(30)]
        put(backend, *objects)
        backend.delete([key(3), key(4)])
        usage, store_id = backend.usage(), backend.store_id
        backend = reopen()
        assert backend.usage() == usage
        assert backend.store_id == store_id
        kept = [entry for entry in objects if entry[0] not in (key(3), key(4))]
        assert get_many(backend, [(name, len(content)) for name, content in kept]) == [
            (Outcome.OK, content) for _, content in kept
        ]

    def test_br_066_objects_that_were_there_before_a_restart_are_not_written_again(self, reopen: Opener) -> None:
        objects = [(key(number), payload(number, 5000)) for number in range(20)]
        assert set(put(reopen(), *objects)) == {Outcome.OK}
        backend = reopen()
        assert set(put(backend, *objects)) == {Outcome.EXISTS}
        assert backend.usage().objects == 20

    @pytest.mark.parametrize("at", [0, 65_535, 65_536, 199_000])
    def test_br_076_a_flipped_bit_is_corrupt_and_dropped(self, reopen: Opener, directory: Path, at: int) -> None:
        backend = reopen()
        put(backend, (key(1), payload(1, 200_000)), (key(2), payload(2, 200_000)))
        backend.close()
        self.overwrite(directory, key(1), payload(1, 200_000), at=at, count=1)
        self._require_only_first_is_corrupt(reopen(), 200_000)

    def test_br_076_a_zeroed_block_is_corrupt_and_dropped(self, reopen: Opener, directory: Path) -> None:
        backend = reopen()
        put(backend, (key(1), payload(1, 100_000)), (key(2), payload(2, 100_000)))
        backend.close()
        self.overwrite(directory, key(1), payload(1, 100_000), at=50_000, count=4096)
        self._require_only_first_is_corrupt(reopen(), 100_000)

    def test_an_object_whose_end_is_missing_is_corrupt_and_dropped(self, reopen: Opener, directory: Path) -> None:
        backend = reopen()
        put(backend, (key(1), payload(1, 100_000)), (key(2), payload(2, 100_000)))
        backend.close()
        self.cut_short(directory, key(1))
        self._require_only_first_is_corrupt(reopen(), 100_000)

    def test_br_076_bytes_under_a_foreign_key_are_corrupt_and_dropped(self, reopen: Opener, directory: Path) -> None:
        backend = reopen()
        put(backend, (key(1), payload(1, 80_000)), (key(2), payload(2, 80_000)))
        backend.close()
        self.swap(directory, key(1), key(2))
        backend = reopen()
        assert [outcome for outcome, _ in get_many(backend, [(key(1), 80_000), (key(2), 80_000)])] == [
            Outcome.CORRUPT,
            Outcome.CORRUPT,
        ]
        assert backend.usage().objects == 0
        assert backend.usage().stored_bytes == 0

    def _require_only_first_is_corrupt(self, backend: Backend, size_bytes: int) -> None:
        found = get_many(backend, [(key(2), size_bytes), (key(1), size_bytes), (key(2), size_bytes)])
        assert [outcome for outcome, _ in found] == [Outcome.OK, Outcome.CORRUPT, Outcome.OK]
        assert found[0][1] == payload(2, size_bytes)
        assert backend.contains([key(1), key(2)]) == [False, True]
        assert backend.usage().objects == 1
        assert backend.usage().stored_bytes == backend.stored_bytes(size_bytes)
        assert put(backend, (key(1), payload(1, size_bytes))) == [Outcome.OK]
        assert get(backend, key(1), size_bytes) == (Outcome.OK, payload(1, size_bytes))

    def test_br_123_a_second_open_is_refused_by_inode_and_names_the_holder(
        self, reopen: Opener, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        backend = reopen()
        put(backend, (key(1), b"kept"))
        (tmp_path / "link").symlink_to(directory)
        monkeypatch.chdir(tmp_path)
        for path in (directory, tmp_path / "link", Path("store"), tmp_path / "link" / ".." / "store"):
            with pytest.raises(StorageInUse, match=f"pid {os.getpid()} "):
                self.open(path, capacity_bytes=8 * MIB)
        assert get(backend, key(1), 4) == (Outcome.OK, b"kept")
        backend.close()
        assert get(reopen(), key(1), 4) == (Outcome.OK, b"kept")

    def test_a_directory_of_somebody_else_is_refused_and_left_alone(self, directory: Path) -> None:
        directory.mkdir()
        (directory / "thesis.tex").write_text("precious")
        with pytest.raises(ConfigError, match=r"thesis\.tex"):
            self.open(directory, capacity_bytes=8 * MIB)
        assert {path.name for path in directory.iterdir()} - {LOCK_NAME, OPENING_NAME} == {"thesis.tex"}

    def test_payloads_are_readable_by_their_owner_only(self, reopen: Opener, directory: Path) -> None:
        put(reopen(), (key(1), payload(1, 1000)))
        assert directory.stat().st_mode & 0o077 == 0
        holding = [path for path in files_under(directory) if payload(1, 1000) in path.read_bytes()]
        assert holding
        assert all(path.stat().st_mode & 0o077 == 0 for path in holding)

    def test_a_capacity_beyond_the_disk_is_a_config_error_that_says_what_would_fit(self, directory: Path) -> None:
        with pytest.raises(ConfigError, match=r"expected .*; lower capacity_bytes, .*another path") as caught:
            self.open(directory, capacity_bytes=1 << 47)
        assert caught.value.setting == "capacity_bytes"
        self.open(directory, capacity_bytes=8 * MIB).close()

    def test_a_closed_backend_says_so_and_closing_again_is_nothing(self, backend: Backend) -> None:
        backend.close()
        backend.close()
        with pytest.raises(BackendError, match="closed"):
            put(backend, (key(1), b"x"))
        with pytest.raises(BackendError, match="closed"):
            get(backend, key(1), 1)

    def test_br_077_the_same_objects_put_by_many_at_once_are_stored_once(self, backend: Backend) -> None:
        objects = [(key(number), payload(number, 20_000)) for number in range(50)]
        outcomes: list[list[Outcome]] = []
        start = threading.Barrier(8)

        def put_all() -> None:
            start.wait()
            outcomes.append(put(backend, *objects))

        _run_threads([put_all] * 8)
        for position in range(50):
            settled = sorted(outcome[position] for outcome in outcomes)
            assert settled == [Outcome.OK] + [Outcome.EXISTS] * 7
        assert backend.usage().payload_bytes == 50 * 20_000

    def test_br_078_readers_and_writers_at_once_see_whole_objects_only(self, backend: Backend) -> None:
        sizes = {number: 1000 + 17_000 * number for number in range(12)}
        wrong: list[str] = []

        def work(seed: int) -> None:
            random = Random(seed)
            for _ in range(120):
                number = random.randrange(12)
                action = random.choice(["put", "get", "get", "delete"])
                if action == "put":
                    put(backend, (key(number), payload(number, sizes[number])))
                elif action == "delete":
                    backend.delete([key(number)])
                else:
                    outcome, content = get(backend, key(number), sizes[number])
                    if outcome not in (Outcome.OK, Outcome.ABSENT):
                        wrong.append(f"{number}: {outcome!r}")
                    if outcome is Outcome.OK and content != payload(number, sizes[number]):
                        wrong.append(f"{number}: wrong bytes")

        _run_threads([partial(work, seed) for seed in range(4)])
        assert wrong == []
        told = scanned(backend)
        assert backend.usage().objects == len(told)
        assert backend.usage().payload_bytes == sum(stored.size_bytes for stored in told)

    def test_a_walk_tells_namespaces_in_an_order_that_stays(self, reopen: Opener) -> None:
        backend = reopen()
        for number in range(30):
            item = PutItem(key(number), memoryview(payload(number, 10 + number)), number % 3)
            assert backend.put([item]) == [Outcome.OK]
        walked = [found for batch in backend.walk() for found in batch]
        assert {found.key: (found.size_bytes, found.namespace_tag) for found in walked} == {
            key(number): (10 + number, number % 3) for number in range(30)
        }
        assert len(walked) == 30
        backend = reopen()
        again = [found.key for batch in backend.walk(after=walked[11].key) for found in batch]
        assert again == [found.key for found in walked[12:]]
        backend.delete([walked[20].key])
        again = [found.key for batch in backend.walk(after=walked[20].key) for found in batch]
        assert again == [found.key for found in walked[21:]], "behind a key that is gone"
        assert list(backend.walk(after=walked[-1].key)) in ([], [[]])

    def test_a_walk_over_a_tenant_tells_its_objects_and_no_others(self, reopen: Opener) -> None:
        backend, tenants = reopen(), [tenant_digest(name) for name in ("alice", "bob", "carol")]
        for number in range(30):
            item = PutItem(physical_key(tenants[number % 2], payload(number, 36)), memoryview(b"bytes"))
            assert backend.put([item]) == [Outcome.OK]
        for tenant, count in zip(tenants, (15, 15, 0), strict=True):
            walked = [found.key for batch in backend.walk(tenant=tenant) for found in batch]
            assert len(set(walked)) == count
            assert all(found.startswith(tenant) for found in walked)
            for after in range(0, count, 5):
                again = [found.key for batch in backend.walk(after=walked[after], tenant=tenant) for found in batch]
                assert again == walked[after + 1 :]


def _run_threads(actions: list[Callable[[], None]]) -> None:
    """Run each in its thread; raise what one of them raised."""
    errors: list[BaseException] = []

    def guarded(action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(action,), daemon=True) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]
