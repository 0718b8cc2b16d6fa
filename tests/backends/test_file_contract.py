"""The contract of backends, kept by files."""

from __future__ import annotations

import os
from pathlib import Path

from hicache.backends.base import Backend
from hicache.backends.file_layout import object_path
from hicache.backends.file_settings import FileSettings
from hicache.backends.file_shared import SharedFileBackend
from hicache.backends.file_store import FileBackend
from hicache.outcome import Outcome
from tests.backends.contract import BackendContract
from tests.backends.contract_full import Opener
from tests.backends.payloads import get, key, payload, put, scanned

MIB = 1 << 20


class TestFileBackend(BackendContract):
    def open(self, directory: Path, *, capacity_bytes: int) -> Backend:
        return FileBackend.open(directory, capacity_bytes=capacity_bytes)

    def swap(self, directory: Path, first: bytes, second: bytes) -> None:
        paths = [object_path(str(directory / "objects"), name) for name in (first, second)]
        os.rename(paths[0], directory / "aside")
        os.rename(paths[1], paths[0])
        os.rename(directory / "aside", paths[1])

    def cut_short(self, directory: Path, name: bytes) -> None:
        path = object_path(str(directory / "objects"), name)
        os.truncate(path, os.path.getsize(path) - 10_000)


class TestSharedFileBackend(TestFileBackend):
    """Where the contract fills a store, this one evicts by itself: see test_file_shared.py."""

    def open(self, directory: Path, *, capacity_bytes: int) -> Backend:
        return SharedFileBackend.open(directory, capacity_bytes=capacity_bytes, settings=FileSettings(shared=True))

    def test_a_full_store_refuses_deletes_and_stores_again(self, reopen: Opener) -> None:
        """It does not refuse: the oldest go."""
        backend = reopen(2 * MIB)
        for number in range(100):
            assert put(backend, (key(number), payload(number, 100_000))) == [Outcome.OK]
        usage = backend.usage()
        assert 8 <= usage.objects < 20
        assert usage.stored_bytes <= usage.capacity_bytes
        for stored in scanned(backend):
            assert get(backend, stored.key, stored.size_bytes)[0] is Outcome.OK

    def test_br_123_a_second_open_is_refused_by_inode_and_names_the_holder(  # type: ignore[override]  # as it says
        self, reopen: Opener, directory: Path
    ) -> None:
        """Not by this one: it is there to be shared."""
        first = reopen()
        second = self.open(directory, capacity_bytes=8 * MIB)
        assert second.store_id == first.store_id
        second.close()

    test_a_smaller_capacity_keeps_what_is_there_and_takes_no_more = None  # type: ignore[assignment]  # it evicts
    test_a_much_smaller_capacity_works_once_enough_is_deleted = None  # type: ignore[assignment]
    test_churn_at_the_brim_neither_leaks_nor_wedges = None  # type: ignore[assignment]
