"""A store written by a replica of one TP size serves those of others: every byte, every object once, nothing else."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.backends.open import open_store
from hicache.backends.store import ObjectStore
from hicache.embedded import EmbeddedL3
from hicache.executor import ExecutorLimits
from hicache.jobs import CopyItem, CopyJob, CopyKind, FetchJob, StoreJob, TransferItem
from hicache.keys import object_key
from hicache.l3 import L3, Done, L3Item
from hicache.outcome import Outcome
from hicache.pools import L2Pool
from hicache.spec import CacheSpec, Group, PagedGroup
from tests.core.memory_l3 import MemoryL3, Objects
from tests.engine.replica import L2_SLOTS, Replica, gdn, mamba2, shard_of, whole_model, with_tp

SLICES = (1, 2, 3, 4, 6, 8)
PAGES = 3
WRITE_L1, WRITE_L2 = (5, 0, 8), (2, 6, 3)
READ_L1, READ_L2 = (1, 7, 4), (0, 5, 1)


class SharedStore:
    """An L3 in memory for all ranks of all replicas, which counts what is put."""

    def __init__(self) -> None:
        self.objects: Objects = {}
        self.puts: Counter[bytes] = Counter()
        self.faults: dict[tuple[str, bytes], Outcome] = {}

    def open(self, l2: L2Pool) -> L3:
        l3 = MemoryL3(l2, self.objects)
        l3.fault = self._on_call
        return l3

    def _on_call(self, operation: str, key: bytes) -> Outcome | None:
        if operation == "put":
            self.puts[key] += 1
        return self.faults.get((operation, key))


def divisors(count: int) -> list[int]:
    return [size for size in range(1, count + 1) if count % size == 0]


def fits(heads: int, *sizes: int) -> bool:
    return all(heads % size == 0 or size % heads == 0 for size in sizes)


@st.composite
def replicas(draw: st.DrawFn) -> tuple[CacheSpec, int, int]:
    """A spec, and the TP sizes of who writes and of who reads."""
    slices = draw(st.sampled_from(SLICES))
    writer, reader = draw(st.sampled_from(divisors(slices))), draw(st.sampled_from(divisors(slices)))
    heads = st.sampled_from([count for count in (1, 2, 3, 4, 6, 8, 12) if fits(count, slices, writer, reader)])
    layer_count = draw(st.integers(1, 6))
    kinds = draw(
        st.lists(st.sampled_from(["mha", "mla", "swa", "gdn", "mamba", None]), min_size=1, max_size=layer_count)
    )
    kinds[0] = kinds[0] or "mha"  # something is kept
    layers_of = {kind: tuple(layer for layer, of in enumerate(kinds) if of == kind) for kind in kinds if kind}
    dtype = draw(st.sampled_from(["bfloat16", "float8_e4m3fn", "float32"]))
    groups: list[Group] = []
    for kind, layers in layers_of.items():
        match kind:
            case "mha":
                groups.append(PagedGroup(kind, layers, draw(heads), draw(st.integers(1, 5)), dtype))
            case "mla":
                groups.append(PagedGroup.mla(kind, layers=layers, latent_dim=5, rope_dim=2, dtype=dtype))
            case "swa":
                groups.append(PagedGroup(kind, layers, draw(heads), 4, dtype, window_tokens=6))
            case "gdn":
                groups.append(gdn(kind, layers, key_heads=draw(heads), value_heads=draw(heads)))
            case _:
                groups.append(mamba2(kind, layers, heads=draw(heads), groups=draw(heads)))
    spec = CacheSpec("m", "1", tuple(groups), page_tokens=draw(st.sampled_from([1, 3, 4])), tp_lcm=slices)
    return dataclasses.replace(spec, pp_layers=draw(stages(len(kinds), spec))), writer, reader


@st.composite
def stages(draw: st.DrawFn, layer_count: int, spec: CacheSpec) -> tuple[int, ...] | None:
    """Up to three stages, uneven, each with a layer that keeps something."""
    cuts = sorted(draw(st.sets(st.integers(1, max(1, layer_count - 1)), max_size=2)))
    bounds = [0, *(cut for cut in cuts if cut < layer_count), layer_count]
    counts = tuple(stop - start for start, stop in pairwise(bounds))
    kept = {layer for group in spec.groups for layer in group.layers}
    has_layers = all(kept & set(range(start, stop)) for start, stop in pairwise(bounds))
    return counts if has_layers else None


@settings(max_examples=60)
@given(drawn=replicas(), forms=st.tuples(*[st.sampled_from(["one", "layer", "plane"])] * 2), seed=st.integers(0, 99))
def test_what_one_tp_size_wrote_another_reads_to_the_byte(
    drawn: tuple[CacheSpec, int, int], forms: tuple[str, str], seed: int
) -> None:
    spec, writer_size, reader_size = drawn
    whole = whole_model(spec, pages=PAGES, seed=seed)
    store = SharedStore()
    with Replica(with_tp(spec, writer_size), store.open, forms[0]) as writer:
        assert set(writer.write(whole, l1_slots=WRITE_L1, l2_slots=WRITE_L2)) == {Outcome.OK}
        writer.check_padding(l2_slots=WRITE_L2)
        keys = writer.keys(PAGES)
    shards = [object_key(key, group=g, shard=s) for key in keys for g, of in enumerate(spec.shards) for s in of]
    assert store.puts == Counter(shards), "each object is stored exactly once"
    assert sum(len(payload) for _, payload in store.objects.values()) == PAGES * sum(spec.object_bytes)
    with Replica(with_tp(spec, reader_size), store.open, forms[1]) as reader:
        assert reader.keys(PAGES) == keys
        assert set(reader.lookup(count=PAGES)) == {Outcome.OK}
        assert set(reader.fetch(l2_slots=READ_L2)) == {Outcome.OK}
        reader.check_padding(l2_slots=READ_L2)
        reader.load(l2_slots=READ_L2, l1_slots=READ_L1)
        reader.check_loaded(whole, l1_slots=READ_L1)


HYBRID = CacheSpec(
    "hybrid",
    "1",
    (
        PagedGroup("full", (3, 7), heads=2, head_dim=6, dtype="bfloat16"),
        PagedGroup.mla("latent", layers=(1,), latent_dim=9, rope_dim=2, dtype="bfloat16"),
        PagedGroup("swa", (2, 5, 6), heads=8, head_dim=4, dtype="float8_e4m3fn", window_tokens=5),
        gdn("delta", (0, 4), key_heads=4, value_heads=8),
    ),
    page_tokens=4,
    tp_lcm=4,
    pp_layers=(5, 3),  # no state and no latent in the second stage
)


def written(spec: CacheSpec, store: SharedStore) -> None:
    """The replica of ``spec`` computes and stores ``PAGES`` pages, and is gone then."""
    with Replica(spec, store.open) as writer:
        outcomes = writer.write(whole_model(spec, pages=PAGES), l1_slots=WRITE_L1, l2_slots=WRITE_L2)
        assert set(outcomes) <= {Outcome.OK, Outcome.EXISTS}


def restored(spec: CacheSpec, store: SharedStore) -> None:
    """A replica of ``spec`` that has nothing yet finds the pages, and every byte of them."""
    with Replica(spec, store.open) as reader:
        assert set(reader.lookup(count=PAGES)) == {Outcome.OK}
        assert set(reader.fetch(l2_slots=READ_L2)) == {Outcome.OK}
        reader.load(l2_slots=READ_L2, l1_slots=READ_L1)
        reader.check_loaded(whole_model(spec, pages=PAGES), l1_slots=READ_L1)


def missed(spec: CacheSpec, store: SharedStore) -> None:
    """A replica of ``spec`` finds nothing, neither asked for nor fetched."""
    with Replica(spec, store.open) as reader:
        assert set(reader.lookup(count=PAGES)) == {Outcome.ABSENT}
        assert set(reader.fetch(l2_slots=READ_L2)) == {Outcome.ABSENT}
        reader.check_padding(l2_slots=())


class Kept:
    """A store that stays open when one of the ranks that share it closes it."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def close(self) -> None:
        pass

    def for_rank(self, l2: L2Pool) -> L3:
        return EmbeddedL3(self, memory=l2)


