"""The store's counters and events in the forms of the vLLM that is installed."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from hicache.client.watch import WatchEvent, WatchKind
from hicache.keys import object_key
from hicache.page_changes import PageChange, Place
from hicache.samples import METRICS, samples_of
from hicache.stats import DirectoryStats

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM and torch warn of themselves while they are imported
    from vllm.distributed.kv_events import BlockStored, KVEventBatch

    from hicache.connectors.vllm_events import EventGroup, L3Removals, StoreEvents
    from hicache.connectors.vllm_metrics import PREFIX, HiCachePromMetrics, HiCacheStats


def samples(**tokens: int) -> dict[tuple[str, ...], float]:
    return {("tokens", source): float(count) for source, count in tokens.items()}


def test_stats_survive_the_way_between_processes_and_add_up() -> None:
    sent = msgspec.msgpack.decode(
        msgspec.msgpack.encode(HiCacheStats.of({**samples(l3=3), ("l3_ready", "0"): 1.0}).data)
    )
    received = HiCacheStats(data=sent).aggregate(HiCacheStats.of({**samples(l3=4, l2=1), ("l3_ready", "0"): 0.0}))
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
    metrics.observe(HiCacheStats.of({**samples(l3=3), ("l3_ready", "0"): 1.0}).data, 1)
    metrics.observe(HiCacheStats.of({**samples(l3=4), ("l3_ready", "0"): 0.0}).data, 1)
    labels = {"model_name": "m", "engine": "1"}
    assert registry.get_sample_value(f"{PREFIX}tokens_total", {**labels, "source": "l3"}) == 7
    assert registry.get_sample_value(f"{PREFIX}l3_ready", {**labels, "rank": "0"}) == 0
    assert {family.name for family in registry.collect()} == {PREFIX + metric.name for metric in METRICS}
    metrics.observe(HiCacheStats.of(samples_of(DirectoryStats(object_bytes=(1,)))).data)


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


class Pages:
    """A store in which a test moves pages, and its events."""

    def __init__(self, *, locality: str | None = None, groups: Sequence[EventGroup] = (EventGroup(0, 1),)) -> None:
        self._changes: list[PageChange] = []
        self.events = StoreEvents(groups, page_tokens=16, take_changes=self._take, locality=locality)

    def _take(self) -> list[PageChange]:
        taken, self._changes = self._changes, []
        return taken

    def stored(self, pages: range, place: Place, groups: int = 1) -> None:
        self.events.name_pages(request(), KEYS, HASHES, 0)
        self._changes += [PageChange(KEYS[page], place, groups, is_there=True) for page in pages]

    def left(self, pages: range, place: Place, groups: int = 1) -> None:
        self._changes += [PageChange(KEYS[page], place, groups, is_there=False) for page in pages]

    def told(self) -> list[tuple[str, bytes, str, int]]:
        """Of each event, what it says of which block of which group where."""
        events = self.events.take()
        batch = msgspec.msgpack.encode(KVEventBatch(ts=0.0, events=events))
        assert len(msgspec.msgpack.decode(batch, type=KVEventBatch).events) == len(events)
        return [(type(each).__name__, each.block_hashes[0], each.medium, each.group_idx) for each in events]  # type: ignore[attr-defined]  # of the two kinds


def test_hashes_are_shortened_where_vllm_shortens_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1")
    store = Pages()
    store.stored(range(1, 2), Place.L2)
    (stored,) = store.events.take()
    assert isinstance(stored, BlockStored)
    assert stored.block_hashes == [int.from_bytes(HASHES[1][-8:], "big")]


def test_a_stored_block_says_what_vllm_says_of_its_own() -> None:
    store = Pages(locality="REMOTE", groups=[EventGroup(0, 1, "sliding_window", 64)])
    store.stored(range(1), Place.L2)
    store.stored(range(1, 2), Place.L3)
    first, second = store.events.take()
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert (first.medium, first.locality, first.parent_block_hash) == ("CPU", None, None)
    assert (first.block_hashes, first.token_ids, first.extra_keys) == (HASHES[:1], list(range(16)), [("tenant",)])
    assert (first.kv_cache_spec_kind, first.kv_cache_spec_sliding_window) == ("sliding_window", 64)
    assert (second.medium, second.locality, second.parent_block_hash) == ("STORAGE", "REMOTE", HASHES[0])
    assert (second.block_hashes, second.token_ids, second.extra_keys) == (HASHES[1:2], list(range(16, 32)), [None])
    assert store.told() == []


def test_a_block_is_told_once_until_the_reverse_is() -> None:
    store = Pages()
    store.stored(range(1), Place.L2)
    store.stored(range(1), Place.L2)
    store.left(range(1), Place.L2)
    store.left(range(1), Place.L2)
    store.stored(range(1), Place.L2)
    assert [kind for kind, *_ in store.told()] == ["BlockStored", "BlockRemoved", "BlockStored"]


def test_a_block_of_vllm_is_there_with_all_its_parts_and_gone_with_one() -> None:
    store = Pages(groups=[EventGroup(0, 0b001), EventGroup(1, 0b110)])
    store.stored(range(1), Place.L2, 0b011)
    store.stored(range(1), Place.L2, 0b111)
    store.left(range(1), Place.L2, 0b100)
    assert store.told() == [
        ("BlockStored", HASHES[0], "CPU", 0),
        ("BlockStored", HASHES[0], "CPU", 1),
        ("BlockRemoved", HASHES[0], "CPU", 1),
    ]


def test_objects_that_hicached_lets_go_are_told_once_and_only_those_that_are_known() -> None:
    store = Pages(groups=[EventGroup(0, 1), EventGroup(1, 2)])
    store.stored(range(2), Place.L3, 0b11)
    store.events.removed_objects([object_key(KEYS[1], group=1, shard=shard) for shard in (0, 1)])
    store.events.removed_objects([object_key(KEYS[1], group=1, shard=0), object_key(b"other" * 6, group=0, shard=0)])
    assert store.told()[4:] == [("BlockRemoved", HASHES[1], "STORAGE", 1)]


def test_after_a_reset_nothing_is_where_it_was() -> None:
    store = Pages()
    store.stored(range(1), Place.L2)
    store.stored(range(1), Place.L3)
    store.events.forget()
    store.left(range(1), Place.L2)
    assert [(kind, medium) for kind, _, medium, _ in store.told()[2:]] == [
        ("BlockRemoved", "CPU"),
        ("BlockRemoved", "STORAGE"),
    ]


def test_events_that_nobody_takes_and_pages_of_long_ago_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache.connectors.vllm_events.QUEUED_MAX", 3)
    monkeypatch.setattr("hicache.connectors.vllm_events.KNOWN_MAX", 4)
    store = Pages()
    store.stored(range(6), Place.L3)
    assert [block for _, block, *_ in store.told()] == HASHES[3:]
    assert store.events.dropped == 1  # of the four latest pages


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
    store = Pages()
    store.stored(range(4), Place.L3)
    store.events.take()
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
    removals = L3Removals(watch, store.events)  # type: ignore[arg-type]  # of a Watch, what is used
    assert watch.told.wait(20)
    removals.close()
    assert [block for _, block, *_ in store.told()] == [HASHES[2], HASHES[1]]
