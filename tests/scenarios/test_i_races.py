"""Group I: what is looked up, copied or awaited can go meanwhile, and costs a miss at the most."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Literal

import pytest

from hicache.backends.faulty import Fault, FaultKind
from hicache.backends.ram_tier import SharedRamTier
from hicache.client import DaemonL3
from hicache.jobs import CopyKind, LookupJob
from hicache.node import Tier
from hicache.outcome import Outcome
from hicache.policies.prefetch import PrefetchPolicy
from tests.backends.fake_mooncake import FakeMooncake, open_fake
from tests.backends.payloads import get, key, payload, put
from tests.core.situations import HYBRID, evict_all, loaded_pages, prefetching, restore
from tests.core.situations import prompt as world_prompt
from tests.core.small_engine import ATTENTION, PAGE, STATE, Make, SmallEngine, prompt
from tests.core.world import FULL, World
from tests.core.world import PAGE as WORLD_PAGE
from tests.daemon.client import Client
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.raw_links import Memory, object_key, payload_of
from tests.daemon.rig import scrape, wait_until
from tests.daemon.test_faults import Flood
from tests.scenarios.scale import TIMEOUT_S, at_scale

StartThread = Callable[..., ThreadedDaemon]

OBJECT = 64 * 1024
REQUESTS = at_scale(100, 10_000)
KEYS = [object_key(number) for number in range(4)]


@pytest.fixture
def tight(start_thread: StartThread) -> ThreadedDaemon:
    """A daemon whose store holds about 100 objects."""
    return start_thread(capacity_bytes="8MiB", object_bytes_max=OBJECT)


def test_br_101_what_a_lease_covers_is_there_at_get_however_much_is_written(tight: ThreadedDaemon) -> None:
    with Client(tight.target) as client, Client(tight.target) as writer, Memory(8 * OBJECT) as memory:
        region = client.attach(memory).region_id
        flood = Flood(writer)
        client.put_stream(KEYS, [payload_of(number, OBJECT) for number in range(4)])
        flood.put_pages(5)
        outcomes, lease = client.lookup(KEYS, lease_ms=60_000)
        assert outcomes == [Outcome.OK] * 4
        flood.put_pages(150)

        assert client.get(region, KEYS, [n * OBJECT for n in range(4)], [OBJECT] * 4) == [Outcome.OK] * 4
        assert client.lease(lease, lease_ms=0)
        flood.put_pages(300)
        assert client.present(KEYS) == [False] * 4, "without the lease they are evicted like anything else"


def test_br_101_without_a_lease_a_page_that_went_is_a_miss_and_no_error(tight: ThreadedDaemon) -> None:
    chance = random.Random(7)
    with Client(tight.target) as client, Client(tight.target) as writer, Memory(OBJECT) as memory:
        region = client.attach(memory).region_id
        flood = Flood(writer)
        seen = set()
        for _ in range(30):
            number = chance.randrange(20)
            key = object_key(number)
            if client.present([key]) == [False]:
                client.put_stream([key], [payload_of(number, OBJECT)])
            flood.put_pages(chance.choice([0, 1, 150]))
            (outcome,) = client.get(region, [key], [0], [OBJECT])
            seen.add(outcome)
            if outcome is Outcome.OK:
                assert memory.bytes[:] == payload_of(number, OBJECT)
        assert seen == {Outcome.OK, Outcome.ABSENT}


def test_br_101_what_is_gone_between_lookup_and_fetch_shortens_the_prefix() -> None:
    world = World((FULL,), l1=16, l2=16, prefetch_l2_share=1.0)
    live = prefetching(world, world_prompt(8))
    world.executor.run_kind(LookupJob)
    world.lose_in_l3(live.record.keys[5], 0)
    world.run_all()
    assert world.directory.is_settled(live.record)
    world.load_whole(live)
    assert loaded_pages(live) == 5
    assert world.directory.stats.prefetch_dropped == {"absent": 3 * WORLD_PAGE}
    world.wind_up()


@pytest.mark.timeout(TIMEOUT_S)
def test_br_101_no_request_of_an_engine_fails_at_a_store_that_is_full_all_the_time(
    start_thread: StartThread, make: Make
) -> None:
    """Another engine writes without a pause; each request is served, with right bytes, from L3 or computed."""
    daemon = start_thread(capacity_bytes="4MiB", object_bytes_max=4096)  # 64 objects
    address = f"unix://{daemon.config.socket}"
    reader = make(ATTENTION, STATE, address=address, l1=10, l2=10)
    writer = make(ATTENTION, STATE, address=address, l1=10, l2=20)
    connected(reader)
    connected(writer)
    ended, written = threading.Event(), 0

    def write() -> None:
        nonlocal written
        while not ended.is_set():
            writer.serve(prompt(4, seed=1000 + written))
            written += 1

    writing = threading.Thread(target=write)
    writing.start()
    chance, from_l3, computed, requests = random.Random(3), 0, 0, 0
    try:
        while requests < REQUESTS or not (from_l3 and computed and evicted_objects(daemon)):
            assert requests < REQUESTS + 5000
            restored = reader.serve(prompt(4, seed=chance.randrange(4)))  # which checks every byte
            requests += 1
            from_l3 += restored.by_source["l3"]
            computed += restored.by_source["computed"] - 1
    finally:
        ended.set()
        writing.join()
    stats = reader.cache.stats
    assert stats.prefetch_in_flight == 0
    assert stats.prefetch_found == stats.prefetch_used + sum(stats.prefetch_dropped.values())


def evicted_objects(daemon: ThreadedDaemon) -> float:
    return scrape(daemon.ready.http)['hicache_store_removed_objects_total{reason="evicted"}']


def test_br_103_no_slot_of_l2_is_given_out_again_before_its_copy_has_ended() -> None:
    world = World((FULL,), l1=40, l2=10, has_l3=False)
    first = world.open(world_prompt(10))
    world.load_whole(first)
    world.compute(first, pages=10, snapshot=False)
    second = world.open(world_prompt(20, seed=1))
    world.load(second)
    world.compute(second, pages=20, snapshot=False)
    targets = [item.target for task in world.executor.waiting for item in task.job.items]
    assert len(targets) == len(set(targets)) == 10
    assert world.directory.stats.skipped["backup.no_host_capacity"] == 1
    world.run_all()
    world.check()
    assert world.directory.index.pools[Tier.L2][0].used_count == 10
    world.wind_up()


def test_br_104_a_read_that_outlives_its_lease_gets_the_right_bytes_or_a_miss(tight: ThreadedDaemon) -> None:
    with Client(tight.target) as client, Client(tight.target) as writer, Memory(2 * OBJECT) as memory:
        attachment = client.attach(memory)
        client.put_stream(KEYS[:2], [payload_of(number, OBJECT) for number in range(2)])
        assert client.lookup(KEYS[:2], lease_ms=1)[1] > 0
        late = tight.backend.arm("get_into", Fault(FaultKind.LATE, times=1))
        reading = client.begin(client.get, attachment.region_id, KEYS[:2], [0, OBJECT], [OBJECT] * 2)
        wait_until(late.entered.is_set, what="the read is in the backend")
        Flood(writer).put_pages(300)
        late.release()

        for number, outcome in enumerate(reading.result()):
            assert outcome in (Outcome.OK, Outcome.ABSENT, Outcome.CORRUPT)
            if outcome == Outcome.OK:
                assert memory.bytes[number * OBJECT : (number + 1) * OBJECT] == payload_of(number, OBJECT)
        wait_until(lambda: client.present(KEYS[:2]) == [False] * 2, what="both are gone")
        assert client.get(attachment.region_id, KEYS[:2], [0, OBJECT], [OBJECT] * 2) == [Outcome.ABSENT] * 2


def test_br_106_a_hit_that_l2_has_no_room_for_is_cut_to_the_share_and_all_is_told() -> None:
    world = World((FULL,), l1=200, l2=160, prefetch_l2_share=0.5)
    live = prefetching(world, world_prompt(1000))
    restore(world, live)
    stats = world.directory.stats
    assert loaded_pages(live) == 80
    assert stats.prefetch_found == 1000 * WORLD_PAGE
    assert stats.prefetch_used == 80 * WORLD_PAGE
    assert stats.prefetch_dropped == {"no_host_capacity": 920 * WORLD_PAGE}
    assert stats.prefetch_in_flight == 0


def test_br_106_a_cut_hit_of_a_hybrid_ends_at_a_snapshot() -> None:
    world = World(HYBRID, l1=100, l2=40, prefetch_l2_share=0.5)
    snapshots = {7, 15, 31}
    live = prefetching(
        world, world_prompt(32), without=frozenset((page, 1) for page in range(32) if page not in snapshots)
    )
    restore(world, live)
    assert loaded_pages(live) == 16
    assert world.directory.stats.prefetch_dropped == {"no_host_capacity": 16 * WORLD_PAGE}
    world.wind_up()


@pytest.mark.parametrize("mode", ["best_effort", "wait_complete", "timeout"])
def test_br_106_in_every_mode_what_was_found_is_used_or_told_as_dropped(
    make: Make, mode: Literal["best_effort", "wait_complete", "timeout"]
) -> None:
    writer = make(ATTENTION, objects={}, l1=128, l2=128)
    writer.serve(prompt(100))
    writer.settle()
    assert writer.l3 is not None
    policy = PrefetchPolicy(mode, threshold_tokens=0, grace_s=20, base_s=20)
    reader = make(ATTENTION, objects=writer.l3.objects, l1=128, l2=16, prefetch=policy)
    request = reader.cache.match(prompt(100))
    reader.cache.prefetch(request)
    assert reader.cache.wait(request)
    restored = reader.cache.load(request, timeout_s=20)
    assert restored is not None
    reader.check(request, prompt(100), restored.tokens)
    reader.cache.release(request)
    stats = reader.cache.stats
    assert 0 < restored.tokens < 16 * PAGE
    assert stats.prefetch_found == 100 * PAGE
    assert stats.prefetch_used == restored.tokens
    assert stats.prefetch_dropped == {"no_host_capacity": 100 * PAGE - restored.tokens}


def test_br_107_a_prefetch_meets_pages_that_another_request_has_published_meanwhile() -> None:
    world = World((FULL,), l1=20, l2=20, prefetch_l2_share=1.0)
    world.serve(world_prompt(2))
    live = prefetching(world, world_prompt(8))
    world.executor.run_kind(LookupJob)
    other = world.open(world_prompt(5))
    world.load(other)
    world.compute(other, pages=5, snapshot=False)
    world.executor.run_kind(CopyKind.BACKUP)
    world.release(other)
    world.run_all()
    assert world.directory.index.pools[Tier.L2][0].used_count == 8  # no page twice
    world.load_whole(live)
    assert loaded_pages(live) == 8
    world.check()
    world.wind_up()


def test_br_107_a_prefetch_whose_anchor_was_evicted_publishes_nothing() -> None:
    world = World((FULL,), l1=20, l2=20, prefetch_l2_share=1.0)
    world.serve(world_prompt(2))
    live = prefetching(world, world_prompt(8))
    world.executor.run_kind(LookupJob)
    world.release(live)
    evict_all(world, Tier.L1)
    for _ in range(14):  # all but the slots that the fetch is writing to
        assert world.directory.index.acquire(Tier.L2, 0, 1) is not None
    assert world.directory.index.nodes == {}
    world.executor.run_all()
    assert world.directory.index.nodes == {}
    assert world.directory.index.pools[Tier.L2][0].used_count == 14
    assert world.prefetcher.fetches.held == [0]


def test_br_107_a_prefetch_whose_path_was_split_and_rebuilt_meanwhile_publishes_what_fits() -> None:
    """Its beginning is evicted and computed again by another request, which parts from it behind page 3."""
    world = World((FULL,), l1=24, l2=24, prefetch_l2_share=1.0)
    world.serve(world_prompt(2))
    live = prefetching(world, world_prompt(8))
    world.executor.run_kind(LookupJob)
    world.release(live)  # keeps nothing; what it fetches is still on its way
    evict_all(world, Tier.L1)
    forked = [*world_prompt(3)[: 3 * WORLD_PAGE], *range(900, 900 + 2 * WORLD_PAGE + 1)]
    other = world.open(forked)
    world.load(other)
    world.compute(other, pages=5, snapshot=False)
    world.run_all()
    world.check()
    nodes = world.directory.index.nodes
    assert all(node.parent is None or node.parent.key in nodes for node in nodes.values())
    again = world.open(world_prompt(8))
    world.prefetch(again)
    restore(world, again)
    assert loaded_pages(again) == 8
    world.release(other)
    world.check()
    world.wind_up()


RAM_BYTES = 64 * 4096


def test_br_108_what_the_memory_tier_has_given_up_is_served_by_the_store_below_it() -> None:
    """And told apart: hits of the tier, hits of the store."""
    fake = FakeMooncake()
    tier = SharedRamTier(open_fake(fake), capacity_bytes=RAM_BYTES)
    put(tier, *[(key(number), payload(number, 4096)) for number in range(200)])

    def read(number: int) -> None:
        assert get(tier, key(number), 4096) == (Outcome.OK, payload(number, 4096))

    read(1)
    read(1)
    hits = tier.ram_stats().hits
    read(1)
    assert tier.ram_stats().hits == hits + 1, "the control: it was in memory"
    for number in range(100, 200):
        for _ in range(3):
            read(number)
    assert tier.ram_stats().evicted > 0
    before = tier.ram_stats()
    read(1)
    after = tier.ram_stats()
    assert (after.hits, after.misses) == (before.hits, before.misses + 1), "from below"
    fake.is_unreachable = True
    assert get(tier, key(2), 4096)[0] is Outcome.UNAVAILABLE
    tier.close()


@pytest.mark.parametrize("backend", ["lmdb", "file"])
def test_br_108_what_has_left_l1_and_l2_comes_from_l3_and_is_counted_there(
    start_thread: StartThread, make: Make, backend: str
) -> None:
    daemon = start_thread(backend=backend)
    engine = make(ATTENTION, STATE, address=f"unix://{daemon.config.socket}", l1=12, l2=12)
    connected(engine)
    served = [engine.serve(prompt(3)).by_source]
    engine.settle()
    for tier in ("l1", "l2", "l3"):
        if tier == "l2":
            for seed in (1, 2, 3):  # L1 is needed by others, L2 is as well when there are more of them
                engine.serve(prompt(2, seed=seed), snapshot=False)
        if tier == "l3":
            for seed in range(4, 16):
                engine.serve(prompt(3, seed=seed))
                engine.settle()
        served.append(engine.serve(prompt(3)).by_source)
        engine.settle()
    assert served[1]["l1"] == 3 * PAGE
    assert served[3]["l3"] == 3 * PAGE


def test_br_108_an_error_names_the_tier_that_it_came_from(start_thread: StartThread, make: Make) -> None:
    daemon = start_thread(backend="file")
    address = f"unix://{daemon.config.socket}"
    writer = make(ATTENTION, address=address)
    connected(writer)
    writer.serve(prompt(3))
    writer.settle()
    daemon.backend.arm("get_into", Fault(FaultKind.EIO))
    reader = make(ATTENTION, address=address)
    connected(reader)
    assert reader.serve(prompt(3)).tokens == 0
    objects = reader.cache.stats.objects
    assert objects["fetch.io_error"] > 0, "the way from L3 to L2"
    assert not objects["load.io_error"], "and not the one from L2 to L1"
    assert daemon.metric("hicache_items_total", method="Get", outcome="io_error") > 0
    daemon.backend.disarm()
    again = make(ATTENTION, address=address)
    connected(again)
    assert again.serve(prompt(3)).by_source["l3"] == 3 * PAGE, "the control"


def connected(engine: SmallEngine) -> None:
    l3 = engine.cache.l3
    assert isinstance(l3, DaemonL3)
    assert l3.wait_ready(timeout_s=20)