@pytest.mark.parametrize("scheme", ["lmdb", "file"])
def test_br_007_a_store_on_disk_that_two_ranks_wrote_serves_one_and_four(scheme: str, tmp_path: Path) -> None:
    whole = whole_model(HYBRID, pages=PAGES)
    url = f"{scheme}://{tmp_path / 'store'}"
    for tp_size in (2, 1, 4):
        store = open_store(url, capacity_bytes=64 << 20, object_bytes_max=HYBRID.object_bytes_max)
        with Replica(with_tp(HYBRID, tp_size), Kept(store).for_rank) as replica:
            if tp_size == 2:
                assert set(replica.write(whole, l1_slots=WRITE_L1, l2_slots=WRITE_L2)) == {Outcome.OK}
            else:
                assert set(replica.lookup(count=PAGES)) == {Outcome.OK}
                assert set(replica.fetch(l2_slots=READ_L2)) == {Outcome.OK}
                replica.load(l2_slots=READ_L2, l1_slots=READ_L1)
                replica.check_loaded(whole, l1_slots=READ_L1)
        store.close()


def test_br_007_without_common_slices_another_tp_size_misses_although_its_objects_weigh_the_same() -> None:
    one = CacheSpec("m", "1", (PagedGroup("full", (0, 1), 4, 8, "bfloat16"),), page_tokens=4)
    two = dataclasses.replace(one, groups=(PagedGroup("full", (0, 1), 8, 8, "bfloat16"),), tp_size=2)
    assert one.object_bytes_max == two.object_bytes_max
    store = SharedStore()
    written(one, store)
    missed(two, store)
    missed(dataclasses.replace(one, tp_size=2), store)
    restored(one, store)


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(HYBRID, tp_lcm=8),
        dataclasses.replace(HYBRID, pp_layers=(4, 4)),
        dataclasses.replace(HYBRID, pp_layers=None),
        dataclasses.replace(HYBRID, groups=(*HYBRID.groups[:3], gdn("delta", (0, 4), key_heads=8, value_heads=4))),
    ],
    ids=["other slices", "other stages", "one stage", "other sections"],
)
def test_what_is_cut_otherwise_is_another_namespace(other: CacheSpec) -> None:
    store = SharedStore()
    written(with_tp(HYBRID, 2), store)
    missed(with_tp(other, 2), store)
    restored(with_tp(HYBRID, 4), store)


