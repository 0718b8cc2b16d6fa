"""Replays in time: the hits of a replay without, what waits for what, and what read policies make of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.admission.options import Load, PolicyChoice, TierChoice
from bench.admission.queueing import Queueing
from bench.admission.replay import TierSpec, replay
from bench.admission.tasks import ReplayTask, Setup
from bench.admission.timed import groups_needed, load_rule, timed_replay
from bench.admission.traces import Trace, TraceRequest
from hicache.costs.machine import Tier
from hicache.costs.model import ModelCosts, Prefill
from tests.admission.synthetic import BLOCK, conversations

FAST = ModelCosts(Prefill(token_s=0.001, pair_s=0.0), {"L2": Tier(bytes_per_s=1e6), "L3": Tier(bytes_per_s=1e6)}, 1)
SLOW = replace(FAST, tiers={"L2": Tier(bytes_per_s=1e6), "L3": Tier(bytes_per_s=100.0, shared=True)})
TIERS = [TierSpec("L1", 10), TierSpec("L2", 30), TierSpec("L3", 200)]


@pytest.mark.parametrize("load", [Load(), Load(speedup=50.0), Load(saturated=True)])
def test_one_group_finds_in_time_what_a_replay_finds_without(load: Load) -> None:
    trace = conversations(1)
    timed = timed_replay(trace, TIERS, FAST, Queueing(), load)
    assert timed["token_hit_share"] == replay(trace, TIERS).token_hit_share
    assert timed["requests"] == 300


def test_bytes_of_tiers_are_those_of_what_was_taken_and_written() -> None:
    trace = conversations(2)
    timed, counted = timed_replay(trace, TIERS, FAST, Queueing(), Load()), replay(trace, TIERS, costs=FAST)
    for tier in counted.tiers[1:]:
        moved = tier.used_tokens + tier.bytes_written
        assert timed["tier_busy_s"][tier.name] == pytest.approx(moved / 1e6)
    saved_s = 0.001 * counted.usable_tokens
    loaded_s = sum(tier.used_tokens for tier in counted.tiers[1:]) / 1e6
    assert timed["gpu_busy_s"] == pytest.approx(0.001 * counted.input_tokens - saved_s + loaded_s, rel=0.02)


def test_what_takes_longer_to_load_than_to_compute_is_computed() -> None:
    """Always loading from a slow tier finds more, and everybody waits longer (checks 12 and 20)."""
    trace = conversations(3)
    tiers = [TierSpec("L3", 200)]
    how = Queueing()
    always, latency, never = (
        timed_replay(trace, tiers, SLOW, how, Load(), read=read) for read in ("always", "latency", "never")
    )
    assert always["token_hit_share"] > latency["token_hit_share"] == never["token_hit_share"] == 0.0
    assert always["ttft_s"]["mean"] > 2 * never["ttft_s"]["mean"]
    assert always["tokens_per_s"] <= never["tokens_per_s"]
    assert timed_replay(trace, (), SLOW, how, Load())["ttft_s"] == never["ttft_s"], "writes alone delay nobody"


def test_a_busy_tier_is_read_less() -> None:
    """The break-even counts what is queued before a load: a burst of writes keeps everybody from reading."""
    trace = conversations(4)
    busy = replace(FAST, tiers={"L3": Tier(bytes_per_s=2000.0, shared=True)})
    calm, rush = (
        timed_replay(trace, [TierSpec("L3", 200)], busy, Queueing(), Load(speedup=speedup), read="latency")
        for speedup in (1e-3, 1e3)
    )
    assert calm["token_hit_share"] > rush["token_hit_share"]


def test_what_is_in_gpu_memory_is_never_loaded() -> None:
    rule = load_rule("never", FAST, BLOCK)
    assert rule is not None
    request = TraceRequest(0.0, 100, 1, (0,))
    assert rule("L1", 16, 64, request, 0.0) == 48
    assert rule("L2", 16, 64, request, 0.0) == 0
    assert load_rule("always", FAST, BLOCK) is None


def test_clients_take_the_turns_of_a_session_one_after_another() -> None:
    turns = [TraceRequest(0.0, 16, 11, (0,), session="a"), TraceRequest(0.0, 32, 11, (0, 1), session="a", think_s=5.0)]
    how = Queueing(decode_token_s=0.1)
    timed = timed_replay(Trace("turns", BLOCK, turns, 2), [TierSpec("L1", None)], FAST, how, Load(clients=2))
    assert timed["span_s"] == pytest.approx(0.016 + 1.0 + 5.0 + 0.016 + 1.0)


def test_there_are_as_many_groups_as_computing_everything_needs() -> None:
    requests = [TraceRequest(float(number), 2000, 1, range(125)) for number in range(11)]
    assert groups_needed(Trace("busy", BLOCK, requests, 125), FAST) == 3, "22 s of work in 10 s, at 80 %"
    assert groups_needed(Trace("one", BLOCK, requests[:1], 125), FAST) == 1


def test_a_row_has_all_figures_of_a_policy() -> None:
    setup = Setup(costs=FAST, tiers=(TierChoice("L1", 160), TierChoice("L3")), loads=(Load(), Load(saturated=True)))
    task = ReplayTask(setup=setup, trace_number=0, policy=PolicyChoice("lru"), capacity_tokens=3200)
    row = task.run(conversations(5))
    assert (row["capacity_pages"], row["total_pages"]) == (200, 210)
    assert [tier["name"] for tier in row["tiers"]] == ["L1", "L3"]
    assert 0.5 < row["fairness"] <= 1
    l3 = row["tiers"][1]
    assert l3["drive_writes_per_day"] == pytest.approx(l3["bytes_written"] / row["span_s"] * 86_400 / 7.68e12)
    assert [timed["load"] for timed in row["queueing"]] == ["x1", "saturated"]
    assert row["queueing"][1]["tokens_per_s"] > row["queueing"][0]["tokens_per_s"]
