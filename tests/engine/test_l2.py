"""L2: exactly the memory asked for, in one sealed memfd that leaves nothing behind."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hicache.errors import ConfigError, UsageError
from hicache.pools import L2Pool, host_memory, l2, registration
from hicache.pools.host_memory import HostMemory
from hicache.pools.memory_limits import AvailableMemory, available_memory
from hicache.pools.numa import node_of
from hicache.pools.registration import CudaRegistrar, RegistrationFailed, registrar_for
from hicache.sizing import l2_slot_counts
from hicache.spec import CacheSpec, PagedGroup
from tests.engine.specs import as_bytes, fill_with_noise, hybrid_spec, paged_spec

MIB = 1 << 20


class FakeRegistrar:
    """Pins in name only, up to a limit."""

    name = "fake"

    def __init__(
        self, *, region_bytes_max: int = 1 << 40, total_bytes_max: int = 1 << 40, counts_against_memlock: bool = False
    ) -> None:
        self.counts_against_memlock = counts_against_memlock
        self.region_bytes_max = region_bytes_max
        self.total_bytes_max = total_bytes_max
        self.regions: dict[int, int] = {}
        self.unregister_fails = False

    def register(self, address: int, size_bytes: int) -> None:
        if size_bytes > self.region_bytes_max:
            raise RegistrationFailed(f"max_mr_size is {self.region_bytes_max}")
        if sum(self.regions.values()) + size_bytes > self.total_bytes_max:
            raise RegistrationFailed("out of memory")
        self.regions[address] = size_bytes

    def unregister(self, address: int) -> None:
        if self.unregister_fails:
            raise RegistrationFailed("gone")
        del self.regions[address]


def mapped_pools() -> int:
    return sum("hicache-l2" in line for line in Path("/proc/self/maps").read_text().splitlines())


def open_memfds() -> int:
    links = (path for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
    targets = []
    for link in links:
        try:
            targets.append(os.readlink(link))
        except FileNotFoundError:
            continue  # the descriptor of this very listing
    return sum("hicache-l2" in target for target in targets)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    gc.collect()
    mapped, opened = mapped_pools(), open_memfds()
    yield
    gc.collect()
    assert mapped_pools() <= mapped
    assert open_memfds() <= opened


def test_br_090_the_pool_takes_the_memory_that_was_asked_for_and_no_more() -> None:
    """Just above a power of two, where a caching allocator would take twice as much."""
    spec = paged_spec(heads=8, head_dim=64, page_tokens=16)
    asked = 2 * 32 * MIB + 64 * 1024
    pool = L2Pool(spec, l2_slot_counts(spec, asked, 0.0))
    taken = os.fstat(pool.fd).st_blocks * 512
    assert asked * 0.98 <= taken == pool.size_bytes <= asked
    assert os.fstat(pool.fd).st_size == pool.size_bytes == len(pool.buffer)
    pool.close()


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


def test_br_100_br_149_slots_of_groups_of_different_sizes_lie_apart_and_aligned() -> None:
    groups = tuple(
        PagedGroup(str(width), (0, 1)[: index % 2 + 1], heads=1, head_dim=width, dtype="int8", planes=index % 2 + 1)
        for index, width in enumerate((4, 3584, 64, 528, 1))
    )
    spec = CacheSpec("m", "1", groups, page_tokens=3)
    counts = (3, 1, 4, 2, 5)
    pool = L2Pool(spec, counts)
    extents = sorted(
        (pool.offset(group, slot), spec.object_bytes[group]) for group in range(5) for slot in range(counts[group])
    )
    assert all(start % 4096 == 0 for start, _ in extents)
    ends = [start + size for start, size in extents]
    assert all(end <= following for end, (following, _) in zip(ends, extents[1:], strict=False))
    assert ends[-1] <= pool.size_bytes
    for group in range(5):
        fill_with_noise(pool.view(group).view(torch.uint8)[0], seed=group)
    for group in range(5):
        expected = torch.empty(spec.object_bytes[group], dtype=torch.uint8)
        fill_with_noise(expected, seed=group)
        start = pool.offset(group, 0)
        assert bytes(pool.buffer[start : start + len(expected)]) == as_bytes(expected)
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


def test_br_094_more_than_is_available_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        ConfigError, match=r"l2_bytes = 4096000: expected 1 to 950000 bytes \(95% of the 1000000 .* a test\)"
    ):
        L2Pool(paged_spec(), (1000,), available=AvailableMemory(1_000_000, "a test"))


def test_br_094_more_than_this_machine_has_is_refused_before_anything_is_reserved() -> None:
    with pytest.raises(ConfigError, match="are left, by "):
        L2Pool(paged_spec(), (1 << 40,))


def test_br_094_a_registrar_that_refuses_leaves_nothing_half_registered() -> None:
    registrar = FakeRegistrar(region_bytes_max=MIB)
    with pytest.raises(ConfigError, match=r"l2_bytes = 4194304: expected memory that fake can pin \(max_mr_size is"):
        L2Pool(paged_spec(), (1024,), registrar=registrar)
    assert not registrar.regions


def test_br_094_a_locked_memory_limit_is_named_before_it_is_met() -> None:
    limits = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, limits[1]))
    try:
        registrar = FakeRegistrar(counts_against_memlock=True)
        with pytest.raises(ConfigError, match=r"at most RLIMIT_MEMLOCK \(65536 bytes\).*ulimit -l"):
            L2Pool(paged_spec(), (1024,), registrar=registrar)
        assert not registrar.regions
        registrar = FakeRegistrar()  # CUDA does not count against it
        L2Pool(paged_spec(), (1024,), registrar=registrar).close()
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, limits)


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


class CudartDouble:
    """Answers as the CUDA runtime does: 0, or an error."""

    def __init__(self, *, status: int) -> None:
        self.status = status
        self.calls: list[tuple[str, int]] = []

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        self.calls.append(("register", size_bytes))
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        return self.status


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


def test_br_094_what_cuda_answers_is_in_the_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "_cudart", lambda: CudartDouble(status=2))
    monkeypatch.setattr(l2, "node_of", lambda device: None)
    with pytest.raises(
        ConfigError, match=r"CUDA can pin \(cudaHostRegister answered 2.*; RLIMIT_MEMLOCK is .*LimitMEMLOCK"
    ):
        L2Pool(paged_spec(), (16,), device="cuda")


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


def test_br_094_a_limit_of_a_version_1_cgroup_counts_and_is_named(tmp_path: Path) -> None:
    """In a container: the path is that of the host, the limit at the root of what is mounted here."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemAvailable: 500 kB\n")
    (proc / "self/cgroup").write_text("5:cpu,cpuacct:/\n4:memory:/docker/1f\n0::/\n")
    stat = "inactive_file 7\ntotal_inactive_file 1000"
    write_cgroup(cgroups / "memory", memory__limit_in_bytes="300000", memory__usage_in_bytes="99000", memory__stat=stat)
    available = available_memory(proc, cgroups)
    assert available == AvailableMemory(202000, str(cgroups / "memory/memory.limit_in_bytes"))
    with pytest.raises(
        ConfigError, match=r"by .*memory\.limit_in_bytes\); lower it, or free memory, or raise that limit"
    ):
        L2Pool(paged_spec(), (1000,), available=available)