def test_br_028_latent_attention_is_stored_once_and_shared_by_all_tp_sizes_without_further_settings() -> None:
    latent = PagedGroup.mla("latent", layers=(0, 1, 2), latent_dim=16, rope_dim=4, dtype="bfloat16")
    spec = CacheSpec("m", "1", (latent,), page_tokens=4)
    store = SharedStore()
    written(with_tp(spec, 8), store)
    assert set(store.puts.values()) == {1}
    assert len(store.puts) == PAGES
    for tp_size in (1, 3, 8):
        restored(with_tp(spec, tp_size), store)


def test_a_page_counts_only_when_every_shard_of_every_stage_is_there() -> None:
    store = SharedStore()
    written(with_tp(HYBRID, 2), store)
    with Replica(with_tp(HYBRID, 1), store.open) as reader:
        keys = reader.keys(PAGES)
        items = [(group, page) for group in range(len(HYBRID.groups)) for page in range(PAGES)]
        for group, page in items:
            for shard in HYBRID.shards[group]:
                lost = object_key(keys[page], group=group, shard=shard)
                payload = store.objects.pop(lost)
                expected = [Outcome.ABSENT if item == (group, page) else Outcome.OK for item in items]
                assert reader.lookup(count=PAGES) == expected
                assert reader.fetch(l2_slots=READ_L2) == expected
                store.objects[lost] = payload


def test_br_001_a_shard_that_is_corrupt_is_a_miss_for_all_ranks_and_of_that_page_alone() -> None:
    store = SharedStore()
    written(with_tp(HYBRID, 4), store)
    with Replica(with_tp(HYBRID, 2), store.open) as reader:
        spoiled = object_key(reader.keys(PAGES)[1], group=2, shard=3)
        checksum, payload = store.objects[spoiled]
        store.objects[spoiled] = checksum, bytes([payload[0] ^ 1]) + payload[1:]
        outcomes = reader.fetch(l2_slots=READ_L2)
    assert outcomes.index(Outcome.CORRUPT) == 2 * PAGES + 1
    assert Counter(outcomes) == {Outcome.OK: 4 * PAGES - 1, Outcome.CORRUPT: 1}


def test_the_outcome_of_the_rank_that_stores_a_slice_decides() -> None:
    store = SharedStore()
    spec = dataclasses.replace(with_tp(HYBRID, 4), pp_layers=None)
    with Replica(spec, store.open) as writer:
        latent = object_key(writer.keys(1)[0], group=1, shard=0)
        store.faults["put", latent] = Outcome.NO_SPACE
        whole = whole_model(spec, pages=1)
        outcomes = writer.write(whole, l1_slots=[0], l2_slots=[0])
        assert outcomes == [Outcome.OK, Outcome.NO_SPACE, Outcome.OK, Outcome.OK]
        assert store.puts[latent] == 1
        store.faults.clear()
        outcomes = writer.write(whole, l1_slots=[0], l2_slots=[0])
        assert outcomes == [Outcome.EXISTS, Outcome.OK, Outcome.EXISTS, Outcome.EXISTS]


