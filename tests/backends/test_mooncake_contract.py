"""The contract of backends, kept by a real Mooncake store as far as one that is shared and evicts by itself can."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache.backends.base import Backend
from hicache.backends.mooncake_layout import object_name
from hicache.errors import BackendError
from hicache.outcome import Outcome
from tests.backends import contract
from tests.backends.contract import BackendContract
from tests.backends.contract_full import Opener
from tests.backends.mooncake_cluster import MIB, MooncakeCluster, require_wheel
from tests.backends.payloads import get, key, put, scanned

require_wheel()

SEGMENT_BYTES = 160 * MIB


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeCluster]:
    with MooncakeCluster(tmp_path_factory.mktemp("mooncake")) as running:
        running.start_node(SEGMENT_BYTES)
        yield running


@pytest.fixture(scope="module")
def raw(cluster: MooncakeCluster) -> Any:  # Any: the wheel has no types
    return cluster.client()


class TestMooncakeBackend(BackendContract):
    """Each directory stands for a store: the pool is emptied before it is opened for the first time.

    The capacity is that of the node, so tests about capacities are elsewhere (test_mooncake_faults.py: a full pool
    evicts), and those about directories and locks have no meaning for a store that everybody shares.
    """

    @pytest.fixture(autouse=True)
    def _cluster(self, cluster: MooncakeCluster, raw: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # Any: as above
        self.cluster = cluster
        self.raw = raw
        self.wiped: set[Path] = set()
        monkeypatch.setattr(contract, "flip_bit", self.flip_bit)
        monkeypatch.setattr(contract, "zero_block", self.zero_block)

    def open(self, directory: Path, *, capacity_bytes: int) -> Backend:
        if directory not in self.wiped:
            self.wiped.add(directory)
            self.raw.remove_all(True)
        return self.cluster.open(call_timeout_s=10.0)  # other work may hold the machine

    def flip_bit(self, directory: Path, content: bytes, *, at: int) -> None:
        found = content[at : at + 64]
        assert self.cluster.overwrite(found, bytes([found[0] ^ 0x10])) > 0

    def zero_block(self, directory: Path, content: bytes, *, at: int) -> None:
        assert self.cluster.overwrite(content[at : at + 4096], bytes(4096)) > 0

    def swap(self, directory: Path, first: bytes, second: bytes) -> None:
        names = [object_name(first), object_name(second)]
        values = [self.raw.get(name) for name in names]
        assert self.raw.batch_remove(names, True) == [0, 0]
        for name, value in zip(names, reversed(values), strict=True):
            assert self.raw.put(name, value) == 0

    def cut_short(self, directory: Path, name: bytes) -> None:
        value = self.raw.get(object_name(name))
        assert self.raw.batch_remove([object_name(name)], True) == [0]
        assert self.raw.put(object_name(name), value[:-1000]) == 0

    def test_times_of_use_are_told_by_scan_after_a_restart(self, reopen: Opener) -> None:
        """Not by this one: the store orders its objects by the end of their leases and tells nobody."""
        backend = reopen()
        put(backend, (key(1), b"a"))
        backend.touch([(key(1), 2_000_000_000.0), (key(3), 5.0)])
        assert [stored.used_at_s for stored in scanned(backend)] == [0.0]

    def test_br_123_a_second_open_is_refused_by_inode_and_names_the_holder(  # type: ignore[override]  # as it says
        self, reopen: Opener
    ) -> None:
        """Not by this one: it is there to be shared, and one sees what the other puts and deletes."""
        first = reopen()
        second = self.open(next(iter(self.wiped)), capacity_bytes=MIB)
        assert second.store_id == first.store_id
        assert put(first, (key(1), b"shared")) == [Outcome.OK]
        assert put(second, (key(1), b"shared")) == [Outcome.EXISTS]
        assert get(second, key(1), 6) == (Outcome.OK, b"shared")
        assert second.delete([key(1)]) == [Outcome.OK]
        assert first.contains([key(1)]) == [False]
        second.close()
        assert put(first, (key(1), b"shared")) == [Outcome.OK]

    def test_one_item_without_space_does_not_spoil_the_others(self, reopen: Opener) -> None:
        """Space is that of the largest node, less what is leased; what passes through must fit into the staging."""
        reopen().close()
        backend = self.cluster.open(staging_bytes=MIB)
        outcomes = put(backend, (key(1), b"a" * 100), (key(2), bytes(2 * MIB)), (key(3), b"c" * 100))
        backend.close()
        assert outcomes == [Outcome.OK, Outcome.TOO_LARGE, Outcome.OK]

    def test_a_closed_backend_says_so_and_closing_again_is_nothing(self, backend: Backend) -> None:
        super().test_a_closed_backend_says_so_and_closing_again_is_nothing(backend)
        with pytest.raises(BackendError, match="closed"):
            backend.contains([key(1)])
        with pytest.raises(BackendError, match="closed"):
            backend.delete([key(1)])

    # The pool's capacity is not ours to choose.
    test_a_full_store_refuses_deletes_and_stores_again = None  # type: ignore[assignment]
    test_a_smaller_capacity_keeps_what_is_there_and_takes_no_more = None  # type: ignore[assignment]
    test_a_much_smaller_capacity_works_once_enough_is_deleted = None  # type: ignore[assignment]
    test_a_larger_capacity_takes_more = None  # type: ignore[assignment]
    test_churn_at_the_brim_neither_leaks_nor_wedges = None  # type: ignore[assignment]
    test_a_capacity_beyond_the_disk_is_a_config_error_that_says_what_would_fit = None  # type: ignore[assignment]
    # It tells neither an order nor namespaces.
    test_a_walk_tells_namespaces_in_an_order_that_stays = None  # type: ignore[assignment]
    test_a_walk_over_a_tenant_tells_its_objects_and_no_others = None  # type: ignore[assignment]
    # There is no directory.
    test_a_directory_of_somebody_else_is_refused_and_left_alone = None  # type: ignore[assignment]
    test_payloads_are_readable_by_their_owner_only = None  # type: ignore[assignment]
