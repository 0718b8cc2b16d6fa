"""Ranks in real processes: stored, started again, restored from L3, and every byte of every rank compared."""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path

import pytest

from bench.rank_process import RankProcess, WorkerSettings
from bench.rank_replica import Replica
from hicache.cache import HiCache
from hicache.errors import ConfigError
from hicache.keys import object_key
from hicache.outcome import Outcome
from hicache.ranks.settings import Ranks
from hicache.ranks.worker import RankWorker
from tests.client.hicached import HicachedProcess
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


def test_what_tp2_has_stored_in_hicached_serves_tp1_and_tp4(make: MakeReplica, tmp_path: Path) -> None:
    daemon = HicachedProcess(tmp_path)
    daemon.start()
    try:
        writer = make(spec_of(2, lcm=4), l3=daemon.address)
        assert writer.serve(prompt(5)).tokens == 0
        writer.settle()
        writer.close()
        for tp in (1, 4):
            reader = make(spec_of(tp, lcm=4), l3=daemon.address)
            assert reader.serve(prompt(5)).by_source["l3"] == 5 * PAGE  # and compares it with a re-shard in torch
            reader.settle()
            if tp == 1:
                assert_stored_once(reader)
            reader.close()
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
        ):
            sizes = {"l1_pages": 8, "l1_state_slots": 8} | settings
            with pytest.raises(ConfigError, match=reason):
                RankWorker.open(other, rank=1, leader=ranks, **sizes)
        with RankWorker.open(spec_of(2), rank=1, leader=ranks, l1_pages=8, l1_state_slots=8):
            leader.ready()
    finally:
        leader.end()


def test_a_leader_of_several_ranks_says_what_it_needs() -> None:
    with pytest.raises(ConfigError, match="ranks = None"):
        HiCache.open(spec_of(2), l1_pages=8, l1_state_slots=8)
    with pytest.raises(ConfigError, match="rank = 0"):
        RankWorker.open(spec_of(2), rank=0, leader=Ranks("unix:///nowhere"), l1_pages=8, l1_state_slots=8)
    nowhere = Ranks("unix:///nowhere", start_timeout_s=0.1)
    with pytest.raises(ConfigError, match=r"leader.address = 'unix:///nowhere'.*waits for its ranks"):
        RankWorker.open(spec_of(2), rank=1, leader=nowhere, l1_pages=8, l1_state_slots=8, l2_bytes=1 << 20)
