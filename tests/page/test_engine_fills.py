"""Engines tell hicached how full their L1 and L2 are, and hicached tells the sums."""

from __future__ import annotations

from contextlib import ExitStack, closing

import grpc
import pytest

from hicache.admin.status import Tier
from hicache.daemon.tier_fills import CAPACITY_BYTES_MAX, TierFill, sum_fills
from hicache.wire import hicached_pb2 as pb
from tests.core.small_engine import HYBRID, PAGE, SmallEngine
from tests.daemon.client import Client, refusal_code
from tests.daemon.conftest import ThreadedDaemon
from tests.page.test_status import fresh


def tiers(daemon: ThreadedDaemon, engines: int) -> dict[str, Tier]:
    """By name, once so many engines have reported."""

    def all_reported(found: object) -> bool:
        return [tier.engines for tier in found.tiers if tier.name != "l3"] == [engines] * 2 * bool(engines)  # type: ignore[attr-defined]

    return {tier.name: tier for tier in fresh(daemon, all_reported).tiers}


def test_the_tiers_of_all_engines_are_summed_and_go_with_them(daemon: ThreadedDaemon) -> None:
    with ExitStack() as stack:
        engines = [
            stack.enter_context(closing(SmallEngine(HYBRID, address=f"unix://{daemon.config.socket}", **settings)))
            for settings in ({"l1": 32, "l2": 16}, {"l1_bytes": 1 << 20, "l2": 16})
        ]
        engines[0].serve(range(4 * PAGE))
        fills = [engine.cache._fills() for engine in engines]
        assert fills[0]["l1"][0] > 0
        assert fills[1]["l1"] == (0, 1 << 20), "an arena is as large as its bytes, whatever its groups could have"
        for engine in engines:  # what is due in some seconds is told now
            session = engine.cache.l3._supervisor.wait_session(timeout_s=20)  # type: ignore[union-attr]
            session.report(engine.cache._fills(), timeout_s=20)
        found = tiers(daemon, engines=2)
        assert list(found) == ["l1", "l2", "l3"]
        for name in ("l1", "l2"):
            used, capacity = (sum(part) for part in zip(*(fill[name] for fill in fills), strict=True))
            assert (found[name].used_bytes, found[name].capacity_bytes) == (used, capacity)
    assert list(tiers(daemon, engines=0)) == ["l3"]


def test_an_engine_reports_by_itself_from_the_start(daemon: ThreadedDaemon) -> None:
    with closing(SmallEngine(HYBRID, address=f"unix://{daemon.config.socket}")):
        assert tiers(daemon, engines=1)["l2"].capacity_bytes > 0


@pytest.mark.parametrize(
    "reported",
    [
        [("l3", 0, 1)],
        [("<img>", 0, 1)],
        [("l1", 0, 1), ("l1", 0, 1)],
        [("l1", 2, 1)],
        [("l1", 0, CAPACITY_BYTES_MAX + 1)],
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(
    daemon: ThreadedDaemon, reported: list[tuple[str, int, int]]
) -> None:
    with Client(daemon.target) as client:
        good = [pb.TierFill(name="l1", used_bytes=1, capacity_bytes=2)]
        client.stub.Report(pb.ReportRequest(session_secret=client.secret, tiers=good), timeout=10)
        bad = [pb.TierFill(name=name, used_bytes=used, capacity_bytes=capacity) for name, used, capacity in reported]
        with pytest.raises(grpc.RpcError) as refused:
            client.stub.Report(pb.ReportRequest(session_secret=client.secret, tiers=bad), timeout=10)
        assert refusal_code(refused.value) == "MALFORMED"
        [l1, _] = fresh(daemon, lambda status: len(status.tiers) == 2).tiers
        assert (l1.used_bytes, l1.capacity_bytes, l1.engines) == (1, 2, 1)


def test_sums_are_by_tier_and_in_their_order() -> None:
    assert sum_fills([{"l2": TierFill(1, 2)}, {"l1": TierFill(3, 4), "l2": TierFill(5, 6)}, {}]) == {
        "l1": TierFill(3, 4, 1),
        "l2": TierFill(6, 8, 2),
    }
