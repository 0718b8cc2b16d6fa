"""Performance cliffs, shown by counts of calls and bytes and by how they grow; never by the clock."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest

from bench.admission.replay import Result, TierSpec, replay
from bench.admission.traces import Trace, TraceRequest
from hicache import keys as keys_module
from hicache.jobs import FetchJob, LookupJob
from hicache.keys import KEY_HASHES, BlockKeys, KeyHash
from hicache.node import Tier
from hicache.outcome import Outcome
from hicache.pools import L2Pool, host_memory, l2
from hicache.pools.host_memory import HostMemory
from tests.core.situations import evict_all, loaded_pages, prefetching
from tests.core.situations import prompt as world_prompt
from tests.core.small_engine import ATTENTION, STATE, Make, prompt
from tests.core.world import FULL, World
from tests.core.world import PAGE as WORLD_PAGE
from tests.engine.specs import hybrid_spec
from tests.engine.test_l2 import MIB, FakeRegistrar

QUEUE = 100


@pytest.mark.parametrize("position", [0, 1, 50, 90, QUEUE - 1])
def test_br_133_what_has_arrived_is_visible_at_once_wherever_its_request_stands(position: int) -> None:
    world = World((FULL,), l1=2 * QUEUE, l2=4 * QUEUE, prefetch_l2_share=0.5)
    queue = [prefetching(world, world_prompt(2, seed=number)) for number in range(QUEUE)]
    world.executor.run_kind(LookupJob)
    early = queue[position]
    [task] = [
        number
        for number, waiting in enumerate(world.executor.waiting)
        if isinstance(waiting.job, FetchJob) and waiting.job.items[0].block_key in early.record.keys
    ]
    world.executor.run(task)
    settled = [live for live in queue if world.directory.is_settled(live.record)]
    assert settled == [early], "in the step that told of its last page, and nobody else's"
    other = world.open(world_prompt(2, seed=position))
    assert other.record.local_tokens == {"l1": 0, "l2": 2 * WORLD_PAGE}
    world.load_whole(early)
    assert loaded_pages(early) == 2
    held = world.prefetcher.fetches.held[0]
    world.release(early)
    assert held - world.prefetcher.fetches.held[0] in (0, 2)
    assert world.prefetcher.fetches.held[0] == 2 * (QUEUE - 1), "its share is free whoever is still in front of it"
    world.release(other)
    world.run_all()
    world.wind_up()


def test_br_133_a_request_behind_one_that_hangs_goes_on_in_real_threads(make: Make) -> None:
    writer = make(ATTENTION, objects={})
    for seed in range(8):
        writer.serve(prompt(2, seed=seed))
    writer.settle()
    assert writer.l3 is not None
    reader = make(ATTENTION, objects=writer.l3.objects, l2=64)
    assert reader.l3 is not None
    queue = [reader.cache.match(prompt(2, seed=seed)) for seed in range(8)]
    hangs, release = threading.Event(), threading.Event()
    head_keys: set[bytes] = set()

    def fault(operation: str, key: bytes) -> Outcome | None:
        if operation == "get" and (not head_keys or key in head_keys):
            head_keys.add(key)
            hangs.set()
            release.wait(20)
        return None

    reader.l3.fault = fault
    reader.cache.prefetch(queue[0])
    assert hangs.wait(20)
    for request in queue[1:]:
        reader.cache.prefetch(request)
    for request in reversed(queue[1:]):
        assert reader.cache.wait(request)
        restored = reader.cache.load(request, timeout_s=20)
        assert restored is not None
        assert restored.tokens == 8
    assert not reader.cache.is_ready(queue[0])
    release.set()
    assert reader.cache.wait(queue[0])
    for request in queue:
        reader.cache.release(request)


class Hashed:
    """Every call of the hash functions of the keys, by its bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        real_blake2b, real_xxh3 = keys_module.blake2b, keys_module.xxhash.xxh3_128_digest

        def blake2b(data: bytes, **options: object) -> object:
            self.sizes.append(len(data))
            return real_blake2b(data, **options)

        def xxh3_128_digest(data: bytes) -> bytes:
            self.sizes.append(len(data))
            return real_xxh3(data)

        monkeypatch.setattr(keys_module, "blake2b", blake2b)
        monkeypatch.setattr(keys_module.xxhash, "xxh3_128_digest", xxh3_128_digest)


