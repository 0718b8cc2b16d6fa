"""The store's counters and events in the forms of the vLLM that is installed."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from hicache.client.watch import WatchEvent, WatchKind
from hicache.connectors.counters import METRICS, samples_of
from hicache.keys import object_key
from hicache.stats import DirectoryStats

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM and torch warn of themselves while they are imported
    from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    from hicache.connectors.vllm_events import L2, L3, L3Removals, StoreEvents
    from hicache.connectors.vllm_metrics import PREFIX, HiCachePromMetrics, HiCacheStats, hit_sources


def samples(**tokens: int) -> dict[tuple[str, ...], float]:
    return {("tokens", source): float(count) for source, count in tokens.items()}


def test_stats_survive_the_way_between_processes_and_add_up() -> None:
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(HiCacheStats.of({**samples(l3=3), ("l3_ready",): 1.0}).data))
    received = HiCacheStats(data=sent).aggregate(HiCacheStats.of({**samples(l3=4, l2=1), ("l3_ready",): 0.0}))
    assert received.reduce() == {"tokens.l3": 7, "tokens.l2": 1}
    assert not received.is_empty()
    received.reset()
    assert received.is_empty()
    assert HiCacheStats().is_empty()
    assert HiCacheStats().aggregate(HiCacheStats.of(samples(l2=1))).reduce() == {"tokens.l2": 1}


def prometheus(registry: CollectorRegistry) -> HiCachePromMetrics:
    def of(family: Any) -> Any:
        return lambda **arguments: family(registry=registry, **arguments)

    config = SimpleNamespace(kv_transfer_config=None)
    types = {Counter: of(Counter), Gauge: of(Gauge), Histogram: of(Histogram)}
    return HiCachePromMetrics(config, types, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})


def test_prometheus_has_every_metric_and_shows_what_was_observed() -> None:
    registry = CollectorRegistry()
    metrics = prometheus(registry)
    metrics.observe(HiCacheStats.of({**samples(l3=3), ("l3_ready",): 1.0}).data, 1)
    metrics.observe(HiCacheStats.of({**samples(l3=4), ("l3_ready",): 0.0}).data, 1)
    labels = {"model_name": "m", "engine": "1"}
    assert registry.get_sample_value(f"{PREFIX}tokens_total", {**labels, "source": "l3"}) == 7
    assert registry.get_sample_value(f"{PREFIX}l3_ready", labels) == 0
    assert {family.name for family in registry.collect()} == {PREFIX + metric.name for metric in METRICS}
    metrics.observe(HiCacheStats.of(samples_of(DirectoryStats(object_bytes=(1,)))).data)


@pytest.mark.parametrize(
    ("by_source", "tokens", "expected"),
    [
        ({"l2": 64, "l3": 128}, 192, {CacheHitSource.HOST: 64, CacheHitSource.DISK: 128}),
        ({"l2": 64, "l3": 128}, 128, {CacheHitSource.HOST: 64, CacheHitSource.DISK: 64}),
        ({"l3": 64}, 128, {CacheHitSource.DISK: 64, CacheHitSource.EXTERNAL_UNSPECIFIED: 64}),
        ({"l9": 64}, 64, {CacheHitSource.EXTERNAL_UNSPECIFIED: 64}),
        ({"l2": 64}, 0, {}),
    ],
)
def test_sources_of_hits_add_up(by_source: dict[str, int], tokens: int, expected: dict[CacheHitSource, int]) -> None:
    assert hit_sources(by_source, tokens) == expected


def request() -> Any:
    return SimpleNamespace(
        all_token_ids=list(range(100)),
        lora_request=None,
        session_id=None,
        mm_features=[],
        cache_salt="tenant",
        prompt_embeds=None,
    )


HASHES = [bytes([page]) * 32 for page in range(6)]
KEYS = [bytes([page + 100]) * 32 for page in range(6)]


@pytest.fixture(autouse=True)
def whole_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")


def test_hashes_are_shortened_where_vllm_shortens_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1")
    store = events()
    store.stored(request(), HASHES, range(1, 2), medium=L2)
    (stored,) = store.take()
    assert isinstance(stored, BlockStored)
    assert stored.block_hashes == [int.from_bytes(HASHES[1][-8:], "big")]


def events(**settings: Any) -> StoreEvents:
    return StoreEvents(page_tokens=16, **settings)


def test_a_stored_block_says_what_vllm_says_of_its_own() -> None:
    store = events(locality="REMOTE")
    store.stored(request(), HASHES, range(2), medium=L2, group=0)
    store.stored(request(), HASHES, range(2, 4), medium=L3, group=0)
    first, second = store.take()
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert (first.medium, first.locality, first.parent_block_hash) == ("CPU", None, None)
    assert first.block_hashes == HASHES[:2]
    assert first.token_ids == list(range(32))
    assert first.extra_keys == [("tenant",), None]
    assert (second.medium, second.locality, second.parent_block_hash) == ("STORAGE", "REMOTE", HASHES[1])
    assert second.token_ids == list(range(32, 64))
    assert store.take() == []
    batch = msgspec.msgpack.encode(KVEventBatch(ts=0.0, events=[first, second]))
    assert len(msgspec.msgpack.decode(batch, type=KVEventBatch).events) == 2


def test_a_page_is_removed_once_however_many_objects_it_has_and_only_if_it_is_known() -> None:
    store = events()
    store.stored(request(), HASHES, range(2), medium=L3, keys=KEYS[:2])
    store.take()
    store.removed_objects([object_key(KEYS[1], group=group, shard=0) for group in (0, 1)])
    store.removed_objects([object_key(KEYS[1], group=0, shard=0), object_key(b"other" * 6, group=0, shard=0)])
    store.removed([HASHES[0]], medium=L2, group=1)
    first, second = store.take()
    assert isinstance(first, BlockRemoved)
    assert (first.block_hashes, first.medium) == ([HASHES[1]], "STORAGE")
    assert isinstance(second, BlockRemoved)
    assert (second.block_hashes, second.medium, second.group_idx) == ([HASHES[0]], "CPU", 1)


def test_events_that_nobody_takes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache.connectors.vllm_events.QUEUED_MAX", 3)
    monkeypatch.setattr("hicache.connectors.vllm_events.KNOWN_MAX", 2)
    store = events()
    for page in range(5):
        store.stored(request(), HASHES, range(page, page + 1), medium=L3, keys=KEYS[page : page + 1])
    assert store.dropped == 2
    assert len(store.take()) == 3
    store.removed_objects([object_key(key, group=0, shard=0) for key in KEYS])
    (removed,) = store.take()
    assert isinstance(removed, BlockRemoved)
    assert removed.block_hashes == HASHES[3:5]


class ScriptedWatch:
    """The events of a watch, then nothing until it is closed."""

    def __init__(self, script: list[WatchEvent]) -> None:
        self._script = script
        self._closed = threading.Event()
        self.told = threading.Event()

    def __iter__(self) -> Iterator[WatchEvent]:
        yield from self._script
        self.told.set()
        self._closed.wait(20)

    def close(self) -> None:
        self._closed.set()


def test_what_hicached_removes_is_told_also_what_it_lost_while_it_was_away() -> None:
    store = events()
    store.stored(request(), HASHES, range(4), medium=L3, keys=KEYS[:4])
    store.take()
    objects = [object_key(key, group=0, shard=0) for key in KEYS]
    watch = ScriptedWatch(
        [
            WatchEvent(WatchKind.RESET),
            WatchEvent(WatchKind.PRESENT, (objects[0], objects[1])),
            WatchEvent(WatchKind.STORED, (objects[3],)),
            WatchEvent(WatchKind.SYNCED),
            WatchEvent(WatchKind.REMOVED, (objects[1],), removal="evicted"),
        ]
    )
    removals = L3Removals(watch, store)  # type: ignore[arg-type]  # of a Watch, what is used
    assert watch.told.wait(20)
    removals.close()
    told = [event.block_hashes for event in store.take() if isinstance(event, BlockRemoved)]
    assert told == [[HASHES[2]], [HASHES[1]]]
