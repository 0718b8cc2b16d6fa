"""However many tenants there are, metrics stay bounded, tell no secret, and no counter goes down."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from hicache.daemon.tenant_labels import OTHER, TenantLabels
from tests.daemon.client import Client
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.raw_links import object_key
from tests.daemon.rig import http_get
from tests.observability.conservation import read_scrape, total

TENANTS = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 5), max_size=8)


@given(lives=st.lists(TENANTS, max_size=20), tenants_max=st.integers(0, 4))
def test_no_counter_goes_down_whoever_comes_and_goes(lives: list[dict[str, int]], tenants_max: int) -> None:
    labels = TenantLabels(tenants_max)
    counted: dict[str, float] = {}
    before: dict[tuple[str, ...], float] = {}
    for life in lives:
        gone = counted.keys() - life.keys()
        counted = {name: counted.get(name, 0.0) + growth for name, growth in life.items()}
        now = labels.counters("x", counted)
        assert len(now) <= tenants_max + 1
        for label, value in before.items():
            if label[0] not in gone:
                assert now[label] >= value, "it fell"
        before = dict(now)
        gauges = labels.gauges(counted)
        assert sum(gauges.values()) == sum(counted.values())
        assert {label for (label,) in gauges} <= {*counted, OTHER}
        assert len(gauges) <= tenants_max + 1


def test_no_name_of_a_tenant_is_told_where_none_is_wanted(
    start_thread: Callable[..., ThreadedDaemon], two_tenants: str
) -> None:
    daemon = start_thread(tenants_file=two_tenants, metrics_tenants_max=0)
    with Client(daemon.target, token="alice-token-0123456789") as alice:
        alice.put_stream([object_key(1)], [b"x"])
    _, text = http_get(daemon.ready.http, "/metrics")
    assert "alice" not in text
    assert total(read_scrape(text), "hicache_tenant_objects", tenant=OTHER) == 1
