"""L2: exactly the memory asked for, in one sealed memfd that leaves nothing behind."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
from pathlib import Path

import pytest
import torch

from hicache.errors import ConfigError, UsageError
from hicache.memory_limits import AvailableMemory, available_memory
from hicache.pools import L2Pool, l2, registration
from hicache.pools.host_memory import HostMemory
from hicache.pools.numa import node_of
from hicache.pools.registration import CudaRegistrar, registrar_for
from tests.engine.l2_rig import CudartDouble, FakeRegistrar, mapped_pools, nothing_is_left
from tests.engine.specs import as_bytes, fill_with_noise, hybrid_spec, paged_spec

__all__ = ["nothing_is_left"]  # a fixture

MIB = 1 << 20


def test_every_page_is_touched_before_the_pool_is_ready() -> None:
    """Also over several chunks, in parallel."""
    memory = HostMemory("hicache-l2", 200 * MIB + 4096, setting="l2_bytes")
    assert os.fstat(memory.fd).st_blocks * 512 == 200 * MIB + 4096
    memory.close()


def test_the_memfd_is_sealed_and_not_inherited_by_other_programs() -> None:
    pool = L2Pool(paged_spec(), (8,))
    seals = fcntl.fcntl(pool.fd, fcntl.F_GET_SEALS)
    assert seals == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    for size in (4096, pool.size_bytes + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(pool.fd, size)
    assert not os.get_inheritable(pool.fd)
    pool.close()


def test_what_another_mapping_of_the_memfd_writes_is_in_the_views() -> None:
    pool = L2Pool(hybrid_spec(), (8, 9, 2))
    theirs = mmap.mmap(pool.fd, pool.size_bytes)
    start = pool.offset(2, 1)
    theirs[start : start + 4] = b"mine"
    assert as_bytes(pool.view(2)[1, :4]) == b"mine"
    theirs.close()
    pool.close()


@pytest.mark.parametrize(("group", "slot"), [(0, 8), (0, -1), (1, 0), (-1, 0)])
def test_a_slot_that_does_not_exist_has_no_offset(group: int, slot: int) -> None:
    pool = L2Pool(paged_spec(), (8,))
    with pytest.raises(IndexError):
        pool.offset(group, slot)
    pool.close()


@pytest.mark.parametrize("counts", [(8,), (8, 8, 0), (8, 8, 2, 1)])
def test_slot_counts_that_do_not_match_the_groups_are_refused(counts: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="l2 slot counts"):
        L2Pool(hybrid_spec(), counts)


def test_memory_is_registered_whole_and_unregistered_once() -> None:
    registrar = FakeRegistrar()
    pool = L2Pool(paged_spec(), (16,), registrar=registrar)
    assert list(registrar.regions.values()) == [pool.size_bytes]
    assert "registered with fake" in pool.description
    pool.close()
    pool.close()
    assert not registrar.regions


def test_a_registration_that_cannot_be_undone_does_not_stop_close(caplog: pytest.LogCaptureFixture) -> None:
    registrar = FakeRegistrar()
    pool = L2Pool(paged_spec(), (16,), registrar=registrar)
    registrar.unregister_fails = True
    pool.close()
    assert "stays pinned" in caplog.text


def test_a_pool_that_is_forgotten_is_unregistered_and_unmapped() -> None:
    registrar = FakeRegistrar()
    pool = L2Pool(paged_spec(), (16,), registrar=registrar)
    del pool
    gc.collect()
    assert not registrar.regions


@pytest.mark.filterwarnings("ignore:.*multi-threaded")  # the child does nothing but close
def test_a_forked_child_that_closes_does_not_close_for_its_parent() -> None:
    registrar = FakeRegistrar()
    pool = L2Pool(paged_spec(), (16,), registrar=registrar)
    child = os.fork()
    if child == 0:
        pool.close()
        os._exit(0 if registrar.regions else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    pool.view(0).zero_()
    os.fstat(pool.fd)
    pool.close()


def test_a_tensor_that_outlives_the_pool_keeps_its_memory() -> None:
    pool = L2Pool(paged_spec(), (16,))
    pages, buffer = pool.view(0), pool.buffer
    fill_with_noise(pages[3], seed=1)
    before, pool_start = as_bytes(pages[3]), pool.offset(0, 3)
    pool.close()
    assert as_bytes(pages[3]) == before
    del pages
    assert bytes(buffer[pool_start : pool_start + len(before)]) == before


def test_no_one_can_unmap_the_memory_under_a_tensor() -> None:
    pool = L2Pool(paged_spec(), (16,))
    mapping = pool.buffer.obj
    pages = pool.view(0)
    assert isinstance(mapping, mmap.mmap)
    with pytest.raises(BufferError):
        mapping.close()
    pages.zero_()
    pool.close()


def test_a_closed_pool_gives_out_nothing_more() -> None:
    pool = L2Pool(paged_spec(), (16,))
    mapped = mapped_pools()
    pool.close()
    assert mapped_pools() == mapped - 1
    for use in (lambda: pool.fd, lambda: pool.buffer, lambda: pool.view(0)):
        with pytest.raises(UsageError, match="closed"):
            use()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_br_050_without_cuda_the_description_names_the_path_taken() -> None:
    pool = L2Pool(paged_spec(), (16,))
    assert "memfd of 65536 bytes, pages of 4096 bytes (shmem_enabled=" in pool.description
    assert "registered" not in pool.description
    pool.close()


def test_only_cuda_wants_memory_registered() -> None:
    assert registrar_for(torch.device("cpu")) is None
    assert isinstance(registrar_for(torch.device("cuda")), CudaRegistrar)


def test_memory_can_be_asked_of_a_numa_node() -> None:
    """Of one that there is, and of one that there is not, which then is no reason to fail."""
    for node, outcome in ((0, "on NUMA node 0"), (1023, "on any NUMA node (node 1023 refused: ")):
        memory = HostMemory("hicache-l2", MIB, setting="l2_bytes", numa_node=node)
        assert outcome in memory.description
        assert os.fstat(memory.fd).st_blocks * 512 == MIB
        memory.close()


class DeviceProperties:
    pci_domain_id, pci_bus_id, pci_device_id = 0, 0x1B, 0


def test_memory_comes_from_the_node_of_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: DeviceProperties)
    device = torch.device("cuda", 0)
    assert node_of(device, devices=tmp_path) is None
    attached = tmp_path / "0000:1b:00.0"
    attached.mkdir()
    for text, node in (("1\n", 1), ("-1\n", None), ("", None)):
        (attached / "numa_node").write_text(text)
        assert node_of(device, devices=tmp_path) == node
    assert node_of(torch.device("cpu"), devices=tmp_path) is None


def test_cuda_registers_and_unregisters_the_whole_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = CudartDouble(status=0)
    monkeypatch.setattr(registration, "_cudart", lambda: cudart)
    monkeypatch.setattr(l2, "node_of", lambda device: None)
    pool = L2Pool(paged_spec(), (16,), device="cuda")
    assert cudart.calls == [("register", pool.size_bytes)]
    assert pool.description.endswith("registered with CUDA")
    address = pool.view(0).data_ptr()
    pool.close()
    assert cudart.calls[1:] == [("unregister", address)]


def write_cgroup(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_the_tightest_limit_of_machine_and_cgroups_counts(tmp_path: Path) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 900 kB\nMemAvailable:   500 kB\n")
    machine = AvailableMemory(500 * 1024, f"MemAvailable in {proc / 'meminfo'}")
    assert available_memory(proc, cgroups) == machine
    (proc / "self/cgroup").write_text("0::/outer/inner\n")
    assert available_memory(proc, cgroups) == machine
    usage = {"memory__current": "120000", "memory__stat": "anon 1\ninactive_file 20000"}
    write_cgroup(cgroups / "outer", memory__max="300000", **usage)
    write_cgroup(cgroups / "outer/inner", memory__max="max", **usage)
    assert available_memory(proc, cgroups) == AvailableMemory(200000, str(cgroups / "outer/memory.max"))
    write_cgroup(cgroups / "outer", memory__current="400000")
    assert available_memory(proc, cgroups).size_bytes == 0
