"""Group J: what is counted is what happened, in a bounded number of series without a secret."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

from hicache.daemon.tenant_labels import OTHER, TenantLabels
from hicache.node import Tier
from tests.core.situations import evict_all, prompt
from tests.core.world import FULL, STATE, WINDOW, World
from tests.daemon.client import Client
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.raw_links import object_key
from tests.daemon.rig import http_get
from tests.observability.conservation import read_scrape, total, values_of
from tests.observability.test_daemon_conservation import look


def test_br_110_a_hundred_thousand_tenants_are_a_few_series() -> None:
    labels = TenantLabels(20)
    numbers: dict[str, float] = {}
    for batch in range(10):
        numbers |= {f"tenant{number}": 1.0 for number in range(batch * 10_000, (batch + 1) * 10_000)}
        for _ in range(2):
            now = labels.counters("requests", numbers)
    assert len(now) == 21
    assert now[(OTHER,)] == 100_000 - 20
    assert now[("tenant3",)] == 1
    numbers.clear()
    assert labels.gauges(numbers) == {}
    assert labels.counters("requests", numbers) == {(OTHER,): 100_000 - 20}
    assert not labels._labels, "those who have gone are forgotten"


def test_br_110_a_scrape_of_many_tenants_is_bounded_and_has_no_secret(
    start_thread: Callable[..., ThreadedDaemon], folder: Path
) -> None:
    tenants = [f"tenant{number}" for number in range(300)]
    (folder / "tenants").write_text("".join(f"{name} secret-token-of-{name}\n" for name in tenants))
    daemon = start_thread(tenants_file=str(folder / "tenants"), metrics_tenants_max=3)
    for name in tenants[:6]:
        with Client(
            daemon.target, token=f"secret-token-of-{name}", name="client-name", salt_fingerprint=b"q" * 16
        ) as one:
            one.put_stream([object_key(1)], [b"x"])
    _, text = http_get(daemon.ready.http, "/metrics")
    scrape = read_scrape(text)
    assert values_of(scrape, "hicache_tenant_objects", "tenant") == {"tenant0", "tenant1", "tenant2", OTHER}
    assert total(scrape, "hicache_tenant_objects", tenant=OTHER) == 3
    assert len(text) < 100_000
    for secret in ("secret-token", "client-name", object_key(1).hex(), "qqqq"):
        assert secret not in text


def test_br_111_every_counter_of_a_leg_moves_with_its_bytes() -> None:
    world = World((FULL, WINDOW, STATE), l1=20, l2=20, prefetch_l2_share=1.0)
    world.serve(prompt(4))
    world.serve(prompt(4))
    evict_all(world, Tier.L1)
    evict_all(world, Tier.L2)
    world.serve(prompt(4))
    stats = world.directory.stats
    for leg in ("backup", "store", "fetch", "load", "snapshot", "restore", "reset"):
        assert stats.objects[f"{leg}.ok"] > 0
        assert stats.bytes_moved[leg] > 0
    assert stats.objects["lookup.ok"] > 0
    assert stats.bytes_moved["lookup"] == 0
    assert all(sum(by_group) > 0 for by_group in world.directory.index.evicted)


def test_br_112_counters_tell_the_truth_about_hits_among_probes(daemon: ThreadedDaemon, folder: Path) -> None:
    """Ratios are left to the query: no gauge of the last batch."""
    hits = misses = 0
    rng = Random(1)
    with Client(daemon.target) as client:
        client.put_stream([object_key(number) for number in range(20)], [b"x"] * 20)
        for _ in range(50):
            keys = [object_key(rng.randrange(40)) for _ in range(rng.randrange(1, 20))]
            found = client.present(keys)
            hits, misses = hits + sum(found), misses + len(found) - sum(found)
            client.present([object_key(999)])  # a probe, which misses
            misses += 1
    now = look(daemon)
    assert total(now, "hicache_items_total", method="Lookup", outcome="ok") == hits
    assert total(now, "hicache_items_total", method="Lookup", outcome="absent") == misses
    assert not [name for name in now if "ratio" in name or "hit_rate" in name]