@pytest.mark.parametrize("key_hash", KEY_HASHES)
@pytest.mark.parametrize("pages", [10, 1000])
def test_br_134_hashing_is_linear(key_hash: KeyHash, pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = BlockKeys(bytes(range(32)), page_tokens=4, key_hash=key_hash)
    root = made.root()
    hashed = Hashed(monkeypatch)
    made.chain(range(4 * pages), parent=root)
    assert len(hashed.sizes) == pages
    assert sum(hashed.sizes) <= pages * (4 * 8 + 16)


def test_br_134_a_request_hashes_each_page_once_in_all_its_life(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Match, prefetch, load, extend, store and release of 8 and of 16 pages: twice the pages, twice the calls."""
    counts = []
    for pages in (8, 16):
        engine = make(ATTENTION, STATE, objects={}, l1=64, l2=64)
        engine.serve(prompt(1, seed=9))
        engine.settle()
        with monkeypatch.context() as patched:
            hashed = Hashed(patched)
            engine.serve(prompt(pages, seed=1))
            engine.settle()
        counts.append(len(hashed.sizes))
    assert counts[1] - counts[0] == 8, "a page more is a call more"
    assert counts[0] <= 8 + 4, "and what a request costs beside its pages is small"


SHARED_BLOCKS, OWN_BLOCKS, PROMPTS = 20, 2, 5


def shared_and_single_use(*, requests: int = 1500, seed: int = 5) -> Trace:
    """80% of the prompts are used once, 20% share one of five beginnings; with bursts of an adversary."""
    return Trace("shared and single use", 16, list(_requests(requests, seed)), 10**7)


def _requests(count: int, seed: int) -> Iterator[TraceRequest]:
    rng, fresh = random.Random(seed), iter(range(10**6, 10**7))
    for number in range(count):
        if rng.random() < 0.2:
            first = rng.randrange(PROMPTS) * 1000
            path = [*range(first, first + SHARED_BLOCKS), *(next(fresh) for _ in range(OWN_BLOCKS))]
            tenant = "alice"
        else:
            path = [next(fresh) for _ in range(SHARED_BLOCKS + OWN_BLOCKS)]
            tenant = "mallory" if number % 500 < 60 else "bob"
        yield TraceRequest(float(number), 16 * len(path), 10, tuple(path), tenant)


@pytest.mark.parametrize(
    ("write", "capacity_pages"),
    [
        ("write_through_selective", 1000),
        ("write_through_selective", None),
        ("continuation", 1000),  # where there is room for all, it stores all
    ],
)
def test_br_135_a_policy_cuts_what_is_written_to_a_third_at_a_twentieth_of_the_hits(
    write: str, capacity_pages: int | None
) -> None:
    def run(name: str) -> Result:
        eviction = "continuation" if name == "continuation" else "lru"
        return replay(
            shared_and_single_use(),
            [TierSpec("L3", capacity_pages, eviction=eviction, write=name)],
            checked=capacity_pages is not None,  # that no page is without those before it
        )

    always, chosen = run("write_through"), run(write)
    assert always.usable_tokens > 0
    assert chosen.tiers[0].bytes_written * 3 <= always.tiers[0].bytes_written
    assert chosen.usable_tokens >= 0.95 * always.usable_tokens
    assert per_hit(chosen) * 3 <= per_hit(always), "bytes written for each token that was hit"


def per_hit(result: Result) -> float:
    return result.tiers[0].bytes_written / result.usable_tokens


@pytest.mark.parametrize("write_policy", ["write_through", "write_through_selective"])
def test_br_135_the_cache_itself_writes_what_the_replay_says_and_leaves_no_holes(make: Make, write_policy: str) -> None:
    engine = make(ATTENTION, objects={}, write_policy=write_policy, l1=64, l2=64)
    for number in range(40):
        engine.serve(prompt(3, seed=number + 10 if number % 5 else 0))
        engine.settle()
    assert engine.l3 is not None
    assert len(engine.l3.objects) == (3 * (32 + 1) if write_policy == "write_through" else 3)
    reader = make(ATTENTION, objects=engine.l3.objects)
    assert reader.serve(prompt(3)).by_source["l3"] == 12, "the shared prompt is there, and whole"


def test_br_135_what_is_admitted_late_takes_the_pages_before_it_along() -> None:
    """The beginning was evicted before the end was worth storing: what goes down can be reached there."""
    from tests.core.world import WRITES

    world = World((FULL,), l1=24, l2=24, policy=WRITES["write_through_selective"])
    world.serve(world_prompt(6))
    evict_all(world, Tier.L1)
    world.serve(world_prompt(3))
    world.serve(world_prompt(6))
    world.run_all()
    stored = {key for key, _, _ in world.executor.l3}
    keys = world.page_keys(world_prompt(6))[:6]
    assert stored == set(keys)
    world.check()
    world.wind_up()


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


def test_br_132_memory_is_touched_in_chunks_and_the_log_tells_how_far(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_memory, "_TOUCH_CHUNK_BYTES", MIB)
    monkeypatch.setattr(host_memory, "_TOUCH_REPORT_CHUNKS", 2)
    caplog.set_level("INFO")
    HostMemory("hicache-l2", 5 * MIB, setting="l2_bytes").close()
    assert [record.getMessage() for record in caplog.records] == ["L2: 2 of 5 MiB touched", "L2: 4 of 5 MiB touched"]
