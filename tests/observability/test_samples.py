"""What the store counts reaches an engine's metrics once, and under a registered name."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from hicache.breaker import BreakerState, BreakerStatus
from hicache.client.status import L3Status, OperationCounts
from hicache.client.supervisor import ClientState
from hicache.connectors.vllm_scheduler import Counts
from hicache.outcome import Outcome
from hicache.samples import METRICS, Increments, Samples, add, l3_samples_of, samples_of
from hicache.stats import DirectoryStats


def stats() -> DirectoryStats:
    counted = DirectoryStats(object_bytes=(100, 10), requests=3)
    counted.tokens_by_source.update({"l2": 64, "l3": 128, "computed": 32})
    counted.prefetch_dropped["late"] += 64
    counted.prefetch_declined["short"] += 1
    counted.count("fetch", [0, 1], [Outcome.OK, Outcome.CORRUPT])
    counted.skipped["busy"] += 2
    counted.tokens_lost["l1.attention"] += 64
    return counted


def status(*, state: ClientState = ClientState.READY) -> L3Status:
    gets = OperationCounts(2, {Outcome.OK: 3, Outcome.ABSENT: 1}, {Outcome.OK: 300, Outcome.ABSENT: 100})
    return L3Status(
        address="unix:///x",
        state=state,
        reason="",
        refusal="",
        breaker=BreakerStatus(BreakerState.CLOSED, 0, 0.0, 0, 0, 0, 0, 0),
        bulk="bounce",
        bulk_reason="",
        tenant="t",
        daemon_version="1",
        store_id=b"",
        sessions_opened=1,
        regions_draining=0,
        items_in_doubt=0,
        refusals={"OVER_LIMIT": 2},
        operations={"get": gets},
    )


def all_samples(counted: DirectoryStats, *, state: ClientState = ClientState.READY) -> Samples:
    return samples_of(counted) | l3_samples_of(status(state=state), rank=3)


def test_every_sample_is_of_a_registered_metric_with_all_its_labels() -> None:
    registered = {metric.name: metric.labels for metric in METRICS}
    samples = all_samples(stats())
    assert {name: len(labels) for name, *labels in samples} == {name: len(registered[name]) for name, *_ in samples}
    assert {name for name, *_ in samples} | set(Counts.__slots__) == set(registered)  # those that the connector adds


def test_every_metric_is_documented_with_its_labels() -> None:
    text = (Path(__file__).parents[2] / "docs" / "vllm_metrics.md").read_text()
    rows = re.findall(r"^\| `vllm:hicache_(\w+)` \| (.*?) ?\| (gauge)?", text, re.MULTILINE)
    documented = {(name, tuple(re.findall(r"`(\w+)`", labels)), bool(gauge)) for name, labels, gauge in rows}
    assert documented == {(metric.name, metric.labels, metric.is_gauge) for metric in METRICS}


def test_counts_stand_under_their_labels() -> None:
    samples = all_samples(stats())
    assert samples["tokens", "l3"] == 128
    assert samples["objects", "fetch", "corrupt"] == 1
    assert samples["bytes", "fetch"] == 100
    assert samples["l3_objects", "get", "absent"] == 1
    assert samples["l3_bytes", "get"] == 300
    assert samples["l3_ready", "3"] == 1
    assert all_samples(stats(), state=ClientState.CONNECTING)["l3_ready", "3"] == 0


def test_increments_are_sent_once_and_gauges_only_when_they_differ() -> None:
    increments = Increments()
    counted = stats()
    assert increments.take(all_samples(counted))["tokens", "l3"] == 128
    assert increments.take(all_samples(counted)) == {}
    counted.tokens_by_source["l3"] += 1
    changed = increments.take(all_samples(counted, state=ClientState.CONNECTING))
    assert changed == {("tokens", "l3"): 1, ("l3_ready", "3"): 0}


@given(st.lists(st.dictionaries(st.sampled_from(["l2", "l3", "computed"]), st.integers(0, 9)), max_size=12))
def test_increments_add_up_to_what_was_counted(steps: list[dict[str, int]]) -> None:
    counted = DirectoryStats(object_bytes=(1,))
    increments = Increments()
    total: Samples = {}
    for step in steps:
        counted.tokens_by_source.update(step)
        counted.prefetch_in_flight = sum(step.values())
        add(total, increments.take(samples_of(counted)))
    assert {key: value for key, value in total.items() if value} == {
        key: value for key, value in samples_of(counted).items() if value
    }