def test_objects_of_one_page_go_to_l3_in_one_call_and_bounds_count_objects() -> None:
    store = SharedStore()
    written(HYBRID, store)
    limits = ExecutorLimits(batch_keys_max=6)
    calls: list[list[bytes]] = []

    class Recording(MemoryL3):
        def get(self, items: Sequence[L3Item], *, timeout_s: float, done: Done) -> None:
            calls.append([item.key for item in items])
            super().get(items, timeout_s=timeout_s, done=done)

    with Replica(HYBRID, lambda l2: Recording(l2, store.objects), limits=limits) as reader:
        assert set(reader.fetch(l2_slots=READ_L2)) == {Outcome.OK}
    assert all(len(call) <= 6 for call in calls)
    pages = [{key[:-2] for key in call} for call in calls]  # block key and group, without the shard
    assert sum(map(len, pages)) == len(set().union(*pages)) + PAGES * 2, "full and swa have layers in both stages"


def test_what_names_no_group_or_slot_is_a_bad_range_on_every_rank() -> None:
    store = SharedStore()
    with Replica(with_tp(HYBRID, 2), store.open) as replica:
        key = replica.keys(1)[0]
        for group, slot in ((-1, 0), (len(HYBRID.groups), 0), (0, L2_SLOTS), (0, -1)):
            items = (TransferItem(group, key, slot),)
            assert replica.over_ranks(lambda job, items=items: FetchJob(job, items)) == [Outcome.BAD_RANGE]
            copies = (CopyItem(group, 0, slot),)
            backup = replica.over_ranks(lambda job, copies=copies: CopyJob(job, CopyKind.BACKUP, copies))
            assert backup == [Outcome.IO_ERROR]


@pytest.mark.parametrize("page_tokens", [4, 7, 16, 64, 528, 3584])
def test_br_149_any_page_size_is_that_of_all_groups_and_needs_no_common_multiple(page_tokens: int) -> None:
    store = SharedStore()
    spec = dataclasses.replace(HYBRID, page_tokens=page_tokens)
    written(with_tp(spec, 2), store)
    restored(with_tp(spec, 4), store)
    with pytest.raises(TypeError, match="page_tokens"):  # no group has a page size of its own
        PagedGroup("full", (0,), 1, 1, "int8", page_tokens=64)  # type: ignore[call-arg]


@pytest.mark.parametrize("boundary_pages", [1, 7, 8, 20])
def test_br_144_a_state_comes_from_the_page_that_ends_at_its_boundary_on_every_rank(boundary_pages: int) -> None:
    """There are no units to mix up: the key of a page names the snapshot at its end, whatever a slot's number is."""
    store = SharedStore()
    state = 3
    with Replica(with_tp(HYBRID, 2), store.open) as writer:
        keys = writer.keys(20)
        whole = whole_model(HYBRID, pages=20)
        for page in range(20):
            for rank in writer.ranks:
                for place, part in shard_of(writer.spec, whole, rank.number).items():
                    rank.held[place][:, 0] = part[:, page]
            writer.over_ranks(lambda job: CopyJob(job, CopyKind.BACKUP, (CopyItem(state, 0, 0),)))
            stored = writer.over_ranks(lambda job: StoreJob(job, (TransferItem(state, keys[page], 0),)))  # noqa: B023
            assert stored == [Outcome.OK]
    with Replica(with_tp(HYBRID, 4), store.open) as reader:
        fetched = reader.over_ranks(lambda job: FetchJob(job, (TransferItem(state, keys[boundary_pages - 1], 5),)))
        assert fetched == [Outcome.OK]
        reader.over_ranks(lambda job: CopyJob(job, CopyKind.LOAD, (CopyItem(state, 5, 2),)))
        states = {
            place: part[:, boundary_pages - 1 : boundary_pages] for place, part in whole.items() if place[0] == state
        }
        reader.check_loaded(states, l1_slots=[2])
        missing = reader.over_ranks(lambda job: FetchJob(job, (TransferItem(state, bytes(32), 5),)))
        assert missing == [Outcome.ABSENT]
