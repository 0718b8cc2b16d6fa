"""The object store: the order of use is written down, and outlives a restart."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hicache.backends.faulty import Fault, FaultKind
from hicache.backends.recency_writer import TOUCH_INTERVAL_S
from hicache.outcome import Outcome
from tests.backends.payloads import key, scanned
from tests.backends.store_rig import Rig, fill


def test_recency_is_written_at_most_once_per_interval(rig: Rig) -> None:
    touched = Fault(FaultKind.DELAY)
    rig.faulty.arm("touch", touched)
    rig.put(1)
    rig.store.lookup([key(1)])
    rig.put(2)
    rig.clock.now_s += TOUCH_INTERVAL_S - 1
    rig.put(3)
    assert rig.store._recency.worker.queued_count == 0
    assert not touched.entered.is_set()
    rig.clock.now_s += 1
    rig.put(4)
    assert touched.entered.wait(timeout=30)


def test_gets_and_puts_do_not_wait_for_times_of_use(rig: Rig) -> None:
    rig.put(1)
    rig.store.lookup([key(1)])
    stuck = rig.faulty.arm("touch", Fault(FaultKind.NEVER))
    rig.clock.now_s += TOUCH_INTERVAL_S
    assert rig.get(1) is Outcome.OK
    assert stuck.entered.wait(timeout=30)
    for number in range(10):
        rig.clock.now_s += TOUCH_INTERVAL_S
        assert rig.get(1) is Outcome.OK
        assert rig.put(100 + number) == [Outcome.OK]
    assert rig.store._recency.worker.queued_count <= 1
    rig.faulty.disarm()


def test_a_close_does_not_wait_for_ever_for_times_of_use(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache.backends.recency_writer.TOUCH_CLOSE_S", 0.05)
    rig.put(1)
    rig.store.lookup([key(1)])
    stuck = rig.faulty.arm("touch", Fault(FaultKind.NEVER))
    rig.clock.now_s += TOUCH_INTERVAL_S
    assert rig.get(1) is Outcome.OK
    assert stuck.entered.wait(timeout=30)
    rig.store.close()
    rig.faulty.disarm()


def test_times_of_use_are_written_in_bounded_calls_and_keep_their_order(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hicache.backends.recency_writer.TOUCH_KEYS_MAX", 4)
    fill(rig, 10)
    rig.clock.now_s = 4_000_000_000.0
    rig.store.lookup([key(number) for number in range(10)])
    calls: list[int] = []
    touch = rig.faulty.touch

    def watched(used: Sequence[tuple[bytes, float]]) -> None:
        calls.append(len(used))
        touch(used)

    monkeypatch.setattr(rig.faulty, "touch", watched)
    rig.store.persist_recency()
    assert calls == [4, 4, 2]
    told = sorted(scanned(rig.files), key=lambda stored: -stored.used_at_s)
    assert [stored.key for stored in told] == [key(number) for number in range(10)]
