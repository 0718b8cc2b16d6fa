"""Memory of clients: what is taken, what is refused, and how much of it."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from hicache.daemon.memory import OfferedMemory, RegionRefused, check_memory
from hicache.daemon.region_budget import MAPPINGS_PER_MEMFD_MAX, RegionBudget
from tests.daemon.client import Client
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.raw_links import CALL_S, Attachment, Memory, MemoryRefused, object_key
from tests.daemon.rig import ALICE, BOB, wait_until

StartThread = Callable[..., ThreadedDaemon]

MIB = 1 << 20


@contextmanager
def sealed_memfd(size_bytes: int, flags: int = 0) -> Iterator[int]:
    """A memfd without a page."""
    fd = os.memfd_create("sparse", os.MFD_ALLOW_SEALING | flags)
    try:
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        yield fd
    finally:
        os.close(fd)


def refused_memory(client: Client, fd: int, size_bytes: int) -> str:
    with pytest.raises(MemoryRefused) as caught:
        Attachment(client.welcome.memory_socket, client.secret, [fd], size_bytes).close()
    return str(caught.value)


class TestMemory:
    """What is mapped of clients."""

    @pytest.mark.parametrize("size_bytes", [8 * MIB, 2**46])
    def test_memory_without_pages_is_refused_with_what_to_do(self, client: Client, size_bytes: int) -> None:
        with sealed_memfd(size_bytes) as fd:
            assert "write to every page" in refused_memory(client, fd, size_bytes)

    def test_memory_whose_pages_are_elsewhere_than_what_is_mapped_is_refused(self, client: Client) -> None:
        with sealed_memfd(64 * MIB) as fd:
            os.posix_fallocate(fd, 32 * MIB, 32 * MIB)
            assert "write to every page" in refused_memory(client, fd, 32 * MIB)
            os.posix_fallocate(fd, 0, 32 * MIB)
            Attachment(client.welcome.memory_socket, client.secret, [fd], 32 * MIB).close()

    def test_an_l2_pool_has_its_pages(self, client: Client) -> None:
        host_memory = pytest.importorskip("hicache.pools.host_memory")
        # Above the size from which huge pages are asked for, and ragged.
        memory = host_memory.HostMemory("l2", 129 * MIB + 4096, setting="l2_bytes")
        try:
            Attachment(client.welcome.memory_socket, client.secret, [memory.fd], memory.size_bytes).close()
        finally:
            memory.close()

    def test_reserved_huge_pages_are_refused_since_their_owner_can_take_them_away(self, client: Client) -> None:
        try:
            os.close(os.memfd_create("huge", os.MFD_HUGETLB))
        except OSError as error:
            pytest.skip(f"this kernel has no reserved huge pages: {error.strerror}")
        with sealed_memfd(2 * MIB, os.MFD_HUGETLB) as fd:
            assert "MFD_HUGETLB" in refused_memory(client, fd, 2 * MIB)

    def test_descriptors_that_their_owner_holds_up_hold_up_nobody_else(
        self, daemon: ThreadedDaemon, client: Client, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As a FUSE file system whose server does not answer does it: neither status nor close is waited for."""
        monkeypatch.setattr("hicache.daemon.memory_socket.STRANGE_DESCRIPTORS_MAX", 2)
        closing, released = threading.Event(), threading.Event()
        read_end, write_end = os.pipe()
        theirs = os.fstat(read_end).st_ino
        real_close, real_fstat = os.close, os.fstat

        def close(descriptor: int) -> None:
            if real_fstat(descriptor).st_ino == theirs:
                assert threading.current_thread().name.startswith("hicached-strange")
                closing.set()
                released.wait(CALL_S)
            real_close(descriptor)

        def fstat(descriptor: int) -> os.stat_result:
            status = real_fstat(descriptor)
            assert status.st_ino != theirs
            return status

        with monkeypatch.context() as patch:
            patch.setattr(os, "close", close)
            patch.setattr(os, "fstat", fstat)
            for _ in range(3):  # one of them is being closed, two wait
                assert "not a memfd" in refused_memory(client, read_end, 4096)
                assert closing.wait(CALL_S)
            assert "cannot be closed" in refused_memory(client, memory.fd, memory.size_bytes)
            assert client.present([object_key(1)]) == [False]
            released.set()
            wait_until(lambda: not daemon.metric("hicache_regions"), what="nothing is mapped")
        wait_until(lambda: self._is_taken(client, memory), what="memory is taken again")
        os.close(read_end)
        os.close(write_end)

    def _is_taken(self, client: Client, memory: Memory) -> bool:
        try:
            client.attach(memory)
        except MemoryRefused:
            return False
        return True

    def test_all_tenants_together_stay_within_the_budget(self, start_thread: StartThread, two_tenants: str) -> None:
        daemon = start_thread(
            tenants_file=two_tenants, regions_bytes_max="8MiB", tenant_regions_bytes_max="8MiB", sessions_max=4
        )
        with (
            Client(daemon.target, token=ALICE) as alice,
            Client(daemon.target, token=BOB) as bob,
            Memory(6 * MIB) as large,
            Memory(4 * MIB) as small,
        ):
            attachment = alice.attach(large)
            assert "regions_bytes_max is 8388608" in refused_memory(bob, small.fd, small.size_bytes)
            attachment.half_close()
            assert attachment.is_at_end(within_s=CALL_S)
            bob.attach(small)

    def test_one_of_several_tenants_may_take_half(self, start_thread: StartThread, two_tenants: str) -> None:
        daemon = start_thread(tenants_file=two_tenants, regions_bytes_max="8MiB", sessions_max=4)
        with (
            Client(daemon.target, token=ALICE) as alice,
            Client(daemon.target, token=BOB) as bob,
            Memory(3 * MIB) as first,
            Memory(3 * MIB) as second,
        ):
            alice.attach(first)
            with Client(daemon.target, token=ALICE) as again:
                refused = refused_memory(again, second.fd, second.size_bytes)
                assert refused.startswith("tenant_regions_bytes_max is 4194304")
            bob.attach(second)

    def test_a_memfd_counts_once_but_is_not_mapped_without_end(self) -> None:
        budget = RegionBudget(regions_bytes_max=10, tenant_regions_bytes_max=10)
        charges = [budget.charge("alice", OfferedMemory(0, 6 + (n == 0), (1, 1))) for n in range(16)]
        assert len(charges) == MAPPINGS_PER_MEMFD_MAX
        assert budget.used_bytes == 7
        with pytest.raises(RegionRefused, match="16 times"):
            budget.charge("bob", OfferedMemory(0, 1, (1, 1)))
        with pytest.raises(RegionRefused, match="regions_bytes_max"):
            budget.charge("bob", OfferedMemory(0, 4, (1, 2)))
        for charge in charges:
            budget.give_back(charge)
        assert budget.used_bytes == 0

    def test_what_was_refused_is_not_counted(self) -> None:
        budget = RegionBudget(regions_bytes_max=10, tenant_regions_bytes_max=4)
        for _ in range(3):
            with pytest.raises(RegionRefused, match="tenant_regions_bytes_max is 4"):
                budget.charge("alice", OfferedMemory(0, 5, (1, 1)))
        assert budget.used_bytes == 0
        with Memory(4096) as memory:
            assert check_memory(memory.fd, 4096).size_bytes == 4096
