"""Host memory: as much as was asked for, pinned within every limit, and slots that lie apart."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hicache.errors import BackendError, ConfigError, SpecError
from hicache.memory_limits import AvailableMemory, available_memory
from hicache.pools import L2Pool, l2, registration
from hicache.sizing import l2_slot_counts
from hicache.spec import CacheSpec, PagedGroup, StateField, StateGroup
from tests.backends.fake_mooncake import FakeMooncake, open_fake
from tests.engine.l2_rig import CudartDouble, FakeRegistrar, mapped_pools, nothing_is_left
from tests.engine.specs import as_bytes, fill_with_noise, paged_spec
from tests.engine.test_l2 import MIB, write_cgroup

__all__ = ["nothing_is_left"]  # a fixture


def test_br_090_the_pool_takes_the_memory_that_was_asked_for_and_no_more() -> None:
    """Just above a power of two, where a caching allocator would take twice as much."""
    spec = paged_spec(heads=8, head_dim=64, page_tokens=16)
    asked = 2 * 32 * MIB + 64 * 1024
    pool = L2Pool(spec, l2_slot_counts(spec, asked, 0.0))
    taken = os.fstat(pool.fd).st_blocks * 512
    assert asked * 0.98 <= taken == pool.size_bytes <= asked
    assert os.fstat(pool.fd).st_size == pool.size_bytes == len(pool.buffer)
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


def test_br_094_what_cuda_answers_is_in_the_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "_cudart", lambda: CudartDouble(status=2))
    monkeypatch.setattr(l2, "node_of", lambda device: None)
    with pytest.raises(
        ConfigError, match=r"CUDA can pin \(cudaHostRegister answered 2.*; RLIMIT_MEMLOCK is .*LimitMEMLOCK"
    ):
        L2Pool(paged_spec(), (16,), device="cuda")


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


def test_br_094_a_region_that_is_refused_late_leaves_none_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(l2, "REGION_BYTES", MIB)
    registrar = FakeRegistrar(total_bytes_max=3 * MIB)
    with pytest.raises(ConfigError, match=r"after 3145728 bytes, for a region of 1048576; RLIMIT_MEMLOCK is"):
        L2Pool(paged_spec(), (1024,), registrar=registrar)
    assert not registrar.regions


class RegistersNothing(FakeMooncake):
    """A client whose card takes no memory."""

    def register_buffer(self, address: int, size: int, /) -> int:
        return -800


def test_br_094_memory_that_mooncake_does_not_register_stops_the_start_and_names_the_limit() -> None:
    fake = RegistersNothing()
    with pytest.raises(BackendError, match=r"\d+ bytes \(code -800\); RLIMIT_MEMLOCK is .*LimitMEMLOCK"):
        open_fake(fake)
    assert fake.calls == ["close"]
    open_fake(FakeMooncake()).close()


@pytest.mark.parametrize(
    ("group", "named"),
    [
        (lambda: PagedGroup("ids", (0,), heads=0, head_dim=8, dtype="float32"), r"ids\.heads = 0"),
        (lambda: PagedGroup("ids", (0,), heads=1, head_dim=0, dtype="float32"), r"ids\.head_dim = 0"),
        (lambda: StateGroup("ids", (0,), ()), r"ids\.fields = \[\]"),
        (lambda: StateGroup("ids", (0,), (StateField("x", (0,), "float32"),)), r"x\.shape = \(0,\)"),
        (
            lambda: StateGroup("ids", (0,), (StateField("x", (3,), "float32", transient=True),)),
            r"ids\.fields = \['x'\]: expected at least one field that is not transient",
        ),
    ],
    ids=["no heads", "no width", "no fields", "empty field", "transient only"],
)
def test_br_100_a_group_of_which_nothing_is_kept_is_refused_by_name(
    group: Callable[[], PagedGroup | StateGroup], named: str
) -> None:
    """So nothing below a spec ever divides by a size of zero: a pool that only owns ids is no group."""
    with pytest.raises(SpecError, match=named):
        group()
