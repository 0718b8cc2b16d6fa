"""Ranks in real processes: stored, started again, restored from L3, and every byte of every rank compared."""

from __future__ import annotations

import dataclasses
import signal
import socket
from pathlib import Path

import pytest

from bench.rank_patterns import Slot, seed_of
from bench.rank_process import RankProcess, WorkerSettings
from bench.rank_replica import Replica, differing_slots
from hicache.arena import arena_layout
from hicache.cache import HiCache
from hicache.errors import ConfigError, SpecError, UsageError
from hicache.keys import object_key
from hicache.outcome import Outcome
from hicache.pools import L1Pool, L2Pool
from hicache.ranks.settings import Ranks
from hicache.ranks.worker import RankWorker
from tests.client.hicached import HicachedProcess
from tests.ranks import faults
from tests.ranks.conftest import PAGE, MakeReplica, prompt, spec_of

SHAPES = {
    "TP2": spec_of(2),
    "TP4": spec_of(4),
    "PP2": spec_of(1, (2, 3)),
    "TP2xPP2": spec_of(2, (3, 2)),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_replica_restores_from_l3_what_another_one_has_stored(shape: str, make: MakeReplica, tmp_path: Path) -> None:
    spec = SHAPES[shape]
    l3 = f"file://{tmp_path}/l3?shared=1"
    first = make(spec, l3=l3)
    assert first.serve(prompt(5)).by_source["computed"] == 5 * PAGE + 1
    first.settle()
    assert first.serve(prompt(5)).by_source["l1"] == 5 * PAGE
    first.settle()
    first.close()
    second = make(spec, l3=l3)
    assert second.serve(prompt(5)).by_source["l3"] == 5 * PAGE
    second.settle()
    stats = second.cache.stats
    assert stats.prefetch_used == 5 * PAGE
    assert not stats.ranks_lost


def wait_for_all_layers(rank: HiCache | RankWorker) -> None:
    """Runs on every rank: those of its own stage, and one that it lacks."""
    own = {layer for group in rank.l1.rank.groups if group is not None for layer in group.layers}
    for layer in own:
        rank.wait_layer(layer)
    with pytest.raises(UsageError, match="layer 1000 is in no group"):
        rank.wait_layer(1000)


@pytest.mark.parametrize("leads_only", [False, True], ids=["leader with a rank", "leader without one"])
def test_ranks_load_by_layer_as_their_leader_says(make: MakeReplica, tmp_path: Path, *, leads_only: bool) -> None:
    l3 = f"file://{tmp_path}/l3?shared=1"
    for is_first in (True, False):
        replica = make(SHAPES["PP2"], l3=l3, layerwise=True, leads_only=leads_only)
        restored = replica.serve(prompt(5))
        assert restored.by_source["computed" if is_first else "l3"] >= 5 * PAGE
        replica.on_all(wait_for_all_layers)
        replica.settle()  # with every arrival: nothing is held
        replica.close()


def test_what_tp2_has_stored_in_hicached_serves_tp1_and_tp4_of_the_same_deployment(
    make: MakeReplica, tmp_path: Path
) -> None:
    daemon = HicachedProcess(tmp_path)
    daemon.start()
    try:
        writer = make(spec_of(2, lcm=4), l3=daemon.address, deployment="chat")
        assert writer.serve(prompt(5)).tokens == 0
        writer.settle()
        for tp in (1, 4):
            reader = make(spec_of(tp, lcm=4), l3=daemon.address, deployment="chat")
            assert reader.serve(prompt(5)).by_source["l3"] == 5 * PAGE  # and compares it with a re-shard in torch
            reader.settle()
            if tp == 1:
                assert_stored_once(reader)
            reader.close()
        with pytest.raises(ConfigError, match=r"deployment.*group.0.slices: 4 != 2"):
            make(spec_of(2), l3=daemon.address, deployment="chat")
        writer.close()
        stranger = make(spec_of(2), l3=daemon.address)  # other slices are another namespace
        assert stranger.serve(prompt(5)).tokens == 0
    finally:
        daemon.end()


def assert_stored_once(replica: Replica) -> None:
    """Each slice of attention and state, and the latent that all ranks of the writer had, as one object."""
    cache = replica.cache
    assert cache.l3 is not None
    request = cache.match(prompt(5))
    key = request._record.keys[4]
    cache.release(request)
    for group, slices in enumerate((4, 1, 4)):
        keys = [object_key(key, group=group, shard=shard) for shard in range(8)]
        found = cache.l3.lookup(keys, timeout_s=20)
        assert found == [Outcome.OK] * slices + [Outcome.ABSENT] * (8 - slices)


def test_states_are_handed_over_on_every_rank(make: MakeReplica) -> None:
    replica = make(spec_of(2), double_buffering=True)
    cache, tokens = replica.cache, prompt(4)
    request, _ = replica.restore(tokens)
    for end in range(PAGE, 4 * PAGE + 1, PAGE):
        start = end - PAGE
        assert cache.next_state_stop(request, computed=start, until=end) == end
        replica.settle()  # the spare slot is empty on every rank; without one the snapshot would be a copy
        source = Slot(2, request.state_source(2), seed_of(tokens[:start]) if start else 0)
        assert not any(replica.on_all(differing_slots, [source])), "the step would read another state"
        replica.compute_pages(request, tokens, start, end)
        cache.state_moved(request)
        cache.store(request, computed=end, state_at=end)
    cache.release(request)
    replica.settle()
    requests = [replica.restore(tokens)[0] for _ in range(2)]
    sources = {request.state_source(2) for request in requests}
    assert sources.isdisjoint(request.state_slot(2) for request in requests)
    snapshot = [Slot(2, source, seed_of(tokens[: 4 * PAGE])) for source in sources]
    assert not any(replica.on_all(differing_slots, snapshot))
    for request in requests:
        cache.release(request)
    assert cache.stats.objects["hand_over.ok"] >= 3
    assert not cache.stats.objects["snapshot.ok"] + cache.stats.objects["restore.ok"]
    faults.assert_nothing_leaked(cache)


def test_pools_of_another_rank_are_refused(tmp_path: Path) -> None:
    spec = spec_of(2)
    pools = [L1Pool(spec, rank=rank, pages=8, state_slots=8) for rank in range(2)]
    nowhere = Ranks(f"unix://{tmp_path}/ranks.sock", start_timeout_s=0.1)
    with pytest.raises(ConfigError, match="rank = 0: expected a pool of rank 1"):
        RankWorker(spec, rank=1, leader=nowhere, l1=pools[0], l2=None, l3=None)
    with pytest.raises(ConfigError, match="rank = 1: expected the pool of rank 0"):
        HiCache(spec, l1=pools[1], l2=None, l3=None, ranks=nowhere)
    l2 = L2Pool(spec, [8, 8, 8], rank=0)
    with pytest.raises(ConfigError, match="none of the three"):
        HiCache(spec, l1=None, l2=l2, l3=None, ranks=nowhere)
    l2.close()
    with pytest.raises(ConfigError, match=r"ranks \[0, 1\] to have come"):
        HiCache.lead(spec, ranks=nowhere)


@pytest.mark.parametrize("shape", ["TP1", "TP2xPP2"])
def test_a_leader_without_a_rank_leads_them_all(shape: str, make: MakeReplica, tmp_path: Path) -> None:
    spec = SHAPES.get(shape, spec_of())
    l3 = f"file://{tmp_path}/l3?shared=1"
    first = make(spec, l3=l3, leads_only=True)
    assert first.serve(prompt(5)).by_source["computed"] == 5 * PAGE + 1
    first.settle()
    assert first.serve(prompt(5)).by_source["l1"] == 5 * PAGE
    with pytest.raises(UsageError, match="this leader has no rank"):
        first.cache.l1  # noqa: B018
    first.close()
    second = make(spec, l3=l3, leads_only=True)
    assert second.serve(prompt(5)).by_source["l3"] == 5 * PAGE
    second.workers[0].signal(signal.SIGKILL)
    request, restored = second.cache.match(prompt(5)), second.cache.load
    assert restored(request, timeout_s=20).tokens == 0
    second.cache.release(request)
    assert 0 in second.cache.stats.ranks_lost
    faults.assert_nothing_leaked(second.cache)


@pytest.mark.parametrize("shape", ["TP2", "PP2", "PP2 led from elsewhere"])
def test_ranks_that_share_l1_among_pages_and_states_hold_what_was_computed(
    shape: str, make: MakeReplica, tmp_path: Path
) -> None:
    spec = SHAPES[shape.split(maxsplit=1)[0]]
    units = [arena_layout(spec, 1 << 20, stage=stage) for stage in range(spec.pp_size)]
    l1_bytes = 12 * max(unit.unit_bytes for unit in units)  # the rest of the room moves between pages and states
    arena = {"l1_bytes": l1_bytes, "l1_pages": 0, "l1_state_slots": 0, "leads_only": "elsewhere" in shape}
    replica = make(spec, l3=f"file://{tmp_path}/l3?shared=1", **arena)
    for seed in range(6):
        replica.serve(prompt(1 + seed % 3, seed=seed), snapshot=seed % 2 == 0)
        replica.settle()
    found = [replica.serve(prompt(1 + seed % 3, seed=seed)).tokens for seed in range(0, 6, 2)]
    assert found == [(1 + seed % 3) * PAGE for seed in range(0, 6, 2)]
    faults.assert_nothing_leaked(replica.cache)


def test_ranks_may_meet_over_tcp(make: MakeReplica) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    spec = spec_of(2)
    replica = make(spec, ranks=Ranks(f"tcp://127.0.0.1:{port}", token="of this replica", start_timeout_s=60.0))
    assert replica.serve(prompt(2)).tokens == 0
    replica.settle()
    assert replica.serve(prompt(2)).by_source["l1"] == 2 * PAGE


def test_a_rank_of_another_model_is_refused_with_what_differs(tmp_path: Path) -> None:
    ranks = Ranks(f"unix://{tmp_path}/ranks.sock", start_timeout_s=10.0)
    leader = RankProcess(WorkerSettings(spec_of(2), 0, ranks, {"l1_pages": 8, "l1_state_slots": 8}))
    try:
        for other, settings, reason in (
            (dataclasses.replace(spec_of(2), revision="s"), {}, "revision: 'r' != 's'"),
            (spec_of(4), {}, "tp_size: 2 != 4"),
            (spec_of(2), {"l1_pages": 9}, r"l1_slots: \(8, 8, 8\) != \(9, 9, 8\)"),
            (spec_of(2), {"l2_bytes": 1 << 20}, "l2_slots"),
            (spec_of(2), {"l1_pages": 0, "l1_state_slots": 0, "l1_bytes": 1 << 16}, "l1_bytes: 0 != 65536"),
            (spec_of(2), {"rank": 0}, r"rank 0: this leader waits for ranks \[1\]"),
        ):
            sizes = {"rank": 1, "l1_pages": 8, "l1_state_slots": 8} | settings
            with pytest.raises(ConfigError, match=reason):
                RankWorker.open(other, leader=ranks, **sizes)
        with RankWorker.open(spec_of(2), rank=1, leader=ranks, l1_pages=8, l1_state_slots=8):
            leader.ready()
    finally:
        leader.end()


def test_a_leader_of_several_ranks_says_what_it_needs() -> None:
    with pytest.raises(ConfigError, match="ranks = None"):
        HiCache.open(spec_of(2), l1_pages=8, l1_state_slots=8)
    with pytest.raises(SpecError, match="rank = 2"):
        RankWorker.open(spec_of(2), rank=2, leader=Ranks("unix:///nowhere"), l1_pages=8, l1_state_slots=8)
    nowhere = Ranks("unix:///nowhere", start_timeout_s=0.1)
    with pytest.raises(ConfigError, match=r"leader.address = 'unix:///nowhere'.*waits for its ranks"):
        RankWorker.open(spec_of(2), rank=1, leader=nowhere, l1_pages=8, l1_state_slots=8, l2_bytes=1 << 20)
