"""Hangs: a pool of a hybrid model that L3 does not answer for, with a real daemon and real pools."""

from __future__ import annotations

from typing import get_args

import pytest

from hicache.backends.faulty import Fault, FaultKind
from hicache.keys import object_key
from hicache.policies.prefetch import PrefetchMode, PrefetchPolicy
from hicache.spec import Group
from hicache.tenancy import tenant_digest
from tests.core.small_engine import ATTENTION, PAGE, STATE, SmallEngine, prompt
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.rig import wait_until

GROUPS: tuple[Group, ...] = (ATTENTION, STATE)
PATIENCE_S = 0.1


def connected(daemon: ThreadedDaemon, **settings: object) -> SmallEngine:
    engine = SmallEngine(GROUPS, address=f"unix://{daemon.config.socket}", **settings)  # type: ignore[arg-type]
    assert engine.cache.l3 is not None
    assert engine.cache.l3.wait_ready(timeout_s=20)
    return engine


@pytest.mark.parametrize("mode", get_args(PrefetchMode))
@pytest.mark.parametrize("stalled", [(0,), (1,), (0, 1)], ids=["main", "side", "both"])
def test_br_034_a_pool_that_stalls_ends_the_wait_at_the_deadline_and_drains_later(
    daemon: ThreadedDaemon, mode: PrefetchMode, stalled: tuple[int, ...]
) -> None:
    writer = connected(daemon)
    writer.serve(prompt(6))
    writer.settle()
    policy = PrefetchPolicy(
        mode, threshold_tokens=0, base_s=PATIENCE_S, per_ki_token_s=0.0, hard_cap_s=PATIENCE_S, grace_s=0.0
    )
    reader = connected(daemon, prefetch=policy)
    request = reader.cache.match(prompt(6))
    names = (object_key(key, group=group, shard=0) for key in request._record.keys for group in stalled)
    stall = Fault(FaultKind.LATE, keys=frozenset(tenant_digest("default") + name for name in names))
    daemon.backend.arm("get_into", stall)
    reader.cache.prefetch(request)
    if mode != "best_effort":
        wait_until(stall.entered.is_set, what="the get is in the backend")
    assert reader.cache.wait(request) is False, "it ends, and not because all has come"
    restored = reader.cache.load(request)
    assert restored is not None
    assert restored.tokens == 0, "what one pool lacks is no prefix"
    reader.compute(request, prompt(6), 0)
    reader.cache.release(request)
    other = prompt(6, seed=1)
    assert reader.serve(other).tokens == 0  # whose slots the late bytes must not touch
    daemon.backend.disarm()
    reader.settle()
    assert reader.serve(other).tokens == 6 * PAGE
    assert reader.serve(prompt(6)).tokens == 6 * PAGE
    assert reader.cache.stats.prefetch_in_flight == 0
    reader.close()
    writer.close()
