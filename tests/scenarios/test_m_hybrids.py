"""Group M: attention and state come back together, or neither does."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from hicache.errors import StateNotCommitted
from hicache.outcome import Outcome
from tests.core.small_engine import ATTENTION, HYBRID, PAGE, STATE, WINDOW, Make, SmallEngine, by_source, prompt
from tests.core.test_cache_snapshots import NAN, snapshot_slots

PAGES = 5


def object_of(engine: SmallEngine, tokens: Sequence[int], *, page: int, group: int) -> bytes:
    """The key in L3 of one group's part of a page."""
    keys = engine.cache._keys
    block_key = keys.chain(tokens, parent=keys.root())[page]
    [name] = [name for name in objects_of(engine) if name.startswith(block_key) and name[-4:-2] == bytes([0, group])]
    return name


def objects_of(engine: SmallEngine) -> dict[bytes, tuple[int, bytes]]:
    assert engine.l3 is not None
    return engine.l3.objects


def test_br_142_a_state_that_the_engine_did_not_write_is_no_snapshot() -> None:
    """With double buffering: a kernel that writes to nowhere leaves NaN in the slot that the request goes on in."""
    engine = SmallEngine((ATTENTION, STATE), double_buffering=True)
    engine.serve(prompt(2))
    for slot in range(32):
        if slot not in snapshot_slots(engine):
            for state in engine.cache.l1.state[1].values():
                state[:, slot] = NAN
    request = engine.cache.match(prompt(4))
    assert engine.cache.load(request) is not None
    assert engine.cache.extend(request, tokens=3 * PAGE)
    with pytest.raises(StateNotCommitted, match="call state_moved after the step that wrote state_slot"):
        engine.cache.store(request, computed=3 * PAGE, state_at=3 * PAGE)
    engine.cache.release(request)
    engine.settle()
    assert engine.serve(prompt(4)).tokens == 2 * PAGE  # which checks every byte
    engine.close()


@pytest.mark.parametrize("boundary", range(1, PAGES + 1))
@pytest.mark.parametrize("leg", [ATTENTION, WINDOW, STATE], ids=lambda leg: leg.name)
@pytest.mark.parametrize("trouble", ["missing", "corrupt", "of another boundary", "fails", "late"])
def test_br_139_one_leg_that_fails_at_a_hand_over_costs_its_boundary_and_nothing_is_half_used(
    trouble: str, leg: object, boundary: int, make: Make
) -> None:
    prefill = make(objects={})
    request = prefill.cache.match(prompt(boundary))
    assert prefill.cache.load(request) is not None
    prefill.compute(request, prompt(boundary), 0)
    assert prefill.cache.wait_stored(request, timeout_s=20).tokens == boundary * PAGE
    prefill.cache.release(request)
    group = HYBRID.index(leg)  # type: ignore[arg-type]  # one of them
    harmed = object_of(prefill, prompt(boundary), page=boundary - 1, group=group)
    decode = make(objects=objects_of(prefill))
    assert decode.l3 is not None
    objects = objects_of(prefill)
    match trouble:
        case "missing":
            del objects[harmed]
        case "corrupt":
            checksum, payload = objects[harmed]
            objects[harmed] = checksum, bytes([payload[0] ^ 1]) + payload[1:]
        case "of another boundary":
            other = make(objects={})
            other.serve(prompt(1, seed=9))
            other.settle()
            objects[harmed] = objects_of(other)[object_of(other, prompt(1, seed=9), page=0, group=group)]
        case "fails":
            decode.l3.fault = lambda operation, key: Outcome.IO_ERROR if (operation, key) == ("get", harmed) else None
        case "late":
            decode.l3.fault = lambda operation, key: Outcome.DEADLINE if (operation, key) == ("get", harmed) else None
    restored = decode.serve(prompt(boundary))  # checks every byte of pages and states
    assert restored.tokens == (boundary - 1) * PAGE
    assert restored.by_source == by_source(l3=(boundary - 1) * PAGE, computed=PAGE + 1)
    decode.settle()
    assert decode.cache.stats.prefetch_in_flight == 0
    assert decode.serve(prompt(boundary)).tokens == boundary * PAGE, "what the decode side computed is whole"


@pytest.mark.parametrize("boundary", range(1, PAGES + 1))
def test_br_142_a_snapshot_slot_that_was_never_written_is_no_snapshot_and_its_nan_reaches_nobody(
    boundary: int, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every free slot is full of NaN, and the copy into the snapshot of one boundary fails before it writes."""
    prefill = make(objects={})
    for field in prefill.cache.l1.state[HYBRID.index(STATE)].values():
        field[:] = torch.nan
    copies = prefill.cache._replica.executor._copies
    snapshot, taken = copies.snapshot, []

    def forgets_one(group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        taken.append(targets)
        if len(taken) == boundary:
            raise RuntimeError("the snapshot was not written")
        snapshot(group, sources, targets)

    monkeypatch.setattr(copies, "snapshot", forgets_one)
    request = prefill.cache.match(prompt(PAGES))
    assert prefill.cache.load(request) is not None
    prefill.compute(request, prompt(PAGES), 0)
    assert len(taken) == PAGES
    last = PAGES if boundary < PAGES else PAGES - 1
    assert prefill.cache.wait_stored(request, timeout_s=20).tokens == last * PAGE
    prefill.cache.release(request)
    short = prompt(PAGES)[: boundary * PAGE + 1]
    for engine in (prefill, make(objects=objects_of(prefill))):
        assert engine.serve(short, snapshot=False).tokens == (boundary - 1) * PAGE
        engine.settle()
    states = [payload for key, (_, payload) in objects_of(prefill).items() if key[-3] == HYBRID.index(STATE)]
    assert len(states) == PAGES - 1
    assert not any(torch.frombuffer(bytearray(state), dtype=torch.float32).isnan().any() for state in states)
