"""Attention and state as one through real pools and a real executor: whatever fails, both are of one boundary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from hicache.cache import HiCache
from hicache.errors import ConfigError, UsageError
from hicache.policies.snapshot import SnapshotPolicy
from hicache.spec import CacheSpec
from tests.core.memory_l3 import Objects
from tests.core.small_engine import ATTENTION, HYBRID, PAGE, STATE, Make, SmallEngine, by_source, prompt
from tests.engine.fakes import FaultyCopies

NAN = float("nan")
RUBBISH = 1e30  # in the rings of live states


class _Failed(Exception):
    """A copy that does not work."""


@pytest.fixture(params=[False, True], ids=["copied", "double buffered"])
def double_buffering(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def engine(double_buffering: bool) -> Iterator[SmallEngine]:
    engine = SmallEngine((ATTENTION, STATE), objects={}, double_buffering=double_buffering)
    yield engine
    engine.close()


def break_copies(engine: SmallEngine, *broken: tuple[str, int]) -> FaultyCopies:
    """These (leg, group) fail from now on."""
    executor = engine.cache._replica.executor

    def before(leg: str, group: int, targets: Sequence[int]) -> None:
        if (leg, group) in broken:
            raise _Failed

    executor._copies = FaultyCopies(executor._copies, before=before)
    return executor._copies


def mend_copies(engine: SmallEngine) -> None:
    faulty = engine.cache._replica.executor._copies
    assert isinstance(faulty, FaultyCopies)
    engine.cache._replica.executor._copies = faulty.inner


def leave_l1(engine: SmallEngine) -> None:
    """Everything goes from L1 and stays in L2."""
    engine.settle()
    index = engine.cache._directory.index
    for group in range(len(engine.spec.groups)):
        handles = index.acquire(0, group, index.pools[0][group].capacity)
        assert handles is not None
        index.release(0, group, handles)


@pytest.mark.parametrize("boundary", range(1, 6))
@pytest.mark.parametrize("leg", [("load", 0), ("load", 1)], ids=["attention", "state"])
def test_br_139_a_leg_that_fails_is_a_miss_for_both_and_frees_all_slots(
    leg: tuple[str, int], boundary: int, double_buffering: bool
) -> None:
    engine = SmallEngine((ATTENTION, STATE), double_buffering=double_buffering)
    engine.serve(prompt(boundary))
    leave_l1(engine)
    break_copies(engine, leg)
    request = engine.cache.match(prompt(boundary))
    restored = engine.cache.load(request)
    assert restored is not None
    assert restored.tokens == 0
    engine.check(request, prompt(boundary), 0)
    engine.cache.release(request)
    engine.settle()
    mend_copies(engine)
    assert engine.serve(prompt(boundary)).by_source == by_source(l2=boundary * PAGE)
    engine.close()


@pytest.mark.parametrize("broken", [{0}, {1}, {0, 1}], ids=["attention", "state", "both"])
def test_br_143_what_fails_is_recomputed_and_a_neighbour_on_the_same_pages_is_not_disturbed(
    broken: set[int], engine: SmallEngine
) -> None:
    engine.serve(prompt(6))
    leave_l1(engine)
    neighbour = engine.cache.match(prompt(3))
    assert engine.cache.load(neighbour) is not None
    shared = neighbour.page_table(0)
    break_copies(engine, *(("load", group) for group in broken))
    engine.serve(prompt(6))  # which checks what it restores, and computes the rest
    engine.check(neighbour, prompt(3), 3 * PAGE)
    assert neighbour.page_table(0) == shared
    engine.cache.release(neighbour)
    mend_copies(engine)
    engine.settle()
    assert engine.serve(prompt(6)).by_source == by_source(l1=6 * PAGE)


def test_br_142_a_snapshot_that_was_not_written_is_no_snapshot(engine: SmallEngine) -> None:
    """Every state slot of L1 holds NaN, and the copy into the snapshot never happens."""
    for state in engine.cache.l1.state[1].values():
        state.fill_(NAN)
    break_copies(engine, ("snapshot", 1), ("clear", 1))
    engine.serve(prompt(3))
    engine.settle()
    assert engine.serve(prompt(3)).tokens == 0  # which checks that nothing is left in the state
    mend_copies(engine)
    engine.serve(prompt(3))
    assert engine.serve(prompt(3)).tokens == 3 * PAGE  # the positive control


def snapshot_slots(engine: SmallEngine) -> set[int]:
    nodes = engine.cache._directory.index.nodes.values()
    entries = [node.entries[0][1] for node in nodes]
    return {entry.handle & 0xFFFFFFFF for entry in entries if entry is not None}


def test_the_rings_of_a_donated_slot_stay_in_it(double_buffering: bool) -> None:
    """A donated slot is full of rubbish in its ring: neither a restore nor anything below L1 ever shows it."""
    objects: Objects = {}
    engine = SmallEngine((ATTENTION, STATE), objects=objects, double_buffering=double_buffering)
    request = engine.cache.match(prompt(2))
    assert engine.cache.load(request) is not None
    assert engine.cache.extend(request, tokens=2 * PAGE)
    for end in (PAGE, 2 * PAGE):
        engine.write_page(request, prompt(2), end)
    engine.cache.state_moved(request)
    engine.cache.l1.state[1]["ring"][:, request.state_slot(1)] = RUBBISH
    engine.cache.store(request, computed=2 * PAGE, state_at=2 * PAGE, donate=True)
    engine.cache.release(request)
    engine.settle()
    assert engine.cache.stats.objects["donate.ok"] == 1
    assert engine.cache.stats.objects["snapshot.ok"] == 0
    needle = torch.tensor([RUBBISH]).numpy().tobytes()
    assert needle in engine.cache.l1.state[1]["ring"].numpy().tobytes()  # the positive control
    assert engine.cache.l2 is not None
    below = [engine.cache.l2.view(group).numpy().tobytes() for group in range(2)]
    below += [bytes(payload) for _, payload in objects.values()]
    assert len(below) == 2 + 3  # two pages, one state
    assert not any(needle in piece for piece in below)
    assert engine.serve(prompt(2)).by_source == by_source(l1=2 * PAGE)  # which checks that the ring is empty
    leave_l1(engine)
    assert engine.serve(prompt(2)).by_source == by_source(l2=2 * PAGE)
    engine.close()


def test_two_loads_of_one_snapshot_share_its_slot_and_no_other_one() -> None:
    engine = SmallEngine((ATTENTION, STATE), double_buffering=True)
    engine.serve(prompt(2))
    twins = [engine.cache.match(prompt(2)) for _ in range(2)]
    for request in twins:
        assert engine.cache.load(request) is not None
    assert twins[0].state_source(1) == twins[1].state_source(1)
    assert len({twins[0].state_slot(1), twins[1].state_slot(1), twins[0].state_source(1)}) == 3
    engine.cache.state_moved(twins[0])
    assert twins[0].state_source(1) == twins[0].state_slot(1)
    engine.check(twins[1], prompt(2), 2 * PAGE)
    for request in twins:
        engine.cache.release(request)
    assert engine.cache.stats.objects["restore.ok"] == 0
    engine.close()


def test_a_snapshot_policy_of_the_wrong_kind_is_named() -> None:
    spec = CacheSpec("m", "r", HYBRID, page_tokens=PAGE)
    with pytest.raises(ConfigError, match=r"snapshot_policy\.cap_per_path = 0"):
        HiCache.open(spec, l1_pages=4, l1_state_slots=4, snapshot_policy=SnapshotPolicy(cap_per_path=0))


@pytest.mark.parametrize(("computed", "until"), [(-8, 8), (8, 4), (-100, -50)])
def test_a_step_that_cannot_be_is_refused_when_asked_where_to_stop(computed: int, until: int, make: Make) -> None:
    engine = make()
    request = engine.cache.match(prompt(4))
    assert engine.cache.load(request) is not None
    with pytest.raises(UsageError, match=f"computed = {computed}, until = {until}: expected 0 <= computed <= until"):
        engine.cache.next_state_stop(request, computed=computed, until=until)
    with pytest.raises(UsageError, match="tokens = -1"):
        engine.cache.extend(request, tokens=-1)
    assert engine.cache.next_state_stop(request, computed=8, until=8) is None, "no step, no stop"
    engine.cache.release(request)