def test_br_090_what_the_process_and_the_machine_take_is_the_size_of_the_pool() -> None:
    def taken() -> tuple[int, int]:
        status = Path("/proc/self/status").read_text()
        return int(status.split("RssShmem:")[1].split()[0]), mapped_pools()

    before, pools = taken()
    pool = L2Pool(paged_spec(heads=8, head_dim=64, page_tokens=16), (401,))
    after, _ = taken()
    assert (after - before) * 1024 == pytest.approx(pool.size_bytes, rel=0.02)
    pool.close()
    assert taken() == (pytest.approx(before, abs=64), pools)


def test_br_132_memory_is_pinned_in_regions_that_end_between_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(l2, "REGION_BYTES", 10_000)
    registrar = FakeRegistrar()
    pool = L2Pool(hybrid_spec(), (9, 5, 4), registrar=registrar)
    base = pool.view(0).data_ptr()
    regions = sorted((address - base, size) for address, size in registrar.regions.items())
    assert len(regions) > 3
    assert [start for start, _ in regions] == [0, *(start + size for start, size in regions[:-1])]
    assert sum(regions[-1]) == pool.size_bytes
    slots = {pool.offset(group, slot) for group, count in enumerate((9, 5, 4)) for slot in range(count)}
    assert {start for start, _ in regions} <= slots
    assert all(size <= max(10_000, *pool.strides) for _, size in regions)
    pool.close()
    assert not registrar.regions


def test_br_094_a_region_that_is_refused_late_leaves_none_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(l2, "REGION_BYTES", MIB)
    registrar = FakeRegistrar(total_bytes_max=3 * MIB)
    with pytest.raises(ConfigError, match=r"after 3145728 bytes, for a region of 1048576; RLIMIT_MEMLOCK is"):
        L2Pool(paged_spec(), (1024,), registrar=registrar)
    assert not registrar.regions


def test_br_132_memory_is_touched_in_chunks_and_the_log_tells_how_far(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_memory, "_TOUCH_CHUNK_BYTES", MIB)
    monkeypatch.setattr(host_memory, "_TOUCH_REPORT_CHUNKS", 2)
    caplog.set_level("INFO")
    HostMemory("hicache-l2", 5 * MIB, setting="l2_bytes").close()
    assert [record.getMessage() for record in caplog.records] == ["L2: 2 of 5 MiB touched", "L2: 4 of 5 MiB touched"]
