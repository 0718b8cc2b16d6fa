"""Ranks of a replica in real processes: what they store and restore together, how fast, and whether it is equal.

A replica stores prompts through a hicached on LMDB and ends; another one, of the same or another number of ranks,
restores them. Rows say what was moved by all ranks together, beside a memcpy by as many processes in the same run.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.daemon_process import TOKEN, DaemonProcess
from bench.limits import MemoryCopy
from bench.rank_replica import Replica, ranks_in
from hicache.cache import HiCache
from hicache.keys import object_key
from hicache.outcome import Outcome
from hicache.ranks.worker import RankWorker
from hicache.sizing import l2_strides
from hicache.spec import CacheSpec, HeadSplit, PagedGroup, StateField, StateGroup

PAGE_TOKENS = 64
_COPY_BYTES = 256 << 20  # of each process, for the limit
_SHARDS_LOOKED_FOR = 16  # of each group and page: more than any replica here stores


@dataclass(frozen=True, slots=True)
class Row:
    """One replica that restores what another one has stored. Speeds are medians over prompts, of all ranks together."""

    written_by: str
    read_by: str
    processes: int  # that read
    restored_tokens: int  # of all prompts
    bytes_compared: int  # in L1 of all ranks
    is_equal: bool  # every byte of every rank's L1
    objects: int  # in L3
    is_stored_once: bool  # L3 has each shard of each page and snapshot, and nothing else of them
    store_gbps: float  # L1 to L3
    store_of_memcpy: float
    restore_gbps: float  # L3 to L1
    restore_of_memcpy: float
    memcpy_gbps: float  # of as many processes as read
    job_us_p50: float  # a small job, from the leader to all ranks and back
    job_us_p99: float


@dataclass(frozen=True, slots=True)
class _Workload:
    prompts: int
    pages: int
    jobs: int

    @property
    def tokens(self) -> list[list[int]]:
        length = self.pages * PAGE_TOKENS
        return [[1_000_000 * prompt + token for token in range(length + 1)] for prompt in range(self.prompts)]


def measure(*, quick: bool) -> list[Row]:
    """A row for each pair of a replica that writes and one that reads."""
    workload = _Workload(prompts=2, pages=8, jobs=200) if quick else _Workload(prompts=5, pages=32, jobs=2000)
    tp2, tp4 = _spec(tp=2, lcm=4), _spec(tp=4, lcm=4)
    plans: list[tuple[str, CacheSpec, dict[str, CacheSpec]]] = [
        ("TP1", _spec(), {"TP1": _spec()}),
        ("TP2", tp2, {"TP2": tp2, "TP1": _spec(lcm=4), "TP4": tp4}),
        ("TP4", replace(tp4, revision="by TP4"), {"TP4": replace(tp4, revision="by TP4")}),
        ("PP2", _spec(pp=(12, 16)), {"PP2": _spec(pp=(12, 16))}),
        ("TP2xPP2", _spec(tp=2, pp=(16, 12)), {"TP2xPP2": _spec(tp=2, pp=(16, 12))}),
    ]
    rows: list[Row] = []
    with _daemon(len(plans) * workload.prompts * workload.pages) as (address, folder):
        for writer_name, writer, readers in plans:
            store_gbps, store_of_memcpy = _store(writer, address, folder, workload)
            for name, reader in readers.items():
                row = _restore(reader, address, folder, workload)
                rows.append(
                    replace(
                        row,
                        written_by=writer_name,
                        read_by=name,
                        store_gbps=round(store_gbps, 2),
                        store_of_memcpy=round(store_of_memcpy, 3),
                    )
                )
    return rows


def _spec(*, tp: int = 1, pp: tuple[int, ...] | None = None, lcm: int | None = None) -> CacheSpec:
    """Attention of 4 KV heads, a latent, and a recurrent state; pages of some MB."""
    attention = PagedGroup("attention", (0, 2, 3, 5, 6, *range(8, 10), *range(12, 28)), 4, 128, dtype="bfloat16")
    latent = PagedGroup.mla("latent", layers=(11,), latent_dim=512, rope_dim=64, dtype="bfloat16")
    fields = (
        StateField("conv", (3, 96), "bfloat16", split=HeadSplit(1, ((4, 8), (4, 8), (4, 8)))),
        StateField("temporal", (4, 32, 32), "float32", split=HeadSplit(0)),
    )
    groups = (attention, latent, StateGroup("state", (1, 4, 7, 10), fields))
    return CacheSpec("bench", "ranks", groups, page_tokens=PAGE_TOKENS, tp_size=tp, tp_lcm=lcm, pp_layers=pp)


@contextlib.contextmanager
def _daemon(pages: int) -> Iterator[tuple[str, Path]]:
    with tempfile.TemporaryDirectory(prefix="hicache-ranks-") as work:
        capacity_bytes = int(1.5 * pages * sum(_spec().object_bytes)) + (64 << 20)
        daemon = DaemonProcess(Path(work) / "daemon", backend="lmdb", capacity_bytes=capacity_bytes)
        try:
            daemon.start()
            yield daemon.address("memory"), Path(work)
        finally:
            daemon.stop()


@contextlib.contextmanager
def _replica(spec: CacheSpec, address: str, folder: Path, workload: _Workload) -> Iterator[Replica]:
    slot_bytes = max(sum(l2_strides(spec.rank(rank))) for rank in range(spec.rank_count))
    replica = Replica(
        spec,
        ranks_in(folder),
        l1_pages=workload.pages + 8,
        l1_state_slots=8,
        l2_bytes=3 * max(workload.pages, 8) * slot_bytes,  # two prompts, and what is on its way to L3 is not in the way
        l3=address,
        token=TOKEN,
    )
    try:
        yield replica
    finally:
        replica.close()


def _store(spec: CacheSpec, address: str, folder: Path, workload: _Workload) -> tuple[float, float]:
    """Speed of the way down, and its share of a memcpy."""
    speeds: list[float] = []
    with _replica(spec, address, folder, workload) as replica:
        for tokens in workload.tokens:
            request, _ = replica.restore(tokens)
            computed = workload.pages * PAGE_TOKENS
            replica.compute_pages(request, tokens, 0, computed)
            start_s = time.perf_counter()
            replica.cache.store(request, computed=computed, state_at=computed)
            replica.settle()
            seconds = time.perf_counter() - start_s
            replica.cache.release(request)
            speeds.append(_object_bytes(spec, workload.pages) / seconds / 1e9)
        memcpy = _memcpy_gbps(replica)
    return statistics.median(speeds), statistics.median(speeds) / memcpy


def _restore(spec: CacheSpec, address: str, folder: Path, workload: _Workload) -> Row:
    speeds: list[float] = []
    restored_tokens = compared = wrong = 0
    with _replica(spec, address, folder, workload) as replica:
        jobs_us = _job_times_us(replica.cache, workload.jobs)
        for tokens in workload.tokens:
            start_s = time.perf_counter()
            request, restored = replica.restore(tokens)
            seconds = time.perf_counter() - start_s
            slots = replica.restored_slots(request, tokens, restored.tokens)
            bytes_restored = replica.bytes_of(slots)
            speeds.append(bytes_restored / seconds / 1e9)
            restored_tokens += restored.tokens
            compared += bytes_restored
            wrong += len(replica.differing(request, tokens, restored.tokens))
            replica.cache.release(request)
        memcpy = _memcpy_gbps(replica)
        objects, is_stored_once = _objects_in_l3(replica, workload.tokens)
    gbps = statistics.median(speeds)
    return Row(
        written_by="",
        read_by="",
        processes=spec.rank_count,
        restored_tokens=restored_tokens,
        bytes_compared=compared,
        is_equal=not wrong,
        objects=objects,
        is_stored_once=is_stored_once,
        store_gbps=0.0,
        store_of_memcpy=0.0,
        restore_gbps=round(gbps, 2),
        restore_of_memcpy=round(gbps / memcpy, 3),
        memcpy_gbps=round(memcpy, 2),
        job_us_p50=round(jobs_us[len(jobs_us) // 2], 1),
        job_us_p99=round(jobs_us[len(jobs_us) * 99 // 100], 1),
    )


def _object_bytes(spec: CacheSpec, pages: int) -> int:
    """What L3 gets of a prompt: its pages, and one snapshot at its end."""
    sizes = zip(spec.groups, spec.object_bytes, strict=True)
    return sum(size * (1 if isinstance(group, StateGroup) else pages) for group, size in sizes)


def _job_times_us(cache: HiCache, count: int) -> list[float]:
    """Sorted times of a request of which nothing is there: each rank empties one state, and says so."""
    times_us: list[float] = []
    for _ in range(count):
        request = cache.match([1])
        start_s = time.perf_counter()
        cache.load(request)
        times_us.append((time.perf_counter() - start_s) * 1e6)
        cache.release(request)
    return sorted(times_us)


def _objects_in_l3(replica: Replica, prompts: Sequence[list[int]]) -> tuple[int, bool]:
    """How many objects of the prompts L3 has, and whether they are each shard once."""
    cache, spec = replica.cache, replica.spec
    assert cache.l3 is not None
    found = expected = 0
    is_exact = True
    for tokens in prompts:
        request = cache.match(tokens)
        page_keys = list(request._record.keys)
        cache.release(request)
        for group, described in enumerate(spec.groups):
            pages = page_keys[-1:] if isinstance(described, StateGroup) else page_keys
            for page_key in pages:
                keys = [object_key(page_key, group=group, shard=shard) for shard in range(_SHARDS_LOOKED_FOR)]
                outcomes = cache.l3.lookup(keys, timeout_s=10.0)
                there = {shard for shard, outcome in enumerate(outcomes) if outcome is Outcome.OK}
                is_exact &= there == set(spec.shards[group])
                found += len(there)
                expected += len(spec.shards[group])
    return found, is_exact and found == expected


def _memcpy_gbps(replica: Replica) -> float:
    """Of all processes at a time: by the clock of this one, since others may begin late on few cores."""
    replica.on_all(_prepare_copy)
    start_s = time.perf_counter()
    replica.on_all(_copy)
    return replica.spec.rank_count * _COPY_BYTES / (time.perf_counter() - start_s) / 1e9


_COPIES: list[MemoryCopy] = []  # of this process


def _prepare_copy(rank: HiCache | RankWorker) -> None:
    """Runs on every rank: memory is touched before anybody measures."""
    if not _COPIES:
        _COPIES.append(MemoryCopy(threads=1, working_set_bytes=_COPY_BYTES // 4))


def _copy(rank: HiCache | RankWorker) -> None:
    """Runs on every rank."""
    _COPIES[0].measure(_COPY_BYTES)
